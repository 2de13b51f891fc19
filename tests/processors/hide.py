"""Processes in which ONNX Runtime finds an older processor than this machine's, and takes the kernels for that one.

    python -m tests.processors.hide LIBRARY PROCESSOR BUNDLE VARIANT FILE [OPTION...]

writes the log-probabilities of a few fixed sources and targets into a file of numpy. Nothing is imported that could
have asked the processor before instruction sets are hidden.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfm_export.runtime.cpu.processor import CpuFeatures

SOURCE = Path(__file__).with_name("cpuid.c")

# Bits of cpuid's leaf 7.
_AVX512 = 1 << 16 | 1 << 17 | 1 << 21 | 1 << 28 | 1 << 30 | 1 << 31  # F, DQ, IFMA, CD, BW, VL
_AVX512_VNNI = 1 << 11
_AMX = 1 << 22 | 1 << 24 | 1 << 25  # BF16, TILE, INT8
_AVX_VNNI = 1 << 4
_AVX_VNNI_INT = 1 << 4 | 1 << 10  # INT8, INT16

# By name: the bits of EBX, ECX, EDX, and EAX and EDX of subleaf 1 that are hidden, and what is left of ours.
PROCESSORS = {
    "AVX2": ((_AVX512, _AVX512_VNNI, _AMX, _AVX_VNNI, _AVX_VNNI_INT), ("avx2", "fma")),
    "AVX-VNNI": ((_AVX512, _AVX512_VNNI, _AMX, 0, 0), ("avx2", "fma", "vnni")),
    "AVX-512": ((0, _AVX512_VNNI, _AMX, _AVX_VNNI, _AVX_VNNI_INT), ("avx2", "fma", "avx512")),
    "AVX-512 VNNI": ((0, 0, _AMX, 0, 0), ("avx2", "fma", "avx512", "vnni")),
}
NEEDED = {"AVX2": {"avx2"}, "AVX-VNNI": {"vnni"}, "AVX-512": {"avx512"}, "AVX-512 VNNI": {"avx512", "vnni"}}


def build_library(folder: Path) -> Path:
    """Compile what hides instruction sets."""
    library = folder / "cpuid.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE], check=True)
    return library


def problem(library: Path | None = None) -> str | None:
    """Why instruction sets cannot be hidden here; None if they can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "hides instruction sets of x86-64, on Linux"
    if shutil.which("cc") is None:
        return "cc is not installed"
    if library is None:
        return None
    code = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).hide(0, 0, 0, 0, 0) != 0)"
    done = subprocess.run([sys.executable, "-c", code, library], check=False)
    return "this processor or kernel cannot make cpuid fault" if done.returncode else None


def become(library: str, name: str) -> CpuFeatures:
    """Hide what a processor does not have; give what tfm_export would find on it."""
    assert not {"numpy", "onnxruntime"} & sys.modules.keys(), "they have asked the processor already"
    hidden, sets = PROCESSORS[name]
    assert ctypes.CDLL(library).hide(*map(ctypes.c_uint32, hidden)) == 0
    from tfm_export.runtime.cpu.processor import CpuFeatures

    return CpuFeatures(name=f"a processor with {name}", machine="x86_64", instruction_sets=sets)


def main(library: str, name: str, bundle: str, variant: str, file: str, *options: str) -> None:
    """Decode with a variant on a processor.

    Args:
        library: of `build_library`.
        name: of the processor; "" for this machine's own.
        bundle: its path.
        variant: the precision; with "/encoder" or "/generate" behind it, that graph of it alone.
        file: to write.
        options: "narrow": leave ONNX Runtime to itself.
    """
    found = become(library, name) if name else None
    import numpy as np

    from tests.processors.sources import encoded, generated, log_probs
    from tfm_export.bundle import Bundle
    from tfm_export.runtime.cpu import onnx_runtime, saturation

    if found is not None:
        saturation.cpu_features = lambda: found
    if "narrow" in options:
        onnx_runtime.needs_wide_sums = lambda _: False
    opened = Bundle.open(bundle, check_hashes=False)
    precision, _, graph = variant.partition("/")
    np.save(file, {"": log_probs, "encoder": encoded, "generate": generated}[graph](opened, precision))


if __name__ == "__main__":
    main(*sys.argv[1:])
