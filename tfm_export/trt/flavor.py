"""The two TensorRT libraries, and every way in which they differ when engines are built.

`tensorrt` builds on the GPU that the engine is for, and times kernels there. `tensorrt_rtx` needs no GPU: it builds
ahead of time for several of them, and compiles the kernels when the engine is loaded. Their API is the same.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tfm_export.engines import FLAVORS
from tfm_export.errors import BackendUnavailable, BuildError
from tfm_export.extras import require
from tfm_export.precision import PRECISIONS
from tfm_export.runtime.gpu import cuda
from tfm_export.trt.options import EngineOptions

MODULES = {"tensorrt": ("tensorrt", "trt"), "rtx": ("tensorrt_rtx", "rtx")}
# The first releases with the layer that updates caches in place, and attention that is told not to be decomposed.
MINIMUM = {"tensorrt": "10.15", "rtx": "1.4"}
OPERATORS = ("Attention", "TensorScatter")
_POLYGRAPHY = "polygraphy.backend.trt"

# What TensorRT-RTX builds for unless it is told: GPUs from Ampere on. A plan for all is as large as one for one.
RTX_TARGETS = ("8.0", "8.6", "8.9", "12.0")


def least_capability(flavor: str, precision: str) -> str | None:
    """The least compute capability for a precision; None for the library's. It is documented, and RTX was asked."""
    return "8.0" if (flavor, precision) == ("rtx", "fp32") else PRECISIONS[precision].least_capability


@dataclass(frozen=True, kw_only=True)
class Flavor:
    """One of the two libraries, loaded.

    Attributes:
        name: "tensorrt" or "rtx".
        module: what was imported.
        version: of the library.
        gpu: the compute capability of the first GPU; None without one.
    """

    name: str
    module: ModuleType
    version: str
    gpu: str | None

    @property
    def label(self) -> str:
        """For people: "TensorRT-RTX 1.7.1"."""
        return f"{FLAVORS[self.name]} {self.version}"

    def supported_capabilities(self) -> list[str]:
        """The compute capabilities that it can build for here."""
        if self.name == "tensorrt":
            return [] if self.gpu is None else [self.gpu]
        names = [name[2:] for name in self.module.ComputeCapability.__members__ if name.startswith("SM")]
        return [f"{name[:-1]}.{name[-1]}" for name in names]

    def targets(self, options: EngineOptions) -> tuple[str, ...]:
        """What to build for.

        Raises:
            BuildError: naming every compute capability that is asked for and cannot be had, or on which the precision
                cannot run.
        """
        chosen = tuple(sorted(set(options.compute_capabilities), key=_order)) or self._default_targets(options)
        supported = self.supported_capabilities()
        problems = [self._unsupported(target) for target in chosen if target not in supported]
        problems += [problem for target in chosen for problem in self._too_old(target, options)]
        if problems:
            raise BuildError(problems, self._other_targets(options))
        return chosen

    def _default_targets(self, options: EngineOptions) -> tuple[str, ...]:
        if self.name == "tensorrt":
            return tuple(self.supported_capabilities())
        fitting = tuple(target for target in RTX_TARGETS if not [*self._too_old(target, options)])
        here = self.gpu in self.supported_capabilities() and self.gpu not in RTX_TARGETS
        return (self.gpu,) if here and self.gpu is not None else fitting

    def _unsupported(self, target: str) -> str:
        if self.name == "tensorrt":
            return f"{self.label} builds for the GPU it runs on, which has compute capability {self.gpu}, not {target}"
        extra = ": data-centre GPUs need TensorRT itself" if target in {"9.0", "10.0", "10.3"} else ""
        return f"{self.label} does not build for compute capability {target}{extra}"

    def _too_old(self, target: str, options: EngineOptions) -> Iterator[str]:
        """Why the precision does not run on GPUs of a compute capability."""
        for name in dict.fromkeys((options.variant, options.computes_in)):
            least = least_capability(self.name, name)
            if least is not None and _order(target) < _order(least):
                yield f"{name} needs compute capability {least} with {FLAVORS[self.name]}, found {target}"

    def _other_targets(self, options: EngineOptions) -> str:
        fitting = [c for c in self.supported_capabilities() if not [*self._too_old(c, options)]]
        numbers = ",".join(c.replace(".", "") for c in fitting)
        return f"--compute-capability {numbers}, or another precision" if fitting else "another precision"

    def check_options(self, options: EngineOptions) -> None:
        """Refuse what would be ignored.

        Raises:
            BuildError: naming every such option.
        """
        if self.name == "tensorrt":
            return
        problems = []
        if options.builder_optimization_level is not None:
            problems.append(
                f"{FLAVORS[self.name]} ignores --builder-optimization-level: it chooses kernels when it loads an engine"
            )
        if options.timing_cache is not None:
            problems.append(
                f"{FLAVORS[self.name]} ignores --timing-cache: it times nothing when it builds, and keeps the kernels "
                "that it compiles in a cache beside the engine"
            )
        if problems:
            raise BuildError(problems, "leave the option out, or --flavor tensorrt on a machine with a GPU")

    def configure(self, config: Any, options: EngineOptions, targets: Sequence[str]) -> None:
        """Set up an IBuilderConfig.

        Args:
            config: fresh from the builder.
            options: what the user said; they have been checked.
            targets: the compute capabilities to build for.
        """
        trt = self.module
        config.clear_flag(trt.BuilderFlag.TF32)  # float32 means float32: TF32 has 10 bits of fraction
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # the engine inspector shows types
        if options.workspace_bytes is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
        if self.name == "rtx":
            config.num_compute_capabilities = len(targets)
            for index, target in enumerate(targets):
                member = trt.ComputeCapability.__members__[f"SM{target.replace('.', '')}"]
                config.set_compute_capability(member, index)
            return
        if options.builder_optimization_level is not None:
            config.builder_optimization_level = options.builder_optimization_level
        if options.timing_cache is not None:
            cache = config.create_timing_cache(_content(options.timing_cache))
            if not config.set_timing_cache(cache, ignore_mismatch=False):
                raise BuildError(
                    f"{options.timing_cache} is the timing cache of another GPU or another TensorRT",
                    "another file, or none",
                )

    def keep_timings(self, config: Any, options: EngineOptions) -> None:
        """Save what was timed, together with what another build has saved meanwhile."""
        if self.name == "rtx" or options.timing_cache is None:
            return
        cache = config.get_timing_cache()
        cache.combine(config.create_timing_cache(_content(options.timing_cache)), ignore_mismatch=True)
        partial = options.timing_cache.with_name(f"{options.timing_cache.name}.{os.getpid()}.partial")
        partial.write_bytes(memoryview(cache.serialize()))
        partial.replace(options.timing_cache)


def open_flavor(name: str) -> Flavor:
    """Load a library that can build here.

    Args:
        name: "tensorrt", "rtx", or "auto" for TensorRT if it and a GPU are usable, else TensorRT-RTX.

    Raises:
        BackendUnavailable: it is not installed, is too old, or needs a GPU and there is none; it says which.
    """
    if name != "auto":
        return _open(name)
    problems = []
    for candidate in FLAVORS:
        try:
            return _open(candidate)
        except BackendUnavailable as problem:
            problems += problem.problems
    raise BackendUnavailable(
        problems, "pip install 'tfm-export[rtx]' (builds without a GPU), or 'tfm-export[trt]' for data-centre GPUs"
    )


def _open(name: str) -> Flavor:
    module_name, extra = MODULES[name]
    module = require(module_name, extra=extra)
    version, label = str(module.__version__), FLAVORS[name]
    if not hasattr(module, "IKVCacheUpdateLayer") or not hasattr(module, "IAttentionInputLayer"):
        raise BackendUnavailable(
            f"expected {label} {MINIMUM[name]} or newer, which updates caches in place, found {version}",
            f"pip install --upgrade 'tfm-export[{extra}]'",
        )
    try:
        gpu = cuda.devices()[0].compute_capability
    except BackendUnavailable as problem:
        if name == "tensorrt":
            raise BackendUnavailable(
                f"{label} {version} builds on the GPU that the engine is for: {' '.join(problem.problems)}",
                "--flavor rtx, which builds without a GPU",
            ) from problem
        gpu = None
    return Flavor(name=name, module=module, version=version, gpu=gpu)


def polygraphy(flavor: Flavor) -> ModuleType:
    """Polygraphy's TensorRT backend, on the library of a flavour: it decides for one when it is first loaded.

    Raises:
        BackendUnavailable: it is not installed, or this process uses it with the other library already.
    """
    settings: Any = require("polygraphy.config", extra=MODULES[flavor.name][1])
    if _POLYGRAPHY in sys.modules and (flavor.name == "rtx") != settings.USE_TENSORRT_RTX:
        raise BackendUnavailable(
            "this process has loaded Polygraphy for the other TensorRT library",
            "a process of its own for each flavour",
        )
    settings.USE_TENSORRT_RTX = flavor.name == "rtx"
    logger = importlib.import_module("polygraphy.logger").G_LOGGER
    logger.module_severity = logger.CRITICAL  # it would tell, among our own lines, that it has no colours
    return importlib.import_module(_POLYGRAPHY)


def _order(capability: str) -> tuple[int, int]:
    major, minor = capability.split(".")
    return int(major), int(minor)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
