"""Engines for the emulated GPU, put into bundles as `tfm-export trt` would."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from tests.emulation.tensorrt import VERSIONS, PlanFacts
from tfm_export.bundle import Bundle, file_hash
from tfm_export.engines import (
    ENCODER_PLAN,
    ENGINE_FILE,
    ENGINES,
    EngineRecord,
    Shapes,
    plan_file,
    step_plan,
)
from tfm_export.graph import (
    DECODER_STEP,
    ENCODER,
    TensorSpec,
    cache_output_name,
    decoder_step_inputs,
    decoder_step_outputs,
    encoder_inputs,
    encoder_outputs,
    self_cache_names,
)
from tfm_export.precision import FLOATS, PRECISIONS

COMPUTES = {PRECISIONS[compute].float_type: compute for compute in FLOATS}


def add_engine(
    bundle: Bundle,
    name: str = "emulated",
    *,
    flavor: str = "tensorrt",
    float_type: str = "float32",
    max_batch_size: int = 8,
    max_beam_size: int = 4,
    capacities: tuple[int, ...] = (16, 64),
    head_size: int | None = None,
    **fields: Any,
) -> EngineRecord:
    """Put an engine of a bundle's fp32 graphs into it.

    Args:
        bundle: with fp32 graphs.
        name: of the engine.
        flavor: "tensorrt" or "rtx".
        float_type: of caches and cross-attention keys and values.
        max_batch_size: the most rows.
        max_beam_size: the most queries of the profile for steps.
        capacities: one plan of the decoder step each.
        head_size: of the plans; None for the model's.
        **fields: of `EngineRecord`, to set differently.
    """
    manifest = bundle.manifest
    padded = replace(manifest.dimensions, head_size=head_size or manifest.dimensions.head_size)
    longest = {"source": manifest.limits.max_source_length, "batch": max_batch_size}
    profiles = {ENCODER_PLAN: (_profile(encoder_inputs(), longest),)}
    most = max(max_beam_size, manifest.limits.max_target_length)
    for capacity in capacities:
        queries = min(most, capacity), min(max_beam_size, capacity)  # of prompts, and of the steps of a search
        inputs = decoder_step_inputs(padded, float_type)
        sizes = [{**longest, "query": query, "capacity": capacity} for query in queries]
        profiles[step_plan(capacity)] = tuple(_profile(inputs, largest) for largest in sizes)
    source = bundle.variant_path("fp32")
    record = EngineRecord(
        **{
            "name": name,
            "flavor": flavor,
            "flavor_version": VERSIONS[flavor],
            "compute_capabilities": ("8.9",),
            "variant": "fp32",
            "compute": COMPUTES[float_type],
            "float_type": float_type,
            "max_batch_size": max_batch_size,
            "max_beam_size": max_beam_size,
            "max_source_length": manifest.limits.max_source_length,
            "max_target_length": manifest.limits.max_target_length,
            "capacities": capacities,
            "plans": {plan: plan_file(plan) for plan in profiles},
            "onnx_hashes": {"onnx/fp32/" + file: file_hash(source / file) for file in (ENCODER, DECODER_STEP)},
            "head_size_padded": padded.head_size,
            "attention": "decomposed",
            "profiles": profiles,
            "build_seconds": 1.5,
            **fields,
        }
    )
    write_plans(bundle, record)
    return record


def write_plans(bundle: Bundle, record: EngineRecord) -> None:
    """Write the plans of an engine, for the emulated GPU, and put the engine into the bundle's manifest.

    Args:
        bundle: with fp32 graphs, which the plans have whatever the variant.
        record: of the engine; what its plans take is as it says.
    """
    dimensions, folder = bundle.manifest.dimensions, bundle.path / ENGINES / record.name
    padded, kind = replace(dimensions, head_size=record.head_size_padded), record.float_type
    folder.mkdir(parents=True, exist_ok=True)
    for plan, file in record.plans.items():
        encoder = plan == ENCODER_PLAN
        capacity = -1 if encoder else int(plan.rpartition("_")[2])
        inputs = encoder_inputs() if encoder else decoder_step_inputs(padded, kind)
        outputs = (encoder_outputs if encoder else decoder_step_outputs)(padded, kind)
        facts = PlanFacts(
            flavor=record.flavor,
            inputs={spec.name: (spec.dtype, _shape(spec, capacity)) for spec in inputs},
            outputs={spec.name: (spec.dtype, _shape(spec, capacity)) for spec in outputs},
            profiles=[{name: [*map(list, shapes)] for name, shapes in p.items()} for p in record.profiles[plan]],
            aliases={} if encoder else {cache_output_name(cache): cache for cache in self_cache_names(padded)},
            head_size=dimensions.head_size,
        )
        graph = onnx.load(bundle.variant_path("fp32") / (ENCODER if encoder else DECODER_STEP))
        (folder / file).write_bytes(facts.to_plan(graph.SerializeToString()))
    (folder / ENGINE_FILE).write_text(record.to_json(), encoding="utf-8")
    _record(bundle, record, [file for file in folder.iterdir() if file.is_file()])


def _shape(spec: TensorSpec, capacity: int) -> list[int]:
    return [axis if isinstance(axis, int) else capacity if axis == "capacity" else -1 for axis in spec.axes]


def _profile(inputs: list[TensorSpec], largest: dict[str, int]) -> dict[str, Shapes]:
    smallest = {**dict.fromkeys(largest, 1), "capacity": largest.get("capacity", 1)}

    def shape(spec: TensorSpec, sizes: dict[str, int]) -> tuple[int, ...]:
        return tuple(axis if isinstance(axis, int) else sizes[axis] for axis in spec.axes)

    return {spec.name: (shape(spec, smallest), shape(spec, largest), shape(spec, largest)) for spec in inputs}


def _record(bundle: Bundle, record: EngineRecord, files: list[Path]) -> None:
    """In the bundle's manifest, in memory and on disk."""
    graphs = dict.fromkeys(record.onnx_hashes, "what an engine is made from")
    bundle.add_files({**graphs, **{f"{ENGINES}/{record.name}/{file.name}": "part of an engine" for file in files}})
    engines = {**bundle.manifest.engines, record.name: record.facts()}
    bundle.manifest = replace(bundle.manifest, engines=engines)
    bundle.save()
