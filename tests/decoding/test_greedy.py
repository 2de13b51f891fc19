"""Greedy search over the scripted model."""

from __future__ import annotations

import numpy as np
import pytest

from tests.decoding.fake_model import SPECIAL, FakeModel, Table, random_table
from tests.numerics import near
from tfm_export.decoding import DecodeOptions, Reason, Request, generate

SOURCES = [[int(t) for t in np.random.default_rng(i).integers(4, 40, 1 + i % 7)] for i in range(40)]


def follow(table: Table, source: list[int], prefix: list[int], longest: int) -> tuple[list[int], list[float]]:
    """The likeliest token at every step, one source at a time."""
    tokens, values = list(prefix), [0.0] * len(prefix)
    while len(tokens) < longest:
        scores = table(tuple(source), (SPECIAL.bos, *tokens))
        tokens.append(int(scores.argmax()))
        values.append(float(scores.max()))
        if tokens[-1] == SPECIAL.eos:
            break
    return tokens, values


@pytest.mark.parametrize("max_batch_size", [1, 3, 32])
def test_greedy_follows_the_likeliest_token(max_batch_size: int) -> None:
    model = FakeModel(random_table())
    results = generate(model, SOURCES, DecodeOptions(max_batch_size=max_batch_size), SPECIAL)
    for source, result in zip(SOURCES, results, strict=True):
        tokens, values = follow(model.table, source, [], 12)
        (hypothesis,) = result.hypotheses
        assert hypothesis.finished == (tokens[-1] == SPECIAL.eos) == (result.reason == Reason.END)
        assert hypothesis.tokens == (tokens[:-1] if hypothesis.finished else tokens)
        assert hypothesis.log_probs == near(values)
        assert hypothesis.score == near(sum(values) / len(values))


def test_rows_join_and_leave_with_prefixes_of_their_own() -> None:
    generator, model = np.random.default_rng(7), FakeModel(random_table(seed=3))
    prefixes = [[int(t) for t in generator.integers(3, 5, i % 5)] for i in range(len(SOURCES))]
    requests = [Request(source=s, target_prefix=p) for s, p in zip(SOURCES, prefixes, strict=True)]
    results = generate(model, requests, DecodeOptions(max_batch_size=4, return_end_token=True), SPECIAL)
    for source, prefix, result in zip(SOURCES, prefixes, results, strict=True):
        assert result.hypotheses[0].tokens == follow(model.table, source, prefix, 12)[0]
    assert model.moves
    assert model.encodes > 2
    assert model.steps < 12 * model.encodes
