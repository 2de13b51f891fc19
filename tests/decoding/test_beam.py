"""Beam search over the scripted model: against every target there is, and against searches without cache or batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoding.fake_model import SPECIAL, FakeModel, random_table
from tests.decoding.naive import Naive
from tests.numerics import near
from tfm_export.decoding import DecodeOptions, Request, Result, generate
from tfm_export.decoding.beam import extensions

# None is CTranslate2's stop rule, the others are Hugging Face's.
STOP_RULES = [None, False, True, "never"]


def rules(early_stopping: bool | str | None) -> dict[str, object]:
    """The options that choose a stop rule."""
    if early_stopping is None:
        return {"compatibility": "ctranslate2"}
    return {"compatibility": "huggingface", "early_stopping": early_stopping}


def tokens(result: Result) -> list[list[int]]:
    return [hypothesis.tokens for hypothesis in result.hypotheses]


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0, -0.5])
@pytest.mark.parametrize("early_stopping", STOP_RULES)
def test_a_beam_that_prunes_nothing_finds_the_best_of_all_targets(
    early_stopping: bool | str | None, length_penalty: float
) -> None:
    model = FakeModel(random_table(seed=1), longest=4)
    options = DecodeOptions(
        beam_size=350, length_penalty=length_penalty, return_end_token=True, num_hypotheses=3, **rules(early_stopping)
    )
    for source in [(8, 9)]:
        everything = Naive(model.table, source, 4).all_targets()
        best = sorted(((s / len(t) ** length_penalty, t) for t, s in everything), reverse=True)[:3]
        (result,) = generate(model, [source], options, SPECIAL)
        # Without a length penalty CTranslate2's rule ends as soon as nothing can be better than the best.
        count = 1 if early_stopping is None and length_penalty == 0 else 3
        assert tokens(result)[:count] == [list(t) for _, t in best][:count]
        assert [h.score for h in result.hypotheses][:count] == near([s for s, _ in best][:count])


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(2, 6),
    count=st.integers(1, 7),
    batch=st.integers(1, 5),
    length_penalty=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
    early_stopping=st.sampled_from(STOP_RULES),
    patience=st.sampled_from([1.0, 1.5, 2.0]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_beam_search_equals_one_without_cache_or_batch(
    size: int,
    count: int,
    batch: int,
    length_penalty: float,
    early_stopping: bool | str | None,
    patience: float,
    seed: int,
    data: st.DataObject,
) -> None:
    patience = 1.0 if early_stopping is not None else patience
    model = FakeModel(random_table(vocabulary=7, seed=seed), vocabulary=7, candidates=data.draw(st.integers(2, 7)))
    wanted = data.draw(st.integers(1, size))
    options = DecodeOptions(
        beam_size=size,
        num_hypotheses=wanted,
        length_penalty=length_penalty,
        patience=patience,
        max_batch_size=batch,
        return_end_token=True,
        **rules(early_stopping),
    )
    sources = [tuple(data.draw(st.lists(st.integers(4, 40), min_size=1, max_size=6))) for _ in range(count)]
    prefixes = [tuple(data.draw(st.lists(st.integers(3, 6), max_size=5))) for _ in range(count)]
    requests = [Request(source=s, target_prefix=p) for s, p in zip(sources, prefixes, strict=True)]
    for source, prefix, result in zip(sources, prefixes, generate(model, requests, options, SPECIAL), strict=True):
        expected = Naive(model.table, source, 12).beam(
            size, length_penalty, early_stopping=early_stopping, patience=patience, wanted=wanted, prefix=prefix
        )
        assert tokens(result) == [list(t) for t, _ in expected]
        assert [h.score for h in result.hypotheses] == near([s for _, s in expected])
        for hypothesis in result.hypotheses:
            assert hypothesis.log_probs is not None
            assert len(hypothesis.log_probs) == len(hypothesis.tokens)


def test_the_path_is_right_when_the_best_switches_parent_late() -> None:
    """Up to step 3 beam 0 leads; then its continuation is poor and beam 1's is sure."""

    def table(source: tuple[int, ...], path: tuple[int, ...]) -> np.ndarray:
        del source
        p = np.full(6, 1e-6)
        after = path[1:]
        if not after:
            p[3], p[4] = 0.6, 0.4
        elif len(after) < 4:
            p[after[-1]] = 1.0
        elif len(after) == 4:
            p[5] = 1e-3 if after[0] == 3 else 1.0
            p[3] = 2e-3
        else:
            p[2] = 1.0
        return np.log(p / p.sum()) if len(after) != 4 else np.log(p)

    model = FakeModel(table, vocabulary=6, candidates=6)
    (result,) = generate(model, [[9]], DecodeOptions(beam_size=2, num_hypotheses=2), SPECIAL)
    assert tokens(result)[0] == [4, 4, 4, 4, 5]
    assert model.moves == 0


def test_no_step_moves_or_copies_a_cache() -> None:
    model = FakeModel(random_table(vocabulary=9, seed=5), vocabulary=9, candidates=9)
    generate(model, [[5, 6]], DecodeOptions(beam_size=4), SPECIAL)
    assert model.moves == 0
    assert model.queries[0] == 1
    assert set(model.queries[1:]) == {4}


def test_extensions_come_in_order_and_leave_dead_hypotheses_out() -> None:
    scores = np.array([[-1.0, -np.inf]])
    values = np.log(np.array([[[0.5, 0.3, 0.2], [0.9, 0.05, 0.05]]]))
    ids = np.array([[[4, 2, 3], [7, 8, 9]]])
    sums, parents, found, gained = extensions(scores, values, ids, 8)
    assert found[0, :3].tolist() == [4, 2, 3]
    assert parents[0, :3].tolist() == [0, 0, 0]
    assert sums[0, :3] == pytest.approx(-1 + np.log([0.5, 0.3, 0.2]))
    assert gained[0, :3] == pytest.approx(np.log([0.5, 0.3, 0.2]))
    assert (sums[0, 3:] == -np.inf).all()
