"""What the calls of CUDA must do on any GPU, emulated or real."""

from __future__ import annotations

import numpy as np

from tfm_export.runtime.gpu.cuda import Box, CudaStream, Gpu
from tfm_export.runtime.gpu.device_memory import RowShape, TensorBlock

# Heads, head size and bytes of a number; rows; length.
BLOCKS = [
    (RowShape(heads=2, head_size=4, item_bytes=4), 4, 8),
    (RowShape(heads=1, head_size=7, item_bytes=2), 5, 3),  # lines of 42 bytes
    (RowShape(heads=3, head_size=20, item_bytes=4), 2, 1),
    (RowShape(heads=5, head_size=12, item_bytes=2), 3, 11),
    (RowShape(heads=2, head_size=64, item_bytes=2), 1, 16),
]


def check_copies(gpu: Gpu, stream: CudaStream) -> None:
    """Numbers go there and back."""
    numbers = np.random.default_rng(0).integers(0, 255, 1000, np.uint8)
    there, back = gpu.allocate_host(1000), gpu.allocate_host(1000)
    there[:], back[:] = numbers, 255
    buffer = gpu.allocate(1000)
    assert buffer.address % 256 == 0
    stream.to_device(buffer.address, there)
    stream.zero(buffer.address + 100, 50)
    stream.to_host(back, buffer.address)
    stream.synchronize()
    numbers[100:150] = 0
    np.testing.assert_array_equal(back, numbers)
    buffer.close()
    buffer.close()  # a second time is nothing


def check_boxes(gpu: Gpu, stream: CudaStream) -> None:
    """Boxes are copied and zeroed as numpy does it."""
    rng = np.random.default_rng(1)
    for _ in range(30):
        depth, lines, line = rng.integers(1, 6, 3).tolist()
        height, width = int(rng.integers(1, lines + 1)), int(rng.integers(1, line + 1))
        first = gpu.allocate_host(depth * lines * line).reshape(depth, lines, line)
        second = gpu.allocate_host(depth * (lines + 2) * (line + 3)).reshape(depth, lines + 2, line + 3)
        first[:], second[:] = rng.integers(1, 255, first.shape), rng.integers(1, 255, second.shape)
        expected, found, buffers = second.copy(), gpu.allocate_host(second.nbytes).reshape(second.shape), []
        for array in (first, second):
            buffers.append(gpu.allocate(array.nbytes))
            stream.to_device(buffers[-1].address, array)
        source = Box(buffers[0].address, line, lines)
        target = Box(buffers[1].address + line + 3 + 2, line + 3, lines + 2)  # from the second line's third byte on
        stream.copy_box(target, source, width=width, height=height, depth=depth)
        stream.zero_box(target, width=1, height=1, depth=depth)
        stream.to_host(found, buffers[1].address)
        stream.synchronize()
        expected[:, 1 : 1 + height, 2 : 2 + width] = first[:, :height, :width]
        expected[:, 1, 2] = 0
        np.testing.assert_array_equal(found, expected)
        for buffer in buffers:
            buffer.close()


def check_graphs(gpu: Gpu, stream: CudaStream) -> None:
    """A graph does again what was captured, with the numbers that are there then."""
    there, back, buffer = gpu.allocate_host(4), gpu.allocate_host(4), gpu.allocate(4)

    def work() -> None:
        stream.to_device(buffer.address, there)
        stream.zero(buffer.address + 1, 1)
        stream.to_host(back, buffer.address)

    there[:] = back[:] = 1
    graph = stream.capture(work)
    stream.synchronize()
    assert back.tolist() == [1] * 4, "capturing does nothing"
    for value in (3, 4):
        there[:] = value
        graph.launch()
        stream.synchronize()
        assert back.tolist() == [value, 0, value, value]
    graph.close()
    buffer.close()


class _Block:
    """A block of tensors beside numpy's idea of it."""

    def __init__(self, stream: CudaStream, shape: RowShape, rows: int, length: int) -> None:
        gpu, self.stream = stream.gpu, stream
        self.names = [f"tensor_{i}" for i in range(3)]
        self.block = TensorBlock(gpu, self.names, shape, rows, length)
        self.expected = np.zeros((3, rows, shape.heads, length, shape.head_size), f"u{shape.item_bytes}")
        self.expected[:] = np.arange(1, self.expected.size + 1).reshape(self.expected.shape)
        for name, tensor in zip(self.names, self.expected, strict=True):
            pinned = gpu.allocate_host(tensor.nbytes)
            pinned[:] = np.ascontiguousarray(tensor).view(np.uint8).reshape(-1)
            stream.to_device(self.block.address(name), pinned)
            stream.synchronize()

    def check(self) -> None:
        """Every number is what it should be."""
        for name, tensor in zip(self.names, self.expected, strict=True):
            assert self.block.address(name) % 256 == 0
            pinned = self.stream.gpu.allocate_host(tensor.nbytes)
            self.stream.to_host(pinned, self.block.address(name))
            self.stream.synchronize()
            np.testing.assert_array_equal(pinned.view(tensor.dtype).reshape(tensor.shape), tensor)


def check_block(stream: CudaStream, shape: RowShape, rows: int, length: int) -> None:
    """Rows of many tensors are copied and zeroed as numpy does it."""
    block, rng = _Block(stream, shape, rows, length), np.random.default_rng(rows)
    block.check()
    for _ in range(6):
        first, last = sorted(rng.integers(0, rows + 1, 2).tolist())
        slot, last_slot = sorted(rng.integers(0, length + 1, 2).tolist())
        block.block.zero_rows(stream, first, last, slots=(slot, last_slot))
        block.expected[:, first:last, :, slot:last_slot] = 0
        other = _Block(stream, shape, rows + 2, length + 3)
        count, slots = int(rng.integers(0, rows + 1)), int(rng.integers(0, length + 1))
        source, target = int(rng.integers(0, rows + 2 - count + 1)), int(rng.integers(0, rows - count + 1))
        block.block.copy_rows(stream, other.block, source, target, rows=count, slots=slots)
        block.expected[:, target : target + count, :, :slots] = other.expected[:, source : source + count, :, :slots]
        block.check()
        other.block.close()
    if rows > 1:
        block.block.copy_rows(stream, block.block, rows - 1, 0, rows=1, slots=length)
        block.expected[:, 0] = block.expected[:, rows - 1]
    block.block.zero_rows(stream, rows - 1, rows)
    block.expected[:, rows - 1] = 0
    block.check()
    block.block.close()
