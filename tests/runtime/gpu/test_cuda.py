"""The calls of CUDA, on an emulated GPU; and the installed cuda-python takes them, as far as it gets without one."""

from __future__ import annotations

import ast
import importlib
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import gpu_problem
from tests.emulation import EmulationError, Machine, emulated_gpu
from tests.emulation.cudart import Cudart, Error, cudart_module
from tests.runtime.gpu.device_checks import check_boxes, check_copies, check_graphs
from tests.skips import WITHOUT_GPU, import_or_skip, skip_if
from tfm_export.errors import BackendUnavailable
from tfm_export.runtime.gpu import cuda
from tfm_export.runtime.gpu.cuda import Box, CudaError, CudaStream, Device, Gpu, OutOfDeviceMemory

ROOT = Path(__file__).parents[3]
DEVICE = Device(index=0, name="a GPU", compute_capability="8.9", memory_bytes=1 << 30)


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A machine on which nothing goes wrong unseen."""
    with emulated_gpu(Machine(memory_bytes=8 << 20)) as machine:
        yield machine


@pytest.fixture
def gpu(machine: Machine) -> Gpu:
    assert machine.gpus
    return cuda.open_gpu()


@pytest.fixture
def stream(gpu: Gpu) -> Iterator[CudaStream]:
    stream = gpu.stream()
    yield stream
    stream.close()


def test_the_gpus_are_told(machine: Machine) -> None:
    first, second = cuda.devices()
    assert first == Device(index=0, name="Emulated GPU 0", compute_capability="8.9", memory_bytes=machine.memory_bytes)
    assert (second.index, second.name) == (1, "Emulated GPU 1")
    assert (cuda.driver_version(), cuda.runtime_version()) == ("13.1", "13.0")
    assert cuda.open_gpu(1).device == second
    with pytest.raises(BackendUnavailable, match=r"no GPU 2; there are 0 \(Emulated GPU 0\), 1 \(Emulated GPU 1\)"):
        cuda.open_gpu(2)


@pytest.mark.parametrize(
    ("gpus", "versions", "message"),
    [
        (1, {"driver": 0}, r"there is no NVIDIA driver\nTry: install the driver"),
        (1, {"driver": -1}, r"there is no NVIDIA driver"),
        (0, {}, r"the NVIDIA driver found no GPU\nTry: CUDA_VISIBLE_DEVICES"),
        (1, {"driver": 12080}, r"is for CUDA 12.8, cuda-python for CUDA 13.0\n.*pip install 'cuda-python<13'"),
    ],
)
def test_why_there_is_no_gpu_is_told(gpus: int, versions: dict[str, int], message: str) -> None:
    with emulated_gpu(Machine(gpus=gpus), **versions), pytest.raises(BackendUnavailable, match=message):
        cuda.devices()


def test_a_missing_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'tfm-export\[rtx\]'"):
        cuda.devices()


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n", "535.183.01"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC 12.3", "580.65.06"),
        ("something else\n", None),
        (None, None),
    ],
)
def test_the_release_of_the_driver(tmp_path: Path, text: str | None, release: str | None) -> None:
    if text is not None:
        (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
        (tmp_path / "proc/driver/nvidia/version").write_text(text)
    assert cuda.driver_release(tmp_path) == release


def test_numbers_go_there_and_back(machine: Machine, gpu: Gpu, stream: CudaStream) -> None:
    check_copies(gpu, stream)
    assert machine.leaks() == ["a Stream"]


def test_nothing_is_there_before_it_was_waited_for(gpu: Gpu, stream: CudaStream) -> None:
    there, back, buffer = gpu.allocate_host(4), gpu.allocate_host(4), gpu.allocate(4)
    there[:], back[:] = 7, 7
    stream.to_device(buffer.address, there)
    stream.to_host(back, buffer.address)
    assert back.tolist() == [255] * 4
    stream.synchronize()
    assert back.tolist() == [7] * 4
    buffer.close()


def test_boxes_are_as_in_numpy(gpu: Gpu, stream: CudaStream) -> None:
    check_boxes(gpu, stream)


def test_pinned_memory_lives_as_long_as_an_array_shows_it(machine: Machine, gpu: Gpu) -> None:
    array = gpu.allocate_host(64)
    part = array[16:32].view(np.int64)
    del array
    part[:] = 7
    assert len(machine.live_blocks) == 1
    del part
    assert machine.leaks() == []


def test_a_graph_does_again_what_was_captured(machine: Machine, gpu: Gpu, stream: CudaStream) -> None:
    check_graphs(gpu, stream)
    assert machine.leaks() == ["a Stream"]


def test_what_becomes_free_while_a_graph_is_captured_waits(machine: Machine, gpu: Gpu, stream: CudaStream) -> None:
    buffer, pinned = gpu.allocate(8), [gpu.allocate_host(8)]

    def work() -> None:
        stream.zero(buffer.address, 8)
        pinned.clear()  # as the garbage collector might
        assert len(machine.live_blocks) == 2

    stream.capture(work).close()
    assert len(machine.live_blocks) == 1
    buffer.close()


def test_a_capture_that_fails_leaves_the_stream_in_order(machine: Machine, gpu: Gpu, stream: CudaStream) -> None:
    buffer = gpu.allocate(8)
    with pytest.raises(EmulationError, match="may not allocate memory"):
        stream.capture(lambda: buffer.close() if gpu.allocate(8) else None)
    machine.fail("cudaGraphInstantiate", (Error.cudaErrorStreamCaptureUnsupported, None))
    with pytest.raises(CudaError, match="cudaErrorStreamCaptureUnsupported"):
        stream.capture(lambda: stream.zero(buffer.address, 8))
    stream.zero(buffer.address, 8)
    stream.synchronize()
    buffer.close()
    assert machine.leaks() == ["a Stream"]


def test_too_much_memory_is_refused_and_then_less_is_given(machine: Machine, gpu: Gpu) -> None:
    held = gpu.allocate(6 << 20)
    with pytest.raises(OutOfDeviceMemory, match=r"3\.1 MB more are needed, but Emulated GPU 0 has 2\.1 MB left"):
        gpu.allocate(3 << 20)
    gpu.allocate(1 << 20).close()
    held.close()
    assert machine.leaks() == []


def test_an_error_of_the_device_is_told(machine: Machine, gpu: Gpu, stream: CudaStream) -> None:
    machine.fail("cudaStreamSynchronize", (Error.cudaErrorIllegalAddress,))
    with pytest.raises(CudaError, match=r"emulated cudaErrorIllegalAddress.*\nTry: start the process again") as error:
        stream.synchronize()
    assert error.value.code == "cudaErrorIllegalAddress"
    assert gpu.free_bytes() == machine.memory_bytes


def test_what_cannot_be_freed_is_logged(machine: Machine, gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    for error in (Error.cudaErrorIllegalAddress, Error.cudaErrorCudartUnloading):
        machine.fail("cudaFree", (error,))
        with caplog.at_level(logging.WARNING):
            gpu.allocate(8).close()
    (record,) = caplog.records  # that the process ends is no news
    assert "cudaFree: CUDA failed: emulated cudaErrorIllegalAddress" in record.getMessage()


def test_streams_that_wait_may_use_the_same_memory(gpu: Gpu, stream: CudaStream) -> None:
    second, buffer = gpu.stream(), gpu.allocate(8)
    stream.zero(buffer.address, 8)
    with pytest.raises(EmulationError, match="another stream"):
        second.zero(buffer.address, 8)
    second.wait_for(stream)
    second.zero(buffer.address, 8)
    second.synchronize()
    stream.synchronize()
    second.close()
    buffer.close()


# The installed cuda-python.


@pytest.fixture(scope="module")
def cudart() -> Any:
    return import_or_skip("cuda.bindings.runtime", "rtx")


def names_in_use() -> set[str]:
    """Every name of CUDA that the runtime uses, as attributes or as the name of a call that frees something."""
    tree = ast.parse((ROOT / "tfm_export/runtime/gpu/cuda.py").read_text(encoding="utf-8"))
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {name for name in attributes | strings if re.fullmatch(r"(make_)?cuda[A-Z]\w*", name)}


def test_every_name_that_is_used_exists(cudart: Any) -> None:
    names, holders = names_in_use(), ("cudaError_t", "cudaMemcpyKind", "cudaStreamCaptureMode")
    members = {member for holder in holders for member in dir(getattr(cudart, holder))}
    assert len(names) > 40
    assert {name for name in names if not hasattr(cudart, name)} - members == set()


def test_the_emulation_has_no_name_of_its_own(cudart: Any) -> None:
    emulated = {name for name in vars(cudart_module(Machine())) if not name.startswith("_")}
    assert {name for name in emulated if not hasattr(cudart, name)} == set()
    for mine, real in (("cudaError_t", Error), ("cudaMemcpyKind", None), ("cudaStreamCaptureMode", None)):
        for member in real or getattr(cudart_module(Machine()), mine):
            assert int(getattr(getattr(cudart, mine), member.name)) == int(member)


@pytest.mark.parametrize("name", [name for name in dir(Cudart) if not name.startswith("_")])
def test_the_emulations_functions_take_the_same(cudart: Any, name: str) -> None:
    found = re.match(rf"{name}\((.*)\)", getattr(cudart, name).__doc__ or "")
    assert found is not None
    # Such as: dst, src, size_t count, kind: cudaMemcpyKind, stream
    real = [part.split(":")[0].split()[-1].lstrip("*") for part in found[1].split(", ") if part]
    mine = getattr(Cudart, name).__code__
    assert list(mine.co_varnames[1 : mine.co_argcount]) == real


def unconnected(cudart: Any) -> tuple[Gpu, CudaStream]:
    """A GPU and a stream of the real library, without asking for them."""
    gpu, stream = object.__new__(Gpu), object.__new__(CudaStream)
    gpu._cudart, gpu.device = cudart, DEVICE
    stream.gpu, stream._cudart, stream.handle = gpu, cudart, 0
    return gpu, stream


BOX = Box(4096, 64, 4)
CALLS: dict[str, Callable[[Gpu, CudaStream], object]] = {
    "activate": lambda gpu, _: gpu.activate(),
    "free_bytes": lambda gpu, _: gpu.free_bytes(),
    "stream": lambda gpu, _: gpu.stream(),
    "to_device": lambda _, stream: stream.to_device(4096, np.zeros(8)),
    "to_host": lambda _, stream: stream.to_host(np.zeros(8), 4096),
    "copy_box": lambda _, stream: stream.copy_box(BOX, Box(8192, 64, 4), width=8, height=2, depth=2),
    "zero": lambda _, stream: stream.zero(4096, 8),
    "zero_box": lambda _, stream: stream.zero_box(BOX, width=8, height=2, depth=2),
    "wait_for": lambda _, stream: stream.wait_for(stream),
    "synchronize": lambda _, stream: stream.synchronize(),
    "capture": lambda _, stream: stream.capture(lambda: None),
    "launch": lambda _, stream: cuda.Graph(stream, stream._cudart, 0).launch(),
    "cudaMalloc": lambda gpu, _: gpu.call(gpu._cudart.cudaMalloc(8)),
    "cudaHostAlloc": lambda gpu, _: gpu.call(gpu._cudart.cudaHostAlloc(8, gpu._cudart.cudaHostAllocDefault)),
    "cudaEventRecord": lambda gpu, _: gpu.call(gpu._cudart.cudaEventRecord(gpu._cudart.cudaEvent_t(1), 0)),
    "cudaStreamWaitEvent": lambda gpu, _: gpu.call(gpu._cudart.cudaStreamWaitEvent(0, gpu._cudart.cudaEvent_t(1), 0)),
    "cudaStreamEndCapture": lambda gpu, _: gpu.call(gpu._cudart.cudaStreamEndCapture(0)),
    "cudaGraphInstantiate": lambda gpu, _: gpu.call(gpu._cudart.cudaGraphInstantiate(gpu._cudart.cudaGraph_t(1), 0)),
}


@skip_if(gpu_problem() is None, "no NVIDIA GPU", WITHOUT_GPU)
@pytest.mark.parametrize("call", CALLS)
def test_the_library_takes_every_call_and_misses_the_driver_alone(cudart: Any, call: str) -> None:
    with pytest.raises(CudaError, match=r"driver version is insufficient|no CUDA-capable device") as error:
        CALLS[call](*unconnected(cudart))
    assert error.value.code in {"cudaErrorInsufficientDriver", "cudaErrorNoDevice"}


@skip_if(gpu_problem() is None, "no NVIDIA GPU", WITHOUT_GPU)
def test_this_machine_has_no_gpu(cudart: Any) -> None:
    assert importlib.import_module("cuda.bindings.runtime") is cudart
    with pytest.raises(BackendUnavailable, match="NVIDIA driver"):
        cuda.devices()
