"""What verification measured, and the verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tfm_export.verify.expectations import ExpectedComparison


@dataclass(frozen=True, kw_only=True)
class TensorComparison:
    """How far one tensor is from what it should be, computed in float64.

    Attributes:
        name: as in the graph's table.
        error: largest absolute difference.
        rounding: what rounding explains of it, as measured.
        limit: the largest accepted error.
        case: the inputs at which the error was.
    """

    name: str
    error: float
    rounding: float
    limit: float
    case: str = ""

    @property
    def passed(self) -> bool:
        """Within a limit that is a number; an error that is none is not."""
        return self.error <= self.limit < math.inf

    @property
    def share(self) -> float:
        """The part of the limit that the error takes; above 1 it is beyond."""
        if not 0 < self.limit < math.inf:
            return 0.0 if self.passed else math.inf
        return self.error / self.limit


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first token of a generation that is not PyTorch's.

    Attributes:
        index: of the golden input.
        text: of the golden input, if it has one.
        step: of the token, from 0.
        expected: the token that PyTorch gave; None if it had ended.
        found: the token that came; None if it had ended.
        margin: greedy: between PyTorch's two best tokens at this step, in float64; beam: a token, between the
            two hypotheses or at the closest choice that PyTorch's search made.
        detail: what is different, in words, where it is not a token of a generation.
    """

    index: int
    text: str | None
    step: int
    expected: int | None
    found: int | None
    margin: float
    detail: str = ""

    @property
    def in_words(self) -> str:
        """What follows the name of the input."""
        if self.detail:
            return f": {self.detail}"
        return f" diverges at token {self.step}: expected {self.expected}, found {self.found}, margin {self.margin:.2e}"


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
        hint: what to try if it is all that failed; empty for that of every generation.
    """

    name: str
    count: int
    identical: int
    tie_margin: float
    needed: float = 1.0
    ties: list[Divergence] = field(default_factory=list)
    divergences: list[Divergence] = field(default_factory=list)
    hint: str = ""

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
        graph: the graphs in float64 against PyTorch in float64; empty when the checkpoint was not at hand.
        kernels: what ran the graphs, against the graphs in float64; empty where single numbers are not judged.
        argmax_agreement: share of teacher-forced steps with float64's best token; None where kernels is empty.
        generations: golden inputs.
        notes: what was not compared, and why.
        expected: the user's own pairs, where they gave some.
        reading: what says that the checkpoint's reading is the user's model, in words.
    """

    variant: str
    backend: str
    synthetic: bool
    graph: list[TensorComparison]
    kernels: list[TensorComparison]
    argmax_agreement: float | None
    generations: list[GenerationComparison]
    notes: list[str] = field(default_factory=list)
    expected: ExpectedComparison | None = None
    reading: str = ""

    @property
    def passed(self) -> bool:
        """Every comparison passed."""
        tensors, expected = (*self.graph, *self.kernels), self.expected is None or self.expected.passed
        return expected and all(c.passed for c in tensors) and all(c.passed for c in self.generations)

    def facts(self) -> dict[str, Any]:
        """The report as plain values, each part with its verdict."""
        state: dict[str, Any] = {"passed": self.passed, **asdict(self)}
        for name in ("graph", "kernels", "generations"):
            for entry, part in zip(state[name], getattr(self, name), strict=True):
                entry["passed"] = part.passed
        if self.expected is not None:
            state["expected"]["passed"] = self.expected.passed
        return state

    @property
    def hint(self) -> str:
        """What to try where something failed."""
        if not all(c.passed for c in self.graph):
            return "report this with the checkpoint's configuration: tfm-export does not compute what the model does"
        if not all(c.passed for c in self.kernels):
            return "another release of what computes it (pip install --upgrade onnxruntime); what it computes is right"
        if all(c.passed for c in self.generations):
            return (
                "tfm-export verify --checkpoint CHECKPOINT --expect FILE, which looks for settings that give the pairs"
            )
        hints = {c.hint for c in self.generations if not c.passed}
        if len(hints) == 1 and (hint := hints.pop()):
            return hint
        return "tfm-export verify --checkpoint, which tells whether the graphs or what runs them is wrong"

    def problems(self) -> list[str]:
        """Every failure in a sentence."""
        found = [
            f"{c.name}: the graph is not the model: in float64 it is off from PyTorch in float64 by {c.error:.2e}, "
            f"and rounding explains at most {c.limit:.2e}{_at(c)}"
            for c in self.graph
            if not c.passed
        ]
        found += [
            f"{c.name}: {self.backend} does not compute the graph: it is off from the graph in float64 by "
            f"{c.error:.2e}, and rounding to float32 explains at most {c.limit:.2e}{_at(c)}"
            for c in self.kernels
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
                f"{comparison.name}: input {d.index}{'' if d.text is None else f' ({d.text!r})'}{d.in_words}"
                for d in comparison.divergences[: None if comparison.needed == 1 else 1]
            ]
        return [*found, *([] if self.expected is None else self.expected.problems())]


def _at(comparison: TensorComparison) -> str:
    return f" ({comparison.case})" if comparison.case else ""


# Where to look in an adapter, by the first tensor that is wrong.
_ADAPTER_PARTS = {
    "cross_": (
        "encode and cross_keys_values, which give other numbers as a graph than in PyTorch: numbers drawn at random, "
        "state kept from one call to the next, sizes that are written as numbers"
    ),
    "self_": (
        "what decode_step computes before it calls cache.update, which is other token by token than for a whole "
        "target: embedding, positions (the slots of the cache are none, see slot_positions); above layer 0, the masks "
        "and the cache of the layers below"
    ),
}


def adapter_hint(report: ParityReport, *, has_decode: bool) -> str:
    """What to try where something failed and the code that the graphs were made of is the user's own.

    Args:
        report: that did not pass.
        has_decode: whether their adapter has a decode of its own.
    """
    wrong = [c.name for c in report.graph if not c.passed]
    if not wrong:
        return report.hint
    for kind, what in _ADAPTER_PARTS.items():
        if first := next((name for name in wrong if name.startswith(kind)), None):
            return f"{first} is the first that differs: look at {what}"
    if has_decode:
        return (
            "keys and values are right, and the logits differ: decode and decode_step do not compute the same. In "
            "PyTorch, compare adapter.decode(target_ids, memory, source_mask) with "
            "adapter.decode_with_cache(target_ids, memory, source_mask)[0]: positions, masks (source_mask, too), the "
            "order of the cache, the last norm, the projection"
        )
    return (
        "keys and values are right, and the logits differ: decode_step gives others token by token than for a whole "
        "target: look at self_mask (slots of the cache are no positions, see slot_positions) and at what it computes "
        "from sizes"
    )


def reports_json(reports: Sequence[ParityReport]) -> str:
    """The reports on a bundle's variants as JSON."""
    state = {"passed": all(report.passed for report in reports), "variants": [report.facts() for report in reports]}
    return json.dumps(state, indent=2, ensure_ascii=False) + "\n"
