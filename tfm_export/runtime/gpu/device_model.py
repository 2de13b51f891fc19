"""A step model on a GPU: graphs that somebody has compiled, and a worker for each thread that runs them."""

from __future__ import annotations

import weakref

from tfm_export.errors import RequestError
from tfm_export.runtime.checks import check_encode
from tfm_export.runtime.gpu.compiled_graphs import DeviceGraphs
from tfm_export.runtime.gpu.cuda import when_not_capturing
from tfm_export.runtime.gpu.device_sentences import DeviceSentences
from tfm_export.runtime.gpu.device_worker import CLOSED
from tfm_export.runtime.gpu.thread_workers import Workers
from tfm_export.runtime.step_model import Capabilities, Ids, Mask, StepModel


class DeviceModel(StepModel):
    """A model whose graphs are loaded on a GPU. Safe to use from several threads.

    Attributes:
        dimensions: the sizes that the graphs show.
        limits: the longest sequences.
        capabilities: what it gives.
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
        # Rows of a step cost nothing while there are few, and encoding some sentences at once is cheaper than one by
        # one.
        self.capabilities = Capabilities(refill_at=0.25)
        self._workers = Workers(graphs, workers)
        self._close = weakref.finalize(self, when_not_capturing, self._workers.close)

    @property
    def capture_problem(self) -> str | None:
        """Why steps do not run as CUDA graphs captured here; None if they do."""
        return self._workers.capture_problem

    def encode(self, source_ids: Ids, source_mask: Mask, *, capacity: int) -> DeviceSentences:
        """Run the encoder on a padded batch and set up its caches; see `StepModel.encode`."""
        self._check_open()
        check_encode(source_ids, source_mask, capacity, dimensions=self.dimensions, limits=self.limits)
        return DeviceSentences(self._workers.of_this_thread(), source_ids, source_mask, capacity)

    def _check_open(self) -> None:
        if not self._close.alive:
            raise RequestError(*CLOSED)

    def close(self) -> None:
        """Free what is on the GPU; what batches still need goes with the last of them."""
        self._close()
