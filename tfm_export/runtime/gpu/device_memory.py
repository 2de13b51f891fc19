"""The memory of batches on a GPU: caches and cross-attention keys and values, allocated once and used again.

Letters as in `step_model`; R rows are allocated, of which the first B are in use. Sizes are rounded up to a few
(`bucket`), so that the next batch finds memory of its size, at addresses that captured graphs know.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tfm_export.runtime.gpu.cuda import ALIGNMENT, Box, CudaStream, Gpu, OutOfDeviceMemory

# Idle memory is kept for the next batch of its size up to this part of the GPU's, and two pieces of it in any case:
# a batch that grows, and what it grows into.
IDLE_SHARE, IDLE_PIECES = 1 / 16, 2


def bucket(count: int, largest: int, smallest: int = 1) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, ...: at most half as much again as `count`, and few different ones.

    Args:
        count: what there must be room for; at most `largest`.
        largest: what no bucket is larger than.
        smallest: what no bucket is smaller than, as far as `largest` allows.
    """
    power = 1 << max(count - 1, 0).bit_length()
    size = power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power
    return min(max(size, smallest), largest)


@dataclass(frozen=True)
class RowShape:
    """What a row of a tensor [R, H, L, D] is made of.

    Attributes:
        heads: H.
        head_size: D, as the compiled graph has it.
        item_bytes: of a number.
    """

    heads: int
    head_size: int
    item_bytes: int


class TensorBlock:
    """Tensors of one shape [R, H, L, D], one behind the other, so that one call does the same to all of them.

    A line is what a head of a row has: its L slots. Every tensor begins at a multiple of 256 bytes, and at a multiple
    of a line: between two there may be lines of no use.
    """

    def __init__(self, gpu: Gpu, names: Sequence[str], shape: RowShape, rows: int, length: int) -> None:
        self.names, self.shape, self.rows, self.length = names, shape, rows, length
        self._slot_bytes = shape.head_size * shape.item_bytes
        self._line_bytes = length * self._slot_bytes
        step = ALIGNMENT // math.gcd(ALIGNMENT, self._line_bytes)
        self._lines = math.ceil(rows * shape.heads / step) * step
        self._buffer = gpu.allocate(len(names) * self._lines * self._line_bytes)

    @property
    def nbytes(self) -> int:
        """What it takes."""
        return self._buffer.nbytes

    def address(self, name: str) -> int:
        """Of a tensor."""
        return self._buffer.address + self.names.index(name) * self._lines * self._line_bytes

    def zero_rows(self, stream: CudaStream, first: int, last: int, *, slots: tuple[int, int] | None = None) -> None:
        """Zero the rows from `first` to before `last` of every tensor, or of these rows some slots."""
        first_slot, last_slot = slots or (0, self.length)
        if last > first and last_slot > first_slot:
            stream.zero_box(
                self._box(first, first_slot),
                width=(last_slot - first_slot) * self._slot_bytes,
                height=(last - first) * self.shape.heads,
                depth=len(self.names),
            )

    def copy_rows(
        self, stream: CudaStream, source: TensorBlock, source_row: int, target_row: int, *, rows: int, slots: int
    ) -> None:
        """Copy the first `slots` slots of some rows of every tensor from another block, or from other rows of this."""
        if rows and slots:
            stream.copy_box(
                self._box(target_row),
                source._box(source_row),
                width=slots * self._slot_bytes,
                height=rows * self.shape.heads,
                depth=len(self.names),
            )

    def _box(self, row: int, slot: int = 0) -> Box:
        address = self._buffer.address + row * self.shape.heads * self._line_bytes + slot * self._slot_bytes
        return Box(address, self._line_bytes, self._lines)

    def close(self) -> None:
        """Free it."""
        self._buffer.close()


class BatchMemory:
    """The device memory of a batch. What a step reads is finite from the start: 0 * NaN is NaN.

    Attributes:
        number: tells it from every other there ever was.
        rows: R.
        source: source tokens of a row.
        capacity: slots of a row.
        caches: [R, H, C, D] by graph input name.
        cross: [R, H, S, D] by graph input name.
    """

    _numbers = itertools.count()

    def __init__(
        self, gpu: Gpu, shape: RowShape, names: tuple[Sequence[str], Sequence[str]], size: tuple[int, int, int]
    ) -> None:
        self.number = next(self._numbers)
        self.rows, self.source, self.capacity = size
        self.caches = TensorBlock(gpu, names[0], shape, self.rows, self.capacity)
        try:
            self.cross = TensorBlock(gpu, names[1], shape, self.rows, self.source)
        except BaseException:
            self.caches.close()
            raise

    @property
    def nbytes(self) -> int:
        """What it takes."""
        return self.caches.nbytes + self.cross.nbytes

    def addresses(self) -> dict[str, int]:
        """Of every tensor, by graph input name."""
        return {name: block.address(name) for block in (self.caches, self.cross) for name in block.names}

    def zero(self, stream: CudaStream, rows: int) -> None:
        """Zero the first rows."""
        self.caches.zero_rows(stream, 0, rows)
        self.cross.zero_rows(stream, 0, rows)

    def close(self) -> None:
        """Free it."""
        self.caches.close()
        self.cross.close()


class Lease:
    """Memory that a batch has; with the last reference to the lease it goes back."""

    def __init__(self, memory: BatchMemory, give_back: Callable[[BatchMemory], None]) -> None:
        self.memory = memory
        weakref.finalize(self, give_back, memory)


class MemoryPool:
    """Memory for batches, each on one stream.

    Only `give_back` may be called by any thread at any time; garbage collection does so.

    Args:
        stream: what all work on the memory is put on.
        shape: of the rows.
        names: of caches, and of cross-attention keys and values.
        forget: told of memory before it is freed.
        reclaim: asks others to free their idle memory.
    """

    def __init__(
        self,
        stream: CudaStream,
        shape: RowShape,
        names: tuple[Sequence[str], Sequence[str]],
        *,
        forget: Callable[[BatchMemory], None],
        reclaim: Callable[[], None],
    ) -> None:
        self._stream, self._shape, self._names = stream, shape, names
        self._forget, self._reclaim = forget, reclaim
        self._idle: list[BatchMemory] = []  # the last used last
        self._returned: deque[BatchMemory] = deque()
        self._lent = 0

    @property
    def lent(self) -> int:
        """How many pieces batches have."""
        return self._lent - len(self._returned)

    def take(self, rows: int, source: int, capacity: int) -> BatchMemory:
        """Memory with so many source tokens and slots, and so many rows, zeroed, or more.

        Raises:
            OutOfDeviceMemory: there is not so much, even with nothing idle.
        """
        self._collect()
        fitting = [m for m in self._idle if m.rows >= rows and (m.source, m.capacity) == (source, capacity)]
        if fitting:
            memory = min(fitting, key=lambda m: m.rows)
            self._idle.remove(memory)
        else:
            memory = self._allocate((rows, source, capacity))
        memory.zero(self._stream, rows)
        self._lent += 1
        return memory

    def give_back(self, memory: BatchMemory) -> None:
        """Take memory back; called by any thread."""
        self._returned.append(memory)

    def free_idle(self) -> None:
        """Free what no batch has."""
        self._collect()
        self._shrink_idle(0, 0)

    def _allocate(self, size: tuple[int, int, int]) -> BatchMemory:
        gpu = self._stream.gpu
        try:
            return BatchMemory(gpu, self._shape, self._names, size)
        except OutOfDeviceMemory:
            self.free_idle()
            self._reclaim()
            return BatchMemory(gpu, self._shape, self._names, size)

    def _collect(self) -> None:
        while self._returned:
            self._idle.append(self._returned.popleft())
            self._lent -= 1
        self._shrink_idle(int(self._stream.gpu.device.memory_bytes * IDLE_SHARE), IDLE_PIECES)

    def _shrink_idle(self, most_bytes: int, most_pieces: int) -> None:
        """Free the memory used longest ago until there are few bytes or few pieces."""
        if len(self._idle) <= most_pieces or sum(memory.nbytes for memory in self._idle) <= most_bytes:
            return
        self._stream.synchronize()  # what is still being done uses it
        while len(self._idle) > most_pieces and sum(memory.nbytes for memory in self._idle) > most_bytes:
            memory = self._idle.pop(0)
            self._forget(memory)
            memory.close()
