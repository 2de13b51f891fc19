"""Whole generations from a bundle on ONNX Runtime and on emulated GPUs: PyTorch's tokens, in whatever company."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reference_model import SpecialIds as ReferenceSpecialIds
from reference_model import Transformer, load_checkpoint
from reference_model import search as reference_search
from tests.emulation import emulated_gpu
from tests.emulation.engines import add_engine
from tests.emulation.onnx_cuda import emulated_provider
from tests.numerics import log_prob_limit, score_limit
from tfm_export.bundle import Bundle, SpecialIds
from tfm_export.decoding import DecodeOptions, Request, Result, generate
from tfm_export.runtime.backends import attending_on_cpu
from tfm_export.runtime.cpu.onnx_runtime import OnnxModel
from tfm_export.runtime.gpu.onnx_cuda import OnnxCudaModel
from tfm_export.runtime.gpu.tensorrt_model import TensorRTModel
from tfm_export.runtime.step_model import StepModel
from tfm_export.runtime.torch_model import TorchModel

LONGEST = 14
BEAM: dict[str, Any] = {"beam_size": 4, "num_hypotheses": 4, "max_decoding_length": LONGEST}
METHODS: dict[str, dict[str, Any]] = {
    "greedy": {"max_decoding_length": LONGEST},
    "beam": BEAM,
    "beam, changed scores": {**BEAM, "min_decoding_length": 6, "no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
    "beam, Hugging Face's rules": {**BEAM, "compatibility": "huggingface", "length_penalty": 2.0},
    "sampling": {"sampling_topk": 5, "max_decoding_length": LONGEST, "num_hypotheses": 2},
    "sampling from all": {"sampling_topk": 0, "sampling_topp": 0.9, "max_decoding_length": LONGEST},
}


@dataclass(frozen=True)
class Models:
    """One checkpoint: its bundle on a backend, and PyTorch in single precision."""

    bundle: StepModel
    torch: TorchModel
    reference: Transformer
    special: SpecialIds


@contextmanager
def onnxruntime(bundle: Bundle, _: Path) -> Iterator[StepModel]:
    model = OnnxModel(bundle, threads=1)
    yield model
    model.close()


@contextmanager
def tensorrt(bundle: Bundle, folder: Path) -> Iterator[StepModel]:
    """An emulated GPU, on which nothing may be left."""
    with_engine = Bundle(shutil.copytree(bundle.path, folder / "bundle"), bundle.manifest)
    add_engine(with_engine, max_batch_size=12, capacities=(8, 24, 80))
    with emulated_gpu() as machine:
        model = TensorRTModel(with_engine, "emulated")
    yield model
    model.close()
    assert machine.leaks() == machine.violations == []
    assert machine.calls["cudaGraphLaunch"]


@contextmanager
def onnxruntime_cuda(bundle: Bundle, _: Path) -> Iterator[StepModel]:
    """An emulated GPU, too."""
    with emulated_provider() as machine:
        model = OnnxCudaModel(bundle, attending=partial(attending_on_cpu, bundle, "fp32"))
    yield model
    model.close()
    assert machine.leaks() == machine.violations == []


@pytest.fixture(
    scope="module", params=[onnxruntime, tensorrt, onnxruntime_cuda], ids=lambda backend: str(backend.__name__)
)
def models(
    request: pytest.FixtureRequest, tiny_bundle: Path, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Models]:
    bundle, reference = Bundle.open(tiny_bundle), load_checkpoint(tiny_checkpoint).model
    manifest = bundle.manifest
    with request.param(bundle, tmp_path_factory.mktemp("backend")) as model:
        yield Models(model, TorchModel(reference, limits=manifest.limits), reference, manifest.special_ids)


@pytest.fixture(scope="module")
def requests(models: Models) -> list[Request]:
    """Sources of many lengths, some with a forced prefix, each with a seed of its own."""
    generator, size = np.random.default_rng(8), models.bundle.dimensions.source_vocabulary_size
    sources = [[*generator.integers(4, size, length).tolist(), 2] for length in (3, 11, 1, 7, 5, 5, 17, 2, 9, 4)]
    return [Request(source=s, target_prefix=[9, 12][: i % 3], seed=i) for i, s in enumerate(sources)]


def assert_same(models: Models, found: list[Result], expected: list[Result]) -> None:
    """Two searches in float32."""
    limit = 2 * log_prob_limit(models.reference)
    for one, other in zip(found, expected, strict=True):
        assert [h.tokens for h in one.hypotheses] == [h.tokens for h in other.hypotheses]
        for h, e in zip(one.hypotheses, other.hypotheses, strict=True):
            assert h.log_probs == pytest.approx(e.log_probs, rel=0, abs=limit)
            assert h.score == pytest.approx(e.score, rel=0, abs=score_limit(limit, len(h.tokens) + 1))


def reference_hypotheses(models: Models, source: list[int], beam_size: int) -> list[reference_search.Hypothesis]:
    ids, ours = torch.tensor(source), models.special
    special = ReferenceSpecialIds(pad=ours.pad, bos=ours.bos, eos=ours.eos)
    if beam_size == 1:
        return reference_search.greedy(models.reference, ids[None], torch.ones(1, len(source)).bool(), special, LONGEST)
    return reference_search.beam(models.reference, ids, special, LONGEST, beam_size)


@pytest.mark.parametrize("beam_size", [1, 2, 4])
def test_the_references_tokens_and_log_probs(models: Models, requests: list[Request], beam_size: int) -> None:
    sources, limit = [list(request.source) for request in requests], 2 * log_prob_limit(models.reference)
    options = DecodeOptions(
        beam_size=beam_size, num_hypotheses=beam_size, max_decoding_length=LONGEST, max_batch_size=4
    )
    for source, result in zip(sources, generate(models.bundle, sources, options, models.special), strict=True):
        expected = reference_hypotheses(models, source, beam_size)
        assert [h.tokens for h in result.hypotheses] == [h.tokens for h in expected]
        for hypothesis, reference in zip(result.hypotheses, expected, strict=True):
            assert hypothesis.log_probs == pytest.approx(reference.log_probs, rel=0, abs=limit)
            assert hypothesis.score == pytest.approx(reference.normalised_score(1.0), rel=0, abs=limit)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_as_on_pytorch(models: Models, requests: list[Request], method: str) -> None:
    options = DecodeOptions(**METHODS[method], max_batch_size=4)
    found, expected = (generate(model, requests, options, models.special) for model in (models.bundle, models.torch))
    assert_same(models, found, expected)
    assert len({tuple(h.tokens) for result in found for h in result.hypotheses}) >= 8


@pytest.mark.parametrize("method", METHODS)
def test_alone_batched_shuffled_padded(models: Models, requests: list[Request], method: str) -> None:
    def decode(some: list[Request], batch: int) -> list[Result]:
        return generate(models.bundle, some, DecodeOptions(**METHODS[method], max_batch_size=batch), models.special)

    alone = [result for request in requests for result in decode([request], 1)]
    assert_same(models, decode(requests, len(requests)), alone)
    assert_same(models, decode(requests, 3), alone)
    order = np.random.default_rng(0).permutation(len(requests)).tolist()
    assert_same(models, decode([requests[i] for i in order], 3), [alone[i] for i in order])
    longest = Request(source=[5] * models.bundle.limits.max_source_length, seed=99)
    assert_same(models, decode([*requests, longest], len(requests) + 1)[:-1], alone)
