"""A step model on a GPU: graphs that somebody has compiled, and a worker for every thread that runs them."""

from __future__ import annotations

import logging
import threading
import weakref

from tfm_export.errors import BackendUnavailable, RequestError
from tfm_export.runtime.checks import check_encode
from tfm_export.runtime.forks import keep_for_ever, tell_of_forks
from tfm_export.runtime.gpu.compiled_graphs import DeviceGraphs
from tfm_export.runtime.gpu.cuda import OutOfDeviceMemory, when_not_capturing
from tfm_export.runtime.gpu.device_sentences import DeviceSentences
from tfm_export.runtime.gpu.device_worker import CLOSED, Worker
from tfm_export.runtime.step_model import Capabilities, Ids, Mask, StepModel

LOG = logging.getLogger(__name__)
MOST_WORKERS = 4  # threads that run at the same time; more share them, for each has memory of its own
# Rows of a step cost nothing while there are few, and encoding some sentences at once is cheaper than one by one.
REFILL_AT = 0.25


class DeviceModel(StepModel):
    """A model whose graphs are loaded on a GPU. Safe to use from several threads.

    Attributes:
        max_batch_size: the most sentences at once.
    """

    def __init__(self, graphs: DeviceGraphs, workers: int) -> None:
        """Make ready to run.

        Args:
            graphs: what runs; closed with the model, or if this fails.
            workers: the most threads that run at the same time.

        Raises:
            BackendUnavailable: a context cannot be made.
            OutOfDeviceMemory: the GPU's memory is too small.
            RequestError: workers is less than 1.
        """
        self.dimensions, self.limits, self.max_batch_size = graphs.dimensions, graphs.limits, graphs.max_batch_size
        self.capabilities = Capabilities(refill_at=REFILL_AT)
        self._workers = Workers(graphs, workers)
        self._close = weakref.finalize(self, when_not_capturing, self._workers.close)
        self._forked = False
        tell_of_forks(self)

    def after_fork(self) -> None:
        """Note that a fork cannot use the GPU by what its parent has opened, nor free it."""
        self._forked = self._close.alive
        self._close.detach()
        keep_for_ever(self._workers)

    @property
    def capture_problem(self) -> str | None:
        """Why steps do not run as CUDA graphs captured here; None if they do."""
        return self._workers.capture_problem

    def encode(self, source_ids: Ids, source_mask: Mask, *, capacity: int) -> DeviceSentences:
        """Run the encoder on a padded batch and set up its caches; see `StepModel.encode`.

        Raises:
            BackendUnavailable: this is a fork of the process that loaded the model.
        """
        self._check_open()
        check_encode(source_ids, source_mask, capacity, dimensions=self.dimensions, limits=self.limits)
        return DeviceSentences(self._workers.of_this_thread(), source_ids, source_mask, capacity)

    def _check_open(self) -> None:
        if self._forked:
            raise BackendUnavailable(
                "the model was loaded onto a GPU by the process that this one was forked from, and CUDA does not work "
                "in forks",
                "load the bundle after the fork, in each process",
            )
        if not self._close.alive:
            raise RequestError(*CLOSED)

    def close(self) -> None:
        """Free what is on the GPU; what batches still need goes with the last of them."""
        self._close()


class Workers:
    """The workers of a model. A thread keeps its worker, and leaves it to others when it ends."""

    def __init__(self, graphs: DeviceGraphs, most: int = MOST_WORKERS) -> None:
        """Make the first, so that what cannot work fails now; see `DeviceModel`."""
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
