"""Which layers cost most quality: each is quantised alone, and the model's probabilities are compared with fp32's."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from tfm_export.bundle import Bundle
from tfm_export.graph_files import read_graph
from tfm_export.passes.recipe import Recipe, convert, layer_names
from tfm_export.progress import Progress
from tfm_export.quantize.calibration import CalibrationSample
from tfm_export.runtime.cpu.onnx_runtime import OnnxModel
from tfm_export.runtime.step_model import StepModel

MOST_SAMPLES = 16
MOST_TOKENS = 512


def layer_costs(
    bundle: Bundle,
    recipe: Recipe,
    samples: Sequence[CalibrationSample],
    *,
    threads: int | None,
    progress: Progress,
) -> dict[str, float]:
    """What each layer that a recipe quantises costs alone, the most expensive first.

    The cost is the Kullback-Leibler divergence of the model's probabilities from fp32's, in nats a token, the mean over
    teacher-forced samples.

    Args:
        bundle: with the fp32 graphs.
        recipe: of the variant; the layers it skips are left out.
        samples: real inputs and what fp32 made of them; the first `MOST_SAMPLES` and `MOST_TOKENS` are used.
        threads: for the runtime.
        progress: told what begins.
    """
    folder = bundle.variant_path("fp32")
    some = _some(samples)
    layers = [name for name in layer_names(folder) if name not in recipe.skip]
    model = OnnxModel(bundle, threads=threads)
    truth = teacher_forced(model, some)
    model.close()
    costs = {}
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(shutil.copytree(folder, Path(temporary) / "graphs"))
        for i, layer in enumerate(layers):
            progress(f"measuring what each layer costs, {i + 1} of {len(layers)}")
            name = layer.partition("/")[0]
            _write_graph(folder, work, name, replace(recipe, skip=recipe.skip | set(layers) - {layer}))
            model = OnnxModel(bundle, variant=recipe.precision, folder=work, threads=threads)
            costs[layer] = _divergence(truth, teacher_forced(model, some))
            model.close()
            shutil.copy(folder / f"{name}.onnx", work / f"{name}.onnx")
    return dict(sorted(costs.items(), key=lambda item: -item[1]))


def teacher_forced(model: StepModel, samples: Sequence[CalibrationSample]) -> NDArray[np.float32]:
    """The log-probabilities [tokens, V] of every target token of the samples, one sample behind the other."""
    rows = []
    for sample in samples:
        length = len(sample.target_ids)
        source = np.array([sample.source_ids], np.int64)
        sentences = model.encode(source, np.ones(source.shape, np.bool_), capacity=length)
        output = sentences.step(
            np.array([sample.target_ids], np.int64),
            np.arange(length)[None],
            np.zeros(1, np.int64),
            np.tri(length, dtype=np.bool_)[None, None],
            full=True,
        )
        assert output.log_probs is not None
        rows.append(output.log_probs[0].copy())
    return np.concatenate(rows)


def _some(samples: Sequence[CalibrationSample]) -> list[CalibrationSample]:
    some: list[CalibrationSample] = []
    for sample in samples[:MOST_SAMPLES]:
        if some and sum(len(t.target_ids) for t in some) + len(sample.target_ids) > MOST_TOKENS:
            break
        some.append(sample)
    return some


def _write_graph(folder: Path, work: Path, name: str, recipe: Recipe) -> None:
    """One graph with the recipe applied; what it does not change stays in the fp32 file of weights."""
    model = read_graph(folder / f"{name}.onnx")
    convert(model, name, recipe)
    (work / f"{name}.onnx").write_bytes(ir.serde.serialize_model(model).SerializeToString())


def _divergence(truth: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    """The mean of KL(fp32 || variant) over tokens; what is not finite is infinitely bad."""
    terms = np.exp(truth, dtype=np.float64) * (truth.astype(np.float64) - found)
    cost = float(terms.sum(-1).mean())
    return cost if np.isfinite(cost) else float("inf")
