"""Golden inputs: what PyTorch gave for them, and whether a runtime gives the same."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from tfm_export.bundle import Bundle, SpecialIds
from tfm_export.decoding import DecodeOptions, Hypothesis, generate
from tfm_export.errors import BundleError
from tfm_export.field_types import field_problems
from tfm_export.json_text import parse_json
from tfm_export.precision import Precision
from tfm_export.progress import Progress
from tfm_export.quotation import shorten
from tfm_export.runtime.step_model import Ids, Mask, Sentences, StepModel, WrappedModel
from tfm_export.text_files import read_text, split_lines
from tfm_export.verify.report import Divergence, GenerationComparison

BATCH = 32
PADDING = 7


@dataclass(frozen=True, kw_only=True)
class BeamGolden:
    """What PyTorch's beam search gave.

    Attributes:
        tokens: the best hypothesis, without the start token, with the end token if it came.
        score: its log-probability divided by length ** length_penalty.
        margin: the smallest difference, a token, by which the search kept one hypothesis and not another.
    """

    tokens: list[int]
    score: float
    margin: float = math.inf


@dataclass(frozen=True, kw_only=True)
class Golden:
    """One golden input.

    Attributes:
        text: the source text; None for random ids, and where the bundle has no tokenizer.
        source_ids: what the encoder gets.
        tokens: PyTorch's greedy generation in float32, without the start token, with the end token if it came.
        log_probs: of each token.
        margins: between the two best tokens at each step, in float64.
        beam: its beam search, where one was made.
    """

    text: str | None
    source_ids: list[int]
    tokens: list[int]
    log_probs: list[float]
    margins: list[float]
    beam: BeamGolden | None = None


def read_golden(bundle: Bundle, name: str) -> list[Golden]:
    """The golden inputs of a bundle.

    Args:
        bundle: the bundle.
        name: of the file.

    Raises:
        BundleError: a line is not a golden input.
    """
    golden = []
    try:
        lines = split_lines(read_text(bundle.path / name))
    except UnicodeDecodeError as problem:
        raise BundleError(f"{name} is not text in UTF-8: {problem}", "export again") from None
    for number, line in enumerate(lines, 1):
        try:
            golden.append(_golden(parse_json(line)))
        except (ValueError, TypeError, KeyError, AttributeError) as problem:
            raise BundleError(
                f"{name}, line {number} is not a golden input: {shorten(str(problem), 400)}", "export again"
            ) from None
    return golden


def _golden(state: dict[str, Any]) -> Golden:
    beam = state.pop("beam", None)
    golden = Golden(**state, beam=None if beam is None else BeamGolden(**beam))
    problems = [*field_problems(golden), *(field_problems(golden.beam, "beam.") if golden.beam else ())]
    if problems:
        raise ValueError("; ".join(problems))
    return golden


def golden_text(golden: Iterable[Golden]) -> str:
    """The contents of a golden file."""
    return "".join(json.dumps(asdict(g), ensure_ascii=False) + "\n" for g in golden)


class PaddedModel(WrappedModel):
    """A model whose sources all get some more padding: results must not change.

    Args:
        model: the one to pass everything on to.
        columns: how many, as far as the longest source allows.
    """

    def __init__(self, model: StepModel, columns: int = PADDING) -> None:
        super().__init__(model)
        self._columns = columns

    def encode(self, source_ids: Ids, source_mask: Mask, *, capacity: int) -> Sentences:
        """Pad, then encode."""
        columns = min(self._columns, self.limits.max_source_length - source_ids.shape[1])
        padding = ((0, 0), (0, columns))
        return super().encode(np.pad(source_ids, padding), np.pad(source_mask, padding), capacity=capacity)

    def close(self) -> None:
        """The model is its owner's to close."""


def compare_generations(
    model: StepModel,
    golden: Sequence[Golden],
    special: SpecialIds,
    facts: dict[str, Any],
    precision: Precision,
    progress: Progress,
) -> list[GenerationComparison]:
    """Decode golden inputs one by one, in batches and in padded batches, and hold every token to PyTorch's.

    A precision that rounds is held to its share of PyTorch's generations, and its batches to what it gave alone.

    Args:
        model: the runtime to judge.
        golden: the inputs.
        special: the model's special ids.
        facts: how they were decoded, as the manifest tells it: max_length, beam_size, length_penalty; tie_margin.
        precision: how much must agree.
        progress: told what begins.
    """
    searches = {"greedy": (golden, DecodeOptions(max_decoding_length=facts["max_length"], return_end_token=True))}
    with_beam = [g for g in golden if g.beam is not None]
    if with_beam:
        beam = replace(searches["greedy"][1], beam_size=facts["beam_size"], length_penalty=facts["length_penalty"])
        searches[f"beam {beam.beam_size}"] = (with_beam, beam)
    comparisons = []
    for search, (inputs, options) in searches.items():
        decode = partial(_decode, model, options, special)
        beams = partial(_beam_difference, options.length_penalty)
        difference = _greedy_difference if options.beam_size == 1 else beams
        comparisons += compare_search(search, inputs, decode, facts, precision, progress, difference)
    return comparisons


def _decode(
    model: StepModel,
    options: DecodeOptions,
    special: SpecialIds,
    sources: Sequence[Sequence[int]],
    batch: int,
    columns: int,
) -> list[Hypothesis]:
    runtime = PaddedModel(model, columns) if columns else model
    results = generate(runtime, sources, replace(options, max_batch_size=batch), special)
    return [result.hypotheses[0] for result in results]


def _greedy_difference(index: int, golden: Golden, found: Hypothesis) -> Divergence | None:
    """The first token that differs, with the margin that PyTorch had there."""
    step = _first_difference(golden.tokens, found.tokens)
    if step is None:
        return None
    margin = golden.margins[step] if step < len(golden.margins) else math.inf
    return _divergence(index, golden, step, golden.tokens, found.tokens, margin)


# Sources, how many to decode at once, columns of padding to add to them -> the best hypothesis of each, end token kept.
Decode = Callable[[Sequence[Sequence[int]], int, int], list[Hypothesis]]
Difference = Callable[[int, Golden, Hypothesis], Divergence | None]


def compare_search(
    search: str,
    golden: Sequence[Golden],
    decode: Decode,
    facts: dict[str, Any],
    precision: Precision,
    progress: Progress,
    difference: Difference = _greedy_difference,
) -> list[GenerationComparison]:
    """Hold one way of decoding to what PyTorch gave.

    Args:
        search: its name.
        golden: the inputs.
        decode: decodes them.
        facts: how they were decoded, as the manifest tells it.
        precision: how much must agree.
        progress: told what begins.
        difference: finds what is different about a hypothesis.
    """
    margin = tie_margin(facts)
    comparisons: list[GenerationComparison] = []
    alone: list[Hypothesis] = []
    for how, batch, columns in (("alone", 1, 0), ("batched", BATCH, 0), ("padded", BATCH, PADDING)):
        progress(f"comparing golden inputs: {search}, {how}")
        best = decode([g.source_ids for g in golden], batch, columns)
        comparisons.append(_compare(f"{search}, {how}", golden, best, difference, margin, precision.agreement))
        if how == "alone":
            alone = best
        elif precision.agreement < 1:
            needed = 1.0 if precision.batch_invariant else precision.agreement
            comparisons.append(_compare_with_alone(f"{search}, {how} as alone", golden, alone, best, needed))
    return comparisons


def tie_margin(facts: Mapping[str, Any]) -> float:
    """The margin between two tokens, in float64, below which float32 may choose either.

    Args:
        facts: what the manifest tells of the golden inputs.
    """
    if "tie_margin" in facts:
        return float(facts["tie_margin"])
    return max(2 * float(facts["own_error"]), 1e-4)  # bundles of before it was measured tell PyTorch's own error


def _compare(
    name: str,
    golden: Sequence[Golden],
    found: Sequence[Hypothesis],
    difference: Difference,
    tie_margin: float,
    needed: float = 1.0,
) -> GenerationComparison:
    different = [d for i, pair in enumerate(zip(golden, found, strict=True)) if (d := difference(i, *pair))]
    return GenerationComparison(
        name=name,
        count=len(golden),
        identical=len(golden) - len(different),
        tie_margin=tie_margin,
        needed=needed,
        ties=[d for d in different if d.margin < tie_margin],
        divergences=[d for d in different if not d.margin < tie_margin],
    )


def _compare_with_alone(
    name: str, golden: Sequence[Golden], alone: Sequence[Hypothesis], found: Sequence[Hypothesis], needed: float
) -> GenerationComparison:
    """Hold batches to what the same runtime gave one by one."""
    divergences = []
    for index, (one, expected, tokens) in enumerate(zip(golden, alone, found, strict=True)):
        step = _first_difference(expected.tokens, tokens.tokens)
        if step is not None:
            margin = abs(expected.rank - tokens.rank)
            divergences.append(_divergence(index, one, step, expected.tokens, tokens.tokens, margin))
    return GenerationComparison(
        name=name,
        count=len(golden),
        identical=len(golden) - len(divergences),
        tie_margin=0.0,
        needed=needed,
        divergences=divergences,
    )


def _beam_difference(length_penalty: float, index: int, golden: Golden, found: Hypothesis) -> Divergence | None:
    """The first token that differs, with the margin, a token, between the two hypotheses or at any earlier choice."""
    assert golden.beam is not None
    step = _first_difference(golden.beam.tokens, found.tokens)
    if step is None:
        return None
    length = max(len(golden.beam.tokens), len(found.tokens), 1)
    margin = abs(golden.beam.score - found.rank) * length ** (length_penalty - 1)
    return _divergence(index, golden, step, golden.beam.tokens, found.tokens, min(margin, golden.beam.margin))


def _first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip_longest(expected, found)) if a != b), None)


def _divergence(
    index: int, golden: Golden, step: int, expected: Sequence[int], found: Sequence[int], margin: float
) -> Divergence:
    return Divergence(
        index=index,
        text=golden.text,
        step=step,
        expected=expected[step] if step < len(expected) else None,
        found=found[step] if step < len(found) else None,
        margin=margin,
    )
