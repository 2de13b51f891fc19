"""Static quantisation: linear layers that multiply 8-bit activations with 8-bit weights, at scales fixed beforehand.

x W + b becomes, in standard operators,

    x -> QuantizeLinear -> DequantizeLinear -> Gemm -> Add
                    W -> DequantizeLinear ----^        ^---- b

Since no scale depends on what is in a batch, a sentence's numbers do not depend on its batch mates. TensorRT fuses
this form as it is, and ONNX Runtime makes one QGemm of the Gemm and what feeds it, if the Gemm has no bias and
everything has a zero point; written as MatMul and Add, it stays in float32.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from tfm_export.errors import ExportError
from tfm_export.passes.linears import Linear, add_initializer, linears, weight_problems

INT8_LEVELS = 127
REDUCED_LEVELS = 64  # the most at which two products with uint8 fit into 16 bits: 2 x 255 x 64 = 32,640
FP8_LEVELS = 448  # the largest number of E4M3

_SIGNIFICANT = 2**8  # 8 significant bits: what bfloat16 has
_FLOAT16_STEP = 2.0**-24  # between neighbours among the smallest numbers of float16
_FLOAT16_NORMAL = 2.0**-14  # from here on float16 has all its digits


def quantize_static(
    model: ir.Model,
    name: str,
    thresholds: Mapping[str, float],
    *,
    numbers: Literal["int8", "fp8"],
    zero_point: Literal[128, 0] = 128,
    reduced_range: bool = False,
    skip: Collection[str] = (),
) -> list[str]:
    """Quantise the weights and the inputs of linear layers, in place. An input that several layers read is shared.

    Args:
        model: an fp32 graph of a bundle.
        name: of the graph: "encoder", "decoder_step" or "decoder_step_attention".
        thresholds: where activations are clipped: the largest absolute value of each that is still told from those
            above it, by "graph/value".
        numbers: int8, or the 8-bit float E4M3.
        zero_point: how int8 activations are written: 128 as uint8, which ONNX Runtime's CPU kernels want, or 0 as int8,
            which TensorRT wants. They are the same numbers.
        reduced_range: int8 weights of 7 bits, for CPUs that add up pairs of products in 16 bits.
        skip: names of layers that stay in float32.

    Returns:
        The names of the layers that were quantised, in the order in which they run.

    Raises:
        ExportError: the graph is quantised already or is not fp32, or a threshold is missing or is not a number. The
            graph is as it was.
    """
    check_not_quantized(model, name)
    layers = [layer for layer in linears(model, name) if layer.name not in skip]
    _check(layers, name, thresholds)
    format_ = _Format.of(numbers, zero_point, reduced_range)
    inputs: dict[ir.Value, ir.Value] = {}
    for layer in layers:
        x = layer.input
        if x not in inputs:
            inputs[x] = _quantize_input(model, layer, thresholds[f"{name}/{x.name}"], format_)
        layer.replace(inputs[x], _quantize_weight(model, layer, format_))
    return [layer.name for layer in layers]


def check_not_quantized(model: ir.Model, name: str) -> None:
    """Make sure that a graph holds no quantised layers.

    Args:
        model: the graph.
        name: of the graph, for the message.

    Raises:
        ExportError: it does.
    """
    found = sorted({node.op_type for node in model.graph} & {"QuantizeLinear", "DequantizeLinear"})
    if found:
        raise ExportError(
            f"expected the fp32 graph {name}, found one that is quantised already: it has {' and '.join(found)}",
            "start from the fp32 graphs of a bundle",
        )


def _check(layers: list[Linear], name: str, thresholds: Mapping[str, float]) -> None:
    problems = []
    for value in dict.fromkeys(layer.input for layer in layers):
        threshold = thresholds.get(f"{name}/{value.name}")
        if threshold is None:
            problems.append(f"{name}/{value.name} has no threshold")
        elif not (math.isfinite(threshold) and threshold >= 0):
            problems.append(f"the threshold of {name}/{value.name} must be a number from 0 up, found {threshold}")
    problems += weight_problems(layers)
    if problems:
        raise ExportError(problems, "thresholds that were measured on the fp32 graphs of the same bundle")


@dataclass(frozen=True)
class _Format:
    """The 8-bit numbers.

    Attributes:
        label: what names of constants end with.
        weights: their type.
        activations: their type.
        zero_point: of the activations, while that of weights is 0; None where neither is written down.
        weight_levels: the largest number that a weight is stored as.
        activation_levels: the number that a threshold is stored as, above the zero point.
    """

    label: str
    weights: ir.DataType
    activations: ir.DataType
    zero_point: int | None
    weight_levels: int
    activation_levels: int

    @classmethod
    def of(cls, numbers: str, zero_point: int, reduced_range: bool) -> _Format:
        """The numbers that `quantize_static` is asked for."""
        if numbers == "fp8":
            # With a zero point, ONNX Runtime 1.32 takes a Relu before QuantizeLinear away: for any type but int8 and
            # uint8 it believes that nothing below 0 can be stored.
            return cls("fp8", ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E4M3FN, None, FP8_LEVELS, FP8_LEVELS)
        activations = ir.DataType.UINT8 if zero_point else ir.DataType.INT8
        levels = REDUCED_LEVELS if reduced_range else INT8_LEVELS
        return cls("int8", ir.DataType.INT8, activations, zero_point, levels, INT8_LEVELS)


def _quantize_input(model: ir.Model, layer: Linear, threshold: float, format_: _Format) -> ir.Value:
    """Put QuantizeLinear and DequantizeLinear behind a layer's input; give what comes out."""
    x, type_ = layer.input, format_.activations
    scale = scales(np.array(threshold, np.float64), format_.activation_levels)
    constants = [add_initializer(model, f"{x.name}_scale", scale)]
    if format_.zero_point is None:
        attributes = {"output_dtype": type_}
    else:  # whose type is the output's; ONNX Runtime changes it without a look at the attribute
        attributes, zero = {}, np.array(format_.zero_point, type_.numpy())
        constants.append(add_initializer(model, f"{x.name}_zero_point", zero))
    quantize = ir.node("QuantizeLinear", [x, *constants], attributes, name=f"{x.name}_quantize")
    quantized = quantize.outputs[0]
    quantized.name, quantized.dtype, quantized.shape = f"{x.name}_quantized", type_, x.shape
    dequantize = ir.node("DequantizeLinear", [quantized, *constants], name=f"{x.name}_dequantize")
    dequantized = dequantize.outputs[0]
    dequantized.name, dequantized.dtype, dequantized.shape = f"{x.name}_dequantized", ir.DataType.FLOAT, x.shape
    graph = layer.node.graph
    assert graph is not None
    graph.insert_before(layer.node, [quantize, dequantize])
    return dequantized


def _quantize_weight(model: ir.Model, layer: Linear, format_: _Format) -> ir.Value:
    """Store a layer's weight [K, N] in 8 bits with a scale a column; give what DequantizeLinear makes of it."""
    base = layer.weight_name
    numbers, scale = quantize_columns(layer.weight(), format_.weight_levels, format_.weights)
    constants = [
        add_initializer(model, f"{base}_{format_.label}", numbers),
        add_initializer(model, f"{base}_scale", scale),
    ]
    if format_.zero_point is not None:
        zero = np.zeros(scale.shape, format_.weights.numpy())
        constants.append(add_initializer(model, f"{base}_zero_point", zero))
    return layer.dequantize_weight(constants, {"axis": 1})


def quantize_columns(
    weight: NDArray[np.float32], levels: int, type_: ir.DataType
) -> tuple[NDArray[np.generic], NDArray[np.float32]]:
    """Round a weight to 8-bit numbers, each column at its own scale.

    Args:
        weight: [K, N].
        levels: the number that a column's largest weight is rounded to.
        type_: INT8 or FLOAT8E4M3FN.

    Returns:
        The numbers [K, N] and the scales [N], float32: weight = numbers x scales but for the rounding.
    """
    scale = scales(np.abs(weight).max(axis=0, initial=0), levels)
    numbers = np.ascontiguousarray(weight / scale)
    if type_ == ir.DataType.INT8:
        numbers = np.clip(np.rint(numbers), -levels, levels)
    return numbers.astype(type_.numpy()), scale


def scales(largest: NDArray[np.floating], levels: int) -> NDArray[np.float32]:
    """The scales at which numbers are stored: the least that float32, bfloat16 and float16 all hold exactly.

    TensorRT wants scales in the type that it computes in. Rounded up to 8 significant bits, at most 0.8 % too large,
    they are the same numbers there as in float32, and none of them is 0. Where even the largest scale is below the
    normal numbers of float16, that type is left out of it.

    Args:
        largest: absolute values, of any shape, that are stored as `levels`.
        levels: the largest number of the 8-bit type that is used.
    """
    exact = largest.astype(np.float64) / levels
    top = float(exact.max(initial=0)) or 1.0
    exact = np.where(exact > 0, exact, top)  # of nothing but zeros: any scale
    fraction, exponent = np.frexp(exact)
    rounded = np.ldexp(np.ceil(fraction * _SIGNIFICANT) / _SIGNIFICANT, exponent)
    if top >= _FLOAT16_NORMAL:
        rounded = np.maximum(np.ceil(rounded / _FLOAT16_STEP) * _FLOAT16_STEP, _FLOAT16_STEP)
    return np.asarray(np.maximum(rounded, np.finfo(np.float32).tiny), np.float32)
