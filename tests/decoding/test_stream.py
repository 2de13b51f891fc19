"""Tokens as they come, and requests that are given up."""

from __future__ import annotations

import threading

import pytest

from tests.decoding.fake_model import SPECIAL, FakeModel, random_table
from tfm_export.decoding import DecodeOptions, Reason, Request, Result, SettledToken, generate, stream
from tfm_export.errors import RequestError


@pytest.mark.parametrize("beam_size", [1, 2, 4])
@pytest.mark.parametrize("return_end_token", [True, False])
def test_a_stream_tells_the_tokens_of_the_result(beam_size: int, return_end_token: bool) -> None:
    model = FakeModel(random_table(9, seed=6), 9)
    options = DecodeOptions(beam_size=beam_size, return_end_token=return_end_token, target_prefix=[4])
    for source in [(i,) for i in range(4, 30)]:
        *tokens, result = stream(model, Request(source=source), options, SPECIAL)
        assert isinstance(result, Result)
        assert all(isinstance(token, SettledToken) for token in tokens)
        best = generate(model, [source], options, SPECIAL)[0].hypotheses[0]
        assert result.hypotheses[0] == best
        assert [t.token for t in tokens] == best.tokens
        assert best.log_probs is not None
        assert [t.log_prob for t in tokens] == best.log_probs[: len(tokens)]


def test_a_beam_settles_tokens_before_its_end() -> None:
    model, early = FakeModel(random_table(9, seed=6, sharpness=4.0), 9), 0
    for source in [(i,) for i in range(4, 30)]:
        events = []
        request = Request(source=source, on_tokens=lambda tokens, e=events: e.append(len(tokens)))
        (result,) = generate(model, [request], DecodeOptions(beam_size=3), SPECIAL)
        assert sum(events) == len(result.hypotheses[0].tokens)
        early += len(events) > 1
    assert early > 3


def test_a_stream_stops_when_it_is_closed() -> None:
    model = FakeModel(random_table(9, seed=6), 9)
    tokens = stream(model, Request(source=(5,)), DecodeOptions(min_decoding_length=12), SPECIAL)
    next(tokens)
    tokens.close()
    assert model.steps == 1


def test_a_callback_ends_its_request_and_no_other() -> None:
    model, seen = FakeModel(random_table(9, seed=6), 9), []

    def third(tokens: list[SettledToken]) -> bool:
        seen.extend(tokens)
        return len(seen) >= 3

    options = DecodeOptions(min_decoding_length=6)
    one, two = generate(model, [Request(source=(5,), on_tokens=third), Request(source=(6,))], options, SPECIAL)
    assert (one.reason, len(one.hypotheses[0].tokens), one.hypotheses[0].finished) == (Reason.CALLBACK, 3, False)
    assert two.hypotheses == generate(model, [(6,)], options, SPECIAL)[0].hypotheses


@pytest.mark.parametrize("beam_size", [1, 3])
def test_a_cancelled_request_gives_what_it_has(beam_size: int) -> None:
    model, cancelled = FakeModel(random_table(9, seed=6), 9), threading.Event()
    sources = [
        Request(source=(5,), cancelled=cancelled),
        Request(source=(6,), on_tokens=lambda _: cancelled.set()),
    ]
    options = DecodeOptions(beam_size=beam_size, min_decoding_length=12)
    one, two = generate(model, sources, options, SPECIAL)
    assert one.reason is Reason.CANCELLED
    assert 0 < one.statistics.steps < two.statistics.steps == 12
    assert not one.hypotheses[0].finished
    assert two.hypotheses == generate(model, [(6,)], options, SPECIAL)[0].hypotheses


def test_a_deadline_that_has_passed() -> None:
    model = FakeModel(random_table(9, seed=6), 9)
    results = generate(model, [Request(source=(5,), deadline=0.0), (6,)], DecodeOptions(), SPECIAL)
    assert results[0].reason is Reason.DEADLINE
    assert results[0].hypotheses[0].tokens == []
    assert results[1].reason in (Reason.END, Reason.LENGTH)


def test_a_stream_follows_one_search() -> None:
    with pytest.raises(RequestError, match="one search"):
        next(stream(FakeModel(random_table()), Request(source=(5,)), DecodeOptions(return_alternatives=True), SPECIAL))
