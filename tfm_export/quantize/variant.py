"""A variant's files, made from the fp32 graphs of a bundle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tfm_export import graph
from tfm_export.graph_files import RANGES, WeightsFile, read_graph, write_ranges
from tfm_export.passes.recipe import Recipe, convert, layers_of
from tfm_export.precision import FLOATS

PURPOSES = {
    graph.ENCODER: "source ids to cross-attention keys and values, once a sentence",
    graph.DECODER_STEP: "the next token, over an append-only cache",
    graph.DECODER_STEP_ATTENTION: "the next token and a layer's attention",
    graph.WEIGHTS: "weights of all graphs",
    RANGES: "how large values get in fp32, for engines that compute them in 16 bits",
}


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
        if name == layers_of(name):  # the graph with attention weights repeats the layers of the step
            quantized += done
            kept |= left
    if recipe.ranges and recipe.precision not in FLOATS:
        compiled = {layers_of(name) for name in graph_names(fp32)}
        write_ranges({v: r for v, r in recipe.ranges.items() if v.partition("/")[0] in compiled}, target / RANGES)
    return Made(quantized=quantized, kept=kept, bytes=sum(file.stat().st_size for file in target.iterdir()))
