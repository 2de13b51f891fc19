"""The memory of a batch of sentences on the host: caches, cross-attention keys and values, source mask.

Letters as in `step_model`; R rows are allocated, of which the first B are in use. Row is the first axis of every
array, so that the rows in use are one contiguous piece from the start of the same memory, however many there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfm_export.errors import RequestError
from tfm_export.graph import Dimensions, cross_names, self_cache_names
from tfm_export.runtime.step_model import Floats, Mask

Array = NDArray[Any]


class HostMemory:
    """Rows of sentences. Everything is finite from the start: masked slots are multiplied by 0, and 0 * NaN is NaN.

    Attributes:
        size: B, rows in use.
        capacity: C, slots of each row.
        source_mask: [R, S].
        caches: [R, H, C, D] by graph input name.
        cross: [R, H, S, D] by graph input name.
        written: no slot from this one on has been written to; the runtime keeps it up to date.
    """

    def __init__(self, source_mask: Mask, capacity: int, dimensions: Dimensions, float_type: str) -> None:
        rows, source = source_mask.shape
        heads, head_size = dimensions.heads, dimensions.head_size
        self.size: int = rows
        self.capacity, self.written = capacity, 0
        self.source_mask = np.array(source_mask, np.bool_)
        self.caches = {
            name: np.zeros((rows, heads, capacity, head_size), float_type) for name in self_cache_names(dimensions)
        }
        self.cross = {name: np.zeros((rows, heads, source, head_size), float_type) for name in cross_names(dimensions)}

    @property
    def rows(self) -> int:
        """R: rows allocated."""
        return len(self.source_mask)

    @property
    def bytes(self) -> int:
        """What caches and cross-attention keys and values take."""
        return sum(array.nbytes for array in (*self.caches.values(), *self.cross.values()))

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
        for name, old in self.caches.items():
            self.caches[name] = _resized(old, (*old.shape[:2], capacity, old.shape[3]), self.size, self.written)
        self.capacity = capacity

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
        if source > self.source_mask.shape[1]:
            longest = self.source_mask.shape[1]
            self.source_mask = np.pad(self.source_mask, ((0, 0), (0, source - longest)))
            for name, old in self.cross.items():
                self.cross[name] = _resized(old, (*old.shape[:2], source, old.shape[3]), self.size, longest)
        if rows > self.rows:
            self.source_mask = _with_rows(self.source_mask, rows, self.size)
            for arrays in (self.caches, self.cross):
                for name, old in arrays.items():
                    arrays[name] = _with_rows(old, rows, self.size)


def _resized(old: Array, shape: tuple[int, ...], rows: int, slots: int) -> Array:
    """Zeros of that shape with the first rows and slots (axis 2) of `old`."""
    new = np.zeros(shape, old.dtype)
    new[:rows, :, :slots] = old[:rows, :, :slots]
    return new


def _with_rows(old: Array, rows: int, keep: int) -> Array:
    """Zeros with that many rows, the first `keep` of them those of `old`."""
    new = np.zeros((rows, *old.shape[1:]), old.dtype)
    new[:keep] = old[:keep]
    return new
