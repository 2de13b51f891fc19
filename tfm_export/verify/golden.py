"""Golden inputs: what PyTorch gave for them, and whether a runtime gives the same."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest

from tfm_export.bundle import Bundle, SpecialIds
from tfm_export.decoding import DecodeOptions, generate
from tfm_export.errors import BundleError
from tfm_export.runtime.step_model import StepModel
from tfm_export.verify.report import Divergence, GenerationComparison

BATCH = 32


@dataclass(frozen=True, kw_only=True)
class Golden:
    """One golden input.

    Attributes:
        text: the source text; None for synthetic inputs.
        source_ids: what the encoder gets.
        tokens: PyTorch's greedy generation in float32, without the start token, with the end token if it came.
        log_probs: of each token.
        margins: between the two best tokens at each step, in float64.
    """

    text: str | None
    source_ids: list[int]
    tokens: list[int]
    log_probs: list[float]
    margins: list[float]


def read_golden(bundle: Bundle, name: str) -> list[Golden]:
    """The golden inputs of a bundle.

    Args:
        bundle: the bundle.
        name: of the file.

    Raises:
        BundleError: a line is not a golden input.
    """
    golden = []
    with open(bundle.path / name, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                golden.append(Golden(**json.loads(line)))
            except (ValueError, TypeError) as problem:
                raise BundleError(f"{name}, line {number} is not a golden input: {problem}", "export again") from None
    return golden


def golden_text(golden: Iterable[Golden]) -> str:
    """The contents of a golden file."""
    return "".join(json.dumps(asdict(g), ensure_ascii=False) + "\n" for g in golden)


def compare_generations(
    model: StepModel, golden: Sequence[Golden], special: SpecialIds, max_length: int, tie_margin: float
) -> list[GenerationComparison]:
    """Decode golden inputs greedily, one by one and in batches, and hold every token to PyTorch's.

    Args:
        model: the runtime to judge.
        golden: the inputs.
        special: the model's special ids.
        max_length: that the golden generations were made with.
        tie_margin: see `GenerationComparison`.
    """
    comparisons = []
    for name, batch in (("greedy, alone", 1), ("greedy, batched", BATCH)):
        options = DecodeOptions(max_decoding_length=max_length, max_batch_size=batch, return_end_token=True)
        results = generate(model, [g.source_ids for g in golden], options, special)
        found = [result.hypotheses[0].tokens for result in results]
        comparisons.append(_compare(name, golden, found, tie_margin))
    return comparisons


def _compare(
    name: str, golden: Sequence[Golden], found: Sequence[Sequence[int]], tie_margin: float
) -> GenerationComparison:
    different = [d for i, (g, tokens) in enumerate(zip(golden, found, strict=True)) if (d := _first(i, g, tokens))]
    return GenerationComparison(
        name=name,
        count=len(golden),
        identical=len(golden) - len(different),
        tie_margin=tie_margin,
        ties=[d for d in different if d.margin < tie_margin],
        divergences=[d for d in different if not d.margin < tie_margin],
    )


def _first(index: int, golden: Golden, found: Sequence[int]) -> Divergence | None:
    """The first token that differs."""
    for step, (expected, token) in enumerate(zip_longest(golden.tokens, found)):
        if expected != token:
            margin = golden.margins[step] if step < len(golden.margins) else float("inf")
            return Divergence(index=index, text=golden.text, step=step, expected=expected, found=token, margin=margin)
    return None
