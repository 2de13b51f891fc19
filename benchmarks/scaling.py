"""How cost grows: the time of a step against the tokens before it, and tokens per second against the batch.

    python -m benchmarks.scaling            # measure, write benchmarks/results/scaling.json and .png, print tables
    python -m benchmarks.scaling --quick    # fewer and shorter rounds, to see that it works
    python -m benchmarks.scaling --table    # tables and picture of the results that are there

See benchmarks/README.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.command import new_parser, write_results
from benchmarks.contenders import CTRANSLATE2_BY_TYPE
from benchmarks.generation import WORK, say
from benchmarks.pictures import draw_scaling
from benchmarks.report import table
from benchmarks.work import prepare, reuse
from benchmarks.worker import Worker, fastest

RESULTS = Path(__file__).parent / "results" / "scaling.json"
OURS = ("tfm-export", "tfm-export w8", "tfm-export int8")
STEP_BATCHES = (1, 8)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
LENGTH = 512
BIN = 16  # neighbouring steps that the line is fitted to the median of


def measure(
    folder: Path, names: Sequence[str], rounds: int, length: int, batches: Sequence[int], threads: int
) -> dict[str, Any]:
    """Time single steps and whole generations of every contender, in rounds that go through all contenders.

    Args:
        folder: what `benchmarks.work.prepare` filled.
        names: contenders.
        rounds: that count; one more comes before them.
        length: tokens of the long generations.
        batches: of the whole generations.
        threads: of each contender.
    """
    steps, throughput = [], []
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(name, folder, threads)) for name in names]
        for batch in STEP_BATCHES:
            say(f"steps of {batch} sentences, to {length} tokens")
            seconds: dict[str, list[list[float]]] = {name: [] for name in names}
            for number in range(rounds + 1):
                for worker in workers:
                    answer = worker.ask(do="steps", batch=batch, length=length)
                    if number:
                        seconds[worker.name].append(answer["seconds"])
            for name, found in seconds.items():
                medians = np.median(found, axis=0)
                steps.append({"contender": name, "batch": batch, "seconds": medians.tolist(), **fit(medians)})
        for batch in batches:
            say(f"generations of {batch} sentences")
            whole: dict[str, list[float]] = {name: [] for name in names}
            for number in range(rounds + 1):
                for worker in workers:
                    answer = worker.ask(batch=batch, beam=1)
                    tokens = sum(map(len, answer["tokens"]))
                    if number:
                        whole[worker.name].append(answer["seconds"])
            throughput += [
                {"contender": name, "batch": batch, "seconds": found, "tokens": tokens} for name, found in whole.items()
            ]
    return {
        "machine": machine.describe(),
        "threads": threads,
        "rounds": rounds,
        "contenders": list(names),
        "steps": steps,
        "throughput": throughput,
    }


def fit(seconds: Sequence[float] | np.ndarray[Any, Any]) -> dict[str, float]:
    """A straight line through the times of the steps of a generation.

    Steps are taken together in bins of `BIN`: what else the machine does between two steps is no matter of length.

    Args:
        seconds: of step 2, 3, ... of a generation.

    Returns:
        `slope`, seconds more for every token before; `start`, seconds of a step with none; `r2`, the part of the bins'
        variance that the line explains.
    """
    bins = np.array_split(np.asarray(seconds), max(2, len(seconds) // BIN))
    times = np.array([np.median(part) for part in bins])
    ends = np.cumsum([len(part) for part in bins])
    past = ends - np.array([(len(part) - 1) / 2 for part in bins])
    slope, start = np.polyfit(past, times, 1)
    rest, all_ = np.square(times - (slope * past + start)).sum(), np.square(times - times.mean()).sum()
    return {"slope": float(slope), "start": float(start), "r2": float(1 - rest / all_) if all_ else 1.0}


def rounded(results: Any) -> Any:
    """The same with six significant digits: there are thousands of times."""
    if isinstance(results, float):
        return float(f"{results:.6g}")
    if isinstance(results, dict):
        return {key: rounded(value) for key, value in results.items()}
    return [rounded(value) for value in results] if isinstance(results, list) else results


def tables(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows = []
    for one in results["steps"]:
        ms = np.array(one["seconds"]) * 1e3
        ends = [f"{np.median(part):.2f}" for part in (ms[:BIN], ms[-BIN:])]
        more = f"{one['slope'] * 1e6 * 100:.1f}"
        rows.append([one["batch"], one["contender"], *ends, more, f"{one['r2']:.3f}"])
    last = len(results["steps"][0]["seconds"]) + 1
    names = ["batch", "", f"ms, tokens 2 to {BIN + 1}", f"ms, the last {BIN} of {last}"]
    steps = table([*names, "µs more for 100 tokens", "R² of a straight line"], rows)
    rates = {
        (one["contender"], one["batch"]): one["tokens"] / np.median(one["seconds"]) for one in results["throughput"]
    }
    batches = list(dict.fromkeys(batch for _, batch in rates))
    rows = [[name, *(f"{rates[name, batch]:,.0f}" for batch in batches)] for name in results["contenders"]]
    return steps + "\n\n" + table(["tokens/s, greedy, batch", *batches], rows)


def main() -> None:
    """The command."""
    parser = new_parser(__doc__, RESULTS)
    parser.add_argument("--quick", action="store_true", help="one round of 64 tokens, small batches")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=LENGTH)
    arguments = parser.parse_args()
    if not arguments.table:
        (reuse if arguments.reuse else prepare)(WORK, say)
        peer = fastest(CTRANSLATE2_BY_TYPE["int8"], WORK, arguments.threads, batch=8, beam=1)
        names = [*OURS, peer, f"{peer}, 1 thread"]
        quick = (1, 64, BATCHES[:4])
        settings = quick if arguments.quick else (arguments.rounds, arguments.length, BATCHES)
        results = measure(WORK, names, *settings, arguments.threads)
        write_results(rounded(results), arguments.output, indent=None)
    results = json.loads(arguments.output.read_text(encoding="utf-8"))
    draw_scaling(arguments.output.with_suffix(".png"), results)
    print(tables(results))


if __name__ == "__main__":
    main()
