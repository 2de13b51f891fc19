"""The ONNX graphs that TensorRT is given: derived from a variant of the bundle, each capacity a graph of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from tfm_export import graph
from tfm_export.bundle import Bundle
from tfm_export.engines import ENCODER_PLAN, FLOAT_TYPES, step_plan
from tfm_export.graph import Dimensions, TensorSpec
from tfm_export.graph_files import WeightsFile, read_graph
from tfm_export.passes.embeddings import quantize_embeddings
from tfm_export.passes.head_padding import pad_heads, padded_head_size
from tfm_export.passes.linears import linears
from tfm_export.passes.merged_linears import merge_block_linears
from tfm_export.passes.retype import retype
from tfm_export.passes.static_quantization import quantize_static
from tfm_export.passes.tensorrt_form import tensorrt_form
from tfm_export.passes.weight_only import quantize_weights
from tfm_export.trt.options import Compute
from tfm_export.trt.profiles import EngineLimits, Profile, check_profiles
from tfm_export.trt.refusals import check_graph


@dataclass(frozen=True, kw_only=True)
class Source:
    """A graph to be compiled.

    Attributes:
        plan: the name of the plan that it becomes.
        model: the graph; the capacity is a number.
        profiles: of the plan.
        inputs: as the graph's table says, with the sizes of this engine.
        outputs: likewise.
    """

    plan: str
    model: ir.Model
    profiles: Sequence[Profile]
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]

    @property
    def weight_bytes(self) -> int:
        """The bytes of all constants, as they are stored."""
        return sum(v.const_value.nbytes for v in self.model.graph.initializers.values() if v.const_value is not None)

    @property
    def file(self) -> str:
        """The file that it is written to."""
        return f"{self.plan}.onnx"


def engine_head_size(dimensions: Dimensions, compute: Compute) -> int:
    """The head size in an engine: padded where 16-bit attention wants it."""
    return dimensions.head_size if compute == "fp32" else padded_head_size(dimensions.head_size)


def derive_sources(
    bundle: Bundle, variant: str, compute: Compute, limits: EngineLimits, capacities: Sequence[int]
) -> list[Source]:
    """Derive the graphs of an engine: the encoder's, and the decoder step's for each capacity.

    Args:
        bundle: an open bundle.
        variant: the precision. Where the bundle does not have it, the graphs are of its form and size, and their
            numbers mean nothing.
        compute: what is computed in where nothing is quantised.
        limits: the largest sizes.
        capacities: slots a sentence.

    Raises:
        BundleError: a graph cannot be read.
        ExportError: a graph is not of the expected form.
        BuildError: TensorRT would not take a graph as it is, or shapes do not fit together.
    """
    float_type = FLOAT_TYPES[compute]
    dimensions = bundle.manifest.dimensions
    wide = Dimensions(**{**vars(dimensions), "head_size": engine_head_size(dimensions, compute)})
    encoder = Source(
        plan=ENCODER_PLAN,
        model=_derive(bundle, graph.ENCODER, variant, compute),
        profiles=limits.encoder_profiles(),
        inputs=graph.encoder_inputs(),
        outputs=graph.encoder_outputs(wide, float_type),
    )
    step = _derive(bundle, graph.DECODER_STEP, variant, compute)
    steps = (
        Source(
            plan=step_plan(capacity),
            model=_with_capacity(step, capacity),
            profiles=limits.step_profiles(capacity),
            inputs=graph.decoder_step_inputs(wide, float_type),
            outputs=graph.decoder_step_outputs(wide, float_type),
        )
        for capacity in capacities
    )
    sources = [encoder, *steps]
    for source in sources:
        check_graph(source.plan, source.model)
        check_profiles(source.plan, source.profiles, source.model, source.outputs)
    return sources


def write_sources(sources: Sequence[Source], folder: Path) -> None:
    """Write graphs beside one file of weights that they share.

    Args:
        sources: the graphs.
        folder: where to.
    """
    weights = WeightsFile(folder / graph.WEIGHTS)
    for source in sources:
        weights.write(source.model, folder / source.file)


def _derive(bundle: Bundle, file: str, variant: str, compute: Compute) -> ir.Model:
    if variant in bundle.manifest.variants:
        model = read_graph(bundle.variant_path(variant) / file)
    else:
        model = _sketch(bundle.variant_path("fp32") / file, variant)
    if variant not in FLOAT_TYPES:
        tensorrt_form(model, variant, compute=compute)
        merge_block_linears(model)
    if compute != "fp32":
        pad_heads(model, bundle.manifest.dimensions.head_size)
    return model


def _sketch(path: Path, variant: str) -> ir.Model:
    """A graph of the form and size that a variant will have."""
    model, name = read_graph(path), path.stem
    if variant in FLOAT_TYPES:
        retype(model, "bfloat16" if variant == "bf16" else "float16")
        return model
    if variant in {"w8", "w4"}:
        quantize_weights(model, name, bits=4 if variant == "w4" else 8)
    else:
        thresholds = {f"{name}/{layer.input.name}": 1.0 for layer in linears(model, name)}
        quantize_static(model, name, thresholds, numbers="fp8" if variant == "fp8" else "int8")
    quantize_embeddings(model, name)
    return model


def _with_capacity(model: ir.Model, capacity: int) -> ir.Model:
    """A copy of the decoder step with so many slots: TensorRT's layer for caches wants a number."""
    copy = model.clone()
    for value in (*copy.graph.inputs, *copy.graph.outputs, *(v for node in copy.graph for v in node.outputs)):
        if value.shape is not None:
            axes = [axis if isinstance(axis, int) else str(axis.value) for axis in value.shape]
            value.shape = ir.Shape([capacity if axis == "capacity" else axis for axis in axes])
    return copy
