"""A contender in a process of its own, asked by lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.contenders import CONTENDERS

# Threads of the contender before spin for a while when they run out of work.
SECONDS_TO_CALM_DOWN = 0.3


class Worker:
    """A contender in a process of its own; a context manager.

    Attributes:
        name: one of CONTENDERS.
        loaded: seconds and memory that loading took.

    Args:
        name: one of CONTENDERS.
        folder: what `benchmarks.work.prepare` filled.
        threads: all that the contender may use.
        replicas: batches that CTranslate2 decodes at once, sharing the threads.
    """

    def __init__(self, name: str, folder: Path, threads: int, *, replicas: int = 1) -> None:
        self.name = name
        command = [sys.executable, "-m", "benchmarks.contenders", name, str(folder), str(threads), str(replicas)]
        environment = {**os.environ, **CONTENDERS[name][1], "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.loaded = self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer, after a pause in which the other contenders come to rest."""
        assert self._process.stdin is not None
        time.sleep(SECONDS_TO_CALM_DOWN)
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError(f"the process of {self.name} ended with status {self._process.returncode}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._process.kill()
        self.close()


def fastest(names: Sequence[str], folder: Path, threads: int, *, batch: int, beam: int) -> str:
    """The contender that generates fastest here: which of CTranslate2's matrix libraries suits a processor.

    Args:
        names: contenders.
        folder: see `Worker`.
        threads: see `Worker`.
        batch: sentences decoded together.
        beam: hypotheses a sentence.
    """
    seconds = {}
    for name in names:
        with Worker(name, folder, threads) as worker:
            seconds[name] = min(worker.ask(batch=batch, beam=beam)["seconds"] for _ in range(3))
    return min(seconds, key=lambda name: seconds[name])
