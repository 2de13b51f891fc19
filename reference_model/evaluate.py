"""Measure how often a model is right.

    python -m reference_model.evaluate model.pt --test test.tsv --beam-size 4

The test file has lines "source<TAB>target"; every target that it lists for a source counts as right. Two figures, for
greedy and for beam search:

- exact-match error: the share of sources whose output is none of their targets. In grapheme-to-phoneme this is the
  word error rate, WER.
- token error rate: the edit distance from the output to the nearest target, divided by that target's length, both
  summed over all sources. In grapheme-to-phoneme this is the phoneme error rate, PER.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from reference_model.checkpoint import Checkpoint, SpecialIds, load_checkpoint
from reference_model.data import encode_source, pad, read_pairs
from reference_model.search import Hypothesis, beam_batch, greedy

SearchFunction = Callable[[Tensor, Tensor], list[Hypothesis]]


@dataclass(frozen=True, kw_only=True)
class Example:
    """A source and all that counts as right for it, in ids, without start and end tokens of the targets."""

    source: list[int]
    targets: list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Score:
    """How one way of decoding did.

    Attributes:
        method: "greedy" or "beam K".
        sources: how many were decoded.
        exact_match_error: share of sources whose output is none of their targets, 0 to 1.
        token_error_rate: edits to the nearest target per token of it; above 1 when outputs are far too long.
        seconds: the time it took.
    """

    method: str
    sources: int
    exact_match_error: float
    token_error_rate: float
    seconds: float


def edit_distance(a: Sequence[int], b: Sequence[int]) -> int:
    """The least number of insertions, deletions and substitutions that turn a into b (Levenshtein)."""
    row = list(range(len(b) + 1))  # row[j]: the distance from the part of a seen so far to b[:j]
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def nearest(output: Sequence[int], targets: list[list[int]]) -> tuple[int, int]:
    """The edit distance to the nearest target, and that target's length; of equally near ones, the first counts."""
    return min(((edit_distance(output, target), len(target)) for target in targets), key=lambda pair: pair[0])


def read_examples(path: Path, checkpoint: Checkpoint, limit: int | None = None) -> list[Example]:
    """The sources of a test file, each once, in the order of the file.

    Raises:
        ValueError: the file is empty or malformed, or the checkpoint cannot encode it.
    """
    if checkpoint.source_vocabulary is None or checkpoint.target_vocabulary is None:
        raise ValueError("the checkpoint has no vocabularies: it cannot read text")
    targets_of: dict[str, list[str]] = {}
    for source, target in read_pairs(path):
        targets_of.setdefault(source, []).append(target)
    if not targets_of:
        raise ValueError(f"{path} is empty")
    return [
        Example(
            source=encode_source(source, checkpoint.source_vocabulary, checkpoint.special_ids),
            targets=[checkpoint.target_vocabulary.encode(target) for target in targets],
        )
        for source, targets in list(targets_of.items())[:limit]
    ]


def evaluate(
    method: str, search: SearchFunction, examples: list[Example], special: SpecialIds, batch_size: int = 64
) -> Score:
    """Decode all examples and compare.

    Args:
        method: the name to give the score.
        search: source_ids [B, S], source_mask [B, S] -> the best hypothesis of each.
        examples: what to decode.
        special: for the padding id.
        batch_size: sources decoded together; those of like length, whatever their order.
    """
    start, wrong, edits, tokens = time.perf_counter(), 0, 0, 0
    examples = sorted(examples, key=lambda example: len(example.source))
    with tqdm(total=len(examples), desc=method, unit=" sources", leave=False) as bar:
        for first in range(0, len(examples), batch_size):
            batch = examples[first : first + batch_size]
            lengths = torch.tensor([len(example.source) for example in batch])
            source_ids = pad([example.source for example in batch], special.pad)
            hypotheses = search(source_ids, torch.arange(source_ids.size(1)) < lengths[:, None])
            for example, hypothesis in zip(batch, hypotheses, strict=True):
                distance, length = nearest(hypothesis.tokens, example.targets)
                wrong, edits, tokens = wrong + (distance > 0), edits + distance, tokens + length
            bar.update(len(batch))
    return Score(
        method=method,
        sources=len(examples),
        exact_match_error=wrong / len(examples),
        token_error_rate=edits / max(tokens, 1),
        seconds=time.perf_counter() - start,
    )


def evaluate_checkpoint(checkpoint: Checkpoint, examples: list[Example], beam_size: int) -> list[Score]:
    """Greedy search, and beam search unless beam_size is 1."""
    model, special, generation = checkpoint.model, checkpoint.special_ids, checkpoint.generation

    def greedy_search(source_ids: Tensor, source_mask: Tensor) -> list[Hypothesis]:
        return greedy(model, source_ids, source_mask, special, generation.max_length)

    def beam_search(source_ids: Tensor, source_mask: Tensor) -> list[Hypothesis]:
        results = beam_batch(
            model, source_ids, source_mask, special, generation.max_length, beam_size, generation.length_penalty
        )
        return [hypotheses[0] for hypotheses in results]

    scores = [evaluate("greedy", greedy_search, examples, special)]
    if beam_size > 1:
        scores.append(evaluate(f"beam {beam_size}", beam_search, examples, special))
    return scores


def table(scores: list[Score]) -> str:
    """The scores for people."""
    head = f"{'method':<10}{'sources':>9}{'exact-match error':>20}{'token error rate':>19}{'seconds':>10}"
    lines = (
        f"{score.method:<10}{score.sources:>9,}{score.exact_match_error:>20.2%}{score.token_error_rate:>19.2%}"
        f"{score.seconds:>10.1f}"
        for score in scores
    )
    return "\n".join([head, *lines])


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m reference_model.evaluate",
        description="Decode a test file, greedily and with beam search, and count the errors: the exact-match error "
        "(WER in grapheme-to-phoneme) and the token error rate (PER). Every target listed for a source is right.",
        epilog="example: python -m reference_model.evaluate examples/g2p/g2p.pt --test test.tsv --beam-size 4",
    )
    parser.add_argument("checkpoint", type=Path, help="a checkpoint of reference_model")
    parser.add_argument("--test", type=Path, required=True, help="lines of source<TAB>target")
    parser.add_argument("--beam-size", type=int, default=4, help="hypotheses kept; 1 for greedy alone [4]")
    parser.add_argument("--limit", type=int, help="decode the first LIMIT sources only [all]")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(arguments)
    for name in ("beam_size", "limit"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, found {value}")
    return args


def main(arguments: list[str] | None = None) -> None:
    """Parse, decode, print."""
    args = parse_arguments(arguments)
    try:
        checkpoint = load_checkpoint(args.checkpoint)
    except (OSError, ValueError, RuntimeError) as problem:
        sys.exit(f"{args.checkpoint}: {problem}")
    try:
        examples = read_examples(args.test, checkpoint, args.limit)
    except (OSError, ValueError) as problem:
        sys.exit(f"{args.test}: {problem}")
    scores = evaluate_checkpoint(checkpoint, examples, args.beam_size)
    print(json.dumps([asdict(score) for score in scores], indent=2) if args.json else table(scores))


if __name__ == "__main__":
    main()
