"""Whole generations of the base model: tfm-export against PyTorch eager and CTranslate2, same weights, same run.

    python -m benchmarks.generation            # measure, write benchmarks/results/generation.json, print tables
    python -m benchmarks.generation --batches 1 --rounds 3 --reuse
    python -m benchmarks.generation --table    # the tables of the results that are there

See benchmarks/README.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.command import new_parser, write_results
from benchmarks.contenders import CONTENDERS, SOURCE_LENGTH, TARGET_LENGTH
from benchmarks.report import tables
from benchmarks.work import prepare, reuse
from benchmarks.worker import Worker

RESULTS = Path(__file__).parent / "results" / "generation.json"
WORK = Path("build") / "benchmarks"
SHARE_REPEATS = 9


def measure(
    folder: Path, names: list[str], batches: list[int], beams: list[int], rounds: int, threads: int
) -> dict[str, Any]:
    """Time every contender in every cell, in rounds that go through all contenders.

    Args:
        folder: what `benchmarks.work.prepare` filled.
        names: contenders.
        batches: sentences decoded together; in ascending order, since memory is recorded as a peak.
        beams: beam sizes.
        rounds: generations of each contender that count in each cell; one more comes before them and does not.
        threads: of each contender.

    Returns:
        What goes into the results file.
    """
    before = _limits(threads)
    cells: list[dict[str, Any]] = []
    share: list[dict[str, float]] = []
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(name, folder, threads)) for name in names]
        for beam in beams:
            for batch in sorted(batches):
                say(f"batch {batch}, beam {beam}")
                cells += _cell(workers, batch, beam, rounds)
        for worker in workers:
            if worker.name == "tfm-export":
                share = [worker.ask(do="python_share", batch=1) for _ in range(SHARE_REPEATS)]
    after = _limits(threads)
    return {
        "machine": machine.describe(),
        "work": {"model": "base, random weights", "source_tokens": SOURCE_LENGTH, "target_tokens": TARGET_LENGTH},
        "threads": threads,
        "rounds": rounds,
        "contenders": {worker.name: worker.loaded for worker in workers},
        "cells": cells,
        "python_share": share,
        "limits": {key: max(before[key], after[key]) for key in before},
    }


def _cell(workers: list[Worker], batch: int, beam: int, rounds: int) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {worker.name: [] for worker in workers}
    last: dict[str, dict[str, Any]] = {}
    for number in range(rounds + 1):
        for worker in workers:
            last[worker.name] = answer = worker.ask(batch=batch, beam=beam)
            if number:
                seconds[worker.name].append(answer["seconds"])
    ours = last[workers[0].name]["tokens"]
    for name, answer in last.items():
        lengths = {len(tokens) for tokens in answer["tokens"]}
        if lengths != {TARGET_LENGTH}:
            raise RuntimeError(f"{name} should have generated {TARGET_LENGTH} tokens each, found {sorted(lengths)}")
    return [
        {
            "contender": name,
            "batch": batch,
            "beam": beam,
            "seconds": seconds[name],
            "peak_megabytes": answer["peak_megabytes"],
            # Random weights have near ties, which float32 may break either way.
            "sentences_as_first_contender": sum(a == b for a, b in zip(answer["tokens"], ours, strict=True)),
        }
        for name, answer in last.items()
    ]


def _limits(threads: int) -> dict[str, float]:
    """In a process of its own, so that its threads are gone when the contenders run."""
    say("memory bandwidth and matrix products")
    command = [sys.executable, "-m", "benchmarks.limits", str(threads)]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    limits: dict[str, float] = json.loads(output)
    return limits


def say(text: str) -> None:
    """Tell people what is being done."""
    print(f"... {text}", file=sys.stderr, flush=True)


def main() -> None:
    """The command."""
    parser = new_parser(__doc__, RESULTS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--beams", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    arguments = parser.parse_args()
    if not arguments.table:
        (reuse if arguments.reuse else prepare)(WORK, say)
        results = measure(
            WORK, arguments.contenders, arguments.batches, arguments.beams, arguments.rounds, arguments.threads
        )
        write_results(results, arguments.output)
    print(tables(json.loads(arguments.output.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
