"""Wider attention heads, padded with zeros: 16-bit attention kernels do not take every head size.

Zeros add nothing to a query times a key, and what they add to the attended values is cut off again, so the graph gives
the same numbers. The scale of the products, which comes from the head size, is written down before that changes.
Caches and cross-attention keys and values are as wide as the heads: nothing is padded twice, or at every step.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from tfm_export.errors import ExportError
from tfm_export.graph import padded_head_size
from tfm_export.passes.linears import add_initializer


def pad_heads(model: ir.Model, float_type: str) -> None:
    """Widen all heads of a graph in place, with its caches and cross-attention keys and values.

    The heads of the encoder and those of the decoder, which encoder.onnx has both, may be of two sizes.

    Args:
        model: encoder.onnx or decoder_step.onnx of any variant.
        float_type: what the engine computes in where nothing is quantised.

    Raises:
        ExportError: the graph's keys and values are not where they should be.
    """
    _Padding(model, float_type).apply()


class _Padding:
    """The padding of one graph's heads."""

    def __init__(self, model: ir.Model, float_type: str) -> None:
        self._model, self._graph, self._type = model, model.graph, float_type
        self._numbers: dict[str, ir.Value] = {}  # operands of Pad and Slice, by name
        self._wide: dict[ir.Value, ir.Value] = {}  # by the value of the old width

    def apply(self) -> None:
        for node in [*self._graph]:
            if node.op_type == "Attention":
                self._widen(node)
        for index, output in enumerate([*self._graph.outputs]):
            # Cross-attention keys and values: what is scattered is wide already.
            if len(output.shape or ()) == 4 and self._padded(output) != _head_size(output):
                name, wide = output.name, self._pad(output)
                output.name, wide.name = f"{name}_narrow", name
                self._graph.outputs[index] = wide

    def _widen(self, node: ir.Node) -> None:
        """Have an Attention node compute in the padded size."""
        query, key, value = node.inputs[:3]
        assert query is not None
        assert key is not None
        assert value is not None
        size = _head_size(query)
        if self._padded(query) == size:
            return
        if "scale" not in node.attributes:
            node.attributes["scale"] = ir.AttrFloat32("scale", 1 / math.sqrt(size))
        node.replace_input_with(0, self._pad(query))
        node.replace_input_with(1, self._wide_memory(key))
        node.replace_input_with(2, self._wide_memory(value))
        self._cut(node, size)

    def _wide_memory(self, value: ir.Value) -> ir.Value:
        """A key or value in the padded size: made wide where it is written, not where it is read."""
        producer = value.producer()
        if producer is None:
            self._widen_shape(value)
        elif producer.op_type == "Cast":
            (narrow,) = producer.inputs
            assert narrow is not None
            producer.replace_input_with(0, self._wide_memory(narrow))
            self._widen_shape(value)
        elif producer.op_type == "TensorScatter":
            cache, update = producer.inputs[:2]
            assert cache is not None
            assert update is not None
            producer.replace_input_with(0, self._wide_memory(cache))
            producer.replace_input_with(1, self._pad(update))
            self._widen_shape(value)
        else:
            return self._pad(value)
        return value

    def _pad(self, value: ir.Value) -> ir.Value:
        """A value [..., D] with zeros behind every row: [..., padded]. Once for all who read it."""
        size, padded = _head_size(value), self._padded(value)
        if size == padded:
            return value  # wide already
        if value not in self._wide:
            pads = self._constant(f"head_padding_{padded - size}", *[0] * 7, padded - size)
            node = ir.node("Pad", [value, pads], name=f"{value.name}_pad")
            self._wide[value] = node.outputs[0]
            self._describe(node.outputs[0], value, padded, "wide")
            producer = value.producer()
            if producer is None:
                raise ExportError(f"{value.name}: expected the graph to compute it, found that it is an input")
            self._graph.insert_after(producer, node)
        return self._wide[value]

    def _cut(self, node: ir.Node, size: int) -> None:
        """Cut the padding off what an Attention node gives."""
        start, end, axis = (self._constant(f"head_{number}", number) for number in (0, size, 3))
        (attended,) = node.outputs
        readers = [*attended.uses()]
        cut = ir.node("Slice", [attended, start, end, axis], name=f"{attended.name}_cut")
        self._describe(cut.outputs[0], attended, size, "cut")
        self._graph.insert_after(node, cut)
        for reader, index in readers:
            reader.replace_input_with(index, cut.outputs[0])
        self._widen_shape(attended)

    def _constant(self, name: str, *numbers: int) -> ir.Value:
        """Numbers that nodes take; once for all of them."""
        if name not in self._numbers:
            self._numbers[name] = add_initializer(self._model, name, np.array(numbers, np.int64))
        return self._numbers[name]

    def _padded(self, value: ir.Value) -> int:
        return padded_head_size(_head_size(value), self._type)

    def _widen_shape(self, value: ir.Value) -> None:
        padded = self._padded(value)
        assert value.shape is not None
        value.shape = ir.Shape([*value.shape[:3], padded])

    def _describe(self, value: ir.Value, like: ir.Value, width: int, suffix: str) -> None:
        assert like.shape is not None
        assert like.dtype is not None
        value.name, value.dtype, value.shape = f"{like.name}_{suffix}", like.dtype, ir.Shape([*like.shape[:3], width])


def _head_size(value: ir.Value) -> int:
    """D of keys, values or queries [B, H, T, D]."""
    size = value.shape[3] if value.shape is not None and len(value.shape) == 4 else None
    if not isinstance(size, int):
        raise ExportError(f"{value.name}: expected keys, values or queries [B, H, T, D], found {value.shape}")
    return size
