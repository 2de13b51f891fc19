"""The emulated `cuda.bindings.runtime`: functions with the names, arguments and results of cuda-python's."""

# ruff: noqa: N802, N803, N815 (CUDA's names)

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from tests.emulation.machine import POISON, Event, Executable, Graph, Machine, Stream, Work


class Error(IntEnum):
    """cudaError_t, as far as it occurs here."""

    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorCudartUnloading = 4
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100
    cudaErrorIllegalAddress = 700
    cudaErrorStreamCaptureUnsupported = 900
    cudaErrorStreamCaptureInvalidated = 901


class MemcpyKind(IntEnum):
    """cudaMemcpyKind."""

    cudaMemcpyHostToHost = 0
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class CaptureMode(IntEnum):
    """cudaStreamCaptureMode."""

    cudaStreamCaptureModeGlobal = 0
    cudaStreamCaptureModeThreadLocal = 1
    cudaStreamCaptureModeRelaxed = 2


@dataclass
class PitchedPtr:
    """cudaPitchedPtr."""

    ptr: int
    pitch: int
    xsize: int
    ysize: int


@dataclass
class Extent:
    """cudaExtent."""

    width: int
    height: int
    depth: int


@dataclass
class Memcpy3DParms:
    """cudaMemcpy3DParms, without arrays and offsets."""

    __slots__ = ("dstPtr", "extent", "kind", "srcPtr")

    def __init__(self) -> None:
        self.srcPtr = self.dstPtr = PitchedPtr(0, 0, 0, 0)
        self.extent = Extent(0, 0, 0)
        self.kind = MemcpyKind.cudaMemcpyHostToHost


class Cudart:
    """The functions. Each gives a tuple: an error, and what there is to give."""

    # Versions and devices.

    def __init__(self, machine: Machine, *, driver: int = 13010, runtime: int = 13000) -> None:
        self._machine, self._driver, self._runtime = machine, driver, runtime

    def cudaDriverGetVersion(self) -> tuple[Any, ...]:
        if self._driver < 0:
            raise RuntimeError("Failed to dlopen libcuda.so.1")  # as cuda-python 12 does
        return 0, self._driver

    def cudaRuntimeGetVersion(self) -> tuple[Any, ...]:
        return 0, self._runtime

    def cudaGetDeviceCount(self) -> tuple[Any, ...]:
        if self._driver // 1000 < self._runtime // 1000:
            return Error.cudaErrorInsufficientDriver, None
        if not self._machine.gpus:
            return Error.cudaErrorNoDevice, None
        return 0, self._machine.gpus

    def cudaGetDeviceProperties(self, device: int) -> tuple[Any, ...]:
        name = f"Emulated GPU {device}".encode() + b"\0" * 8
        return 0, SimpleNamespace(name=name, major=8, minor=9, totalGlobalMem=self._machine.memory_bytes)

    def cudaSetDevice(self, device: int) -> tuple[Any, ...]:
        if not 0 <= device < self._machine.gpus:
            return (Error.cudaErrorInvalidValue,)
        self._machine.current = device
        return (0,)

    def cudaGetErrorName(self, error: int) -> tuple[Any, ...]:
        return 0, Error(error).name.encode()

    def cudaGetErrorString(self, error: int) -> tuple[Any, ...]:
        return 0, f"emulated {Error(error).name}".encode()

    def cudaGetLastError(self) -> tuple[Any, ...]:
        self._machine.last_error = 0
        return (0,)

    # Memory.

    def cudaMemGetInfo(self) -> tuple[Any, ...]:
        return 0, self._machine.free_bytes(), self._machine.memory_bytes

    def cudaMalloc(self, size: int) -> tuple[Any, ...]:
        address = self._machine.allocate(size, "device")
        return (Error.cudaErrorMemoryAllocation, None) if address is None else (0, address)

    def cudaFree(self, devPtr: int) -> tuple[Any, ...]:
        self._machine.free(devPtr, "device")
        return (0,)

    def cudaHostAlloc(self, size: int, flags: int) -> tuple[Any, ...]:
        assert flags == 0
        return 0, self._machine.allocate(size, "pinned")

    def cudaFreeHost(self, ptr: int) -> tuple[Any, ...]:
        self._machine.free(ptr, "pinned")
        return (0,)

    def cudaMemcpyAsync(self, dst: int, src: int, count: int, kind: int, stream: Any) -> tuple[Any, ...]:
        host, device = "pinned", "device"
        source, target = {
            MemcpyKind.cudaMemcpyHostToDevice: (host, device),
            MemcpyKind.cudaMemcpyDeviceToHost: (device, host),
            MemcpyKind.cudaMemcpyDeviceToDevice: (device, device),
        }[MemcpyKind(kind)]
        machine = self._machine

        def run() -> None:
            machine.find(dst, count, target)[1][:] = machine.find(src, count, source)[1]

        def poison() -> None:  # what the host would see if it did not wait
            if target == host:
                machine.find(dst, count, target)[1][:] = POISON

        touches = [(src, count, source, False), (dst, count, target, True)]
        self._stream(stream).submit(Work("a copy", run, touches, before=poison))
        return (0,)

    def cudaMemcpy3DAsync(self, p: Memcpy3DParms, stream: Any) -> tuple[Any, ...]:
        assert p.kind == MemcpyKind.cudaMemcpyDeviceToDevice
        size, target, source = p.extent, p.dstPtr, p.srcPtr

        def run() -> None:
            self._box(target, size)[:] = self._box(source, size)

        for box in (target, source):
            if size.width > box.pitch or size.height > box.ysize:
                raise self._machine.error("a copy's box is larger than what it is cut from")
        starts = np.sort(np.concatenate([self._lines(target, size), self._lines(source, size)]))
        if (np.diff(starts) < size.width).any():
            raise self._machine.error("the two parts of a copy overlap")
        touches = [(box.ptr, self._span(box, size), "device", box is target) for box in (source, target)]
        self._stream(stream).submit(Work("a copy", run, touches))
        return (0,)

    def cudaMemsetAsync(self, devPtr: int, value: int, count: int, stream: Any) -> tuple[Any, ...]:
        def run() -> None:
            self._machine.find(devPtr, count, "device")[1][:] = value

        self._stream(stream).submit(Work("a fill", run, [(devPtr, count, "device", True)]))
        return (0,)

    def cudaMemset3DAsync(self, pitchedDevPtr: PitchedPtr, value: int, extent: Extent, stream: Any) -> tuple[Any, ...]:
        if extent.width > pitchedDevPtr.pitch or extent.height > pitchedDevPtr.ysize:
            raise self._machine.error("a fill's box is larger than what it is cut from")

        def run() -> None:
            self._box(pitchedDevPtr, extent)[:] = value

        touches = [(pitchedDevPtr.ptr, self._span(pitchedDevPtr, extent), "device", True)]
        self._stream(stream).submit(Work("a fill", run, touches))
        return (0,)

    def make_cudaPitchedPtr(self, d: int, p: int, xsz: int, ysz: int) -> PitchedPtr:
        return PitchedPtr(d, p, xsz, ysz)

    def make_cudaExtent(self, w: int, h: int, d: int) -> Extent:
        return Extent(w, h, d)

    @staticmethod
    def _span(box: PitchedPtr, size: Extent) -> int:
        """Bytes from the first to the last of a box."""
        if not (size.width and size.height and size.depth):
            return 0
        return ((size.depth - 1) * box.ysize + size.height - 1) * box.pitch + size.width

    @staticmethod
    def _lines(box: PitchedPtr, size: Extent) -> list[int]:
        return [box.ptr + (k * box.ysize + j) * box.pitch for k in range(size.depth) for j in range(size.height)]

    def _box(self, box: PitchedPtr, size: Extent) -> NDArray[np.uint8]:
        """The bytes of a box as [depth, height, width]."""
        _, data = self._machine.find(box.ptr, self._span(box, size), "device")
        return as_strided(data, (size.depth, size.height, size.width), (box.pitch * box.ysize, box.pitch, 1))

    # Streams, events, graphs.

    def _stream(self, handle: Any) -> Stream:
        if not int(handle):
            raise self._machine.error("work on the default stream waits for all others")
        found: Stream = self._machine.thing(handle, Stream)
        return found

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        if flags != 1:
            raise self._machine.error("a stream must not wait for the default stream")
        return 0, Stream(self._machine).handle

    def cudaStreamSynchronize(self, stream: Any) -> tuple[Any, ...]:
        self._stream(stream).synchronize()
        return (0,)

    def cudaStreamDestroy(self, stream: Any) -> tuple[Any, ...]:
        found = self._stream(stream)
        if found.queue:
            raise self._machine.error("a stream was destroyed before its work was waited for")
        del self._machine.handles[found.handle]
        return (0,)

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        assert flags == 2  # without a time
        return 0, self._machine.register(Event())

    def cudaEventRecord(self, event: Any, stream: Any) -> tuple[Any, ...]:
        found = self._stream(stream)
        self._machine.thing(event, Event).place = (found.handle, found.put)
        return (0,)

    def cudaStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> tuple[Any, ...]:
        assert not flags
        self._stream(stream).wait_for(self._machine.thing(event, Event))
        return (0,)

    def cudaEventDestroy(self, event: Any) -> tuple[Any, ...]:
        self._machine.thing(event, Event)
        del self._machine.handles[int(event)]
        return (0,)

    def cudaStreamBeginCapture(self, stream: Any, mode: int) -> tuple[Any, ...]:
        if mode != CaptureMode.cudaStreamCaptureModeThreadLocal:
            raise self._machine.error("a capture that is not local to its thread forbids the others to allocate")
        found = self._stream(stream)
        found.captured, found.capturing = [], True
        self._machine.capture = found
        return (0,)

    def cudaStreamEndCapture(self, stream: Any) -> tuple[Any, ...]:
        found = self._stream(stream)
        work, found.captured, found.capturing = found.captured, None, False
        self._machine.capture = None
        if work is None:
            return Error.cudaErrorStreamCaptureInvalidated, None
        return 0, self._machine.register(Graph(work))

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> tuple[Any, ...]:
        assert not flags
        return 0, self._machine.register(Executable(self._machine.thing(graph, Graph).work))

    def cudaGraphDestroy(self, graph: Any) -> tuple[Any, ...]:
        self._machine.thing(graph, Graph)
        del self._machine.handles[int(graph)]
        return (0,)

    def cudaGraphLaunch(self, graphExec: Any, stream: Any) -> tuple[Any, ...]:
        self._stream(stream).launch(self._machine.thing(graphExec, Executable))
        return (0,)

    def cudaGraphExecDestroy(self, graphExec: Any) -> tuple[Any, ...]:
        found = self._machine.thing(graphExec, Executable)
        waiting = {
            id(work) for thing in self._machine.handles.values() if isinstance(thing, Stream) for _, work in thing.queue
        }
        if waiting & {id(work) for work in found.work}:
            raise self._machine.error("a graph was destroyed before its work was waited for")
        del self._machine.handles[int(graphExec)]
        return (0,)


def cudart_module(machine: Machine, **versions: int) -> ModuleType:
    """A module to be imported as `cuda.bindings.runtime`."""
    module, functions = ModuleType("cuda.bindings.runtime"), Cudart(machine, **versions)
    for name in dir(functions):
        if not name.startswith("_"):
            setattr(module, name, _locked(machine, name, getattr(functions, name)))
    for name, value in {
        "cudaError_t": Error,
        "cudaMemcpyKind": MemcpyKind,
        "cudaStreamCaptureMode": CaptureMode,
        "cudaMemcpy3DParms": Memcpy3DParms,
        "cudaStreamNonBlocking": 1,
        "cudaEventDisableTiming": 2,
        "cudaHostAllocDefault": 0,
    }.items():
        setattr(module, name, value)
    return module


def _locked(machine: Machine, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """One call at a time; a failure that was ordered comes in its place."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        with machine.lock:
            error = machine.fault(name)
            result = function(*arguments) if error is None else error
            if isinstance(result, tuple):
                machine.last_error = int(result[0]) or machine.last_error
            return result

    return call
