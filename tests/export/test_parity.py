"""Random models through both graphs: every tensor, step by step, at shapes that were not traced."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.conftest import build_tiny_model
from tests.export.conftest import Exported
from tests.numerics import assert_close, exact_graph
from tfm_export.graph import ENCODER
from tfm_export.runtime.cpu.onnx_runtime import OnnxModel
from tfm_export.verify import steps
from tfm_export.verify.reference import Reference, float64_reference, run_reference
from tfm_export.verify.steps import TeacherForcing


def compare(
    exported: Exported, *cases: TeacherForcing, model: Reference | None = None, runtime: OnnxModel | None = None
) -> steps.StepsComparison:
    """Both verdicts; by default on the usual random ids and at the limits."""
    manifest = exported.bundle.manifest
    sizes, limits = manifest.dimensions, manifest.limits
    usual = steps.teacher_forcing(sizes, limits, [], manifest.special_ids.bos)
    some = iter([("these", case) for case in cases]) if cases else usual
    reference = None if model is None else float64_reference(model)
    return steps.compare_steps(exported.folder, sizes, some, model=runtime, reference=reference)


@pytest.fixture
def runtime(exported: Exported) -> OnnxModel:
    """The graphs, loaded."""
    return OnnxModel(exported.bundle, threads=1)


def test_every_tensor_is_pytorchs_step_by_step(exported: Exported, runtime: OnnxModel) -> None:
    comparison = compare(exported, model=exported.model, runtime=runtime)
    layers = exported.model.config.decoder_layers
    for tensors in (comparison.graph, comparison.kernels):
        assert len(tensors) == 4 * layers + 2  # self and cross, key and value; log_probs and top_log_probs
        for tensor in tensors:
            assert tensor.passed, tensor
    assert comparison.argmax_agreement == 1


def test_to_the_end_of_the_position_table(exported: Exported, runtime: OnnxModel) -> None:
    config = exported.model.config
    sizes = {"batch": 2, "source": config.max_length, "target": config.max_target_length, "prefix": 1}
    case = TeacherForcing.random(exported.bundle.manifest.dimensions, **sizes, seed=9, most_places=8)
    comparison = compare(exported, case, model=exported.model, runtime=runtime)
    assert all(tensor.passed for tensor in (*comparison.graph, *comparison.kernels))


def test_padding_of_any_width_changes_nothing(exported: Exported, runtime: OnnxModel) -> None:
    ids = np.array([[5, 1, 2]])
    if exported.model.config.source_vocabulary_size < 6:
        ids = ids % exported.model.config.source_vocabulary_size
    (exact,) = exact_graph(exported.folder / ENCODER, {"source_ids": ids, "source_mask": ids >= 0}, ["cross_key_0"])
    for width in (3, 4, 30):
        padded, mask = np.zeros((1, width), np.int64), np.zeros((1, width), np.bool_)
        padded[:, :3], mask[:, :3] = ids, True
        assert_close(runtime.encode(padded, mask, capacity=1).read("cross_key_0")[:, :, :3], exact)


@pytest.mark.parametrize("size", [0.0, 1e-9, 1e-4])
def test_a_difference_is_found_if_it_matters(export_configuration, size: float) -> None:
    """One weight of 16,384 in float64, where no rounding hides it."""
    exported = export_configuration("paper")
    other = build_tiny_model(seed=5).double()
    with torch.no_grad():
        other.decoder_layers[1].cross_attention.W_v.weight[0, 0] += size
    comparison = compare(exported, model=other)
    failed = {t.name for t in comparison.graph if not t.passed}
    assert failed == ({"cross_value_1", "log_probs", "top_log_probs"} if size else set())


def test_the_reference_keeps_what_the_cache_holds() -> None:
    """The hooks give the projections that attention itself computes."""
    model = build_tiny_model(seed=3)
    ids, mask = torch.tensor([[4, 5, 6, 2]]), torch.ones(1, 4, dtype=torch.bool)
    run = run_reference(model, ids, mask, torch.tensor([[1, 7, 8]]))
    memory = model.encode(ids, mask)
    key, value = model.decoder_layers[1].cross_attention.keys_values(memory)
    np.testing.assert_array_equal(run.keys_values["cross_key_1"], key.detach().double().numpy())
    np.testing.assert_array_equal(run.keys_values["cross_value_1"], value.detach().double().numpy())
    assert run.keys_values["self_key_0"].shape == (1, 4, 3, 16)
    assert not model.decoder_layers[0].self_attention.W_k._forward_hooks
