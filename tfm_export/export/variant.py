"""The fp32 graphs of a model: encoder.onnx, decoder_step.onnx and their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from torch.export import Dim

from reference_model import Transformer, TransformerConfig
from tfm_export import graph
from tfm_export.bundle import Limits
from tfm_export.checkpoints.adapter import Adapter
from tfm_export.export.adapter_graphs import AdapterEncoderGraph, AdapterStepGraph
from tfm_export.export.graphs import DecoderStepGraph, EncoderGraph
from tfm_export.export.tracing import export_module
from tfm_export.graph import Dimensions
from tfm_export.graph_files import WeightsFile

# Twice a beam of 8: enough for every beam search up to that size without looking at all log-probabilities.
CANDIDATES = 16


def dimensions_of(model: Transformer | Adapter) -> Dimensions:
    """What the graphs of a model show of it."""
    config = model.config
    cached = config.decoder if isinstance(config, TransformerConfig) else config
    return Dimensions(
        source_vocabulary_size=config.source_vocabulary_size,
        target_vocabulary_size=config.target_vocabulary_size,
        decoder_layers=config.decoder_layers,
        heads=cached.heads,
        head_size=cached.head_size,
        candidates=min(CANDIDATES, config.target_vocabulary_size),
    )


def _example_sizes(model: Transformer | Adapter) -> dict[str, int]:
    """A size for each axis: above 1, for an axis of 1 stays 1, and each another one, which then tells the axis.

    The source is no longer than the position table.
    """
    source = max(min(7, model.config.max_length), 2)
    query = 2 if source == 3 else 3
    return {"batch": 11 if 2 in (source, query) else 2, "query": query, "source": source, "capacity": 16}


def _largest(model: Transformer | Adapter, limits: Limits | None) -> dict[str, int]:
    """The largest promised sizes. A cache may have any capacity: beams leave gaps in it."""
    source, target = model.config.max_length, model.config.max_target_length
    if limits is not None:
        source, target = limits.max_source_length, limits.max_target_length
    return {"source": source, "query": target}


def encoder_model(model: Transformer | Adapter, dimensions: Dimensions, limits: Limits | None = None) -> ir.Model:
    """encoder.onnx, in memory; see `write_fp32_variant` for the limits."""
    batch, source = Dim("batch"), Dim("source")
    sizes = _example_sizes(model)
    shape = sizes["batch"], sizes["source"]
    example = (torch.zeros(shape, dtype=torch.long), torch.ones(shape, dtype=torch.bool))
    return export_module(
        AdapterEncoderGraph(model) if isinstance(model, Adapter) else EncoderGraph(model),
        example,
        ({0: batch, 1: source}, {0: batch, 1: source}),
        graph.encoder_inputs(),
        graph.encoder_outputs(dimensions),
        largest=_largest(model, limits),
    )


def decoder_step_model(
    model: Transformer | Adapter,
    dimensions: Dimensions,
    attention_layer: int | None = None,
    limits: Limits | None = None,
) -> ir.Model:
    """decoder_step.onnx, in memory; with an attention layer, decoder_step_attention.onnx."""
    sizes = _example_sizes(model)
    symbols = {name: Dim(name) for name in sizes}
    inputs = graph.decoder_step_inputs(dimensions)

    def example(spec: graph.TensorSpec) -> torch.Tensor:
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in spec.axes]
        return torch.zeros(shape, dtype=getattr(torch, spec.dtype))

    def shapes(spec: graph.TensorSpec) -> dict[int, Any]:
        return {i: symbols[axis] for i, axis in enumerate(spec.axes) if isinstance(axis, str)}

    single, caches = inputs[:5], 2 * dimensions.decoder_layers
    keys_values = inputs[5 : 5 + caches], inputs[5 + caches :]
    if isinstance(model, Adapter):
        step: nn.Module = AdapterStepGraph(model, dimensions.candidates)
    else:
        step = DecoderStepGraph(model, dimensions.candidates, attention_layer)
    return export_module(
        step,
        (*map(example, single), *([example(spec) for spec in specs] for specs in keys_values)),
        (*map(shapes, single), *([shapes(spec) for spec in specs] for specs in keys_values)),
        inputs,
        graph.decoder_step_outputs(dimensions, attention=attention_layer is not None),
        largest=_largest(model, limits),
    )


def write_fp32_variant(
    model: Transformer | Adapter, folder: Path, *, attention_layer: int | None = None, limits: Limits | None = None
) -> Dimensions:
    """Write the graphs and their weights into a new folder.

    Args:
        model: in fp32.
        folder: created.
        attention_layer: write decoder_step_attention.onnx too, with this layer's cross-attention weights.
        limits: the longest sequences for which the graphs must hold; by default the longest that the model takes.

    Returns:
        What the graphs show of the model.

    Raises:
        ExportError: PyTorch's exporter failed, or code that branches on a size holds for some sizes only.
    """
    dimensions = dimensions_of(model)
    folder.mkdir(parents=True)
    weights = WeightsFile(folder / graph.WEIGHTS)
    weights.write(encoder_model(model, dimensions, limits), folder / graph.ENCODER)
    weights.write(decoder_step_model(model, dimensions, limits=limits), folder / graph.DECODER_STEP)
    if attention_layer is not None:
        step = decoder_step_model(model, dimensions, attention_layer, limits)
        weights.write(step, folder / graph.DECODER_STEP_ATTENTION)
    return dimensions
