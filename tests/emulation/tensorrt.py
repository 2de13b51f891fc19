"""The emulated `tensorrt` and `tensorrt_rtx`: an execution is ONNX Runtime on the memory of the emulated device.

A plan is a zip archive of an ONNX graph in float32 and of what TensorRT would know of it (`PlanFacts`). Where the
engine has another float type, numbers are rounded to it whenever they pass from or to the device.
"""

from __future__ import annotations

import io
import json
import weakref
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum, IntEnum
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from tests.emulation.machine import Machine, Stream, Work

Array = NDArray[Any]
VERSIONS = {"tensorrt": "11.1.0.1", "rtx": "1.7.1.1"}
WORKSPACE = 4096
CACHE_MAGIC = b"emulated runtime cache\n"


@dataclass(frozen=True, kw_only=True)
class PlanFacts:
    """What a plan says beside its graph.

    Attributes:
        flavor: of the library that it is for.
        inputs: dtype and shape of each; -1 where it varies.
        outputs: likewise.
        profiles: the smallest, usual and largest shape of each input, for each profile.
        aliases: the input whose memory an output has, by output.
        head_size: D of the graph; that of the plan may be larger.
    """

    flavor: str
    inputs: dict[str, tuple[str, list[int]]]
    outputs: dict[str, tuple[str, list[int]]]
    profiles: list[dict[str, list[list[int]]]]
    aliases: dict[str, str]
    head_size: int

    def to_plan(self, graph: bytes) -> bytes:
        """The contents of a plan file."""
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            archive.writestr("facts.json", json.dumps(asdict(self)))
            archive.writestr("graph.onnx", graph)
        return content.getvalue()


class DataType(Enum):
    """Of tensors."""

    FLOAT = "float32"
    HALF = "float16"
    BF16 = "bfloat16"
    INT64 = "int64"
    BOOL = "bool"


class TensorIOMode(Enum):
    """Input or output."""

    NONE = 0
    INPUT = 1
    OUTPUT = 2


class ExecutionContextAllocationStrategy(IntEnum):
    """Whose memory a context works on."""

    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class CudaGraphStrategy(IntEnum):
    """Whether RTX captures graphs."""

    DISABLED = 0
    WHOLE_GRAPH_CAPTURE = 1


class Severity(IntEnum):
    """Of what is logged."""

    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class ILogger:
    """What a logger derives from."""

    Severity = Severity
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = Severity

    def log(self, severity: Severity, msg: str) -> None:
        """To be overridden."""
        raise NotImplementedError


def item_bytes(dtype: str) -> int:
    """Of a number."""
    return {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "bool": 1}[dtype]


def decoded(data: NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> Array:
    """An array that lies on the device, in float32 if it is of any float type."""
    if dtype == "bfloat16":
        bits = data.view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(shape)
    array = data.view(dtype).reshape(shape)
    return array.astype(np.float32) if dtype == "float16" else array


def encoded(array: Array, dtype: str) -> NDArray[np.uint8]:
    """The bytes of an array as it lies on the device; rounded to nearest, ties to even."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        array = np.where(np.isnan(array), 0x7FC0, rounded).astype(np.uint16)
    else:
        array = array.astype(dtype)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class Engine:
    """ICudaEngine."""

    def __init__(self, machine: Machine, facts: PlanFacts, graph: bytes, log: ILogger) -> None:
        self._machine, self._facts, self._log = machine, facts, log
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        self._session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self._device = machine.current
        handle = machine.register("an engine")
        weakref.finalize(self, machine.handles.pop, handle).atexit = False

    @property
    def num_io_tensors(self) -> int:
        return len(self._tensors)

    @property
    def _tensors(self) -> dict[str, tuple[str, list[int]]]:
        return {**self._facts.inputs, **self._facts.outputs}

    def get_tensor_name(self, index: int) -> str:
        return [*self._tensors][index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self._facts.inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType(self._tensors[name][0])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name][1])

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._facts.profiles)

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        return [tuple(shape) for shape in self._facts.profiles[profile_index][name]]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self._facts.aliases.get(name)

    @property
    def device_memory_size_v2(self) -> int:
        return WORKSPACE

    def create_runtime_config(self) -> RuntimeConfig:
        return (RtxRuntimeConfig if self._facts.flavor == "rtx" else RuntimeConfig)()

    def create_execution_context(self, runtime_config: RuntimeConfig) -> Context | None:
        with self._machine.lock:
            if self._machine.fault("create_execution_context") is not None:
                self._log.log(Severity.ERROR, "emulated: no context")
                return None
            if self._machine.current != self._device:
                raise self._machine.error("a context was made on another GPU than its engine's")
            return Context(self, runtime_config)


class RuntimeConfig:
    """IRuntimeConfig of `tensorrt`."""

    __slots__ = ("_strategy",)

    def __init__(self) -> None:
        self._strategy = ExecutionContextAllocationStrategy.STATIC

    def set_execution_context_allocation_strategy(self, strategy: ExecutionContextAllocationStrategy) -> None:
        self._strategy = strategy


class RtxRuntimeConfig(RuntimeConfig):
    """IRuntimeConfig of `tensorrt_rtx`, which knows more."""

    __slots__ = ("_cache", "cuda_graph_strategy")

    def __init__(self) -> None:
        super().__init__()
        self.cuda_graph_strategy = CudaGraphStrategy.DISABLED
        self._cache: RuntimeCache | None = None

    def create_runtime_cache(self) -> RuntimeCache:
        return RuntimeCache()

    def set_runtime_cache(self, cache: RuntimeCache) -> bool:
        self._cache = cache
        return True


class RuntimeCache:
    """IRuntimeCache: here the names of the profiles that contexts were made for."""

    def __init__(self) -> None:
        self._compiled: list[str] = []

    def serialize(self) -> bytes:
        return CACHE_MAGIC + "\n".join(self._compiled).encode()

    def deserialize(self, blob: Any) -> bool:
        content = bytes(blob)
        if not content.startswith(CACHE_MAGIC):
            return False
        self._compiled = content.removeprefix(CACHE_MAGIC).decode().split()
        return True


class Context:
    """IExecutionContext."""

    def __init__(self, engine: Engine, config: RuntimeConfig) -> None:
        self._engine, self._machine, self._facts = engine, engine._machine, engine._facts
        self._config, self._profile = config, 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._workspace = (0, 0)
        self._changed = True  # shapes that no run has come to terms with
        handle = self._machine.register("a context")
        weakref.finalize(self, self._machine.handles.pop, handle).atexit = False
        if isinstance(config, RtxRuntimeConfig) and config._cache is not None:
            config._cache._compiled.append(f"context-{len(config._cache._compiled)}")

    def set_device_memory(self, memory: int, size: int) -> None:
        if self._config._strategy is not ExecutionContextAllocationStrategy.USER_MANAGED:
            raise self._machine.error("a context that has memory of its own was given some")
        if size < self._engine.device_memory_size_v2 or memory % 256:
            raise self._machine.error(f"{size} bytes at {memory:#x} are no memory for a context")
        self._workspace = (memory, size)

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        with self._machine.lock:
            self._machine.thing(stream_handle, Stream)
            self._profile, self._changed = profile_index, True
            self._shapes.clear()
            return 0 <= profile_index < len(self._facts.profiles)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        if self._machine.fault("set_input_shape") is not None:
            return self._refuse("emulated: a bad shape")
        if name not in self._facts.inputs:
            raise self._machine.error(f"{name} is no input")
        smallest, _, largest = self._facts.profiles[self._profile][name]
        if len(shape) != len(smallest) or not all(
            a <= b <= c for a, b, c in zip(smallest, shape, largest, strict=True)
        ):
            raise self._machine.error(f"{name} {list(shape)} is not in profile {self._profile}: {smallest}-{largest}")
        if self._shapes.get(name) != shape:
            self._shapes[name], self._changed = shape, True
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if self._machine.fault("set_tensor_address") is not None:
            return self._refuse("emulated: a bad address")
        if name not in self._engine._tensors:
            raise self._machine.error(f"{name} is no tensor")
        if not memory or memory % 256:
            raise self._machine.error(f"the address {memory:#x} of {name} is not a multiple of 256")
        self._addresses[name] = memory
        return True

    def _refuse(self, message: str) -> bool:
        self._engine._log.log(Severity.ERROR, message)
        return False

    def _state(self) -> tuple[Any, ...]:
        return self._profile, dict(self._shapes), dict(self._addresses), self._workspace

    def execute_async_v3(self, stream_handle: int) -> bool:
        machine = self._machine
        with machine.lock:
            if machine.fault("execute_async_v3") is not None:
                return self._refuse("emulated: it does not run")
            if machine.last_error:
                raise machine.error(f"TensorRT would take an earlier call's error {machine.last_error} for its own")
            stream = machine.thing(stream_handle, Stream)
            if stream.device != self._engine._device:
                raise machine.error("an engine was run on another GPU than its own")
            self._check_set()
            if stream.capturing:
                self._check_capturable()
            run = Run(self._engine, dict(self._shapes), dict(self._addresses))
            state, this = self._state(), weakref.ref(self)

            def unchanged() -> None:
                context = this()
                if context is None or context._state() != state:
                    raise machine.error("a graph was launched after its context was changed or freed")

            touches = [*run.touches(), (*self._workspace, "device", True)]
            stream.submit(Work("an execution", run, touches, before=unchanged))
            if not stream.capturing:
                self._changed = False
            return True

    def _check_set(self) -> None:
        machine = self._machine
        if missing := [name for name in self._facts.inputs if name not in self._shapes]:
            raise machine.error(f"the shapes of {missing} are not set")
        if missing := [name for name in self._engine._tensors if name not in self._addresses]:
            raise machine.error(f"the addresses of {missing} are not set")
        if not self._workspace[0]:
            raise machine.error("a context that is to work on given memory was given none")
        for output, source in self._facts.aliases.items():
            if self._addresses[output] != self._addresses[source]:
                raise machine.error(f"{output} must have the address of {source}: it is updated in place")

    def _check_capturable(self) -> None:
        if self._facts.flavor == "rtx":
            raise self._machine.error("TensorRT-RTX allocates while it runs: it cannot be captured from outside")
        if self._changed:
            raise self._machine.error("a context must run once with new shapes before it is captured")


class Run:
    """An execution with shapes and addresses as they were when it was put on the stream."""

    def __init__(self, engine: Engine, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        self._engine, self._shapes, self._addresses = engine, shapes, addresses
        self._machine, self._facts = engine._machine, engine._facts
        sizes = {"query": 0, **self._axes(shapes)}
        self._output_shapes = {
            name: tuple(sizes.get(axis, axis) if isinstance(axis, str) else axis for axis in self._named(name))
            for name in self._facts.outputs
        }
        self._check_axes()

    def _axes(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
        first = next(iter(shapes.values()))
        axes = {"batch": first[0], "source": shapes["source_mask"][1]}
        if "target_ids" in shapes:
            axes |= {"query": first[1], "capacity": shapes["self_mask"][3]}
        return axes

    def _named(self, name: str) -> list[Any]:
        """The axes of an output: its shape with names for what varies."""
        shape = self._facts.outputs[name][1]
        variable = iter(["batch", "source" if name.startswith("cross") else "query"])
        return [next(variable) if size == -1 else size for size in shape]

    def _check_axes(self) -> None:
        """Inputs that share an axis must agree on it."""
        axes = self._axes(self._shapes)
        for name, shape in self._shapes.items():
            if shape[0] != axes["batch"]:
                raise self._machine.error(f"{name} has {shape[0]} rows, others have {axes['batch']}")
            if name.startswith("cross") and shape[2] != axes["source"]:
                raise self._machine.error(f"{name} has {shape[2]} source tokens, the mask {axes['source']}")
            if name == "self_mask" and shape[2] != axes["query"]:
                raise self._machine.error(f"self_mask has {shape[2]} queries, others have {axes['query']}")

    def touches(self) -> list[tuple[int, int, str, bool]]:
        """Everything it reads and writes."""
        read = [(*self._place(name, shape), "device", False) for name, shape in self._shapes.items()]
        return read + [(*self._place(name, shape), "device", True) for name, shape in self._output_shapes.items()]

    def _place(self, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
        return self._addresses[name], int(np.prod(shape)) * item_bytes(self._engine._tensors[name][0])

    def __call__(self) -> None:
        feeds = {name: self._read(name, shape) for name, shape in self._shapes.items()}
        self._check_values(feeds)
        names = list(self._facts.outputs)
        try:
            arrays = self._engine._session.run(names, feeds)
        except Exception as problem:
            raise self._machine.error(f"an execution failed: {problem}") from problem
        for name, array in zip(names, arrays, strict=True):
            self._write(name, array)

    def _read(self, name: str, shape: tuple[int, ...]) -> Array:
        _, data = self._machine.find(*self._place(name, shape), "device")
        array = decoded(data, self._engine._tensors[name][0], shape)
        return array[..., : self._facts.head_size] if len(shape) == 4 and name != "self_mask" else array

    def _write(self, name: str, array: Array) -> None:
        dtype, shape = self._engine._tensors[name][0], self._output_shapes[name]
        if array.shape != shape:  # D is padded
            array = np.pad(array, [(0, wanted - found) for wanted, found in zip(shape, array.shape, strict=True)])
        _, data = self._machine.find(*self._place(name, shape), "device")
        data[:] = encoded(array, dtype)

    def _check_values(self, feeds: dict[str, Array]) -> None:
        """What no kernel checks."""
        machine = self._machine
        for name, array in feeds.items():
            if array.dtype == np.bool_:
                if not np.isin(array.view(np.uint8), (0, 1)).all():
                    raise machine.error(f"{name} is not set")
                if not array.any(-1).all():
                    raise machine.error(f"{name} has a row that sees nothing")
            elif array.dtype == np.int64 and (array < 0).any():
                raise machine.error(f"{name} is not set")
            elif array.dtype == np.float32 and not np.isfinite(array).all():
                raise machine.error(f"{name} has numbers that are not finite: it was not zeroed")
        if "write_index" in feeds:
            query, capacity = feeds["self_mask"].shape[2:]
            if (feeds["write_index"] + query > capacity).any():
                raise machine.error("a step writes past the capacity")


class Runtime:
    """Runtime."""

    def __init__(self, machine: Machine, flavor: str, logger: ILogger) -> None:
        self._machine, self._flavor, self._log = machine, flavor, logger

    def deserialize_cuda_engine(self, serialized_engine: Any) -> Engine | None:
        with self._machine.lock:
            if self._machine.fault("deserialize_cuda_engine") is not None:
                self._log.log(Severity.ERROR, "emulated: no engine")
                return None
            try:
                with zipfile.ZipFile(io.BytesIO(bytes(serialized_engine))) as archive:
                    facts = PlanFacts(**json.loads(archive.read("facts.json")))
                    graph = archive.read("graph.onnx")
            except (zipfile.BadZipFile, KeyError):
                self._log.log(Severity.ERROR, "emulated: this is no plan")
                return None
            if facts.flavor != self._flavor:
                self._log.log(Severity.ERROR, f"emulated: a plan for {facts.flavor}")
                return None
            return Engine(self._machine, facts, graph, self._log)


def tensorrt_module(machine: Machine, flavor: str) -> ModuleType:
    """A module to be imported as `tensorrt` or `tensorrt_rtx`."""
    module = ModuleType({"tensorrt": "tensorrt", "rtx": "tensorrt_rtx"}[flavor])
    make: Callable[[ILogger], Runtime] = lambda logger: Runtime(machine, flavor, logger)  # noqa: E731
    contents: dict[str, Any] = {
        "__version__": VERSIONS[flavor],
        "ILogger": ILogger,
        "Runtime": make,
        "DataType": DataType,
        "TensorIOMode": TensorIOMode,
        "ExecutionContextAllocationStrategy": ExecutionContextAllocationStrategy,
    }
    if flavor == "rtx":
        contents["CudaGraphStrategy"] = CudaGraphStrategy
    for name, value in contents.items():
        setattr(module, name, value)
    return module
