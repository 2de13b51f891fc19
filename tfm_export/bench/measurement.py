"""The benchmark: every variant in a process of its own, all cells in rounds that go through all variants."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from tfm_export.bench.machine import describe
from tfm_export.bench.process import MeasuredProcess
from tfm_export.bench.result import BenchResult, Cell, Loading, split_draft
from tfm_export.bundle import GOLDEN, Bundle
from tfm_export.errors import BundleError, RequestError
from tfm_export.precision import PRECISIONS
from tfm_export.progress import Progress
from tfm_export.quotation import printable
from tfm_export.runtime.backends import backend_choices
from tfm_export.runtime.threads import usable_cpus
from tfm_export.verify import read_golden

# Threads of the variant before spin for a while when they run out of work.
SECONDS_TO_CALM_DOWN = 0.1


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is measured.

    Attributes:
        variants: precisions; of two as in "fp32+w8", the second guesses the first one's tokens. None for all that run
            on a CPU, without guesses.
        batches: sentences decoded together.
        beams: hypotheses a sentence.
        tokens: exactly so many a sentence; None lets every sentence end where it ends.
        rounds: generations of each cell that count; one more comes before them and warms up.
        threads: an operator may use; None for the CPUs this process may use.
        sources: ids to decode; None takes the golden inputs.
    """

    variants: Sequence[str] | None = None
    batches: Sequence[int] = (1, 8, 32)
    beams: Sequence[int] = (1, 4)
    tokens: int | None = None
    rounds: int = 9
    threads: int | None = None
    sources: Sequence[list[int]] | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            RequestError: naming every such field.
        """
        problems = [
            f"{name} must be at least 1, found {value}"
            for name, values in (("batch", self.batches), ("beam", self.beams), ("rounds", [self.rounds]))
            for value in values
            if value < 1
        ]
        if problems:
            raise RequestError(problems)


class _Worker(MeasuredProcess):
    """A variant in a process of its own."""

    def __init__(self, path: str, variant: str, options: BenchOptions, sources: list[list[int]]) -> None:
        settings = {
            "path": path,
            "variant": variant,
            "threads": options.threads or usable_cpus(),
            "tokens": options.tokens,
            "sources": sources,
        }
        command = [sys.executable, "-m", "tfm_export.bench.worker", json.dumps(settings)]
        super().__init__(variant, command, pause=SECONDS_TO_CALM_DOWN)


def bench_bundle(bundle: Bundle, options: BenchOptions, progress: Progress) -> BenchResult:
    """Measure a bundle on this machine.

    Args:
        bundle: an open bundle.
        options: what is measured.
        progress: told what begins.

    Raises:
        BackendUnavailable: a variant does not run on a CPU.
        BundleError: it has no such variant, or no golden inputs to decode.
        RequestError: a variant should guess its own tokens.
    """
    variants = _variants(bundle, options)
    if options.sources is None and GOLDEN not in bundle.manifest.files:
        raise BundleError(f"{bundle.path} has no {GOLDEN} to decode", "--inputs FILE")
    sources = options.sources or [golden.source_ids for golden in read_golden(bundle, GOLDEN)]
    most = max(options.batches)
    with ExitStack() as stack:
        workers = []
        for variant in variants:
            progress(f"loading {variant}")
            workers.append(stack.enter_context(_Worker(str(bundle.path), variant, options, [*sources][: max(most, 1)])))
        cells = []
        for beam in options.beams:
            for batch in sorted(options.batches):  # ascending, since memory is recorded as a peak
                progress(f"measuring batch {batch}, beam {beam}")
                cells += _cells(workers, batch, beam, options)
    return BenchResult(
        machine=describe(),
        work={
            "bundle": printable(str(bundle.path)),
            "model": bundle.manifest.model.get("checkpoint"),
            "tokens": options.tokens,
            "rounds": options.rounds,
            "warm_up_rounds": 1,
            "longest_source": max(map(len, sources)),
        },
        loadings=[Loading(variant=worker.name, **worker.loaded) for worker in workers],
        cells=cells,
    )


def _variants(bundle: Bundle, options: BenchOptions) -> list[str]:
    if options.variants is None:
        return [name for name in bundle.manifest.variants if PRECISIONS[name].runs_on_cpu]
    for name in options.variants:
        variant, draft = split_draft(name)
        for way in backend_choices(bundle, device="cpu", variant=variant, draft=draft):
            way.check(bundle)
    return list(options.variants)


def _cells(workers: Sequence[_Worker], batch: int, beam: int, options: BenchOptions) -> list[Cell]:
    rounds: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in workers}
    for number in range(options.rounds + 1):
        for worker in workers:
            answer = worker.ask(batch=batch, beam=beam, tokens=options.tokens)
            if number:
                rounds[worker.name].append(answer)
    return [
        Cell(
            variant=variant,
            batch=batch,
            beam=beam,
            first_seconds=[answer["first_seconds"] for answer in answers],
            step_seconds=[seconds for answer in answers for seconds in answer["step_seconds"]],
            seconds=[answer["seconds"] for answer in answers],
            tokens=answers[-1]["tokens"],
            peak_megabytes=answers[-1]["peak_megabytes"],
        )
        for variant, answers in rounds.items()
    ]
