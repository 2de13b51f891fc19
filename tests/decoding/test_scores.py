"""Everything that changes scores: the edits themselves, and whole searches against tables that were changed by hand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoding.fake_model import SPECIAL, FakeModel, Table, random_table
from tests.decoding.naive import Naive
from tests.numerics import near
from tfm_export.decoding import DecodeOptions, Request, Trie, generate
from tfm_export.decoding.scores import Edit, Editor
from tfm_export.decoding.top_tokens import TopTokens
from tfm_export.errors import RequestError

VOCABULARY = 8
SOURCES = [(5,), (6, 7), (8, 9, 10), (11,), (12, 13)]


def changed(
    table: Table, banned: Callable[[list[int]], Collection[int]], *, renormalise: bool, penalty: float = 1.0
) -> Table:
    """A table in which some tokens may not follow, and those that are there already are less likely."""

    def other(source: tuple[int, ...], path: tuple[int, ...]) -> np.ndarray:
        scores = table(source, path).astype(np.float32).astype(np.float64)
        for token in set(path[1:]):
            scores[token] *= penalty if scores[token] < 0 else 1 / penalty
        scores[list(banned(list(path[1:])))] = -np.inf
        return scores - np.logaddexp.reduce(scores) if renormalise else scores

    return other


def repeats(tokens: list[int], size: int) -> set[int]:
    """What would make an n-gram come twice."""
    grams = {tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)}
    return {t for t in range(VOCABULARY) if size > 1 and (*tokens[len(tokens) - size + 1 :], t) in grams}


BANS: dict[str, tuple[dict[str, object], Callable[[list[int]], Collection[int]]]] = {
    "min length": ({"min_decoding_length": 4}, lambda t: {SPECIAL.eos} if len(t) < 4 else ()),
    "bigrams": ({"no_repeat_ngram_size": 2}, lambda t: repeats(t, 2)),
    "trigrams": ({"no_repeat_ngram_size": 3}, lambda t: repeats(t, 3)),
    "unknown": ({"disable_unk": True}, lambda _: {SPECIAL.unk}),
    "sequences": (
        {"suppress_sequences": [[5], [6, 7], [4, 4, 6]]},
        lambda t: {5} | ({7} if t[-1:] == [6] else set()) | ({6} if t[-2:] == [4, 4] else set()),
    ),
    "only even": (
        {"constraint": lambda t: [2, 4, 6] if len(t) % 2 else None},
        lambda t: {0, 1, 3, 5, 7} if len(t) % 2 else (),
    ),
}


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("beam_size", [1, 3])
@pytest.mark.parametrize("ban", BANS)
@pytest.mark.parametrize("candidates", [2, 8])
def test_bans_give_what_a_table_without_the_tokens_gives(
    ban: str, beam_size: int, renormalise: bool, candidates: int
) -> None:
    options, banned = BANS[ban]
    model = FakeModel(random_table(VOCABULARY, seed=4), VOCABULARY, candidates=candidates)
    table = changed(model.table, banned, renormalise=renormalise)
    when = "before_softmax" if renormalise else "after_softmax"
    o = DecodeOptions(beam_size=beam_size, score_change=when, return_end_token=True, **options)
    for source, result in zip(SOURCES, generate(model, SOURCES, o, SPECIAL), strict=True):
        naive = Naive(table, source, 12)
        tokens, total = naive.greedy() if beam_size == 1 else naive.beam(beam_size, 1.0)[0]
        assert result.hypotheses[0].tokens == list(tokens)
        score = total / len(tokens) if beam_size == 1 else total
        assert result.hypotheses[0].score == near(score)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_a_repetition_penalty_on_log_probabilities(beam_size: int) -> None:
    model = FakeModel(random_table(VOCABULARY, seed=4), VOCABULARY)
    table = changed(model.table, lambda _: (), renormalise=False, penalty=1.8)
    o = DecodeOptions(beam_size=beam_size, score_change="after_softmax", repetition_penalty=1.8, return_end_token=True)
    for source, result in zip(SOURCES, generate(model, SOURCES, o, SPECIAL), strict=True):
        naive = Naive(table, source, 12)
        assert result.hypotheses[0].tokens == list((naive.greedy() if beam_size == 1 else naive.beam(3, 1.0)[0])[0])


def test_a_repetition_penalty_on_logits_needs_their_level() -> None:
    with pytest.raises(RequestError, match="score_change='after_softmax'"):
        generate(FakeModel(random_table()), [[5]], DecodeOptions(repetition_penalty=2.0), SPECIAL)


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    early=st.booleans(),
    again=st.booleans(),
    copying=st.sampled_from([1.0, 1.4]),
    penalty=st.sampled_from([1.0, 1.7]),
    beta=st.sampled_from([0.0, 0.4]),
)
def test_an_edit_gives_the_same_as_changing_the_whole_vocabulary(
    data: st.DataObject, early: bool, again: bool, copying: float, penalty: float, beta: float
) -> None:
    size, wanted = 12, data.draw(st.integers(1, 6))
    logits = np.random.default_rng(data.draw(st.integers(0, 10**6))).normal(size=size) * 3
    level = float(np.logaddexp.reduce(logits))
    log_probs = (logits - level).astype(np.float32)
    some = st.frozensets(st.integers(0, size - 1), max_size=6)
    biases = data.draw(st.dictionaries(st.integers(0, size - 1), st.sampled_from([-2.0, 0.5, 3.0]), max_size=4))
    edit = Edit(
        copied=data.draw(some) if copying != 1 else frozenset(),
        biases=tuple(biases.items()),
        end_factor=data.draw(st.sampled_from([1.0, 1.5, 0.5])),
        banned=data.draw(some),
        penalised=data.draw(some) if penalty != 1 else frozenset(),
        allowed=data.draw(st.none() | some),
        wish=data.draw(st.integers(0, size - 1)) if beta else None,
    )
    options = DecodeOptions(
        repetition_penalty=penalty,
        encoder_repetition_penalty=copying,
        renormalize_logits=again,
        prefix_bias_beta=beta,
        score_change="before_softmax" if early else "after_softmax",
    )
    editor = Editor(options, [2], [1], 3, 10)
    expected = logits.copy() if early else logits - level
    for token, bias in biases.items():
        expected[token] += bias
    for token in edit.copied:
        expected[token] /= copying if expected[token] < 0 else 1 / copying
    for token in edit.penalised:
        expected[token] *= penalty if expected[token] < 0 else 1 / penalty
    expected[2] += abs(expected[2]) * (edit.end_factor - 1)
    keep = np.isin(np.arange(size), list(edit.allowed)) if edit.allowed is not None else np.ones(size, bool)
    expected[~keep | np.isin(np.arange(size), list(edit.banned))] = -np.inf
    if (early or again) and np.isfinite(expected).any():
        expected -= np.logaddexp.reduce(expected)
    if not np.isfinite(expected).any():
        return
    if edit.wish is not None and np.isfinite(expected[edit.wish]):
        with np.errstate(divide="ignore"):
            expected = np.log((1 - beta) * np.exp(expected) + beta * (np.arange(size) == edit.wish))
    top = np.argsort(-log_probs, kind="stable")[:5]
    values, ids = editor.best(edit, (log_probs[top], top), log_probs, level, wanted)
    order = [i for i in np.argsort(-expected, kind="stable") if expected[i] > -np.inf][:wanted]
    size = [level, np.abs(logits).max()]
    assert values == near(expected[order], made_of=size)
    assert expected[ids] == near(expected[order], made_of=size)
    assert editor.whole(edit, log_probs, level) == near(expected, made_of=size)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_each_source_bans_its_own_ngrams(beam_size: int) -> None:
    model = FakeModel(random_table(VOCABULARY, seed=4), VOCABULARY)
    model.dimensions = replace(model.dimensions, source_vocabulary_size=VOCABULARY)
    sources = [(4, 5, 6, 7), (7, 6, 5, 4), (3, 3), (5,)]
    options = DecodeOptions(beam_size=beam_size, encoder_no_repeat_ngram_size=1, max_decoding_length=8)
    for source, result in zip(sources, generate(model, sources, options, SPECIAL), strict=True):
        alone = generate(model, [source], options, SPECIAL)[0]
        assert result.hypotheses == alone.hypotheses
        assert not {*result.hypotheses[0].tokens} & {*source}


def test_a_source_of_more_tokens_than_targets_have_is_refused() -> None:
    model = FakeModel(random_table(VOCABULARY, seed=4), VOCABULARY)
    for options in ({"encoder_no_repeat_ngram_size": 2}, {"encoder_repetition_penalty": 1.2}):
        with pytest.raises(RequestError, match=f"{next(iter(options))} needs one vocabulary: sources have 50 tokens"):
            generate(model, [(5,)], DecodeOptions(**options), SPECIAL)


def test_the_rest_keeps_its_digits_when_a_nearly_certain_token_is_banned() -> None:
    logits = np.array([18.0, 1.0, 0.5, 0.0])
    level = float(np.logaddexp.reduce(logits))
    # As a graph in single precision has it: the likeliest token's own log-probability is rounded to 0.
    log_probs = logits.astype(np.float32) - np.float32(level)
    editor = Editor(DecodeOptions(), [2], [1], 3, 10)
    values, ids = editor.best(Edit(banned=frozenset({0})), (log_probs, np.arange(4)), log_probs, level, 3)
    assert ids.tolist() == [1, 2, 3]
    assert values == near(logits[1:] - np.logaddexp.reduce(logits[1:]), made_of=[level, logits[0]])


def test_log_probs_are_fetched_only_for_steps_whose_scores_change() -> None:
    model = FakeModel(random_table(VOCABULARY, seed=4), VOCABULARY, candidates=6)
    generate(model, [[5]], DecodeOptions(beam_size=3), SPECIAL)
    assert model.full_steps == 0
    generate(model, [[5]], DecodeOptions(beam_size=3, min_decoding_length=2), SPECIAL)
    assert model.full_steps == 2
    late = DecodeOptions(min_decoding_length=2, score_change="after_softmax")
    generate(model, [[5]], late, SPECIAL)
    assert model.full_steps == 2
    editor = Editor(DecodeOptions(), [2], [1], 3, 10)
    assert TopTokens(editor, wanted=7, offered=6, vocabulary=8).plan(None)
    assert not TopTokens(editor, wanted=6, offered=6, vocabulary=8).plan(None)


@pytest.mark.parametrize("beam_size", [1, 4])
def test_a_trie_allows_its_targets_only(beam_size: int) -> None:
    targets = [[4, 5], [4, 5, 6], [7], [5, 5, 5, 5]]
    model = FakeModel(random_table(VOCABULARY, seed=2), VOCABULARY)
    options = DecodeOptions(beam_size=beam_size, num_hypotheses=beam_size, constraint=Trie(targets, end=2))
    for result in generate(model, SOURCES, options, SPECIAL):
        assert {tuple(h.tokens) for h in result.hypotheses} <= {tuple(target) for target in targets}
        assert all(h.finished for h in result.hypotheses)
        assert len(result.hypotheses) == beam_size


def test_a_request_has_its_own_constraint() -> None:
    model = FakeModel(random_table(VOCABULARY, seed=2), VOCABULARY)
    requests = [Request(source=(5,), constraint=Trie([[t]], end=2)) for t in (4, 5, 6)]
    results = generate(model, [*requests, (5,)], DecodeOptions(), SPECIAL)
    assert [r.hypotheses[0].tokens for r in results[:3]] == [[4], [5], [6]]
    assert results[3] != results[0]
    assert results[3].hypotheses[0].tokens == generate(model, [(5,)], DecodeOptions(), SPECIAL)[0].hypotheses[0].tokens


@pytest.mark.parametrize("beam_size", [1, 3])
def test_a_constraint_that_leaves_nothing_is_refused(beam_size: int) -> None:
    def nothing(tokens: Sequence[int]) -> Collection[int]:
        return [4] if len(tokens) < 2 else []

    model = FakeModel(random_table(VOCABULARY, seed=2), VOCABULARY)
    with pytest.raises(RequestError, match=r"after the tokens \[4, 4\]"):
        generate(model, [(5,)], DecodeOptions(beam_size=beam_size, constraint=nothing), SPECIAL)


@pytest.mark.parametrize("compatibility", ["ctranslate2", "huggingface"])
@pytest.mark.parametrize("beam_size", [1, 3])
def test_forced_first_and_last_tokens(beam_size: int, compatibility: str) -> None:
    model = FakeModel(random_table(VOCABULARY, seed=9), VOCABULARY)
    options = DecodeOptions(
        beam_size=beam_size,
        forced_bos=7,
        forced_eos=2,
        max_decoding_length=5,
        min_decoding_length=5,
        return_end_token=True,
        compatibility=compatibility,
    )
    for result in generate(model, SOURCES, options, SPECIAL):
        (hypothesis,) = result.hypotheses
        assert (hypothesis.tokens[0], hypothesis.tokens[-1], len(hypothesis.tokens)) == (7, 2, 5)
        assert hypothesis.log_probs is not None
        assert hypothesis.log_probs[0] == hypothesis.log_probs[-1] == 0
        assert hypothesis.score == pytest.approx(sum(hypothesis.log_probs) / 5)


def test_a_wished_prefix_is_followed_the_more_the_larger_beta_is() -> None:
    model = FakeModel(random_table(VOCABULARY, seed=9), VOCABULARY)
    wish = [6, 6, 6]

    def following(beta: float) -> int:
        options = DecodeOptions(beam_size=3, target_prefix=wish, prefix_bias_beta=beta)
        return sum(r.hypotheses[0].tokens[:3] == wish for r in generate(model, SOURCES, options, SPECIAL))

    assert following(1e-6) < len(SOURCES)
    assert following(0.999) == len(SOURCES)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_a_constraint_is_asked_about_living_paths_only(beam_size: int) -> None:
    """From a forced prefix, and once paths have died since nothing else may follow."""
    targets = [[4, 5, 6], [4, 5], [4, 7]]
    trie, asked = Trie(targets, end=2), list[tuple[int, ...]]()

    def constraint(tokens: Sequence[int]) -> Sequence[int]:
        asked.append(tuple(tokens))
        return trie([*tokens])

    model = FakeModel(random_table(VOCABULARY, seed=2), VOCABULARY)
    options = DecodeOptions(beam_size=beam_size, constraint=constraint, target_prefix=[4])
    generate(model, SOURCES, options, SPECIAL)
    possible = {tuple(target[:n]) for target in targets for n in range(1, len(target) + 1)}
    assert {*asked} <= possible


@pytest.mark.parametrize("beam_size", [1, 4])
@pytest.mark.parametrize("refill_at", [0.0, 1.0])
def test_a_constraint_is_asked_after_paths_that_are_alive_alone(beam_size: int, refill_at: float) -> None:
    prefix = (4, 5, 6)
    asked: list[tuple[int, ...]] = []

    def may_follow(tokens: Sequence[int]) -> list[int]:
        asked.append(tuple(tokens))
        return [SPECIAL.eos, 6] if len(tokens) == 4 else [3, 6]

    options = DecodeOptions(beam_size=beam_size, constraint=may_follow, max_decoding_length=9, max_batch_size=2)
    model = FakeModel(random_table(VOCABULARY), VOCABULARY, refill_at=refill_at)
    requests = [Request(source=source, target_prefix=prefix[: i % 4]) for i, source in enumerate(SOURCES)]
    generate(model, requests, options, SPECIAL)
    assert asked
    assert not [tokens for tokens in asked if SPECIAL.eos in tokens]
    # Padding, places that were never filled and hypotheses that nothing leads to would show as other tokens.
    begun = [tuple(p[: i % 4]) for i, p in enumerate([prefix] * len(SOURCES))]
    assert all(any(t[: len(p)] == p and set(t[len(p) :]) <= {3, 6} for p in begun) for t in asked)
