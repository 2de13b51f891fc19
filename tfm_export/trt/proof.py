"""Proof that a plan is what was asked for: the layers of its network, counted by their types, and the plan's size.

TensorRT 11 has no weak typing, and a tool that sets the flags of old writes an engine in float32 and says nothing. So
what was built is looked at: the network that the builder was given, and the bytes that came out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx_ir as ir

from tfm_export.errors import BuildError
from tfm_export.graph import cache_output_name
from tfm_export.precision import PRECISIONS
from tfm_export.trt.network_source import NetworkSource

MOST_KEPT = 0.5  # of the products may be in other numbers, which is what the stage quantize accepts

# A plan of TensorRT-RTX holds its weights as they are, and its kernels as source text. What is left without the text
# is the weights and a little more: with version 1.7.1 -1 to 240 kB, at most 24 kB an attention, for the tiny models of
# the tests, the g2p and the base model in every precision.
SHARE_OFF = 0.15
BYTES_OFF = 64_000
BYTES_OFF_AN_ATTENTION = 32_000

_TEXT = 64  # printable characters in a row; weights do not look like that
_CHUNK = 1 << 24
_TYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16"}  # the others are called what ONNX calls them
_ONNX_TYPES = {ir.DataType.FLOAT: "float32", ir.DataType.FLOAT8E4M3FN: "fp8"}
# Through these, numbers pass unchanged.
_PASSING_LAYERS = {"SHUFFLE", "IDENTITY"}
_PASSING_NODES = {"Reshape", "Transpose", "Identity", "Squeeze", "Unsqueeze"}


@dataclass(frozen=True, kw_only=True)
class Network:
    """The layers of a network that matter, counted.

    Attributes:
        products: matrix products by the types of their sides, such as "float16 x int8": of what a DequantizeLinear
            gives, the type that it reads.
        attention: attention layers by the type of their query.
        caches: the inputs that are updated in place and given back as outputs.
    """

    products: Counter[str]
    attention: Counter[str]
    caches: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class PlanProof:
    """What was found of a plan.

    Attributes:
        plan: its name.
        asked: how products were to be computed, such as "float16 x int8".
        products: how they are computed, counted.
        attention: the types of attention layers, counted.
        fused: every attention in 16 bits is one kernel.
        caches: updated in place.
        weight_bytes: of the graph's constants.
        plan_bytes: of the plan.
        stored_bytes: of the plan without its kernels; None where that cannot be told.
    """

    plan: str
    asked: str
    products: dict[str, int]
    attention: dict[str, int]
    fused: bool
    caches: int
    weight_bytes: int
    plan_bytes: int
    stored_bytes: int | None

    def facts(self) -> dict[str, Any]:
        """For engine.json."""
        return asdict(self)


def asked_product(precision: str, compute: str) -> str:
    """How the products of a precision are computed, such as "float16 x int8"."""
    row, float_type = PRECISIONS[precision], PRECISIONS[compute].float_type
    weight_type = row.weight_type if row.quantized else float_type
    return f"{weight_type if row.quantizes_activations else float_type} x {weight_type}"


def prove(
    source: NetworkSource, precision: str, compute: str, found: Network, plan: Path, *, fused: bool, readable: bool
) -> PlanProof:
    """Compare what was built with what was asked for.

    Args:
        source: the graph.
        precision: whose numbers it was to have.
        compute: what is computed in where nothing is quantised.
        found: what TensorRT was given.
        plan: the file that came out.
        fused: attention in 16 bits was not decomposed.
        readable: the plan is of a kind whose kernels can be told from its weights.

    Raises:
        BuildError: naming everything that is not as it should be.
    """
    asked, size = asked_product(precision, compute), plan.stat().st_size
    stored = size - _text_bytes(plan) if readable else None
    expected = expected_network(source.model)
    problems = [
        *_product_problems(asked, expected, found),
        *_layer_problems(source, compute, expected, found),
        *_size_problems(source, stored, sum(expected.attention.values())),
    ]
    if problems:
        raise BuildError(
            [f"{source.plan} is not what was asked for: {problem}" for problem in problems],
            "report this with the version of TensorRT",
        )
    return PlanProof(
        plan=source.plan,
        asked=asked,
        products=dict(found.products),
        attention=dict(found.attention),
        fused=fused,
        caches=len(found.caches),
        weight_bytes=source.weight_bytes,
        plan_bytes=size,
        stored_bytes=stored,
    )


def look_at(trt: ModuleType, network: Any) -> Network:
    """Count the layers of an INetworkDefinition.

    Args:
        trt: the TensorRT module.
        network: after parsing.
    """
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    producers = {layer.get_output(i).name: layer for layer in layers for i in range(layer.num_outputs)}
    inputs = {network.get_input(index).name for index in range(network.num_inputs)}
    outputs = {network.get_output(index).name for index in range(network.num_outputs)}
    products: Counter[str] = Counter()
    attention: Counter[str] = Counter()
    caches = set()
    for layer in layers:
        if layer.type == trt.LayerType.MATRIX_MULTIPLY:
            products[" x ".join(_layer_type(trt, layer.get_input(side), producers) for side in (0, 1))] += 1
        elif layer.type == trt.LayerType.ATTENTION_INPUT:
            attention[type_name(layer.get_input(0).dtype)] += 1
        elif layer.type == trt.LayerType.KV_CACHE_UPDATE:
            name = layer.get_input(0).name
            if name in inputs and layer.get_output(0).name == cache_output_name(name) in outputs:
                caches.add(name)
    return Network(products=products, attention=attention, caches=frozenset(caches))


def expected_network(model: ir.Model) -> Network:
    """What TensorRT should make of a graph."""
    products: Counter[str] = Counter()
    attention: Counter[str] = Counter()
    caches = set()
    for node in model.graph:
        if node.op_type in {"Gemm", "MatMul"}:
            products[" x ".join(_node_type(side) for side in node.inputs[:2])] += 1
        elif node.op_type == "Attention":
            query = node.inputs[0]
            attention[_onnx_type(query)] += 1
        elif node.op_type == "TensorScatter" and node.inputs[0] is not None:
            caches.add(node.inputs[0].name or "")
    return Network(products=products, attention=attention, caches=frozenset(caches))


def _product_problems(asked: str, expected: Network, found: Network) -> Iterator[str]:
    if found.products != expected.products:
        yield f"the graph has the products {_counts(expected.products)}, TensorRT's network {_counts(found.products)}"
    total = sum(expected.products.values())
    if expected.products[asked] < (1 - MOST_KEPT) * total:
        yield f"{expected.products[asked]} of {total} products are {asked}; there are {_counts(expected.products)}"


def _layer_problems(source: NetworkSource, compute: str, expected: Network, found: Network) -> Iterator[str]:
    if found.attention != expected.attention:
        yield f"the graph has attention in {_counts(expected.attention)}, TensorRT's network {_counts(found.attention)}"
    float_type = PRECISIONS[compute].float_type
    asked, total = expected.attention[float_type], sum(expected.attention.values())
    if asked < (1 - MOST_KEPT) * total:
        yield f"{asked} of {total} attention layers are in {float_type}"
    caches = {spec.name for spec in source.inputs if spec.name.startswith("self_") and spec.name != "self_mask"}
    if missing := sorted(caches - found.caches):
        yield f"not updated in place: {', '.join(missing)}"


def _size_problems(source: NetworkSource, stored: int | None, attentions: int) -> Iterator[str]:
    if stored is None:
        return
    weights = source.weight_bytes
    allowance = SHARE_OFF * weights + BYTES_OFF + BYTES_OFF_AN_ATTENTION * attentions
    if abs(stored - weights) > allowance:
        yield (
            f"its weights take {stored / 1e6:,.2f} MB, and the graph's {weights / 1e6:,.2f} MB: "
            f"more than {allowance / 1e6:,.2f} MB apart, so they are stored in other numbers, or more than once"
        )


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counter.items())) or "none"


def type_name(kind: Any) -> str:
    """What one of TensorRT's types is called here, such as "float16"."""
    name = str(kind).rpartition(".")[2]
    return _TYPES.get(name, name.lower())


def _layer_type(trt: ModuleType, tensor: Any, producers: dict[str, Any]) -> str:
    """The type of a tensor of the network; of what is dequantised, the type that it was quantised to."""
    value, kinds = tensor, {getattr(trt.LayerType, name) for name in _PASSING_LAYERS}
    while (layer := producers.get(value.name)) is not None and layer.type in kinds:
        value = layer.get_input(0)
    if layer is not None and layer.type == trt.LayerType.DEQUANTIZE:
        return type_name(layer.get_input(0).dtype)
    return type_name(tensor.dtype)


def _node_type(value: ir.Value | None) -> str:
    """The type of a value of the graph; of what is dequantised, the type that it was quantised to."""
    source = value
    while source is not None and (node := source.producer()) is not None and node.op_type in _PASSING_NODES:
        source = node.inputs[0]
    node = source.producer() if source is not None else None
    if node is not None and node.op_type == "DequantizeLinear":
        return _onnx_type(node.inputs[0])
    return _onnx_type(value)


def _onnx_type(value: ir.Value | None) -> str:
    dtype = None if value is None else value.dtype
    return str(dtype) if dtype is None else _ONNX_TYPES.get(dtype, dtype.name.lower())


def _text_bytes(path: Path) -> int:
    """The bytes of a file that are text: blocks of 64 printable characters."""
    printable = np.zeros(256, np.bool_)
    printable[[*range(32, 127), *b"\t\n\r"]] = True
    found = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            numbers = np.frombuffer(chunk, np.uint8)
            blocks = printable[numbers[: len(numbers) // _TEXT * _TEXT]].reshape(-1, _TEXT)
            found += _TEXT * int(blocks.all(axis=1).sum())
    return found
