"""What a measurement must say of where it was taken."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from tfm_export.runtime.cpu.processor import cpu_features

PACKAGES = ("tfm-export", "numpy", "onnxruntime", "onnxruntime-gpu")


def describe(packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """The machine, the versions and the time.

    Args:
        packages: distributions whose versions matter.
    """
    cpu = cpu_features()
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu.name,
        "cpus": os.cpu_count(),
        "flags": list(cpu.instruction_sets),
        "memory_gigabytes": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in packages if (version := _version(name)) is not None},
        "load_average": list(os.getloadavg()),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
