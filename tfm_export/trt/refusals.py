"""What TensorRT's ONNX parser would ignore or misread, found before it is asked.

A parser that ignores an input says nothing, and the engine gives wrong numbers: seen with `nonpad_kv_seqlen` of
Attention in TensorRT-RTX 1.7.1. So what is not known to be read is refused, and what came of the graph is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import onnx_ir as ir

from tfm_export.errors import BuildError

# Words of TensorRT's warnings that mean that something of the graph is left out.
IGNORED = ("unused input", "will be ignored", "is ignored")

_4_BITS = {ir.DataType.INT4, ir.DataType.UINT4}
_ATTENTION_ATTRIBUTES = {"scale"}
_SCATTER_ATTRIBUTES = {"axis": -2, "mode": "linear"}


def check_graph(name: str, model: ir.Model) -> None:
    """Make sure that the parser reads all of a graph.

    Args:
        name: of the graph, for messages.
        model: what is to be compiled.

    Raises:
        BuildError: naming every node and input that would be ignored or misread, and all weights that do not compile.
    """
    problems = [f"{name}: {problem}" for problem in _problems(model)]
    if problems:
        raise BuildError(problems, "export the bundle again with this version of tfm-export")
    if odd := [f"{name}: {problem}" for problem in _odd_weights(model)]:
        raise BuildError(odd, "w8, or another precision")


def check_inputs(name: str, expected: Sequence[str], network: Any) -> None:
    """Make sure that a network has the inputs of its graph, and that a layer reads each of them.

    Args:
        name: of the graph, for messages.
        expected: the names of its inputs.
        network: an INetworkDefinition after parsing.

    Raises:
        BuildError: naming the inputs that were dropped, or that nothing reads any more.
    """
    found = [network.get_input(index).name for index in range(network.num_inputs)]
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    operands = [layer.get_input(index) for layer in layers for index in range(layer.num_inputs)]
    read = {operand.name for operand in operands if operand is not None}
    problems = [f"{name}: TensorRT's parser dropped the input {lost}" for lost in expected if lost not in found]
    problems += [f"{name}: TensorRT's parser ignores the input {unread}" for unread in found if unread not in read]
    if problems:
        raise BuildError(problems)


def check_warnings(name: str, warnings: Sequence[str]) -> None:
    """Make sure that TensorRT did not leave anything out.

    Args:
        name: of the graph, for messages.
        warnings: what it said while it parsed or built.

    Raises:
        BuildError: it left something out.
    """
    found = [text for text in warnings if any(words in text.lower() for words in IGNORED)]
    if found:
        raise BuildError([f"{name}: TensorRT leaves something out: {text}" for text in found])


def _problems(model: ir.Model) -> Iterator[str]:
    for value in model.graph.inputs:
        if not value.uses() and not value.is_graph_output():
            yield f"the input {value.name} is read by nothing, and the parser would drop it"
    for node in model.graph:
        if node.domain not in {"", "ai.onnx"}:
            yield f"{node.op_type} {node.name!r} is of the domain {node.domain}, which the parser does not know"
        elif node.op_type == "Attention":
            yield from _attention_problems(node)
        elif node.op_type == "TensorScatter":
            yield from _scatter_problems(node)


def _odd_weights(model: ir.Model) -> Iterator[str]:
    """4-bit weights that do not fill their last byte: "sub-byte quantization with odd tensor volume"."""
    for node in model.graph:
        numbers = node.inputs[0] if node.op_type == "DequantizeLinear" else None
        if numbers is not None and numbers.const_value is not None and numbers.dtype in _4_BITS:
            height, width = numbers.const_value.shape.numpy()
            if height * width % 2:
                yield f"{numbers.name} has {height} x {width} weights of 4 bits; TensorRT takes even numbers of them"


def _attention_problems(node: ir.Node) -> Iterator[str]:
    given = [value is not None for value in node.inputs]
    if given[:4] != [True] * 4 or any(given[4:]):
        extra = [
            name
            for name, there in zip(("past_key", "past_value", "nonpad_kv_seqlen"), given[4:], strict=False)
            if there
        ]
        found = f"{', '.join(extra)} too" if extra else f"{sum(given)} inputs"
        yield f"Attention {node.name!r} must have a query, a key, a value and a mask alone, found {found}"
    if len([value for value in node.outputs if value.uses() or value.is_graph_output()]) > 1:
        yield f"Attention {node.name!r} must have one output: the parser reads no other"
    ranks = [None if value is None or value.shape is None else len(value.shape) for value in node.inputs[:4]]
    if any(rank not in {None, 4} for rank in ranks):
        yield f"Attention {node.name!r} must have inputs of 4 axes, found {ranks}"
    for name in sorted(node.attributes.keys() - _ATTENTION_ATTRIBUTES):
        if node.attributes[name].value:
            yield f"Attention {node.name!r} has {name}, which is not known to be read"


def _scatter_problems(node: ir.Node) -> Iterator[str]:
    for name, expected in _SCATTER_ATTRIBUTES.items():
        found = node.attributes[name].value if name in node.attributes else None
        if found != expected:
            yield f"TensorScatter {node.name!r} must have {name} {expected}, found {found}"
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    if shape is None or len(shape) != 4 or not isinstance(shape[2], int):
        yield f"TensorScatter {node.name!r} must write to a cache of 4 axes with a fixed capacity"
