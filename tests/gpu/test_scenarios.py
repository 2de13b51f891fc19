"""The scenarios themselves, on the emulated GPU: they pass where all is well, and fail where it is not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.emulation import Machine, emulated_gpu
from tests.emulation.engines import add_engine
from tests.emulation.onnx_cuda import emulated_provider
from tests.gpu.scenarios import MOST_DEVICE_GROWTH, compare_with_pytorch, decode_in_threads, decode_many
from tfm_export.bundle import Bundle
from tfm_export.runtime.backends import BackendChoice
from tfm_export.runtime.step_model import StepModel


@pytest.fixture(scope="module", params=["onnxruntime", "tensorrt"])
def served(
    request: pytest.FixtureRequest, tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[StepModel, Bundle, Machine]]:
    bundle = Bundle.open(shutil.copytree(tiny_bundle, tmp_path_factory.mktemp("gpu") / "bundle"))
    machine = Machine()
    if request.param == "tensorrt":
        add_engine(bundle, "emulated", max_batch_size=16, capacities=(64, 160))
        with emulated_gpu(machine):
            model = BackendChoice(variant="fp32", gpu=0, engine="emulated").open(bundle)
    else:
        with emulated_provider(machine):
            model = BackendChoice(variant="fp32", gpu=0).open(bundle)
    yield model, bundle, machine
    model.close()
    assert machine.violations == []


def test_generations_alone_batched_and_padded(served: tuple[StepModel, Bundle, Machine]) -> None:
    model, bundle, _ = served
    comparisons = compare_with_pytorch(model, bundle, "fp32")
    assert len(comparisons) == 6
    assert all(comparison.passed and comparison.identical == comparison.count for comparison in comparisons)


def test_threads(served: tuple[StepModel, Bundle, Machine]) -> None:
    model, bundle, _ = served
    assert decode_in_threads(model, bundle, rounds=2) == 0


def test_memory(served: tuple[StepModel, Bundle, Machine]) -> None:
    model, bundle, machine = served
    found = decode_many(model, bundle, machine.free_bytes, decodes=60)
    assert 60 <= found["decodes"] < 80
    assert abs(found["device_growth"]) < MOST_DEVICE_GROWTH


def test_a_leak_and_a_wrong_model_are_found(
    served: tuple[StepModel, Bundle, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, bundle, machine = served
    encode, kept = type(model).encode, []

    def leaking(self: StepModel, *arguments: np.ndarray, capacity: int) -> object:
        kept.append(machine.allocate(1 << 20, "device"))
        return encode(self, *arguments, capacity=capacity)

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "encode", leaking)
        found = decode_many(model, bundle, machine.free_bytes, decodes=60)
    for address in kept:
        machine.free(address, "device")
    assert found["device_growth"] > MOST_DEVICE_GROWTH
    special = bundle.manifest.special_ids
    other = Bundle(bundle.path, replace(bundle.manifest, special_ids=replace(special, bos=7)))
    assert not all(comparison.passed for comparison in compare_with_pytorch(model, other, "fp32"))
