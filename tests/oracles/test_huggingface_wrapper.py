"""The Hugging Face oracle itself: it decodes with the reference model's numbers, and its search is a search."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip(
    "transformers", reason="needs transformers: run `.venv/bin/pip install -e '.[dev]' -c constraints.txt`"
)

from reference_model import SpecialIds, Transformer
from reference_model.data import pad
from reference_model.search import beam_batch, greedy
from tests.benchmarks.random_models import random_model
from tests.numerics import assert_close, exactly, log_prob_limit, near, score_limit
from tests.oracles.huggingface import HuggingFaceTransformer, Oracle

SPECIAL = SpecialIds()
SOURCES = [[3 + (5 * i + 3 * j + i * j) % 26 for j in range(i % 6)] + [2] for i in range(12)]
NORMS: list[dict[str, Any]] = [{"norm_first": True, "final_norm": True}, {"norm_first": False}]


def padded(sources: list[list[int]]) -> tuple[Tensor, Tensor]:
    source_ids = pad(sources, SPECIAL.pad)
    return source_ids, source_ids != SPECIAL.pad


@pytest.fixture(params=NORMS, ids=["pre-norm", "post-norm"])
def model(request: pytest.FixtureRequest) -> Transformer:
    """A random model, its end token made likelier until targets end at several lengths."""
    model = random_model(**request.param)
    for _ in range(50):
        if len({len(h.tokens) for h in greedy(model, *padded(SOURCES), SPECIAL, 15)}) > 2:
            return model
        with torch.no_grad():
            model.projection.bias[SPECIAL.eos] += 0.2
    raise AssertionError("no end bias gives targets of different lengths")


@torch.inference_mode()
def test_its_logits_are_the_models(model: Transformer) -> None:
    source_ids, source_mask = padded(SOURCES)
    targets = torch.tensor([[1, 5 + i, 30 - i] for i in range(len(SOURCES))])
    wrapper = HuggingFaceTransformer(model, SPECIAL)
    numbers = wrapper.get_encoder()(source_ids, source_mask.long())
    expected = exactly(lambda m: m(source_ids, source_mask, targets)[:, -1], model)
    for _ in range(2):  # computed, then remembered
        found = wrapper(targets, numbers).logits
        assert_close(found[:, 0], expected)
    repeated = wrapper.get_encoder()(source_ids, source_mask.long()).last_hidden_state.repeat_interleave(2, 0)
    numbers.last_hidden_state = repeated  # as generate does for two beams
    found = wrapper(targets.repeat_interleave(2, 0), numbers).logits[:, 0]
    for row in (found[::2], found[1::2]):
        assert_close(row, expected)


def test_normalised_gives_log_probabilities(model: Transformer) -> None:
    source_ids, source_mask = padded(SOURCES[:1])
    wrapper = HuggingFaceTransformer(model, SPECIAL, normalised=True)
    numbers = wrapper.get_encoder()(source_ids, source_mask.long())
    log_probs = wrapper(torch.tensor([[1, 5]]), numbers).logits.detach()
    assert log_probs.exp().sum().item() == near(1, made_of=[1, log_probs.abs().max().item()])


@pytest.mark.parametrize("normalised", [False, True])
def test_its_greedy_is_the_reference_models(model: Transformer, *, normalised: bool) -> None:
    found = Oracle(model, SPECIAL, normalised=normalised).generate(SOURCES, max_new_tokens=15)
    expected = greedy(model, *padded(SOURCES), SPECIAL, 15)
    for (generated,), hypothesis in zip(found, expected, strict=True):
        assert generated.tokens == hypothesis.tokens + [SPECIAL.eos] * hypothesis.finished
        assert generated.log_probs == pytest.approx(hypothesis.log_probs, rel=0, abs=2 * log_prob_limit(model, 15))


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_its_beams_under_the_same_stop_rule_are_the_reference_models(model: Transformer, length_penalty: float) -> None:
    """`reference_model.search` stops when beam_size hypotheses have finished: their early_stopping=True."""
    options = {"num_beams": 4, "num_return_sequences": 4, "early_stopping": True, "length_penalty": length_penalty}
    found = Oracle(model, SPECIAL).generate(SOURCES, max_new_tokens=40, **options)
    expected = beam_batch(model, *padded(SOURCES), SPECIAL, 40, 4, length_penalty)
    for sequences, hypotheses in zip(found, expected, strict=True):
        assert len(sequences) == 4
        for generated, hypothesis in zip(sequences, hypotheses, strict=True):
            assert generated.tokens == hypothesis.tokens + [SPECIAL.eos] * hypothesis.finished
            tokens = len(hypothesis.log_probs)
            limit = score_limit(2 * log_prob_limit(model, 40), tokens, tokens**length_penalty)
            assert generated.score == pytest.approx(hypothesis.normalised_score(length_penalty), rel=0, abs=limit)


def test_options_take_effect(model: Transformer) -> None:
    oracle = Oracle(model, SPECIAL)
    for beams in (1, 3):
        kinds = {"num_beams": beams, "max_new_tokens": 12}
        plain = [best.tokens for best, *_ in oracle.generate(SOURCES, **kinds)]
        longer = [best.tokens for best, *_ in oracle.generate(SOURCES, min_new_tokens=11, **kinds)]
        assert all(len(tokens) >= 11 for tokens in longer)
        assert longer != plain
        for best, *_ in oracle.generate(SOURCES, no_repeat_ngram_size=1, min_new_tokens=8, **kinds):
            assert len(set(best.tokens)) == len(best.tokens)
        assert [best.tokens for best, *_ in oracle.generate(SOURCES, repetition_penalty=5.0, **kinds)] != plain


def test_prefixes_of_any_length_are_forced_and_left_out(model: Transformer) -> None:
    plain = [best for best, *_ in Oracle(model, SPECIAL).generate(SOURCES, max_new_tokens=12)]
    prefixes = [best.tokens[: i % 3] for i, best in enumerate(plain)]
    found = Oracle(model, SPECIAL).generate(SOURCES, prefixes=prefixes, max_new_tokens=12)
    for (generated,), prefix, best in zip(found, prefixes, plain, strict=True):
        expected = best.tokens[len(prefix) :]
        assert generated.tokens[: len(expected)] == expected
