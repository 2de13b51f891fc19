"""The log-probabilities of given targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
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


RULES: dict[str, dict[str, Any]] = {
    "forced first": {"forced_bos": 4},
    "forced last": {"forced_eos": 2, "max_decoding_length": 3},
    "another forced last": {"forced_eos": 4, "max_decoding_length": 3, "return_end_token": True},
    "prefix": {"target_prefix": (4, 3)},
    "wished prefix": {"target_prefix": (4, 3), "prefix_bias_beta": 0.4},
    "start tokens": {"start_tokens": (1, 4, 3)},
    "no unknown": {"disable_unk": True},
    "no sequence": {"suppress_sequences": [[0], [4, 3]]},
    "repeats": {"no_repeat_ngram_size": 2},
    "penalty": {"repetition_penalty": 1.7, "score_change": "after_softmax"},
    "least length": {"min_decoding_length": 3},
    "constraint": {"constraint": lambda tokens: [2, 4] if len(tokens) % 2 else None},
    "end tokens": {"end_token": [4, 2], "min_decoding_length": 3},
    "late": {"disable_unk": True, "score_change": "after_softmax"},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("beam_size", [1, 3])
@pytest.mark.parametrize("largest_step", [1, scoring.LARGEST_STEP])
def test_every_rule_that_changes_log_probabilities_changes_scores(
    monkeypatch: pytest.MonkeyPatch, rule: str, beam_size: int, largest_step: int
) -> None:
    monkeypatch.setattr(scoring, "LARGEST_STEP", largest_step)
    model = FakeModel(random_table(seed=7))
    options = DecodeOptions(**{"beam_size": beam_size, "max_decoding_length": 6, **RULES[rule]})
    options = replace(options, return_end_token=True, num_hypotheses=1)
    found = [result.hypotheses[0] for result in generate(model, SOURCES, options, SPECIAL)]
    scores = score(model, SOURCES, [h.tokens for h in found], SPECIAL, options=options, add_end_token=False)
    bare = score(model, SOURCES, [h.tokens for h in found], SPECIAL, add_end_token=False)
    for hypothesis, told in zip(found, scores, strict=True):
        assert told == near(hypothesis.log_probs)
    if rule != "late":  # which takes tokens away and changes no other
        assert scores != bare


def test_forced_tokens_are_certain_and_what_stands_in_their_place_is_impossible() -> None:
    model = FakeModel(random_table())
    options = DecodeOptions(forced_bos=4, forced_eos=2, max_decoding_length=3)
    targets = [[4, 3], [3, 3], [4, 3, 3], [4]]
    forced, other_first, longer, shorter = score(model, [(5,)] * 4, targets, SPECIAL, options=options)
    bare = score(model, [(5,)] * 4, targets, SPECIAL)
    assert forced == near([0, bare[0][1], 0])
    assert other_first == [-np.inf] * 3
    assert longer == near([0, *bare[2][1:]])
    assert shorter == near([0, bare[3][1]])
    (unended,) = score(model, [(5,)], [[4, 3, 3]], SPECIAL, options=options, add_end_token=False)
    assert unended == near([0, bare[2][1], -np.inf])


def test_a_constraint_is_not_asked_beyond_a_token_that_it_refused() -> None:
    asked: list[tuple[int, ...]] = []

    def may_follow(tokens: Sequence[int]) -> list[int]:
        asked.append(tuple(tokens))
        return [3]

    options = DecodeOptions(constraint=may_follow)
    found = score(FakeModel(random_table()), [(5,), (6, 7)], [[3, 4, 3, 3], []], SPECIAL, options=options)
    assert found == [near([0.0, *[-np.inf] * 4]), [-np.inf]]
    assert asked == [(), (3,), ()]


def test_options_that_the_model_cannot_serve_are_refused() -> None:
    with pytest.raises(RequestError, match="forced_bos has ids"):
        score(FakeModel(random_table()), [(5,)], [[3]], SPECIAL, options=DecodeOptions(forced_bos=9))
    with pytest.raises(RequestError, match="target_prefix has ids"):
        score(FakeModel(random_table()), [(5,)], [[3]], SPECIAL, options=DecodeOptions(target_prefix=[9]))
    with pytest.raises(RequestError, match="target 0 has 11 tokens, the model takes at most 10"):
        score(FakeModel(random_table()), [(5,)], [[3] * 10], SPECIAL, options=DecodeOptions(start_tokens=[1, 4, 3]))


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
