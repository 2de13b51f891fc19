"""What a model in service tells of its work: reports of requests, sizes of batches, the length of the queue."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

LOG = logging.getLogger("tfm_export")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What became of one source.

    >>> class Log(tfm_export.Observer):
    ...     def answered(self, report):
    ...         print(report.request_id, report.outcome, report.source_tokens, report.target_tokens)
    >>> with tfm_export.load("tfm_bundle", observer=Log()) as model:
    ...     _ = model.generate_async("hello", request_id="r1").result()
    r1 end token 6 4

    Attributes:
        request_id: the caller's name for the call; "" if it gave none.
        outcome: a `decoding.Reason` as text, or the name of an error's class.
        source_tokens: how many the encoder got; 0 where it got none.
        target_tokens: of the best hypothesis.
        queue_seconds: from the call until it joined a batch, or was given up.
        first_token_seconds: from the call to the first token; None where nobody asked for single tokens.
        seconds: from the call to the answer.
    """

    request_id: str
    outcome: str
    source_tokens: int
    target_tokens: int
    queue_seconds: float
    first_token_seconds: float | None
    seconds: float


class Observer:
    """Gets to know what a model in service does; this one does nothing with it. Inherit from it.

    Methods are called by the threads that decode, between two steps: they must be quick. One that raises is logged,
    and harms no request.

    >>> class Counter(tfm_export.Observer):
    ...     tokens = 0
    ...
    ...     def answered(self, report):
    ...         self.tokens += report.target_tokens
    >>> counter = Counter()
    >>> with tfm_export.load("tfm_bundle", observer=counter) as model:
    ...     _ = model.generate_async(["hello", "a"]).result()
    >>> counter.tokens
    5
    """

    def queued(self, waiting: int) -> None:
        """So many sources wait, now that one came or went."""

    def stepped(self, size: int, seconds: float) -> None:
        """A batch of so many sources took a step, or several in one go, in so many seconds."""

    def answered(self, report: Report) -> None:
        """A source has its answer."""


class Observers(Observer):
    """Passes all on to several, and logs each report; what one of them raises is logged, too."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def queued(self, waiting: int) -> None:
        """Tell all."""
        self._tell(lambda observer: observer.queued(waiting))

    def stepped(self, size: int, seconds: float) -> None:
        """Tell all."""
        self._tell(lambda observer: observer.stepped(size, seconds))

    def answered(self, report: Report) -> None:
        """Tell all, and write a line to the log."""
        if LOG.isEnabledFor(logging.INFO):
            LOG.info(
                "%s: %s, %d tokens to %d, %.1f ms of which %.1f in the queue",
                report.request_id or "-",
                report.outcome,
                report.source_tokens,
                report.target_tokens,
                1e3 * report.seconds,
                1e3 * report.queue_seconds,
                extra=vars(report),
            )
        self._tell(lambda observer: observer.answered(report))

    def _tell(self, tell: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            try:
                tell(observer)
            except Exception:
                LOG.exception("an observer failed")
