"""Libraries that only some commands need: tell which extra to install when one is missing.

The base install has numpy and click alone. Call `require` before the first import of anything else:

    require("torch", extra="export")
    import torch
"""

from __future__ import annotations

import importlib
import os
from importlib import metadata
from types import ModuleType

from tfm_export.errors import BackendUnavailable

ONNXRUNTIME_DISTRIBUTIONS = ("onnxruntime", "onnxruntime-gpu")
ONNXRUNTIME_MINIMUM = (1, 25)  # the first release with TensorScatter, which writes the cache in place
TELEMETRY = "ORT_DISABLE_TELEMETRY"  # read when the library is loaded: "1" for none, anything else for some


def require(module: str, *, extra: str) -> ModuleType:
    """Import a library that is not part of the base install.

    Args:
        module: its import name.
        extra: the extra of tfm-export that installs it.

    Raises:
        BackendUnavailable: it is not installed, or it is and cannot be loaded.
    """
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        package = module.partition(".")[0]
        missing = isinstance(problem, ModuleNotFoundError) and problem.name == package
        found = f"{package} is not installed" if missing else f"{module} cannot be loaded: {problem}"
        raise BackendUnavailable(found, f"pip install 'tfm-export[{extra}]'") from problem


def require_onnxruntime() -> ModuleType:
    """Import ONNX Runtime, and make sure that there is one of it and that it is new enough.

    Its telemetry is off, unless the environment variable ORT_DISABLE_TELEMETRY is set already, to 0: as soon as the
    library is loaded, it would write a database and an id of the device below the home folder, and start to upload.

    Raises:
        BackendUnavailable: it is not installed, is older than 1.25, or onnxruntime and onnxruntime-gpu are both there.
    """
    found = {name: version for name in ONNXRUNTIME_DISTRIBUTIONS if (version := _installed_version(name))}
    if len(found) > 1:
        raise BackendUnavailable(
            f"{' and '.join(f'{name} {version}' for name, version in found.items())} are both installed; they write "
            "the same files, so which one runs is chance",
            f"pip uninstall {' '.join(found)}, then pip install 'tfm-export[cpu]' or 'tfm-export[gpu]'",
        )
    chosen = TELEMETRY in os.environ
    os.environ.setdefault(TELEMETRY, "1")
    runtime = require("onnxruntime", extra="cpu")
    if not chosen:
        runtime.disable_telemetry_events()  # of a library that somebody else has loaded before; it does nothing else
    if _release(runtime.__version__) < ONNXRUNTIME_MINIMUM:
        name = next(iter(found), "onnxruntime")
        raise BackendUnavailable(
            f"expected {name} {'.'.join(map(str, ONNXRUNTIME_MINIMUM))} or newer, found {runtime.__version__}",
            f"pip install --upgrade {name}",
        )
    return runtime


def _installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
