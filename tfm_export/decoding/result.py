"""What decoding answers to one request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray


class Reason(Enum):
    """Why a request came to its end."""

    END = "end token"
    LENGTH = "length limit"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    CALLBACK = "callback"
    BUDGET = "budget"


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """One way to go on to the end.

    >>> best = model.generate("hello").hypotheses[0]
    >>> best.finished, len(best.tokens), len(best.log_probs)
    (True, 4, 5)

    Attributes:
        tokens: target ids, the forced prefix included, without the start token; the end token only where the options
            ask for it.
        score: the sum of log_probs, divided as the options' length formula says; None if the request was given up
            before anything was decoded.
        log_probs: the log-probability of each token and of the end token, if it came; 0 where a token was forced.
            None where the options do not want them.
        finished: an end token came.
        distributions: float32 [tokens, V], the log-probabilities that each token was chosen from (the forced ones
            excepted), where the options ask for them.
        attention: float32 [tokens, source length], the weights that each token, the forced ones included, gives to the
            source tokens, where the options ask for them.
    """

    tokens: list[int]
    score: float | None
    log_probs: list[float] | None
    finished: bool
    distributions: NDArray[np.float32] | None = None
    attention: NDArray[np.float32] | None = None

    @property
    def rank(self) -> float:
        """What hypotheses are compared by: the score, -inf where there is none."""
        return -math.inf if self.score is None else self.score


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """What a request cost.

    Attributes:
        steps: decoder steps that it took part in.
        seconds: from its joining a batch to its end; batch mates share them.
        cache_bytes: its self-attention cache at the end, in 32-bit floats.
    """

    steps: int
    seconds: float
    cache_bytes: int


@dataclass(frozen=True, kw_only=True)
class Result:
    """The answer to a request.

    Attributes:
        hypotheses: the best first.
        statistics: what they cost.
        reason: why it ended.
    """

    hypotheses: list[Hypothesis]
    statistics: Statistics
    reason: Reason

    @property
    def tokens(self) -> list[int]:
        """The target ids of the best hypothesis."""
        return self.hypotheses[0].tokens

    @property
    def score(self) -> float | None:
        """The score of the best hypothesis; None if the request was given up before anything was decoded."""
        return self.hypotheses[0].score


def merged(results: Sequence[Result], *, keep_order: bool = False) -> Result:
    """Several searches for one source as one result, the best hypothesis first unless the order is to be kept."""
    if len(results) == 1 and len(results[0].hypotheses) == 1:
        return results[0]
    best = [hypothesis for result in results for hypothesis in result.hypotheses]
    if not keep_order:
        best.sort(key=lambda hypothesis: -hypothesis.rank)
    costs = [result.statistics for result in results]
    statistics = Statistics(
        steps=sum(cost.steps for cost in costs),
        seconds=max(cost.seconds for cost in costs),
        cache_bytes=sum(cost.cache_bytes for cost in costs),
    )
    reasons = {result.reason for result in results}
    reason = next(reason for reason in reversed(Reason) if reason in reasons)
    return Result(hypotheses=best, statistics=statistics, reason=reason)
