"""A batch of sentences on a GPU: which rows are in use, how far they have come, and what their memory is.

Letters as in `step_model`.
"""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from tfm_export.errors import RequestError
from tfm_export.graph import cross_names, self_cache_names
from tfm_export.runtime.checks import check_finite, check_step_arrays, step_problems
from tfm_export.runtime.gpu.device_memory import bucket
from tfm_export.runtime.gpu.device_worker import Worker
from tfm_export.runtime.step_model import Floats, Ids, Mask, Sentences, StepOutput


class DeviceSentences(Sentences):
    """A batch of sentences whose caches lie on the device; see `Sentences`.

    The caches have the slots of a compiled graph, which are as many as `capacity` or more: those beyond are never seen.
    Only where none has as many are they fewer; then a step that needs more is refused. They are never packed: single
    slots are too small to copy on a device, and a compiled graph may have a fixed number of them.

    Attributes:
        worker: runs it.
        lease: its memory.
        source_mask: [B, S]; S is the longest source, the memory may have room for longer ones.
        written: no slot from this one on has been written to.
    """

    def __init__(self, worker: Worker, source_ids: Ids, source_mask: Mask, capacity: int) -> None:
        self.worker, self._capacity, self.written = worker, capacity, 0
        self.source_mask = np.array(source_mask, np.bool_)
        self._pinned = np.zeros(0, np.uint8)  # what log_probs come back to
        with worker.working():
            self.lease = worker.lease(len(source_mask), source_mask.shape[1], capacity)
            worker.encode(source_ids, source_mask, self.lease.memory)

    @property
    def size(self) -> int:
        """B: rows in use."""
        return len(self.source_mask)

    @property
    def capacity(self) -> int:
        """C: slots of each row."""
        return self._capacity

    def step(
        self, target_ids: Ids, positions: Ids, write_index: Ids, self_mask: Mask, *, full: bool = False
    ) -> StepOutput:
        """Write Q tokens into the cache and say what may follow each; see `Sentences.step`."""
        given = target_ids, positions, write_index, self_mask
        check_step_arrays(*given, size=self.size, capacity=self._capacity)
        worker, graphs, memory = self.worker, self.worker.graphs, self.lease.memory
        size, query = target_ids.shape
        with worker.working():
            arrays = worker.arrays(memory, size, query)
            if not arrays.fill(*given, self.source_mask):
                raise self._refusal(step_problems(*given, dimensions=graphs.dimensions, limits=graphs.limits))
            worker.step(memory, arrays)
            self.written = max(self.written, int(write_index.max()) + query)
            log_probs, normaliser = self._fetch(arrays.addresses, query) if full else (None, None)
            output = StepOutput(arrays.top_log_probs[:size].copy(), arrays.top_ids[:size].copy(), log_probs, normaliser)
        check_finite(output.top_log_probs[:, :, 0])
        return output

    def _refusal(self, problems: list[str]) -> RequestError:
        """Of a step in which something is wrong, or else nothing but its slots."""
        if problems:
            return RequestError(problems)
        return RequestError(
            f"a step needs more than the {self.lease.memory.capacity} slots a sentence that the engine was built for",
            f"fewer beams or shorter targets, or tfm-export trt --capacity {self._capacity} --force",
        )

    def _fetch(self, addresses: dict[str, int], query: int) -> tuple[Floats, Floats]:
        """log_probs [B, Q, V] and log_normaliser [B, Q] of the last step."""
        rows, vocabulary = self.size * query, self.worker.graphs.dimensions.target_vocabulary_size
        if self._pinned.nbytes < 4 * rows * (vocabulary + 1):
            self._pinned = self.worker.graphs.gpu.allocate_host(4 * rows * (vocabulary + 1))
        numbers = self._pinned.view(np.float32)
        log_probs = numbers[: rows * vocabulary].reshape(self.size, query, vocabulary)
        normaliser = numbers[rows * vocabulary : rows * (vocabulary + 1)].reshape(self.size, query)
        self.worker.fetch({addresses["log_probs"]: log_probs, addresses["log_normaliser"]: normaliser})
        return log_probs, normaliser

    def grow(self, capacity: int) -> None:
        """Give every row `capacity` slots, keeping what is written and zeroing the rest."""
        if capacity < self._capacity:
            raise RequestError(f"a cache of {self._capacity} slots cannot grow to {capacity}")
        memory = self.lease.memory
        with self.worker.working():
            self._change_memory(memory.rows, memory.source, capacity)
        self._capacity = capacity

    def move(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`."""
        for row in (source, target):
            if not 0 <= row < self.size:
                raise RequestError(f"a row must be from 0 to {self.size - 1}, found {row}")
        if source == target:
            return
        memory, stream = self.lease.memory, self.worker.stream
        with self.worker.working():
            memory.caches.copy_rows(stream, memory.caches, source, target, rows=1, slots=self.written)
            memory.cross.copy_rows(stream, memory.cross, source, target, rows=1, slots=memory.source)
        self.source_mask[target] = self.source_mask[source]

    def shrink(self, size: int) -> None:
        """Keep the first `size` rows; no memory moves."""
        if not 0 <= size <= self.size:
            raise RequestError(f"a batch of {self.size} rows cannot shrink to {size}")
        self.source_mask = self.source_mask[:size]

    def read(self, name: str) -> Floats:
        """A copy of a cache or a cross-attention tensor; see `Sentences.read`."""
        memory, graphs = self.lease.memory, self.worker.graphs
        source: int = self.source_mask.shape[1]
        lengths = dict.fromkeys(self_cache_names(graphs.dimensions), self._capacity)
        lengths |= dict.fromkeys(cross_names(graphs.dimensions), source)
        if name not in lengths:
            raise RequestError(f"no tensor {name!r}; there are {', '.join(lengths)}")
        block = memory.caches if name in memory.caches.names else memory.cross
        shape = (memory.rows, block.shape.heads, block.length, block.shape.head_size)
        with self.worker.working():
            pinned = self.worker.graphs.gpu.allocate_host(int(np.prod(shape)) * block.shape.item_bytes)
            self.worker.fetch({block.address(name): pinned})
        found = _as_float32(pinned, graphs.float_type).reshape(shape)
        result: Floats = np.zeros((self.size, shape[1], lengths[name], graphs.dimensions.head_size), np.float32)
        kept = min(lengths[name], block.length)  # a capacity that no graph has is never written to the end
        result[:, :, :kept] = found[: self.size, :, :kept, : graphs.dimensions.head_size]
        return result

    def append(self, other: Sentences) -> None:
        """Copy the rows of freshly encoded sentences of the same model behind this batch's rows."""
        if not isinstance(other, DeviceSentences) or other.worker.graphs is not self.worker.graphs:
            raise RequestError("sentences can only join a batch of the same model")
        if other.written > self._capacity:
            raise RequestError(f"the joining rows have written more slots than the {self._capacity} of this batch")
        workers = sorted({self.worker, other.worker}, key=id)  # in one order, lest two threads wait for each other
        with ExitStack() as held:
            for worker in workers:
                held.enter_context(worker.working())
            self._append(other)

    def _append(self, other: DeviceSentences) -> None:
        first, last = self.size, self.size + other.size
        source = max(self.source_mask.shape[1], other.source_mask.shape[1])
        self._change_memory(max(last, self.lease.memory.rows), max(source, self.lease.memory.source), self._capacity)
        memory, theirs, stream = self.lease.memory, other.lease.memory, self.worker.stream
        if other.worker is not self.worker:
            stream.wait_for(other.worker.stream)
        for block in (memory.caches, memory.cross):
            block.zero_rows(stream, first, bucket(last, memory.rows))  # inert rows, too
        length = other.source_mask.shape[1]
        memory.caches.copy_rows(stream, theirs.caches, 0, first, rows=other.size, slots=other.written)
        memory.cross.copy_rows(stream, theirs.cross, 0, first, rows=other.size, slots=length)
        if other.worker is not self.worker:
            stream.synchronize()  # the other worker may use its memory again at once
        self.source_mask = np.vstack([_widened(mask, source) for mask in (self.source_mask, other.source_mask)])
        self.written = max(self.written, other.written)

    def _change_memory(self, rows: int, source: int, capacity: int) -> None:
        """Move to memory of at least that size, unless this one is."""
        old = self.lease.memory
        if old.rows >= rows and old.source >= source and old.capacity == self.worker.graphs.capacity(capacity):
            return
        lease, stream = self.worker.lease(rows, source, capacity), self.worker.stream
        lease.memory.caches.copy_rows(stream, old.caches, 0, 0, rows=self.size, slots=self.written)
        lease.memory.cross.copy_rows(stream, old.cross, 0, 0, rows=self.size, slots=old.source)
        self.lease = lease


def _widened(mask: Mask, columns: int) -> Mask:
    """A source mask with more padding."""
    return np.pad(mask, ((0, 0), (0, columns - mask.shape[1])))


def _as_float32(numbers: NDArray[np.uint8], float_type: str) -> Floats:
    """Numbers as they lie on the device; of a bfloat16 numpy has the upper half of its bits."""
    if float_type == "bfloat16":
        return np.left_shift(numbers.view(np.uint16), 16, dtype=np.uint32).view(np.float32)
    return numbers.view(float_type).astype(np.float32)
