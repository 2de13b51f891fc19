"""Weight-only quantisation: linear layers whose weights are stored as small integers, with a scale a block.

x W + b becomes, in standard operators,

    x -----------------------> Gemm -> Add
    W -> DequantizeLinear ------^       ^---- b

Activations stay what they are. ONNX Runtime makes one MatMulNBits of the three, by default and whatever follows the
layer; a MatMul and an Add it would first make a Gemm with a bias, which it does not fuse where an activation follows.
TensorRT reads the two alike.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from tfm_export.errors import ExportError
from tfm_export.passes.linears import Linear, add_initializer, linears, weight_problems
from tfm_export.passes.static_quantization import check_not_quantized, scales

Bits = Literal[4, 8]

# Of 8-bit numbers, larger blocks have little more error and fewer scales to read and apply: a step of the base model
# takes 1 to 5 % less time than with 128, the encoder 8 %.
BLOCKS = {8: 256, 4: 128}
SMALLEST_BLOCK, LARGEST_BLOCK = 16, 256  # what ONNX Runtime's MatMulNBits takes; powers of two

# A block of 4-bit numbers has less error if its largest weights are clipped or its range is stretched a little. These
# are ratios of its scale to that which just holds the largest weight as 7; the best is taken. -8 is a level too.
# Measured on the g2p example: relative error of the weights 0.113 without the search, 0.098 with it; of 2,000 test
# words 1,919 and 1,939 are those of fp32. A zero point a block would give 0.092 and, all else equal, 5 words more, and
# TensorRT takes none. Of 8-bit numbers' error, 0.0063, the search would save 1 %.
_RATIOS = np.linspace(0.6, 1.04, 23)
_COLUMNS = 1024  # searched at a time: a block of them stays in the cache


def quantize_weights(
    model: ir.Model, name: str, *, bits: Bits, block: int | None = None, skip: Collection[str] = ()
) -> list[str]:
    """Quantise the weights of linear layers, in place.

    Args:
        model: an fp32 graph of a bundle.
        name: of the graph: "encoder", "decoder_step" or "decoder_step_attention".
        bits: of a weight.
        block: how many weights of a column share a scale: a power of two from 16 to 256; None for that of `BLOCKS`.
            Layers that it does not divide get smaller ones, see `block_size`.
        skip: names of layers that stay in float32; names of others are of no effect.

    Returns:
        The names of the layers that were quantised, in the order in which they run.

    Raises:
        ExportError: the graph is quantised already or is not fp32, a weight is not finite, or there is no such block.
            The graph is as it was.
    """
    check_not_quantized(model, name)
    layers = [layer for layer in linears(model, name) if layer.name not in skip]
    block = BLOCKS[bits] if block is None else block
    _check(layers, block)
    for layer in layers:
        layer.replace(layer.input, _quantize_weight(model, layer, bits, block))
    return [layer.name for layer in layers]


def _check(layers: list[Linear], block: int) -> None:
    problems = []
    if block & (block - 1) or not SMALLEST_BLOCK <= block <= LARGEST_BLOCK:
        problems.append(f"block must be a power of two from {SMALLEST_BLOCK} to {LARGEST_BLOCK}, found {block}")
    problems += weight_problems(layers)
    if problems:
        raise ExportError(problems, "start from the fp32 graphs of a bundle")


def _quantize_weight(model: ir.Model, layer: Linear, bits: Bits, block: int) -> ir.Value:
    """Store a layer's weight [K, N] with a scale a block; give what DequantizeLinear makes of it."""
    base, weight = layer.weight_name, layer.weight()
    size = block_size(weight.shape[0], block)
    numbers, scale = round_blocks(weight, bits, size)
    type_ = ir.DataType.INT8 if bits == 8 else ir.DataType.INT4
    stored = add_initializer(model, f"{base}_int{bits}", numbers.astype(type_.numpy()))
    scale_value = add_initializer(model, f"{base}_scale", scale)
    return layer.dequantize_weight([stored, scale_value], {"axis": 0, "block_size": size})


def block_size(length: int, most: int) -> int:
    """How many weights share a scale, of a column of `length`.

    Blocks that are all whole are what every runtime takes: the largest power of two up to `most` that divides the
    length. Where none does, or `most` holds the column, it is `most`, and the last block is a short one.
    """
    size = most
    while size > SMALLEST_BLOCK and length % size:
        size //= 2
    return most if length <= most or length % size else size


def round_blocks(weight: NDArray[np.float32], bits: Bits, block: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Round a weight to integers, each block of a column at its own scale.

    Args:
        weight: [K, N].
        bits: of the integers: -127..127 or -8..7.
        block: rows that share a scale; the last block may be shorter.

    Returns:
        The integers [K, N] and the scales [blocks, N], which float16 and bfloat16 hold as exactly as float32 does:
        weight = integers x scale but for the rounding.
    """
    rows, columns = weight.shape
    numbers = np.empty((rows, columns), np.int8)
    scale = np.empty((-(-rows // block), columns), np.float32)
    for i, first in enumerate(range(0, rows, block)):
        for left in range(0, columns, _COLUMNS):
            part = np.s_[first : first + block, left : left + _COLUMNS]
            x = np.ascontiguousarray(weight[part])
            chosen = _best_scale(x) if bits == 4 else scales(np.abs(x).max(axis=0), 127)
            scale[i, left : left + _COLUMNS] = chosen
            numbers[part] = _round(x, chosen, bits)
    return numbers, scale


def _best_scale(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The scale [N] at which a block [K, N] loses least as 4-bit numbers: least squares."""
    largest = np.abs(x).max(axis=0)
    best = scales(largest, 7)
    least = _squared_error(x, best)
    for ratio in _RATIOS:
        scale = scales(largest * ratio, 7)
        error = _squared_error(x, scale)
        better = error < least
        best[better], least[better] = scale[better], error[better]
    return best


def _squared_error(x: NDArray[np.float32], scale: NDArray[np.float32]) -> NDArray[np.float32]:
    rest = x - _round(x, scale, 4) * scale
    error: NDArray[np.float32] = np.einsum("kn,kn->n", rest, rest)
    return error


def _round(x: NDArray[np.float32], scale: NDArray[np.float32], bits: Bits) -> NDArray[np.float32]:
    least, most = (-127, 127) if bits == 8 else (-8, 7)
    rounded: NDArray[np.float32] = np.clip(np.rint(x / scale), least, most)
    return rounded
