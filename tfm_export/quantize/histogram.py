"""How large a value gets and how often: what the clipping of activations is chosen by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tfm_export.errors import RequestError

BINS = 2**14
ENTROPY_BINS = 2**11  # more of them find no better threshold, and cost more
QUANTIZED_BINS = 128  # what int8 has on one side of zero
LEAST_COUNT = 1e-4
PERCENTILE = 99.999

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Histogram:
    """How many of the numbers |x| lie in each of equally wide bins.

    Attributes:
        limit: where the last bin ends: a power of two, the least that no |x| reaches.
        counts: [BINS], int64.
    """

    limit: float
    counts: Counts

    @property
    def width(self) -> float:
        """Of a bin."""
        return self.limit / len(self.counts)


@dataclass(frozen=True)
class Observation:
    """What a value did on the samples.

    Attributes:
        largest: the largest absolute value.
        histogram: of |x|, for what linear layers read; None for the rest.
    """

    largest: float
    histogram: Histogram | None = None


@dataclass
class Collector:
    """Gathers a histogram from numbers that come in any order and of any size, in memory that does not grow.

    When a number does not fit, the limit doubles and the bins are merged in pairs; since limits are powers of two, that
    gives the very counts that the new limit would have given from the start.
    """

    limit: float = 0.0
    counts: Counts = field(default_factory=lambda: np.zeros(BINS, np.int64))

    def add(self, magnitudes: NDArray[np.float32]) -> None:
        """Count numbers.

        Args:
            magnitudes: |x|, finite, of any shape.
        """
        self._reach(float(magnitudes.max(initial=0)))
        if self.limit == 0:  # nothing but zeros so far
            self.counts[0] += magnitudes.size
            return
        bins = (magnitudes.astype(np.float64).ravel() * (BINS / self.limit)).astype(np.int64)
        self.counts += np.bincount(bins, minlength=BINS)

    def _reach(self, largest: float) -> None:
        if largest < self.limit or largest == 0:
            return
        if self.limit == 0:
            self.limit = math.ldexp(1.0, math.frexp(largest)[1])
            return
        while largest >= self.limit:
            self.limit *= 2
            merged = self.counts.reshape(-1, 2).sum(axis=1)
            self.counts = np.concatenate([merged, np.zeros_like(merged)])

    def histogram(self) -> Histogram:
        """What was counted."""
        return Histogram(self.limit, self.counts)


def thresholds(
    observations: Mapping[str, Observation], method: str, *, percentile: float = PERCENTILE
) -> dict[str, float]:
    """Where to clip each value that has a histogram.

    Args:
        observations: of values by name.
        method: "max" clips nothing that was seen; "percentile" clips all but that share of the numbers; "entropy" clips
            where the distribution in 8 bits tells most of the distribution as it was (Migacz, 8-bit inference with
            TensorRT, 2017).
        percentile: for that method, above 0 and at most 100.

    Raises:
        RequestError: the method or the percentile is none.
    """
    finders: dict[str, Callable[[Histogram], float]] = {
        "max": lambda histogram: histogram.limit,
        "percentile": lambda histogram: percentile_threshold(histogram, percentile),
        "entropy": entropy_threshold,
    }
    if method not in finders:
        raise RequestError(f"the method must be one of {', '.join(finders)}, found {method!r}")
    if not 0 < percentile <= 100:
        raise RequestError(f"the percentile must be above 0 and at most 100, found {percentile}")
    histograms = {id(o): o.histogram for o in observations.values() if o.histogram is not None}
    found = {observation: finders[method](histogram) for observation, histogram in histograms.items()}
    return {name: min(found[id(o)], o.largest) for name, o in observations.items() if id(o) in found}


def percentile_threshold(histogram: Histogram, percentile: float) -> float:
    """The end of the bin at which the given share of the numbers, in percent, is reached."""
    reached = np.cumsum(histogram.counts)
    wanted = percentile / 100 * int(reached[-1])
    return float(np.searchsorted(reached, wanted) + 1) * histogram.width


def entropy_threshold(histogram: Histogram) -> float:
    """The threshold at which the quantised distribution is nearest to the one that was seen.

    Of each candidate, the numbers above it count as being in its last bin: that is P. Q is what remains of P in
    `QUANTIZED_BINS` bins, each spread evenly over those of its bins that are not empty. The candidate with the smallest
    Kullback-Leibler divergence of Q from P wins; of equals, the smallest.

    The first bin counts no more than the second: the zeros that a ReLU gives are exact at any scale, and as the bulk of
    P they would make every clipping seem good (measured on the g2p example: thresholds of a tenth of the largest value,
    and 1,483 of 2,000 words as in fp32 instead of 1,987).
    """
    counts = histogram.counts.reshape(ENTROPY_BINS, -1).sum(axis=1).astype(np.float64)
    counts[0] = min(counts[0], counts[1])
    last = int(np.flatnonzero(counts)[-1]) + 1 if counts.any() else 1
    candidates = range(min(QUANTIZED_BINS, last), last + 1)
    divergences = [_divergence(counts[:candidate], counts[candidate:].sum()) for candidate in candidates]
    return candidates[int(np.argmin(divergences))] * histogram.limit / ENTROPY_BINS


def _divergence(kept: NDArray[np.float64], clipped: float, *, levels: int = QUANTIZED_BINS) -> float:
    """KL(P || Q) of one candidate, in nats; infinite if it clips every number."""
    if not kept.any():
        return math.inf
    reference = kept.copy()
    reference[-1] += clipped
    there = reference > 0
    level = np.arange(len(kept)) * levels // len(kept)  # as equal in width as whole bins allow
    sums, sizes = np.bincount(level, kept, levels), np.bincount(level, there, levels)
    # Where all of a level was clipped, Q is next to nothing instead of nothing: few outliers shall not cost infinitely.
    spread = np.maximum(sums / np.maximum(sizes, 1), LEAST_COUNT)[level]
    p, q = reference[there] / reference.sum(), spread[there] / spread[there].sum()
    return float((p * np.log(p / q)).sum())
