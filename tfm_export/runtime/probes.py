"""Looks at what a machine has, a piece at a time: GPUs, libraries, what of a bundle can run.

    python -m tfm_export.runtime.probes NAME [BUNDLE]

prints what a probe found as one line of JSON. A library that is broken may take its process down with it, so whoever
wants to know runs each probe in a process of its own: see `tfm-export doctor`.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from typing import Any

from tfm_export.bundle import Bundle
from tfm_export.errors import TfmExportError
from tfm_export.extras import ONNXRUNTIME_DISTRIBUTIONS, require, require_onnxruntime
from tfm_export.runtime.backends import backend_choices, survey
from tfm_export.runtime.cpu.processor import cpu_features
from tfm_export.runtime.cpu.saturation import saturation_note
from tfm_export.runtime.gpu import cuda
from tfm_export.runtime.threads import usable_cpus

DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
FLAVORS = {"tensorrt": "trt", "tensorrt_rtx": "rtx"}  # by module, the extra that installs it
# Attributes of the driver's cuDeviceGetAttribute.
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76


def machine() -> dict[str, Any]:
    """The computer without its GPUs.

    Returns:
        `system`, `python`, `tfm_export` (their versions); `processor`; `instruction_sets`; `saturates`, see
        `CpuFeatures`; `cpus`, all of them; `usable_cpus`, those this process may use.
    """
    features = cpu_features()
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "tfm_export": _version("tfm-export"),
        "processor": features.name,
        "instruction_sets": list(features.instruction_sets),
        "saturates": features.saturates,
        "cpus": os.cpu_count(),
        "usable_cpus": usable_cpus(),
    }


def gpus() -> dict[str, Any]:
    """What the NVIDIA driver says of itself and its GPUs; needs no package.

    Returns:
        `driver`, its release, and `cuda`, the newest CUDA version that it knows; `devices`, each with index, name,
        compute_capability and memory_bytes; `problem`, why there are none.
    """
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError as problem:
        return {"devices": [], "problem": f"there is no NVIDIA driver: {problem}"}
    version, count = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    found: dict[str, Any] = {"driver": cuda.driver_release(), "cuda": cuda.version_text(version.value), "devices": []}
    if error := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return {**found, "problem": f"the NVIDIA driver finds no GPU that works (error {error})"}
    if not count.value:
        return {**found, "problem": "the NVIDIA driver finds no GPU"}
    return {**found, "devices": [_driver_device(driver, index) for index in range(count.value)]}


def _driver_device(driver: ctypes.CDLL, index: int) -> dict[str, Any]:
    device, name, memory = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    capability = [ctypes.c_int(), ctypes.c_int()]
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    for number, attribute in zip(capability, (CAPABILITY_MAJOR, CAPABILITY_MINOR), strict=True):
        driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
    return {
        "index": index,
        "name": name.value.decode(errors="replace"),
        "compute_capability": f"{capability[0].value}.{capability[1].value}",
        "memory_bytes": memory.value,
    }


def cuda_python() -> dict[str, Any]:
    """Whether the GPUs can be reached through cuda-python.

    Returns:
        `version` of CUDA that it is for; `devices`, how many; or `problem`.
    """
    found: dict[str, Any] = {"version": cuda.runtime_version()}
    return {**found, **_or_problem(lambda: {"devices": len(cuda.devices())})}


def onnxruntime() -> dict[str, Any]:
    """ONNX Runtime as it is installed.

    Returns:
        `version` and `providers`; `cuda`, {} where the CUDA provider can be used, or with the `problem`.
    """
    runtime = require_onnxruntime()
    found = {"version": runtime.__version__, "providers": list(runtime.get_available_providers())}
    return {**found, "cuda": _or_problem(_cuda_provider)}


def _cuda_provider() -> dict[str, Any]:
    from tfm_export.runtime.gpu.cuda_provider import check_cuda_provider

    check_cuda_provider(0)
    return {}


def tensorrt() -> dict[str, Any]:
    """TensorRT for data-centre GPUs: its `version`."""
    return _flavor("tensorrt")


def tensorrt_rtx() -> dict[str, Any]:
    """TensorRT-RTX: its `version`."""
    return _flavor("tensorrt_rtx")


def _flavor(module: str) -> dict[str, Any]:
    library = require(module, extra=FLAVORS[module])
    library.Runtime(library.Logger(library.Logger.ERROR))  # loads its libraries
    return {"version": library.__version__}


def bundle(path: str) -> dict[str, Any]:
    """What of a bundle can run here.

    Args:
        path: the bundle's folder.

    Returns:
        `ways`, each with variant, gpu, engine, text, problem (None if it runs here), hint and note, why it is slower
        here than it could be (None for nothing); `taken`, the text of the one that `load` takes.
    """
    opened = Bundle.open(path)
    ways = [
        {
            **asdict(way),
            "text": str(way),
            "problem": problem and " ".join(problem.problems),
            "hint": problem and problem.hint,
            "note": None if problem or way.gpu is not None else saturation_note(opened, way.variant),
        }
        for way, problem in survey(opened)
    ]
    runs = {way["text"] for way in ways if way["problem"] is None}
    return {"ways": ways, "taken": next((str(way) for way in backend_choices(opened) if str(way) in runs), None)}


def packages() -> dict[str, Any]:
    """The packages of the base install and of every extra for users, without importing any.

    Returns:
        `packages`, each with `name`, `extras` that need it ([] for the base install), `version`, None if it is not
        there, `needed`, the oldest version that will do, and `problem`, None where all is well; `clashes`, packages
        that are installed together and should not be, each as a sentence.
    """
    extras: dict[str, list[str]] = {}
    oldest: dict[str, str] = {}
    for requirement in _requirements():
        name, version, extra = _parts(requirement)
        if extra == "dev":
            continue
        extras.setdefault(name, []).extend([extra] if extra else [])
        oldest[name] = max(oldest.get(name, ""), version, key=_release)
    found = [
        {"name": name, "extras": needed_by, "version": _version(name), "needed": oldest[name]}
        | {"problem": _too_old(name, oldest[name])}
        for name, needed_by in extras.items()
    ]
    return {"packages": found, "clashes": [*_onnxruntime_clash(), *_tensorrt_clashes()]}


def _requirements() -> list[str]:
    """Of tfm-export and its extras; none where it runs from its sources without being installed."""
    try:
        return metadata.requires("tfm-export") or []
    except metadata.PackageNotFoundError:
        return []


def _parts(requirement: str) -> tuple[str, str, str]:
    """Name, oldest version and extra of a requirement such as "onnx>=1.23; extra == 'export'"."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    version = re.search(r">=\s*([0-9.]+)", requirement)
    extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", requirement)
    return name[0] if name else requirement, version[1] if version else "", extra[1] if extra else ""


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparing."""
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[^0-9.]", version)[0]))


def _too_old(name: str, needed: str) -> str | None:
    version = _version(name)
    if version is None or _release(version) >= _release(needed):
        return None
    return f"{name} {version} is older than {needed}: pip install --upgrade '{name}>={needed}'"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _onnxruntime_clash() -> Iterator[str]:
    there = [name for name in ONNXRUNTIME_DISTRIBUTIONS if _version(name)]
    if len(there) > 1:
        yield (
            f"{' and '.join(there)} write the same files, so which one runs is chance: "
            f"pip uninstall {' '.join(there)}, then pip install 'tfm-export[cpu]' or 'tfm-export[gpu]'"
        )


def _tensorrt_clashes() -> Iterator[str]:
    """A flavour for two major versions of CUDA, or parts of a flavour that are of different versions."""
    found: dict[str, dict[str, str]] = {}
    for distribution in metadata.distributions():
        name = (distribution.name or "").lower().replace("-", "_")
        if match := re.fullmatch(r"(tensorrt|tensorrt_rtx)(?:_cu(\d+)(?:_\w+)?)?", name):
            found.setdefault(match[1], {})[name] = distribution.version
    for flavor, parts in sorted(found.items()):
        majors = sorted({match[1] for name in parts if (match := re.search(r"_cu(\d+)", name))})
        if len(majors) > 1:
            yield (
                f"{flavor} is installed for CUDA {' and '.join(majors)}: pip uninstall {' '.join(sorted(parts))}, then "
                f"pip install 'tfm-export[{FLAVORS[flavor]}]'"
            )
        elif len(set(parts.values())) > 1:
            versions = ", ".join(f"{name} {version}" for name, version in sorted(parts.items()))
            yield (
                f"the parts of {flavor} are of different versions ({versions}): "
                f"pip install --force-reinstall 'tfm-export[{FLAVORS[flavor]}]'"
            )


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    probe.__name__: probe
    for probe in (machine, gpus, packages, cuda_python, onnxruntime, tensorrt, tensorrt_rtx, bundle)
}


def run(name: str, *arguments: str) -> dict[str, Any]:
    """What a probe found, or {"problem": ..., "hint": ...} where it raised."""
    return _or_problem(lambda: PROBES[name](*arguments))


def _or_problem(probe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return probe()
    except TfmExportError as problem:
        return {"problem": " ".join(problem.problems), "hint": problem.hint}
    except Exception as problem:  # noqa: BLE001 (whatever a broken library raises is what was to be found)
        return {"problem": f"{type(problem).__name__}: {problem}"}


def main() -> None:
    """Run one probe; what libraries print goes to standard error."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    print(json.dumps(run(*sys.argv[1:])), file=answer, flush=True)


if __name__ == "__main__":
    main()
