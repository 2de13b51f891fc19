"""Graphs that are broken in one place, each by as little as anyone could get wrong."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from tfm_export.graph import DECODER_STEP, ENCODER

Change = Callable[[ir.Model], None]


def alter(model: ir.Model, name: str, change: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> None:
    """Replace a constant by what a function makes of a copy of it."""
    value = model.graph.initializers[name]
    assert value.const_value is not None
    before = value.const_value.numpy()
    after = change(before.copy())
    assert (after != before).any(), "a mutant that changes nothing"
    value.const_value = ir.tensor(after, name=name)


def nodes(model: ir.Model, *operators: str) -> list[ir.Node]:
    """The nodes of some kinds, in order."""
    return [node for node in model.graph if node.op_type in operators]


def two_weights_change_places(model: ir.Model) -> None:
    """A weight and its neighbour, in a matrix of the first layer."""

    def swap(weight: NDArray[np.float32]) -> NDArray[np.float32]:
        weight[1, [2, 3]] = weight[1, [3, 2]]
        return weight

    alter(model, "layers.0.self_attention.query.weight", swap)


def a_bias_is_left_out(model: ir.Model) -> None:
    """That of an attention's output."""
    alter(model, "layers.0.self_attention.output.bias", np.zeros_like)


def a_scale_is_off(model: ir.Model) -> None:
    """By a thousandth, in one attention."""
    attention = nodes(model, "Attention")[-1]
    attribute = attention.attributes.get("scale")
    value = attention.inputs[0]
    size = model.graph.inputs[-1].shape
    assert value is not None
    assert size is not None
    scale = attribute.as_float() if attribute is not None else int(size[-1]) ** -0.5  # type: ignore[arg-type]
    attention.attributes["scale"] = ir.AttrFloat32("scale", scale * 1.001)


def a_position_is_that_of_the_next_token(model: ir.Model) -> None:
    """The third of the table."""

    def shift(table: NDArray[np.float32]) -> NDArray[np.float32]:
        table[2] = table[3]
        return table

    alter(model, "embedding.positions", shift)


def a_padded_key_is_seen(model: ir.Model) -> None:
    """The first token of padding behind each source."""
    mask = next(value for value in model.graph.inputs if value.name == "source_mask")
    readers = [(use.node, use.idx) for use in mask.uses() if use.node.op_type != "Shape"]
    bounds = {
        name: ir.Value(name=name, const_value=ir.tensor(np.array([number]), name=name))
        for name, number in {"mutant_0": 0, "mutant_1": 1, "mutant_last": -1}.items()
    }
    for value in bounds.values():
        model.graph.register_initializer(value)
    zero, one, last = bounds.values()
    first = ir.node("Slice", [mask, zero, one, one])
    others = ir.node("Slice", [mask, zero, last, one])
    shifted = ir.node("Concat", [first.outputs[0], others.outputs[0]], attributes={"axis": 1})
    for node, index in readers:
        node.replace_input_with(index, shifted.outputs[0])
    model.graph.insert_before(model.graph[0], [first, others, shifted])


def an_epsilon_is_the_other_usual_one(model: ir.Model) -> None:
    """1e-5 for 1e-6 or the other way round, in the first norm."""
    norm = nodes(model, "LayerNormalization", "RMSNormalization")[0]
    epsilon = norm.attributes["epsilon"].as_float()
    norm.attributes["epsilon"] = ir.AttrFloat32("epsilon", 1e-6 if epsilon > 3e-6 else 1e-5)


def gelu_is_the_other_form(model: ir.Model) -> None:
    """The approximation by a tanh for the exact one or the other way round, in one layer."""
    gelu = nodes(model, "Gelu")[0]
    form = gelu.attributes["approximate"].as_string()
    gelu.attributes["approximate"] = ir.AttrString("approximate", "tanh" if form == "none" else "none")


def queries_and_keys_change_places(model: ir.Model) -> None:
    """In one layer; their scores are transposed."""
    constants = model.graph.initializers
    for part in ("weight", "bias"):
        query, key = (constants[f"layers.0.self_attention.{name}.{part}"] for name in ("query", "key"))
        query.const_value, key.const_value = key.const_value, query.const_value


def a_cache_is_written_one_slot_further(model: ir.Model) -> None:
    """Values of one layer."""
    scatter = nodes(model, "TensorScatter")[-1]
    one = ir.Value(name="mutant_one", const_value=ir.tensor(np.array([1]), name="mutant_one"))
    model.graph.register_initializer(one)
    further = ir.node("Add", [scatter.inputs[2], one])
    model.graph.insert_before(scatter, further)
    scatter.replace_input_with(2, further.outputs[0])


def a_matrix_is_in_float16(model: ir.Model) -> None:
    """One of the last layer's."""
    name = next(name for name in reversed([*model.graph.initializers]) if name.endswith("contract.weight"))
    alter(model, name, lambda weight: weight.astype(np.float16).astype(np.float32))


EVERYWHERE = ("paper", "tied", "relative", "learned")
WITH_POSITIONS = ("paper", "tied", "learned")

# Each with the graph that it breaks, and the configurations that have what it breaks.
MUTANTS: dict[str, tuple[Change, str, tuple[str, ...]]] = {
    "two weights change places, encoder": (two_weights_change_places, ENCODER, EVERYWHERE),
    "two weights change places, decoder": (two_weights_change_places, DECODER_STEP, EVERYWHERE),
    "a bias is left out, encoder": (a_bias_is_left_out, ENCODER, EVERYWHERE),
    "a bias is left out, decoder": (a_bias_is_left_out, DECODER_STEP, EVERYWHERE),
    "a scale is off": (a_scale_is_off, DECODER_STEP, EVERYWHERE),
    "a position, encoder": (a_position_is_that_of_the_next_token, ENCODER, WITH_POSITIONS),
    "a position, decoder": (a_position_is_that_of_the_next_token, DECODER_STEP, WITH_POSITIONS),
    "a padded key is seen, encoder": (a_padded_key_is_seen, ENCODER, EVERYWHERE),
    "a padded key is seen, decoder": (a_padded_key_is_seen, DECODER_STEP, EVERYWHERE),
    "an epsilon, encoder": (an_epsilon_is_the_other_usual_one, ENCODER, EVERYWHERE),
    "an epsilon, decoder": (an_epsilon_is_the_other_usual_one, DECODER_STEP, EVERYWHERE),
    "gelu's form, encoder": (gelu_is_the_other_form, ENCODER, ("tied", "relative", "learned")),
    "gelu's form, decoder": (gelu_is_the_other_form, DECODER_STEP, ("tied", "relative", "learned")),
    "queries and keys change places": (queries_and_keys_change_places, ENCODER, EVERYWHERE),
    "a cache is written one slot further": (a_cache_is_written_one_slot_further, DECODER_STEP, EVERYWHERE),
    "a matrix is in float16, encoder": (a_matrix_is_in_float16, ENCODER, EVERYWHERE),
    "a matrix is in float16, decoder": (a_matrix_is_in_float16, DECODER_STEP, EVERYWHERE),
}
