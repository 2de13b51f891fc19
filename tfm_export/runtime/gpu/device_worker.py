"""A worker: a stream with the contexts, the memory and the captured graphs that one thread needs to run a model."""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfm_export.errors import BackendUnavailable, RequestError
from tfm_export.graph import cache_output_name, cross_names, self_cache_names
from tfm_export.runtime.gpu.compiled_graphs import ANY, CompiledGraph, DeviceGraphs, GraphContext, Profile
from tfm_export.runtime.gpu.cuda import ALIGNMENT, CudaError, Graph, when_not_capturing
from tfm_export.runtime.gpu.device_memory import BatchMemory, Lease, MemoryPool, bucket
from tfm_export.runtime.gpu.step_buffers import Buffers, StepArrays, StepShape, encoder_arrays, encoder_inputs
from tfm_export.runtime.step_model import Ids, Mask

LOG = logging.getLogger(__name__)
EAGER_RUNS = 2  # of a shape, before it gets a context and a graph of its own: many come once
MOST_GRAPHS = 32  # a worker keeps
MOST_LAYOUTS = 64
SHORTEST_SOURCE = 8
CLOSED = "the model is closed", "load the bundle again"


@dataclass
class _Captured:
    """A step of fixed shapes and addresses: a CUDA graph wants a context that nothing else changes."""

    context: GraphContext
    graph: Graph | None = None

    def close(self) -> None:
        if self.graph is not None:
            self.graph.close()
        self.context.close()


class Worker:
    """Runs batches one after the other. Its lock makes sure of that.

    Attributes:
        graphs: what it runs.
        stream: that all its work is put on.
        capture_problem: why steps are not captured as CUDA graphs; None while nothing speaks against it.
    """

    def __init__(
        self, graphs: DeviceGraphs, *, reclaim: Callable[[Worker], None], closed: Callable[[Worker], None]
    ) -> None:
        """Make contexts and allocate what is needed whatever comes.

        Args:
            graphs: what to run.
            reclaim: asks the other workers to free memory that they do not use.
            closed: told when everything is freed.

        Raises:
            OutOfDeviceMemory: the GPU has not enough.
            BackendUnavailable: a context cannot be made.
        """
        self.graphs = graphs
        self.capture_problem: str | None = graphs.encoder.capture_problem
        self._lock, self._busy = threading.RLock(), 0
        self._closing, self._closed, self._tell_closed = False, False, closed
        self._uses: Counter[tuple[int, int, int]] = Counter()
        self._captured: OrderedDict[tuple[int, int, int], _Captured] = OrderedDict()
        self._layouts: OrderedDict[StepShape, StepArrays] = OrderedDict()
        self._large: Buffers | None = None
        with ExitStack() as undo:
            self.stream = graphs.gpu.stream()
            undo.callback(self.stream.close)
            needed = max(graph.workspace_bytes for graph in graphs.every)
            self._workspace = graphs.gpu.allocate(max(needed, ALIGNMENT))
            undo.callback(self._workspace.close)
            self._contexts: dict[tuple[CompiledGraph, Profile], GraphContext] = {}
            undo.callback(self._close_contexts)
            for graph in graphs.every:
                for profile in graph.profiles:
                    self._contexts[graph, profile] = graph.context(profile, self.stream, self._workspace)
            largest = encoder_inputs(graphs.max_batch_size, graphs.max_source_length)
            self._encoder_buffers = Buffers(graphs.gpu, largest.nbytes)
            undo.callback(self._encoder_buffers.close)
            shape = StepShape(graphs.max_batch_size, graphs.step_queries, graphs.max_source_length, max(graphs.steps))
            self._step_buffers = Buffers(graphs.gpu, *StepArrays.sizes(shape, graphs.dimensions))
            names = self_cache_names(graphs.dimensions), cross_names(graphs.dimensions)
            self._pool = MemoryPool(self.stream, graphs.rows, names, forget=self._forget, reclaim=lambda: reclaim(self))
            undo.pop_all()

    # Memory.

    @contextmanager
    def working(self) -> Iterator[None]:
        """Hold the worker; nobody else uses it meanwhile.

        Raises:
            RequestError: it is closed.
        """
        try:
            with self._lock:
                if self._closed:
                    raise RequestError(*CLOSED)
                self._busy += 1
                try:
                    self.graphs.gpu.activate()
                    yield
                except BaseException:
                    self._settle()
                    raise
                finally:
                    self._busy -= 1
        finally:
            self._close_if_done()

    def _settle(self) -> None:
        """Wait for what was put on the stream before something failed: the next call writes to the same memory."""
        try:
            self.graphs.gpu.activate()
            self.stream.synchronize()
        except CudaError as problem:
            LOG.warning("%s", str(problem))  # the first error is the one to raise

    def lease(self, rows: int, source: int, capacity: int) -> Lease:
        """Zeroed memory for a batch; the sizes are rounded up.

        Raises:
            RequestError: the graphs do not take so many rows.
            OutOfDeviceMemory: the GPU has not so much.
        """
        most = self.graphs.max_batch_size
        if rows > most:
            raise RequestError(
                f"a batch may have {most:,} sentences on this GPU, found {rows:,}",
                f"max_batch_size={most} in the request"
                + ("" if ANY in self.graphs.steps else f", or tfm-export trt --max-batch-size {rows} --force"),
            )
        memory = self._pool.take(
            bucket(rows, most),
            bucket(source, self.graphs.max_source_length, SHORTEST_SOURCE),
            self.graphs.capacity(capacity),
        )
        return Lease(memory, self._give_back)

    def _give_back(self, memory: BatchMemory) -> None:
        """Called by any thread, when the garbage collector comes: nothing here waits for a lock."""
        self._pool.give_back(memory)
        when_not_capturing(self._close_if_done)

    def free_idle(self) -> None:
        """Free memory that no batch has, unless the worker is busy."""
        if self._lock.acquire(blocking=False):
            try:
                self._pool.free_idle()
            finally:
                self._lock.release()

    def _forget(self, memory: BatchMemory) -> None:
        """Drop what was captured with that memory's addresses; its work has been waited for."""
        for key in [key for key in self._captured if key[0] == memory.number]:
            self._captured.pop(key).close()
        for key in [key for key in self._uses if key[0] == memory.number]:
            del self._uses[key]

    # Work. The caller holds the worker.

    def encode(self, source_ids: Ids, source_mask: Mask, memory: BatchMemory) -> None:
        """Run the encoder into the memory's cross-attention keys and values; those of padding are zero."""
        profile = self.graphs.encoder.profiles[0]
        batch, source = bucket(len(source_ids), memory.rows), memory.source
        inputs, addresses = encoder_arrays(self._encoder_buffers, source_ids, source_mask, batch, source)
        context = self._contexts[self.graphs.encoder, profile]
        outputs = {name: memory.cross.address(name) for name in memory.cross.names}
        context.bind((memory.number, batch), {"batch": batch, "source": source}, addresses | outputs)
        self.stream.to_device(self._encoder_buffers.address, inputs)
        context.enqueue(self.stream)
        self._zero_padding(memory, source_mask)
        self.stream.synchronize()

    def _zero_padding(self, memory: BatchMemory, source_mask: Mask) -> None:
        rows, length = source_mask.shape
        memory.cross.zero_rows(self.stream, 0, rows, slots=(length, memory.source))
        for row in np.flatnonzero(~source_mask.all(-1)).tolist():
            edges = np.flatnonzero(np.diff(~source_mask[row], prepend=False, append=False)).tolist()
            for first, last in zip(edges[::2], edges[1::2], strict=True):
                memory.cross.zero_rows(self.stream, row, row + 1, slots=(first, last))

    def arrays(self, memory: BatchMemory, rows: int, query: int) -> StepArrays:
        """The arrays of a step with these rows in use, to be filled.

        Raises:
            RequestError: the graph does not take so many tokens a step.
        """
        most = self.graphs.step(memory.capacity).profiles[-1].query
        if query > most:
            raise RequestError(
                f"the engine takes up to {most} tokens of a sentence a step, found {query}",
                f"tfm-export trt --max-beam-size {query} --force, if they are beams",
            )
        shape = StepShape(bucket(rows, memory.rows), query, memory.source, memory.capacity)
        found = self._layouts.get(shape)
        if found is None:
            found = StepArrays(self._buffers(shape), shape, self.graphs.dimensions, self.graphs.limits)
            self._layouts[shape] = found
            if len(self._layouts) > MOST_LAYOUTS:
                self._layouts.popitem(last=False)
        return found

    def _buffers(self, shape: StepShape) -> Buffers:
        """Where the arrays of a step lie: always in the same place for steps that are captured."""
        sizes = StepArrays.sizes(shape, self.graphs.dimensions)
        if shape.query <= self.graphs.step_queries:
            return self._step_buffers
        if self._large is None or not self._large.holds(*sizes):
            self._layouts = OrderedDict(
                (key, arrays) for key, arrays in self._layouts.items() if key.query <= self.graphs.step_queries
            )
            if self._large is not None:
                self._large.close()
                self._large = None
            self._large = Buffers(self.graphs.gpu, *sizes)
        return self._large

    def step(self, memory: BatchMemory, arrays: StepArrays) -> None:
        """Run a step whose arrays are filled; its best tokens are in them afterwards."""
        graph = self.graphs.step(memory.capacity)
        profile = next(p for p in graph.profiles if p.query >= arrays.shape.query)
        key = memory.number, arrays.shape.batch, arrays.shape.query
        self._uses[key] += 1
        eager = self.capture_problem or profile is not graph.profiles[0] or self._uses[key] <= EAGER_RUNS
        if eager or not self._run_captured(key, graph, profile, memory, arrays):
            self._run(self._contexts[graph, profile], memory, arrays)
        self.stream.synchronize()

    def _run(self, context: GraphContext, memory: BatchMemory, arrays: StepArrays) -> None:
        caches = {cache_output_name(name): memory.caches.address(name) for name in memory.caches.names}
        addresses = {**arrays.addresses, **memory.addresses(), **caches}  # caches are updated in place
        context.bind((memory.number, arrays.shape, arrays.addresses["target_ids"]), vars(arrays.shape), addresses)
        self._submit(context, arrays)

    def _submit(self, context: GraphContext, arrays: StepArrays) -> None:
        self.stream.to_device(arrays.addresses["target_ids"], arrays.inputs)
        context.enqueue(self.stream)
        self.stream.to_host(arrays.best, arrays.addresses["top_log_probs"])

    def _run_captured(
        self, key: tuple[int, int, int], graph: CompiledGraph, profile: Profile, memory: BatchMemory, arrays: StepArrays
    ) -> bool:
        """Run a step as a graph, at first on a context of its own alone; False if that cannot be: nothing has run."""
        captured = self._captured.get(key)
        try:
            if captured is None:
                context = graph.context(profile, self.stream, self._workspace)
            elif captured.graph is None:
                captured.graph = self.stream.capture(functools.partial(self._submit, captured.context, arrays))
        except BackendUnavailable as problem:
            self.capture_problem = str(problem)
            LOG.warning("steps run without CUDA graphs, and slower: %s", self.capture_problem)
            return False
        if captured is None:  # new shapes cost a context work that cannot be captured
            self._run(context, memory, arrays)
            self._keep(key, _Captured(context))
        elif captured.graph is not None:
            self._captured.move_to_end(key)
            captured.graph.launch()
        return True

    def _keep(self, key: tuple[int, int, int], captured: _Captured) -> None:
        self._captured[key] = captured
        if len(self._captured) > MOST_GRAPHS:
            self.stream.synchronize()
            self._captured.popitem(last=False)[1].close()

    def fetch(self, arrays: Mapping[int, NDArray[Any]]) -> None:
        """Copy from addresses on the device to arrays in pinned memory, now."""
        for address, array in arrays.items():
            self.stream.to_host(array, address)
        self.stream.synchronize()

    # The end.

    def close(self) -> None:
        """Free everything: now, or when the last batch has given its memory back. Waits for nobody."""
        self._closing = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        if not self._closing or self._pool.lent or not self._lock.acquire(blocking=False):
            return  # whoever has the lock comes here after it
        try:
            if not (self._closed or self._busy or self._pool.lent):
                self._closed = True
                self._free()
        finally:
            self._lock.release()

    def _free(self) -> None:
        with ExitStack() as last:
            last.callback(self._tell_closed, self)
            last.callback(self.stream.close)
            last.callback(self._workspace.close)
            last.callback(self._step_buffers.close)
            last.callback(self._encoder_buffers.close)
            if self._large is not None:
                last.callback(self._large.close)
            last.callback(self._layouts.clear)
            last.callback(self._close_contexts)
            for captured in self._captured.values():
                last.callback(captured.close)
            last.callback(self._pool.free_idle)
            self._settle()

    def _close_contexts(self) -> None:
        for context in self._contexts.values():
            context.close()
