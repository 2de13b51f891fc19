"""A recipe for a variant, and the conversion of fp32 graphs by it: the passes that its precision takes, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from tfm_export import graph
from tfm_export.graph_files import read_graph
from tfm_export.passes.embeddings import quantize_embeddings
from tfm_export.passes.linears import linears
from tfm_export.passes.retype import retype
from tfm_export.passes.static_quantization import quantize_static
from tfm_export.passes.weight_only import quantize_weights
from tfm_export.precision import PRECISIONS


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that decides a variant's numbers.

    Attributes:
        precision: its name.
        skip: layers that stay in fp32, by the names of `passes.linears`; of embeddings "encoder/embedding" and
            "decoder_step/embedding".
        thresholds: where activations are clipped, if they are quantised, by "graph/value".
        ranges: the largest absolute value of every tensor, by "graph/value". It decides what stays in fp32 in fp16 and
            bf16; with quantised variants it is written down for engines, whose other numbers have 16 bits. None: every
            value is taken to fit.
        reduced_range: int8 weights, where activations are int8 too, of 7 bits, for CPUs without VNNI.
        int8_encoder: w8, w4: the encoder is that of int8. It has many rows to multiply where the decoder has few, so
            that arithmetic bounds it and not the reading of weights.
    """

    precision: str
    skip: frozenset[str] = frozenset()
    thresholds: Mapping[str, float] = field(default_factory=dict)
    ranges: Mapping[str, float] | None = None
    reduced_range: bool = False
    int8_encoder: bool = False

    def precision_of(self, name: str) -> str:
        """The precision whose numbers a graph is made of."""
        return "int8" if self.int8_encoder and name == Path(graph.ENCODER).stem else self.precision

    def skip_in(self, name: str) -> set[str]:
        """The layers of a graph that stay in fp32; decoder_step_attention has the layers of decoder_step."""
        owner = layers_of(name)
        return {name + layer.removeprefix(owner) for layer in self.skip if layer.startswith(f"{owner}/")}


def layer_names(folder: Path) -> list[str]:
    """What may be quantised in the fp32 graphs of a folder, and skipped: linear layers, and the embeddings."""
    names = []
    for name in (Path(graph.ENCODER).stem, Path(graph.DECODER_STEP).stem):
        names += [f"{name}/embedding", *(layer.name for layer in linears(read_graph(folder / f"{name}.onnx"), name))]
    return names


def layers_of(name: str) -> str:
    """The graph whose layers a graph has."""
    return Path(graph.DECODER_STEP).stem if name == Path(graph.DECODER_STEP_ATTENTION).stem else name


def of_graph(values: Mapping[str, float] | None, name: str) -> dict[str, float] | None:
    """What is known of the values of one graph, by their names in it, from what is known by "graph/value"."""
    if values is None:
        return None
    return {value.removeprefix(f"{name}/"): x for value, x in values.items() if value.startswith(f"{name}/")}


def convert(model: ir.Model, name: str, recipe: Recipe) -> tuple[list[str], dict[str, str]]:
    """Apply the passes of a recipe to one graph, in place.

    Args:
        model: an fp32 graph of a bundle.
        name: of the graph: "encoder", "decoder_step" or "decoder_step_attention".
        recipe: how.

    Returns:
        The layers in new numbers, and what stays in fp32 with the reason.
    """
    layers, embedding = linears(model, name), f"{name}/embedding"
    skip, precision = recipe.skip_in(name), PRECISIONS[recipe.precision_of(name)]
    if not precision.quantized:
        kept = retype(model, precision.float_type, ranges=of_graph(recipe.ranges, name)).kept
        done = [layer.name for layer in layers if layer.node.outputs[0].dtype != ir.DataType.FLOAT]
        return [embedding, *done], {f"{name}/{value}": reason for value, reason in kept.items()}
    if precision.weight_only:
        done = quantize_weights(model, name, bits=4 if precision.weight_type == "int4" else 8, skip=skip)
    else:
        assert precision.weight_type in ("int8", "fp8")
        numbers, reduced = precision.weight_type, recipe.reduced_range
        done = quantize_static(model, name, recipe.thresholds, numbers=numbers, reduced_range=reduced, skip=skip)
    left = {layer: "chosen" for layer in (embedding, *(layer.name for layer in layers)) if layer in skip}
    if embedding not in skip:
        embeddings = quantize_embeddings(model, name)
        if not embeddings:
            left[embedding] = "it is the table of the projection, which is kept"
        done = [*embeddings, *done]
    return done, left
