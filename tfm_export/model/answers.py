"""What a model answers: whole, piece by piece, or later."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from tfm_export.decoding import Result, SettledToken
from tfm_export.errors import RequestError

PieceT_co = TypeVar("PieceT_co", covariant=True)
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, kw_only=True)
class Generation(Result):
    """What a model made of one source, text or ids.

    >>> generation = model.generate("hello", beam_size=4, num_hypotheses=2)
    >>> generation.text, len(generation.tokens), generation.reason.value, generation.source_truncated
    ('HH EH L OW', 4, 'end token', False)
    >>> generation.texts[1], generation.hypotheses[1].score < generation.score
    ('HH EY L OW', True)

    Attributes:
        hypotheses: tokens and scores, the best first; `tokens` and `score` are those of the best.
        statistics: what it cost: steps, seconds, bytes of the cache.
        reason: why it ended.
        texts: the text of each hypothesis; None in an answer to ids.
        source_truncated: the source was longer than the model takes and was cut, as the caller wished.
    """

    texts: list[str] | None = None
    source_truncated: bool = False

    @property
    def text(self) -> str:
        """The best hypothesis as text.

        Raises:
            RequestError: this is an answer to ids, which has none.
        """
        if self.texts is None:
            raise RequestError(
                "an answer to ids has no text", "its tokens, or model.tokenizer.decode_target(tokens) if there is one"
            )
        return self.texts[0]


@dataclass(frozen=True)
class Piece(SettledToken):
    """A token that can no longer change, and what it adds to the text, which can no longer change either.

    Attributes:
        token: its id.
        log_prob: its log-probability; 0 where it was forced.
        text: empty where the token does not show, or makes a character together with those that follow: the last of
            them has it.
    """

    text: str


class Stream(Generic[PieceT_co]):
    """An iterator over what settles, which holds the whole answer once it has come to its end.

    >>> with model.stream("hello") as pieces:
    ...     [piece.text for piece in pieces]
    ['HH', ' EH', ' L', ' OW']
    >>> pieces.answer.text
    'HH EH L OW'

    Attributes:
        answer: None until the end.
    """

    def __init__(self, pieces: Generator[Any, None, Generation]) -> None:
        self._pieces = pieces
        self.answer: Generation | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> PieceT_co:
        try:
            piece: PieceT_co = next(self._pieces)
        except StopIteration as end:
            if end.value is not None:
                self.answer = end.value
            raise StopIteration from None
        return piece

    def close(self) -> None:
        """End the search; there is no answer then."""
        self._pieces.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pending(Generic[AnswerT]):
    """An answer that another thread is working on: `await` it in a coroutine, or wait for `result()` in a thread.

    Cancelling the task that awaits it, or `cancel()`, ends the work before its next step.

    >>> pending = model.generate_async("hello", deadline=60.0)
    >>> pending.result(timeout=60.0).text, pending.done
    ('HH EH L OW', True)
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
