"""The small arrays of encoder runs and steps: side by side in pinned memory, and at the same places on the device.

So one copy takes all inputs to the device, and one brings the best tokens back. Batches are padded with inert rows,
which are as harmless as a row can be: token 0 at position 0 into slot 0, seeing one slot and one source token.
Letters as in `step_model`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfm_export.bundle import Limits
from tfm_export.graph import Dimensions
from tfm_export.runtime.gpu.cuda import ALIGNMENT, Gpu
from tfm_export.runtime.step_model import Floats, Ids, Mask

Array = NDArray[Any]


@dataclass(frozen=True)
class StepShape:
    """The sizes of a step's axes, by their names in the graph's table.

    Attributes:
        batch: rows, inert ones included.
        query: Q.
        source: source tokens, those of padding included.
        capacity: C of the compiled graph.
    """

    batch: int
    query: int
    source: int
    capacity: int


Spec = tuple[str, tuple[int, ...], type[np.generic]]


class Layout:
    """Where arrays lie in a piece of memory, each at a multiple of 256.

    Attributes:
        places: offset, shape and dtype of each array, by name.
        nbytes: of everything.
    """

    def __init__(self, arrays: Sequence[Spec]) -> None:
        self.places: dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]] = {}
        self.nbytes = 0
        for name, shape, kind in arrays:
            dtype = np.dtype(kind)
            self.places[name] = (self.nbytes, shape, dtype)
            size = int(np.prod(shape)) * dtype.itemsize
            self.nbytes += -(-size // ALIGNMENT) * ALIGNMENT

    def offset(self, name: str) -> int:
        """Of an array."""
        return self.places[name][0]

    def array(self, memory: NDArray[np.uint8], name: str) -> Array:
        """An array of a piece of memory."""
        offset, shape, dtype = self.places[name]
        return memory[offset : offset + int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)


def step_inputs(shape: StepShape) -> Layout:
    """What a step takes that is not kept on the device."""
    b, q = shape.batch, shape.query
    return Layout(
        [
            ("target_ids", (b, q), np.int64),
            ("positions", (b, q), np.int64),
            ("write_index", (b,), np.int64),
            ("self_mask", (b, 1, q, shape.capacity), np.bool_),
            ("source_mask", (b, shape.source), np.bool_),
        ]
    )


def step_outputs(shape: StepShape, dimensions: Dimensions) -> tuple[Layout, Layout]:
    """What a step gives: what always comes back, and what comes back when it is asked for."""
    b, q = shape.batch, shape.query
    best: list[Spec] = [
        ("top_log_probs", (b, q, dimensions.candidates), np.float32),
        ("top_ids", (b, q, dimensions.candidates), np.int64),
    ]
    rest: list[Spec] = [
        ("log_normaliser", (b, q), np.float32),
        ("log_probs", (b, q, dimensions.target_vocabulary_size), np.float32),
    ]
    return Layout(best), Layout(rest)


def encoder_inputs(batch: int, source: int) -> Layout:
    """What the encoder takes."""
    return Layout([("source_ids", (batch, source), np.int64), ("source_mask", (batch, source), np.bool_)])


class Buffers:
    """Memory for the arrays, in pinned memory and on the device.

    Args:
        gpu: where.
        both: bytes in pinned memory, and as many on the device.
        device_only: bytes behind them, on the device alone.

    Attributes:
        host: [both], the pinned memory.
        user: whose arrays are in it now.
    """

    def __init__(self, gpu: Gpu, both: int, device_only: int = 0) -> None:
        self.user: object = None
        self._both = both
        self._device = gpu.allocate(both + device_only)
        try:
            self.host = gpu.allocate_host(both)
        except BaseException:
            self._device.close()
            raise

    @property
    def address(self) -> int:
        """On the device."""
        return self._device.address

    def holds(self, both: int, device_only: int) -> bool:
        """Whether there is as much room."""
        return both <= self._both and both + device_only <= self._device.nbytes

    def close(self) -> None:
        """Free the device's part; the pinned part goes with the last array that shows it."""
        self._device.close()
        self.host = np.zeros(0, np.uint8)
        self.user = None


class StepArrays:
    """The arrays of a step of fixed shapes.

    The integer inputs are seen as one array of unsigned numbers, in which negative ones are large, so that a single
    comparison finds any that is out of range.

    Attributes:
        shape: the shapes.
        addresses: on the device, by name.
        inputs: all inputs, in pinned memory.
        best: what always comes back, in pinned memory.
        top_log_probs: [batch, Q, N].
        top_ids: [batch, Q, N].
    """

    def __init__(self, buffers: Buffers, shape: StepShape, dimensions: Dimensions, limits: Limits) -> None:
        inputs, (best, rest) = step_inputs(shape), step_outputs(shape, dimensions)
        self.shape = shape
        self.inputs = buffers.host[: inputs.nbytes]
        self.best = buffers.host[inputs.nbytes : inputs.nbytes + best.nbytes]
        self.addresses: dict[str, int] = {}
        begin = buffers.address
        for layout in (inputs, best, rest):
            self.addresses |= {name: begin + layout.offset(name) for name in layout.places}
            begin += layout.nbytes

        self._target_ids, self._positions, self._write_index, self._self_mask, self._source_mask = (
            inputs.array(self.inputs, name) for name in inputs.places
        )
        self.top_log_probs: Floats = best.array(self.best, "top_log_probs")
        self.top_ids: Ids = best.array(self.best, "top_ids")
        self._buffers, self._live = buffers, shape.batch
        self._unsigned: NDArray[np.uint64] = self.inputs[: inputs.offset("self_mask")].view(np.uint64)
        self._bounds = np.ones(self._unsigned.shape, np.uint64)
        for name, bound in (
            ("target_ids", dimensions.target_vocabulary_size),
            ("positions", limits.max_target_length),
            ("write_index", max(shape.capacity - shape.query + 1, 0)),
        ):
            first = inputs.offset(name) // 8
            self._bounds[first : first + int(np.prod(inputs.places[name][1]))] = bound

    @staticmethod
    def sizes(shape: StepShape, dimensions: Dimensions) -> tuple[int, int]:
        """What `Buffers` must hold for these shapes: in both memories, and on the device alone."""
        best, rest = step_outputs(shape, dimensions)
        return step_inputs(shape).nbytes + best.nbytes, rest.nbytes

    def fill(self, target_ids: Ids, positions: Ids, write_index: Ids, self_mask: Mask, source_mask: Mask) -> bool:
        """Take the inputs of the rows in use; False if one is out of range, or a query sees nothing or too much.

        Args:
            target_ids: [B, Q].
            positions: [B, Q].
            write_index: [B].
            self_mask: [B, 1, Q, C'].
            source_mask: [B, S'].
        """
        rows, query = target_ids.shape
        if self._buffers.user is not self:
            self._buffers.user, self._live = self, self.shape.batch
            self.inputs[:] = 0  # what lies between the arrays is compared, too
        slots, source = min(self_mask.shape[3], self.shape.capacity), source_mask.shape[1]
        self._target_ids[:rows] = target_ids
        self._positions[:rows] = positions
        self._write_index[:rows] = write_index
        self._self_mask[:rows, ..., :slots] = self_mask[..., :slots]
        self._self_mask[:rows, ..., slots:] = False
        self._source_mask[:rows, :source] = source_mask
        self._source_mask[:rows, source:] = False
        if rows < self._live:
            self._make_inert(rows)
        self._live = rows
        fits = int(write_index.max()) + query <= self_mask.shape[3] and not self_mask[..., slots:].any()
        return bool(fits and (self._unsigned < self._bounds).all() and self._self_mask[:rows].any(-1).all())

    def _make_inert(self, first: int) -> None:
        """Let the rows from `first` on do nothing."""
        for array in (self._target_ids, self._positions, self._write_index, self._self_mask, self._source_mask):
            array[first:] = 0
        self._self_mask[first:, ..., 0] = True
        self._source_mask[first:, 0] = True


def encoder_arrays(
    buffers: Buffers, source_ids: Ids, source_mask: Mask, batch: int, source: int
) -> tuple[NDArray[np.uint8], dict[str, int]]:
    """Sources as the encoder takes them, padded to `batch` rows of `source` tokens.

    Returns:
        All inputs in pinned memory, and their addresses on the device.
    """
    layout = encoder_inputs(batch, source)
    inputs = buffers.host[: layout.nbytes]
    ids, mask = layout.array(inputs, "source_ids"), layout.array(inputs, "source_mask")
    rows, length = source_ids.shape
    ids[:], mask[:] = 0, False
    ids[:rows, :length], mask[:rows, :length] = source_ids, source_mask
    mask[rows:, 0] = True
    return inputs, {name: buffers.address + layout.offset(name) for name in layout.places}
