"""An open session: requests that come while others are decoded, whose turn it is, and what deadlines count."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.decoding.fake_model import SPECIAL, FakeModel, FakeSentences, random_table
from tfm_export.decoding import DecodeOptions, DecodingSession, Reason, Request, Result, Trie, generate
from tfm_export.decoding.waiting import MOST_OVERTAKEN
from tfm_export.errors import RequestError

SOURCES = [tuple(int(t) for t in np.random.default_rng(i).integers(4, 40, 1 + i % 7)) for i in range(30)]


def steps_of(session: DecodingSession) -> Iterator[list[tuple[int, Result]]]:
    while session.pending:
        yield session.step()


@pytest.mark.parametrize("refill_at", [0.25, 1.0])
@pytest.mark.parametrize("options", [{}, {"beam_size": 3}, {"sampling_topk": 3, "seed": 1}])
def test_requests_that_come_later_have_the_answers_that_they_have_alone(
    options: dict[str, Any], refill_at: float
) -> None:
    model = FakeModel(random_table(7), 7, refill_at=refill_at)
    decoding = DecodeOptions(max_batch_size=4, **options)
    coming, found = iter(SOURCES), {}
    with DecodingSession(model, decoding, SPECIAL) as session:
        added = {session.add(Request(source=next(coming))): SOURCES[0]}
        for answers in steps_of(session):
            found.update(answers)
            for source in itertools.islice(coming, 2):
                added[session.add(Request(source=source))] = source
        assert session.pending == 0
        assert session.step() == []
    assert found.keys() == added.keys()
    assert sorted(added.values()) == sorted(SOURCES)
    for number, result in found.items():
        assert result.hypotheses == generate(model, [added[number]], decoding, SPECIAL)[0].hypotheses


OWN: list[list[dict[str, Any]]] = [
    [
        {},
        {"max_decoding_length": 3},
        {"min_decoding_length": 4, "no_repeat_ngram_size": 2},
        {"sampling_topk": 5, "seed": 3},
        {"sampling_topk": 0, "seed": 3, "sampling_temperature": 0.7},
        {"end_token": [7, 9], "return_end_token": True},
        {"start_tokens": [1, 6], "repetition_penalty": 1.4, "score_change": "after_softmax"},
        {"target_prefix": [4, 5], "return_logits_vocab": True},
        {"suppress_sequences": [[2]], "forced_eos": 8, "max_decoding_length": 6},
    ],
    [
        {"beam_size": 3},
        {"beam_size": 3, "num_hypotheses": 3, "length_penalty": 0.0},
        {"beam_size": 3, "compatibility": "huggingface", "early_stopping": "never"},
        {"beam_size": 3, "end_token": [7, 9], "patience": 2.0},
        {"beam_size": 3, "forced_bos": 6, "max_decoding_length": 4},
        {"beam_size": 3, "constraint": Trie([[4, 5], [6]], end=2), "prefix_bias_beta": 0.5, "target_prefix": [6]},
    ],
]


@pytest.mark.parametrize("own", OWN, ids=["greedy", "beams"])
def test_requests_of_one_batch_may_have_options_of_their_own(own: list[dict[str, Any]]) -> None:
    model = FakeModel(random_table(12), 12, refill_at=0.0)
    options = [DecodeOptions(max_batch_size=5, **fields) for fields in own]
    asked = [(Request(source=source), options[i % len(options)]) for i, source in enumerate(SOURCES)]
    found: dict[int, Result] = {}
    with DecodingSession(model, options[0], SPECIAL) as session:
        for request, option in asked:
            session.add(request, option)
        for answers in steps_of(session):
            found.update(answers)
    for number, (request, option) in enumerate(asked):
        alone = generate(model, [request], option, SPECIAL)[0]
        assert repr(found[number].hypotheses) == repr(alone.hypotheses)
        assert found[number].reason is alone.reason
    with pytest.raises(RequestError, match="the session decodes batches of"):
        DecodingSession(model, options[0], SPECIAL).add(asked[0][0], DecodeOptions(beam_size=2))


def test_a_closed_session_takes_and_answers_nothing() -> None:
    session = DecodingSession(FakeModel(random_table()), DecodeOptions(max_batch_size=1), SPECIAL)
    session.add(Request(source=(5,)))
    session.add(Request(source=(6,)))
    session.step()
    assert session.pending == 2
    session.close()
    session.close()
    assert (session.pending, session.step()) == (0, [])
    with pytest.raises(RequestError, match="the decoding session is closed"):
        session.add(Request(source=(5,)))


def order_of_answers(session: DecodingSession) -> list[int]:
    return [number for answers in steps_of(session) for number, _ in answers]


def test_the_highest_priority_goes_first_and_of_equals_the_one_that_came_first() -> None:
    options = DecodeOptions(max_batch_size=1)
    with DecodingSession(FakeModel(random_table()), options, SPECIAL) as session:
        for priority in (0, 2, -1, 2, 1, 0):
            session.add(Request(source=(5, 6), priority=priority))
        assert order_of_answers(session) == [1, 3, 4, 0, 5, 2]
    results = generate(FakeModel(random_table()), [Request(source=(5,), priority=p) for p in (0, 9)], options, SPECIAL)
    assert len(results) == 2


@pytest.mark.parametrize("priority", [0, 1])
def test_nobody_is_overtaken_for_ever(priority: int) -> None:
    """A short source among longer ones, or one of low priority, while others never cease to come."""
    table, source = random_table(), (5,) * 8
    model = FakeModel(table, refill_at=0.0)
    with DecodingSession(model, DecodeOptions(max_batch_size=4, max_decoding_length=3), SPECIAL) as session:
        for _ in range(4):
            session.add(Request(source=source, priority=priority))
        session.step()
        late, answered = session.add(Request(source=(6,))), list[int]()
        while late not in answered:
            answered += [number for number, _ in session.step()]
            for _ in range(2):
                session.add(Request(source=source, priority=priority))
            assert len(answered) < MOST_OVERTAKEN + 12
    # Those of its own priority do not overtake it at all.
    assert len(answered) <= 8 if priority == 0 else len(answered) > MOST_OVERTAKEN


class SlowSentences(FakeSentences):
    """Sentences of which a step takes a while."""

    def step(self, *arrays: Any, **options: Any) -> Any:
        time.sleep(0.01)
        return super().step(*arrays, **options)


class SlowModel(FakeModel):
    """A model whose steps take a while."""

    def encode(self, *arrays: Any, **options: Any) -> SlowSentences:
        fast = super().encode(*arrays, **options)
        return SlowSentences(self, fast.sources, fast.capacity, fast.width)


def test_no_deadline_counts_the_time_in_which_a_request_waits_for_others() -> None:
    options = DecodeOptions(max_batch_size=4, max_decoding_length=5, min_decoding_length=5)
    requests = [Request(source=(5, i % 40), deadline=0.5) for i in range(80)]
    begin = time.perf_counter()
    results = generate(SlowModel(random_table(), refill_at=1.0), requests, options, SPECIAL)
    assert time.perf_counter() - begin > 1.0  # most of which the last of 20 batches waits
    assert all(result.reason is Reason.LENGTH and len(result.tokens) == 5 for result in results)
    tight = [Request(source=(5, i), deadline=0.025) for i in range(40)]
    results = generate(SlowModel(random_table(), refill_at=1.0), tight, options, SPECIAL)
    assert {result.reason for result in results} == {Reason.DEADLINE}
    assert all(0 < len(result.tokens) < 5 for result in results)


def test_a_deadline_counts_from_when_the_request_was_admitted() -> None:
    now, model = time.perf_counter(), FakeModel(random_table())
    times = [Request(source=(5,), deadline=60.0, admitted=now - past) for past in (61, 0)]
    over, there = generate(model, times, DecodeOptions(target_prefix=[4]), SPECIAL)
    assert (over.reason, over.tokens, over.hypotheses[0].log_probs) == (Reason.DEADLINE, [4], [0.0])
    assert there.reason is not Reason.DEADLINE
    for admitted in (float("nan"), "now"):
        with pytest.raises(RequestError, match="admitted must be a time"):
            Request(source=(5,), admitted=admitted)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="priority must be an integer"):
        Request(source=(5,), priority=0.5)  # type: ignore[arg-type]


def test_what_is_given_up_while_it_waits_is_never_encoded() -> None:
    model, given_up = FakeModel(random_table(), gives_attention=True), threading.Event()
    given_up.set()
    told: list[int] = []
    request = Request(source=(5, 6), cancelled=given_up, on_tokens=lambda tokens: told.extend(t.token for t in tokens))
    options = DecodeOptions(target_prefix=[4, 4], return_attention=True, return_scores=False)
    (result,) = generate(model, [request], options, SPECIAL)
    assert model.encodes == 0
    best = result.hypotheses[0]
    assert (result.reason, result.statistics.steps, best.tokens, best.log_probs) == (Reason.CANCELLED, 0, [4, 4], None)
    assert told == [4, 4]
    assert best.attention is not None
    assert best.attention.shape == (2, 2)
