"""The whole greedy decode as one graph: a Loop over the decoder step, for languages that have no decoding code.

The Loop's body is decoder_step.onnx for one token of each sentence. Its caches are as long as the target is so far: a
TensorScatter into a cache of fixed size would copy all of it in every turn of a Loop, so a Concat along time takes its
place. A row is live until its end token has come; the Loop ends with the last live row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from tfm_export import graph
from tfm_export.bundle import SpecialIds
from tfm_export.passes.linears import add_initializer

INT64, FLOAT, BOOL = ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.BOOL


def build_generate_graph(
    encoder: ir.Model, decoder_step: ir.Model, special: SpecialIds, *, max_target_length: int
) -> ir.Model:
    """Put the two graphs of a variant into one that takes `graph.generate_inputs` and gives `graph.generate_outputs`.

    Args:
        encoder: encoder.onnx; what becomes of it is the result.
        decoder_step: decoder_step.onnx; it is taken apart.
        special: the ids to start from, to end at and to pad with.
        max_target_length: the longest target, end token included; a larger max_length is cut to it.

    Returns:
        The graph. Its weights lie where they lay; a table that both graphs have is one tensor now.
    """
    main, body = _Part(encoder, "encoder/", ""), _Part(decoder_step, "decoder_step/", "step/")
    source_ids, source_lengths, max_length = inputs = [_value(spec) for spec in graph.generate_inputs()]
    lengths = main.add("source_lengths_column", "Unsqueeze", source_lengths, main.integers(1))
    mask = _mask_source(main, source_ids, lengths)
    caches = [name for name in body.inputs if graph.cache_output_name(name) in body.outputs]
    _make_body(body, caches, {"source_mask": mask, **main.outputs}, special)
    turns = main.add("turns", "Clip", max_length, main.integer(1), main.integer(max_target_length))
    state = _first_state(main, lengths, body.inputs[caches[0]], special)
    main.finish(inputs, _loop(main, body.graph, turns, [*state, *state[-1:] * (len(caches) - 1)]))
    _share_weights(main.graph, body.graph)
    return encoder


class _Part:
    """A graph that is being rebuilt. Operators are added at its end; `finish` puts them in order.

    Attributes:
        graph: the graph.
        inputs: by their names in the graph table.
        outputs: likewise.

    Args:
        model: the graph's.
        old: goes before the names of all that is in the graph already.
        new: goes before the names of all that is added.
    """

    def __init__(self, model: ir.Model, old: str, new: str) -> None:
        self.graph = model.graph
        self.inputs = {str(value.name): value for value in self.graph.inputs}
        self.outputs = {str(value.name): value for value in self.graph.outputs}
        self._model, self._new = model, new
        for value in (*self.graph.inputs, *self.graph.initializers.values()):
            value.name = f"{old}{value.name}"
        for node in self.graph:
            node.name = f"{old}{node.name}"
            for value in node.outputs:
                value.name = f"{old}{value.name}"

    def constant(self, array: NDArray[Any]) -> ir.Value:
        """A small constant, named after what it holds."""
        kind = f"{array.dtype}{'' if array.shape else '_scalar'}"
        name = "_".join([f"{self._new}{kind}", *map(str, array.flat)])
        return self.graph.initializers.get(name) or add_initializer(self._model, name, array)

    def integer(self, number: int) -> ir.Value:
        """A constant int64 scalar."""
        return self.constant(np.array(number, np.int64))

    def integers(self, *numbers: int) -> ir.Value:
        """Constant int64 numbers, [len(numbers)]."""
        return self.constant(np.array(numbers, np.int64))

    def add(self, name: str, operator: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """Add an operator with one output; both get the name."""
        node = ir.node(operator, inputs, attributes, name=f"{self._new}{name}")
        node.outputs[0].name = node.name
        self.graph.append(node)
        return node.outputs[0]

    def feed(self, values: Mapping[str, ir.Value]) -> None:
        """Put values in the place of inputs."""
        for name, value in values.items():
            ir.convenience.replace_all_uses_with(self.inputs[name], value)

    def finish(self, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> None:
        """Give the graph its new inputs and outputs, and drop what the outputs do not need."""
        self.graph.inputs[:], self.graph.outputs[:] = inputs, outputs
        self.graph.sort()
        RemoveUnusedNodesPass()(self._model)


def _value(spec: graph.TensorSpec) -> ir.Value:
    return ir.val(spec.name, ir.DataType.from_numpy(np.dtype(spec.dtype)), spec.axes)


def _mask_source(main: _Part, source_ids: ir.Value, lengths: ir.Value) -> ir.Value:
    """Feed the encoder ids [B, S] and the mask [B, S] that their lengths [B, 1] give, which is returned."""
    size = main.add("source_size", "Squeeze", main.add("source_axis", "Shape", source_ids, start=1, end=2))
    places = main.add("source_places", "Range", main.integer(0), size, main.integer(1))
    mask = main.add("source_mask", "Less", places, lengths)
    main.feed({"source_ids": source_ids, "source_mask": mask})
    return mask


def _make_body(body: _Part, caches: list[str], outer: Mapping[str, ir.Value], special: SpecialIds) -> None:
    """Turn the decoder step into the body of the Loop.

    Args:
        body: the decoder step.
        caches: the names of its caches.
        outer: those of its inputs that are the same in every turn, computed outside.
        special: see `build_generate_graph`.
    """
    turn, go_on = ir.val("step/turn", INT64, ()), ir.val("step/go_on", BOOL, ())
    kinds = {"live": BOOL, "length": INT64, "score": FLOAT}
    live, length, score = state = [ir.val(f"step/{name}", kind, ("batch", 1)) for name, kind in kinds.items()]
    token = body.inputs["target_ids"]
    token.shape = ir.Shape(("batch", 1))
    body.feed({**_one_token(body, turn, token), **outer})
    past, present = _append_to_caches(body, caches)

    best = body.add("best_id", "Gather", body.outputs["top_ids"], body.integer(0), axis=2)
    log_prob = body.add("best_log_prob", "Gather", body.outputs["top_log_probs"], body.integer(0), axis=2)
    next_token = body.add("next_token", "Where", live, best, body.integer(special.pad))
    gain = body.add("gain", "Where", live, log_prob, body.constant(np.array(0, np.float32)))
    goes_on = body.add("goes_on", "Not", body.add("ended", "Equal", best, body.integer(special.eos)))
    next_live = body.add("next_live", "And", live, goes_on)
    next_length = body.add("next_length", "Add", length, body.add("live_number", "Cast", live, to=INT64))
    next_score = body.add("next_score", "Add", score, gain)
    next_go_on = body.add("next_go_on", "ReduceMax", next_live, keepdims=0)
    shown = body.add("shown", "Squeeze", next_token, body.integers(1))
    body.finish(
        [turn, go_on, token, *state, *past],
        [next_go_on, next_token, next_live, next_length, next_score, *present, shown],
    )


def _one_token(body: _Part, turn: ir.Value, token: ir.Value) -> dict[str, ir.Value]:
    """The step's inputs in turn t: each row's token [B, 1] is at position t and sees t + 1 slots, its own the last."""
    shape = body.add("token_shape", "Shape", token)
    slots = body.add("slots", "Add", body.add("turn_row", "Unsqueeze", turn, body.integers(0)), body.integers(1))
    mask_shape = body.add("self_mask_shape", "Concat", shape, body.integers(1), slots, axis=0)
    return {
        "positions": body.add("positions", "Expand", turn, shape),
        "write_index": body.add("write_index", "Expand", turn, body.add("batch", "Shape", token, end=1)),
        "self_mask": body.add("self_mask", "Expand", body.constant(np.array(True)), mask_shape),
    }


def _append_to_caches(body: _Part, caches: list[str]) -> tuple[list[ir.Value], list[ir.Value]]:
    """Turn TensorScatter (cache, new, write_index) into Concat (cache, new); the caches before and after."""
    for node in body.graph:
        if node.op_type == "TensorScatter":
            node.op_type = "Concat"
            node.resize_inputs(2)
            node.attributes.pop("mode")
    past = [body.inputs[name] for name in caches]
    present = [body.outputs[graph.cache_output_name(name)] for name in caches]
    for values, axis in ((past, "past"), (present, "present")):
        for value in values:
            value.shape = ir.Shape(axis if i == 2 else size for i, size in enumerate(value.shape or ()))
    return past, present


def _first_state(main: _Part, lengths: ir.Value, past: ir.Value, special: SpecialIds) -> list[ir.Value]:
    """What the Loop starts from: the start token, nothing so far, and a cache without slots.

    Args:
        main: the encoder.
        lengths: of the sources, [B, 1]; a row without a source is not live.
        past: a cache as the body takes it.
        special: see `build_generate_graph`.
    """
    assert past.shape is not None
    assert past.dtype is not None
    shape, batch = main.add("column_shape", "Shape", lengths), main.add("batch", "Shape", lengths, end=1)
    heads, head_size = (size for size in past.shape if isinstance(size, int))
    cache_shape = main.add("first_cache_shape", "Concat", batch, main.integers(heads, 0, head_size), axis=0)
    nothing = ir.tensor(np.zeros(1, past.dtype.numpy()))
    return [
        main.add("first_token", "Expand", main.integer(special.bos), shape),
        main.add("first_live", "Greater", lengths, main.integer(0)),
        main.add("first_length", "Expand", main.integer(0), shape),
        main.add("first_score", "Expand", main.constant(np.array(0, np.float32)), shape),
        main.add("first_cache", "ConstantOfShape", cache_shape, value=nothing),
    ]


def _loop(main: _Part, body: ir.Graph, turns: ir.Value, state: Sequence[ir.Value]) -> list[ir.Value]:
    """Add the Loop; the outputs of `graph.generate_outputs`."""
    inputs = [turns, main.constant(np.array(True)), *state]
    loop = ir.node("Loop", inputs, {"body": body}, num_outputs=len(state) + 1, name="loop")
    for name, value in zip(("token", "live", "length", "score"), loop.outputs, strict=False):
        value.name = f"last_{name}"
    for number, value in enumerate(loop.outputs[4:-1]):
        value.name = f"last_cache_{number}"
    loop.outputs[-1].name = "tokens"  # [T, B]
    main.graph.append(loop)
    outputs = [
        main.add("ids", "Transpose", loop.outputs[-1], perm=[1, 0]),
        main.add("lengths", "Squeeze", loop.outputs[2], main.integers(1)),
        main.add("scores", "Squeeze", loop.outputs[3], main.integers(1)),
    ]
    for value, spec in zip(outputs, graph.generate_outputs(), strict=True):
        expected = _value(spec)
        value.type, value.shape = expected.type, expected.shape
    return outputs


def _share_weights(main: ir.Graph, body: ir.Graph) -> None:
    """Move the body's weights to the main graph, where those that the encoder has too become one tensor.

    ONNX Runtime's web build finds weights files for the main graph only. A DequantizeLinear keeps its weights beside
    it: every build looks for them in its own graph when it fuses it with the MatMul behind it.
    """
    there = {place: value for value in main.initializers.values() if (place := _place(value)) is not None}
    for value in [*body.initializers.values()]:
        place = _place(value)
        if place is None or any(node.op_type == "DequantizeLinear" for node, _ in value.uses()):
            continue
        body.initializers.pop(str(value.name))
        if place in there:
            ir.convenience.replace_all_uses_with(value, there[place])
        else:
            main.register_initializer(value)


def _place(value: ir.Value) -> tuple[Any, ...] | None:
    """Where a weight lies in the file of weights, in which equal ones are stored once; None for a small constant."""
    tensor = value.const_value
    if not isinstance(tensor, ir.ExternalTensor):
        return None
    return tensor.location, tensor.offset, tensor.length, tensor.dtype, tuple(tensor.shape)
