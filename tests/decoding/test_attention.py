"""What the tokens of every hypothesis attend to, and scores that hang on it."""

from __future__ import annotations

import math
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reference_model import Transformer
from tests.benchmarks.random_models import CONFIGURATIONS, LENGTH, random_model, random_sources
from tests.benchmarks.random_models import SPECIAL as REFERENCE
from tests.decoding.fake_model import SPECIAL, FakeModel, attended, random_table
from tests.decoding.naive import Naive
from tests.numerics import assert_close, exactly, near
from tfm_export.bundle import SpecialIds
from tfm_export.decoding import DecodeOptions, Hypothesis, Request, generate
from tfm_export.runtime.torch_model import TorchModel

SOURCES = [tuple(int(t) for t in np.random.default_rng(i).integers(4, 40, 1 + i % 7)) for i in range(30)]


def fake_model(vocabulary: int = 8, seed: int = 3, **fields: Any) -> FakeModel:
    return FakeModel(random_table(vocabulary, seed), vocabulary, gives_attention=True, **fields)


def expected(source: tuple[int, ...], start: tuple[int, ...], tokens: list[int]) -> np.ndarray:
    return np.array([attended(source, (*start, *tokens[:i])) for i in range(len(tokens))])


def coverage(attention: np.ndarray) -> float:
    """By the letter of the formula."""
    return sum(math.log(min(column, 1.0)) for column in attention.sum(0).tolist())


@pytest.mark.parametrize("width", [{"beam_size": 1}, {"beam_size": 4, "num_hypotheses": 4}, {"sampling_topk": 3}])
@pytest.mark.parametrize("start", [(SPECIAL.bos,), (2, 6, 5)])
@pytest.mark.parametrize("return_end_token", [True, False])
def test_every_token_has_the_weights_of_the_step_that_chose_it(
    width: dict[str, Any], start: tuple[int, ...], return_end_token: bool
) -> None:
    options = DecodeOptions(
        **width,
        start_tokens=start,
        return_attention=True,
        return_end_token=return_end_token,
        max_batch_size=7,
        max_decoding_length=12,
    )
    model = fake_model(longest=15)
    requests = [Request(source=s, target_prefix=[4, 5, 4, 6][: i % 5]) for i, s in enumerate(SOURCES)]
    for request, result in zip(requests, generate(model, requests, options, SPECIAL), strict=True):
        for hypothesis in result.hypotheses:
            assert hypothesis.attention is not None
            assert hypothesis.attention.dtype == np.float32
            weights = expected(tuple(request.source), start, hypothesis.tokens)
            np.testing.assert_array_equal(hypothesis.attention, weights.reshape(hypothesis.attention.shape))
            assert hypothesis.attention.shape == (len(hypothesis.tokens), len(request.source))
    assert model.moves
    assert model.grows or "beam_size" not in width or width["beam_size"] == 1


def test_alternatives_tell_it_too() -> None:
    options = DecodeOptions(return_alternatives=True, num_hypotheses=4, beam_size=2, return_attention=True)
    (result,) = generate(fake_model(), [Request(source=SOURCES[5], target_prefix=[4, 6])], options, SPECIAL)
    for hypothesis in result.hypotheses:
        np.testing.assert_array_equal(hypothesis.attention, expected(SOURCES[5], (SPECIAL.bos,), hypothesis.tokens))


def test_nobody_gets_it_who_did_not_ask() -> None:
    model = fake_model()
    for options, wanted in [({}, False), ({"coverage_penalty": 0.1}, False), ({"replace_unknowns": True}, True)]:
        (result,) = generate(model, [(5, 6)], DecodeOptions(**options), SPECIAL)
        assert (result.hypotheses[0].attention is not None) is wanted


@pytest.mark.parametrize("beam_size", [1, 3])
def test_a_request_that_is_given_up_tells_what_it_has(beam_size: int) -> None:
    cancelled = threading.Event()
    requests = [
        Request(source=(5, 6), cancelled=cancelled, target_prefix=[4]),
        Request(source=(6, 7, 8), on_tokens=lambda _: cancelled.set()),
        Request(source=(7,), deadline=0.0, target_prefix=[4, 5]),
    ]
    options = DecodeOptions(beam_size=beam_size, min_decoding_length=12, return_attention=True)
    one, _, none = (result.hypotheses[0] for result in generate(fake_model(), requests, options, SPECIAL))
    assert not one.finished
    np.testing.assert_array_equal(one.attention, expected((5, 6), (SPECIAL.bos,), one.tokens))
    assert none.tokens == [4, 5]
    np.testing.assert_array_equal(none.attention, np.zeros((2, 1)))


def test_a_row_tells_nothing_of_the_sentence_that_had_it_before() -> None:
    requests = [Request(source=(6, 7)), Request(source=(7,), deadline=0.0, target_prefix=[4, 5])]
    options = DecodeOptions(return_attention=True, max_batch_size=1)
    before, after = generate(fake_model(), requests, options, SPECIAL)
    assert before.hypotheses[0].tokens
    np.testing.assert_array_equal(after.hypotheses[0].attention, np.zeros((2, 1)))


@pytest.mark.parametrize("penalty", [0.3, 2.0, -0.5])
def test_a_beam_that_prunes_nothing_finds_the_best_covered_of_all_targets(penalty: float) -> None:
    model = FakeModel(random_table(seed=1), longest=4, gives_attention=True)
    source = (8, 9, 10)
    options = DecodeOptions(
        beam_size=350, patience=2, length_penalty=0, coverage_penalty=penalty, return_end_token=True, num_hypotheses=3
    )
    (result,) = generate(model, [source], options, SPECIAL)
    targets = [
        (score + penalty * coverage(expected(source, (SPECIAL.bos,), list(tokens))), list(tokens))
        for tokens, score in Naive(model.table, source, 4).all_targets()
    ]
    best = sorted(targets, reverse=True)[:3]
    assert [h.tokens for h in result.hypotheses] == [tokens for _, tokens in best]
    assert [h.score for h in result.hypotheses] == near([score for score, _ in best])
    plain = max(Naive(model.table, source, 4).all_targets(), key=lambda way: way[1])[0]
    if penalty > 1:
        assert best[0][1] != list(plain), "a penalty that changes nothing says little"


@pytest.mark.parametrize(("formula", "left_out"), [("with_prefix", 0), ("without_prefix", 2), ("gnmt", 0)])
def test_coverage_counts_the_tokens_that_the_length_counts(formula: Any, left_out: int) -> None:
    options = DecodeOptions(
        coverage_penalty=0.7, target_prefix=[4, 5], return_attention=True, return_end_token=True, length_formula=formula
    )
    for result in generate(fake_model(), SOURCES, options, SPECIAL):
        (hypothesis,) = result.hypotheses
        assert hypothesis.attention is not None
        assert hypothesis.log_probs is not None
        length = len(hypothesis.tokens) - left_out
        divisor = (5 + length) / 6 if formula == "gnmt" else length
        score = sum(hypothesis.log_probs) / divisor + 0.7 * coverage(hypothesis.attention[left_out:])
        assert hypothesis.score == near(score, made_of=hypothesis.log_probs)


@torch.inference_mode()
def full_forward(source: list[int], hypothesis: Hypothesis, layer: int, model: Transformer) -> Tensor:
    """The weights of one layer in a run of the whole decoder over the whole target, the mean over the heads."""
    weights: list[Tensor] = []
    mask = torch.ones(1, len(source), dtype=torch.bool)
    target = torch.tensor([[REFERENCE.bos, *hypothesis.tokens]])
    model.decode(target, model.encode(torch.tensor([source]), mask), mask, cross_attention=weights)
    return weights[layer][0].mean(0)[:-1]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("beam_size", [1, 3])
@pytest.mark.parametrize("configuration", ["post-norm", "pre-norm"])
def test_real_weights_are_those_of_a_full_forward(configuration: str, beam_size: int, layer: int) -> None:
    model, sources = random_model(**CONFIGURATIONS[configuration]), random_sources()
    options = DecodeOptions(
        beam_size=beam_size,
        num_hypotheses=beam_size,
        max_decoding_length=LENGTH,
        max_batch_size=3,
        return_attention=True,
        target_prefix=[7, 8],
    )
    special = SpecialIds(pad=REFERENCE.pad, bos=REFERENCE.bos, eos=REFERENCE.eos, source_ends_with_eos=True)
    for source, result in zip(
        sources, generate(TorchModel(model, attention_layer=layer), sources, options, special), strict=True
    ):
        for hypothesis in result.hypotheses:
            assert_close(hypothesis.attention, exactly(partial(full_forward, source, hypothesis, layer), model))
