"""What a variant of a bundle makes of fixed sources and targets."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tfm_export.bundle import Bundle
from tfm_export.graph import GENERATE, encoder_outputs
from tfm_export.quantize.calibration import CalibrationSample
from tfm_export.quantize.sensitivity import teacher_forced
from tfm_export.runtime.cpu.onnx_runtime import OnnxModel
from tfm_export.verify.generate_graph import GenerateModel


def traces(bundle: Bundle) -> list[CalibrationSample]:
    """Random letters in, random tokens out; the same ones each time."""
    random, manifest = np.random.default_rng(3), bundle.manifest
    special, sizes = manifest.special_ids, manifest.dimensions
    return [
        CalibrationSample(
            [*random.integers(4, sizes.source_vocabulary_size, n).tolist(), special.eos],
            [special.bos, *random.integers(4, sizes.target_vocabulary_size, n).tolist()],
        )
        for n in (3, 6, 9, 12)
    ]


def log_probs(bundle: Bundle, variant: str) -> NDArray[np.float32]:
    """Of every token [tokens, V]."""
    model = OnnxModel(bundle, variant=variant, threads=1)
    found = teacher_forced(model, traces(bundle))
    model.close()
    return found


def encoded(bundle: Bundle, variant: str) -> NDArray[np.float32]:
    """The cross-attention keys and values of the longest source, one behind the other."""
    model, source = OnnxModel(bundle, variant=variant, threads=1), np.array([traces(bundle)[-1].source_ids])
    sentences = model.encode(source, np.ones(source.shape, np.bool_), capacity=1)
    names = [spec.name for spec in encoder_outputs(model.dimensions)]
    found = np.concatenate([sentences.read(name).ravel() for name in names])
    model.close()
    return found


def generated(bundle: Bundle, variant: str) -> NDArray[np.float64]:
    """The score of each source's target, and its tokens, one behind the other."""
    model = GenerateModel(bundle.variant_path(variant) / GENERATE, bundle, variant, threads=1)
    found = model.decode([trace.source_ids for trace in traces(bundle)], 2, max_length=12)
    return np.array([number for one in found for number in (one.score, *one.tokens)])
