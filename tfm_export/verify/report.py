"""What verification measured, and the verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TensorComparison:
    """How far one tensor is from a float64 run of the reference.

    Attributes:
        name: as in the graph's table.
        error: largest absolute difference.
        own_error: PyTorch's own in float32.
        limit: the largest accepted error.
    """

    name: str
    error: float
    own_error: float
    limit: float

    @property
    def passed(self) -> bool:
        """Within the limit; an error that is not a number is not."""
        return self.error <= self.limit


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first token of a generation that is not PyTorch's.

    Attributes:
        index: of the golden input.
        text: of the golden input, if it has one.
        step: of the token, from 0.
        expected: the token that PyTorch gave; None if it had ended.
        found: the token that came; None if it had ended.
        margin: greedy: between PyTorch's two best tokens at this step, in float64; beam: between the scores of the
            two hypotheses.
    """

    index: int
    text: str | None
    step: int
    expected: int | None
    found: int | None
    margin: float


@dataclass(frozen=True, kw_only=True)
class GenerationComparison:
    """Whole generations, held to PyTorch's, or to the same runtime's one by one.

    Attributes:
        name: how they were run, such as "greedy, alone".
        count: golden inputs.
        identical: generations with every token the same.
        tie_margin: a first divergence with a margin below this is a tie: both tokens are right.
        needed: the share that must be identical, ties counted as such.
        ties: the divergences at ties.
        divergences: the others.
    """

    name: str
    count: int
    identical: int
    tie_margin: float
    needed: float = 1.0
    ties: list[Divergence] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Something was compared, and no more diverged than may."""
        return self.count > 0 and self.agreement >= self.needed

    @property
    def agreement(self) -> float:
        """The share that is identical, ties counted as such."""
        return 1 - len(self.divergences) / max(self.count, 1)


@dataclass(frozen=True, kw_only=True)
class ParityReport:
    """The verdict on one variant of a bundle.

    Attributes:
        variant: its name.
        backend: what ran it.
        synthetic: whether the golden inputs are random ids instead of real text.
        tensors: step-by-step comparisons; empty when the checkpoint was not at hand.
        argmax_agreement: share of teacher-forced steps with PyTorch's best token; None likewise.
        generations: golden inputs.
    """

    variant: str
    backend: str
    synthetic: bool
    tensors: list[TensorComparison]
    argmax_agreement: float | None
    generations: list[GenerationComparison]

    @property
    def passed(self) -> bool:
        """Every comparison passed."""
        return all(c.passed for c in self.tensors) and all(c.passed for c in self.generations)

    @property
    def worst_tensor(self) -> TensorComparison | None:
        """The tensor closest to its limit, or furthest beyond."""
        return max(self.tensors, key=lambda c: c.error / c.limit, default=None)

    def facts(self) -> dict[str, Any]:
        """The report as plain values, each part with its verdict."""
        state: dict[str, Any] = {"passed": self.passed, **asdict(self)}
        for name in ("tensors", "generations"):
            for entry, part in zip(state[name], getattr(self, name), strict=True):
                entry["passed"] = part.passed
        return state

    def problems(self) -> list[str]:
        """Every failure in a sentence."""
        found = [
            f"{c.name}: error {c.error:.2e} is above {c.limit:.2e} (PyTorch's own float32 error is {c.own_error:.2e})"
            for c in self.tensors
            if not c.passed
        ]
        for comparison in self.generations:
            if not comparison.count:
                found.append(f"{comparison.name}: no golden inputs to compare")
            if comparison.passed:
                continue
            if comparison.needed < 1:
                found.append(
                    f"{comparison.name}: {comparison.agreement:.1%} agree, {comparison.needed:.0%} are needed; the "
                    f"first of {len(comparison.divergences)} that diverge:"
                )
            found += [
                f"{comparison.name}: input {d.index}{'' if d.text is None else f' ({d.text!r})'} diverges at token "
                f"{d.step}: expected {d.expected}, found {d.found}, margin {d.margin:.2e}"
                for d in comparison.divergences[: None if comparison.needed == 1 else 1]
            ]
        return found


def reports_json(reports: Sequence[ParityReport]) -> str:
    """The reports on a bundle's variants as JSON."""
    state = {"passed": all(report.passed for report in reports), "variants": [report.facts() for report in reports]}
    return json.dumps(state, indent=2, ensure_ascii=False) + "\n"
