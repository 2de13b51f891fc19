"""TensorRT's side of the engine runtime: libraries, plans, execution contexts, and what RTX compiles at run time.

`tensorrt` and `tensorrt_rtx` have the same API. Where they differ at run time: RTX compiles kernels when a context is
made and when new shapes come, keeps them in a runtime cache, and captures CUDA graphs by itself.
"""

from __future__ import annotations

import functools
import logging
import mmap
import re
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfm_export.bundle import write_bytes
from tfm_export.errors import BackendUnavailable, BundleError
from tfm_export.extras import require
from tfm_export.graph import TensorSpec, cache_output_name
from tfm_export.runtime.gpu.compiled_graphs import CompiledGraph, GraphContext, Profile
from tfm_export.runtime.gpu.cuda import CudaStream, Device, DeviceBuffer, driver_release, driver_version

LOG = logging.getLogger(__name__)
MODULES = {"tensorrt": ("tensorrt", "trt"), "rtx": ("tensorrt_rtx", "rtx")}
_TYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT64": "int64", "BOOL": "bool"}
CACHE_FOLDER = "runtime_cache"
CAPTURES_ITSELF = "TensorRT-RTX does so by itself, once its kernels are ready"


class Library:
    """One of the two TensorRT libraries.

    Attributes:
        flavor: "tensorrt" or "rtx".
        module: what was imported.
        version: of the library.
    """

    def __init__(self, flavor: str) -> None:
        """Import it.

        Raises:
            BackendUnavailable: it is not installed.
        """
        module, extra = MODULES[flavor]
        self.flavor, self.module = flavor, require(module, extra=extra)
        self.version = str(self.module.__version__)
        self._log = _log(self.module)

    @property
    def compiles(self) -> bool:
        """Whether kernels are compiled when a plan is loaded, and later for new shapes."""
        return self.flavor == "rtx"

    def failure(self, what: str) -> BackendUnavailable:
        """The error to raise when a call of TensorRT did not do its work; with what it logged."""
        said = "; ".join(self._log.taken()) or "it gave no reason"
        return BackendUnavailable(f"TensorRT {self.version} could not {what}: {said}", "tfm-export doctor")

    def deserialize(self, path: Path) -> Any:
        """The engine of a plan file, on the GPU that is active.

        Raises:
            BackendUnavailable: TensorRT does not take it.
        """
        self._log.taken()
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
            engine = self.module.Runtime(self._log).deserialize_cuda_engine(plan)  # which keeps the runtime
        if engine is None:
            raise self.failure(f"load {path}")
        return engine


@functools.lru_cache(maxsize=2)
def _log(module: Any) -> Any:
    """The logger of a library: TensorRT has one a process, and keeps the first."""

    class Log(module.ILogger):  # type: ignore[misc]
        """Passes on what TensorRT says, and keeps a thread's errors until they are asked for."""

        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self._threads = threading.local()

        def log(self, severity: Any, message: str) -> None:
            """Called by TensorRT."""
            level = logging.DEBUG
            if int(severity) <= int(module.ILogger.ERROR):
                self._errors().append(message.strip())
            elif int(severity) == int(module.ILogger.WARNING):
                level = logging.INFO
            LOG.log(level, "%s", message)

        def taken(self) -> list[str]:
            """The last errors in this thread, which are forgotten with that."""
            errors = [*self._errors()]
            self._errors().clear()
            return errors

        def _errors(self) -> deque[str]:
            if not hasattr(self._threads, "errors"):
                self._threads.errors = deque(maxlen=4)
            errors: deque[str] = self._threads.errors
            return errors

    return Log()


class Plan(CompiledGraph):
    """A plan, loaded, of which every input and output is as the graph's table says."""

    def __init__(
        self,
        library: Library,
        path: Path,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        *,
        capacity: int | None = None,
        cache: RuntimeCacheFile | None = None,
    ) -> None:
        """Load a plan.

        Args:
            library: that it was built with.
            path: the file.
            inputs: as the graph's table says.
            outputs: as the graph's table says.
            capacity: C, which is fixed in a plan.
            cache: where RTX keeps what it compiles; None for the others.

        Raises:
            BackendUnavailable: TensorRT does not take it.
            BundleError: it is not of the expected form.
        """
        self._library, self._path, self._cache_file, self._lock = library, path, cache, threading.Lock()
        self._inputs = inputs
        self.capture_problem = CAPTURES_ITSELF if library.compiles else None
        self._config = self._cache = None
        self._engine = library.deserialize(path)
        sizes: dict[str, int] = {} if capacity is None else {"capacity": capacity}
        if problems := [*self._problems(inputs, sizes, "INPUT"), *self._problems(outputs, sizes, "OUTPUT")]:
            self.close()
            raise BundleError([f"{path}: {problem}" for problem in sorted(problems)], "build the engine again")
        profiles = [self._profile(index) for index in range(self._engine.num_optimization_profiles)]
        self.profiles = sorted(profiles, key=lambda p: (p.query, -p.index))  # the last one is for steps
        self.workspace_bytes = int(self._engine.device_memory_size_v2)
        self._config, self._cache = self._runtime_config()

    def _problems(self, specs: Sequence[TensorSpec], sizes: Mapping[str, int], mode: str) -> list[str]:
        """How the plan's inputs or outputs differ from the table."""
        engine, word = self._engine, mode.lower()
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        found = {name for name in names if str(engine.get_tensor_mode(name)).endswith(f".{mode}")}
        wanted = {spec.name: spec for spec in specs}
        problems = [f"{word} {name} is missing" for name in wanted.keys() - found]
        problems += [f"{word} {name} is not one of the expected" for name in found - wanted.keys()]
        for name in found & wanted.keys():
            shape = [sizes.get(axis, -1) if isinstance(axis, str) else axis for axis in wanted[name].axes]
            found_shape = [int(size) for size in engine.get_tensor_shape(name)]
            kind = str(engine.get_tensor_dtype(name)).rpartition(".")[2]
            kind = _TYPES.get(kind, kind)
            # TensorRT need not know a size that it could have worked out.
            same = len(shape) == len(found_shape) and all(f in {-1, s} for f, s in zip(found_shape, shape, strict=True))
            if kind != wanted[name].dtype or not same:
                problems.append(f"{word} {name} must be {wanted[name].dtype} {shape}, found {kind} {found_shape}")
            if mode == "OUTPUT" and name.endswith("_out"):
                alias = engine.get_aliased_input_tensor(name)
                if alias is None or cache_output_name(alias) != name:
                    problems.append(f"{word} {name} must be the memory of its input, found {alias}")
        return problems

    def _profile(self, index: int) -> Profile:
        def largest(name: str) -> list[int]:
            return [int(size) for size in self._engine.get_tensor_profile_shape(name, index)[2]]

        names = {self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)}
        batch, source = largest("source_mask")
        return Profile(
            index=index, batch=batch, source=source, query=largest("target_ids")[1] if "target_ids" in names else 0
        )

    def _runtime_config(self) -> tuple[Any, Any]:
        """How contexts are made: on memory that they are given; on RTX with what it compiled before."""
        trt = self._library.module
        config, cache = self._engine.create_runtime_config(), None
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if self._library.compiles:
            config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            cache = config.create_runtime_cache()
            if self._cache_file is not None:
                self._cache_file.load(cache)
            if not config.set_runtime_cache(cache):
                raise self._library.failure("use a runtime cache")
        return config, cache

    def context(self, profile: Profile, stream: CudaStream, workspace: DeviceBuffer) -> PlanContext:
        """A new context; see `CompiledGraph.context`."""
        self._library.failure("")  # forget what others said
        with self._lock:  # TensorRT's objects are not safe to use from several threads
            context = self._engine.create_execution_context(self._config)
        if context is None:
            raise self._library.failure(f"make a context of {self._path}")
        context.set_device_memory(workspace.address, workspace.nbytes)
        if not context.set_optimization_profile_async(profile.index, stream.handle):
            raise self._library.failure(f"select profile {profile.index} of {self._path}")
        stream.synchronize()
        return PlanContext(self._library, context, self._inputs, f"{self._path}, profile {profile.index}")

    def save_cache(self) -> None:
        """Keep what RTX has compiled so far, for the next process."""
        if self._cache is not None and self._cache_file is not None:
            self._cache_file.save(self._cache)

    def close(self) -> None:
        """Free it, once its contexts are closed."""
        self._config = self._cache = self._engine = None


class PlanContext(GraphContext):
    """An execution context of a plan. Not to be used by two threads at once."""

    def __init__(self, library: Library, context: Any, inputs: Sequence[TensorSpec], name: str) -> None:
        self._library, self._context, self._inputs, self._name = library, context, inputs, name
        self._bound: object = None

    def bind(self, key: object, sizes: Mapping[str, int], addresses: Mapping[str, int]) -> None:
        """Set shapes and addresses, unless they are set already; see `GraphContext.bind`."""
        if key == self._bound:
            return
        self._bound = None
        for spec in self._inputs:
            shape = spec.shape(sizes)
            if not self._context.set_input_shape(spec.name, shape):
                raise self._library.failure(f"take {spec.name} {list(shape)} in {self._name}")
        for name, address in addresses.items():
            if not self._context.set_tensor_address(name, address):
                raise self._library.failure(f"take the address of {name} in {self._name}")
        self._bound = key

    def enqueue(self, stream: CudaStream) -> None:
        """Put its work on the stream."""
        if not self._context.execute_async_v3(stream.handle):
            raise self._library.failure(f"run {self._name}")

    def close(self) -> None:
        """Free it; its work must have been waited for."""
        self._context = None


class RuntimeCacheFile:
    """Where what RTX compiled from one plan for one kind of GPU and driver is kept. No result depends on it.

    Args:
        plan: the plan's file.
        device: the GPU.
        version: of TensorRT-RTX.
    """

    def __init__(self, plan: Path, device: Device, version: str) -> None:
        words = f"{device.name} {device.compute_capability} driver {driver_release() or driver_version()} rtx {version}"
        name = re.sub(r"[^a-z0-9._]+", "-", f"{plan.stem} {words}".lower())
        self.path = plan.parent / CACHE_FOLDER / f"{name}.bin"
        self._known = b""

    def load(self, cache: Any) -> None:
        """Fill a cache with what is in the file."""
        try:
            content = self.path.read_bytes()
        except OSError:
            return  # there is none yet
        if cache.deserialize(content):
            self._known = content
        else:
            LOG.info("TensorRT-RTX does not take %s: it will be written anew", self.path)

    def save(self, cache: Any) -> None:
        """Write what a cache holds, if it is new and this user may write there."""
        content = bytes(memoryview(cache.serialize()))
        if content == self._known:
            return
        try:
            self.path.parent.mkdir(exist_ok=True)
            write_bytes(self.path, content)
        except OSError as problem:
            LOG.info("what TensorRT-RTX compiled is not kept for the next start: %s", problem)
        self._known = content
