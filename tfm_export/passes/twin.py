"""The float32 twin of a 16-bit graph: the numbers that 16-bit kernels give, on a runtime that lacks those kernels.

ONNX Runtime's CPU provider has none for bfloat16, and few for float16: there it computes in float32 and leaves out the
roundings between operators, so that a variant looks more precise than it is on a GPU, and sums that overflow do not.
The twin computes every operator in float32, as kernels do inside, and rounds its result to the 16-bit type by a pair of
Casts. ONNX Runtime keeps such pairs, because they change numbers.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tfm_export.errors import ExportError
from tfm_export.passes.retype import MOVES, TYPES

_FLOAT = ir.DataType.FLOAT
_16_BITS = frozenset(TYPES.values())

# What these give are numbers that they read, or 0: rounded already.
_EXACT = MOVES | {"Pad", "Relu", "TensorScatter", "Where"}


def float32_twin(model: ir.Model) -> ir.Model:
    """Turn a graph of a float16 or bfloat16 variant into one in float32 that gives the same numbers, in place.

    Its inputs and outputs are those of the fp32 graph, and it takes the place of one. What the twin of one graph gives
    is rounded when another twin reads it. Inside the operator Attention nothing is rounded: kernels differ in that.

    Args:
        model: a graph that `tfm_export.passes.retype.retype` made.

    Returns:
        The same model.

    Raises:
        ExportError: there is nothing of 16 bits in the graph.
    """
    nodes = [*model.graph]
    values = [*model.graph.inputs, *model.graph.initializers.values(), *(v for node in nodes for v in node.outputs)]
    if not any(value.dtype in _16_BITS for value in values):
        raise ExportError("expected a float16 or bfloat16 graph, found neither type in it", "use the graph as it is")
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        if value.dtype in _16_BITS:
            _widen(value)
    for node in nodes:
        for value in node.outputs:
            if value.dtype in _16_BITS:
                _round(node, value)
    return model


def _widen(value: ir.Value) -> None:
    if value.const_value is not None:
        value.const_value = ir.Tensor(value.const_value.numpy().astype(np.float32), name=value.name)
    value.dtype = _FLOAT


def _round(node: ir.Node, value: ir.Value) -> None:
    """Make a node's 16-bit result a float32 value, whose numbers are of that type all the same."""
    type_, readers, graph = value.dtype, [*value.uses()], node.graph
    assert type_ is not None
    assert graph is not None
    if node.op_type in _EXACT:
        value.dtype = _FLOAT
        return
    assert not value.is_graph_output(), "a graph's 16-bit outputs are moved or scattered last"
    casts = []
    if node.op_type != "Cast":
        value.dtype = _FLOAT
        casts.append(_cast(value, type_, f"{value.name}_{type_.name.lower()}"))
    casts.append(_cast(casts[-1].outputs[0] if casts else value, _FLOAT, f"{value.name}_rounded"))
    graph.insert_after(node, casts)
    for reader, index in readers:
        reader.replace_input_with(index, casts[-1].outputs[0])


def _cast(value: ir.Value, type_: ir.DataType, name: str) -> ir.Node:
    node = ir.node("Cast", [value], {"to": type_}, name=f"cast_{name}")
    node.outputs[0].name, node.outputs[0].shape, node.outputs[0].dtype = name, value.shape, type_
    return node
