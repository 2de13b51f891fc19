"""Two results held against each other, with an eye to noise."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from tfm_export.bench.result import BenchResult

# Medians of two runs of the same code on a quiet machine differ by this much; see docs/benchmarking.md.
NOISE = 0.05


@dataclass(frozen=True, kw_only=True)
class CellVerdict:
    """How a cell compares with an earlier run of it.

    Attributes:
        variant: the precision.
        batch: sentences decoded together.
        beam: hypotheses a sentence.
        before: seconds of a generation in the earlier run, the median.
        after: seconds of a generation in this run, the median.
        verdict: "faster" or "slower" where the middle halves of the two runs do not overlap and the medians are more
            than `NOISE` apart; "same" otherwise.
    """

    variant: str
    batch: int
    beam: int
    before: float
    after: float
    verdict: str

    @property
    def ratio(self) -> float:
        """How many times faster than before."""
        return self.before / self.after


def compare(before: BenchResult, after: BenchResult) -> list[CellVerdict]:
    """A verdict on every cell that both results have and that decoded as many tokens.

    Args:
        before: the earlier one.
        after: the later one.
    """
    earlier = {cell.key: cell for cell in before.cells}
    verdicts = []
    for cell in after.cells:
        other = earlier.get(cell.key)
        if other is None or other.tokens != cell.tokens:
            continue
        old, new = median(other.seconds), median(cell.seconds)
        (old_low, old_high), (new_low, new_high) = _middle_half(other.seconds), _middle_half(cell.seconds)
        verdict = "same"
        if old_high < new_low and new > old * (1 + NOISE):
            verdict = "slower"
        elif new_high < old_low and old > new * (1 + NOISE):
            verdict = "faster"
        verdicts.append(
            CellVerdict(variant=cell.variant, batch=cell.batch, beam=cell.beam, before=old, after=new, verdict=verdict)
        )
    return verdicts


def _middle_half(values: list[float]) -> tuple[float, float]:
    """The bounds of the middle half."""
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return ordered[quarter], ordered[-1 - quarter]
