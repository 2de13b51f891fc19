"""What this machine's processor is, and the instruction sets that decide how fast, and how, it multiplies matrices."""

from __future__ import annotations

import importlib
import platform
from dataclasses import dataclass
from pathlib import Path

# By our name: the names in /proc/cpuinfo, any of which is enough, and the one that numpy has for it ("" for none).
_INSTRUCTION_SETS = {
    "avx2": (("avx2",), "AVX2"),
    "fma": (("fma",), "FMA3"),
    "avx512": (("avx512f",), "AVX512F"),
    "vnni": (("avx512_vnni", "avx_vnni"), "AVX512VNNI"),
    "bf16": (("avx512_bf16", "bf16"), "AVX512BF16"),
    "amx": (("amx_int8",), ""),
    "neon": (("asimd", "neon"), "ASIMD"),
    "dotprod": (("asimddp",), "ASIMDDP"),
    "i8mm": (("i8mm",), ""),
    "sve": (("sve",), "SVE"),
}
_X86 = ("x86_64", "AMD64", "i386", "i686", "x86")


@dataclass(frozen=True, kw_only=True)
class CpuFeatures:
    """What a processor can do.

    Attributes:
        name: what it calls itself.
        machine: its architecture, such as "x86_64" or "aarch64".
        instruction_sets: those of avx2, fma, avx512, vnni, bf16, amx, neon, dotprod, i8mm and sve that it has.
    """

    name: str
    machine: str
    instruction_sets: tuple[str, ...]

    @property
    def saturates(self) -> bool:
        """Whether the fastest sums of products of 8-bit numbers may be cut off; see `runtime.cpu.saturation`.

        ONNX Runtime multiplies on x86 with VNNI or AMX, which add to 32 bits, and without them with `vpmaddubsw`, which
        adds two products in 16. ARM's instructions are exact. A processor that does not tell what it has is taken for
        one that saturates, which costs speed and no more: numpy, where there is no /proc/cpuinfo, has no names for AMX
        and AVX-VNNI.
        """
        return self.machine in _X86 and not {"vnni", "amx"} & set(self.instruction_sets)


def cpu_features(root: Path = Path("/")) -> CpuFeatures:
    """Read what the processor has: from /proc/cpuinfo or, where there is none, from what numpy found at its start.

    Args:
        root: where /proc is looked for.
    """
    machine = platform.machine()
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        found = _numpy_features()
        sets = tuple(name for name, (_, numpy_name) in _INSTRUCTION_SETS.items() if numpy_name in found)
        return CpuFeatures(name=platform.processor() or machine, machine=machine, instruction_sets=sets)
    processors = [_fields(block) for block in text.split("\n\n") if block.strip()]
    flags = [set(flags.split()) for one in processors if (flags := one.get("flags", one.get("Features")))]
    shared = set.intersection(*flags) if flags else set()  # threads run on any of them
    sets = tuple(name for name, (flags, _) in _INSTRUCTION_SETS.items() if shared.intersection(flags))
    names = [one["model name"] for one in processors if "model name" in one]
    return CpuFeatures(name=names[0] if names else machine, machine=machine, instruction_sets=sets)


def _fields(block: str) -> dict[str, str]:
    """The lines "name : value" of a processor's block."""
    pairs = (line.partition(":") for line in block.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _numpy_features() -> set[str]:
    """What numpy, which chooses its own kernels by it, says of the processor; nothing if it does not say."""
    for module in ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath"):  # numpy 2, numpy 1
        try:
            features: dict[str, bool] = importlib.import_module(module).__cpu_features__
        except (ImportError, AttributeError):
            continue
        return {name for name, there in features.items() if there}
    return set()
