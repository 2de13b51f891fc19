"""Graphs on disk after a pass, and what ONNX Runtime gives for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime

from tests.passes.typed_modules import Arrays, Case
from tfm_export import graph
from tfm_export.graph import Dimensions
from tfm_export.graph_files import WeightsFile, read_graph

FILES = (graph.ENCODER, graph.DECODER_STEP, graph.DECODER_STEP_ATTENTION)


def write_graphs(source: Path, target: Path, change: Callable[[ir.Model], object]) -> Path:
    """Copy the graphs of a folder, each changed in place on the way."""
    target.mkdir(parents=True)
    weights = WeightsFile(target / graph.WEIGHTS)
    for name in FILES:
        if (source / name).exists():
            model = read_graph(source / name)
            change(model)
            weights.write(model, target / name)
    return target


def load(path: Path, optimised: Path | None = None) -> onnxruntime.InferenceSession:
    """A session of one thread, without its warnings; it may write what it made of the graph."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    if optimised is not None:
        options.optimized_model_filepath = str(optimised)
    return onnxruntime.InferenceSession(path, options)


def run(path: Path, feeds: Arrays) -> Arrays:
    """Every output of a graph by name."""
    session = load(path)
    names = [value.name for value in session.get_outputs()]
    inputs = {value.name for value in session.get_inputs()}
    return dict(zip(names, session.run(None, {n: a for n, a in feeds.items() if n in inputs}), strict=True))


def run_graphs(folder: Path, case: Case, sizes: Dimensions, float_type: str, *, attention: bool = False) -> Arrays:
    """What the graphs of a folder give for a case; named and typed as by `typed_modules.run_modules`."""
    file = graph.DECODER_STEP_ATTENTION if attention else graph.DECODER_STEP
    shape = (len(case.source_ids), sizes.heads, case.capacity, sizes.head_size)
    source = {"source_ids": case.source_ids, "source_mask": case.source_mask}
    caches = dict.fromkeys(graph.self_cache_names(sizes), np.zeros(shape, float_type))
    cross = run(folder / graph.ENCODER, source)
    found = dict(cross)
    for number, step in enumerate(case.steps):
        outputs = run(folder / file, {**step, **source, **cross, **caches})
        caches = {name: outputs[graph.cache_output_name(name)] for name in caches}
        found |= {f"{name}, step {number}": value for name, value in outputs.items()}
    return {name: np.asarray(value, np.float64) for name, value in found.items()}


def give_every_value(model: ir.Model) -> None:
    """Make outputs of all float32 values that a graph computes."""
    values = [value for node in model.graph for value in node.outputs if value.dtype == ir.DataType.FLOAT]
    model.graph.outputs.extend(value for value in values if not value.is_graph_output())


def ranges_of(folder: Path, scratch: Path, case: Case, sizes: Dimensions) -> dict[str, dict[str, float]]:
    """The largest absolute value of every float32 value in a case's encoder and first step, by the graph's file."""
    probes = write_graphs(folder, scratch, give_every_value)
    shape = (len(case.source_ids), sizes.heads, case.capacity, sizes.head_size)
    feeds: Arrays = {"source_ids": case.source_ids, "source_mask": case.source_mask, **case.steps[0]}
    feeds |= dict.fromkeys(graph.self_cache_names(sizes), np.zeros(shape, np.float32))
    ranges = {}
    for file in (name for name in FILES if (probes / name).exists()):
        values = run(probes / file, feeds)
        feeds |= {name: value for name, value in values.items() if name in graph.cross_names(sizes)}
        ranges[file] = {name: float(np.abs(value).max()) for name, value in values.items()}
    return ranges
