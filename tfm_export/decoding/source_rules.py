"""What a source's tokens change in the scores of its target, prepared once a request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class SourceRules:
    """What a source's tokens change after any target.

    Attributes:
        tokens: those that encoder_repetition_penalty makes likelier.
        ngrams: the tokens that may not follow some others, since the source has them in that order.
    """

    tokens: frozenset[int] = frozenset()
    ngrams: Mapping[tuple[int, ...], frozenset[int]] = field(default_factory=dict)


NO_SOURCE_RULES = SourceRules()


def ngrams(tokens: Sequence[int], size: int) -> dict[tuple[int, ...], frozenset[int]]:
    """The n-grams of this size: by all their tokens but the last, those that come last."""
    found: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
    for begin in range(len(tokens) - size + 1):
        found[tuple(tokens[begin : begin + size - 1])].add(tokens[begin + size - 1])
    return {first: frozenset(last) for first, last in found.items()}
