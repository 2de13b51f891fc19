"""Optimisation profiles: the smallest, the usual and the largest shape of every input of a plan.

The encoder has one. The decoder step has two in one plan: 0 for prompts and for scoring, with many tokens a step, and
1 for the steps of a search, with a token a beam. The capacity of the caches is fixed in a plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from tfm_export.bundle import GOLDEN, Bundle
from tfm_export.engines import Shapes
from tfm_export.errors import BuildError
from tfm_export.graph import TensorSpec
from tfm_export.passes.linears import add_initializer
from tfm_export.text_files import read_text, split_lines

Sizes = Mapping[str, int]
POINTS = ("smallest", "usual", "largest")
# Plans for a single sentence take two. TensorRT-RTX 1.7.1 does not compile the 16-bit decoder step for a batch that is
# always 1 ("Graph contains more than one op named"), and with one token a step stores all float32 weights twice.
LEAST_BATCH = 2
LARGEST_SHAPE = 16  # numbers: what has more is a weight, and of no use for finding out shapes


@dataclass(frozen=True, kw_only=True)
class Range:
    """The sizes that an axis may have.

    Attributes:
        smallest: the least.
        usual: what kernels are chosen for.
        largest: the most.
    """

    smallest: int
    usual: int
    largest: int

    def at(self, point: int) -> int:
        """The size at one of `POINTS`."""
        return (self.smallest, self.usual, self.largest)[point]


@dataclass(frozen=True, kw_only=True)
class OptimizationProfile:
    """A profile of a plan.

    Attributes:
        name: "encoder", "prompt" or "step".
        axes: of the inputs, by their name in the graph's table.
    """

    name: str
    axes: dict[str, Range]

    def sizes(self, point: int) -> Sizes:
        """Every axis at one of `POINTS`."""
        return {name: axis.at(point) for name, axis in self.axes.items()}

    def shapes(self, inputs: Sequence[TensorSpec]) -> dict[str, Shapes]:
        """The shapes of inputs."""
        points = [{spec.name: shape_of(spec, self.sizes(point)) for spec in inputs} for point in range(len(POINTS))]
        return {spec.name: (points[0][spec.name], points[1][spec.name], points[2][spec.name]) for spec in inputs}


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """The largest sizes that an engine takes, and the usual ones.

    Attributes:
        max_batch_size: sentences at once.
        max_beam_size: beams.
        max_source_length: tokens of a source.
        max_target_length: tokens of a target.
        usual_source_length: tokens of a source, as they come.
        usual_beam_size: beams.
    """

    max_batch_size: int
    max_beam_size: int
    max_source_length: int
    max_target_length: int
    usual_source_length: int
    usual_beam_size: int

    @property
    def largest_capacity(self) -> int:
        """Slots that the longest target needs with all beams: the start token's, and one for each token of each."""
        return _rounded_up(1 + self.max_beam_size * self.max_target_length)

    def encoder_profiles(self) -> list[OptimizationProfile]:
        """The encoder's one."""
        return [OptimizationProfile(name="encoder", axes={"batch": self._batch, "source": self._source})]

    def step_profiles(self, capacity: int) -> list[OptimizationProfile]:
        """The two of the decoder step with so many slots."""
        prompt = min(max(self.max_target_length, self.max_beam_size), capacity)
        beams = min(self.max_beam_size, capacity)
        queries = {
            "prompt": Range(smallest=1, usual=_half(prompt), largest=prompt),
            "step": Range(smallest=1, usual=min(self.usual_beam_size, beams), largest=beams),
        }
        slots = Range(smallest=capacity, usual=capacity, largest=capacity)
        shared = {"batch": self._batch, "source": self._source, "capacity": slots}
        return [OptimizationProfile(name=name, axes={**shared, "query": query}) for name, query in queries.items()]

    @property
    def _batch(self) -> Range:
        return Range(smallest=1, usual=_half(_half(self.max_batch_size)), largest=max(self.max_batch_size, LEAST_BATCH))

    @property
    def _source(self) -> Range:
        return Range(smallest=1, usual=self.usual_source_length, largest=self.max_source_length)


def shape_of(spec: TensorSpec, sizes: Sizes) -> tuple[int, ...]:
    """The shape of an input or output where every axis has a size."""
    return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in spec.axes)


def usual_source_length(bundle: Bundle, longest: int) -> int:
    """The median length of the golden sources, if they are real; otherwise half of the longest.

    Args:
        bundle: an open bundle.
        longest: tokens of a source that the engine takes.
    """
    path = bundle.path / GOLDEN
    if bundle.manifest.golden.get("synthetic", True) or not path.is_file():
        return _half(longest)
    lengths = sorted(len(json.loads(line)["source_ids"]) for line in split_lines(read_text(path)))
    return min(max(lengths[len(lengths) // 2], 1), longest)


def check_profiles(
    name: str, profiles: Sequence[OptimizationProfile], model: ir.Model, outputs: Sequence[TensorSpec]
) -> None:
    """Make sure that shapes are in order, and that they fit together all the way through the graph.

    Args:
        name: of the plan.
        profiles: of the plan.
        model: what it is made from; its weights are not looked at.
        outputs: as the graph's table says, with the sizes of this engine.

    Raises:
        BuildError: naming every axis, and every output whose shape is not the table's.
    """
    problems = []
    for profile in profiles:
        problems += [f"{name}, profile {profile.name}: {problem}" for problem in _order_problems(profile)]
        for point, word in enumerate(POINTS):
            sizes = profile.sizes(point)
            try:
                found = propagate(model, sizes)
            except BuildError as problem:
                problems += [f"{name}, {word} shapes of {profile.name}: {text}" for text in problem.problems]
                continue
            problems += [
                f"{name}, {word} shapes of {profile.name}: {spec.name} must be {list(shape_of(spec, sizes))}, "
                f"found {list(found.get(spec.name, ((), 0))[0])}"
                for spec in outputs
                if found.get(spec.name, ((), 0))[0] != shape_of(spec, sizes)
            ]
    if problems:
        raise BuildError(problems)


def propagate(model: ir.Model, sizes: Sizes) -> dict[str, tuple[tuple[int, ...], int]]:
    """Run the shapes of a graph's inputs through the graph, by ONNX's own rules.

    Args:
        model: a graph of a bundle.
        sizes: of its axes.

    Returns:
        For every value whose shape comes out: the shape, and the bytes of an element.

    Raises:
        BuildError: an operator does not take the shapes that reach it.
    """
    proto = ir.serde.serialize_model(_without_weights(model, sizes))
    try:
        inferred = onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError as problem:
        raise BuildError(f"the shapes {dict(sizes)} do not fit together: {problem}") from problem
    found = {}
    for value in (*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output):
        tensor = value.type.tensor_type
        if all(dimension.HasField("dim_value") for dimension in tensor.shape.dim):
            shape = tuple(dimension.dim_value for dimension in tensor.shape.dim)
            found[value.name] = (shape, max(1, ir.DataType(tensor.elem_type).bitwidth // 8))
    return found


def _without_weights(model: ir.Model, sizes: Sizes) -> ir.Model:
    """A copy of a graph whose inputs have these sizes, whose other shapes are unknown, and whose weights are inputs."""
    copy = model.clone()
    for name, value in [*copy.graph.initializers.items()]:
        if value.const_value is not None and value.const_value.size > LARGEST_SHAPE:
            del copy.graph.initializers[name]
            value.const_value = None
            copy.graph.inputs.append(value)
    for value in copy.graph.inputs:
        assert value.shape is not None
        value.shape = ir.Shape([axis if isinstance(axis, int) else sizes[str(axis.value)] for axis in value.shape])
    for node in [*copy.graph]:
        for value in node.outputs:
            value.shape = None
        if node.op_type == "Shape" and node.inputs[0] is not None and node.inputs[0].is_graph_input():
            _fold_shape(copy, node)
    return copy


def _fold_shape(model: ir.Model, node: ir.Node) -> None:
    """Put a constant in the place of the shape of an input: Slice wants one to tell how long a piece is."""
    value, output = node.inputs[0], node.outputs[0]
    assert value is not None
    assert value.shape is not None
    first, last = (node.attributes[end].as_int() if end in node.attributes else None for end in ("start", "end"))
    ir.convenience.replace_all_uses_with(
        output, add_initializer(model, f"{output.name}_known", np.array(value.shape.numpy()[first:last], np.int64))
    )
    model.graph.remove(node, safe=True)


def _order_problems(profile: OptimizationProfile) -> Iterator[str]:
    for name, axis in profile.axes.items():
        if not 1 <= axis.smallest <= axis.usual <= axis.largest:
            yield f"{name} must rise from 1, found {axis.smallest}, {axis.usual}, {axis.largest}"


def _half(size: int) -> int:
    return max(1, -(-size // 2))


def _rounded_up(size: int, multiple: int = 8) -> int:
    return -(-size // multiple) * multiple
