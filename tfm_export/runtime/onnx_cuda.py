"""The step model on ONNX Runtime's CUDA provider. Importing this raises BackendUnavailable without ONNX Runtime."""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
from pathlib import Path

from tfm_export.errors import BackendUnavailable
from tfm_export.extras import require_onnxruntime
from tfm_export.runtime import cuda

onnxruntime = require_onnxruntime()
LOG = logging.getLogger(__name__)
PROVIDER = "CUDAExecutionProvider"
# The CUDA providers of 1.25 and 1.26 have no Reshape of opset 24: half of the decoder step, its caches with it, is put
# on the CPU there. That of 1.27 has every operator of the graphs.
OLDEST = (1, 27)


def check_cuda_provider(device: int = 0) -> None:
    """Make sure that ONNX Runtime can compute on a GPU, without loading a model.

    Args:
        device: the number of the GPU.

    Raises:
        BackendUnavailable: the CUDA provider is not installed, is too old or lacks libraries; or there is no such GPU.
    """
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
    cuda.open_gpu(device)
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
    folder = Path(onnxruntime.__file__).parent / "capi"
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
