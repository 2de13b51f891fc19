"""What a model answers: whole, piece by piece, or later."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar
from weakref import WeakKeyDictionary, ref

from tfm_export.decoding import Result, SettledToken
from tfm_export.decoding.result import merged
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


def joined(draws: Sequence[Generation]) -> Generation:
    """Several draws from one source as one generation, the best hypothesis first."""
    together, order = merged(draws), sorted(range(len(draws)), key=lambda i: -draws[i].hypotheses[0].rank)
    texts = None if draws[0].texts is None else [draws[i].text for i in order]
    return Generation(**vars(together), texts=texts, source_truncated=draws[0].source_truncated)


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


class Pending(Coroutine[object, None, AnswerT]):
    """An answer that other threads are working on: `await` it in a coroutine, or wait for `result()` in a thread.

    It is a coroutine, so that `asyncio.create_task` takes it; the work goes on whether anybody awaits it or not.
    Cancelling the task that awaits it, or `cancel()`, ends the work before its next step.

    >>> pending = model.generate_async("hello", deadline=60.0)
    >>> pending.result(timeout=60.0).text, pending.done
    ('HH EH L OW', True)
    """

    def __init__(self, future: Future[Any], give_up: Callable[[], None], unpack: Callable[[Any], AnswerT]) -> None:
        self._future, self._give_up, self._unpack = future, give_up, unpack
        self._waiter: Generator[object, None, AnswerT] | None = None

    def __await__(self) -> Generator[object, None, AnswerT]:
        if not self._future.done():
            loop = asyncio.get_running_loop()
            waiter, mailbox = loop.create_future(), Mailbox.of(loop)
            self._future.add_done_callback(lambda _: mailbox.post(_wake, waiter))
            try:
                yield from waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
        if self._future.cancelled():
            raise asyncio.CancelledError
        return self._unpack(self._future.result())

    def send(self, value: None) -> object:
        """Go on waiting; for `asyncio`."""
        if self._waiter is None:
            self._waiter = self.__await__()
        return self._waiter.send(value)

    def throw(self, *problem: Any) -> object:
        """End the waiting with an exception; for `asyncio`."""
        if self._waiter is None:
            self._waiter = self.__await__()
        return self._waiter.throw(*problem)

    def close(self) -> None:
        """End the waiting; the work goes on."""
        if self._waiter is not None:
            self._waiter.close()

    def result(self, timeout: float | None = None) -> AnswerT:
        """Wait for the answer.

        Args:
            timeout: seconds to wait at most; the work goes on after it.

        Raises:
            TimeoutError: it is not there yet.
            concurrent.futures.CancelledError: it was cancelled before the work began.
            ModelClosed: the model was closed before the work was done.
            TfmExportError: the request cannot be served.
        """
        return self._unpack(self._future.result(timeout))

    def cancel(self) -> None:
        """Give the request up. Work that has begun answers with what it has, for `Reason.CANCELLED`."""
        self._give_up()

    @property
    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self._future.done()


class AsyncStream(Generic[PieceT_co]):
    """An asynchronous iterator over what settles, which holds the whole answer once it has come to its end.

    >>> import asyncio
    >>> async def follow():
    ...     async with model.stream_async("hello") as pieces:
    ...         texts = [piece.text async for piece in pieces]
    ...     return texts, pieces.answer.text
    >>> asyncio.run(follow())
    (['HH', ' EH', ' L', ' OW'], 'HH EH L OW')

    Attributes:
        answer: None until the end.
    """

    def __init__(
        self,
        begin: Callable[[Callable[[list[SettledToken]], None]], Pending[Generation]],
        pieces: Callable[[list[SettledToken]], list[Any]],
        rest: Callable[[Generation], list[Any]],
    ) -> None:
        loop = asyncio.get_running_loop()
        mailbox, self._pieces, self._rest = Mailbox.of(loop), pieces, rest
        self._ready: deque[Any] = deque()
        self._news = asyncio.Event()
        self.answer: Generation | None = None
        self._pending = begin(lambda tokens: mailbox.post(self._add, tokens))
        self._end = loop.create_task(self._finish())

    def _add(self, tokens: list[SettledToken]) -> None:
        self._ready += self._pieces(tokens)
        self._news.set()

    async def _finish(self) -> Generation:
        try:
            return await self._pending
        finally:
            self._news.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PieceT_co:
        while not self._ready:
            if self._end.done():
                if self.answer is None:
                    self.answer = self._end.result()
                    self._ready += self._rest(self.answer)
                    continue
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        piece: PieceT_co = self._ready.popleft()
        return piece

    async def aclose(self) -> None:
        """End the search; there is no answer then, unless it has come to its end."""
        if not self._end.done():
            self._pending.cancel()
            await asyncio.wait([self._end])
        if not self._end.cancelled():
            self._end.exception()  # seen

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Mailbox:
    """Calls from other threads for an event loop, which wakes once for all that come while it is busy."""

    _of: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox]] = WeakKeyDictionary()
    _held = threading.local()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)
        self._calls: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._woken = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Mailbox:
        """The one of the running loop."""
        if (found := cls._of.get(loop)) is None:
            found = cls._of[loop] = cls(loop)
        return found

    def post(self, call: Callable[[Any], None], argument: Any) -> None:
        """Have the loop make a call; if it is closed, nobody waits any more."""
        self._calls.append((call, argument))
        held = getattr(self._held, "mailboxes", None)
        if held is None:
            self._wake()
        else:
            held.add(self)

    @classmethod
    @contextmanager
    def together(cls) -> Iterator[None]:
        """Wake loops for what this thread posts at the end only."""
        cls._held.mailboxes = mailboxes = set[Mailbox]()
        try:
            yield
        finally:
            cls._held.mailboxes = None
            for mailbox in mailboxes:
                mailbox._wake()  # noqa: SLF001 (one of these)

    def _wake(self) -> None:
        if not self._woken and (loop := self._loop()) is not None:
            self._woken = True
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False
        while self._calls:
            call, argument = self._calls.popleft()
            call(argument)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
