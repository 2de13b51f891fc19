"""The step model on ONNX Runtime's CUDA provider: a bundle's ONNX graphs on a GPU.

A graph takes any number of slots and of target tokens. ONNX Runtime has a stream of its own, so that each run begins
once the worker's stream is done, and has ended when the call returns.
Importing this raises BackendUnavailable without ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tfm_export.bundle import Bundle
from tfm_export.errors import BackendUnavailable, NumericError
from tfm_export.graph import (
    DECODER_STEP,
    ENCODER,
    TensorSpec,
    decoder_step_inputs,
    decoder_step_outputs,
    encoder_inputs,
    encoder_outputs,
)
from tfm_export.precision import PRECISIONS, Precision
from tfm_export.runtime.gpu import cuda
from tfm_export.runtime.gpu.compiled_graphs import ANY, CompiledGraph, DeviceGraphs, GraphContext, Profile
from tfm_export.runtime.gpu.cuda import CudaStream, DeviceBuffer
from tfm_export.runtime.gpu.cuda_provider import check_cuda_provider, load_cuda_session
from tfm_export.runtime.gpu.device_memory import RowShape
from tfm_export.runtime.gpu.device_model import MOST_WORKERS, DeviceModel
from tfm_export.runtime.step_model import StepModel
from tfm_export.runtime.variant_files import VariantFiles

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, IOBinding

MOST_ROWS = 1024  # the memory for sources is allocated once, for so many
# ONNX's numbers for types: of bfloat16, numpy has none.
_ELEMENT_TYPES = {"float32": 1, "int64": 7, "bool": 9, "float16": 10, "bfloat16": 16}


class OnnxCudaModel(DeviceModel):
    """A bundle's ONNX graphs on a GPU; a `StepModel`. Safe to use from several threads."""

    def __init__(
        self,
        bundle: Bundle,
        *,
        variant: str = "fp32",
        device: int = 0,
        attending: Callable[[], StepModel],
        workers: int = MOST_WORKERS,
        files: VariantFiles | None = None,
    ) -> None:
        """Load the two graphs of a variant.

        Args:
            bundle: an open bundle.
            variant: the precision, a folder under onnx/.
            device: the number of the GPU.
            attending: loads a model of the same variant whose steps give attention; those of the GPU give none.
            workers: the most threads that run at the same time.
            files: of the variant; None for those that are there now.

        Raises:
            BackendUnavailable: see `check_cuda_provider`; or the provider lacks kernels for the variant, or the GPU's
                memory is too small.
            BundleError: the bundle has no such variant, or a graph does not load or is not of the expected form.
            RequestError: workers is less than 1.
        """
        bundle.variant_path(variant)
        check_cuda_provider(device, variant=variant)
        self._files = files or VariantFiles(bundle, variant)
        try:
            super().__init__(_load(bundle, self._files, PRECISIONS[variant], device), workers)
            self._try()
        except cuda.OutOfDeviceMemory as problem:
            raise BackendUnavailable(problem.problems, 'end what else uses the GPU, or device="cpu"') from problem
        self._attending = attending
        self.capabilities = replace(self.capabilities, offers_attention=True)

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

    def with_attention(self) -> StepModel:
        """A model of the same variant with steps that give attention; see `StepModel.with_attention`."""
        self._check_open()
        return self._attending()

    def close(self) -> None:
        """Let go of files, too; see `StepModel.close`."""
        super().close()
        self._files.close()


def _load(bundle: Bundle, files: VariantFiles, precision: Precision, device: int) -> DeviceGraphs:
    """Load the two graphs of a variant."""
    dimensions, limits, kind = bundle.manifest.dimensions, bundle.manifest.limits, precision.float_type
    encoder = SessionGraph(
        files, ENCODER, encoder_inputs(), encoder_outputs(dimensions, kind), device, limits.max_source_length
    )
    inputs, outputs = decoder_step_inputs(dimensions, kind), decoder_step_outputs(dimensions, kind)
    step = SessionGraph(files, DECODER_STEP, inputs, outputs, device, limits.max_source_length)
    return DeviceGraphs(
        gpu=cuda.open_gpu(device),
        encoder=encoder,
        steps={ANY: step},
        step_queries=0,
        dimensions=dimensions,
        limits=limits,
        rows=RowShape(dimensions.heads, dimensions.head_size, precision.item_bytes),
        float_type=kind,
    )


class SessionGraph(CompiledGraph):
    """A graph that a session of ONNX Runtime's CUDA provider runs.

    Args:
        files: of its variant.
        name: of its file.
        inputs: as the graph's table says.
        outputs: as the graph's table says.
        device: the number of the GPU.
        longest: source tokens.
    """

    capture_problem = "ONNX Runtime runs on a stream of its own"
    workspace_bytes = 0

    def __init__(
        self,
        files: VariantFiles,
        name: str,
        inputs: list[TensorSpec],
        outputs: list[TensorSpec],
        device: int,
        longest: int,
    ) -> None:
        self.path, self.inputs, self.outputs, self.device = files.folder / name, inputs, outputs, device
        self.profiles = [Profile(index=0, batch=MOST_ROWS, source=longest, query=ANY)]
        self._session: InferenceSession | None = load_cuda_session(
            files, name, inputs, outputs, device=device, threads=1
        )

    def context(self, profile: Profile, stream: CudaStream, workspace: DeviceBuffer) -> SessionContext:  # noqa: ARG002
        """What runs it: the session takes its own stream and memory."""
        assert self._session is not None, "a graph is asked for contexts while it is open"
        return SessionContext(self._session, self)

    def save_cache(self) -> None:
        """The provider compiles nothing."""

    def close(self) -> None:
        """Let go of the session."""
        self._session = None


class SessionContext(GraphContext):
    """Addresses bound to the inputs and outputs of a session. Not to be used by two threads at once."""

    def __init__(self, session: InferenceSession, graph: SessionGraph) -> None:
        self._session, self._graph = session, graph
        self._binding: IOBinding | None = None
        self._bound: object = None

    def bind(self, key: object, sizes: Mapping[str, int], addresses: Mapping[str, int]) -> None:
        """Bind every input and output, unless they are bound already; see `GraphContext.bind`."""
        if key == self._bound:
            return
        self._bound, graph = None, self._graph
        binding = self._session.io_binding()
        for specs, bind in ((graph.inputs, binding.bind_input), (graph.outputs, binding.bind_output)):
            for spec in specs:
                kind, shape = _ELEMENT_TYPES[spec.dtype], spec.shape(sizes)
                bind(spec.name, "cuda", graph.device, kind, shape, addresses[spec.name])
        self._binding, self._bound = binding, key

    def enqueue(self, stream: CudaStream) -> None:
        """Run it, now; see `GraphContext.enqueue`."""
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
