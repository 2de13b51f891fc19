"""How fast a variant is beside fp32, on this machine, in one run."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from tfm_export.bundle import SpecialIds
from tfm_export.decoding import DecodeOptions, generate
from tfm_export.progress import Progress
from tfm_export.runtime.step_model import StepModel

SECONDS = 1.0  # of one turn of one model; turns alternate, so that a busy machine is busy for both
TURNS = 5
CASES = {"greedy, 1 sentence": (1, 1), "beam 4, 8 sentences": (8, 4)}


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What one way of decoding costs.

    Attributes:
        name: of the way.
        fp32: its milliseconds a step, the median of the turns.
        variant: its milliseconds a step, the median of the turns.
        turns: of each, in milliseconds a step, fp32 first.
    """

    name: str
    fp32: float
    variant: float
    turns: list[tuple[float, float]]

    @property
    def ratio(self) -> float:
        """How many times faster than fp32."""
        return self.fp32 / self.variant


def overall(speeds: Sequence[Speed]) -> float:
    """How many times faster than fp32, the geometric mean over the ways of decoding."""
    return math.exp(sum(math.log(speed.ratio) for speed in speeds) / len(speeds))


def measure_speed(
    fp32: StepModel,
    variant: StepModel,
    sources: Sequence[list[int]],
    special: SpecialIds,
    *,
    max_length: int,
    progress: Progress,
) -> list[Speed]:
    """Decode the same sources with both models in turns.

    Args:
        fp32: the bundle's fp32 graphs.
        variant: the others.
        sources: ids; they are repeated where there are too few.
        special: the model's special ids.
        max_length: of the targets.
        progress: told what begins.
    """
    speeds = []
    for name, (batch, beam) in CASES.items():
        progress(f"measuring speed: {name}")
        options = DecodeOptions(max_decoding_length=max_length, beam_size=beam, max_batch_size=batch)
        some = [sources[i % len(sources)] for i in range(max(batch, 16))]
        for model in (fp32, variant):
            generate(model, some[:batch], replace(options, max_decoding_length=min(2, max_length)), special)
        turns = [(_turn(fp32, some, options, special), _turn(variant, some, options, special)) for _ in range(TURNS)]
        fp32_median, variant_median = (median(times) for times in zip(*turns, strict=True))
        speeds.append(Speed(name=name, fp32=fp32_median, variant=variant_median, turns=turns))
    return speeds


def _turn(model: StepModel, sources: Sequence[list[int]], options: DecodeOptions, special: SpecialIds) -> float:
    """Milliseconds a step, over as many batches as fit the time."""
    batch, steps, start, at = options.max_batch_size, 0, time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < SECONDS or not steps:
        some = [sources[(at + i) % len(sources)] for i in range(batch)]
        results = generate(model, some, options, special)
        steps += max(result.statistics.steps for result in results)
        at += batch
    return 1e3 * elapsed / steps
