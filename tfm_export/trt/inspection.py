"""What a plan says of itself once it is loaded, which takes a GPU."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfm_export.errors import BuildError
from tfm_export.graph import cache_output_name
from tfm_export.trt.flavor import Flavor
from tfm_export.trt.network_source import NetworkSource
from tfm_export.trt.proof import type_name


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What the engine inspector says.

    Attributes:
        layers: its JSON.
        device_memory_bytes: what a context takes beside weights, inputs and outputs.
    """

    layers: str
    device_memory_bytes: int


def can_inspect(flavor: Flavor, targets: tuple[str, ...]) -> bool:
    """Whether there is a GPU here that an engine for these compute capabilities runs on."""
    return flavor.gpu is not None and flavor.gpu in targets


def inspect_plan(flavor: Flavor, source: NetworkSource, plan: Path) -> Inspection:
    """Load a plan, compare it with the graph's table, and ask the engine inspector for its layers.

    Args:
        flavor: the library that it was built with.
        source: what it was made from.
        plan: the file.

    Raises:
        BuildError: it does not load, or an input or output is not as in the table.
    """
    trt = flavor.module
    runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
    with open(plan, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        raise BuildError(f"{flavor.label} does not load {plan.name}, which it has just built")
    if problems := list(_problems(engine, source)):
        raise BuildError([f"{source.plan} is not what was asked for: {problem}" for problem in problems])
    inspector = engine.create_engine_inspector()
    layers = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    return Inspection(layers=str(layers), device_memory_bytes=int(engine.device_memory_size_v2))


def _problems(engine: Any, source: NetworkSource) -> Iterator[str]:
    wanted = Counter({spec.name: 1 for spec in (*source.inputs, *source.outputs)})
    found = Counter(engine.get_tensor_name(index) for index in range(engine.num_io_tensors))
    if wanted != found:
        yield f"it has the inputs and outputs {sorted(found)}, expected {sorted(wanted)}"
        return
    for spec in (*source.inputs, *source.outputs):
        if (kind := type_name(engine.get_tensor_dtype(spec.name))) != spec.dtype:
            yield f"{spec.name} must be {spec.dtype}, found {kind}"
    caches = {cache_output_name(spec.name): spec.name for spec in source.inputs}
    for spec in source.outputs:
        if spec.name in caches and engine.get_aliased_input_tensor(spec.name) != caches[spec.name]:
            yield f"{spec.name} must be the memory of {caches[spec.name]}"
    if engine.num_optimization_profiles != len(source.profiles):
        yield f"it has {engine.num_optimization_profiles} profiles, expected {len(source.profiles)}"
