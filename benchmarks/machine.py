"""What a measurement must say of where it was taken."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# The instruction sets that decide how fast matrices are multiplied.
FLAGS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_tile",
    "asimd",
    "asimddp",
    "i8mm",
    "sve",
)
PACKAGES = ("tfm-export", "numpy", "onnxruntime", "torch", "ctranslate2")


def describe() -> dict[str, Any]:
    """The machine, the versions, the commit and the time."""
    cpu = _cpu()
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu.get("model name", platform.processor() or platform.machine()),
        "cpu_family_model_stepping": [cpu.get(name) for name in ("cpu family", "model", "stepping")],
        "cpus": os.cpu_count(),
        "flags": [flag for flag in FLAGS if flag in cpu.get("flags", cpu.get("Features", "")).split()],
        "memory_gigabytes": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "load_average": list(os.getloadavg()),
    }


def _cpu() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
