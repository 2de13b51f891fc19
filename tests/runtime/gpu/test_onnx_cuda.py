"""ONNX Runtime's CUDA provider on the emulated GPU: what it refuses, what it copies, what it leaves behind."""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.emulation import EmulationError, Machine, emulated_gpu
from tests.emulation.onnx_cuda import Binding, Provider, Session, emulated_provider
from tests.numerics import assert_close, exact_arrays
from tests.runtime.conftest import ATTENTION_LAYER, LIMITS, Backends
from tests.runtime.drive import Batch, padded
from tests.skips import ON_LINUX, skip
from tfm_export.bundle import Bundle
from tfm_export.decoding import DecodeOptions, generate
from tfm_export.errors import BackendUnavailable, BundleError, NumericError, RequestError
from tfm_export.graph import DECODER_STEP, DECODER_STEP_ATTENTION, ENCODER
from tfm_export.runtime.backends import attending_on_cpu
from tfm_export.runtime.gpu import cuda_provider, onnx_cuda
from tfm_export.runtime.gpu.cuda_provider import check_cuda_provider
from tfm_export.runtime.gpu.device_worker import Worker
from tfm_export.runtime.gpu.onnx_cuda import OnnxCudaModel
from tfm_export.runtime.step_model import StepModel
from tfm_export.runtime.torch_model import TorchModel

SOURCES = [[5, 7, 9, 11, 2], [4, 2], [8, 8, 10, 2]]


def load(bundle: Bundle, machine: Machine | None = None, provider: Provider | None = None, **options: Any) -> Any:
    with emulated_provider(machine, provider):
        return OnnxCudaModel(bundle, attending=partial(attending_on_cpu, bundle, "fp32"), **options)


def test_a_batch_that_grows_and_changes_on_the_second_gpu_leaves_nothing(backends: Backends) -> None:
    machine = Machine()
    model = load(backends.bundle, machine, device=1)
    batch = Batch(model, backends.exact, SOURCES, capacity=3)
    errors = [batch.step(queries=3), batch.sentences.grow(40) or batch.step()]
    batch.leave(0)
    batch.join([[30, 29, 28, 27, 26, 25, 24, 2], [9]])
    errors += [batch.step(queries=2), batch.step()]
    assert max(errors) <= 1
    assert {block.device for block in machine.live_blocks} == {1}
    del batch
    model.close()
    gc.collect()
    assert machine.leaks() == machine.violations == []


def test_a_step_brings_back_the_best_tokens_and_no_more(backends: Backends) -> None:
    machine = Machine()
    model = load(backends.bundle, machine)
    sentences = model.encode(*padded(SOURCES), capacity=16)
    arguments = (np.full((3, 1), 5), np.zeros((3, 1), np.int64), np.zeros(3, np.int64), np.ones((3, 1, 1, 16), bool))
    sentences.step(*arguments)
    before, blocks = machine.calls.copy(), len(machine.live_blocks)
    for _ in range(5):
        sentences.step(*arguments)
    calls = machine.calls - before
    assert calls["cudaMemcpyAsync"] == 2 * 5  # the inputs in one, the best tokens in another
    assert calls["cudaMalloc"] == calls["cudaMemsetAsync"] == calls["cudaMemcpy3DAsync"] == 0
    assert len(machine.live_blocks) == blocks


@pytest.mark.parametrize("rows", [1, 3])
def test_capacities_are_few_and_multiples_of_eight(backends: Backends, rows: int) -> None:
    sentences = backends.onnx_cuda.encode(*padded(SOURCES[:rows]), capacity=1)
    found = set()
    for capacity in range(1, 200):
        sentences.grow(capacity)
        found.add(sentences.lease.memory.capacity)
        assert sentences.lease.memory.capacity >= capacity == sentences.capacity
    assert found == {16, 24, 32, 48, 64, 96, 128, 192, 256}


def test_more_rows_than_memory_was_made_for_are_refused(backends: Backends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_cuda, "MOST_ROWS", 2)
    model = load(backends.bundle)
    assert model.encode(*padded(SOURCES[:2]), capacity=4).size == 2
    with pytest.raises(RequestError, match="a batch may have 2 sentences on this GPU, found 3"):
        model.encode(*padded(SOURCES), capacity=4)


def test_attention_comes_from_the_cpu(backends: Backends) -> None:
    slow = load(backends.bundle).with_attention()
    exact = TorchModel(backends.exact.model, limits=LIMITS, attention_layer=ATTENTION_LAYER)
    options = DecodeOptions(max_decoding_length=6, return_attention=True)
    special = backends.bundle.manifest.special_ids

    def attention(model: StepModel) -> list[np.ndarray]:
        return [r.hypotheses[0].attention for r in generate(model, SOURCES, options, special)]

    for found, expected in zip(attention(slow), exact_arrays(lambda: attention(exact)), strict=True):
        assert_close(found, expected)


def test_a_closed_model_lets_batches_end_and_takes_no_new_ones(backends: Backends) -> None:
    machine = Machine()
    model = load(backends.bundle, machine)
    batch = Batch(model, backends.exact, SOURCES, capacity=8)
    model.close()
    assert batch.step() <= 1
    for call in (lambda: model.encode(*padded(SOURCES), capacity=8), model.with_attention):
        with pytest.raises(RequestError, match="the model is closed"):
            call()
    del batch, call
    gc.collect()
    assert machine.leaks() == machine.violations == []


# What is not there, or not as it should be.

PROBLEMS: dict[str, tuple[Provider, str]] = {
    "the package for CPUs": (Provider(providers=("CPUExecutionProvider",)), "has no CUDA provider: it is the package"),
    "too old": (Provider(version="1.26.0"), r"expected onnxruntime-gpu 1\.27 or newer, found 1\.26\.0"),
    "falls back": (Provider(works=False), "could not begin with GPU 0"),
    "splits the graph": (
        Provider(on_the_cpu=("Concat", "TensorScatter", "Attention", "Attention")),
        "no CUDA kernels for some of fp32: 2 Attention, 1 TensorScatter",
    ),
    "no kernels for this GPU": (
        Provider(failure=RuntimeError("no kernel image is available for execution on the device")),
        r"could not run .*encoder\.onnx: no kernel image",
    ),
    "no memory left": (
        Provider(failure=RuntimeError("Failed to allocate memory for requested buffer of size 123")),
        "does not fit into the GPU's memory: Failed to allocate",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_is_missing_is_told_and_nothing_is_left(backends: Backends, name: str) -> None:
    provider, message = PROBLEMS[name]
    machine = Machine()
    with pytest.raises(BackendUnavailable, match=message):
        load(backends.bundle, machine, provider)
    gc.collect()
    assert machine.leaks() == []


def test_no_driver_or_another_gpu(backends: Backends) -> None:
    with pytest.raises(BackendUnavailable, match="no GPU"):
        load(backends.bundle, Machine(gpus=0))
    with pytest.raises(BackendUnavailable, match="there is no GPU 2"):
        load(backends.bundle, device=2)


def test_a_gpu_whose_memory_is_too_small(backends: Backends) -> None:
    machine = Machine(memory_bytes=20_000)
    with pytest.raises(BackendUnavailable, match="more are needed"):
        load(backends.bundle, machine)
    gc.collect()
    assert machine.leaks() == []


def test_a_run_that_finds_no_memory_later_is_the_requests_fault(backends: Backends) -> None:
    provider = Provider()
    model = load(backends.bundle, None, provider)
    provider.failure = RuntimeError("Failed to allocate memory for requested buffer")
    with pytest.raises(RequestError, match="does not fit"):
        model.encode(*padded(SOURCES), capacity=4)
    assert Batch(model, backends.exact, SOURCES, capacity=4).step() <= 1  # and the next one goes on


@pytest.mark.parametrize("variant", ["w8", "w4", "int8", "fp8"])
def test_quantised_variants_are_for_others(backends: Backends, variant: str) -> None:
    bundle = Bundle(backends.bundle.path, replace(backends.bundle.manifest, variants={"fp32": {}, variant: {}}))
    with pytest.raises(BackendUnavailable, match=f"has no kernels for {variant}, only for fp32, fp16, bf16"):
        load(bundle, variant=variant)


def test_a_damaged_graph_and_one_of_another_form(backends: Backends, tmp_path: Path) -> None:
    shutil.copytree(backends.bundle.path, tmp_path / "bundle")
    bundle = Bundle(tmp_path / "bundle", backends.bundle.manifest)
    folder = bundle.variant_path("fp32")
    (folder / ENCODER).write_bytes(b"nothing")
    with pytest.raises(BundleError, match="on GPU 0"):
        load(bundle)
    shutil.copy(folder / DECODER_STEP, folder / ENCODER)
    with pytest.raises(BundleError, match="input source_ids is missing"):
        load(bundle)
    (folder / DECODER_STEP_ATTENTION).unlink()
    shutil.copy(backends.bundle.variant_path("fp32") / ENCODER, folder)
    model = load(bundle)
    with pytest.raises(RequestError, match="so its steps cannot give attention"):
        model.with_attention()


def test_a_model_that_gives_no_numbers_loads_and_says_so_when_it_is_used(
    backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = Session._compute

    def broken(self: Session, binding: Binding, inputs: set[str]) -> None:
        compute(self, binding, inputs)
        if "top_log_probs" in binding.bound:
            self._array(binding.bound["top_log_probs"])[:] = np.nan

    monkeypatch.setattr(Session, "_compute", broken)
    model = load(backends.bundle)
    with pytest.raises(NumericError):
        Batch(model, backends.exact, SOURCES, capacity=4).step()


# The libraries that the provider needs.


def test_a_library_that_the_provider_misses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "linux":
        skip("the provider of Linux", *ON_LINUX)
    folder = tmp_path / "capi"
    folder.mkdir()
    for name in ("shared", "cuda"):
        (folder / f"libonnxruntime_providers_{name}.so").write_bytes(b"no library")
    printed: list[str] = []
    module = SimpleNamespace(
        __version__="1.31.1",
        __file__=str(tmp_path / "__init__.py"),
        get_available_providers=lambda: [cuda_provider.PROVIDER],
        preload_dlls=lambda: (printed.append("called"), print("Failed to load libcublasLt.so.13")),
    )
    monkeypatch.setattr(cuda_provider, "onnxruntime", module)
    with emulated_gpu(), pytest.raises(BackendUnavailable, match=r"provider cannot be loaded: .*file too short"):
        check_cuda_provider()
    assert printed == ["called"]


def test_what_the_preloading_prints_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO")
    with emulated_provider():
        monkeypatch.setattr(cuda_provider.onnxruntime, "preload_dlls", lambda: print("Failed to load libcudnn"))
        check_cuda_provider()
    assert capsys.readouterr().out == ""  # where a command may be printing JSON
    assert "Failed to load libcudnn" in caplog.text


# The emulation is strict: a runtime that is broken in one of these ways does not get through.


def bind_elsewhere(binding: Any, key: object, sizes: Any, addresses: dict[str, int]) -> None:
    other = {name: address + 256 if name.endswith("_out") else address for name, address in addresses.items()}
    BIND(binding, key, sizes, other)


def bind_freed(binding: Any, key: object, sizes: Any, addresses: dict[str, int]) -> None:
    BIND(binding, key, sizes, dict.fromkeys(addresses, 0x1234))


def run_at_once(binding: Any, stream: Any) -> None:  # noqa: ARG001 (without waiting for the copies on the stream)
    binding._session.run_with_iobinding(binding._binding)


def bind_once(binding: Any, key: object, sizes: Any, addresses: dict[str, int]) -> None:
    if binding._binding is None:
        BIND(binding, key, sizes, addresses)


BIND = onnx_cuda.SessionContext.bind
MUTATIONS: dict[str, tuple[str, Callable[..., None], str]] = {
    "caches out of place": ("bind", bind_elsewhere, "not updated in place|not in one piece"),
    "memory that is none": ("bind", bind_freed, "not in one piece of device memory"),
    "no wait for the inputs": ("enqueue", run_at_once, "does not wait for what another stream does"),
    "the first binding for ever": ("bind", bind_once, "is freed|write past the capacity|sees nothing|larger than"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_runtime_is_caught(backends: Backends, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    method, mutant, message = MUTATIONS[name]
    model = load(backends.bundle)
    monkeypatch.setattr(onnx_cuda.SessionContext, method, mutant)

    def decode() -> None:
        batch = Batch(model, backends.exact, SOURCES, capacity=3)
        errors = [batch.step(queries=3)]
        batch.sentences.grow(40)
        errors += [batch.step() for _ in range(3)]
        assert max(errors) <= 1, "larger than it may be"

    with pytest.raises((EmulationError, AssertionError, RequestError, BackendUnavailable), match=message):
        decode()


def test_several_threads_have_workers_of_their_own(backends: Backends) -> None:
    machine = Machine()
    model = load(backends.bundle, machine, workers=2)
    options, special = DecodeOptions(max_decoding_length=9, beam_size=2), backends.bundle.manifest.special_ids
    expected = [r.hypotheses[0].tokens for r in generate(backends.onnx, SOURCES, options, special)]
    with ThreadPoolExecutor(4) as threads:
        jobs = [threads.submit(generate, model, SOURCES, options, special) for _ in range(12)]
        assert [[r.hypotheses[0].tokens for r in job.result(60)] for job in jobs] == [expected] * 12
    assert all(isinstance(worker, Worker) for worker in model._workers._seats)
    assert len(model._workers._seats) == 2
    model.close()
    gc.collect()
    assert machine.leaks() == machine.violations == []
