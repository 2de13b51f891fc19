"""Step by step: log-probabilities and every cached tensor of a runtime against PyTorch in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tfm_export import graph
from tfm_export.precision import Tolerance
from tfm_export.runtime.step_model import Sentences, StepModel
from tfm_export.verify.reference import Reference, ReferenceRun, in_precision, run_reference
from tfm_export.verify.report import TensorComparison


@dataclass(frozen=True)
class TeacherForcing:
    """Random sources and targets, padded, at shapes that no exporter has traced.

    Attributes:
        source_ids: [B, S] int64.
        source_mask: [B, S] bool.
        target_ids: [B, T] int64.
        prefix: how many target tokens the first step takes at once; then they go one by one.
    """

    source_ids: NDArray[np.int64]
    source_mask: NDArray[np.bool_]
    target_ids: NDArray[np.int64]
    prefix: int

    @classmethod
    def random(
        cls, model: StepModel, *, batch: int, source: int, target: int, prefix: int, seed: int
    ) -> TeacherForcing:
        """Draw ids; row i is i source tokens shorter than the longest. Sizes are cut to the model's limits."""
        rng, sizes = np.random.default_rng(seed), model.dimensions
        source, target = min(source, model.limits.max_source_length), min(target, model.limits.max_target_length)
        lengths = np.maximum(source - np.arange(batch) * max(1, source // batch), 1)
        return cls(
            rng.integers(0, sizes.source_vocabulary_size, (batch, source)),
            np.arange(source) < lengths[:, None],
            rng.integers(0, sizes.target_vocabulary_size, (batch, target)),
            min(prefix, target),
        )


# Batch 1 without padding, batches with it, single tokens; the export traces batch 2, source 7, query 3, capacity 16.
CASES = (
    {"batch": 3, "source": 11, "target": 13, "prefix": 4, "seed": 1},
    {"batch": 1, "source": 5, "target": 6, "prefix": 1, "seed": 2},
    {"batch": 5, "source": 23, "target": 9, "prefix": 9, "seed": 3},
    {"batch": 2, "source": 1, "target": 1, "prefix": 1, "seed": 4},
)


@dataclass(frozen=True)
class StepsComparison:
    """The tensors' distances, and how often the best token is PyTorch's."""

    tensors: list[TensorComparison]
    argmax_agreement: float


def compare_steps(model: StepModel, reference: Reference, tolerance: Tolerance) -> StepsComparison:
    """Run every case step by step and hold each step to a whole forward pass of the reference in float64.

    Args:
        model: the runtime to judge.
        reference: the same weights in PyTorch, float32.
        tolerance: how far it may be.
    """
    exact = in_precision(reference, torch.float64)
    errors: dict[str, float] = {}
    own_errors: dict[str, float] = {}
    agreed = total = 0
    for case in CASES:
        forcing = TeacherForcing.random(model, **case)
        tensors = [torch.from_numpy(x) for x in (forcing.source_ids, forcing.source_mask, forcing.target_ids)]
        truth, own = run_reference(exact, *tensors), run_reference(reference, *tensors)
        log_probs = _run_steps(model, forcing, truth, errors)
        _note(own_errors, "log_probs", own.log_probs, truth.log_probs)
        for name, value in truth.keys_values.items():
            visible = forcing.source_mask[:, None, :, None] if name.startswith("cross") else True
            _note(own_errors, name, np.where(visible, own.keys_values[name], 0), np.where(visible, value, 0))
        agreed += int((log_probs.argmax(-1) == truth.log_probs.argmax(-1)).sum())
        total += log_probs.shape[0] * log_probs.shape[1]
    own_errors["top_log_probs"] = own_errors["log_probs"]
    comparisons = [
        TensorComparison(
            name=name, error=errors[name], own_error=own_errors[name], limit=tolerance.limit(own_errors[name])
        )
        for name in errors
    ]
    return StepsComparison(comparisons, agreed / total)


def _run_steps(
    model: StepModel, forcing: TeacherForcing, truth: ReferenceRun, errors: dict[str, float]
) -> NDArray[np.float32]:
    """Feed the targets through the cache, noting errors after every step. Returns log_probs [B, T, V]."""
    batch, length = forcing.target_ids.shape
    # Row i starts at slot i: rows need not write in step, and slots that nobody has written must not matter.
    offset = np.arange(batch)
    sentences = model.encode(forcing.source_ids, forcing.source_mask, capacity=length + batch + 2)
    slots = np.arange(sentences.capacity)
    cross = forcing.source_mask[:, None, :, None]
    for name in graph.cross_names(model.dimensions):
        _note(errors, name, np.where(cross, sentences.read(name), 0), np.where(cross, truth.keys_values[name], 0))
    collected = []
    start = 0
    while start < length:
        queries = forcing.prefix if start == 0 else 1
        positions = np.broadcast_to(np.arange(start, start + queries), (batch, queries)).copy()
        first, last = offset[:, None, None], (offset[:, None] + positions)[:, :, None]
        mask = (slots >= first) & (slots <= last)
        output = sentences.step(
            forcing.target_ids[:, start : start + queries], positions, offset + start, mask[:, None], full=True
        )
        assert output.log_probs is not None
        collected.append(output.log_probs.copy())
        _note(errors, "log_probs", collected[-1], truth.log_probs[:, start : start + queries])
        chosen = np.take_along_axis(truth.log_probs[:, start : start + queries], output.top_ids, -1)
        _note(errors, "top_log_probs", output.top_log_probs, chosen)
        start += queries
        _compare_caches(sentences, model, offset, start, truth, errors)
    return np.concatenate(collected, 1)


def _compare_caches(
    sentences: Sentences,
    model: StepModel,
    offset: NDArray[np.int64],
    written: int,
    truth: ReferenceRun,
    errors: dict[str, float],
) -> None:
    for name in graph.self_cache_names(model.dimensions):
        cache, expected = sentences.read(name), truth.keys_values[name]
        for row, first in enumerate(offset):
            _note(errors, name, cache[row, :, first : first + written], expected[row, :, :written])


def _note(errors: dict[str, float], name: str, found: NDArray[np.floating], expected: NDArray[np.floating]) -> None:
    """Keep the largest error of a tensor; NaN counts as infinite."""
    error = float(np.abs(found.astype(np.float64) - expected).max())
    errors[name] = max(errors.get(name, 0.0), error if np.isfinite(error) else np.inf)
