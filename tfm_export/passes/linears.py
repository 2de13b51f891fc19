"""The linear layers of a graph: what quantisation works on. The exporter writes each as one Gemm with a bias."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray


@dataclass(frozen=True)
class Linear:
    """A linear layer: x [R, K] -> x W + b [R, N].

    Attributes:
        name: the graph's name and the weight's, such as "decoder_step/layers.0.self_attention.query".
        node: the Gemm.
    """

    name: str
    node: ir.Node

    @property
    def input(self) -> ir.Value:
        """x [R, K]."""
        value = self.node.inputs[0]
        assert value is not None
        return value

    @property
    def transposed(self) -> bool:
        """The weight lies as [N, K]: it is an embedding table too."""
        attribute = self.node.attributes.get("transB")
        return attribute is not None and bool(attribute.as_int())

    def weight(self) -> NDArray[np.float32]:
        """W [K, N], float32."""
        weight = numbers_of(self.node.inputs[1])
        return weight.T if self.transposed else weight

    @property
    def weight_name(self) -> str:
        """The name of W in its graph."""
        return f"{self.name.partition('/')[2]}.weight"

    def dequantize_weight(self, stored: Sequence[ir.Value], attributes: Mapping[str, int]) -> ir.Value:
        """W [K, N], float32, as a DequantizeLinear with these inputs and attributes gives it in front of the Gemm."""
        node = ir.node("DequantizeLinear", stored, attributes, name=f"{self.weight_name}_dequantize")
        weight = node.outputs[0]
        weight.name, weight.dtype = f"{self.weight_name}_dequantized", ir.DataType.FLOAT
        weight.shape = ir.Shape(self.weight().shape)
        assert self.node.graph is not None
        self.node.graph.insert_before(self.node, node)
        return weight

    def replace(self, x: ir.Value, weight: ir.Value) -> ir.Value:
        """Put a Gemm without a bias and the Add of the bias in the place of the Gemm, and drop W if nothing reads it.

        Args:
            x: [R, K], what is multiplied instead of the Gemm's input.
            weight: [K, N], computed by nodes that are in the graph already.

        Returns:
            The sum, which everything that read the Gemm's output reads now; it keeps that output's name.
        """
        graph, output = self.node.graph, self.node.outputs[0]
        assert graph is not None
        _, float_weight, bias = self.node.inputs
        name, was_output = output.name, output.is_graph_output()
        assert not was_output, "a graph's outputs are never a Gemm's"
        assert output.dtype is not None
        product = ir.node("Gemm", [x, weight], name=f"{self.node.name}_product")
        product.outputs[0].dtype, product.outputs[0].shape = output.dtype, output.shape
        product.outputs[0].name = f"{name}_product"
        total = ir.node("Add", [product.outputs[0], bias], name=f"{self.node.name}_bias")
        total.outputs[0].dtype, total.outputs[0].shape = output.dtype, output.shape
        graph.insert_before(self.node, [product, total])
        ir.convenience.replace_all_uses_with(output, total.outputs[0])
        graph.remove(self.node, safe=True)
        total.outputs[0].name = name
        if float_weight is not None and not float_weight.uses():  # a tied table is still an embedding
            graph.initializers.pop(float_weight.name or "")
        return total.outputs[0]


def linears(model: ir.Model, name: str) -> list[Linear]:
    """The linear layers of a graph, in the order in which they run.

    Args:
        model: an fp32 graph of a bundle.
        name: of the graph: "encoder" or "decoder_step".
    """
    found = []
    for node in model.graph:
        if node.op_type == "Gemm":
            weight = node.inputs[1]
            assert weight is not None
            if not weight.is_initializer():  # an adapter may multiply whatever it likes
                continue
            layer = (weight.name or "").removesuffix(".weight")
            found.append(Linear(f"{name}/{layer}", node))
    return found


def weight_problems(layers: Iterable[Linear]) -> Iterator[str]:
    """Why the weights of layers cannot be quantised: they are not float32, or have numbers that are not finite."""
    for layer in layers:
        if layer.input.dtype != ir.DataType.FLOAT:
            yield f"{layer.name} must be float32, found {layer.input.dtype}"
        elif not np.isfinite(layer.weight()).all():
            yield f"the weight of {layer.name} has numbers that are not finite"


def numbers_of(constant: ir.Value | None) -> NDArray[Any]:
    """The numbers of a constant, in its own type."""
    assert constant is not None
    assert constant.const_value is not None
    return constant.const_value.numpy()


def add_initializer(model: ir.Model, name: str, array: NDArray[Any], dtype: ir.DataType | None = None) -> ir.Value:
    """Put a constant into a graph.

    Args:
        model: the graph's.
        name: of the constant, unique in the graph.
        array: its numbers; for types that numpy does not have, as ml_dtypes types.
        dtype: the ONNX type where the array's does not say it, such as INT4.
    """
    tensor = ir.Tensor(array, dtype=dtype, name=name)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    model.graph.register_initializer(value)
    return value
