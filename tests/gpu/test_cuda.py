"""The calls of CUDA on a real GPU, by themselves: they need a driver and cuda-python, and no TensorRT."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.runtime.gpu.device_checks import BLOCKS, check_block, check_boxes, check_copies, check_graphs
from tests.skips import import_or_skip
from tfm_export.runtime.gpu import cuda
from tfm_export.runtime.gpu.cuda import CudaStream, Gpu, OutOfDeviceMemory
from tfm_export.runtime.gpu.device_memory import RowShape

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu() -> Gpu:
    import_or_skip("cuda.bindings.runtime", "rtx")
    return cuda.open_gpu()


@pytest.fixture
def stream(gpu: Gpu) -> Iterator[CudaStream]:
    stream = gpu.stream()
    yield stream
    stream.close()


def test_the_gpus_are_told(gpu: Gpu) -> None:
    (first, *_) = cuda.devices()
    assert gpu.device == first
    assert 1 << 28 < gpu.free_bytes() <= first.memory_bytes
    assert int(cuda.driver_version().split(".")[0]) >= int(cuda.runtime_version().split(".")[0])


def test_copies(gpu: Gpu, stream: CudaStream) -> None:
    check_copies(gpu, stream)


def test_boxes(gpu: Gpu, stream: CudaStream) -> None:
    check_boxes(gpu, stream)


@pytest.mark.parametrize(("shape", "rows", "length"), BLOCKS)
def test_blocks(stream: CudaStream, shape: RowShape, rows: int, length: int) -> None:
    check_block(stream, shape, rows, length)


def test_graphs(gpu: Gpu, stream: CudaStream) -> None:
    check_graphs(gpu, stream)


def test_what_becomes_free_while_a_graph_is_captured_waits(gpu: Gpu, stream: CudaStream) -> None:
    buffer, pinned = gpu.allocate(8), [gpu.allocate_host(8)]

    def work() -> None:
        stream.zero(buffer.address, 8)
        pinned.clear()
        gc.collect()

    graph = stream.capture(work)  # which a cudaFreeHost would have ended
    graph.launch()
    stream.synchronize()
    graph.close()
    buffer.close()


def test_another_thread_may_allocate_while_a_graph_is_captured(gpu: Gpu, stream: CudaStream) -> None:
    buffer = gpu.allocate(8)

    def work() -> None:
        stream.zero(buffer.address, 8)
        thread = threading.Thread(target=lambda: gpu.allocate(1 << 20).close())
        thread.start()
        thread.join()

    stream.capture(work).close()
    buffer.close()


def test_too_much_memory_is_refused_and_then_less_is_given(gpu: Gpu) -> None:
    with pytest.raises(OutOfDeviceMemory, match="MB more are needed"):
        gpu.allocate(gpu.device.memory_bytes + (1 << 30))
    gpu.allocate(1 << 20).close()


def test_streams_wait_for_each_other(gpu: Gpu, stream: CudaStream) -> None:
    size = 64 << 20
    second, buffer, back = gpu.stream(), gpu.allocate(size), gpu.allocate_host(size)
    back[:] = 1
    for _ in range(5):
        stream.to_device(buffer.address, back)  # slow
        second.wait_for(stream)
        second.zero(buffer.address, size)
        second.to_host(back[:1024], buffer.address)
        second.synchronize()
        assert not back[:1024].any()
        back[:1024] = 1
    stream.synchronize()
    second.close()
    buffer.close()


def test_memory_comes_back(gpu: Gpu, stream: CudaStream) -> None:
    def use() -> None:
        for _ in range(20):
            check_copies(gpu, stream)
            check_graphs(gpu, stream)

    use()
    before = gpu.free_bytes()
    use()
    assert abs(before - gpu.free_bytes()) < 4 << 20
    assert np.isfinite(before)
