"""The naive searches against exhaustive enumeration, by hand, and against each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch

from reference_model import SpecialIds, Transformer, TransformerConfig
from reference_model.data import pad
from reference_model.search import BeamSearch, Hypothesis, beam, beam_batch, greedy
from tests.numerics import log_prob_limit, score_limit

SPECIAL = SpecialIds()
VOCABULARY, LENGTH = 5, 4


def tiny_vocabulary_model(seed: int) -> Transformer:
    """Five target tokens; the projection is large, so that probabilities differ much."""
    torch.manual_seed(seed)
    config = TransformerConfig(
        source_vocabulary_size=6,
        target_vocabulary_size=VOCABULARY,
        d_model=8,
        heads=2,
        d_ff=16,
        encoder_layers=1,
        decoder_layers=1,
        max_length=8,
    )
    model = Transformer(config).eval()
    with torch.no_grad():
        model.projection.weight.mul_(2)
    return model


@torch.inference_mode()
def every_hypothesis(model: Transformer, source_ids: list[int]) -> list[Hypothesis]:
    """All targets that end, and all of LENGTH tokens that do not, scored by one forward pass each."""
    others = [token for token in range(VOCABULARY) if token != SPECIAL.eos]
    targets = [[*tokens, SPECIAL.eos] for n in range(LENGTH) for tokens in product(others, repeat=n)]
    targets += [list(tokens) for tokens in product(others, repeat=LENGTH)]
    results = []
    for target in targets:
        source = torch.tensor([source_ids])
        logits = model(source, torch.ones_like(source, dtype=torch.bool), torch.tensor([[SPECIAL.bos, *target[:-1]]]))
        log_probs = logits[0].log_softmax(-1).gather(1, torch.tensor(target)[:, None])[:, 0].tolist()
        ended = target[-1] == SPECIAL.eos
        results.append(Hypothesis(target[:-1] if ended else target, sum(log_probs), log_probs, ended))
    limit = score_limit(log_prob_limit(model), LENGTH)  # what a logarithm is off, its number is off in proportion
    assert sum(math.exp(h.score) for h in results) == pytest.approx(1, rel=0, abs=limit)
    return results


def search_limit(model: Transformer) -> float:
    """Of a difference of two searches in float32."""
    return 2 * log_prob_limit(model, LENGTH)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_beam_wide_enough_finds_everything_in_order(seed: int, length_penalty: float) -> None:
    model, source = tiny_vocabulary_model(seed), [3, 4, 5, 2]
    expected = sorted(every_hypothesis(model, source), key=lambda h: -h.normalised_score(length_penalty))
    width = VOCABULARY**LENGTH
    found = beam(model, torch.tensor(source), SPECIAL, LENGTH, width, length_penalty)
    assert len(found) == len(expected) == 1 + 4 + 16 + 64 + 256
    assert {str(h.tokens) for h in found} == {str(h.tokens) for h in expected}
    for got, want in zip(found, expected, strict=True):
        tokens = len(want.log_probs)
        limit = score_limit(search_limit(model), tokens, tokens**length_penalty)
        score = want.normalised_score(length_penalty)
        assert got.normalised_score(length_penalty) == pytest.approx(score, rel=0, abs=limit)
    assert found[0].tokens == expected[0].tokens
    assert found[0].finished == expected[0].finished


def test_greedy_takes_the_likeliest_token_each_time() -> None:
    model, source = tiny_vocabulary_model(1), [3, 4, 2]
    everything = every_hypothesis(model, source)
    ids = torch.tensor([source])
    (found,) = greedy(model, ids, torch.ones_like(ids, dtype=torch.bool), SPECIAL, LENGTH)
    prefix: list[int] = []
    for value in found.log_probs:
        options: dict[int, float] = {}
        for h in everything:
            sequence = h.tokens + [SPECIAL.eos] * h.finished
            if sequence[: len(prefix)] == prefix and len(sequence) > len(prefix):
                options[sequence[len(prefix)]] = h.log_probs[len(prefix)]
        best = max(options, key=options.__getitem__)
        assert value == pytest.approx(options[best], rel=0, abs=search_limit(model))
        prefix.append(best)
    assert prefix == found.tokens + [SPECIAL.eos] * found.finished
    assert found.score == pytest.approx(sum(found.log_probs))


def test_beams_by_hand() -> None:
    """Two beams over the tokens 0, 1, 2 (the end) and 3, with the scores written out."""
    search = BeamSearch(SPECIAL, max_length=3, beam_size=2)
    assert search.targets() == [[1]]
    search.step(torch.tensor([[-9.0, -1.0, -3.0, -2.0]]))  # the end is third: not among the first two
    assert [tokens for tokens, _ in search.live] == [[1], [3]]
    assert search.finished == []
    assert search.margin == pytest.approx(1)  # between [3] and the end
    search.step(torch.tensor([[-5.0, -6.0, -7.0, -8.0], [-9.0, -0.5, -1.0, -9.0]]))
    # -2.5 for [3, 1] and -3.0 for [3, end], which is second; then -6.0 for [1, 0] and -7.0 for [1, 1].
    assert [(h.tokens, h.score, h.finished) for h in search.finished] == [([3], -3.0, True)]
    assert search.targets() == [[1, 3, 1], [1, 1, 0]]
    assert search.margin == pytest.approx(1 / 2)  # between [1, 0] and [1, 1], for two tokens
    assert not search.over
    search.step(torch.tensor([[-1.0, -2.0, -3.0, -4.0], [-1.0, -1.0, -1.0, -1.5]]))
    # At three tokens the live ones count too: [3, 1, 0] with -3.5 and [3, 1, 1] with -4.5.
    assert search.over
    assert [(h.tokens, h.score) for h in search.results(0.0)] == [([3], -3.0), ([3, 1, 0], -3.5)]
    ranked = [(h.tokens, round(h.normalised_score(1.0), 4)) for h in search.results(1.0)]
    assert ranked == [([3, 1, 0], -1.1667), ([3], -1.5)]
    assert search.results(1.0)[0].margin == pytest.approx(0.5 / 3)  # the fourth, -6.5, and the fifth, -7.0


def test_a_search_is_over_when_enough_hypotheses_are_finished() -> None:
    search = BeamSearch(SPECIAL, max_length=9, beam_size=2)
    search.step(torch.tensor([[-9.0, -2.0, -1.0, -3.0]]))
    assert (len(search.finished), search.over) == (1, False)
    search.step(torch.tensor([[-5.0, -6.0, -0.1, -8.0], [-5.0, -5.0, -9.0, -5.0]]))
    assert search.over
    assert [h.tokens for h in search.results(0.0)] == [[], [1]]


SOURCES = [[5, 9, 4, 2], [7, 2], [11, 12, 13, 14, 15, 6, 2], [20, 8, 8, 2], [30, 2], [6, 17, 2]]


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Transformer]) -> Transformer:
    return tiny_model(seed=5, norm_first=True, final_norm=True)


def same(model: Transformer, a: Hypothesis, b: Hypothesis) -> None:
    assert (a.tokens, a.finished) == (b.tokens, b.finished)
    assert a.log_probs == pytest.approx(b.log_probs, rel=0, abs=2 * log_prob_limit(model, 12))


def test_batch_equals_single(model: Transformer) -> None:
    source_ids = pad(SOURCES, SPECIAL.pad)
    source_mask = source_ids != SPECIAL.pad
    together = greedy(model, source_ids, source_mask, SPECIAL, 12)
    assert len({len(h.tokens) for h in together}) > 1, "a test of one length says little"
    beams = beam_batch(model, source_ids, source_mask, SPECIAL, 12, 3)
    for source, hypothesis, several in zip(SOURCES, together, beams, strict=True):
        ids = torch.tensor([source])
        same(model, greedy(model, ids, torch.ones_like(ids, dtype=torch.bool), SPECIAL, 12)[0], hypothesis)
        alone = beam(model, ids[0], SPECIAL, 12, 3)
        assert len(alone) == len(several) == 3
        for one, other in zip(alone, several, strict=True):
            same(model, one, other)


def test_beam_1_equals_greedy(model: Transformer) -> None:
    source_ids = pad(SOURCES, SPECIAL.pad)
    source_mask = source_ids != SPECIAL.pad
    expected = greedy(model, source_ids, source_mask, SPECIAL, 12)
    for (found,), hypothesis in zip(beam_batch(model, source_ids, source_mask, SPECIAL, 12, 1), expected, strict=True):
        same(model, found, hypothesis)


def test_the_length_limit_counts_the_end_token(model: Transformer) -> None:
    source_ids = pad(SOURCES, SPECIAL.pad)
    source_mask = source_ids != SPECIAL.pad
    for hypothesis in greedy(model, source_ids, source_mask, SPECIAL, 2):
        assert len(hypothesis.log_probs) == len(hypothesis.tokens) + hypothesis.finished <= 2
    for several in beam_batch(model, source_ids, source_mask, SPECIAL, 2, 4):
        assert max(len(h.log_probs) for h in several) == 2
