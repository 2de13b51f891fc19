"""A bundle's graphs in float64, and how far rounding may take them: the yardstick that hangs on no processor.

ONNX's reference implementation runs the graphs that are in the bundle, with every number in float64. So a graph can be
compared with PyTorch in float64, where the two differ by some 1e-13 if it is right.

What float32 can hold is measured on the same graphs. Every operation's result is moved at random by at most what
rounding can move it: a sum of products by epsilon times the sum of their magnitudes, |x| |w| (Higham, Accuracy and
Stability of Numerical Algorithms, section 3.1: the bound for a sum in any order is a small multiple of that), anything
else by epsilon of what it reads and gives. What then comes out differently is what rounding explains in this model, at
these inputs: large where a model is ill-conditioned, small where it is not. It is Monte Carlo arithmetic (Parker, 1997)
with the bound of any order of summation, since each processor, library and number of threads sums in its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_attention import Attention_24 as ReferenceAttention

from tfm_export import graph
from tfm_export.graph_files import read_graph
from tfm_export.runtime.step_model import Ids, Mask, StepOutput

Array = NDArray[Any]

# Weights up to this size are kept in float64, which doubles them; larger ones are cast whenever they are read.
KEPT_BYTES = 1 << 30

# What a scalar was before it was rounded to float32 is known if it has at most so many significant bits (0.125), or so
# many digits (1e-5), or is the root of a whole number up to so much or the inverse of one (1 / sqrt(48)).
FEW_BITS, FEW_DIGITS, LARGEST_ROOTED = 12, 6, 1 << 16
# Of the scores that are computed at once, in float64.
ATTENTION_BYTES = 1 << 27

# Operators that round nothing: they move numbers, or give integers.
EXACT = frozenset(
    """
    Abs Cast CastLike Concat Constant ConstantOfShape Expand Flatten Gather GatherElements GatherND Identity Max Min Neg
    Pad Range Relu Reshape ScatterElements ScatterND Shape Size Slice Split Squeeze TensorScatter Tile TopK Transpose
    Trilu Unsqueeze Where
    """.split()  # noqa: SIM905 (35 quoted names are no easier to read)
)
# Operators that sum products, or numbers: epsilon times the same sum of magnitudes bounds what rounding does.
SUMS = frozenset(("Conv", "ConvTranspose", "CumSum", "Einsum", "Gemm", "MatMul", "ReduceMean", "ReduceSum"))


@dataclass(frozen=True, kw_only=True)
class Moves:
    """How far the numbers of a graph are moved, at random, to see what that changes.

    Attributes:
        results: of each operation, relative to the size of what it is made of.
        constants: scalars and attributes that the graph stores in float32, where PyTorch computes with what Python
            holds in float64, and which are no numbers that anybody would recognise; relative to their own size.
        tables: whether all other constants are moved as well, weights among them.
        seed: of the moves.
    """

    results: float = 0.0
    constants: float = 0.0
    tables: bool = False
    seed: int = 0


STILL = Moves()


class Float64Graph:
    """One graph of a bundle, computed in float64.

    Args:
        proto: the graph without its constants.
        constants: by name.
        moves: how far numbers are moved.
    """

    def __init__(self, proto: onnx.ModelProto, constants: Mapping[str, Array], moves: Moves = STILL) -> None:
        self._proto, self._moves, self._random = proto, moves, np.random.default_rng(moves.seed)
        self._constants, self._directions = dict(constants), dict[float, Array]()
        self._nodes = ReferenceEvaluator(proto, new_ops=[*OPERATORS]).rt_nodes_
        self._stored = {*self._constants, *(o for n in self._nodes if n.op_type == "Constant" for o in n.output)}
        self._restore_constants()
        self._last_use = {name: number for number, node in enumerate(self._nodes) for name in node.input}
        self._outputs = [value.name for value in proto.graph.output]

    @classmethod
    def read(cls, path: Path) -> Float64Graph:
        """A graph from disk; its weights lie where it says."""
        tensors = {name: value.const_value for name, value in read_graph(path).graph.initializers.items()}
        constants = {name: tensor.numpy() for name, tensor in tensors.items() if tensor is not None}
        if sum(constant.nbytes for constant in constants.values()) <= KEPT_BYTES:
            constants = {name: _in_float64(constant) for name, constant in constants.items()}
        proto = onnx.load(path, load_external_data=False)
        del proto.graph.initializer[:]
        return cls(proto, constants)

    def moved(self, moves: Moves) -> Float64Graph:
        """The graph with numbers that are moved; it shares its constants with this one, but for those that are."""
        return Float64Graph(self._proto, self._constants, moves)

    def _restore_constants(self) -> None:
        """Compute with what constants were before they were rounded to float32, or with what they may have been."""
        for name, constant in self._constants.items():
            if _is_float(constant) and (constant.size == 1 or self._moves.tables):
                self._constants[name] = self._before_float32(constant)
        for node in self._nodes:
            for attribute in node.onnx_node.attribute:
                if attribute.type == onnx.AttributeProto.FLOAT:
                    setattr(node, attribute.name, float(self._before_float32(np.asarray(attribute.f))))

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """What the graph gives.

        Args:
            feeds: an array for each input.

        Returns:
            An array for each output; floats are float64.
        """
        values: dict[str, Any] = {"": None, **feeds}
        for number, node in enumerate(self._nodes):
            inputs = [_in_float64(self._constants[n] if n in self._constants else values[n]) for n in node.input]
            outputs = self._run(node, inputs, values)
            values |= zip(node.output, map(_in_float64, outputs), strict=False)
            for name in node.input:
                if self._last_use[name] == number and name not in self._outputs:
                    values.pop(name, None)
            values[""] = None
        return {name: values[name] for name in self._outputs}

    def _run(self, node: Any, inputs: list[Any], values: dict[str, Any]) -> tuple[Any, ...]:
        if node.op_type == "Cast" and _is_float(inputs[0]) and node.to in FLOATS:
            return (inputs[0],)

        def run(*arrays: Any) -> tuple[Any, ...]:
            context = {"context": {**self._constants, **values}} if node.need_context() else {}
            return tuple(node.run(*arrays, **context))

        if node.op_type == "Constant":
            return tuple(self._before_float32(x) if _is_float(x) and x.size == 1 else x for x in run())
        if not self._moves.results or node.op_type in EXACT or node.need_context():
            return run(*inputs)
        found, sizes = self._rounded(node, run, inputs)
        return tuple(
            x + self._moves.results * np.where(np.isfinite(size), size, 0) * self._signs(x.shape) if _is_float(x) else x
            for x, size in zip(found, sizes, strict=True)
        )

    def _rounded(
        self, node: Any, run: Callable[..., tuple[Any, ...]], inputs: list[Any]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """What an operator gives for inputs that are moved as it rounds them, and what its own rounding grows with."""
        operator = node.op_type
        if operator in SUMS:
            return run(*inputs), run(*(np.abs(x) if _is_float(x) else x for x in inputs))
        if operator == "Attention":
            query, key, value, *rest = inputs
            # A score is a sum of D products, which |q| |k| bounds; moving its terms one by one instead, by sqrt(D)
            # times epsilon, comes to as much (Cauchy and Schwarz).
            wide = math.sqrt(query.shape[-1])
            found = run(self._near(query, wide), self._near(key, wide), value, *rest)
            return found, run(query, key, np.abs(value), *rest)
        # What is computed may be off; what the graph stores is what it is: an exponent of 2 is no other number.
        found = run(*(x if name in self._stored else self._near(x) for name, x in zip(node.input, inputs, strict=True)))
        if operator != "LayerNormalization":
            return found, found
        # The variance may be computed as the difference of two larger numbers.
        mean, variance = inputs[0].mean(-1, keepdims=True), inputs[0].var(-1, keepdims=True)
        size = np.abs(found[0]) * (1 + mean**2 / np.maximum(variance, np.finfo(np.float32).tiny))
        return found, (size, *found[1:])

    def _near(self, array: Any, times: float = 1.0) -> Any:
        """An array whose floats are moved in proportion to their own size."""
        if not _is_float(array):
            return array
        moved = array * (1 + times * self._moves.results * self._signs(array.shape))
        return np.where(np.isfinite(array), moved, array)

    def _signs(self, shape: tuple[int, ...]) -> Array:
        """Up or down, by chance: moves are as large as they may be."""
        return np.where(self._random.random(shape, dtype=np.float32) < 0.5, -1.0, 1.0)

    def _before_float32(self, constant: Array) -> Array:
        """What was rounded to float32; where that is not known, moved as far as rounding may have moved it.

        A scalar that comes several times, as an epsilon does, was rounded the same way each time.
        """
        if constant.size > 1:
            return constant * (1 + self._moves.constants * self._signs(constant.shape))
        value = float(constant.item())
        meant = meant_by(value)
        if meant is None or self._moves.tables:
            meant = value * float(1 + self._moves.constants * self._directions.setdefault(value, self._signs(())))
        return np.full(constant.shape, meant)


def meant_by(rounded: float) -> float | None:
    """The number that somebody wrote who got this one by rounding to float32; None if that cannot be told."""
    if not math.isfinite(rounded) or not rounded:
        return rounded
    candidates = []  # roots first: 1 / sqrt(47) has six digits too that give the same float32
    for whole in (round(rounded**2), round(1 / rounded**2)):
        if 0 < whole <= LARGEST_ROOTED:
            root = math.copysign(math.sqrt(whole), rounded)
            candidates += [root, 1 / root]
    fraction, _ = math.frexp(rounded)
    if math.ldexp(fraction, FEW_BITS) % 1 == 0:
        candidates.append(rounded)
    candidates.append(float(f"{rounded:.{FEW_DIGITS}g}"))
    return next((number for number in candidates if np.float32(number) == np.float32(rounded)), None)


class Float64Model:
    """A bundle's encoder and decoder step in float64.

    Args:
        encoder: encoder.onnx of a variant in float32.
        decoder_step: its decoder_step.onnx.
        dimensions: the model's.
    """

    def __init__(self, encoder: Float64Graph, decoder_step: Float64Graph, dimensions: graph.Dimensions) -> None:
        self._encoder, self._decoder_step, self.dimensions = encoder, decoder_step, dimensions

    @classmethod
    def read(cls, folder: Path, dimensions: graph.Dimensions) -> Float64Model:
        """The graphs of a folder."""
        encoder, decoder_step = (Float64Graph.read(folder / name) for name in (graph.ENCODER, graph.DECODER_STEP))
        return cls(encoder, decoder_step, dimensions)

    def moved(self, moves: Moves) -> Float64Model:
        """The model with numbers that are moved."""
        return Float64Model(self._encoder.moved(moves), self._decoder_step.moved(moves), self.dimensions)

    def encode(self, source_ids: Ids, source_mask: Mask, *, capacity: int) -> Float64Sentences:
        """Run the encoder on a padded batch [B, S], and begin with empty caches of `capacity` slots."""
        cross = self._encoder.run({"source_ids": source_ids, "source_mask": source_mask})
        return Float64Sentences(self._decoder_step, self.dimensions, source_mask, cross, capacity)


class Float64Sentences:
    """A batch being decoded in float64; see `runtime.step_model.Sentences` for what a step takes."""

    def __init__(
        self,
        decoder_step: Float64Graph,
        dimensions: graph.Dimensions,
        source_mask: Mask,
        cross: dict[str, Array],
        capacity: int,
    ) -> None:
        self._decoder_step, self._source_mask, self._cross, self.capacity = decoder_step, source_mask, cross, capacity
        shape = len(source_mask), dimensions.heads, capacity, dimensions.head_size
        self._caches = {name: np.zeros(shape) for name in graph.self_cache_names(dimensions)}

    def step(
        self, target_ids: Ids, positions: Ids, write_index: Ids, self_mask: Mask, *, full: bool = False
    ) -> StepOutput:
        """Write Q tokens [B, Q] into the caches and say what may follow each, in float64."""
        feeds = {
            "target_ids": target_ids,
            "positions": positions,
            "write_index": write_index,
            "self_mask": self_mask,
            "source_mask": self._source_mask,
        }
        found = self._decoder_step.run({**feeds, **self._caches, **self._cross})
        self._caches = {name: found[graph.cache_output_name(name)] for name in self._caches}
        return StepOutput(found["top_log_probs"], found["top_ids"], found["log_probs"] if full else None)

    def read(self, name: str) -> Array:
        """A cache [B, H, C, D] or cross-attention tensor [B, H, S, D], by its name in the graph's table."""
        return self._caches[name] if name in self._caches else self._cross[name]


def _is_float(array: Any) -> bool:
    return isinstance(array, np.ndarray | np.generic) and array.dtype.kind == "f"


def _erf(x: Array) -> Array:
    return np.asarray(np.vectorize(math.erf, otypes=[np.float64])(x))


def _in_float64(array: Any) -> Any:
    return array.astype(np.float64) if _is_float(array) and array.dtype != np.float64 else array


FLOATS = frozenset(
    (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
)


# ONNX's reference computes these in float32, loses digits, or fails at sizes that it was not tested at.


class Erf(OpRun):
    """The error function."""

    def _run(self, x: Array) -> tuple[Array]:
        return (_erf(x),)


class GatherElements(OpRun):
    """Elements along an axis."""

    def _run(self, x: Array, indices: Array, axis: int | None = None) -> tuple[Array]:
        return (np.take_along_axis(x, indices, axis or 0),)


class Gelu(OpRun):
    """x times the normal distribution function, or the approximation of it by a tanh (Hendrycks and Gimpel, 2016)."""

    def _run(self, x: Array, approximate: str | None = None) -> tuple[Array]:
        if approximate == "tanh":
            return (x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),)
        return (x / 2 * (1 + _erf(x / math.sqrt(2))),)


class LayerNormalization(OpRun):
    """Over the last axes."""

    def _run(
        self,
        x: Array,
        scale: Array,
        bias: Array | None = None,
        axis: int | None = None,
        epsilon: float | None = None,
        stash_type: int | None = None,  # noqa: ARG002 (what a runtime may compute the moments in)
    ) -> tuple[Array, Array, Array]:
        axes = tuple(range(axis % x.ndim if axis is not None else x.ndim - 1, x.ndim))
        mean = x.mean(axes, keepdims=True)
        inverse = 1 / np.sqrt(((x - mean) ** 2).mean(axes, keepdims=True) + (1e-5 if epsilon is None else epsilon))
        normal = (x - mean) * inverse * scale
        return normal if bias is None else normal + bias, mean, inverse


class LogSoftmax(OpRun):
    """Logarithms of probabilities, however small."""

    def _run(self, x: Array, axis: int | None = None) -> tuple[Array]:
        axis = -1 if axis is None else axis
        x = x - x.max(axis, keepdims=True)
        return (x - np.log(np.exp(x).sum(axis, keepdims=True)),)


class RMSNormalization(OpRun):
    """Over the last axes, without a mean."""

    def _run(
        self,
        x: Array,
        scale: Array,
        axis: int | None = None,
        epsilon: float | None = None,
        stash_type: int | None = None,  # noqa: ARG002 (what a runtime may compute the mean in)
    ) -> tuple[Array]:
        axes = tuple(range(axis % x.ndim if axis is not None else x.ndim - 1, x.ndim))
        mean = (x**2).mean(axes, keepdims=True)
        return (x / np.sqrt(mean + (1e-5 if epsilon is None else epsilon)) * scale,)


class Attention(ReferenceAttention):
    """Queries a block at a time, so that the scores of long sequences need not be in memory together."""

    def _run(self, *arrays: Any, **attributes: Any) -> Any:
        run = super()._run
        query, key, value = arrays[:3]
        mask, *cache = arrays[3:] or (None,)
        rows = max(1, ATTENTION_BYTES // max(8 * query.shape[0] * query.shape[1] * key.shape[-2], 1))
        simple = query.ndim == 4 and not attributes.get("is_causal") and all(x is None for x in cache)
        if not simple or len(self.onnx_node.output) > 1 or rows >= query.shape[2]:
            return run(*arrays, **attributes)
        found = []
        for start in range(0, query.shape[2], rows):
            block = slice(start, start + rows)
            masked = mask if mask is None or mask.shape[-2] == 1 else mask[..., block, :]
            found.append(run(query[:, :, block], key, value, masked, **attributes)[0])
        return (np.concatenate(found, axis=2),)


OPERATORS = (Attention, Erf, GatherElements, Gelu, LayerNormalization, LogSoftmax, RMSNormalization)
