"""Whether our reading of a checkpoint is the user's model: their own pairs, and in words what was proven without."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tfm_export.bundle import Bundle, Limits, Manifest
from tfm_export.errors import ParityError
from tfm_export.progress import Progress
from tfm_export.verify.cpu import cpu_model
from tfm_export.verify.expectation_file import Expectations
from tfm_export.verify.expectations import FEW, ExpectedComparison, ReadModel, compare_expectations, expected_log_probs
from tfm_export.verify.golden import tie_margin

if TYPE_CHECKING:
    from reference_model import Transformer
    from tfm_export.checkpoints import SourceModel
    from tfm_export.verify.report import ParityReport
    from tfm_export.verify.settings_search import Readings, SearchResult

GIVEN = "as given"


@dataclass(frozen=True, kw_only=True)
class ReadingProof:
    """How a checkpoint was read, and what says that this is right.

    Attributes:
        pairs: of the user's own that came out as expected when the bundle was made.
        with_log_probs: of them, those with log-probabilities.
        transformers: the version of transformers that gave the same for the folder; empty if none did.
        inputs: for how many inputs it did.
        answers: the settings that the file does not tell, each with its value and where that comes from.
    """

    pairs: int = 0
    with_log_probs: int = 0
    transformers: str = ""
    inputs: int = 0
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest) -> ReadingProof:
        """What a bundle's manifest tells; bundles of before it did tell what was said of the checkpoint."""
        state = manifest.model.get("reading")
        if state is None:
            settings = manifest.model.get("settings", {})
            return cls(answers={name: {"value": value, "origin": GIVEN} for name, value in settings.items()})
        return cls(**{name: value for name, value in state.items() if name != "verdict"})

    def shown_by(self, found: ExpectedComparison | None) -> ReadingProof:
        """The same after more pairs were compared."""
        if found is None or not found.passed or found.count < self.pairs:
            return self
        return replace(self, pairs=found.count, with_log_probs=found.with_log_probs)

    def text(self) -> str:
        """What was proven of the reading, and what was not, in a line or two."""
        rest = answers_text(self.answers)
        if self.pairs:
            known = f" ({self.with_log_probs} with log-probabilities)" if self.with_log_probs else ""
            return f"the reading is your model's on {self.pairs} of your own pairs{known}" + (
                f"; answered, and right there: {rest}" if rest else ""
            )
        if self.transformers:
            return f"proven: transformers {self.transformers} gives the same for the folder on {self.inputs} inputs" + (
                f"; answered, and right there: {rest}" if rest else ""
            )
        proven = "proven: the graphs compute what this reading of the checkpoint computes; not proven: that this "
        alone = f"reading is your model. On answers alone rest {rest}" if rest else "reading is your model"
        return f"{proven}{alone} (--expect FILE with your own pairs proves it)"


def answers_text(answers: Mapping[str, Mapping[str, Any]]) -> str:
    """Answers for people, each with its origin unless the user gave it."""
    return ", ".join(
        f"{name} {_value_text(answer['value'])}" + (f" ({answer['origin']})" if answer["origin"] != GIVEN else "")
        for name, answer in answers.items()
    )


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"of {len(value)} weights" if isinstance(value, dict) else str(value)


def check_reading(
    readings: Readings, expectations: Expectations, *, limit: float | None = None, progress: Progress
) -> ExpectedComparison:
    """Hold the reading of a checkpoint to the user's own pairs.

    Args:
        readings: of the checkpoint.
        expectations: the pairs.
        limit: how far rounding may take a log-probability; None measures it, which takes a reference model.
        progress: told what begins.

    Raises:
        ParityError: pairs do not come out as expected; with the answers that the reading rests on, and others with
            which they do.
    """
    progress(f"decoding the {len(expectations.pairs)} pairs of {expectations.name}")
    if limit is None:
        limit = rounding_limit(readings.source.model, readings.given, expectations)  # type: ignore[arg-type]
    found = compare_expectations(readings.given, expectations, limit=limit)
    if found.passed:
        return found
    from tfm_export.verify.settings_search import search_answers

    wrong = [mismatch.number for mismatch in found.mismatches]
    search = search_answers(readings, expectations, wrong, limit=limit, progress=progress)
    raise reading_error(found, expectations.name, readings.source.answers, search)


def explain_pairs(
    bundle: Bundle,
    source: SourceModel,
    reports: Sequence[ParityReport],
    expectations: Expectations,
    *,
    progress: Progress,
) -> ParityError | None:
    """Why pairs are all that is wrong with a bundle: it computes another reading of its checkpoint than the user's.

    Args:
        bundle: that was judged.
        source: the checkpoint that it was made of, read as it was then.
        reports: on the bundle.
        expectations: the pairs.
        progress: told what begins.

    Returns:
        The error that names other answers; None where something else is wrong, or this reading gives the pairs.
    """
    wrong = [report for report in reports if not report.passed]
    if not wrong or not all(replace(report, expected=None).passed for report in wrong):
        return None
    try:
        check_source(source, expectations, bundle=bundle, limits=bundle.manifest.limits, progress=progress)
    except ParityError as error:
        return error
    return None


def check_source(
    source: SourceModel,
    expectations: Expectations,
    *,
    bundle: Bundle | None = None,
    limits: Limits | None = None,
    progress: Progress,
) -> ExpectedComparison:
    """Hold a checkpoint, as it was read, to the user's own pairs.

    Args:
        source: the checkpoint; an adapter is held to them by the graphs that were made of it.
        expectations: the pairs.
        bundle: with these graphs.
        limits: the longest sequences; by default those that the model takes.
        progress: told what begins.

    Raises:
        ParityError: see `check_reading`.
    """
    from tfm_export.checkpoints import Adapter, read_checkpoint
    from tfm_export.verify.settings_search import Readings

    if not isinstance(source.model, Adapter):
        readings = Readings(source, limits=limits, reread=partial(read_checkpoint, source.path))
        return check_reading(readings, expectations, progress=progress)
    assert bundle is not None, "an adapter decodes by its graphs"
    with cpu_model(bundle, "fp32") as model:
        limit = tie_margin(bundle.manifest.golden) / 2
        return check_reading(Readings(source, model=model), expectations, limit=limit, progress=progress)


def reading_error(
    found: ExpectedComparison, name: str, answers: Mapping[str, Mapping[str, Any]], search: SearchResult
) -> ParityError:
    """What came out wrong, what that rests on, and what to type instead."""
    problems = [f"{name}: {found.problems()[0]}", *found.problems()[1:]]
    problems.append(f"answered, and not told by the file: {answers_text(answers) or 'nothing'}")
    right = [other for other in search.best if other.right == found.count]
    problems += [
        f"with {other.to_type()} instead, {other.right} of {found.count} come out as expected "
        f"(log-probability of an expected token {other.log_prob:.4f}"
        + (f"; as read {search.log_prob:.4f})" if search.log_prob > -math.inf else ")")
        for other in right or search.best
    ]
    tried = f"{search.tried} other answers were tried, one and two at a time"
    if not search.finished:
        tried += ", until the time for it was over"
    if not right:
        problems.append(f"{tried}: none makes all pairs come out as expected")
        hint = "settings that your own code has; is the file what that code computed, with these weights, greedily?"
        return ParityError(problems, hint)
    hint = right[0].to_type()
    if len(right) > 1:
        hint += "; several answers give these pairs, and log-probabilities in the file tell them apart"
    return ParityError(problems, hint)


def rounding_limit(model: Transformer, read: ReadModel, expectations: Expectations) -> float:
    """How far rounding to float32 may take the log-probability of a token: what it does on a few pairs, with a margin.

    Args:
        model: the reference model in float32.
        read: the same, with its tokenizer.
        expectations: the pairs.
    """
    import torch

    from tfm_export.precision import FLOAT32_EPSILON, TIMES_ROUNDING
    from tfm_export.runtime.torch_model import TorchModel
    from tfm_export.verify.reference import in_precision

    exact = TorchModel(in_precision(model, torch.float64), limits=read.model.limits)  # type: ignore[arg-type]
    pairs = expectations.pairs[:FEW]
    rounded = expected_log_probs(read, pairs)
    true = expected_log_probs(ReadModel(model=exact, tokenizer=read.tokenizer, special=read.special), pairs)
    return TIMES_ROUNDING * max([FLOAT32_EPSILON, *_distances(rounded, true)])


def _distances(one: Sequence[list[float] | None], other: Sequence[list[float] | None]) -> list[float]:
    return [abs(a - b) for x, y in zip(one, other, strict=True) if x and y for a, b in zip(x, y, strict=True)]
