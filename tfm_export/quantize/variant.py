"""A variant's files, made from the fp32 graphs of a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from tfm_export import graph
from tfm_export.graph_files import RANGES, WeightsFile, read_graph, write_ranges
from tfm_export.passes.embeddings import quantize_embeddings
from tfm_export.passes.linears import linears
from tfm_export.passes.retype import retype
from tfm_export.passes.static_quantization import quantize_static
from tfm_export.passes.weight_only import quantize_weights

FLOAT_TYPES: dict[str, Literal["float16", "bfloat16"]] = {"fp16": "float16", "bf16": "bfloat16"}
BITS: dict[str, Literal[4, 8]] = {"w8": 8, "w4": 4}
STATIC: dict[str, Literal["int8", "fp8"]] = {"int8": "int8", "fp8": "fp8"}

PURPOSES = {
    graph.ENCODER: "source ids to cross-attention keys and values, once a sentence",
    graph.DECODER_STEP: "the next token, over an append-only cache",
    graph.DECODER_STEP_ATTENTION: "the next token and a layer's attention",
    graph.WEIGHTS: "weights of all graphs",
    RANGES: "how large values get in fp32, for engines that compute them in 16 bits",
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that decides a variant's numbers.

    Attributes:
        precision: its name.
        skip: layers that stay in fp32, by the names of `passes.linears`; of embeddings "encoder/embedding" and
            "decoder_step/embedding".
        thresholds: int8, fp8, int8_encoder: where activations are clipped, by "graph/value".
        ranges: the largest absolute value of every tensor, by "graph/value". It decides what stays in fp32 in fp16 and
            bf16; with quantised variants it is written down for engines, whose other numbers have 16 bits.
        reduced_range: int8, int8_encoder: weights of 7 bits, for CPUs without VNNI.
        int8_encoder: w8, w4: the encoder is that of int8. It has many rows to multiply where the decoder has few, so
            that arithmetic bounds it and not the reading of weights.
    """

    precision: str
    skip: frozenset[str] = frozenset()
    thresholds: Mapping[str, float] = field(default_factory=dict)
    ranges: Mapping[str, float] = field(default_factory=dict)
    reduced_range: bool = False
    int8_encoder: bool = False

    def precision_of(self, name: str) -> str:
        """The precision whose numbers a graph is made of."""
        return "int8" if self.int8_encoder and name == Path(graph.ENCODER).stem else self.precision

    def skip_in(self, name: str) -> set[str]:
        """The layers of a graph that stay in fp32; decoder_step_attention has the layers of decoder_step."""
        owner = _layers_of(name)
        return {name + layer.removeprefix(owner) for layer in self.skip if layer.startswith(f"{owner}/")}


@dataclass(frozen=True, kw_only=True)
class Made:
    """What the passes did.

    Attributes:
        quantized: names of the layers in the new numbers; of fp16 and bf16 all of them but those kept.
        kept: what stays in fp32, and why.
        bytes: of the files.
    """

    quantized: list[str]
    kept: dict[str, str]
    bytes: int


def graph_names(bundle_folder: Path) -> list[str]:
    """The graphs of a variant: "encoder", "decoder_step" and, if it has one, "decoder_step_attention"."""
    files = (graph.ENCODER, graph.DECODER_STEP, graph.DECODER_STEP_ATTENTION)
    return [Path(file).stem for file in files if (bundle_folder / file).is_file()]


def layer_names(folder: Path) -> list[str]:
    """What may be quantised in the fp32 graphs of a folder, and skipped: linear layers, and the embeddings."""
    names = []
    for name in (Path(graph.ENCODER).stem, Path(graph.DECODER_STEP).stem):
        names += [f"{name}/embedding", *(layer.name for layer in linears(read_graph(folder / f"{name}.onnx"), name))]
    return names


def write_variant(fp32: Path, target: Path, recipe: Recipe) -> Made:
    """Make a variant.

    Args:
        fp32: the folder of the fp32 graphs.
        target: the folder to write to.
        recipe: how.
    """
    weights = WeightsFile(target / graph.WEIGHTS)
    quantized: list[str] = []
    kept: dict[str, str] = {}
    for name in graph_names(fp32):
        model = read_graph(fp32 / f"{name}.onnx")
        done, left = convert(model, name, recipe)
        weights.write(model, target / f"{name}.onnx")
        if name == _layers_of(name):  # the graph with attention weights repeats the layers of the step
            quantized += done
            kept |= left
    if recipe.ranges and recipe.precision not in FLOAT_TYPES:
        compiled = {_layers_of(name) for name in graph_names(fp32)}
        write_ranges({v: r for v, r in recipe.ranges.items() if v.partition("/")[0] in compiled}, target / RANGES)
    return Made(quantized=quantized, kept=kept, bytes=sum(file.stat().st_size for file in target.iterdir()))


def convert(model: ir.Model, name: str, recipe: Recipe) -> tuple[list[str], dict[str, str]]:
    """Apply the passes of a recipe to one graph, in place.

    Returns:
        The layers in new numbers, and what stays in fp32 with the reason.
    """
    layers, embedding = linears(model, name), f"{name}/embedding"
    skip, precision = recipe.skip_in(name), recipe.precision_of(name)
    if precision in FLOAT_TYPES:
        ranges = {
            value.removeprefix(f"{name}/"): r for value, r in recipe.ranges.items() if value.startswith(f"{name}/")
        }
        kept = retype(model, FLOAT_TYPES[precision], ranges=ranges).kept
        done = [layer.name for layer in layers if layer.node.outputs[0].dtype != ir.DataType.FLOAT]
        return [embedding, *done], {f"{name}/{value}": reason for value, reason in kept.items()}
    if precision in BITS:
        done = quantize_weights(model, name, bits=BITS[precision], skip=skip)
    else:
        done = quantize_static(
            model,
            name,
            recipe.thresholds,
            numbers=STATIC[precision],
            reduced_range=recipe.reduced_range,
            skip=skip,
        )
    left = {layer: "chosen" for layer in (embedding, *(layer.name for layer in layers)) if layer in skip}
    if embedding not in skip:
        embeddings = quantize_embeddings(model, name)
        if not embeddings:
            left[embedding] = "it is the table of the projection, which is kept"
        done = [*embeddings, *done]
    return done, left


def _layers_of(name: str) -> str:
    """The graph whose layers a graph has."""
    return Path(graph.DECODER_STEP).stem if name == Path(graph.DECODER_STEP_ATTENTION).stem else name
