"""A graph's float32 numbers as float16 or bfloat16: weights, activations, caches. What the type cannot hold stays.

Every node computes in one of the two types, and a Cast stands where a value passes from one to the other. Layer norms
and the log-softmax compute in float32, for they sum many numbers; so do nodes that read or write a number that leaves
the type's range, and so does what is computed of whole numbers and masks alone. All other Gemm, MatMul and Attention
nodes compute in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from tfm_export import graph
from tfm_export.errors import ExportError
from tfm_export.passes.linears import add_initializer, numbers_of
from tfm_export.precision import FLOATS_16_BIT, PRECISIONS, FloatType

TYPES = {p.float_type: ir.DataType[p.float_type.upper()] for p in map(PRECISIONS.__getitem__, FLOATS_16_BIT)}

# What was measured is a sample, and other inputs go further; and some kernels add up products in 16 bits, where partial
# sums go further than the sum. So values have to stay this many times below the type's largest number.
HEADROOM = 4.0

# Operators that give numbers of their first input and change none.
MOVES = frozenset({"Expand", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})

# What is computed of positions, masks and sizes, up to where activations or weights come in.
WHOLE_NUMBERS = "numbers of positions and masks"

# What these give are numbers of weights and activations, although whole numbers may be all that they read besides.
_OF_WEIGHTS = frozenset({"DequantizeLinear", "GatherElements", "GatherND", "Gemm"})

_FLOAT = ir.DataType.FLOAT
_KEPT_OPERATORS = {
    "LayerNormalization": "it adds up the squares of a whole row",
    "RMSNormalization": "it adds up the squares of a whole row",
    "LogSoftmax": "it adds up the exponentials of a whole vocabulary",
}
_NO_LAYERS = graph.Dimensions(
    source_vocabulary_size=1, target_vocabulary_size=1, decoder_layers=0, heads=1, head_size=1, candidates=1
)
_FLOAT32_OUTPUTS = frozenset(
    spec.name for spec in graph.decoder_step_outputs(_NO_LAYERS, "float16", attention=True) if spec.dtype == "float32"
)


@dataclass(frozen=True)
class Retyped:
    """What `retype` did.

    Attributes:
        kept: what stays in float32, and why: values and weights by name; layer norms and the log-softmax, with their
            weights, by operator; `WHOLE_NUMBERS`.
    """

    kept: dict[str, str]


def retype(
    model: ir.Model,
    float_type: FloatType,
    *,
    ranges: Mapping[str, float] | None = None,
    quantized: bool = False,
) -> Retyped:
    """Change a float32 graph of a bundle to another type, in place.

    Its inputs and outputs are then those of `graph`'s tables with that float_type.

    Args:
        model: encoder.onnx, decoder_step.onnx or decoder_step_attention.onnx in fp32.
        float_type: the type; with float32 the graph stays as it is.
        ranges: the largest absolute value of every computed float32 value on real decode traces, by its name in this
            graph; what `MOVES` and TensorScatter give need not be there. A value that is missing stays in float32.
            None: every value is taken to fit.
        quantized: accept QuantizeLinear and DequantizeLinear; their scales and their float sides get the type.

    Raises:
        ExportError: the graph is not a float32 graph, or its caches or cross-attention keys and values, which have the
            type whatever else stays, do not fit. The graph is as it was.
    """
    if float_type == "float32":
        return Retyped({})
    _check_form(model, quantized=quantized)
    plan = _Plan(model, TYPES[float_type], ranges)
    _retype_constants(model, plan)
    for value in model.graph.inputs:
        if value.dtype == _FLOAT:
            value.dtype = plan.type
    for node, type_ in plan.types.items():
        for value in node.outputs:
            if value.dtype == _FLOAT:
                value.dtype = type_
    _insert_casts(model, plan)
    return Retyped(plan.kept)


def source(value: ir.Value) -> ir.Value:
    """Where the numbers of a value come from: the value behind all operators that only move them."""
    while (node := value.producer()) is not None and node.op_type in MOVES:
        moved = node.inputs[0]
        assert moved is not None
        value = moved
    return value


def _check_form(model: ir.Model, *, quantized: bool) -> None:
    nodes = [*model.graph]
    values = [*model.graph.inputs, *model.graph.initializers.values(), *(v for node in nodes for v in node.outputs)]
    types = {value.dtype for value in values}
    problems = [f"expected float32 numbers, found {t.name.lower()}" for t in TYPES.values() if t in types]
    if _FLOAT not in types:
        problems.append("expected float32 numbers, found none")
    found = {node.op_type for node in nodes} & {"QuantizeLinear", "DequantizeLinear"}
    if found and not quantized:
        problems.append(f"expected a graph that is not quantised, found {' and '.join(sorted(found))}")
    if problems:
        raise ExportError(problems, "start from the fp32 graphs of a bundle")


class _Plan:
    """What every node computes in; made before anything is changed.

    Attributes:
        type: the 16-bit type.
        types: of every node that reads or gives floats.
        kept: see `Retyped`.
    """

    def __init__(self, model: ir.Model, type_: ir.DataType, ranges: Mapping[str, float] | None) -> None:
        self.type, self.kept = type_, dict[str, str]()
        self.types: dict[ir.Node, ir.DataType] = {}
        self._graph, self._ranges = model.graph, ranges
        self._moving = [node for node in model.graph if node.op_type in MOVES and _has_floats(node)]
        self._computing = [node for node in model.graph if node.op_type not in MOVES | {"Shape"} and _has_floats(node)]
        self._readers: dict[ir.Value, list[ir.Node]] = {}  # of a value, and of what moves its numbers
        for node in self._computing:
            for value in _floats(node.inputs):
                self._readers.setdefault(source(value), []).append(node)
        self._check_caches()
        self._keep_operators()
        self._keep_whole_numbers()
        self._keep_constants()
        self._keep_values()
        for node in self._computing:
            self.types.setdefault(node, type_)
        self.types |= {node: self._type_of_moves(source(node.outputs[0])) for node in self._moving}

    def _keep(self, nodes: Iterable[ir.Node | None]) -> None:
        self.types.update((node, _FLOAT) for node in nodes if node is not None)

    def _check_caches(self) -> None:
        """Refuse keys and values that do not fit: whatever computes them, they are handed on in the type."""
        problems = []
        for output in self._graph.outputs:
            if output.dtype == _FLOAT and output.name not in _FLOAT32_OUTPUTS:
                problem = self._value_problem(source(output))
                problems += [f"{output.name}: {problem}"] if problem else []
        if problems:
            raise ExportError(problems, "bfloat16, which has the range of float32; or ranges of every value")

    def _keep_operators(self) -> None:
        """Layer norms, the log-softmax, and whatever gives an output that is always float32."""
        for node in self._computing:
            if node.op_type in _KEPT_OPERATORS:
                self.kept[node.op_type] = _KEPT_OPERATORS[node.op_type]
                self._keep([node])
        self._keep(source(value).producer() for value in self._graph.outputs if value.name in _FLOAT32_OUTPUTS)

    def _keep_whole_numbers(self) -> None:
        """What is computed of whole numbers and masks alone: the angles of sinusoids, -1e9 where a mask is 0.

        A type of 16 bits holds no whole number above 2,048, or 256, for sure; and -1e9 would be an infinity before it
        is multiplied with 0.
        """
        found: set[ir.Node] = set()
        for node in self._computing:
            operands = [value for value in node.inputs if value is not None and not value.is_initializer()]
            of_floats = all(source(value).producer() in found for value in _floats(operands))
            if operands and of_floats and node.op_type not in _OF_WEIGHTS:
                found.add(node)
        if found:
            self.kept[WHOLE_NUMBERS] = f"{self.type.name.lower()} does not hold every whole number"
            self._keep(found)

    def _keep_constants(self) -> None:
        """Weights that do not fit; and factors that would be rounded, an error that all products share."""
        for name, value in self._graph.initializers.items():
            readers = [node for node in self._readers.get(value, ()) if self.types.get(node) != _FLOAT]
            if value.dtype != _FLOAT or all(node.op_type == "Where" for node in readers):
                continue  # Where fills what is masked: any number far below the others does
            numbers = numbers_of(value)
            problem = self._problem(float(np.abs(numbers).max(initial=0, where=np.isfinite(numbers))), 1.0)
            if not problem and numbers.size == 1 and _rounded(numbers, self.type).astype(np.float32) != numbers:
                readers = [node for node in readers if node.op_type in {"Mul", "Div"}]
                problem = f"{numbers.item():.7g} is no number of {self.type.name.lower()}" if readers else None
            if problem:
                self.kept[name] = problem
                self._keep(readers)

    def _keep_values(self) -> None:
        for node in self._computing:
            for value in _floats(node.outputs):
                parties = [node, *self._readers.get(value, ())]
                if all(self.types.get(party) == _FLOAT for party in parties):
                    continue
                if problem := self._value_problem(value):
                    self.kept[value.name or ""] = problem
                    self._keep(parties)

    def _value_problem(self, value: ir.Value) -> str | None:
        """Why a computed value does not fit; None if it does."""
        node = value.producer()
        if node is None or self._ranges is None:
            return None
        if node.op_type in {"TensorScatter", "Where"}:  # a cache holds what is written to it, or is masked
            merged = [operand for operand in _floats(node.inputs) if not operand.is_initializer()]
            if merged:
                return self._value_problem(source(merged[-1]))
        name = value.name or ""
        if name not in self._ranges:
            return "its range was not measured"
        problem = self._problem(float(self._ranges[name]), HEADROOM)
        return problem and f"{_layer(node)} {problem}"

    def _problem(self, largest: float, headroom: float) -> str | None:
        """Why numbers up to `largest` do not fit; None if they do."""
        name, limit = self.type.name.lower(), float(self.type.max)
        if not largest * headroom <= limit:
            margin = f", {headroom:g} times of which are kept free" if headroom > 1 else ""
            return f"reaches {largest:.3g}, and {name} ends at {limit:.5g}{margin}"
        if 0 < largest < float(self.type.tiny):
            return f"stays within {largest:.1g}, where {name} has few digits or none"
        return None

    def _type_of_moves(self, origin: ir.Value) -> ir.DataType:
        """The type in which numbers are moved: the producer's or the readers', so that they are cast once at most."""
        wanted = {self.types[node] for node in self._readers.get(origin, ())}
        wanted |= {
            _FLOAT if output.name in _FLOAT32_OUTPUTS else self.type
            for output in self._graph.outputs
            if source(output) is origin
        }
        producer = origin.producer()
        if origin.is_initializer():
            direct = {self.types[node] for node in origin.consumers() if node in self._computing}
            return _FLOAT if origin.name in self.kept or _FLOAT in direct else self.type
        from_float = producer is not None and self.types[producer] == _FLOAT
        return _FLOAT if wanted == {_FLOAT} or (from_float and _FLOAT in wanted) else self.type


def _floats(values: Iterable[ir.Value | None]) -> list[ir.Value]:
    return [value for value in values if value is not None and value.dtype == _FLOAT]


def _has_floats(node: ir.Node) -> bool:
    return bool(_floats(node.outputs) or _floats(node.inputs))


def _rounded(numbers: NDArray[np.float32], type_: ir.DataType) -> NDArray[Any]:
    """The nearest numbers of a type; beyond its range its largest, for what fills masked positions; infinities stay."""
    limit = np.float32(type_.max)
    return np.where(np.isinf(numbers), numbers, np.clip(numbers, -limit, limit)).astype(type_.numpy())


def _layer(node: ir.Node) -> str:
    """What to call a node in a message: the layer whose weights it has, or its operator."""
    weights = [value.name or "" for value in node.inputs if value is not None and value.is_initializer()]
    return next((name.removesuffix(".weight") for name in weights if name.endswith(".weight")), node.op_type)


def _retype_constants(model: ir.Model, plan: _Plan) -> None:
    """Give every constant the type of the nodes that read it; one that both kinds read is there in both."""
    for value in [*model.graph.initializers.values()]:
        if value.dtype != _FLOAT:
            continue
        readers = [(use.node, use.idx) for use in value.uses() if plan.types.get(use.node) == plan.type]
        if not readers:
            continue
        name = value.name or ""
        if len(readers) == len(value.uses()):
            value.const_value = ir.Tensor(_rounded(numbers_of(value), plan.type), name=name)
            value.dtype = plan.type
            continue
        copy = add_initializer(model, f"{name}_{plan.type.name.lower()}", _rounded(numbers_of(value), plan.type))
        for node, index in readers:
            node.replace_input_with(index, copy)


def _insert_casts(model: ir.Model, plan: _Plan) -> None:
    """Cast every value that a node wants in the other type, once for all such nodes."""
    casts: dict[ir.Value, ir.Value] = {}
    names = {_FLOAT: "float32", plan.type: plan.type.name.lower()}
    for node, type_ in plan.types.items():
        for index, value in enumerate(node.inputs):
            if value is None or value.dtype not in names or value.dtype == type_:
                continue
            if value not in casts:
                name = f"{value.name}_{names[type_]}"
                cast = ir.node("Cast", [value], {"to": type_}, name=f"cast_{name}")
                casts[value] = cast.outputs[0]
                casts[value].name, casts[value].shape, casts[value].dtype = name, value.shape, type_
                producer = value.producer()
                if producer is None:
                    model.graph.insert_before(model.graph[0], cast)
                else:
                    model.graph.insert_after(producer, cast)
            node.replace_input_with(index, casts[value])
