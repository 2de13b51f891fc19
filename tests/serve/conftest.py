"""A server in a process of its own, as people start it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass
class Running:
    """A server.

    Attributes:
        process: its process.
        address: where it listens.
        log: its file.
    """

    process: subprocess.Popen[str]
    address: str
    log: Path

    def ask(
        self, path: str, body: Any = None, *, method: str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """The status, the headers and the body of an answer; the body is read as JSON where it is that."""
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(  # noqa: S310 (it is ours)
            self.address + path, content, headers or {}, method=method or ("GET" if content is None else "POST")
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
                status, told, found = answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as problem:
            status, told, found = problem.code, dict(problem.headers), problem.read()
        kind = told.get("content-type", "")
        return status, told, json.loads(found) if kind.startswith("application/json") else found.decode()

    def end(self) -> tuple[int, str]:
        """Send SIGTERM, and wait. Returns the exit code and the log."""
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)
        return self.process.returncode, self.log.read_text()


Start = Callable[..., Running]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts servers, which end with the module."""
    servers: list[Running] = []

    def started(*arguments: object) -> Running:
        command = [sys.executable, "-m", "tfm_export.cli", "serve", *map(str, arguments), "--port", "0"]
        environment, log = {**os.environ, "PYTHONUNBUFFERED": "1"}, tmp_path_factory.mktemp("server") / "log"
        with log.open("w") as file:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment, start_new_session=True
            )
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"listening at (\S+)\n", line)
        if found is None:
            process.communicate(timeout=10)
            raise AssertionError(line + log.read_text())
        servers.append(Running(process, found[1], log))
        return servers[-1]

    yield started
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
        server.process.communicate()


@pytest.fixture(scope="module")
def server(start: Start, tiny_bundle: Path) -> Running:
    """One with a bundle that is called tiny."""
    return start(tiny_bundle, "--name", "tiny", "--threads", 1, "--max-body", 4096, "--max-texts", 8)
