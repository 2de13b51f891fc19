"""Every backend and precision that this GPU takes: PyTorch's generations, threads, memory, and what `load` picks."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import tfm_export
from tests.gpu.conftest import G2P, SERVED, Served
from tests.gpu.conftest import tfm_export as run_command
from tests.gpu.scenarios import (
    MOST_DEVICE_GROWTH,
    MOST_HOST_GROWTH,
    compare_with_pytorch,
    decode_in_threads,
    decode_many,
)
from tests.skips import ANOTHER_GPU, does_not_apply, skip
from tfm_export.bundle import GOLDEN, Bundle
from tfm_export.errors import BackendUnavailable
from tfm_export.precision import PRECISIONS
from tfm_export.runtime.backends import BackendChoice, open_backend, survey
from tfm_export.runtime.gpu import cuda
from tfm_export.verify import read_golden

pytestmark = pytest.mark.gpu


def test_generations_are_those_of_pytorch(served: Served, record_property: Callable[[str, object], None]) -> None:
    comparisons = compare_with_pytorch(served.model, served.bundle, served.variant)
    for comparison in comparisons:
        record_property(comparison.name, f"{comparison.identical} of {comparison.count}")
    assert comparisons
    assert [comparison.name for comparison in comparisons if not comparison.passed] == []


def test_every_tensor_is_pytorchs_step_by_step(served: Served, record_property: Callable[[str, object], None]) -> None:
    if not PRECISIONS[served.variant].judged_by_number:
        does_not_apply(f"{served.variant} rounds: its single numbers are not judged, its generations are")
    from reference_model import load_checkpoint
    from tfm_export.verify.reference import float64_reference
    from tfm_export.verify.steps import compare_steps, teacher_forcing

    manifest = served.bundle.manifest
    sizes, limits = manifest.dimensions, manifest.limits
    steps = compare_steps(
        served.bundle.variant_path(served.variant),
        sizes,
        teacher_forcing(sizes, limits, read_golden(served.bundle, GOLDEN), manifest.special_ids.bos),
        model=served.model,
        reference=float64_reference(load_checkpoint(G2P / "g2p.pt").model),
    )
    worst = max(steps.kernels, key=lambda tensor: tensor.share)
    record_property("worst tensor", f"{worst.name}, off by {worst.error:.1e} of {worst.limit:.1e}")
    assert [tensor.name for tensor in (*steps.graph, *steps.kernels) if not tensor.passed] == []


def test_many_threads_give_what_one_gives(served: Served) -> None:
    assert decode_in_threads(served.model, served.bundle) == 0


def test_memory_stays_where_it_is_over_2000_decodes(
    served: Served, record_property: Callable[[str, object], None]
) -> None:
    gpu = cuda.open_gpu(0)
    found = decode_many(served.model, served.bundle, gpu.free_bytes)
    for name, value in found.items():
        record_property(name, value)
    assert found["decodes"] >= 2000
    assert found["device_growth"] < MOST_DEVICE_GROWTH
    assert found["host_growth"] < MOST_HOST_GROWTH


@pytest.mark.parametrize(("backend", "variant"), SERVED, ids=["-".join(pair) for pair in SERVED])
def test_closing_gives_the_memory_back(
    g2p: Path, add_engine: Callable[[str, str], str], backend: str, variant: str
) -> None:
    if variant not in {"fp32", "fp16"}:
        does_not_apply("the same code as fp32 and fp16")
    engine = None if backend == "onnxruntime" else add_engine(backend, variant)
    choice, bundle = BackendChoice(variant=variant, gpu=0, engine=engine), Bundle.open(g2p, check_hashes=False)
    try:
        choice.check(bundle)
    except BackendUnavailable as problem:
        skip(*ANOTHER_GPU, found=" ".join(problem.problems))
    gpu, left = cuda.open_gpu(0), []
    for _ in range(4):
        model = choice.open(bundle)
        del model
        gc.collect()
        left.append(gpu.free_bytes())
    assert left[1] - left[-1] < MOST_DEVICE_GROWTH  # the first one brings in the libraries


def test_load_takes_an_engine_where_one_runs_and_doctor_says_the_same(g2p: Path) -> None:
    bundle = Bundle.open(g2p, check_hashes=False)
    runs = [str(way) for way, problem in survey(bundle) if problem is None]
    chosen, model = open_backend(bundle)
    model.close()
    assert str(chosen) == json.loads(run_command("doctor", g2p, "--json").stdout)["bundle"]["taken"]
    assert str(chosen) in runs
    assert (chosen.engine is not None) == any(text.startswith("the TensorRT engine") for text in runs)
    with tfm_export.load(g2p, device="cpu") as model_on_cpu:
        assert model_on_cpu.backend == "fp32 with ONNX Runtime on the CPU"
    with pytest.raises(BackendUnavailable, match="there is no GPU 99"):
        open_backend(bundle, device=99)
