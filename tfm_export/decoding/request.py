"""What decoding is asked for one source, and how far a session has come with it."""

from __future__ import annotations

import math
import numbers
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from numpy.random import Generator

from tfm_export.decoding.constraints import Constraint
from tfm_export.decoding.result import Hypothesis, Reason
from tfm_export.decoding.source_rules import NO_SOURCE_RULES, SourceRules
from tfm_export.errors import RequestError
from tfm_export.quotation import quote
from tfm_export.runtime.step_model import Floats

if TYPE_CHECKING:
    from tfm_export.decoding.options import DecodeOptions
    from tfm_export.decoding.search import Search


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

    >>> from tfm_export.decoding import Request
    >>> Request(source=[13, 10, 17, 17, 20, 2], target_prefix=[12], deadline=2.0).deadline
    2.0

    Attributes:
        source: ids, exactly as the encoder gets them.
        target_prefix: tokens that the target begins with; None takes the options' prefix.
        forced_bos: the token that the target begins with, before its prefix; None takes the options'. It counts as
            searched for, as theirs does.
        start_token: what the decoder starts from; None takes the options', or the model's.
        constraint: which tokens may follow what; None takes the options' constraint.
        seed: of this request's samples; None takes the options' seed.
        draw: which of the samples with this seed it is.
        deadline: seconds after which it gives what it has; they count from `admitted`.
        admitted: a time on the clock of `time.perf_counter`; None is the moment when it joins a batch, so that no time
            counts in which it waits for others.
        ends_at: a time on the same clock at which the budget of a whole call is over, and the request gives what it
            has, whether or not it has joined a batch.
        cancelled: asked before every step; once it is set, the request gives what it has.
        on_tokens: called with the tokens that a step settled; True ends the request there.
        priority: of the requests that wait the highest joins a batch first, of equals the one that came first.

    Raises:
        RequestError: one of them is not of its type.
    """

    source: Sequence[int]
    target_prefix: Sequence[int] | None = None
    forced_bos: int | None = None
    start_token: int | None = None
    constraint: Constraint | None = None
    seed: int | None = None
    draw: int = 0
    deadline: float | None = None
    admitted: float | None = None
    ends_at: float | None = None
    cancelled: Cancellation | None = None
    on_tokens: Callable[[list[SettledToken]], bool | None] | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        check_ending(self.deadline, self.cancelled)
        for name in ("admitted", "ends_at"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, numbers.Real) and math.isfinite(value)):
                raise RequestError(f"{name} must be a time of time.perf_counter(), found {quote(value)}")
        for name in ("forced_bos", "start_token"):
            if not ((value := getattr(self, name)) is None or are_ids([value])):
                raise RequestError(f"{name} must be an id, found {quote(value)}")
        if not are_ids([self.priority]):
            raise RequestError(f"priority must be an integer, found {quote(self.priority)}")
        if self.on_tokens is not None and not callable(self.on_tokens):
            raise RequestError(f"on_tokens must be a function of a list of tokens, found {quote(self.on_tokens)}")
        seed: object = self.seed
        if seed is not None and not (isinstance(seed, numbers.Integral) and 0 <= int(seed) < 2**63):
            raise RequestError(f"seed must be an integer from 0 to {2**63 - 1}, found {quote(seed)}")
        if self.target_prefix is not None and not are_ids(self.target_prefix):
            raise RequestError(f"target_prefix must be ids, found {quote(self.target_prefix)}")


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """A request in a session: what it comes to under the session's options, and how far it has come.

    Attributes:
        number: the session's own, in the order in which requests were added.
        search: what chooses its tokens.
        request: as it came.
        forced: the tokens that the target begins with.
        wished: the tokens that prefix_bias_beta draws it to.
        constraint: which tokens may follow.
        edits: whether its scores can ever be changed.
        source: what its source's tokens change in its scores.
        random: what its tokens are drawn with; None where none are drawn.
        prompt: tokens that the decoder has still to take in before it says what may follow.
        distributions: of each of its K hypotheses, what each token was chosen from, where the options ask for that.
        finished: the hypotheses that came to an end in a beam search, the best first.
        top_finished: whether one of them was the best extension of its step.
        began: when it joined the batch, on the clock of `time.perf_counter`.
        ends: when its deadline is over, on the same clock.
        steps: decoder steps that it took part in.
        told: tokens that on_tokens was called with.
        problem: what ends it without a result: an exception of its constraint or callback, or that nothing may follow.
    """

    number: int
    search: Search
    request: Request
    forced: tuple[int, ...]
    wished: tuple[int, ...]
    constraint: Constraint | None
    edits: bool
    random: Generator | None
    prompt: list[int]
    distributions: list[list[Floats]]
    source: SourceRules = NO_SOURCE_RULES
    finished: list[Hypothesis] = field(default_factory=list)
    top_finished: bool = False
    began: float = 0.0
    ends: float = math.inf
    steps: int = 0
    told: int = 0
    problem: Exception | None = None

    def begin(self) -> None:
        """Note that it joins a batch now."""
        self.began = time.perf_counter()
        if self.request.deadline is not None:
            admitted = self.began if self.request.admitted is None else self.request.admitted
            self.ends = admitted + self.request.deadline

    def given_up(self) -> Reason | None:
        """Why the request is to end before the search does."""
        cancelled = self.request.cancelled
        if cancelled is not None and cancelled.is_set():
            return Reason.CANCELLED
        ends_at = math.inf if self.request.ends_at is None else self.request.ends_at
        if min(self.ends, ends_at) < math.inf:
            now = time.perf_counter()
            if now >= ends_at:
                return Reason.BUDGET
            if now >= self.ends:
                return Reason.DEADLINE
        return None


def target_beginning(request: Request, options: DecodeOptions) -> tuple[int, ...]:
    """What a request's target begins with, or is drawn to: its own forced_bos and prefix, or the options'."""
    if request.forced_bos is None:
        return options.begin(request.target_prefix)
    own = request.target_prefix
    return (request.forced_bos, *(options.target_prefix if own is None else own))


def are_ids(value: object) -> bool:
    """Whether these are integers; whether a vocabulary has them is checked where requests come in."""
    return isinstance(value, Iterable) and all(
        isinstance(i, numbers.Integral) and not isinstance(i, bool) for i in value
    )


def check_ending(deadline: object, cancelled: object, budget: object = None) -> None:
    """Make sure that what may end a request early is none, or of its kind.

    Args:
        deadline: a number of seconds that time can be compared with.
        cancelled: a `Cancellation`.
        budget: a number of seconds, as the deadline is.

    Raises:
        RequestError: one is something else.
    """
    most = sys.float_info.max
    for name, value in (("deadline", deadline), ("budget", budget)):
        if value is None:
            continue
        is_number = isinstance(value, numbers.Real) and (value <= most or value == math.inf)
        if isinstance(value, bool) or not is_number:
            raise RequestError(f"{name} must be a number of seconds, found {quote(value)}")
    if cancelled is not None and not callable(getattr(cancelled, "is_set", None)):
        raise RequestError(f"cancelled must have is_set(), as a threading.Event has, found {quote(cancelled)}")
