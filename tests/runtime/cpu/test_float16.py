"""A float16 variant on ONNX Runtime's CPU provider: caches of 16 bits, results of 32; and that it refuses bfloat16."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.numerics import FLOAT16_EPSILON, assert_close, exact_arrays
from tests.runtime.conftest import ATTENTION_LAYER, LIMITS, Backends
from tests.runtime.cpu.test_onnx_runtime import arguments
from tests.runtime.drive import Batch, padded
from tfm_export.bundle import Bundle
from tfm_export.decoding import DecodeOptions, generate
from tfm_export.errors import BackendUnavailable, BundleError
from tfm_export.graph import DECODER_STEP, DECODER_STEP_ATTENTION, ENCODER, WEIGHTS, self_cache_names
from tfm_export.graph_files import WeightsFile, read_graph
from tfm_export.passes.retype import retype
from tfm_export.precision import FLOAT32_EPSILON, TIMES_ROUNDING
from tfm_export.runtime.cpu.onnx_runtime import OnnxModel
from tfm_export.runtime.step_model import StepModel
from tfm_export.runtime.torch_model import TorchModel

SOURCES = [[4, 5, 6, 7, 8, 2], [9, 2], [10, 11, 12, 2]]


@pytest.fixture(scope="module")
def bundle(backends: Backends, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The bundle with variants fp32, fp16 and bf16."""
    path = tmp_path_factory.mktemp("float16") / "bundle"
    shutil.copytree(backends.bundle.path, path)
    for variant, float_type in (("fp16", "float16"), ("bf16", "bfloat16")):
        folder = path / "onnx" / variant
        folder.mkdir()
        weights = WeightsFile(folder / WEIGHTS)
        for name in (ENCODER, DECODER_STEP, DECODER_STEP_ATTENTION):
            model = read_graph(path / "onnx" / "fp32" / name)
            retype(model, float_type)
            weights.write(model, folder / name)
    return Bundle(path, replace(backends.bundle.manifest, variants={"fp32": {}, "fp16": {}, "bf16": {}}))


@pytest.fixture(scope="module")
def half(bundle: Bundle) -> OnnxModel:
    """The variant fp16, loaded."""
    return OnnxModel(bundle, variant="fp16", threads=1)


def test_steps_are_right_while_a_batch_grows_shrinks_and_is_joined(half: OnnxModel, backends: Backends) -> None:
    batch = Batch(half, backends.exact, SOURCES, capacity=5)
    errors = [batch.step(4), batch.step()]
    batch.sentences.grow(16)
    errors.append(batch.step())
    batch.leave(0)
    errors.append(batch.step(2))
    batch.join([[13, 14, 15, 16, 17, 18, 19, 2], [20, 2]], capacity=3)
    errors += [batch.step(), batch.step(3)]
    assert max(errors) * FLOAT32_EPSILON <= FLOAT16_EPSILON
    assert min(errors) * TIMES_ROUNDING > 1  # they are float16's, not those of float32 by another name


def test_caches_have_16_bits_and_stay_where_they_are(half: OnnxModel) -> None:
    sentences = half.encode(*padded(SOURCES), capacity=8)
    memory = sentences.memory
    assert {array.dtype for array in (*memory.caches.values(), *memory.cross.values())} == {np.dtype(np.float16)}
    shape = memory.caches["self_key_0"].shape
    before = {name: array.ctypes.data for name, array in memory.caches.items()}
    output = sentences.step(*arguments(sentences))
    assert {name: array.ctypes.data for name, array in memory.caches.items()} == before
    assert output.top_log_probs.dtype == np.float32
    for name in memory.caches:
        read = sentences.read(name)
        assert (read.dtype, read.shape) == (np.float32, shape)
        assert read[:, :, 0].any()
        assert not read[:, :, 1:].any()


def test_a_step_writes_into_caches_in_place(half: OnnxModel, backends: Backends) -> None:
    """The numbers in the bound memory are those of the step, within the roundings of float16."""

    def caches(model: StepModel) -> list[np.ndarray]:
        sentences = model.encode(*padded(SOURCES), capacity=4)
        sentences.step(*arguments(sentences))
        return [sentences.read(name) for name in self_cache_names(model.dimensions)]

    for found, exact in zip(caches(half), exact_arrays(lambda: caches(backends.exact)), strict=True):
        assert_close(found, exact, epsilon=FLOAT16_EPSILON)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_generations_and_their_attention_are_pytorchs(half: OnnxModel, backends: Backends, beam_size: int) -> None:
    exact = TorchModel(backends.exact.model, limits=LIMITS, attention_layer=ATTENTION_LAYER)
    sources = [[5, 7, 9, 11, 2], [4, 2], [8, 8, 10, 2], [30, 29, 28, 27, 26, 25, 24, 2], [7, 2]]
    options = DecodeOptions(beam_size=beam_size, max_decoding_length=9, return_attention=True, max_batch_size=2)
    special = backends.bundle.manifest.special_ids
    found, expected = (generate(model, sources, options, special) for model in (half.with_attention(), exact))

    def attention() -> list[np.ndarray]:
        return [result.hypotheses[0].attention for result in generate(exact, sources, options, special)]

    weights = iter(exact_arrays(attention))
    alone = generate(half, sources, replace(options, return_attention=False, max_batch_size=1), special)
    for one, other, plain in zip(found, expected, alone, strict=True):
        (hypothesis,), (exactly,) = one.hypotheses, other.hypotheses
        assert hypothesis.tokens == exactly.tokens == plain.hypotheses[0].tokens
        assert_close(hypothesis.attention, next(weights), epsilon=FLOAT16_EPSILON)


def test_types_are_those_of_the_table(bundle: Bundle) -> None:
    with pytest.raises(BundleError) as error:
        OnnxModel(bundle, variant="fp16", folder=bundle.variant_path("fp32"))
    assert any("must be tensor(float16)" in problem for problem in error.value.problems)
    with pytest.raises(BundleError, match=r"must be tensor\(float\)"):
        OnnxModel(bundle, variant="fp32", folder=bundle.variant_path("fp16"))


def test_bfloat16_is_refused_with_what_runs(bundle: Bundle) -> None:
    with pytest.raises(BackendUnavailable) as error:
        OnnxModel(bundle, variant="bf16")
    assert "ONNX Runtime's CPU provider cannot run bf16" in str(error.value)
    assert error.value.hint == "a GPU, or another variant: fp32, fp16"
    alone = Bundle(bundle.path, replace(bundle.manifest, variants={"bf16": {}}))
    with pytest.raises(BackendUnavailable, match=r"Try: a GPU$"):
        OnnxModel(alone, variant="bf16")
    with pytest.raises(BundleError, match="has no variant 'bf16'"):
        OnnxModel(Bundle(Path("nowhere"), replace(bundle.manifest, variants={"fp32": {}})), variant="bf16")
