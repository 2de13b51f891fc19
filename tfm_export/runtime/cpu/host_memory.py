"""The memory of a batch of sentences on the host: caches, cross-attention keys and values, source mask.

Letters as in `step_model`; R rows are allocated, of which the first B are in use. Row is the first axis of every
array, so that the rows in use are one contiguous piece from the start of the same memory, however many there are.
"""

from __future__ import annotations

import math
import mmap
import sys
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfm_export.errors import RequestError
from tfm_export.graph import Dimensions, cross_names, self_cache_names
from tfm_export.runtime.step_model import Floats, Ids, Mask

Array = NDArray[Any]

# A batch grows in pieces up to so many times larger than it needs at first; a larger one is not for small batches.
LARGEST = 16
# A process that is forked off must not write into its parent's caches.
_OF_THIS_PROCESS = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}


class HostPool:
    """Memory that batches have left, for those that come after them.

    Memory that is new to a process costs a page fault every 4 kB, up to a tenth of the time that decoding takes. There
    are never more pieces than were in use at once. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock, self._closed = threading.Lock(), False
        self._idle: list[mmap.mmap] = []  # the smallest first
        self._returned: deque[mmap.mmap] = deque()  # garbage collection adds to it, at any time

    def array(self, shape: tuple[int, ...], dtype: str) -> Array:
        """An array with anything in it. Its memory comes back with the last array that shows it.

        Raises:
            MemoryError: there is not so much.
        """
        count = math.prod(shape)
        piece = self._take(count * np.dtype(dtype).itemsize)
        lent: Array = np.frombuffer(piece, dtype, count)
        weakref.finalize(lent, self._give_back, piece).atexit = False
        return lent.reshape(shape)

    def close(self) -> None:
        """Free what is not in use, and what is in use as soon as it comes back."""
        self._closed = True
        self._free()

    def _give_back(self, piece: mmap.mmap) -> None:
        if not self._closed:
            self._returned.append(piece)

    def _take(self, nbytes: int) -> mmap.mmap:
        """The smallest piece that is large enough, and not much too large; or a new one, in another's place."""
        with self._lock:
            while self._returned:
                insort(self._idle, self._returned.popleft(), key=len)
            place = bisect_left(self._idle, nbytes, key=len)
            if place < len(self._idle) and len(self._idle[place]) <= LARGEST * nbytes:
                return self._idle.pop(place)
            del self._idle[-1:]
        try:
            return _new(nbytes)
        except MemoryError:
            self._free()
            return _new(nbytes)

    def _free(self) -> None:
        with self._lock:
            self._idle.clear()
            self._returned.clear()


def _new(nbytes: int) -> mmap.mmap:
    """Not from the allocator, which would keep much of what is given up."""
    try:
        return mmap.mmap(-1, nbytes, **_OF_THIS_PROCESS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"there are no {nbytes:,} bytes for a batch: try smaller batches or fewer beams") from error


class HostMemory:
    """Rows of sentences. Everything is finite from the start: masked slots are multiplied by 0, and 0 * NaN is NaN.

    Attributes:
        dimensions: the model's.
        size: B, rows in use.
        capacity: C, slots of each row.
        source_mask: [R, S].
        caches: [R, H, C, D] by graph input name.
        cross: [R, H, S, D] by graph input name.
        written: no slot from this one on has been written to; the runtime keeps it up to date.
    """

    def __init__(
        self,
        source_mask: Mask,
        capacity: int,
        dimensions: Dimensions,
        float_type: str,
        pools: tuple[HostPool, HostPool] | None = None,
    ) -> None:
        """Make room for a batch.

        Args:
            source_mask: [B, S].
            capacity: C.
            dimensions: the model's.
            float_type: of the caches.
            pools: where the memory of caches comes from and goes back to, and that of the rest.
        """
        self.dimensions = dimensions
        rows, source = source_mask.shape
        heads, head_size = dimensions.heads, dimensions.head_size
        self._cache_pool, self._cross_pool = pools or (HostPool(), HostPool())
        self._float_type = float_type
        self.size: int = rows
        self.capacity, self.written = capacity, 0
        self.source_mask = np.array(source_mask, np.bool_)
        shape = rows, heads, capacity, head_size
        self.caches = {name: self._zeros(self._cache_pool, shape) for name in self_cache_names(dimensions)}
        shape = rows, heads, source, head_size
        self.cross = {name: self._zeros(self._cross_pool, shape) for name in cross_names(dimensions)}

    @property
    def rows(self) -> int:
        """R: rows allocated."""
        return len(self.source_mask)

    def in_use(self) -> dict[str, Array]:
        """The first B rows of every array, by graph input name."""
        arrays = {"source_mask": self.source_mask, **self.caches, **self.cross}
        return {name: array[: self.size] for name, array in arrays.items()}

    def read(self, name: str) -> Floats:
        """A copy of the first B rows of a cache or a cross-attention tensor."""
        arrays = {**self.caches, **self.cross}
        if name not in arrays:
            raise RequestError(f"no tensor {name!r}; there are {', '.join(arrays)}")
        return np.array(arrays[name][: self.size], np.float32)

    def zero_padding(self) -> None:
        """Zero the cross-attention keys and values of padded source tokens."""
        if self.source_mask.all():
            return
        padding = ~self.source_mask
        for array in self.cross.values():
            array.transpose(0, 2, 1, 3)[padding] = 0

    def grow(self, capacity: int) -> None:
        """Give every row `capacity` slots; copies what was written, once."""
        if capacity < self.capacity:
            raise RequestError(f"a cache of {self.capacity} slots cannot grow to {capacity}")
        if capacity == self.capacity:
            return
        self._resize(self.caches, self._cache_pool, self.rows, capacity, self.written)
        self.capacity = capacity

    def pack(self, slots: Ids, capacity: int) -> None:
        """Keep some slots of each row; see `Sentences.pack`."""
        size, kept = slots.shape
        if size != self.size or kept > capacity or slots.min(initial=0) < 0 or slots.max(initial=0) >= self.capacity:
            raise RequestError(
                f"expected slots of {self.size} rows from 0 to {self.capacity - 1}, at most {capacity} of each, "
                f"found {kept} of {size} rows from {slots.min(initial=0)} to {slots.max(initial=0)}"
            )
        heads = next(iter(self.caches.values())).shape[1]
        # Slots behind those get what is in slot 0: finite numbers, so that one call of numpy fills the whole array.
        every = np.zeros((size, 1, capacity), np.int64)
        every[:, 0, :kept] = slots
        first = np.arange(size * heads).reshape(size, heads, 1) * self.capacity
        places = first + every
        for name in self.caches:  # one after another: each leaves its memory to the next
            self.caches[name] = self._packed(self.caches[name], places)
        self.capacity = self.written = capacity

    def _packed(self, old: Array, places: Ids) -> Array:
        """A cache of the slots at those places [B, H, C], counted over all rows and heads of `old`."""
        size, heads, capacity = places.shape
        new = self._cache_pool.array((self.rows, heads, capacity, old.shape[3]), self._float_type)
        new[size:] = 0
        # mode="clip" lets numpy write straight into `out`; no place is out of range.
        np.take(old.reshape(-1, old.shape[3]), places, axis=0, out=new[:size], mode="clip")
        return new

    def move(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`."""
        for row in (source, target):
            if not 0 <= row < self.size:
                raise RequestError(f"a row must be from 0 to {self.size - 1}, found {row}")
        for cache in self.caches.values():
            cache[target, :, : self.written] = cache[source, :, : self.written]
        for array in (self.source_mask, *self.cross.values()):
            array[target] = array[source]

    def shrink(self, size: int) -> None:
        """Keep the first `size` rows; no memory moves."""
        if not 0 <= size <= self.size:
            raise RequestError(f"a batch of {self.size} rows cannot shrink to {size}")
        self.size = size

    def append(self, other: HostMemory) -> None:
        """Copy the rows of `other` behind this batch's; see `Sentences.append`.

        Rows that finished sentences left are used again; when there are too few, or the new sources are longer,
        everything moves to new memory.
        """
        if other.written > self.capacity:
            raise RequestError(f"the joining rows have written more slots than the {self.capacity} of this batch")
        first, last = self.size, self.size + other.size
        self._reserve(last, max(self.source_mask.shape[1], other.source_mask.shape[1]))
        for name, cache in self.caches.items():
            cache[first:last] = 0
            cache[first:last, :, : other.written] = other.caches[name][: other.size, :, : other.written]
        source = other.source_mask.shape[1]
        for name, array in self.cross.items():
            array[first:last] = 0
            array[first:last, :, :source] = other.cross[name][: other.size]
        self.source_mask[first:last] = False
        self.source_mask[first:last, :source] = other.source_mask[: other.size]
        self.size, self.written = last, max(self.written, other.written)

    def _reserve(self, rows: int, source: int) -> None:
        """Make room for `rows` rows with sources of `source` tokens."""
        longest, more = self.source_mask.shape[1], rows > self.rows
        rows = max(rows, self.rows)
        if more:
            self._resize(self.caches, self._cache_pool, rows, self.capacity, self.written)
        if more or source > longest:
            self._resize(self.cross, self._cross_pool, rows, source, longest)
            mask = np.zeros((rows, source), np.bool_)
            mask[: self.size, :longest] = self.source_mask[: self.size]
            self.source_mask = mask

    def _resize(self, arrays: dict[str, Array], pool: HostPool, rows: int, length: int, keep: int) -> None:
        """Give arrays that many rows and that length (axis 2): zeros but for the rows in use, of which `keep` stay."""
        for name in arrays:
            old = arrays[name][: self.size, :, :keep]
            new = self._zeros(pool, (rows, old.shape[1], length, old.shape[3]))
            new[: self.size, :, :keep] = old
            arrays[name] = new
            del old

    def _zeros(self, pool: HostPool, shape: tuple[int, ...]) -> Array:
        array = pool.array(shape, self._float_type)
        array.fill(0)
        return array
