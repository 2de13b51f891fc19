"""The calls of CUDA that the runtimes make, through cuda-python; nothing here knows of TensorRT.

`open_gpu` gives a `Gpu`; what it hands out (device memory, pinned memory, streams, graphs) is freed by `close`, except
pinned memory, which lives as long as an array that shows it. All work is asynchronous and in the order of its stream.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfm_export.errors import BackendUnavailable, RequestError
from tfm_export.extras import require

ALIGNMENT = 256  # of device memory as CUDA gives it, and as TensorRT wants every tensor
LOG = logging.getLogger(__name__)
ANOTHER_BACKEND = 'backend="onnxruntime"; tfm-export doctor tells what can run here'


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU.

    Attributes:
        index: its number among those that this process may use.
        name: as NVIDIA calls it.
        compute_capability: such as "8.9".
        memory_bytes: all of it, whoever uses it.
    """

    index: int
    name: str
    compute_capability: str
    memory_bytes: int


class CudaError(BackendUnavailable):
    """A call of CUDA failed.

    Attributes:
        code: CUDA's name for the error, such as "cudaErrorIllegalAddress".
    """

    def __init__(self, code: str, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.code = code


class OutOfDeviceMemory(RequestError):
    """The GPU has not as much memory left as was asked for."""


def devices() -> list[Device]:
    """The GPUs that this process may use; at least one.

    Raises:
        BackendUnavailable: cuda-python is not installed, or there is no driver, too old a driver or no GPU.
    """
    cudart = _cudart()
    _check_driver(cudart)
    return [_device(cudart, index) for index in range(_value(cudart, cudart.cudaGetDeviceCount()))]


def driver_version() -> str:
    """The newest CUDA version that the driver knows, such as "13.0".

    Raises:
        BackendUnavailable: cuda-python is not installed, or there is no driver.
    """
    return version_text(_driver(_cudart()))


def runtime_version() -> str:
    """The CUDA version of cuda-python, such as "13.0".

    Raises:
        BackendUnavailable: cuda-python is not installed.
    """
    cudart = _cudart()
    return version_text(_value(cudart, cudart.cudaRuntimeGetVersion()))


def driver_release(root: Path = Path("/")) -> str | None:
    """The release of the driver itself, such as "580.65.06"; None where the kernel does not tell.

    Args:
        root: where /proc is looked for.
    """
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    found = re.search(r"\s(\d+\.\d+(\.\d+)*)\s", text)
    return found and found[1]


def find_device(index: int) -> Device:
    """One of the GPUs that this process may use; nothing is put on it.

    Args:
        index: its number among them.

    Raises:
        BackendUnavailable: see `devices`; or there are not so many.
    """
    found = devices()
    if 0 <= index < len(found):
        return found[index]
    names = ", ".join(f"{device.index} ({device.name})" for device in found)
    raise BackendUnavailable(f"there is no GPU {index}; there are {names}", "another device, or CUDA_VISIBLE_DEVICES")


def open_gpu(index: int = 0) -> Gpu:
    """A GPU to work with.

    Args:
        index: its number among those that this process may use.

    Raises:
        BackendUnavailable: see `find_device`.
    """
    return Gpu(_cudart(), find_device(index))


def _cudart() -> Any:
    return require("cuda.bindings.runtime", extra="rtx")


def _driver(cudart: Any) -> int:
    """The driver's CUDA version as CUDA writes it."""
    try:
        version = int(_value(cudart, cudart.cudaDriverGetVersion()))
    except RuntimeError:  # from cuda-python 12, which loads the driver itself
        version = 0
    if version:
        return version
    raise BackendUnavailable("there is no NVIDIA driver", f"install the driver of the GPU, or {ANOTHER_BACKEND}")


def _check_driver(cudart: Any) -> None:
    driver, runtime = _driver(cudart), int(_value(cudart, cudart.cudaRuntimeGetVersion()))
    error, count = cudart.cudaGetDeviceCount()
    if int(error) == int(cudart.cudaError_t.cudaErrorInsufficientDriver):
        raise BackendUnavailable(
            f"the NVIDIA driver is for CUDA {version_text(driver)}, cuda-python for CUDA {version_text(runtime)}",
            f"update the driver, or pip install 'cuda-python<{runtime // 1000}'",
        )
    if int(error) == int(cudart.cudaError_t.cudaErrorNoDevice) or (not int(error) and not count):
        raise BackendUnavailable(
            "the NVIDIA driver found no GPU", f"CUDA_VISIBLE_DEVICES, which may hide it, or {ANOTHER_BACKEND}"
        )
    _value(cudart, (error,))


def _device(cudart: Any, index: int) -> Device:
    properties = _value(cudart, cudart.cudaGetDeviceProperties(index))
    return Device(
        index=index,
        name=properties.name.split(b"\0")[0].decode(errors="replace"),
        compute_capability=f"{properties.major}.{properties.minor}",
        memory_bytes=int(properties.totalGlobalMem),
    )


def version_text(number: int) -> str:
    """13040 is 13.4."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _value(cudart: Any, result: tuple[Any, ...]) -> Any:
    """What a call gave, or its error."""
    error, *values = result
    if int(error):
        raise _error(cudart, error)
    return values[0] if values else None


def _error(cudart: Any, error: Any) -> CudaError:
    cudart.cudaGetLastError()  # or whoever asks next, such as TensorRT, takes it for its own
    _, name = cudart.cudaGetErrorName(error)
    _, text = cudart.cudaGetErrorString(error)
    code = name.decode()
    # An error of the device stays with the process: every later call fails with it, too.
    return CudaError(code, f"CUDA failed: {text.decode()} ({code})", "start the process again; tfm-export doctor")


_capturing = threading.local()


def when_not_capturing(free: Callable[[], None]) -> None:
    """Free something now, or once this thread has captured its graph.

    Meanwhile it may not free anything, and the garbage collector, which does not know that, may come at any time.
    """
    waiting: list[Callable[[], None]] | None = getattr(_capturing, "waiting", None)
    if waiting is None:
        free()
    else:
        waiting.append(free)


class Gpu:
    """A GPU to work with. Safe to use from several threads.

    Attributes:
        device: which one it is.
    """

    def __init__(self, cudart: Any, device: Device) -> None:
        self._cudart, self.device = cudart, device
        self.activate()

    def activate(self) -> None:
        """Make this the GPU that the calling thread's next calls go to."""
        self.call(self._cudart.cudaSetDevice(self.device.index))

    def call(self, result: tuple[Any, ...]) -> Any:
        """What a call of CUDA gave.

        Raises:
            CudaError: it failed.
        """
        return _value(self._cudart, result)

    def free_bytes(self) -> int:
        """Memory that nobody uses."""
        self.activate()
        error, free, _ = self._cudart.cudaMemGetInfo()
        self.call((error,))
        return int(free)

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """Device memory with whatever was in it; its address is a multiple of 256.

        Raises:
            OutOfDeviceMemory: there is not so much.
        """
        self.activate()
        error, address = self._cudart.cudaMalloc(nbytes)
        if int(error) == int(self._cudart.cudaError_t.cudaErrorMemoryAllocation):
            self._cudart.cudaGetLastError()  # see `_error`
            left = self.free_bytes()
            raise OutOfDeviceMemory(
                f"{nbytes / 1e6:,.1f} MB more are needed, but {self.device.name} has {left / 1e6:,.1f} MB left",
                "a smaller max_batch_size, or end what else uses the GPU",
            )
        self.call((error,))
        return DeviceBuffer(self, int(address), nbytes)

    def allocate_host(self, nbytes: int) -> NDArray[np.uint8]:
        """Pinned host memory: what the GPU copies from and to without the CPU's help.

        Returns:
            [nbytes]. The memory is freed when the last array that shows it is gone.
        """
        self.activate()
        address = int(self.call(self._cudart.cudaHostAlloc(nbytes, self._cudart.cudaHostAllocDefault)))
        block = (ctypes.c_uint8 * nbytes).from_address(address)
        weakref.finalize(block, self.release, "cudaFreeHost", address)
        return np.ctypeslib.as_array(block)  # refers to the block

    def release(self, function: str, handle: Any) -> None:
        """Give something back. A device that failed cannot take it, which is logged: an error would hide the first one.

        Args:
            function: the call that takes it, such as "cudaFree".
            handle: what it takes.
        """
        when_not_capturing(functools.partial(self._release, function, handle))

    def _release(self, function: str, handle: Any) -> None:
        (error,) = getattr(self._cudart, function)(handle)
        if int(error) not in {0, int(self._cudart.cudaError_t.cudaErrorCudartUnloading)}:
            LOG.warning("%s: %s", function, _error(self._cudart, error))

    def stream(self) -> CudaStream:
        """A new stream."""
        self.activate()
        return CudaStream(self, self._cudart)


class DeviceBuffer:
    """A piece of device memory.

    Attributes:
        address: of its first byte.
        nbytes: its size.
    """

    def __init__(self, gpu: Gpu, address: int, nbytes: int) -> None:
        self._gpu, self.address, self.nbytes = gpu, address, nbytes

    def close(self) -> None:
        """Free it. What still uses it must have been waited for."""
        address, self.address = self.address, 0
        if address:
            self._gpu.release("cudaFree", address)


@dataclass(frozen=True)
class Box:
    """A part of device memory that is read as [slices, lines, line_bytes]: the same place in each of many tensors.

    Attributes:
        address: of its first byte.
        line_bytes: of a whole line.
        lines: of a whole slice.
    """

    address: int
    line_bytes: int
    lines: int


class CudaStream:
    """Work in a row. Not to be used by two threads at once.

    Attributes:
        gpu: whose it is.
        handle: CUDA's number for it.
    """

    def __init__(self, gpu: Gpu, cudart: Any) -> None:
        self.gpu, self._cudart = gpu, cudart
        self.handle = int(gpu.call(cudart.cudaStreamCreateWithFlags(cudart.cudaStreamNonBlocking)))

    def to_device(self, address: int, array: NDArray[Any]) -> None:
        """Copy pinned memory to the device; it must not change before `synchronize`."""
        kind = self._cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._copy(address, array.ctypes.data, array.nbytes, kind)

    def to_host(self, array: NDArray[Any], address: int) -> None:
        """Copy from the device to pinned memory; it is there after `synchronize`."""
        kind = self._cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._copy(array.ctypes.data, address, array.nbytes, kind)

    def _copy(self, target: int, source: int, nbytes: int, kind: Any) -> None:
        self.gpu.call(self._cudart.cudaMemcpyAsync(target, source, nbytes, kind, self.handle))

    def copy_box(self, target: Box, source: Box, *, width: int, height: int, depth: int) -> None:
        """Copy `width` bytes of the first `height` lines of the first `depth` slices; the two must not overlap."""
        cudart = self._cudart
        copy = cudart.cudaMemcpy3DParms()
        copy.dstPtr, copy.srcPtr = self._pitched(target, width), self._pitched(source, width)
        copy.extent = cudart.make_cudaExtent(width, height, depth)
        copy.kind = cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self.gpu.call(cudart.cudaMemcpy3DAsync(copy, self.handle))

    def zero(self, address: int, nbytes: int) -> None:
        """Set device memory to zero."""
        self.gpu.call(self._cudart.cudaMemsetAsync(address, 0, nbytes, self.handle))

    def zero_box(self, target: Box, *, width: int, height: int, depth: int) -> None:
        """Set `width` bytes of the first `height` lines of the first `depth` slices to zero."""
        extent = self._cudart.make_cudaExtent(width, height, depth)
        self.gpu.call(self._cudart.cudaMemset3DAsync(self._pitched(target, width), 0, extent, self.handle))

    def _pitched(self, box: Box, width: int) -> Any:
        return self._cudart.make_cudaPitchedPtr(box.address, box.line_bytes, width, box.lines)

    def wait_for(self, other: CudaStream) -> None:
        """Let what comes next here begin after what the other stream has to do now."""
        cudart = self._cudart
        event = self.gpu.call(cudart.cudaEventCreateWithFlags(cudart.cudaEventDisableTiming))
        try:
            self.gpu.call(cudart.cudaEventRecord(event, other.handle))
            self.gpu.call(cudart.cudaStreamWaitEvent(self.handle, event, 0))
        finally:
            self.gpu.release("cudaEventDestroy", event)

    def synchronize(self) -> None:
        """Wait until everything is done.

        Raises:
            CudaError: something of it failed.
        """
        self.gpu.call(self._cudart.cudaStreamSynchronize(self.handle))

    def capture(self, work: Callable[[], None]) -> Graph:
        """What a function puts on this stream, as a graph; none of it runs now.

        Args:
            work: it must neither allocate nor free nor wait.

        Raises:
            CudaError: some of it cannot be part of a graph.
        """
        cudart = self._cudart
        # In the mode "thread local" other threads may allocate meanwhile.
        mode = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        with _frees_waiting():
            self.gpu.call(cudart.cudaStreamBeginCapture(self.handle, mode))
            try:
                work()
            except BaseException:
                error, graph = cudart.cudaStreamEndCapture(self.handle)
                if not int(error) and graph:
                    self.gpu.release("cudaGraphDestroy", graph)
                raise
            graph = self.gpu.call(cudart.cudaStreamEndCapture(self.handle))
        try:
            return Graph(self, cudart, self.gpu.call(cudart.cudaGraphInstantiate(graph, 0)))
        finally:
            self.gpu.release("cudaGraphDestroy", graph)

    def close(self) -> None:
        """Give it back; what it has to do must have been waited for."""
        handle, self.handle = self.handle, 0
        if handle:
            self.gpu.release("cudaStreamDestroy", handle)


class Graph:
    """Captured work that is launched with one call, at the addresses and with the shapes that it was captured with."""

    def __init__(self, stream: CudaStream, cudart: Any, executable: Any) -> None:
        self._stream, self._cudart, self._executable = stream, cudart, executable

    def launch(self) -> None:
        """Put it all on the stream that it was captured from."""
        self._stream.gpu.call(self._cudart.cudaGraphLaunch(self._executable, self._stream.handle))

    def close(self) -> None:
        """Free it; it must have been waited for."""
        executable, self._executable = self._executable, None
        if executable is not None:
            self._stream.gpu.release("cudaGraphExecDestroy", executable)


@contextmanager
def _frees_waiting() -> Iterator[None]:
    """Put off what this thread would free; see `when_not_capturing`."""
    waiting: list[Callable[[], None]] = []
    _capturing.waiting = waiting
    try:
        yield
    finally:
        _capturing.waiting = None
        for free in waiting:
            free()
