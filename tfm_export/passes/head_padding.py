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
from tfm_export.passes.linears import add_initializer


def pad_heads(model: ir.Model, head_size: int, padded: int) -> None:
    """Widen all heads of a graph in place, with its caches and cross-attention keys and values.

    Args:
        model: encoder.onnx or decoder_step.onnx of any variant.
        head_size: D, of its heads.
        padded: the new head size; if it is the old one, nothing is changed.

    Raises:
        ExportError: the graph's keys and values are not where they should be.
    """
    if padded != head_size:
        _Padding(model, head_size, padded).apply()


class _Padding:
    """The padding of one graph's heads from one size to another."""

    def __init__(self, model: ir.Model, size: int, padded: int) -> None:
        self._model, self._graph, self._size, self._padded = model, model.graph, size, padded
        self._pads: ir.Value | None = None
        self._bounds: list[ir.Value] = []
        self._wide: dict[ir.Value, ir.Value] = {}  # by the value of the old width

    def apply(self) -> None:
        for node in [*self._graph]:
            if node.op_type == "Attention":
                self._widen(node)
        for index, output in enumerate([*self._graph.outputs]):
            if self._has_heads(output):  # cross-attention keys and values: what is scattered is wide already
                name, wide = output.name, self._pad(output)
                output.name, wide.name = f"{name}_narrow", name
                self._graph.outputs[index] = wide

    def _widen(self, node: ir.Node) -> None:
        """Have an Attention node compute in the padded size."""
        if "scale" not in node.attributes:
            node.attributes["scale"] = ir.AttrFloat32("scale", 1 / math.sqrt(self._size))
        query, key, value = node.inputs[:3]
        assert query is not None
        assert key is not None
        assert value is not None
        node.replace_input_with(0, self._pad(query))
        node.replace_input_with(1, self._wide_memory(key))
        node.replace_input_with(2, self._wide_memory(value))
        self._cut(node)

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
        if not self._has_heads(value):
            return value  # wide already
        if value not in self._wide:
            if self._pads is None:
                width = self._padded - self._size
                self._pads = add_initializer(self._model, "head_padding", np.array([0] * 7 + [width], np.int64))
            node = ir.node("Pad", [value, self._pads], name=f"{value.name}_pad")
            self._wide[value] = node.outputs[0]
            self._describe(node.outputs[0], value, self._padded, "wide")
            producer = value.producer()
            if producer is None:
                raise ExportError(f"{value.name}: expected the graph to compute it, found that it is an input")
            self._graph.insert_after(producer, node)
        return self._wide[value]

    def _cut(self, node: ir.Node) -> None:
        """Cut the padding off what an Attention node gives."""
        if not self._bounds:
            for name, number in (("head_start", 0), ("head_end", self._size), ("head_axis", 3)):
                self._bounds.append(add_initializer(self._model, name, np.array([number], np.int64)))
        (attended,) = node.outputs
        readers = [*attended.uses()]
        cut = ir.node("Slice", [attended, *self._bounds], name=f"{attended.name}_cut")
        self._describe(cut.outputs[0], attended, self._size, "cut")
        self._graph.insert_after(node, cut)
        for reader, index in readers:
            reader.replace_input_with(index, cut.outputs[0])
        self._widen_shape(attended)

    def _has_heads(self, value: ir.Value) -> bool:
        """Whether a value is [B, H, T, D] with D not padded yet."""
        return value.shape is not None and len(value.shape) == 4 and value.shape[3] == self._size

    def _widen_shape(self, value: ir.Value) -> None:
        if value.shape is None or len(value.shape) != 4:
            raise ExportError(f"{value.name}: expected keys or values [B, H, T, {self._size}], found {value.shape}")
        value.shape = ir.Shape([*value.shape[:3], self._padded])

    def _describe(self, value: ir.Value, like: ir.Value, width: int, suffix: str) -> None:
        assert like.shape is not None
        assert like.dtype is not None
        value.name, value.dtype, value.shape = f"{like.name}_{suffix}", like.dtype, ir.Shape([*like.shape[:3], width])
