"""The log-probabilities of given targets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.decoding.fake_model import SPECIAL, FakeModel, FakeSentences, random_table
from tests.numerics import near
from tfm_export.bundle import SourceIds
from tfm_export.decoding import DecodeOptions, generate, score, scoring
from tfm_export.errors import RequestError
from tfm_export.runtime.step_model import Ids, Mask

SOURCES = [(5,), (6, 7, 8), (9,), (10, 11)]
TARGETS = [[4, 3], [3, 3, 4, 4, 3], [], [4]]


@pytest.mark.parametrize("max_batch_size", [1, 3, 8])
@pytest.mark.parametrize("largest_step", [1, 30, scoring.LARGEST_STEP])
@pytest.mark.parametrize("add_end_token", [True, False])
def test_scores_are_the_tables(
    monkeypatch: pytest.MonkeyPatch, max_batch_size: int, largest_step: int, add_end_token: bool
) -> None:
    monkeypatch.setattr(scoring, "LARGEST_STEP", largest_step)
    model = FakeModel(random_table())
    found = score(model, SOURCES, TARGETS, SPECIAL, max_batch_size=max_batch_size, add_end_token=add_end_token)
    for source, target, scores in zip(SOURCES, TARGETS, found, strict=True):
        whole = [*target, SPECIAL.eos] if add_end_token else target
        expected = [model.table(source, (SPECIAL.bos, *whole[:i]))[token] for i, token in enumerate(whole)]
        assert scores == near(expected)
    # At most four rows a step, of a vocabulary of five.
    assert max(model.queries) <= max(largest_step // (5 * (1 if max_batch_size == 1 else 2)), 1)


def test_a_result_scores_what_its_search_said() -> None:
    model = FakeModel(random_table())
    results = generate(model, SOURCES, DecodeOptions(beam_size=3), SPECIAL)
    finished = [(s, r.hypotheses[0]) for s, r in zip(SOURCES, results, strict=True) if r.hypotheses[0].finished]
    assert finished
    found = score(model, [s for s, _ in finished], [h.tokens for _, h in finished], SPECIAL)
    for (_, hypothesis), scores in zip(finished, found, strict=True):
        assert hypothesis.log_probs == near(scores)


@pytest.mark.parametrize("targets", [[5, 5], [[5.5], [4]], [["4"], [4]], [None, [4]]])
def test_targets_that_are_no_ids_are_refused(targets: Any) -> None:
    with pytest.raises(RequestError, match="targets must be sequences of ids"):
        score(FakeModel(random_table()), SOURCES[:2], targets, SPECIAL)


def test_all_that_is_wrong_is_told() -> None:
    with pytest.raises(RequestError) as caught:
        score(FakeModel(random_table()), [(5,), ()], [[99], [3] * 12, [4]], SPECIAL)
    told = "\n".join(caught.value.problems)
    for problem in [
        "2 sources and 3 targets",
        "source 1 is empty",
        "vocabulary of 5 lacks: 99",
        "target 1 has 13 tokens",
    ]:
        assert problem in told


def test_short_sources_are_filled_with_the_sources_own_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    special = replace(SPECIAL, source=SourceIds(pad=12, bos=None, eos=None, unk=None))
    model, fills = FakeModel(random_table()), set()
    encode = model.encode

    def watched(source_ids: Ids, source_mask: Mask, *, capacity: int) -> FakeSentences:
        fills.update(source_ids[~source_mask].tolist())
        return encode(source_ids, source_mask, capacity=capacity)

    monkeypatch.setattr(model, "encode", watched)
    score(model, SOURCES, TARGETS, special)
    assert fills == {12}
    fills.clear()
    generate(model, SOURCES[:2], DecodeOptions(batch_type="tokens", max_batch_size=64), special)
    generate(model, SOURCES[2:], DecodeOptions(), special)
    assert fills == {12}
