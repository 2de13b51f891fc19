"""Linear layers that read the same input, as one: query, key and value; the cross-attention of all decoder layers.

    x W1, x W2, x W3 = Split(x [W1 W2 W3])

TensorRT merges such layers by itself. Where their weights are 8-bit integers with a scale a block, it makes 16-bit
floats of them for that, once and for all, and the plan has twice the bytes for them: measured with TensorRT-RTX 1.7.1,
a plan's weights were 3.88 MB instead of 2.88 in the encoder of the g2p example. Merged beforehand, they stay integers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from tfm_export.passes.linears import add_initializer, numbers_of


def merge_block_linears(model: ir.Model) -> int:
    """Merge the products of weights that are quantised in blocks, in place. The numbers stay the same.

    Args:
        model: a graph of a bundle, quantised by `passes.weight_only`.

    Returns:
        How many products there are less.
    """
    gone = 0
    for group in _groups(model):
        _merge(model, group)
        gone += len(group) - 1
    return gone


def _groups(model: ir.Model) -> Iterator[list[ir.Node]]:
    """Products of the same input with weights that can stand side by side, two or more."""
    groups: dict[tuple[object, ...], list[ir.Node]] = {}
    for node in model.graph:
        if node.op_type not in {"Gemm", "MatMul"} or len(node.inputs) != 2:
            continue
        weight = node.inputs[1]
        dequantize = weight.producer() if weight is not None else None
        if dequantize is None or dequantize.op_type != "DequantizeLinear" or len(dequantize.inputs) != 2:
            continue
        block = dequantize.attributes.get("block_size")
        stored = [value for value in dequantize.inputs if value is not None and value.is_initializer()]
        if block is None or len(stored) != 2 or any(len(value.uses()) > 1 for value in (*stored, *dequantize.outputs)):
            continue
        key = (node.inputs[0], node.op_type, block.as_int(), *(value.dtype for value in stored))
        groups.setdefault(key, []).append(node)
    yield from (group for group in groups.values() if len(group) > 1)


def _merge(model: ir.Model, products: list[ir.Node]) -> None:
    first = products[0]
    dequantizers = [_dequantizer(product) for product in products]
    x, name, graph = first.inputs[0], f"{first.name}_merged", model.graph
    merged = []
    for index, what in enumerate(("weight", "scale")):
        parts = [node.inputs[index] for node in dequantizers]
        dtype = parts[0].dtype if parts[0] is not None else None
        arrays = [numbers_of(part) for part in parts]
        merged.append(add_initializer(model, f"{name}_{what}", np.concatenate(arrays, axis=1), dtype))
    attributes = {"axis": 0, "block_size": dequantizers[0].attributes["block_size"].as_int()}
    dequantize = ir.node("DequantizeLinear", merged, attributes, name=f"{name}_dequantize")
    product = ir.node(first.op_type, [x, dequantize.outputs[0]], name=name)
    widths = [_width(node) for node in products]
    sizes = add_initializer(model, f"{name}_sizes", np.array(widths, np.int64))
    split = ir.node("Split", [product.outputs[0], sizes], {"axis": 1}, num_outputs=len(products), name=f"{name}_split")
    was = [node.outputs[0] for node in products]
    rows = was[0].shape[0] if was[0].shape is not None else None
    _describe(dequantize.outputs[0], f"{name}_weight_floats", was[0].dtype, [_height(first), sum(widths)])
    _describe(product.outputs[0], f"{name}_product", was[0].dtype, [rows, sum(widths)])
    graph.insert_before(first, [dequantize, product, split])
    for old, new, width in zip(was, split.outputs, widths, strict=True):
        ir.convenience.replace_all_uses_with(old, new)
        _describe(new, f"{old.name}_part", old.dtype, [rows, width])
    for node in (*products, *dequantizers):
        stored = [value for value in node.inputs if value is not None and value.is_initializer()]
        graph.remove(node, safe=True)
        for value in stored:
            graph.initializers.pop(value.name or "")


def _dequantizer(product: ir.Node) -> ir.Node:
    weight = product.inputs[1]
    assert weight is not None
    node = weight.producer()
    assert node is not None
    return node


def _stored(product: ir.Node) -> tuple[int, int]:
    weight = _dequantizer(product).inputs[0]
    assert weight is not None
    assert weight.const_value is not None
    height, width = weight.const_value.shape.numpy()
    return int(height), int(width)


def _height(product: ir.Node) -> int:
    return _stored(product)[0]


def _width(product: ir.Node) -> int:
    return _stored(product)[1]


def _describe(value: ir.Value, name: str, dtype: ir.DataType | None, shape: list[ir.SymbolicDim | int | None]) -> None:
    assert dtype is not None
    value.name, value.dtype, value.shape = name, dtype, ir.Shape(shape)
