"""What a model answers: whole, piece by piece, or later."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeVar

from tfm_export.decoding import Hypothesis, Reason, Result, Statistics

PieceT_co = TypeVar("PieceT_co", covariant=True)
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What a model made of one text.

    Attributes:
        texts: the text of each hypothesis, the best first.
        hypotheses: tokens and scores, the best first.
        source_truncated: the source was longer than the model takes and was cut, as the caller wished.
        statistics: what it cost.
        reason: why it ended.
    """

    texts: list[str]
    hypotheses: list[Hypothesis]
    source_truncated: bool
    statistics: Statistics
    reason: Reason

    @property
    def text(self) -> str:
        """The best hypothesis as text."""
        return self.texts[0]

    @property
    def tokens(self) -> list[int]:
        """The target ids of the best hypothesis."""
        return self.hypotheses[0].tokens

    @property
    def score(self) -> float:
        """The score of the best hypothesis."""
        return self.hypotheses[0].score


@dataclass(frozen=True, kw_only=True)
class IdsResult(Result):
    """What a model made of one source of ids.

    Attributes:
        source_truncated: the source was longer than the model takes and was cut, as the caller wished.
    """

    source_truncated: bool


@dataclass(frozen=True)
class Piece:
    """A token that can no longer change, and what it adds to the text.

    Attributes:
        token: its id.
        log_prob: its log-probability; 0 where it was forced.
        text: empty where the token does not show.
    """

    token: int
    log_prob: float
    text: str


class Stream(Generic[PieceT_co, AnswerT]):
    """An iterator over what settles, which holds the whole answer once it has come to its end.

    Attributes:
        answer: None until the end.
    """

    def __init__(self, pieces: Generator[PieceT_co, None, AnswerT]) -> None:
        self._pieces = pieces
        self.answer: AnswerT | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PieceT_co:
        try:
            return next(self._pieces)
        except StopIteration as end:
            if end.value is not None:
                self.answer = end.value
            raise StopIteration from None

    def close(self) -> None:
        """End the search; there is no answer then."""
        self._pieces.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Pending(Generic[AnswerT]):
    """An answer that another thread is working on: `await` it in a coroutine, or wait for `result()` in a thread.

    Cancelling the task that awaits it, or `cancel()`, ends the work before its next step.
    """

    def __init__(self, future: Future[AnswerT], cancelled: threading.Event) -> None:
        self._future, self._cancelled = future, cancelled

    def __await__(self) -> Generator[object, None, AnswerT]:
        try:
            return (yield from asyncio.wrap_future(self._future).__await__())
        except asyncio.CancelledError:
            self.cancel()
            raise

    def result(self, timeout: float | None = None) -> AnswerT:
        """Wait for the answer.

        Args:
            timeout: seconds to wait at most; the work goes on after it.

        Raises:
            TimeoutError: it is not there yet.
            concurrent.futures.CancelledError: it was cancelled before the work began.
            TfmExportError: the request cannot be served.
        """
        return self._future.result(timeout)

    def cancel(self) -> None:
        """Give the request up. Work that has begun answers with what it has, for `Reason.CANCELLED`."""
        self._cancelled.set()
        self._future.cancel()

    @property
    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self._future.done()
