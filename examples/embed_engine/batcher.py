"""Dynamic batching: texts that come from many threads one by one are decoded together.

A step of eight sentences takes hardly longer than a step of one. So a text waits a few milliseconds for company; once
it is its turn it is decoded with whoever waits too. Texts that come meanwhile are the next batch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from tfm_export import DecodeOptions, Generation, Model, RequestError, TextRequest, TfmExportError

LOG = logging.getLogger(__name__)


class OverloadedError(Exception):
    """So many texts wait that another one would wait too long."""


class ClosingError(Exception):
    """The service ends, and takes nothing more."""


@dataclass
class _Waiting:
    """A text in the queue."""

    request: TextRequest
    answer: Future[Generation] = field(default_factory=Future)
    since: float = field(default_factory=time.perf_counter)


@dataclass
class Counts:
    """What a batcher has done so far.

    Attributes:
        answered: texts that were decoded.
        failed: texts that could not be, once they had been taken.
        refused: texts that were not taken.
        batches: calls of the model.
        waited: seconds that the texts decoded so far had waited, together.
    """

    answered: int = 0
    failed: int = 0
    refused: int = 0
    batches: int = 0
    waited: float = 0.0


class Batcher:
    """Decodes texts in batches, in threads of its own.

    Attributes:
        counts: what it has done so far.
    """

    def __init__(
        self,
        model: Model,
        options: DecodeOptions,
        *,
        max_batch_size: int = 32,
        max_wait: float = 0.005,
        max_waiting: int = 1024,
        workers: int = 1,
    ) -> None:
        """Start the threads.

        Args:
            model: loaded; it stays the caller's to close.
            options: how every text is decoded.
            max_batch_size: texts decoded together.
            max_wait: seconds that a text waits for others, if nothing else keeps it waiting.
            max_waiting: texts that may wait; more are refused.
            workers: batches decoded at the same time. One is best where the model computes with all CPUs; with two on
                a GPU, one batch's Python runs while the other's kernels do.
        """
        self._model, self._options = model, replace(options, max_batch_size=max_batch_size)
        self._max_batch_size, self._max_wait, self._max_waiting = max_batch_size, max_wait, max_waiting
        self._queue: deque[_Waiting] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._give_up = threading.Event()
        self.counts = Counts()
        # Daemons: should the program fail before it closes this, it must end, and not wait for ever.
        self._threads = [threading.Thread(target=self._work, name=f"batcher-{i}", daemon=True) for i in range(workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, request: TextRequest) -> Future[Generation]:
        """Take a text.

        Args:
            request: the text; its deadline counts from now.

        Returns:
            What will hold the answer. It can be cancelled while the text waits.

        Raises:
            RequestError: the model cannot serve the text; refused here, it spoils nobody else's batch.
            OverloadedError: too many wait.
            ClosingError: the batcher is being closed.
        """
        waiting = _Waiting(request)
        try:
            self._model.encode_text(request.text)
            self._admit(waiting)
        except (RequestError, OverloadedError, ClosingError):
            with self._changed:
                self.counts.refused += 1
            raise
        return waiting.answer

    def _admit(self, waiting: _Waiting) -> None:
        with self._changed:
            if self._closing:
                raise ClosingError
            if len(self._queue) >= self._max_waiting:
                raise OverloadedError(f"{len(self._queue):,} texts wait already")
            self._queue.append(waiting)
            self._changed.notify()

    @property
    def waiting(self) -> int:
        """Texts that wait."""
        return len(self._queue)

    def close(self, *, seconds: float) -> None:
        """Take nothing more, and answer what was taken. Once closed, it stays so.

        Args:
            seconds: to do so. After that, texts being decoded give what they have, and those that wait a ClosingError.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        end = time.perf_counter() + seconds
        for thread in self._threads:
            thread.join(max(end - time.perf_counter(), 0))
        self._give_up.set()
        with self._changed:
            left = [*self._queue]
            self._queue.clear()
        for waiting in left:
            if waiting.answer.set_running_or_notify_cancel():
                waiting.answer.set_exception(ClosingError())
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while batch := self._next_batch():
            try:
                self._decode(batch)
            except Exception as bug:
                LOG.exception("a batch of %d texts failed", len(batch))
                for waiting in batch:
                    if not waiting.answer.done():
                        waiting.answer.set_exception(bug)

    def _next_batch(self) -> list[_Waiting]:
        """The texts to decode next; none once there will be no more."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return []
                patience = self._queue[0].since + self._max_wait - time.perf_counter()
                self._changed.wait_for(self._is_enough, timeout=max(patience, 0))
                taken = [self._queue.popleft() for _ in range(min(len(self._queue), self._max_batch_size))]
            # Those that were cancelled meanwhile are left out; with several workers, another may have been faster.
            if batch := [waiting for waiting in taken if waiting.answer.set_running_or_notify_cancel()]:
                return batch

    def _is_enough(self) -> bool:
        return self._closing or len(self._queue) >= self._max_batch_size

    def _decode(self, batch: Sequence[_Waiting]) -> None:
        now, requests = time.perf_counter(), [replace(waiting.request, admitted=waiting.since) for waiting in batch]
        answers = self._model.generate_iterable(
            requests, on_error="yield", window=len(batch), options=self._options, cancelled=self._give_up
        )
        failed = 0
        for waiting, answer in zip(batch, answers, strict=True):
            if isinstance(answer, TfmExportError):
                waiting.answer.set_exception(answer)
                failed += 1
            else:
                waiting.answer.set_result(answer)
        with self._changed:
            self.counts.batches += 1
            self.counts.failed += failed
            self.counts.answered += len(batch) - failed
            self.counts.waited += sum(now - waiting.since for waiting in batch)
