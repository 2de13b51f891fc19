"""Engines for the emulated GPU, put into bundles as `tfm-export trt` would."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from tests.emulation.tensorrt import VERSIONS, PlanFacts
from tfm_export.bundle import Bundle, file_hash
from tfm_export.engines import ENCODER_PLAN, ENGINE_FILE, ENGINES, FLOAT_TYPES, EngineRecord, Shapes, step_plan
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

COMPUTES = {float_type: compute for compute, float_type in FLOAT_TYPES.items()}


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
    most = max(max_beam_size, manifest.limits.max_target_length)
    folder = bundle.path / ENGINES / name
    folder.mkdir(parents=True, exist_ok=True)
    aliases = {cache_output_name(cache): cache for cache in self_cache_names(padded)}
    source, profiles = bundle.variant_path("fp32"), {}

    def write(
        plan: str, graph: str, inputs: list[TensorSpec], outputs: list[TensorSpec], sizes: list[dict[str, int]]
    ) -> None:
        fixed = {"capacity": sizes[0].get("capacity", -1)}
        shapes = [{spec.name: _shapes(spec, largest) for spec in inputs} for largest in sizes]
        facts = PlanFacts(
            flavor=flavor,
            inputs={spec.name: (spec.dtype, _shape(spec, fixed)) for spec in inputs},
            outputs={spec.name: (spec.dtype, _shape(spec, fixed)) for spec in outputs},
            profiles=shapes,
            aliases=aliases if "capacity" in sizes[0] else {},
            head_size=manifest.dimensions.head_size,
        )
        content = onnx.load(source / graph).SerializeToString()
        (folder / f"{plan}.plan").write_bytes(facts.to_plan(content))
        profiles[plan] = tuple(shapes)

    write(ENCODER_PLAN, ENCODER, encoder_inputs(), encoder_outputs(padded, float_type), [longest])
    for capacity in capacities:
        queries = min(most, capacity), min(max_beam_size, capacity)  # of prompts, and of the steps of a search
        sizes = [{**longest, "query": query, "capacity": capacity} for query in queries]
        inputs, outputs = decoder_step_inputs(padded, float_type), decoder_step_outputs(padded, float_type)
        write(step_plan(capacity), DECODER_STEP, inputs, outputs, sizes)
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
            "plans": {plan: f"{plan}.plan" for plan in profiles},
            "onnx_hashes": {"onnx/fp32/" + file: file_hash(source / file) for file in (ENCODER, DECODER_STEP)},
            "head_size_padded": padded.head_size,
            "attention": "decomposed",
            "profiles": profiles,
            "build_seconds": 1.5,
            **fields,
        }
    )
    (folder / ENGINE_FILE).write_text(record.to_json(), encoding="utf-8")
    _record(bundle, record, [file for file in folder.iterdir() if file.is_file()])
    return record


def _shape(spec: TensorSpec, fixed: dict[str, int]) -> list[int]:
    return [axis if isinstance(axis, int) else fixed.get(axis, -1) for axis in spec.axes]


def _shapes(spec: TensorSpec, largest: dict[str, int]) -> Shapes:
    smallest = {**dict.fromkeys(largest, 1), "capacity": largest.get("capacity", 1)}
    ends = [
        tuple(axis if isinstance(axis, int) else sizes[axis] for axis in spec.axes) for sizes in (smallest, largest)
    ]
    return ends[0], ends[1], ends[1]


def _record(bundle: Bundle, record: EngineRecord, files: list[Path]) -> None:
    """In the bundle's manifest, in memory and on disk."""
    graphs = dict.fromkeys(record.onnx_hashes, "a graph")
    bundle.add_files({**graphs, **{f"{ENGINES}/{record.name}/{file.name}": "part of an engine" for file in files}})
    engines = {**bundle.manifest.engines, record.name: record.facts()}
    bundle.manifest = replace(bundle.manifest, engines=engines)
    bundle.save()
