"""The process that is measured: it loads one variant and decodes what it is asked for.

    python -m tfm_export.bench.worker SETTINGS

SETTINGS and what comes in and goes out, a line each, are JSON. Alone in its process, a variant's memory is its own,
and its threads do not disturb another's.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from tfm_export.runtime.step_model import (
    Floats,
    Ids,
    Mask,
    Sentences,
    StepModel,
    StepOutput,
    Until,
    WrappedModel,
    WrappedSentences,
)


class TimedModel(WrappedModel):
    """Passes everything on, and notes when each step is over.

    Attributes:
        ends: the time at the end of every step, in seconds.
    """

    def __init__(self, model: StepModel) -> None:
        super().__init__(model)
        self.ends: list[float] = []

    def encode(self, source_ids: Ids, source_mask: Mask, *, capacity: int) -> Sentences:
        """Encode; the steps of what comes back are timed."""
        return _TimedSentences(super().encode(source_ids, source_mask, capacity=capacity), self.ends)


class _TimedSentences(WrappedSentences):
    def __init__(self, sentences: Sentences, ends: list[float]) -> None:
        super().__init__(sentences)
        self._ends = ends

    def step(
        self, target_ids: Ids, positions: Ids, write_index: Ids, self_mask: Mask, *, full: bool = False
    ) -> StepOutput:
        output = super().step(target_ids, positions, write_index, self_mask, full=full)
        self._ends.append(time.perf_counter())
        return output

    def step_greedily(
        self, target_ids: Ids, positions: Ids, write_index: Ids, self_mask: Mask, *, steps: int, until: Until
    ) -> tuple[Ids, Floats]:
        begun = len(self._ends)

        def timed(tokens: list[int]) -> bool:
            self._ends.append(time.perf_counter())
            return until(tokens)

        found = super().step_greedily(target_ids, positions, write_index, self_mask, steps=steps, until=timed)
        if len(self._ends) - begun < found[0].shape[1]:  # nobody asks after the last step
            self._ends.append(time.perf_counter())
        return found


def peak_megabytes() -> float:
    """The largest resident set of this process so far, in units of 2^20 bytes; NaN where the system does not tell.

    Not getrusage's: that one begins with the parent's.
    """
    try:
        with open("/proc/self/status", encoding="utf-8") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):
        return float("nan")


def serve(settings: dict[str, Any], start: float) -> None:
    """Load, say what that took, and decode until standard input ends.

    Args:
        settings: path, variant, threads, sources (ids).
        start: when the process began to work, in seconds.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the answers

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    import tfm_export
    from tfm_export.bench.result import split_draft
    from tfm_export.decoding import DecodeOptions, generate

    variant, draft = split_draft(settings["variant"])
    model = tfm_export.load(
        Path(settings["path"]), device="cpu", variant=variant, draft=draft, threads=settings["threads"]
    )
    load_seconds, loaded = time.perf_counter() - start, peak_megabytes()
    sources, special = settings["sources"], model.bundle.manifest.special_ids
    timed = TimedModel(model.step_model)

    def decode(batch: int, beam: int, tokens: int | None) -> dict[str, Any]:
        some = [sources[i % len(sources)] for i in range(batch)]
        # Exactly so many tokens: every round and every variant then does the same work.
        options = DecodeOptions(
            beam_size=beam,
            max_batch_size=batch,
            min_decoding_length=tokens or 0,
            max_decoding_length=tokens or model.bundle.manifest.generation.max_length,
            return_end_token=True,
        )
        timed.ends.clear()
        begin = time.perf_counter()
        results = generate(timed, some, options, special)
        end = time.perf_counter()
        ends = timed.ends
        return {
            "seconds": end - begin,
            "first_seconds": ends[0] - begin,
            "step_seconds": [b - a for a, b in pairwise(ends)],
            "tokens": sum(len(result.hypotheses[0].tokens) for result in results),
            "peak_megabytes": peak_megabytes(),
        }

    first = decode(1, 1, settings["tokens"])["first_seconds"]
    step_model = model.step_model
    answer(
        load_seconds=load_seconds,
        first_seconds=first,
        loaded_megabytes=loaded,
        threads=step_model.capabilities.threads or 0,
        backend=type(step_model).__name__,
        provider="CPUExecutionProvider",
    )
    for line in sys.stdin:
        answer(**decode(**json.loads(line)))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends this process
    serve(json.loads(sys.argv[1]), time.perf_counter())
