"""What decoding is asked for one source, and what it answers."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tfm_export.decoding.constraints import Constraint
from tfm_export.errors import RequestError


def are_ids(value: object) -> bool:
    """Whether these are integers; whether a vocabulary has them is for the engine to tell."""
    return isinstance(value, Iterable) and all(isinstance(i, numbers.Integral) for i in value)


def check_ending(deadline: object, cancelled: object) -> None:
    """Make sure that what may end a request early is none, or of its kind.

    Args:
        deadline: a number of seconds that time can be compared with.
        cancelled: a `Cancellation`.

    Raises:
        RequestError: one is something else.
    """
    most = sys.float_info.max
    if deadline is not None and not (isinstance(deadline, numbers.Real) and (deadline <= most or deadline == math.inf)):
        raise RequestError(f"deadline must be a number of seconds, found {deadline!r}")
    if cancelled is not None and not callable(getattr(cancelled, "is_set", None)):
        raise RequestError(f"cancelled must have is_set(), as a threading.Event has, found {cancelled!r}")


class Cancellation(Protocol):
    """Tells that a request is no longer wanted; threading.Event is one."""

    def is_set(self) -> bool:
        """Whether to stop."""
        ...


@dataclass(frozen=True)
class SettledToken:
    """A token that can no longer change.

    Attributes:
        token: its id.
        log_prob: its log-probability; 0 where it was forced.
    """

    token: int
    log_prob: float


@dataclass(frozen=True, kw_only=True)
class Request:
    """A source and what is its own among the options.

    Attributes:
        source: ids, exactly as the encoder gets them.
        target_prefix: tokens that the target begins with; None takes the options' prefix.
        constraint: which tokens may follow what; None takes the options' constraint.
        seed: of this request's samples; None takes the options' seed.
        draw: which of the samples with this seed it is.
        deadline: seconds from its admission after which it gives what it has.
        cancelled: asked before every step.
        on_tokens: called with the tokens that a step settled; True ends the request there.

    Raises:
        RequestError: one of them is not of its type.
    """

    source: Sequence[int]
    target_prefix: Sequence[int] | None = None
    constraint: Constraint | None = None
    seed: int | None = None
    draw: int = 0
    deadline: float | None = None
    cancelled: Cancellation | None = None
    on_tokens: Callable[[list[SettledToken]], bool | None] | None = None

    def __post_init__(self) -> None:
        check_ending(self.deadline, self.cancelled)
        if self.on_tokens is not None and not callable(self.on_tokens):
            raise RequestError(f"on_tokens must be a function of a list of tokens, found {self.on_tokens!r}")
        seed: object = self.seed
        if seed is not None and not (isinstance(seed, numbers.Integral) and 0 <= int(seed) < 2**63):
            raise RequestError(f"seed must be an integer from 0 to {2**63 - 1}, found {seed!r}")
        if self.target_prefix is not None and not are_ids(self.target_prefix):
            raise RequestError(f"target_prefix must be ids, found {self.target_prefix!r}")


class Reason(Enum):
    """Why a request came to its end."""

    END = "end token"
    LENGTH = "length limit"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    CALLBACK = "callback"


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """One way to go on to the end.

    Attributes:
        tokens: target ids, the forced prefix included, without the start token; the end token only where the options
            ask for it.
        score: the sum of log_probs, divided as the options' length formula says.
        log_probs: the log-probability of each token and of the end token, if it came; 0 where a token was forced.
            None where the options do not want them.
        finished: an end token came.
        distributions: float32 [tokens, V], the log-probabilities that each token was chosen from (the forced ones
            excepted), where the options ask for them.
        attention: float32 [tokens, source length], the weights that each token, the forced ones included, gives to the
            source tokens, where the options ask for them.
    """

    tokens: list[int]
    score: float
    log_probs: list[float] | None
    finished: bool
    distributions: NDArray[np.float32] | None = None
    attention: NDArray[np.float32] | None = None


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """What a request cost.

    Attributes:
        steps: decoder steps that it took part in.
        seconds: from its admission to its end; batch mates share them.
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


def merged(results: Sequence[Result], *, keep_order: bool = False) -> Result:
    """Several searches for one source as one result, the best hypothesis first unless the order is to be kept."""
    if len(results) == 1 and len(results[0].hypotheses) == 1:
        return results[0]
    best = [hypothesis for result in results for hypothesis in result.hypotheses]
    if not keep_order:
        best.sort(key=lambda hypothesis: -hypothesis.score)
    costs = [result.statistics for result in results]
    statistics = Statistics(
        steps=sum(cost.steps for cost in costs),
        seconds=max(cost.seconds for cost in costs),
        cache_bytes=sum(cost.cache_bytes for cost in costs),
    )
    reasons = {result.reason for result in results}
    reason = next(reason for reason in reversed(Reason) if reason in reasons)
    return Result(hypotheses=best, statistics=statistics, reason=reason)
