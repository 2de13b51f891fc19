"""Memory of a process that decodes, whether it grows, and the time from its start to the first token.

    python -m benchmarks.memory            # measure, write benchmarks/results/memory.json, print tables
    python -m benchmarks.memory --quick    # a tenth of the decodes, small batches
    python -m benchmarks.memory --table    # the tables of the results that are there

See benchmarks/README.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.command import new_parser, write_results
from benchmarks.contenders import CONTENDERS, CTRANSLATE2_BY_TYPE
from benchmarks.generation import WORK, say
from benchmarks.report import table
from benchmarks.work import prepare, reuse
from benchmarks.worker import Worker, fastest

RESULTS = Path(__file__).parent / "results" / "memory.json"
OURS = {"float32": ("tfm-export",), "int8": ("tfm-export w8", "tfm-export int8")}
GROWING = ("tfm-export", "tfm-export w8", "tfm-export int8")  # and CTranslate2 in 8 bits
KINDS = ((1, 1), (1, 4), (8, 4), (32, 1), (32, 4))  # batch and beam, each in a process of its own
DECODES, WARM_UP, EVERY = 2_000, 200, 20
LARGEST_BATCH, LONGEST = 8, 16
STARTS = 7
PARTS = ("interpreter", "libraries", "load", "first_token", "total")


def measure(folder: Path, threads: int, share: int, kinds: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Measure all three.

    Args:
        folder: what `benchmarks.work.prepare` filled.
        threads: of each contender.
        share: do one in so many decodes.
        kinds: batches and beams whose peaks are measured.
    """
    peers = {kind: fastest(names, folder, threads, batch=8, beam=4) for kind, names in CTRANSLATE2_BY_TYPE.items()}
    peaks = []
    for kind, ours in OURS.items():
        for batch, beam in kinds:
            say(f"peak memory, {kind}, batch {batch}, beam {beam}")
            for name in (*ours, peers[kind]):
                with Worker(name, folder, threads) as worker:
                    peak = worker.ask(batch=batch, beam=beam)["peak_megabytes"]
                peaks.append({"contender": name, "peer": peers[kind], "batch": batch, "beam": beam, "megabytes": peak})
    growth = []
    for name in (*GROWING, *list(peers.values())[-1:]):
        say(f"{DECODES // share:,} decodes of {name}")
        with Worker(name, folder, threads) as worker:
            request = {"decodes": DECODES // share, "every": EVERY, "largest_batch": LARGEST_BATCH, "longest": LONGEST}
            growth.append({"contender": name, **worker.ask(do="growth", **request), "share": share})
    say("the time to the first token")
    return {
        "machine": machine.describe(),
        "threads": threads,
        "peaks": peaks,
        "growth": growth,
        "starts": starts([*(name for names in OURS.values() for name in names), *peers.values()], folder, threads),
    }


def starts(names: Sequence[str], folder: Path, threads: int) -> list[dict[str, Any]]:
    """Start every contender several times, in turns; the first, which may read files from the disk, does not count."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(STARTS + 1):
        for name in names:
            command = [sys.executable, "-m", "benchmarks.startup", name, str(folder), str(threads)]
            environment = {**os.environ, **CONTENDERS[name][1], "OMP_NUM_THREADS": str(threads)}
            time.sleep(0.1)
            command.append(repr(time.perf_counter()))
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
            if number:
                found[name].append(json.loads(done.stdout))
    return [
        {"contender": name, **{part: [one[part] for one in answers] for part in PARTS}}
        for name, answers in found.items()
    ]


def grown(one: dict[str, Any]) -> tuple[float, float, float]:
    """The resident set after warming up and at the end, in MB of 2^20 bytes, and by how many percent it grew."""
    sizes = one["megabytes"]
    after = sizes[max(0, WARM_UP // one["share"] // EVERY - 1)]
    return after, sizes[-1], 100 * (sizes[-1] / after - 1)


def tables(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    size = {(one["contender"], one["batch"], one["beam"]): one["megabytes"] for one in results["peaks"]}
    kinds = list(dict.fromkeys((batch, beam) for _, batch, beam in size))
    rows = []
    for name, peer in dict.fromkeys((one["contender"], one["peer"]) for one in results["peaks"]):
        cells = [f"{size[name, *kind]:,.0f}" for kind in kinds]
        if name != peer:
            ratios = [size[name, *kind] / size[peer, *kind] for kind in kinds]
            cells = [f"{cell} ({ratio:.2f} x)" for cell, ratio in zip(cells, ratios, strict=True)]
        rows.append([name, *cells])
    heads = [f"batch {batch}, beam {beam}" for batch, beam in kinds]
    peaks = table(["peak MB (beside CTranslate2's)", *heads], rows)
    rows = []
    for one in results["growth"]:
        after, end, percent = grown(one)
        rows.append([one["contender"], f"{after:,.0f}", f"{end:,.0f}", f"{percent:+.1f} %"])
    first, last = WARM_UP // results["growth"][0]["share"], len(results["growth"][0]["megabytes"]) * EVERY
    growth = table(["", f"MB after {first:,} decodes", f"after {last:,}", "growth"], rows)
    rows = [[one["contender"], *(f"{np.median(one[part]):.3f}" for part in PARTS)] for one in results["starts"]]
    begin = table(["seconds from a fresh process", *(part.replace("_", " ") for part in PARTS)], rows)
    return f"{peaks}\n\n{growth}\n\n{begin}"


def main() -> None:
    """The command."""
    parser = new_parser(__doc__, RESULTS)
    parser.add_argument("--quick", action="store_true", help="a tenth of the decodes, small batches")
    arguments = parser.parse_args()
    if not arguments.table:
        (reuse if arguments.reuse else prepare)(WORK, say)
        results = measure(WORK, arguments.threads, *((10, KINDS[:2]) if arguments.quick else (1, KINDS)))
        write_results(results, arguments.output)
    print(tables(json.loads(arguments.output.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
