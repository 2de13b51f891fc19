"""The form in which TensorRT is given a quantised variant: the same numbers, and one type to compute in.

TensorRT's networks are strongly typed, so precision is in the graph. It stores activations as int8 around a zero point
of 0, multiplies in 8 bits what DequantizeLinear feeds, and computes the rest in the type that the graph says.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from tfm_export.errors import ExportError
from tfm_export.passes.embeddings import dequantize_embeddings
from tfm_export.passes.linears import add_initializer, numbers_of
from tfm_export.passes.retype import Retyped, retype
from tfm_export.precision import FLOATS, PRECISIONS, Compute

_MIDDLE = 128  # of uint8


def tensorrt_form(
    model: ir.Model, variant: str, *, compute: Compute, ranges: Mapping[str, float] | None = None
) -> Retyped:
    """Derive what TensorRT is given from a graph of a stored variant, in place.

    Of a quantised variant: zero points become 0, where uint8 had 128; embedding tables become floats, for TensorRT's
    Gather need not take integers; what is not quantised gets the type `compute`, and so do the scales, which makes
    DequantizeLinear give that type; layer norms and the log-softmax stay in float32. Scales that
    `static_quantization.scales` gave are the same numbers in all these types, so only what is computed is rounded.
    The graphs of fp32, fp16 and bf16 are what TensorRT takes as they are.

    Args:
        model: encoder.onnx, decoder_step.onnx or decoder_step_attention.onnx of the variant.
        variant: its name.
        compute: the type of what is not quantised. That of fp32, fp16 and bf16 is their own.
        ranges: see `passes.retype.retype`: of the fp32 graph's values, by name. Values that do not fit into the type
            stay in float32. None: every value is taken to fit.

    Returns:
        What stays in float32 although `compute` is another type, and why.

    Raises:
        ExportError: there is no such variant or type, the variant has another type, or the graph is not of the form
            that the variant's passes give it.
    """
    _check_names(variant, compute)
    if variant in FLOATS:
        return Retyped({})
    _check_quantized(model, variant)
    dequantize_embeddings(model, model.graph.name or "")
    _move_zero_points(model)
    if ranges is not None:
        ranges = {**ranges, **_new_ranges(model, ranges)}
    return retype(model, PRECISIONS[compute].float_type, ranges=ranges, quantized=True)


def _check_names(variant: str, compute: str) -> None:
    if variant not in PRECISIONS:
        raise ExportError(f"the variant must be one of {', '.join(PRECISIONS)}, found {variant!r}")
    if compute not in FLOATS:
        raise ExportError(f"the type to compute in must be one of {', '.join(FLOATS)}, found {compute!r}")
    if variant in FLOATS and compute != variant:
        raise ExportError(f"the variant {variant} computes in {variant}, and {compute} was asked for")


def _quantizers(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type in {"QuantizeLinear", "DequantizeLinear"}]


def _check_quantized(model: ir.Model, variant: str) -> None:
    """Refuse zero points that cannot be moved to 0, and graphs that are not the variant's."""
    problems = []
    if not _quantizers(model):
        problems.append(f"expected a graph of the variant {variant}, found no quantised layer in it")
    for node in _quantizers(model):
        zero = _zero_point(node)
        wanted = _MIDDLE if zero is not None and zero.dtype == ir.DataType.UINT8 else 0
        if zero is not None and (numbers_of(zero).astype(np.float32) != wanted).any():
            problems.append(f"the zero point of {node.name} must be {wanted} for TensorRT, found another")
    if problems:
        raise ExportError(problems, f"tfm-export quantize --{variant}, which makes the variant anew")


def _zero_point(node: ir.Node) -> ir.Value | None:
    return node.inputs[2] if len(node.inputs) > 2 else None


def _move_zero_points(model: ir.Model) -> None:
    """Store uint8 numbers as int8, 128 lower: with the zero point 128 lower, they stand for the same."""
    moved: dict[ir.Value, ir.Value] = {}
    for node in _quantizers(model):
        zero = _zero_point(node)
        if zero is None or zero.dtype != ir.DataType.UINT8:
            continue
        for index, value in enumerate(node.inputs):
            if value is not None and value.is_initializer() and value.dtype == ir.DataType.UINT8:
                if value not in moved:
                    moved[value] = _lowered(model, value)
                node.replace_input_with(index, moved[value])
        if node.op_type == "QuantizeLinear":
            node.outputs[0].dtype = ir.DataType.INT8
    for value in moved:
        model.graph.initializers.pop(value.name or "")


def _lowered(model: ir.Model, constant: ir.Value) -> ir.Value:
    numbers = (numbers_of(constant).astype(np.int16) - _MIDDLE).astype(np.int8)
    return add_initializer(model, f"{constant.name}_signed", numbers)


def _new_ranges(model: ir.Model, ranges: Mapping[str, float]) -> dict[str, float]:
    """The ranges of what the fp32 graph does not have: what DequantizeLinear gives, and products without their bias."""
    found = {}
    for node in model.graph:
        new = node.outputs[0].name or ""
        if node.op_type == "DequantizeLinear":
            numbers, scale = node.inputs[:2]
            assert numbers is not None
            assert scale is not None
            if numbers.is_initializer():
                largest = float(np.abs(numbers_of(numbers).astype(np.float32)).max(initial=0))
                found[new] = largest * float(numbers_of(scale).max(initial=0))
            elif (source := _quantized(numbers)) in ranges:  # the same numbers, or clipped
                found[new] = ranges[source]
        elif node.op_type in {"Gemm", "MatMul"} and new not in ranges:
            (total,) = node.outputs[0].consumers()
            bias = next(value for value in total.inputs if value is not None and value.is_initializer())
            if (name := total.outputs[0].name or "") in ranges:
                found[new] = ranges[name] + float(np.abs(numbers_of(bias)).max(initial=0))
    return found


def _quantized(numbers: ir.Value) -> str:
    """The name of the value that QuantizeLinear made these numbers of."""
    quantize = numbers.producer()
    assert quantize is not None
    assert quantize.inputs[0] is not None
    return quantize.inputs[0].name or ""
