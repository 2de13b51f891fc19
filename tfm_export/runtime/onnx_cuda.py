"""The step model on ONNX Runtime's CUDA provider: a bundle's ONNX graphs on a GPU.

It works as the engine runtime does, with its memory, its batches and its threads: a graph on the provider stands in the
place of a TensorRT plan. What differs: a graph takes any number of rows and slots, and ONNX Runtime has a stream of its
own, so that each run begins once this side's stream is done, and has ended when the call returns.
Importing this raises BackendUnavailable without ONNX Runtime.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tfm_export.bundle import Bundle
from tfm_export.errors import BackendUnavailable, NumericError, RequestError
from tfm_export.graph import (
    DECODER_STEP,
    ENCODER,
    TensorSpec,
    decoder_step_inputs,
    decoder_step_outputs,
    encoder_inputs,
    encoder_outputs,
)
from tfm_export.precision import PRECISIONS
from tfm_export.runtime import cuda
from tfm_export.runtime.checks import check_encode
from tfm_export.runtime.cuda import DeviceBuffer, Stream, when_not_capturing
from tfm_export.runtime.cuda_provider import check_cuda_provider, load_cuda_session
from tfm_export.runtime.device_memory import BatchMemory, Lease, RowShape, bucket
from tfm_export.runtime.device_sentences import REFILL_AT, DeviceSentences
from tfm_export.runtime.device_worker import CLOSED, Engine, Worker
from tfm_export.runtime.onnx_runtime import OnnxModel
from tfm_export.runtime.step_buffers import StepArrays
from tfm_export.runtime.step_model import Ids, Mask
from tfm_export.runtime.tensorrt_plans import Context, Plan, Profile
from tfm_export.runtime.thread_workers import MOST_WORKERS, Workers

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, IOBinding

LOG = logging.getLogger(__name__)
MOST_ROWS = 1024  # the memory for sources is allocated once, for so many
FIRST_CAPACITY = 16
SLOTS_TOGETHER = 8  # the provider's fused attention wants a multiple of this
ANY = sys.maxsize
# ONNX's numbers for types: of bfloat16, numpy has none.
_ELEMENT_TYPES = {"float32": 1, "int64": 7, "bool": 9, "float16": 10, "bfloat16": 16}


class OnnxCudaModel:
    """A bundle's ONNX graphs on a GPU; a `StepModel`. Safe to use from several threads.

    Attributes:
        dimensions: the sizes that the graphs show.
        limits: the longest sequences.
        float_type: the dtype of caches and cross-attention keys and values.
        gives_attention: steps give none.
        refill_at: see `StepModel.refill_at`.
    """

    refill_at = REFILL_AT

    def __init__(
        self,
        bundle: Bundle,
        *,
        variant: str = "fp32",
        device: int = 0,
        threads: int | None = None,
        workers: int = MOST_WORKERS,
    ) -> None:
        """Load the two graphs of a variant.

        Args:
            bundle: an open bundle.
            variant: the precision, a folder under onnx/.
            device: the number of the GPU.
            threads: threads to compute with where attention is asked for, which is done on the CPU.
            workers: the most threads that run at the same time.

        Raises:
            BackendUnavailable: see `check_cuda_provider`; or the provider lacks kernels for the variant, or the GPU's
                memory is too small.
            BundleError: the bundle has no such variant, or a graph does not load or is not of the expected form.
            RequestError: workers is less than 1.
        """
        folder = bundle.variant_path(variant)
        check_cuda_provider(device, variant=variant)
        self._bundle, self._variant, self._threads = bundle, variant, threads
        self.dimensions, self.limits = bundle.manifest.dimensions, bundle.manifest.limits
        self.float_type, self.gives_attention = PRECISIONS[variant].float_type, False
        try:
            self._workers = Workers(self._load(folder, device), workers, kind=_CudaWorker)
            self._close = weakref.finalize(self, when_not_capturing, self._workers.close)
            self._try()
        except cuda.OutOfDeviceMemory as problem:
            raise BackendUnavailable(problem.problems, 'end what else uses the GPU, or device="cpu"') from problem

    def _try(self) -> None:
        """Run both graphs once: only then does CUDA load kernels, which may be none for this GPU."""
        one, start = np.zeros((1, 1), np.int64), np.zeros(1, np.int64)
        try:
            sentences = self.encode(one, one == 0, capacity=1)
            sentences.step(one, one, start, np.ones((1, 1, 1, 1), np.bool_))
        except NumericError:  # the model's fault, which whoever decodes with it is told
            return
        except BaseException:
            self.close()
            raise

    def _load(self, folder: Path, device: int) -> Engine:
        kind, dimensions, limits = self.float_type, self.dimensions, self.limits
        encoder = _Graph(folder / ENCODER, encoder_inputs(), encoder_outputs(dimensions, kind), device)
        inputs, outputs = decoder_step_inputs(dimensions, kind), decoder_step_outputs(dimensions, kind)
        step = _Graph(folder / DECODER_STEP, inputs, outputs, device)
        for graph in (encoder, step):
            graph.profiles = [Profile(index=0, batch=MOST_ROWS, source=limits.max_source_length, query=0)]
        step.profiles.append(Profile(index=1, batch=MOST_ROWS, source=limits.max_source_length, query=ANY))
        return _Graphs(
            gpu=cuda.open_gpu(device),
            encoder=encoder,
            steps={FIRST_CAPACITY: step},
            dimensions=dimensions,
            limits=limits,
            rows=RowShape(dimensions.heads, dimensions.head_size, PRECISIONS[self._variant].item_bytes),
            float_type=kind,
        )

    def encode(self, source_ids: Ids, source_mask: Mask, *, capacity: int) -> DeviceSentences:
        """Run the encoder on a padded batch and set up its caches; see `StepModel.encode`."""
        if not self._close.alive:
            raise RequestError(*CLOSED)
        check_encode(source_ids, source_mask, capacity, dimensions=self.dimensions, limits=self.limits)
        return DeviceSentences(self._workers.of_this_thread(), source_ids, source_mask, capacity)

    def with_attention(self) -> OnnxModel:
        """The same variant with steps that give attention; much slower, for it runs on the CPU.

        Raises:
            BackendUnavailable: the CPU cannot run this variant.
            RequestError: the bundle was exported without the graph for it, or the model is closed.
        """
        if not self._close.alive:
            raise RequestError(*CLOSED)
        LOG.info("what needs attention weights is decoded on the CPU")
        with ExitStack() as undo:
            model = OnnxModel(self._bundle, variant=self._variant, threads=self._threads)
            undo.callback(model.close)
            return model.with_attention()

    def close(self) -> None:
        """Free what is on the GPU; what batches still need goes with the last of them."""
        self._close()


@dataclass(frozen=True, kw_only=True)
class _Graphs(Engine):
    """The graphs of a variant, loaded."""

    def plan(self, capacity: int) -> Plan:  # noqa: ARG002 (one for all)
        """The decoder step's."""
        return self.steps[FIRST_CAPACITY]

    def capacity(self, wanted: int) -> int:
        """The slots of a batch that needs so many."""
        slots = bucket(max(wanted, FIRST_CAPACITY), ANY)
        return -(-slots // SLOTS_TOGETHER) * SLOTS_TOGETHER


class _Provider:
    """In the place of a TensorRT library."""

    capture_problem = "ONNX Runtime runs on a stream of its own"


class _Graph(Plan):
    """A graph on the CUDA provider, in the place of a plan."""

    def __init__(self, path: Path, inputs: list[TensorSpec], outputs: list[TensorSpec], device: int) -> None:
        self.path, self.library, self.profiles, self.workspace_bytes = path, _Provider(), [], 0  # type: ignore[assignment]
        self.inputs, self.outputs, self.device = inputs, outputs, device
        self.session: InferenceSession | None = load_cuda_session(path, inputs, outputs, device=device, threads=1)

    def context(self, profile: Profile, stream: Stream, workspace: DeviceBuffer) -> Context:  # noqa: ARG002 (of a plan)
        """What runs it."""
        assert self.session is not None
        return _Binding(self.session, self)

    def save_cache(self) -> None:
        """The provider compiles nothing."""

    def close(self) -> None:
        """Let go of the session."""
        self.session = None


class _Binding(Context):
    """Addresses bound to the inputs and outputs of a session, in the place of an execution context."""

    def __init__(self, session: InferenceSession, graph: _Graph) -> None:
        self._session, self._graph = session, graph
        self._binding: IOBinding | None = None
        self._bound: object = None

    def bind(self, key: object, shapes: Mapping[str, Sequence[int]], addresses: Mapping[str, int]) -> None:
        """Bind every input and output, unless they are bound already; see `Context.bind`."""
        if key == self._bound:
            return
        self._bound, graph = None, self._graph
        sizes = {
            axis: size
            for spec in graph.inputs
            for axis, size in zip(spec.axes, shapes[spec.name], strict=True)
            if isinstance(axis, str)
        }
        binding = self._session.io_binding()
        for specs, bind in ((graph.inputs, binding.bind_input), (graph.outputs, binding.bind_output)):
            for spec in specs:
                shape = [sizes[axis] if isinstance(axis, str) else axis for axis in spec.axes]
                bind(spec.name, "cuda", graph.device, _ELEMENT_TYPES[spec.dtype], shape, addresses[spec.name])
        self._binding, self._bound = binding, key

    def enqueue(self, stream: Stream) -> None:
        """Run it, now; see `Context.enqueue`.

        Raises:
            OutOfDeviceMemory: what it computes does not fit.
        """
        stream.synchronize()
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as problem:  # its exceptions have no base class of their own
            if "allocate memory" in str(problem):
                raise cuda.OutOfDeviceMemory(
                    f"a step does not fit into the GPU's memory: {problem}",
                    "a smaller max_batch_size, or end what else uses the GPU",
                ) from problem
            raise BackendUnavailable(
                f"ONNX Runtime could not run {self._graph.path}: {problem}", "tfm-export doctor"
            ) from problem

    def close(self) -> None:
        """Let go of the session."""
        self._binding = self._bound = None


class _CudaWorker(Worker):
    """Runs batches on the provider, one after the other."""

    def lease(self, rows: int, source: int, capacity: int) -> Lease:
        """Zeroed memory for a batch; see `Worker.lease`."""
        if rows > MOST_ROWS:
            raise RequestError(f"a batch may have {MOST_ROWS:,} sentences on a GPU, found {rows:,}", "max_batch_size")
        return super().lease(rows, source, capacity)

    def step(self, memory: BatchMemory, arrays: StepArrays) -> None:
        """Run a step whose arrays are filled; see `Worker.step`."""
        self._run(self._contexts[FIRST_CAPACITY, 1], memory, arrays)
        self.stream.synchronize()
