"""A worker for every thread that runs a model's graphs, as long as there are not too many of them."""

from __future__ import annotations

import logging
import threading
import weakref

from tfm_export.errors import RequestError
from tfm_export.runtime.gpu.compiled_graphs import DeviceGraphs
from tfm_export.runtime.gpu.cuda import OutOfDeviceMemory
from tfm_export.runtime.gpu.device_worker import CLOSED, Worker

LOG = logging.getLogger(__name__)
MOST_WORKERS = 4  # threads that run at the same time; more share them, for each has memory of its own


class Workers:
    """The workers of a model. A thread keeps its worker, and leaves it to others when it ends."""

    def __init__(self, graphs: DeviceGraphs, most: int = MOST_WORKERS) -> None:
        """Make the first, so that what cannot work fails now.

        Args:
            graphs: what they run; closed with the last of them, or if this fails.
            most: workers.

        Raises:
            RequestError: most is less than 1.
            OutOfDeviceMemory: the GPU has not enough memory.
            BackendUnavailable: the graphs cannot be run.
        """
        if most < 1:
            graphs.close()
            raise RequestError(f"workers must be at least 1, found {most}")
        self._graphs, self._most = graphs, most
        self._lock, self._closing = threading.Lock(), False
        self._here = threading.local()
        self._seats: dict[Worker, weakref.WeakSet[_Seat]] = {}
        try:
            self._add()
        except BaseException:
            graphs.close()
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
        worker = Worker(self._graphs, reclaim=self._reclaim, closed=self._closed)
        self._seats[worker] = weakref.WeakSet()
        return worker

    def _reclaim(self, asking: Worker) -> None:
        """Let the other workers free what they do not use."""
        for worker in [*self._seats]:
            if worker is not asking:
                worker.free_idle()

    def _save_caches(self) -> None:
        for graph in self._graphs.every:
            graph.save_cache()

    def close(self) -> None:
        """Close every worker, and the graphs with the last of them; waits for nobody."""
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
            self._graphs.close()


class _Seat:
    """A thread's place at a worker; it is free again when the thread has ended."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
