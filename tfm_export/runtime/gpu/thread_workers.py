"""A worker for every thread that runs an engine, as long as there are not too many of them."""

from __future__ import annotations

import logging
import threading
import weakref

from tfm_export.errors import RequestError
from tfm_export.runtime.gpu.cuda import OutOfDeviceMemory
from tfm_export.runtime.gpu.device_worker import CLOSED, Engine, Worker

LOG = logging.getLogger(__name__)
MOST_WORKERS = 4  # threads that run at the same time; more share them, for each has memory of its own


class Workers:
    """The workers of an engine. A thread keeps its worker, and leaves it to others when it ends."""

    def __init__(self, engine: Engine, most: int = MOST_WORKERS, *, kind: type[Worker] = Worker) -> None:
        """Make the first, so that what cannot work fails now.

        Args:
            engine: what they run.
            most: workers.
            kind: of worker.

        Raises:
            RequestError: most is less than 1.
            OutOfDeviceMemory: the GPU has not enough memory.
            BackendUnavailable: the engine cannot be run.
        """
        if most < 1:
            engine.close()
            raise RequestError(f"workers must be at least 1, found {most}")
        self._engine, self._most, self._kind = engine, most, kind
        self._lock, self._closing = threading.Lock(), False
        self._here = threading.local()
        self._seats: dict[Worker, weakref.WeakSet[_Seat]] = {}
        try:
            self._add()
        except BaseException:
            engine.close()
            raise
        self._save_caches()

    @property
    def capture_problem(self) -> str | None:
        """See `Worker.capture_problem`."""
        return next((worker.capture_problem for worker in [*self._seats] if worker.capture_problem), None)

    def of_this_thread(self) -> Worker:
        """The worker of the calling thread.

        Raises:
            RequestError: the model is closed.
        """
        seat: _Seat | None = getattr(self._here, "seat", None)
        if seat is None:
            try:
                with self._lock:
                    seat = self._take_seat()
            finally:
                self._close_if_asked()
            self._here.seat = seat  # until the thread ends
        return seat.worker

    def _take_seat(self) -> _Seat:
        if self._closing:
            raise RequestError(*CLOSED)
        seat = _Seat(self._least_used())
        self._seats[seat.worker].add(seat)
        return seat

    def _least_used(self) -> Worker:
        worker = min(self._seats, key=lambda worker: len(self._seats[worker]))
        if not self._seats[worker] or len(self._seats) >= self._most:
            return worker
        try:
            return self._add()
        except OutOfDeviceMemory as problem:
            self._most = len(self._seats)
            LOG.info("%d threads share the GPU, for there is no memory for more: %s", self._most, str(problem))
            return worker

    def _add(self) -> Worker:
        worker = self._kind(self._engine, reclaim=self._reclaim, closed=self._closed)
        self._seats[worker] = weakref.WeakSet()
        return worker

    def _reclaim(self, asking: Worker) -> None:
        """Let the other workers free what they do not use."""
        for worker in [*self._seats]:
            if worker is not asking:
                worker.free_idle()

    def _save_caches(self) -> None:
        for plan in self._engine.plans:
            plan.save_cache()

    def close(self) -> None:
        """Close every worker, and the engine with the last of them; waits for nobody."""
        self._closing = True
        self._close_if_asked()

    def _close_if_asked(self) -> None:
        if not self._closing or not self._lock.acquire(blocking=False):
            return  # whoever has the lock comes here after it
        try:
            self._save_caches()
            for worker in [*self._seats]:
                worker.close()
        finally:
            self._lock.release()

    def _closed(self, worker: Worker) -> None:
        self._seats.pop(worker, None)
        if not self._seats:
            self._engine.close()


class _Seat:
    """A thread's place at a worker; it is free again when the thread has ended."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
