"""What is ONNX Runtime's alone: memory in place, sessions, damaged graphs, a missing library."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.numerics import assert_close, exact_arrays, log_prob_limit
from tests.runtime.conftest import ATTENTION_LAYER, LIMITS, Backends
from tests.runtime.drive import padded
from tests.skips import ON_LINUX, skip_if
from tfm_export.bundle import Bundle
from tfm_export.decoding import DecodeOptions, generate
from tfm_export.errors import BundleError, RequestError
from tfm_export.graph import DECODER_STEP, DECODER_STEP_ATTENTION, ENCODER
from tfm_export.runtime.cpu.onnx_runtime import OnnxModel, OnnxSentences
from tfm_export.runtime.torch_model import TorchModel

ROOT = Path(__file__).parents[3]


def arguments(sentences: OnnxSentences) -> list[np.ndarray]:
    size = sentences.size
    mask = np.zeros((size, 1, 1, sentences.capacity), np.bool_)
    mask[..., 0] = True
    return [np.full((size, 1), 5), np.zeros((size, 1), np.int64), np.zeros(size, np.int64), mask]


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


@skip_if(not Path("/proc/self/statm").exists(), "/proc/self/statm", *ON_LINUX)
def test_steps_neither_move_nor_gather_memory(backends: Backends) -> None:
    sentences = backends.onnx.encode(*padded([[4, 5, 2], [6, 2]]), capacity=64)
    step = arguments(sentences)
    for _ in range(300):
        output = sentences.step(*step)
    addresses = [array.ctypes.data for array in sentences.memory.caches.values()]
    growth = []
    for _ in range(3):
        before = resident_bytes()
        for _ in range(1000):
            assert sentences.step(*step) is output
        growth.append(resident_bytes() - before)
    # Measured: 0 to 4 kB in 1,500 steps, and once 0.7 MB, which the allocator took. What every step keeps shows each
    # time: one cache tensor has 32 kB, the integers of a step 64 B.
    assert min(growth) < 32 * 1024
    assert [array.ctypes.data for array in sentences.memory.caches.values()] == addresses


def test_a_few_kinds_of_steps_stay_bound(backends: Backends) -> None:
    sentences = backends.onnx.encode(*padded([[4, 5, 2], [6, 2]]), capacity=64)
    step = arguments(sentences)
    best, everything = sentences.step(*step), sentences.step(*step, full=True)
    for _ in range(3):
        assert sentences.step(*step) is best
        assert sentences.step(*step, full=True) is everything
    for queries in range(2, 12):
        wide = [np.repeat(array, queries, 1) for array in step[:2]]
        sentences.step(*wide, step[2], np.repeat(step[3], queries, 2))
    assert len(sentences._bound) == 8
    again = sentences.step(*step, full=True)
    assert again is not everything
    # The same computation with the same shapes in the same thread, at another place in memory.
    limit = 2 * log_prob_limit(backends.exact.model)
    np.testing.assert_allclose(again.log_probs, everything.log_probs, rtol=0, atol=limit)


def test_fewer_rows_are_the_same_memory(backends: Backends) -> None:
    sentences = backends.onnx.encode(*padded([[4, 5, 2], [6, 2], [7, 2]]), capacity=8)
    sentences.step(*arguments(sentences))
    array = sentences.memory.caches["self_key_0"]
    sentences.shrink(2)
    sentences.step(*arguments(sentences))
    sentences.append(backends.onnx.encode(*padded([[9]]), capacity=1))
    sentences.step(*arguments(sentences))
    assert sentences.memory.caches["self_key_0"] is array
    assert sentences.memory.in_use()["self_key_0"].shape[0] == 3


def test_a_closed_model_lets_batches_end_and_takes_no_new_ones(backends: Backends) -> None:
    model = OnnxModel(backends.bundle, threads=1)
    sentences = model.encode(*padded([[4, 5, 2]]), capacity=8)
    model.close()
    assert np.isfinite(sentences.step(*arguments(sentences)).top_log_probs).all()
    with pytest.raises(RequestError, match="the model is closed"):
        model.encode(*padded([[4, 5, 2]]), capacity=8)


def test_a_closed_model_keeps_no_memory_of_batches(backends: Backends) -> None:
    model = OnnxModel(backends.bundle, threads=1)
    del model.encode(*padded([[4, 5, 2]]), capacity=8).memory
    running = model.encode(*padded([[4, 5, 2]]), capacity=8)
    model.close()
    del running
    assert [len(pool._idle) + len(pool._returned) for pool in model._pools] == [0, 0]


@pytest.mark.parametrize("threads", [0, 1025, 10**20])
def test_threads_are_few_enough_to_start(backends: Backends, threads: int) -> None:
    with pytest.raises(RequestError, match=f"threads must be from 1 to 1,024, found {threads:,}"):
        OnnxModel(backends.bundle, threads=threads)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_attention_is_what_pytorch_gives(backends: Backends, beam_size: int) -> None:
    slow = backends.onnx.with_attention()
    assert [m.capabilities.gives_attention for m in (slow, backends.onnx)] == [True, False]
    exact = TorchModel(backends.exact.model, limits=LIMITS, attention_layer=ATTENTION_LAYER)
    sources = [[5, 7, 9, 11, 2], [4, 2], [8, 8, 10, 2], [30, 29, 28, 27, 26, 25, 24, 2], [7, 2]]
    options = DecodeOptions(beam_size=beam_size, max_decoding_length=9, return_attention=True, max_batch_size=2)
    special = backends.bundle.manifest.special_ids
    found, expected = (generate(model, sources, options, special) for model in (slow, exact))

    def attention() -> list[np.ndarray]:
        return [result.hypotheses[0].attention for result in generate(exact, sources, options, special)]

    weights = iter(exact_arrays(attention))
    fast = generate(backends.onnx, sources, replace(options, return_attention=False), special)
    for source, one, other, plain in zip(sources, found, expected, fast, strict=True):
        (hypothesis,), (exactly,) = one.hypotheses, other.hypotheses
        assert hypothesis.tokens == exactly.tokens == plain.hypotheses[0].tokens
        assert hypothesis.attention is not None
        assert hypothesis.attention.shape == (len(hypothesis.tokens), len(source))
        assert_close(hypothesis.attention, next(weights))


@pytest.fixture
def copied(backends: Backends, tmp_path: Path) -> Bundle:
    """A bundle to damage."""
    shutil.copytree(backends.bundle.path, tmp_path / "bundle")
    return Bundle(tmp_path / "bundle", backends.bundle.manifest)


def test_graphs_of_another_form_are_refused(copied: Bundle) -> None:
    folder = copied.variant_path("fp32")
    shutil.copy(folder / DECODER_STEP, folder / ENCODER)
    with pytest.raises(BundleError) as error:
        OnnxModel(copied)
    assert f"{folder / ENCODER}: input source_ids is missing" in error.value.problems
    assert f"{folder / ENCODER}: output log_probs is not one of the expected" in error.value.problems


def test_axes_and_types_are_those_of_the_table(copied: Bundle) -> None:
    copied.manifest = replace(copied.manifest, dimensions=replace(copied.manifest.dimensions, head_size=5))
    with pytest.raises(BundleError) as error:
        OnnxModel(copied)
    path, size = copied.variant_path("fp32") / ENCODER, copied.manifest.dimensions
    wanted, found = (f"tensor(float) ['batch', {size.heads}, 'source', {head_size}]" for head_size in (5, 16))
    assert f"{path}: output cross_key_0 must be {wanted}, found {found}" in error.value.problems


def test_without_the_graph_there_is_no_attention(copied: Bundle) -> None:
    (copied.variant_path("fp32") / DECODER_STEP_ATTENTION).unlink()
    with pytest.raises(RequestError, match="tfm-export onnx CHECKPOINT --attention"):
        OnnxModel(copied).with_attention()


@pytest.mark.parametrize("content", [b"", b"not a graph at all"])
def test_a_file_that_is_no_graph_is_refused(copied: Bundle, content: bytes) -> None:
    (copied.variant_path("fp32") / DECODER_STEP).write_bytes(content)
    with pytest.raises(BundleError, match=r"decoder_step\.onnx cannot be loaded by ONNX Runtime"):
        OnnxModel(copied)


def test_a_variant_that_is_not_there(backends: Backends) -> None:
    with pytest.raises(BundleError, match="has no variant 'w8'; it has fp32"):
        OnnxModel(backends.bundle, variant="w8")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (None, r"onnxruntime is not installed.*pip install 'tfm-export\[cpu\]'"),
        ("__version__ = '1.24.4'", r"1\.25.*or newer, found 1\.24\.4"),
    ],
)
def test_a_missing_or_old_library_is_told(backends: Backends, tmp_path: Path, module: str | None, message: str) -> None:
    (tmp_path / "onnxruntime.py").write_text(
        module or "raise ModuleNotFoundError('No module', name='onnxruntime')", encoding="utf-8"
    )
    backends.bundle.save()
    script = f"""
import sys
sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]
import tfm_export
try:
    tfm_export.load({str(backends.bundle.path)!r})
except tfm_export.BackendUnavailable as error:
    print(" ".join(str(error).split()))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert re.search(message, run.stdout), run


def test_what_onnx_runtime_cannot_compute_is_told_in_a_sentence(tiny_bundle: Path) -> None:
    """Ids above the table, past our own checks: its Gather fails."""
    bundle = Bundle.open(tiny_bundle)
    model = OnnxModel(bundle)
    wide = replace(model.dimensions, source_vocabulary_size=1000, target_vocabulary_size=1000)
    model.dimensions = wide
    with pytest.raises(RequestError, match=r"ONNX Runtime \S+ could not compute encoder.onnx: .* Gather") as caught:
        model.encode(np.array([[900]]), np.array([[True]]), capacity=4)
    assert len(caught.value.problems[0].splitlines()) == 1
    sentences = model.encode(np.array([[5]]), np.array([[True]]), capacity=4)
    step = arguments(sentences)
    step[0][:] = 900
    with pytest.raises(RequestError, match=r"could not compute decoder_step.onnx: .* Gather"):
        sentences.step(*step)
