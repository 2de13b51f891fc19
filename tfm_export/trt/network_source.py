"""The ONNX graphs that TensorRT is given: derived from a variant of the bundle, each capacity a graph of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from tfm_export import graph
from tfm_export.bundle import Bundle
from tfm_export.engines import ENCODER_PLAN, step_plan
from tfm_export.errors import BuildError
from tfm_export.graph import TensorSpec
from tfm_export.graph_files import RANGES, WeightsFile, read_graph, read_ranges
from tfm_export.passes.head_padding import pad_heads
from tfm_export.passes.linears import linears
from tfm_export.passes.merged_linears import merge_block_linears
from tfm_export.passes.recipe import Recipe, convert, of_graph
from tfm_export.passes.tensorrt_form import tensorrt_form
from tfm_export.precision import FLOATS, PRECISIONS, Compute
from tfm_export.trt.profiles import EngineLimits, OptimizationProfile, check_profiles
from tfm_export.trt.refusals import check_graph


@dataclass(frozen=True, kw_only=True)
class NetworkSource:
    """The ONNX graph that one of TensorRT's networks is parsed from, and what its plan must be.

    Attributes:
        plan: the name of the plan that it becomes.
        precision: whose numbers it has: the variant's, or int8 for an encoder of w8 or w4 that was made so.
        model: the graph; the capacity is a number.
        profiles: of the plan.
        inputs: names, types and shapes, with the sizes of this engine.
        outputs: names, types and shapes, with the sizes of this engine.
        kept: what is computed in float32 because the engine's other type cannot hold it, and why.
    """

    plan: str
    precision: str
    model: ir.Model
    profiles: Sequence[OptimizationProfile]
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    kept: Mapping[str, str] = field(default_factory=dict)

    @property
    def weight_bytes(self) -> int:
        """The bytes of all constants, as they are stored."""
        return sum(v.const_value.nbytes for v in self.model.graph.initializers.values() if v.const_value is not None)

    @property
    def file(self) -> str:
        """The file that it is written to."""
        return f"{self.plan}.onnx"


def derive_sources(
    bundle: Bundle, variant: str, compute: Compute, limits: EngineLimits, capacities: Sequence[int]
) -> list[NetworkSource]:
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
        BuildError: TensorRT would not take a graph as it is, shapes do not fit together, or nobody has measured whether
            the variant's numbers fit into float16.
    """
    float_type, ranges = PRECISIONS[compute].float_type, _measured_ranges(bundle, variant, compute)
    wide = bundle.manifest.dimensions.padded(float_type)
    model, kept = _derive(bundle, graph.ENCODER, variant, compute, ranges)
    encoder = NetworkSource(
        plan=ENCODER_PLAN,
        precision="int8" if bundle.manifest.variants.get(variant, {}).get("int8_encoder") else variant,
        model=model,
        profiles=limits.encoder_profiles(),
        inputs=graph.encoder_inputs(),
        outputs=graph.encoder_outputs(wide, float_type),
        kept=kept,
    )
    step, kept = _derive(bundle, graph.DECODER_STEP, variant, compute, ranges)
    steps = (
        NetworkSource(
            plan=step_plan(capacity),
            precision=variant,
            model=_with_capacity(step, capacity),
            profiles=limits.step_profiles(capacity),
            inputs=graph.decoder_step_inputs(wide, float_type),
            outputs=graph.decoder_step_outputs(wide, float_type),
            kept=kept,
        )
        for capacity in capacities
    )
    sources = [encoder, *steps]
    for source in sources:
        check_graph(source.plan, source.model)
        check_profiles(source.plan, source.profiles, source.model, source.outputs)
    return sources


def write_sources(sources: Sequence[NetworkSource], folder: Path) -> None:
    """Write graphs beside one file of weights that they share.

    Args:
        sources: the graphs.
        folder: where to.
    """
    weights = WeightsFile(folder / graph.WEIGHTS)
    for source in sources:
        weights.write(source.model, folder / source.file)


def uses_ranges(variant: str, compute: Compute) -> bool:
    """Whether measured ranges decide what an engine computes in 16 bits: bfloat16 has the range of float32."""
    return variant not in FLOATS and compute == "fp16"


def _measured_ranges(bundle: Bundle, variant: str, compute: Compute) -> dict[str, float] | None:
    """How large the values of a quantised variant get, by "graph/value"; None where all of them fit or mean nothing."""
    if not uses_ranges(variant, compute) or variant not in bundle.manifest.variants:
        return None
    file = bundle.variant_path(variant) / RANGES
    if not file.is_file():
        raise BuildError(
            f"the variant {variant} does not tell how large its numbers get ({RANGES}), so those that float16 cannot "
            "hold are not known",
            f"tfm-export quantize {bundle.path} --{variant} --for tensorrt --force, which measures it; or --compute "
            "bf16, which has the range of float32",
        )
    return read_ranges(file)


def _derive(
    bundle: Bundle, file: str, variant: str, compute: Compute, ranges: Mapping[str, float] | None
) -> tuple[ir.Model, dict[str, str]]:
    """A graph as TensorRT is given it, and the values and weights that stay in float32 in it."""
    if variant in bundle.manifest.variants:
        model = read_graph(bundle.variant_path(variant) / file)
    else:
        model = _sketch(bundle.variant_path("fp32") / file, variant)
    kept = {}
    if variant not in FLOATS:
        found = tensorrt_form(model, variant, compute=compute, ranges=of_graph(ranges, Path(file).stem)).kept
        kept = {name: reason for name, reason in found.items() if name not in _never_told(model)}
        merge_block_linears(model)
    pad_heads(model, PRECISIONS[compute].float_type)
    return model, kept


def _never_told(model: ir.Model) -> set[str]:
    """What always stays in float32: some operators, and factors that are no numbers of 16 bits."""
    constants = model.graph.initializers.items()
    factors = {name for name, value in constants if value.const_value is not None and value.const_value.size == 1}
    return {node.op_type for node in model.graph} | factors


def _sketch(path: Path, variant: str) -> ir.Model:
    """A graph of the form and size that a variant will have."""
    model, name = read_graph(path), path.stem
    thresholds = {f"{name}/{layer.input.name}": 1.0 for layer in linears(model, name)}
    convert(model, name, Recipe(precision=variant, thresholds=thresholds))
    return model


def _with_capacity(model: ir.Model, capacity: int) -> ir.Model:
    """A copy of the decoder step with so many slots: TensorRT's layer for caches wants a number."""
    copy = model.clone()
    for value in (*copy.graph.inputs, *copy.graph.outputs, *(v for node in copy.graph for v in node.outputs)):
        if value.shape is not None:
            axes = [axis if isinstance(axis, int) else str(axis.value) for axis in value.shape]
            value.shape = ir.Shape([capacity if axis == "capacity" else axis for axis in axes])
    return copy
