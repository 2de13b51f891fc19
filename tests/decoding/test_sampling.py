"""Drawing tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.decoding.fake_model import SPECIAL, FakeModel, random_table
from tfm_export.decoding import DecodeOptions, Request, generate
from tfm_export.decoding.sampling import generator, sample

# Of a share among so many draws the standard error is sqrt(p (1 - p) / draws), at most.
DRAWS = 4000
FOUR_ERRORS = 4 * 0.5 / DRAWS**0.5


def within_chance(expected: list[float]) -> Any:
    return pytest.approx(expected, rel=0, abs=FOUR_ERRORS)


def frequencies(options: DecodeOptions, probabilities: list[float], draws: int = DRAWS) -> list[float]:
    random, values = generator(1, 0), np.log(np.array(probabilities))
    ids = np.array([30, 10, 20, 40])[: len(values)]
    places = [sample(values, ids, options, random) for _ in range(draws)]
    return (np.bincount(places, minlength=len(values)) / draws).tolist()


def test_tokens_come_as_often_as_they_are_likely() -> None:
    assert frequencies(DecodeOptions(sampling_topk=0), [0.5, 0.3, 0.2]) == within_chance([0.5, 0.3, 0.2])


def test_temperature_sharpens() -> None:
    expected = np.array([0.5, 0.3, 0.2]) ** 2
    options = DecodeOptions(sampling_topk=0, sampling_temperature=0.5)
    assert frequencies(options, [0.5, 0.3, 0.2]) == within_chance((expected / expected.sum()).tolist())


@pytest.mark.parametrize("temperature", [1e-3, 1e-300, 5e-324])
def test_a_temperature_near_0_takes_the_best(temperature: float) -> None:
    options = DecodeOptions(sampling_topk=0, sampling_temperature=temperature)
    assert frequencies(options, [0.3, 0.5, 0.2], draws=50) == [0, 1, 0]
    values = np.array([-np.inf, -3.0, -1.0])
    assert sample(values, np.array([5, 4, 3]), options, generator(1, 0)) == 2


def test_the_largest_seed_draws() -> None:
    options = DecodeOptions(sampling_topk=0, seed=2**63 - 1)
    assert generate(FakeModel(random_table(9), 9), [(5,)], options, SPECIAL)[0].hypotheses[0].tokens


@pytest.mark.parametrize(("topp", "kept"), [(0.45, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.85, 3), (1.0, 4)])
def test_topp_keeps_the_fewest_that_reach_it(topp: float, kept: int) -> None:
    found = frequencies(DecodeOptions(sampling_topk=0, sampling_topp=topp), [0.5, 0.3, 0.15, 0.05])
    assert [f > 0 for f in found] == [i < kept for i in range(4)]


def test_tokens_that_are_as_likely_may_come_in_either_order() -> None:
    options, ids = DecodeOptions(sampling_topk=0), np.array([8, 3, 5])
    one = [int(ids[sample(np.log([0.4, 0.4, 0.2]), ids, options, generator(s, 0))]) for s in range(50)]
    other_ids = ids[[1, 0, 2]]
    two = [int(other_ids[sample(np.log([0.4, 0.4, 0.2]), other_ids, options, generator(s, 0))]) for s in range(50)]
    assert one == two


@pytest.mark.parametrize("topk", [0, 3, 7])
def test_a_seed_draws_the_same_whatever_else_is_in_the_batch(topk: int) -> None:
    model = FakeModel(random_table(9), 9, candidates=4)
    options = DecodeOptions(sampling_topk=topk, sampling_topp=0.95, num_hypotheses=3)
    requests = [Request(source=(4 + i,) * (1 + i % 3), seed=i) for i in range(12)]
    together = generate(model, requests, options, SPECIAL)
    for request, result in zip(requests, together, strict=True):
        (alone,) = generate(model, [request], options, SPECIAL)
        assert [h.tokens for h in alone.hypotheses] == [h.tokens for h in result.hypotheses]
        assert [h.score for h in result.hypotheses] == sorted((h.score for h in result.hypotheses), reverse=True)
    assert len({tuple(h.tokens) for r in together for h in r.hypotheses}) > 12
    assert model.full_steps == (0 if topk == 3 else model.steps)


def test_without_a_seed_each_time_is_another() -> None:
    model = FakeModel(random_table(9), 9)
    options = DecodeOptions(sampling_topk=0)
    assert len({tuple(generate(model, [(5,)], options, SPECIAL)[0].hypotheses[0].tokens) for _ in range(10)}) > 1


def test_topk_draws_from_the_best_only() -> None:
    model = FakeModel(random_table(9), 9)
    options = DecodeOptions(sampling_topk=2, seed=5)
    for source in [(i,) for i in range(4, 20)]:
        tokens = generate(model, [source], options, SPECIAL)[0].hypotheses[0].tokens
        for i, token in enumerate(tokens):
            scores = model.table(source, (SPECIAL.bos, *tokens[:i]))
            assert token in np.argsort(-scores)[:2]
