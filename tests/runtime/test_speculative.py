"""A draft changes how many steps the model takes, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.decoding.fake_model import SPECIAL, FakeModel, FakeSentences, Table, long_table, random_table
from tests.numerics import log_prob_limit
from tests.runtime.conftest import Backends
from tests.runtime.drive import Batch, padded
from tfm_export.decoding import DecodeOptions, Request, Result, generate
from tfm_export.errors import NumericError, RequestError
from tfm_export.runtime.speculative import MOST_GUESSES, MOST_ROWS, SpeculativeModel
from tfm_export.runtime.step_model import StepOutput

V, LONGEST = 7, 60
SOURCES = [tuple(int(t) for t in np.random.default_rng(i).integers(4, 40, 1 + i % 7)) for i in range(12)]


def often_right(probability: float) -> Table:
    """What the model says, or with what it says of the two best tokens exchanged."""
    exact = long_table()

    def table(source: tuple[int, ...], path: tuple[int, ...]) -> np.ndarray:
        values = exact(source, path)
        if np.random.default_rng([len(path), *path, *source]).random() < probability:
            return values
        second, first = np.argsort(values)[-2:]
        swapped = values.copy()
        swapped[[first, second]] = values[[second, first]]
        return swapped

    return table


DRAFTS = {"right": often_right(1.0), "mostly": often_right(0.8), "never": often_right(0.0), "other": long_table(seed=9)}


def model_of(table: Table, **settings: Any) -> FakeModel:
    return FakeModel(table, V, V, LONGEST, refill_at=settings.pop("refill_at", 1.0), runs_ahead=True, **settings)


def drafted(table: Table, **settings: Any) -> tuple[SpeculativeModel, FakeModel, FakeModel]:
    model, draft = model_of(long_table(), **settings), model_of(table, **settings)
    return SpeculativeModel(model, draft, {SPECIAL.eos}), model, draft


def answers(results: list[Result]) -> list[Any]:
    return [
        ([replace(h, distributions=None) for h in r.hypotheses], r.reason, r.statistics.steps, r.statistics.cache_bytes)
        for r in results
    ]


OPTIONS = {
    "alone": DecodeOptions(max_batch_size=1),
    "a few": DecodeOptions(max_batch_size=MOST_ROWS, return_scores=True),
    "many": DecodeOptions(max_batch_size=12),
    "limit": DecodeOptions(max_batch_size=2, max_decoding_length=9),
    "start": DecodeOptions(max_batch_size=3, start_tokens=[1, 5, 6], target_prefix=[4, 5]),
    "ends": DecodeOptions(max_batch_size=2, end_token=[2, 4], return_end_token=True),
    "shortest": DecodeOptions(max_batch_size=2, min_decoding_length=12),
    "penalty": DecodeOptions(max_batch_size=2, repetition_penalty=1.5, score_change="after_softmax"),
    "distributions": DecodeOptions(max_batch_size=2, return_logits_vocab=True, max_decoding_length=20),
    "samples": DecodeOptions(max_batch_size=3, sampling_topk=3, seed=4),
    "beams": DecodeOptions(beam_size=3, max_batch_size=2, num_hypotheses=3),
}


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("options", OPTIONS)
def test_the_same_results_whatever_is_guessed(options: str, draft: str, packs: bool) -> None:
    requests = [Request(source=source) for source in SOURCES]
    plain = generate(model_of(long_table(), packs=packs), requests, OPTIONS[options], SPECIAL)
    speculative, model, guesser = drafted(DRAFTS[draft], packs=packs)
    found = generate(speculative, requests, OPTIONS[options], SPECIAL)
    assert answers(found) == answers(plain)
    for one, other in zip(found, plain, strict=True):
        for ours, theirs in zip(one.hypotheses, other.hypotheses, strict=True):
            np.testing.assert_array_equal(ours.distributions, theirs.distributions)
    assert (guesser.encodes == 0) == (options in {"many", "beams"})
    if draft == "right" or options == "many":  # what is given up goes ahead as it does without a draft
        assert bool(model.runs) == (options == "many")


def test_prefixes_of_different_lengths_and_sentences_that_join_later() -> None:
    prefixes: list[tuple[int, ...]] = [(), (4, 5, 6, 4, 3), (6,)]
    requests = [Request(source=s, target_prefix=prefixes[i % 3]) for i, s in enumerate(SOURCES)]
    for refill_at in (0.25, 1.0):
        for size in (1, 3, 4):
            options = DecodeOptions(max_batch_size=size)
            plain = generate(model_of(long_table(), refill_at=refill_at), requests, options, SPECIAL)
            for table in DRAFTS.values():
                speculative, *_ = drafted(table, refill_at=refill_at)
                assert answers(generate(speculative, requests, options, SPECIAL)) == answers(plain)


def test_a_good_draft_saves_steps_and_a_bad_one_is_given_up() -> None:
    """One prompt, then runs of one token and 4, 5, 6, 7, 7 ... guesses; room ends where the cache does."""
    endless = random_table(5, sharpness=0.0)  # the padding, for ever
    source, options = Request(source=SOURCES[3]), DecodeOptions(max_decoding_length=50, max_batch_size=1)
    model, draft = FakeModel(endless, 5, 5, LONGEST), FakeModel(endless, 5, 5, LONGEST, runs_ahead=True)
    generate(SpeculativeModel(model, draft, {2}), [source], options, SPECIAL)
    assert model.queries[:6] == [1, 1 + 4, 1 + 5, 1 + 6, 1 + 7, 5]  # slots 27 to 31, the last of the first 32
    assert max(model.queries) == 1 + MOST_GUESSES
    assert sum(model.queries) == 51  # what was asked for, and one guess behind the limit
    assert model.steps <= 10
    assert sum(draft.queries) <= 51  # it takes in no token twice

    def wrong(_: tuple[int, ...], path: tuple[int, ...]) -> np.ndarray:
        return np.where(np.arange(5) == 4, 0.0, -9.0) if path else np.zeros(5)

    model, draft = FakeModel(endless, 5, 5, LONGEST), FakeModel(wrong, 5, 5, LONGEST, runs_ahead=True)
    result = generate(SpeculativeModel(model, draft, {2}), [source], options, SPECIAL)
    assert result[0].statistics.steps == model.steps == 50
    # 4, 3, 2 and 1 guesses, and ever more steps without any between them.
    assert model.queries == [1, 5, 4, 1, 3, 1, 1, 2] + [1] * 42
    assert draft.steps == 4 + 3 + 2 + 1


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 6, 9])
def test_nothing_is_guessed_behind_the_end(tokens: int) -> None:
    def short(_: tuple[int, ...], path: tuple[int, ...]) -> np.ndarray:
        best = SPECIAL.eos if len(path) == tokens + 1 else 4
        return np.where(np.arange(5) == best, -0.1, -9.0)

    model, draft = FakeModel(short, 5, 5, LONGEST), FakeModel(short, 5, 5, LONGEST, runs_ahead=True)
    (result,) = generate(
        SpeculativeModel(model, draft, {SPECIAL.eos}), [Request(source=(5,))], DecodeOptions(max_batch_size=1), SPECIAL
    )
    assert result.hypotheses[0].tokens == [4] * tokens
    assert sum(model.queries) == tokens + 1
    assert sum(draft.queries) <= tokens + 1


def test_tokens_are_streamed_and_a_stream_may_be_ended() -> None:
    for limit in (1, 4, 5, 6, 50):
        told: list[int] = []

        def listen(tokens: list[Any], told: list[int] = told, limit: int = limit) -> bool:
            told.extend(token.token for token in tokens)
            return len(told) >= limit

        request, options = Request(source=SOURCES[5], on_tokens=listen), DecodeOptions(max_batch_size=1)
        (plain,) = generate(model_of(long_table()), [request], options, SPECIAL)
        expected, told[:] = told.copy(), []
        (found,) = generate(drafted(DRAFTS["mostly"])[0], [request], options, SPECIAL)
        assert (told, found.hypotheses, found.reason) == (expected, plain.hypotheses, plain.reason)
        assert 0 < len(told) <= limit


def test_attention_is_that_of_the_tokens_that_were_asked_about() -> None:
    requests = [Request(source=source) for source in SOURCES[:6]]
    options = DecodeOptions(max_batch_size=2, return_attention=True)
    plain = generate(model_of(long_table(), gives_attention=True), requests, options, SPECIAL)
    found = generate(drafted(DRAFTS["mostly"], gives_attention=True)[0], requests, options, SPECIAL)
    for one, other in zip(found, plain, strict=True):
        assert one.hypotheses[0].tokens == other.hypotheses[0].tokens
        np.testing.assert_array_equal(one.hypotheses[0].attention, other.hypotheses[0].attention)


@pytest.mark.parametrize("broken", ["model", "draft"])
def test_numbers_that_are_not_finite_count_only_where_they_were_asked_for(broken: str) -> None:
    """The draft's never do; the model's about guesses do not, either."""
    request, options = Request(source=SOURCES[3]), DecodeOptions(max_batch_size=1)
    (plain,) = generate(model_of(long_table()), [request], options, SPECIAL)
    speculative, model, draft = drafted(DRAFTS["right"])
    step, written = FakeSentences.step, {model: [0], draft: [0]}

    def failing(self: FakeSentences, *arrays: Any, **settings: Any) -> StepOutput:
        if self.model is draft and broken == "draft" and draft.steps > 5:
            raise NumericError("of the draft")
        output = step(self, *arrays, **settings)
        written[self.model].append(arrays[2][0] + arrays[0].shape[1])
        if self.model is model and broken == "model" and len({*arrays[0][0].tolist()}) > 1 and model.steps > 3:
            self.slots[0, arrays[2][0] + 1 : arrays[2][0] + arrays[0].shape[1]] = np.nan
            raise NumericError("of some query")
        # Attention multiplies what is masked by 0, and 0 * NaN is NaN.
        assert not np.isnan(self.slots[0, : max(written[self.model])]).any()
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeSentences, "step", failing)
        (found,) = generate(speculative, [request], options, SPECIAL)
    assert answers([found]) == answers([plain])


def test_numbers_of_the_model_that_are_not_finite_are_told() -> None:
    speculative, model, _ = drafted(DRAFTS["right"])

    def broken(*_: object) -> np.ndarray:
        raise NumericError("of the model")

    model.table = broken
    with pytest.raises(NumericError):
        generate(speculative, [Request(source=SOURCES[3])], DecodeOptions(max_batch_size=1), SPECIAL)


class Paths:
    """Two sentences on their way, some of whose tokens the model has taken in before it was asked."""

    def __init__(self, guesses: int = 4, **of_draft: Any) -> None:
        endless = random_table(5, sharpness=0.0)  # token 0, whatever came before
        self.model = FakeModel(endless, 5, 5, LONGEST)
        draft = FakeModel(endless, 5, 5, LONGEST, runs_ahead=True, **of_draft)
        self.sentences = SpeculativeModel(self.model, draft, {2}).encode(*padded([[5, 6], [7]]), capacity=16)
        assert self.runs(0) == 1
        assert self.runs(1) == 1
        assert self.model.queries == [1, 1 + guesses]

    def runs(self, slot: int, *, token: int = 0, full: bool = False, **changed: np.ndarray) -> int:
        """Ask about a token of each row; how many steps the model takes for it."""
        before, size, capacity = self.model.steps, self.sentences.size, self.sentences.capacity
        arrays = {
            "target_ids": np.full((size, 1), token),
            "positions": np.full((size, 1), slot),
            "write_index": np.full(size, slot),
            "self_mask": np.broadcast_to(np.arange(capacity) <= slot, (size, 1, 1, capacity)),
        }
        arrays |= changed
        output = self.sentences.step(**arrays, full=full)
        assert (output.log_probs is not None) == full
        assert output.top_ids.shape == (*arrays["target_ids"].shape, 5)
        return self.model.steps - before


def test_what_was_taken_in_is_not_taken_in_again() -> None:
    paths = Paths()
    assert [paths.runs(slot) for slot in (2, 3, 4, 5)] == [0] * 4
    assert paths.runs(6) == 1
    paths.sentences.move(1, 0)
    paths.sentences.shrink(1)
    assert paths.runs(7) == 0
    paths.sentences.grow(20)
    assert paths.runs(8) == 0
    paths.sentences.pack(np.arange(9)[None], 24)
    assert paths.sentences.capacity == 24
    assert [paths.runs(slot) for slot in (9, 10, 11)] == [1, 0, 0]  # slots that were given up hold anything


def test_guesses_go_on_behind_what_was_asked_after_a_wrong_one() -> None:
    """The draft says the same once the search took another token, and is right again."""
    right = often_right(1.0)

    def wrong_once(source: tuple[int, ...], path: tuple[int, ...]) -> np.ndarray:
        return right(source, path)[::-1] if len(path) == 4 else right(source, path)

    request, options = Request(source=SOURCES[3]), DecodeOptions(max_batch_size=1, min_decoding_length=25)
    speculative, model, draft = drafted(wrong_once)
    (result,) = generate(speculative, [request], options, SPECIAL)
    # Of the first 4 guesses the third is wrong; then 3, 4, 5 ... are right.
    assert model.queries[:5] == [1, 5, 4, 5, 6]
    assert sum(draft.queries) <= result.statistics.steps + 3


def test_a_draft_that_always_sees_the_end_is_given_up() -> None:
    def ending(*_: tuple[int, ...]) -> np.ndarray:
        return np.where(np.arange(V) == SPECIAL.eos, -0.1, -9.0)

    speculative, model, draft = drafted(ending)
    options = DecodeOptions(max_batch_size=1, min_decoding_length=40)
    generate(speculative, [Request(source=SOURCES[3])], options, SPECIAL)
    assert set(model.queries) == {1}
    assert draft.queries == [2, 1, 2, 3]  # no token twice


def test_long_batches_go_ahead_behind_short_ones_that_were_guessed() -> None:
    sources = [Request(source=(4,) * 50)] + [Request(source=source) for source in SOURCES]
    speculative, model, draft = drafted(DRAFTS["right"])
    generate(speculative, sources, DecodeOptions(max_batch_size=12), SPECIAL)
    assert draft.encodes == 1
    assert model.runs


@pytest.mark.parametrize("error", [RequestError("the model is closed"), MemoryError("of the draft")])
@pytest.mark.parametrize("when", ["encode", "step", "grow", "shrink"])
def test_a_draft_that_fails_costs_no_answer(when: str, error: Exception) -> None:
    requests, options = [Request(source=s) for s in SOURCES[:4]], DecodeOptions(max_batch_size=4)
    plain = generate(model_of(long_table(), packs=False), requests, options, SPECIAL)
    speculative, _, draft = drafted(DRAFTS["mostly"], packs=False)

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        if when == "encode":
            patch.setattr(draft, "encode", fail)
        else:
            method = getattr(FakeSentences, when)

            def unless_of_draft(self: FakeSentences, *arguments: Any, **settings: Any) -> Any:
                return fail() if self.model is draft else method(self, *arguments, **settings)

            patch.setattr(FakeSentences, when, unless_of_draft)
        found = generate(speculative, requests, options, SPECIAL)
    assert answers(found) == answers(plain)


def test_a_prompt_that_is_long_for_the_vocabulary_is_not_guessed_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfm_export.runtime.speculative.LARGEST_STEP", 6 * V)
    for prefix, encodes in ((4, 1), (5, 0)):  # and the start token, and the first that was asked about
        speculative, _, draft = drafted(DRAFTS["right"])
        request = Request(source=SOURCES[3], target_prefix=(4,) * prefix)
        generate(speculative, [request], DecodeOptions(max_batch_size=1), SPECIAL)
        assert draft.encodes == encodes


@pytest.mark.parametrize(
    "other",
    [
        {"token": 1},
        {"full": True},
        {"slot": 1},
        {
            "target_ids": np.zeros((2, 2), np.int64),
            "positions": np.array([[2, 3]] * 2),
            "self_mask": np.arange(16) <= np.array([[[[2], [3]]]] * 2),
        },
    ],
    ids=["token", "log_probs", "slot", "two tokens"],
)
def test_whatever_else_is_asked_is_asked_of_the_model(other: dict[str, Any]) -> None:
    assert Paths().runs(**{"slot": 2, **other}) == 1


@pytest.mark.parametrize(
    "other",
    [{"self_mask": np.arange(16) == np.full((2, 1, 1, 1), 2)}, {"positions": np.ones((2, 1), np.int64)}],
    ids=["mask", "position"],
)
def test_what_makes_no_sense_is_asked_of_the_model(other: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="positions"):  # of the fake model, which says what it sees
        Paths().runs(2, **other)


def test_a_draft_that_keeps_all_its_slots_is_given_up_when_the_model_does_not() -> None:
    paths = Paths(packs=False)
    paths.sentences.pack(np.arange(2)[None].repeat(2, 0), 16)
    assert [paths.runs(slot) for slot in (2, 3, 4)] == [1, 1, 1]


def test_slots_that_take_others_places_are_taken_in_again() -> None:
    paths = Paths()
    paths.sentences.pack(np.array([[0, 1, 2, 4, 3]] * 2), 16)
    assert paths.runs(2) == 1


def test_rows_that_are_not_as_long_are_guessed_alike() -> None:
    """The draft takes in what each row lacks, and goes on behind each row's last token."""
    table = long_table(seed=3)
    requests = [Request(source=SOURCES[i], target_prefix=(4, 5, 6, 4)[: 3 * i]) for i in range(2)]
    options = DecodeOptions(max_batch_size=2, max_decoding_length=30)
    model, draft = (FakeModel(table, V, V, LONGEST, refill_at=1.0, runs_ahead=True) for _ in range(2))
    results = generate(SpeculativeModel(model, draft, {SPECIAL.eos}), requests, options, SPECIAL)
    asked = max(result.statistics.steps for result in results)
    assert asked > 12
    assert model.steps < asked / 2


def test_steps_that_are_no_search_are_the_models_own(backends: Backends) -> None:
    """Random tokens, with a draft that guesses what greedy search would take, and all that moves rows and slots."""
    model = backends.speculative
    batch = Batch(model, backends.exact, [[5, 7, 9, 2], [4, 2], [8, 8, 10, 2]], capacity=12)
    errors = [batch.step(queries=2), batch.step(), batch.step(), batch.step()]
    batch.leave(0)
    errors += [batch.step(), batch.step()]
    assert batch.pack(20)
    errors += [batch.step(), batch.step()]
    batch.sentences.grow(30)
    errors += [batch.step() for _ in range(4)]
    batch.forget(0, 2)
    errors += [batch.step(), batch.step(queries=3)]
    batch.join([[6, 6, 2]], capacity=30)
    errors += [batch.step(), batch.step()]
    assert max(errors) <= 1


def test_greedy_search_with_a_draft_of_real_graphs(backends: Backends) -> None:
    """Each query that was guessed says what it says alone, and what the model itself says."""
    model, alone = SpeculativeModel(backends.onnx, backends.onnx, set()), backends.onnx
    sources, limit = [[5, 7, 9, 11, 2], [4, 2], [8, 8, 10, 2]], log_prob_limit(backends.exact.model)
    for size in (1, 3):
        found, plain = (m.encode(*padded(sources[:size]), capacity=40) for m in (model, alone))
        ids = np.ones((size, 1), np.int64)
        worst = 0.0
        for place in range(30):
            mask = np.zeros((size, 1, 1, 40), np.bool_)
            mask[..., : place + 1] = True
            arrays = ids, np.full((size, 1), place), np.full(size, place), mask
            ours, theirs = found.step(*arrays, full=True), plain.step(*arrays, full=True)
            assert ours.log_probs is not None
            assert theirs.log_probs is not None
            worst = max(worst, float(np.abs(ours.log_probs - theirs.log_probs).max()))
            ids = theirs.top_ids[:, :, 0].copy()
        assert worst <= 2 * limit
        for name in ("self_key_0", "self_value_2", "cross_key_1"):
            keys, same = (sentences.read(name)[:, :, :30] for sentences in (found, plain))
            assert np.abs(keys - same).max() <= 2 * limit


def test_what_is_wrong_is_refused_as_by_the_model(backends: Backends) -> None:
    model = backends.speculative
    for ids, places, slots, mask in (
        (np.zeros((2, 1), np.int64), np.zeros((2, 1), np.int64), np.zeros(2, np.int64), np.ones((2, 1, 1, 9), bool)),
        (np.full((2, 1), 999), np.zeros((2, 1), np.int64), np.zeros(2, np.int64), np.ones((2, 1, 1, 8), bool)),
        (np.zeros((2, 1), np.int64), np.zeros((2, 1), np.int64), np.full(2, 8), np.ones((2, 1, 1, 8), bool)),
        (np.zeros(2, np.int64), np.zeros(2, np.int64), np.zeros(2, np.int64), np.ones((2, 1, 1, 8), bool)),
    ):
        sentences = model.encode(*padded([[5, 2], [6, 7]]), capacity=8)
        with pytest.raises(RequestError) as expected:
            backends.onnx.encode(*padded([[5, 2], [6, 7]]), capacity=8).step(ids, places, slots, mask)
        with pytest.raises(RequestError) as found:
            sentences.step(ids, places, slots, mask)
        assert str(found.value) == str(expected.value)
    with pytest.raises(RequestError, match="only join a batch of the same model"):
        sentences.append(backends.onnx.encode(*padded([[5, 2]]), capacity=8))


def test_attention_of_a_drafted_model_is_that_of_the_model(backends: Backends) -> None:
    model = SpeculativeModel(backends.onnx, backends.onnx, set())
    attending = model.with_attention()
    assert [m.capabilities.gives_attention for m in (model, attending)] == [False, True]
    options = DecodeOptions(max_decoding_length=12, max_batch_size=2, return_attention=True)
    sources, special = [[5, 7, 9, 11, 2], [4, 2]], backends.bundle.manifest.special_ids
    models = attending, backends.onnx.with_attention()
    for found, expected in zip(*(generate(m, sources, options, special) for m in models), strict=True):
        assert found.hypotheses[0].tokens == expected.hypotheses[0].tokens
        np.testing.assert_allclose(found.hypotheses[0].attention, expected.hypotheses[0].attention, rtol=0, atol=1e-5)
