"""The example service: answers, errors, health, and that nothing which was taken is lost at the end."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import pytest

import tfm_export
from examples.embed_engine import service
from tests.skips import ON_LINUX, skip_if

ROOT = Path(__file__).parents[2]
TEXTS = ["hello", "parity", "a", "don't", "transformer", "x", "checkpoint", "graphene", "ab", "bundle"]


@pytest.fixture(scope="module")
def expected(tiny_bundle: Path) -> dict[str, str]:
    """What each text gives alone."""
    with tfm_export.load(tiny_bundle, device="cpu", threads=1) as model:
        return {text: model.generate(text).text for text in TEXTS}


def test_a_full_queue_and_a_closed_model_are_503(tiny_bundle: Path) -> None:
    model = tfm_export.load(tiny_bundle, threads=1, max_waiting=1)
    status, told = service.generate(model, ["transformer"] * 50, None)
    assert (status, told["retry_after"] > 0) == (503, True)
    assert "wait already" in told["error"]
    model.close()
    assert service.generate(model, ["a"], None)[0] == 503


def test_health_fails_once_the_device_has_failed(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tfm_export.load(tiny_bundle, threads=1) as model:
        served = service.Service(("127.0.0.1", 0), model)
        threading.Thread(target=served.serve_forever, daemon=True).start()

        def ask(method: str, path: str, body: bytes | None = None) -> int:
            with closing(http.client.HTTPConnection("127.0.0.1", served.server_port, timeout=60)) as connection:
                connection.request(method, path, body)
                with closing(connection.getresponse()) as response:
                    response.read()
                    return response.status

        texts = json.dumps({"texts": ["hello"]}).encode()
        assert (ask("POST", "/generate", texts), ask("GET", "/health")) == (200, 200)

        def dead(*_: Any, **__: Any) -> Any:
            raise RuntimeError("CUDA error 700: an illegal memory access was encountered")

        monkeypatch.setattr(model.step_model, "encode", dead)
        assert (ask("POST", "/generate", texts), ask("GET", "/health")) == (503, 503)
        served.shutdown()
        served.server_close()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "the body must be"),
        (b'{"texts": []}', "the body must be"),
        (b'{"texts": ["a", 1]}', "the body must be"),
        (json.dumps({"texts": ["a"] * 257}).encode(), "up to 256 texts, found 257"),
        (b'{"texts": ["a"], "deadline": -1}', "deadline must be a number of seconds"),
        (b'{"texts": ["a"], "deadline": NaN}', "deadline must be a number of seconds"),
        (b'{"texts": ["a"], "deadline": true}', "deadline must be a number of seconds"),
    ],
)
def test_a_body_that_is_none(body: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        service.parse(body)


class Process:
    """The service as a process of its own."""

    def __init__(self, bundle: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "examples.embed_engine", str(bundle), "--device", "cpu", "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--threads", "1", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline()
        found = re.search(r":(\d+):", self.first_line)
        self.port = int(found[1]) if found else 0

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, str]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, body)
            with closing(connection.getresponse()) as response:
                return response.status, response.read().decode()

    def generate(self, **state: Any) -> tuple[int, dict[str, Any]]:
        status, text = self.ask("POST", "/generate", json.dumps(state).encode())
        return status, json.loads(text)

    def end(self) -> tuple[int, str, str]:
        output, errors = self.process.communicate(timeout=60)
        return self.process.returncode, output, errors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def running(tiny_bundle: Path) -> Iterator[Process]:
    with Process(tiny_bundle) as process:
        assert "fp32 with ONNX Runtime on the CPU" in process.first_line
        yield process


@pytest.mark.slow
@skip_if(sys.platform == "win32", "SIGTERM", *ON_LINUX)
def test_the_service_answers_and_ends_in_order(running: Process, expected: dict[str, str]) -> None:
    assert running.ask("GET", "/health")[0] == 200
    assert running.ask("GET", "/nowhere")[0] == running.ask("POST", "/nowhere", b"{}")[0] == 404
    assert running.ask("POST", "/generate", b"{")[0] == 400
    assert running.ask("POST", "/generate", b" " * (service.LARGEST_BODY + 1))[0] == 413

    status, found = running.generate(texts=["hello", "", "parity"])
    assert status == 200
    assert [one.get("text") for one in found["answers"]] == [expected["hello"], None, expected["parity"]]
    assert "the text is empty" in found["answers"][1]["error"]
    assert running.generate(texts=[""])[0] == 422
    assert running.generate(texts=["hello"], deadline=0)[1]["answers"][0]["reason"] == "deadline"

    # A connection that asks nothing more must not keep the service from ending.
    with closing(http.client.HTTPConnection("127.0.0.1", running.port)) as idle:
        idle.request("GET", "/health")
        idle.getresponse().read()
        running.process.send_signal(signal.SIGTERM)
        code, _, errors = running.end()
    assert (code, "Traceback" in errors) == (0, False), errors


@pytest.mark.slow
@skip_if(sys.platform == "win32", "SIGTERM", *ON_LINUX)
def test_the_service_ends_in_the_middle_of_much_work(running: Process, expected: dict[str, str]) -> None:
    begun = threading.Barrier(33)

    def client(text: str) -> tuple[int, dict[str, Any]]:
        begun.wait()
        return running.generate(texts=[text] * 4)

    with ThreadPoolExecutor(32) as threads:
        texts = [TEXTS[i % len(TEXTS)] for i in range(32)]
        answers = [threads.submit(client, text) for text in texts]
        begun.wait()
        time.sleep(0.02)
        running.process.send_signal(signal.SIGTERM)
        for text, answer in zip(texts, answers, strict=True):
            status, state = answer.result(60)
            assert (status, {one["text"] for one in state["answers"]}) == (200, {expected[text]})
    code, _, errors = running.end()
    assert (code, "Traceback" in errors) == (0, False), errors


@pytest.mark.slow
def test_a_bundle_that_is_none_and_a_port_that_is_taken(tiny_bundle: Path, tmp_path: Path) -> None:
    with Process(tmp_path) as nothing:
        code, _, errors = nothing.end()
    assert (code, "is not a bundle" in errors) == (1, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with Process(tiny_bundle, "--port", port) as second:
            code, _, errors = second.end()
    assert (code, "cannot be listened on" in errors) == (1, True), errors
    assert "Traceback" not in errors


def test_the_readme_shows_options_that_there_are() -> None:
    text = (ROOT / "examples/embed_engine/README.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"--[a-z][a-z-]+", text))
    main = (ROOT / "examples/embed_engine/__main__.py").read_text(encoding="utf-8")
    assert shown <= set(re.findall(r"--[a-z][a-z-]+", main)) | {"--fp16", "--inputs"}
