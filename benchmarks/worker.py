"""A contender in a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.contenders import CONTENDERS
from tfm_export.bench.process import MeasuredProcess

# Threads of the contender before spin for a while when they run out of work.
SECONDS_TO_CALM_DOWN = 0.3


class Worker(MeasuredProcess):
    """A contender in a process of its own.

    Args:
        name: one of CONTENDERS.
        folder: what `benchmarks.work.prepare` filled.
        threads: all that the contender may use.
        replicas: batches that are decoded at once, sharing the threads.
    """

    def __init__(self, name: str, folder: Path, threads: int, *, replicas: int = 1) -> None:
        command = [sys.executable, "-m", "benchmarks.contenders", name, str(folder), str(threads), str(replicas)]
        environment = {**os.environ, **CONTENDERS[name][1], "OMP_NUM_THREADS": str(threads)}
        super().__init__(name, command, pause=SECONDS_TO_CALM_DOWN, environment=environment)


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
