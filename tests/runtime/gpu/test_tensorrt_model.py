"""What is TensorRT's alone, on an emulated GPU: engines that do not fit, memory, graphs, threads, float types."""

from __future__ import annotations

import logging
import re
import shutil
import sys
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.emulation import Machine, emulated_gpu
from tests.emulation.cudart import Error
from tests.emulation.engines import add_engine
from tests.emulation.tensorrt import CACHE_MAGIC
from tests.numerics import BFLOAT16_EPSILON, FLOAT16_EPSILON, FLOAT32_EPSILON, assert_close, exact_arrays
from tests.runtime.conftest import LIMITS, Backends
from tests.runtime.drive import RNG, Batch, causal, padded
from tfm_export.bundle import Bundle
from tfm_export.decoding import DecodeOptions, generate
from tfm_export.engines import ENGINES
from tfm_export.errors import BackendUnavailable, BundleError, NumericError, RequestError
from tfm_export.precision import TIMES_ROUNDING
from tfm_export.runtime.gpu import device_memory, device_worker
from tfm_export.runtime.gpu.device_sentences import DeviceSentences
from tfm_export.runtime.gpu.tensorrt_model import TensorRTModel, check_engine
from tfm_export.runtime.step_model import StepModel
from tfm_export.verify.steps import compare_steps, teacher_forcing

SOURCES = [[5, 7, 9, 11, 2], [4, 2], [8, 8, 10, 2], [30, 29, 28, 27, 26, 25, 24, 2]]


@pytest.fixture
def bundle(backends: Backends, tmp_path: Path) -> Bundle:
    """A bundle without engines, to put some into."""
    return Bundle(Path(shutil.copytree(backends.bundle.path, tmp_path / "bundle")), backends.bundle.manifest)


@pytest.fixture
def machine() -> Iterator[Machine]:
    """An emulated GPU on which nothing undefined may happen."""
    with emulated_gpu() as machine:
        yield machine
    assert machine.violations == []


@pytest.fixture
def model(backends: Backends, machine: Machine) -> Iterator[TensorRTModel]:
    """An engine for batches of 8, beams of 4, 16 or 64 slots; nothing of it may be left."""
    model = TensorRTModel(backends.with_engine, "emulated")
    yield model
    model.close()
    assert machine.leaks() == []


def first_step(sentences: DeviceSentences, queries: int = 1) -> list[np.ndarray]:
    """The arguments of a step that begins."""
    size, capacity = sentences.size, sentences.capacity
    mask = np.repeat(causal(capacity, queries), size, 0)
    return [
        np.full((size, queries), 5),
        np.arange(queries)[None].repeat(size, 0),
        np.zeros(size, np.int64),
        mask,
    ]


# Engines that cannot run here.


def test_an_engine_that_is_not_there(bundle: Bundle, machine: Machine) -> None:
    with pytest.raises(BundleError, match="has no engine 'fp16'; it has none"):
        TensorRTModel(bundle, "fp16")
    assert machine.leaks() == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compute_capabilities": ("8.0", "9.0")}, "it is for 8.0, 9.0, and this GPU has 8.9"),
        ({"flavor_version": "10.16.1"}, "it is for TensorRT 10.16.1, found 11.1.0.1"),
    ],
)
def test_an_engine_for_another_gpu_or_library(
    bundle: Bundle, machine: Machine, fields: dict[str, Any], message: str
) -> None:
    add_engine(bundle, **fields)
    for load in (check_engine, TensorRTModel):
        with pytest.raises(BackendUnavailable, match=message):
            load(bundle, "emulated")
    assert machine.leaks() == []


def test_no_library_and_no_such_gpu(bundle: Bundle, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    add_engine(bundle)
    with pytest.raises(BackendUnavailable, match="there is no GPU 2"):
        TensorRTModel(bundle, "emulated", 2)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(BackendUnavailable, match=r"tensorrt is not installed\nTry: pip install 'tfm-export\[trt\]'"):
        TensorRTModel(bundle, "emulated")
    assert machine.leaks() == []


def test_what_can_run_here_is_told_without_loading_it(bundle: Bundle, machine: Machine) -> None:
    assert check_engine(bundle, "emulated", 1) if bundle.manifest.engines else True
    record = add_engine(bundle)
    assert check_engine(bundle, "emulated", 1) == record
    assert not machine.calls["cudaMalloc"]
    assert not machine.calls["cudaSetDevice"]  # which would take memory on the GPU


def rewrite_plan(bundle: Bundle, plan: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what a plan says, and have the manifest agree."""
    import json

    path = bundle.path / ENGINES / "emulated" / plan
    with zipfile.ZipFile(path) as archive:
        facts, graph = json.loads(archive.read("facts.json")), archive.read("graph.onnx")
    change(facts)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("facts.json", json.dumps(facts))
        archive.writestr("graph.onnx", graph)
    bundle.add_files({f"{ENGINES}/emulated/{plan}": "a plan"})


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "input self_key_1 must be float32 [-1, 4, 16, 16], found float16 [-1, 4, 16, 16]": (
        lambda facts: facts["inputs"].update(self_key_1=["float16", [-1, 4, 16, 16]])
    ),
    "input self_mask must be bool [-1, 1, -1, 16], found bool [-1, 1, -1, 32]": (
        lambda facts: facts["inputs"].update(self_mask=["bool", [-1, 1, -1, 32]])
    ),
    "output log_probs must be float32 [-1, -1, 34], found float32 [-1, -1, 35]": (
        lambda facts: facts["outputs"].update(log_probs=["float32", [-1, -1, 35]])
    ),
    "output self_value_0_out must be the memory of its input, found None": (
        lambda facts: facts["aliases"].pop("self_value_0_out")
    ),
    "output self_value_0_out must be the memory of its input, found self_key_0": (
        lambda facts: facts["aliases"].update(self_value_0_out="self_key_0")
    ),
    "input positions is missing": lambda facts: facts["inputs"].pop("positions"),
    "output more is not one of the expected": lambda facts: facts["outputs"].update(more=["float32", [-1]]),
}


@pytest.mark.parametrize("problem", CHANGES)
def test_a_plan_of_another_form(bundle: Bundle, machine: Machine, problem: str) -> None:
    add_engine(bundle)
    rewrite_plan(bundle, "decoder_step_16.plan", CHANGES[problem])
    with pytest.raises(BundleError) as error:
        TensorRTModel(bundle, "emulated")
    assert error.value.problems == [f"{bundle.path / ENGINES / 'emulated' / 'decoder_step_16.plan'}: {problem}"]
    assert machine.leaks() == []


def test_sizes_that_tensorrt_has_not_worked_out_are_taken(bundle: Bundle, machine: Machine) -> None:
    add_engine(bundle)
    change = CHANGES["output log_probs must be float32 [-1, -1, 34], found float32 [-1, -1, 35]"]
    rewrite_plan(bundle, "decoder_step_16.plan", change)
    rewrite_plan(
        bundle, "decoder_step_16.plan", lambda facts: facts["outputs"].update(log_probs=["float32", [-1, -1, -1]])
    )
    TensorRTModel(bundle, "emulated").close()
    assert machine.leaks() == []


def test_a_plan_that_tensorrt_does_not_take(bundle: Bundle, machine: Machine) -> None:
    add_engine(bundle)
    path = bundle.path / ENGINES / "emulated" / "encoder.plan"
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(BackendUnavailable, match=r"TensorRT 11.1.0.1 could not load .*encoder.plan: .*this is no plan"):
        TensorRTModel(bundle, "emulated")
    assert machine.leaks() == []


@pytest.mark.parametrize("after", range(5))
def test_a_context_that_cannot_be_made(backends: Backends, machine: Machine, after: int) -> None:
    machine.fail("create_execution_context", 0, after=after)
    with pytest.raises(BackendUnavailable, match=r"could not make a context of .*: emulated: no context"):
        TensorRTModel(backends.with_engine, "emulated")
    assert machine.leaks() == []


@pytest.mark.parametrize("memory", [1000, 5000, 16000, 24000])
def test_a_gpu_that_is_too_small_for_the_engine(backends: Backends, memory: int) -> None:
    # It takes 4,096 for the contexts, 3,072 for the encoder's inputs and 14,080 for a step's arrays.
    with emulated_gpu(Machine(memory_bytes=memory)) as machine:
        if memory == 24000:
            TensorRTModel(backends.with_engine, "emulated").close()
        else:
            with pytest.raises(BackendUnavailable, match=r"the engine emulated does not fit: .* MB more are needed"):
                TensorRTModel(backends.with_engine, "emulated")
    assert machine.leaks() == machine.violations == []


def test_workers_are_at_least_one(backends: Backends, machine: Machine) -> None:
    assert machine
    with pytest.raises(RequestError, match="workers must be at least 1, found 0"):
        TensorRTModel(backends.with_engine, "emulated", workers=0)


# The engine's limits.


def test_the_engines_limits_are_the_models(bundle: Bundle, machine: Machine) -> None:
    add_engine(bundle, max_source_length=9, max_target_length=20)
    model = TensorRTModel(bundle, "emulated")
    assert (model.limits.max_source_length, model.limits.max_target_length) == (9, 20)
    with pytest.raises(RequestError, match="source 0 has 10 tokens; the model takes at most 9"):
        generate(model, [[5] * 10], DecodeOptions(), bundle.manifest.special_ids)
    model.close()
    assert machine.leaks() == []


def test_batches_are_no_larger_than_the_engines(model: TensorRTModel) -> None:
    assert model.max_batch_size == 8
    message = r"a batch may have 8 sentences on this GPU, found 9\nTry: max_batch_size=8 .*--max-batch-size 9"
    with pytest.raises(RequestError, match=message):
        model.encode(*padded([[4, 2]] * 9), capacity=4)
    sentences = model.encode(*padded([[4, 2]] * 5), capacity=4)
    with pytest.raises(RequestError, match=message):
        sentences.append(model.encode(*padded([[4, 2]] * 4), capacity=4))
    assert sentences.size == 5
    assert np.isfinite(sentences.step(*first_step(sentences)).top_log_probs).all()


def test_steps_take_no_more_tokens_than_the_engine(model: TensorRTModel) -> None:
    sentences = model.encode(*padded([[4, 2]]), capacity=60)
    with pytest.raises(
        RequestError, match=r"up to 50 tokens of a sentence a step, found 51\nTry: .*--max-beam-size 51"
    ):
        sentences.step(*first_step(sentences, 51))


def test_caches_may_be_larger_than_any_plans_as_long_as_they_are_not_used(
    model: TensorRTModel, backends: Backends
) -> None:
    batch = Batch(model, backends.exact, SOURCES[:2], capacity=100)
    assert max(batch.step(queries=30), batch.step(queries=10)) <= 1
    batch.sentences.grow(200)
    assert batch.step() <= 1
    key = batch.sentences.read("self_key_0")
    assert key.shape == (2, 4, 200, 16)
    assert key[:, :, :41].all()
    assert not key[:, :, 41:].any()
    size, slots = 2, batch.sentences.capacity
    mask = np.zeros((size, 1, 1, slots), np.bool_)
    mask[..., 0] = True
    step = [np.full((size, 1), 5), np.full((size, 1), 40), np.array([41, 63]), mask]
    assert np.isfinite(batch.sentences.step(*step).top_log_probs).all()
    step[2] = np.array([41, 64])
    with pytest.raises(
        RequestError, match=r"more than the 64 slots a sentence .*\nTry: .*tfm-export trt --capacity 200"
    ):
        batch.sentences.step(*step)
    step[2], mask[0, 0, 0, 70] = np.array([41, 41]), True  # a slot that cannot have been written
    with pytest.raises(RequestError, match="more than the 64 slots"):
        batch.sentences.step(*step)


# Parity.


def test_every_tensor_of_every_step(model: TensorRTModel, backends: Backends) -> None:
    sizes, limits = model.dimensions, backends.bundle.manifest.limits
    cases = teacher_forcing(sizes, limits, [], start_token=1)
    found = compare_steps(backends.bundle.variant_path("fp32"), sizes, cases, model=model)
    assert len(found.kernels) == 4 * sizes.decoder_layers + 2
    assert [tensor.name for tensor in found.kernels if not tensor.passed] == []
    assert found.argmax_agreement == 1


@pytest.mark.parametrize(
    ("float_type", "head_size", "epsilon"),
    [
        ("float16", None, FLOAT16_EPSILON),
        ("float16", 24, FLOAT16_EPSILON),
        ("bfloat16", None, BFLOAT16_EPSILON),
        ("float32", 20, FLOAT32_EPSILON),
    ],
)
def test_float_types_and_padded_heads(
    bundle: Bundle,
    backends: Backends,
    machine: Machine,
    float_type: str,
    head_size: int | None,
    epsilon: float,
) -> None:
    add_engine(bundle, float_type=float_type, head_size=head_size, capacities=(13, 61))
    model = TensorRTModel(bundle, "emulated")
    batch = Batch(model, backends.exact, SOURCES, capacity=10)
    found = [batch.step(queries=3), batch.step()]
    batch.leave(1)
    batch.sentences.grow(30)
    batch.join([[6, 6, 2]])
    found += [batch.step(), batch.step(queries=2)]
    assert max(found) * FLOAT32_EPSILON <= epsilon
    assert float_type == "float32" or max(found) * TIMES_ROUNDING > 1  # it was rounded
    rows = padded([row.source for row in batch.rows])
    (exact,) = exact_arrays(lambda: [backends.exact.encode(*rows, capacity=1).read("cross_key_1")])
    key = batch.sentences.read("cross_key_1")
    assert key.dtype == np.float32
    assert_close(key, exact, epsilon=epsilon)
    assert batch.sentences.read("self_value_2").shape == (4, 4, 30, 16)
    del batch
    model.close()
    assert machine.leaks() == []


def test_results_stay_until_the_next_step_of_the_same_batch(model: TensorRTModel) -> None:
    first, second = (model.encode(*padded(sources), capacity=9) for sources in (SOURCES[:2], SOURCES[2:]))
    output = first.step(*first_step(first), full=True)
    assert output.log_probs is not None
    assert output.log_normaliser is not None
    kept = [np.array(a) for a in (output.top_log_probs, output.top_ids, output.log_probs, output.log_normaliser)]
    for full in (False, True):
        second.step(*first_step(second, 2), full=full)
    first.grow(20)
    del first, second
    model.close()
    found = (output.top_log_probs, output.top_ids, output.log_probs, output.log_normaliser)
    for array, expected in zip(found, kept, strict=True):
        np.testing.assert_array_equal(array, expected)


def poke(sentences: DeviceSentences, machine: Machine, name: str, row: int, value: float) -> None:
    """Set a number of a row of a cache, in its first slot."""
    block = sentences.lease.memory.caches
    row_bytes = 4 * block.shape.heads * block.length * block.shape.head_size
    machine.find(block.address(name) + row * row_bytes, 4, "device")[1].view(np.float32)[:] = value


def test_numbers_that_are_not_finite_are_an_error(
    model: TensorRTModel, machine: Machine, backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.emulation.tensorrt import Run

    monkeypatch.setattr(Run, "_check_values", lambda *_: None)  # a real GPU would not notice
    batch = Batch(model, backends.exact, SOURCES[:3], capacity=6)
    batch.step()
    poke(batch.sentences, machine, "self_value_1", 1, np.nan)
    with pytest.raises(NumericError, match=r"not finite: rows 1\n"):
        batch.step()
    batch.leave(1)  # the others are sound
    assert batch.step() <= 1
    batch.join([[6, 2]])  # into what it left
    assert batch.step() <= 1


# Memory, graphs and threads.


def test_memory_and_graphs_are_used_again(model: TensorRTModel, machine: Machine, backends: Backends) -> None:
    special, options = backends.bundle.manifest.special_ids, DecodeOptions(beam_size=2, max_decoding_length=9)

    def decode() -> None:
        generate(model, SOURCES, options, special)

    for _ in range(6):
        decode()
    before = len(machine.live_blocks), machine.calls["cudaMalloc"], machine.calls["cudaStreamBeginCapture"]
    launches, runs = machine.calls["cudaGraphLaunch"], machine.calls["execute_async_v3"]
    for _ in range(20):
        decode()
    after = len(machine.live_blocks), machine.calls["cudaMalloc"], machine.calls["cudaStreamBeginCapture"]
    assert after == before
    steps = machine.calls["cudaGraphLaunch"] - launches
    assert steps >= 20 * 8
    assert machine.calls["execute_async_v3"] - runs == 20  # the encoder


def test_rtx_captures_by_itself(bundle: Bundle, machine: Machine, backends: Backends) -> None:
    add_engine(bundle, flavor="rtx")
    model = TensorRTModel(bundle, "emulated")
    assert (model.capture_problem or "").startswith("TensorRT-RTX does so by itself")
    batch = Batch(model, backends.exact, SOURCES, capacity=9)
    assert max(batch.step() for _ in range(6)) <= 1
    assert not machine.calls["cudaStreamBeginCapture"]
    del batch
    model.close()
    assert machine.leaks() == []


@pytest.mark.parametrize(
    ("function", "result"),
    [
        ("cudaStreamBeginCapture", (Error.cudaErrorStreamCaptureUnsupported,)),
        ("cudaGraphInstantiate", (Error.cudaErrorInvalidValue, None)),
        ("execute_async_v3", False),
        ("create_execution_context", False),
    ],
)
def test_what_cannot_be_captured_runs_without(
    backends: Backends, machine: Machine, caplog: pytest.LogCaptureFixture, function: str, result: Any
) -> None:
    model = TensorRTModel(backends.with_engine, "emulated")
    assert model.capture_problem is None
    machine.fail(function, result, after=4 if function == "execute_async_v3" else 0)  # the encoder and three steps
    batch = Batch(model, backends.exact, SOURCES, capacity=9)
    with caplog.at_level(logging.WARNING):
        assert max(batch.step() for _ in range(8)) <= 1
    (record,) = caplog.records
    assert "steps run without CUDA graphs, and slower" in record.getMessage()
    assert "emulated" in (model.capture_problem or "")
    assert not machine.calls["cudaGraphLaunch"]
    del batch
    model.close()


def test_tensorrt_that_does_not_run_is_told_and_may_run_later(
    model: TensorRTModel, machine: Machine, backends: Backends
) -> None:
    machine.fail("execute_async_v3", 0)
    with pytest.raises(BackendUnavailable, match=r"could not run .*encoder.plan, profile 0: emulated: it does"):
        model.encode(*padded(SOURCES), capacity=4)
    batch = Batch(model, backends.exact, SOURCES, capacity=4)
    for function, words in (("execute_async_v3", "run"), ("set_input_shape", "take target_ids")):
        machine.fail(function, 0)
        with pytest.raises(BackendUnavailable, match=f"could not {words}"):
            batch.sentences.step(*first_step(batch.sentences, 1 + (words != "run")))
    machine.fail("set_tensor_address", 0)
    with pytest.raises(BackendUnavailable, match="could not take the address of target_ids"):
        batch.sentences.step(*first_step(batch.sentences, 3))
    assert max(batch.step(), batch.step(queries=2)) <= 1


def test_a_gpu_that_fails_is_told_and_can_be_closed(
    backends: Backends, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    model = TensorRTModel(backends.with_engine, "emulated")
    sentences = model.encode(*padded(SOURCES), capacity=4)
    for _ in range(3):  # the step's, and those of closing
        machine.fail("cudaStreamSynchronize", (Error.cudaErrorIllegalAddress,))
    with caplog.at_level(logging.WARNING), pytest.raises(BackendUnavailable, match="cudaErrorIllegalAddress"):
        sentences.step(*first_step(sentences))


def test_many_threads_give_what_one_gives(backends: Backends, machine: Machine) -> None:
    model = TensorRTModel(backends.with_engine, "emulated", workers=2)
    special, rng = backends.bundle.manifest.special_ids, RNG(4)
    options = DecodeOptions(beam_size=3, max_decoding_length=7, max_batch_size=4)
    work = [[[*rng.integers(4, 30, n).tolist(), 2] for n in rng.integers(1, 9, 5)] for _ in range(6)]
    expected = [[r.hypotheses[0].tokens for r in generate(model, sources, options, special)] for sources in work]
    found: list[Any] = [None] * len(work)

    def decode(number: int) -> None:
        for _ in range(3):
            results = generate(model, work[number], options, special)
        found[number] = [result.hypotheses[0].tokens for result in results]

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
    assert sum(thing == "a context" for thing in machine.leaks()) >= 2 * 5  # two workers
    model.close()
    assert machine.leaks() == []


def in_a_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_threads_that_ended_leave_their_worker_to_others(backends: Backends, machine: Machine) -> None:
    model = TensorRTModel(backends.with_engine, "emulated", workers=3)
    workers = [in_a_thread(lambda: model.encode(*padded(SOURCES), capacity=4).worker) for _ in range(5)]
    assert len(set(workers)) == 1
    mine = model.encode(*padded(SOURCES), capacity=4).worker
    others = [in_a_thread(lambda: model.encode(*padded(SOURCES), capacity=4).worker) for _ in range(3)]
    assert mine is workers[0]
    assert len({mine, *others}) == 2
    model.close()
    assert machine.leaks() == []


def test_threads_share_a_worker_where_there_is_no_memory_for_more(
    backends: Backends, caplog: pytest.LogCaptureFixture
) -> None:
    with emulated_gpu() as machine:
        model = TensorRTModel(backends.with_engine, "emulated")
    mine = model.encode(*padded([[4, 2]]), capacity=4)
    machine.fail("cudaMalloc", (Error.cudaErrorMemoryAllocation, None))
    with caplog.at_level(logging.INFO):
        other = in_a_thread(lambda: model.encode(*padded([[4, 2]]), capacity=4))
    assert other.worker is mine.worker
    assert "1 threads share the GPU" in caplog.text
    del mine, other
    model.close()
    assert machine.leaks() == machine.violations == []


def test_idle_memory_makes_room(backends: Backends, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a batch needs is freed where nobody uses it, in whichever worker."""
    monkeypatch.setattr(device_memory, "IDLE_SHARE", 1)
    with emulated_gpu(Machine(memory_bytes=600_000)) as machine:
        model = TensorRTModel(backends.with_engine, "emulated", workers=2)
    in_a_thread(lambda: model.encode(*padded(SOURCES), capacity=16))  # 98 kB and 49 kB, which stay idle
    for rows in (1, 2, 3, 4, 6, 8):  # all together 1.2 MB
        batch = Batch(model, backends.exact, [[4, 2]] * rows, capacity=16)
        assert batch.step() <= 1
    with pytest.raises(RequestError, match=r"MB more are needed.*\nTry: a smaller max_batch_size"):
        model.encode(*padded([[4, 2]] * 8), capacity=60)
    del batch
    model.close()
    assert machine.leaks() == machine.violations == []


def test_graphs_of_freed_memory_go_and_there_are_not_too_many(
    backends: Backends, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "IDLE_SHARE", 0)
    monkeypatch.setattr(device_worker, "MOST_GRAPHS", 3)
    monkeypatch.setattr(device_worker, "MOST_LAYOUTS", 3)
    model = TensorRTModel(backends.with_engine, "emulated")
    batch = Batch(model, backends.exact, SOURCES, capacity=60)
    for queries in (1, 2, 3, 4):
        assert max(batch.step(queries=queries) for _ in range(5)) <= 1
    kinds = [type(thing).__name__ for thing in machine.handles.values()]
    assert kinds.count("Executable") == 3
    del batch
    for rows in (1, 2, 3):  # each takes new memory: that of the first batch is freed, and its graphs
        model.encode(*padded([[4, 2]] * rows), capacity=3)
    kinds = [type(thing).__name__ for thing in machine.handles.values()]
    assert kinds.count("Executable") == 0
    model.close()
    assert machine.leaks() == []


def test_a_closed_model_lets_batches_end_and_takes_no_new_ones(backends: Backends, machine: Machine) -> None:
    model = TensorRTModel(backends.with_engine, "emulated")
    batch = Batch(model, backends.exact, SOURCES, capacity=8)
    batch.step()
    model.close()
    model.close()
    assert max(batch.step() for _ in range(5)) <= 1
    with pytest.raises(RequestError, match="the model is closed"):
        model.encode(*padded(SOURCES), capacity=8)
    assert machine.leaks()
    del batch
    assert machine.leaks() == []


def test_a_model_that_nobody_has_any_more_is_freed(backends: Backends, machine: Machine) -> None:
    model = TensorRTModel(backends.with_engine, "emulated")
    sentences = model.encode(*padded(SOURCES), capacity=8)
    del model
    assert np.isfinite(sentences.step(*first_step(sentences)).top_log_probs).all()
    del sentences
    assert machine.leaks() == []


def test_a_batch_may_go_while_its_worker_works(model: TensorRTModel, backends: Backends) -> None:
    """The garbage collector comes at any time and in any thread."""
    kept, given_up = (Batch(model, backends.exact, SOURCES, capacity=8) for _ in range(2))
    with kept.sentences.worker.working():
        in_a_thread(given_up.__dict__.clear)
        model.close()
    assert kept.step() <= 1


# What RTX compiles.


def cache_files(bundle: Bundle) -> list[Path]:
    return sorted((bundle.path / ENGINES / "emulated").glob("runtime_cache/*"))


def test_what_rtx_compiled_is_kept_for_the_next_start(bundle: Bundle, machine: Machine) -> None:
    add_engine(bundle, flavor="rtx")
    TensorRTModel(bundle, "emulated").close()
    files = cache_files(bundle)
    assert [re.sub(r"driver-[0-9.]+", "driver-N", path.name) for path in files] == [
        f"{plan}-emulated-gpu-0-8.9-driver-N-rtx-1.7.1.1.bin"
        for plan in ("decoder_step_16", "decoder_step_64", "encoder")
    ]
    assert oct(files[0].stat().st_mode & 0o777) == "0o644"
    assert files[0].read_bytes() == CACHE_MAGIC + b"context-0\ncontext-1"
    TensorRTModel(bundle, "emulated").close()
    assert files[0].read_bytes() == CACHE_MAGIC + b"context-0\ncontext-1\ncontext-2\ncontext-3"  # it knew the first two
    Bundle.open(bundle.path)  # the bundle is whole, with or without them
    TensorRTModel(bundle, "emulated", 1).close()
    assert len(cache_files(bundle)) == 6  # one for each GPU
    assert machine.leaks() == []


def test_a_damaged_runtime_cache_is_written_anew(
    bundle: Bundle, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    add_engine(bundle, flavor="rtx")
    TensorRTModel(bundle, "emulated").close()
    first = cache_files(bundle)[0]
    first.write_bytes(b"half-written")
    with caplog.at_level(logging.INFO):
        TensorRTModel(bundle, "emulated").close()
    assert f"TensorRT-RTX does not take {first}" in caplog.text
    assert first.read_bytes().startswith(CACHE_MAGIC)
    assert machine.leaks() == []


def test_a_bundle_that_cannot_be_written_to_serves_all_the_same(
    bundle: Bundle, machine: Machine, backends: Backends, caplog: pytest.LogCaptureFixture
) -> None:
    add_engine(bundle, flavor="rtx")
    (bundle.path / ENGINES / "emulated" / "runtime_cache").write_text("in the way of the folder")
    with caplog.at_level(logging.INFO):
        model = TensorRTModel(bundle, "emulated")
    assert "is not kept for the next start" in caplog.text
    assert Batch(model, backends.exact, SOURCES, capacity=8).step() <= 1
    model.close()
    assert machine.leaks() == []


# Whole models.


def test_sources_longer_than_the_memorys_move_it(model: TensorRTModel, backends: Backends) -> None:
    batch = Batch(model, backends.exact, [[4, 2]], capacity=40)
    errors = [batch.step()]
    for length in (8, 9, 13, 33, LIMITS.max_source_length):
        batch.join([RNG(length).integers(4, 30, length).tolist()])
        errors.append(batch.step())
    assert max(errors) <= 1
    assert batch.sentences.read("cross_key_0").shape[2] == LIMITS.max_source_length


def test_sources_with_holes_are_masked_as_they_are(model: TensorRTModel, backends: Backends) -> None:
    ids, mask = padded(SOURCES, width=11)
    mask[0, 1], mask[3, 2:4] = False, False

    def numbers(model: StepModel) -> list[np.ndarray]:
        sentences = model.encode(ids, mask, capacity=3)
        cross = [sentences.read(name) for name in ("cross_key_0", "cross_value_2")]
        return [*cross, sentences.step(*first_step(sentences)).top_log_probs.copy()]

    for found, exact in zip(numbers(model), exact_arrays(lambda: numbers(backends.exact)), strict=True):
        assert_close(found, exact)


def test_an_engine_of_one_plan_and_one_row(bundle: Bundle, backends: Backends, machine: Machine) -> None:
    add_engine(bundle, max_batch_size=1, max_beam_size=1, capacities=(50,))
    model = TensorRTModel(bundle, "emulated")
    special, options = bundle.manifest.special_ids, DecodeOptions(max_batch_size=1, max_decoding_length=12)
    found, expected = (generate(m, SOURCES, options, special) for m in (model, backends.torch))
    assert [r.hypotheses[0].tokens for r in found] == [r.hypotheses[0].tokens for r in expected]
    model.close()
    assert machine.leaks() == []


def test_a_model_may_be_closed_while_threads_use_it_and_memory_is_short(
    backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "IDLE_SHARE", 0)
    with emulated_gpu(Machine(memory_bytes=1_500_000)) as machine:
        model = TensorRTModel(backends.with_engine, "emulated", workers=3)
    special, ends = backends.bundle.manifest.special_ids, Counter[str]()

    def work(seed: int) -> None:
        rng = RNG(seed)
        while not ends["closed"]:
            sources = [rng.integers(4, 29, rng.integers(1, 20)).tolist() for _ in range(rng.integers(1, 9))]
            options = DecodeOptions(beam_size=int(rng.choice([1, 3])), max_decoding_length=int(rng.integers(3, 12)))
            try:
                generate(model, sources, options, special)
                ends["done"] += 1
            except RequestError as problem:
                ends["closed" if "closed" in str(problem) else "no memory"] += 1

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    while ends["done"] < 20 or not ends["no memory"]:
        time.sleep(0.01)
    model.close()
    for thread in threads:
        thread.join()
    assert machine.leaks() == machine.violations == []
