"""Batching: how much at once, in which order, and what it costs; alternatives and other ways to ask."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.decoding.fake_model import SPECIAL, FakeModel, random_table
from tests.numerics import near
from tfm_export.decoding import DecodeOptions, Reason, Request, generate

SOURCES = [tuple(int(t) for t in np.random.default_rng(i).integers(4, 40, 1 + i % 7)) for i in range(50)]


class Sized(FakeModel):
    """Notes how large each step and each encoded batch is."""

    def encode(self, source_ids: np.ndarray, source_mask: np.ndarray, *, capacity: int) -> object:
        self.shapes = [*getattr(self, "shapes", []), source_ids.shape]
        return super().encode(source_ids, source_mask, capacity=capacity)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_no_batch_holds_more_than_it_may(beam_size: int) -> None:
    model = Sized(random_table())
    generate(model, SOURCES, DecodeOptions(max_batch_size=6, beam_size=beam_size), SPECIAL)
    assert max(rows for rows, _ in model.shapes) == 6
    assert model.rows_stepped <= 6 * model.steps
    model = Sized(random_table())
    generate(model, SOURCES, DecodeOptions(max_batch_size=20, batch_type="tokens", beam_size=beam_size), SPECIAL)
    assert max(rows * length for rows, length in model.shapes) <= 20
    assert max(rows for rows, _ in model.shapes) > 20 // max(map(len, SOURCES))
    assert [length for _, length in model.shapes] == sorted((length for _, length in model.shapes), reverse=True)


def test_a_source_larger_than_a_batch_of_tokens_is_decoded_alone() -> None:
    results = generate(
        FakeModel(random_table()), SOURCES, DecodeOptions(max_batch_size=2, batch_type="tokens"), SPECIAL
    )
    assert len(results) == len(SOURCES)


@pytest.mark.parametrize("beam_size", [1, 2, 4])
def test_alone_batched_shuffled(beam_size: int) -> None:
    model, options = FakeModel(random_table(7), 7), DecodeOptions(beam_size=beam_size, num_hypotheses=beam_size)
    alone = [generate(model, [source], options, SPECIAL)[0].hypotheses for source in SOURCES]
    order = np.random.default_rng(0).permutation(len(SOURCES))
    shuffled = generate(model, [SOURCES[i] for i in order], options, SPECIAL)
    assert [result.hypotheses for result in shuffled] == [alone[i] for i in order]


def test_rows_are_reused() -> None:
    """Without rows that join, every batch takes as long as its longest target."""
    model = FakeModel(random_table())
    results = generate(model, [(4 + i % 30, i) for i in range(40)], DecodeOptions(max_batch_size=8), SPECIAL)
    needed = sum(result.statistics.steps for result in results)
    assert model.moves
    assert model.rows_stepped == needed
    assert model.steps < 1.35 * needed / 8


@pytest.mark.parametrize("beam_size", [1, 3])
def test_where_rows_cost_batches_are_decoded_to_their_end(beam_size: int) -> None:
    model = Sized(random_table(), refill_at=1.0)
    options = DecodeOptions(max_batch_size=8, beam_size=beam_size)
    results = generate(model, [(4 + i % 30, i) for i in range(43)], options, SPECIAL)
    assert [rows for rows, _ in model.shapes] == [8, 8, 8, 8, 8, 3]
    assert model.rows_stepped == sum(result.statistics.steps for result in results)
    # A prompt of a token takes one query a sentence; beside sentences under way it would take one for each beam.
    assert model.queries.count(1) == (model.encodes if beam_size > 1 else model.steps)


def test_tokens_count_where_batches_are_decoded_to_their_end() -> None:
    model = Sized(random_table(), refill_at=1.0)
    generate(model, SOURCES, DecodeOptions(max_batch_size=20, batch_type="tokens"), SPECIAL)
    assert max(rows * length for rows, length in model.shapes) <= 20
    assert sum(rows for rows, _ in model.shapes) == len(SOURCES)
    full = [rows for rows, length in model.shapes if rows == 20 // length]
    assert len(full) > len(model.shapes) / 2


@pytest.mark.parametrize("options", [{}, {"beam_size": 3}, {"beam_size": 4, "num_hypotheses": 4}])
@pytest.mark.parametrize("prefix", [0, 3, 21])
def test_slots_that_no_beam_sees_are_given_up(options: dict[str, int], prefix: int) -> None:
    """The model's slots hold NaN where nothing was kept: a beam that saw one would fail."""
    found, packings, capacities = [], [], []
    for packs in (False, True):
        model = FakeModel(random_table(7, sharpness=3), 7, longest=60, packs=packs)
        requests = [Request(source=(5, i), target_prefix=(4,) * (prefix + i % 2)) for i in range(12)]
        decoding = DecodeOptions(max_batch_size=5, min_decoding_length=50, **options)
        results = generate(model, requests, decoding, SPECIAL)
        found.append([result.hypotheses for result in results])
        packings.append(model.packings)
        capacities.append(sum(result.statistics.cache_bytes for result in results))
    assert found[0] == found[1]
    assert packings[0] == 0 < packings[1]
    assert capacities[1] <= capacities[0] * (1 if "beam_size" not in options else 0.75)


def test_slots_stay_where_attention_is_kept() -> None:
    options = DecodeOptions(beam_size=3, min_decoding_length=30, return_attention=True)
    model = FakeModel(random_table(7), 7, longest=40, gives_attention=True)
    (result,) = generate(model, [(5, 6, 7)], options, SPECIAL)
    assert model.packings == 0 < model.grows
    assert result.hypotheses[0].attention is not None


def test_statistics() -> None:
    model = FakeModel(random_table(), longest=80, packs=False)
    (result,) = generate(model, [(5,)], DecodeOptions(min_decoding_length=70), SPECIAL)
    hypothesis = result.hypotheses[0]
    assert result.statistics.steps == len(hypothesis.tokens) + hypothesis.finished
    assert result.statistics.seconds > 0
    # 2 tensors of 1 layer, 1 head, size 1, 4 bytes, in a capacity that doubled from 32 until it held the target.
    assert result.statistics.cache_bytes == 2 * 4 * min(128, 81)
    assert model.grows == 2


@pytest.mark.parametrize("beam_size", [1, 3])
def test_alternatives_go_on_from_the_likeliest_tokens(beam_size: int) -> None:
    model = FakeModel(random_table(8, seed=3), 8)
    options = DecodeOptions(return_alternatives=True, num_hypotheses=4, beam_size=beam_size, return_end_token=True)
    requests = [Request(source=s, target_prefix=(4,) * (i % 3)) for i, s in enumerate(SOURCES[:6])]
    for request, result in zip(requests, generate(model, requests, options, SPECIAL), strict=True):
        prefix = tuple(request.target_prefix or ())
        scores = model.table(tuple(request.source), (SPECIAL.bos, *prefix))
        scores[SPECIAL.eos] = -np.inf
        scores -= np.logaddexp.reduce(scores)
        expected = np.argsort(-scores)[:4]
        assert [h.tokens[len(prefix)] for h in result.hypotheses] == expected.tolist()
        for hypothesis, token in zip(result.hypotheses, expected, strict=True):
            after = Request(source=request.source, target_prefix=(*prefix, int(token)))
            (alone,) = generate(
                model,
                [after],
                DecodeOptions(beam_size=beam_size, return_end_token=True, compatibility="huggingface"),
                SPECIAL,
            )[0].hypotheses
            if beam_size == 1:
                assert hypothesis.tokens == alone.tokens
                assert hypothesis.score == near(scores[token] + alone.score)
            assert hypothesis.log_probs is not None
            assert hypothesis.log_probs[len(prefix)] == near(scores[token])


def test_unlikely_alternatives_are_left_out() -> None:
    model = FakeModel(random_table(8, seed=3), 8)
    options = DecodeOptions(return_alternatives=True, num_hypotheses=7, min_alternative_expansion_prob=0.1)
    (result,) = generate(model, [(5,)], options, SPECIAL)
    scores = model.table((5,), (SPECIAL.bos,))
    scores[SPECIAL.eos] = -np.inf
    assert len(result.hypotheses) == (np.exp(scores - np.logaddexp.reduce(scores)) >= 0.1).sum() < 7


def test_the_likeliest_alternative_is_never_left_out() -> None:
    model = FakeModel(random_table(8, seed=3), 8)
    options = DecodeOptions(return_alternatives=True, num_hypotheses=3)
    never = replace(options, min_alternative_expansion_prob=1.0)
    for alone, all_of_them in zip(*(generate(model, SOURCES[:6], o, SPECIAL) for o in (never, options)), strict=True):
        assert alone.hypotheses == all_of_them.hypotheses[:1]


class SetAtFirst:
    """A cancellation that is taken back."""

    def __init__(self) -> None:
        self.asked = 0

    def is_set(self) -> bool:
        self.asked += 1
        return self.asked == 1


def test_alternatives_that_were_given_up_before_the_first_are_none() -> None:
    model = FakeModel(random_table(8, seed=3), 8)
    options = DecodeOptions(return_alternatives=True, num_hypotheses=3)
    requests = [Request(source=(5,), cancelled=SetAtFirst()), Request(source=(6,))]
    given_up, other = generate(model, requests, options, SPECIAL)
    assert (given_up.reason, given_up.tokens, given_up.hypotheses[0].log_probs) == (Reason.CANCELLED, [], [])
    assert other.hypotheses == generate(model, [(6,)], options, SPECIAL)[0].hypotheses


@pytest.mark.parametrize("beam_size", [1, 3])
def test_distributions_are_what_the_tokens_were_chosen_from(beam_size: int) -> None:
    model = FakeModel(random_table(8, seed=3), 8, candidates=3)
    options = DecodeOptions(beam_size=beam_size, num_hypotheses=beam_size, return_logits_vocab=True)
    for source, result in zip(SOURCES[:8], generate(model, SOURCES[:8], options, SPECIAL), strict=True):
        for hypothesis in result.hypotheses:
            path = [*hypothesis.tokens, *([SPECIAL.eos] if hypothesis.finished else [])]
            assert hypothesis.distributions is not None
            assert hypothesis.distributions.shape == (len(path), 8)
            for i, row in enumerate(hypothesis.distributions):
                assert row == near(model.table(source, (SPECIAL.bos, *path[:i])))


@pytest.mark.parametrize("beam_size", [1, 3])
def test_several_start_tokens_are_no_part_of_the_result(beam_size: int) -> None:
    model = FakeModel(random_table(8, seed=3), 8)
    options = DecodeOptions(beam_size=beam_size, start_tokens=[2, 6], return_end_token=True)
    (result,) = generate(model, [(5,)], options, SPECIAL)
    best = result.hypotheses[0]
    expected = [model.table((5,), (2, 6, *best.tokens[:i]))[token] for i, token in enumerate(best.tokens)]
    assert best.log_probs == near(expected)


def test_a_long_prompt_is_taken_in_by_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfm_export.decoding.batch.LARGEST_STEP", 3 * 7)
    model = FakeModel(random_table(7), 7)
    for beam_size in (1, 2):
        options = DecodeOptions(beam_size=beam_size, target_prefix=[3, 4, 5, 6, 3, 4, 5])
        pieces = generate(model, SOURCES[:1], options, SPECIAL)
        monkeypatch.setattr("tfm_export.decoding.batch.LARGEST_STEP", 1 << 24)
        assert generate(model, SOURCES[:1], options, SPECIAL)[0].hypotheses == pieces[0].hypotheses
        monkeypatch.setattr("tfm_export.decoding.batch.LARGEST_STEP", 3 * 7)
    assert max(model.queries[:4]) == 3
