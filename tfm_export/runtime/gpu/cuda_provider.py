"""ONNX Runtime's CUDA provider: whether it can be used, and sessions that do use it.

ONNX Runtime is lenient: where the provider does not load it computes on the CPU, and operators that the provider lacks
are computed there too, with a copy to the host and back around each. Either is an error here.
Importing this raises BackendUnavailable without ONNX Runtime.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from tfm_export.errors import BackendUnavailable, BundleError
from tfm_export.extras import require, require_onnxruntime
from tfm_export.graph import TensorSpec
from tfm_export.precision import FLOATS
from tfm_export.runtime.gpu import cuda
from tfm_export.runtime.onnx_sessions import check_form, session_options
from tfm_export.runtime.variant_files import VariantFiles

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

onnxruntime = require_onnxruntime()
LOG = logging.getLogger(__name__)
PROVIDER = "CUDAExecutionProvider"
# The CUDA providers of 1.25 and 1.26 have no Reshape of opset 24: half of the decoder step, its caches with it, is put
# on the CPU there. That of 1.27 has every operator of the graphs.
OLDEST = (1, 27)
# What ONNX Runtime computes on the CPU although the provider has it, because it computes shapes, which the CPU needs.
SHAPE_OPERATORS = {
    *("Shape", "Size", "Constant", "ConstantOfShape", "Gather", "Slice", "Concat", "Squeeze", "Unsqueeze", "Reshape"),
    *("Cast", "Add", "Sub", "Mul", "Div", "Range", "ReduceProd"),
}
# TF32 rounds the factors of float32 products to 10 bits; PyTorch does not unless it is told to.
PROVIDER_OPTIONS = {"use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}


def check_cuda_provider(device: int = 0, *, variant: str = "fp32") -> None:
    """Make sure that ONNX Runtime can compute on a GPU, without loading a model.

    Args:
        device: the number of the GPU.
        variant: the precision.

    Raises:
        BackendUnavailable: the CUDA provider is not installed, is too old, lacks libraries or lacks kernels for the
            variant; or there is no such GPU.
    """
    require("cuda.bindings.runtime", extra="gpu")
    cuda.open_gpu(device)
    version = onnxruntime.__version__
    if PROVIDER not in onnxruntime.get_available_providers():
        raise BackendUnavailable(
            f"onnxruntime {version} has no CUDA provider: it is the package for CPUs",
            "pip uninstall onnxruntime, then pip install 'tfm-export[gpu]'",
        )
    if tuple(int(number) for number in version.split(".")[:2]) < OLDEST:
        raise BackendUnavailable(
            f"expected onnxruntime-gpu {'.'.join(map(str, OLDEST))} or newer, found {version}: its CUDA provider lacks "
            "operators that the graphs have",
            "pip install --upgrade 'tfm-export[gpu]'",
        )
    if variant not in FLOATS:  # it takes quantised graphs, and fails when they run, or dequantises and is in float32
        raise BackendUnavailable(
            f"ONNX Runtime's CUDA provider has no kernels for {variant}, only for {', '.join(FLOATS)}",
            f'a TensorRT engine of {variant}; variant="fp16"; or device="cpu"',
        )
    _load_libraries()


def _load_libraries() -> None:
    """Load what the CUDA provider needs, from the NVIDIA packages of this environment or from the system.

    ONNX Runtime looks in the system's folders alone. Where it misses a library it goes on without the GPU.

    Raises:
        BackendUnavailable: a library is missing; it says which.
    """
    said = io.StringIO()
    with contextlib.redirect_stdout(said):  # it prints what it does not find, and a command may be printing JSON
        onnxruntime.preload_dlls()
    if said.getvalue():
        LOG.info("onnxruntime.preload_dlls: %s", said.getvalue().strip())
    folder = Path(str(onnxruntime.__file__)).parent / "capi"
    provider = folder / "libonnxruntime_providers_cuda.so"
    if not provider.is_file():
        return  # Windows: there the session tells
    try:
        ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(provider))
    except OSError as problem:
        raise BackendUnavailable(
            f"ONNX Runtime's CUDA provider cannot be loaded: {problem}",
            "pip install 'tfm-export[gpu]', which brings CUDA's libraries",
        ) from problem


def load_cuda_session(
    files: VariantFiles, name: str, inputs: list[TensorSpec], outputs: list[TensorSpec], *, device: int, threads: int
) -> InferenceSession:
    """Load a graph onto a GPU, and compare its inputs and outputs with the table.

    Args:
        files: of its variant.
        name: of the graph.
        inputs: as the table says.
        outputs: as the table says.
        device: the number of the GPU.
        threads: for what little is computed on the CPU.

    Raises:
        BackendUnavailable: the provider does not take the graph, or leaves some of it to the CPU.
        BundleError: the graph does not load, or differs from the table.
    """
    path, options = files.folder / name, session_options(threads)
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    providers = [(PROVIDER, {**PROVIDER_OPTIONS, "device_id": str(device)}), "CPUExecutionProvider"]
    try:
        kept = files.give_weights(options)
        session = onnxruntime.InferenceSession(files.graph(name), options, providers=providers, enable_fallback=0)
        del kept
    except BundleError:
        raise
    except Exception as problem:  # its exceptions have no base class of their own
        raise BundleError(
            f"{path} cannot be loaded by ONNX Runtime {onnxruntime.__version__} on GPU {device}: {problem}",
            'tfm-export verify, which tells whether the bundle is sound; or device="cpu"',
        ) from problem
    if PROVIDER not in session.get_providers():
        raise BackendUnavailable(
            f"ONNX Runtime {onnxruntime.__version__} could not begin with GPU {device}, and said why on standard error",
            'tfm-export doctor; or device="cpu"',
        )
    check_form(session, path, inputs, outputs)
    if left := _on_the_cpu(session):
        found = ", ".join(f"{count} {operator}" for operator, count in sorted(left.items()))
        raise BackendUnavailable(
            f"ONNX Runtime {onnxruntime.__version__} has no CUDA kernels for some of {path.parent.name}: {found}",
            'another variant, such as fp16 or fp32; a newer onnxruntime-gpu; or device="cpu"',
        )
    return session


def _on_the_cpu(session: InferenceSession) -> Counter[str]:
    """The operators that are computed on the CPU and are not there to compute shapes, and how many of each."""
    return Counter(
        node.op_type
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
        if part.ep_name != PROVIDER and node.op_type not in SHAPE_OPERATORS
    )
