"""Live traffic: whose turn it is, what is shed, what is told, and that everybody gets the answer that is his."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import tfm_export
from tfm_export import DecodeOptions, ModelClosed, Observer, Overloaded, RequestError, TextRequest
from tfm_export.decoding import Reason, SettledToken
from tfm_export.model import Generation, Model, Report
from tfm_export.model.answers import Pending

WORDS = ["hello", "parity", "a", "don't", "transformer", "zz", "international", "it"]
LONG = "abcdefghijklmno"


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> Iterator[Model]:
    with tfm_export.load(tiny_bundle, threads=1, workers=1) as loaded:
        yield loaded


@contextmanager
def held(model: Model) -> Iterator[Pending[Generation]]:
    """Keep the one worker of a model from going on."""
    begun, go_on = threading.Event(), threading.Event()

    def wait(_: list[SettledToken]) -> None:
        begun.set()
        assert go_on.wait(60)

    pending = model.generate_async(TextRequest(text="transformer", on_tokens=wait))
    assert begun.wait(60)
    try:
        yield pending
    finally:
        go_on.set()


def random_settings(rng: random.Random) -> dict[str, Any]:
    beam_size = rng.choice([1, 1, 1, 3])
    settings: dict[str, Any] = {"beam_size": beam_size, "max_decoding_length": rng.randint(1, 12)}
    if beam_size == 1 and rng.random() < 0.3:
        settings |= {
            "sampling_topk": rng.choice([0, 5]),
            "seed": rng.randint(0, 99),
            "num_hypotheses": rng.choice([1, 3]),
        }
    if beam_size == 3:
        settings |= {"length_penalty": rng.choice([0.0, 0.6, 1.0]), "num_hypotheses": rng.choice([1, 2])}
    if rng.random() < 0.3:
        settings |= {"no_repeat_ngram_size": 2, "min_decoding_length": settings["max_decoding_length"] // 2}
    if rng.random() < 0.2:
        settings["repetition_penalty"] = 1.3
    if rng.random() < 0.1:
        settings |= {
            "return_alternatives": True,
            "num_hypotheses": 2,
            "beam_size": 1,
            "sampling_topk": 1,
            "seed": None,
            "max_decoding_length": 5,
        }
    return settings


def test_everybody_gets_the_answer_that_is_his(
    tiny_bundle: Path,
) -> None:
    """Mixed options, lists, deadlines, cancellations and callbacks that fail, all at once on two workers."""
    rng, failed = random.Random(7), RuntimeError("this callback is broken")

    def broken(_: list[SettledToken]) -> None:
        raise failed

    async def one(model: Model, number: int) -> str:
        settings, text = random_settings(rng), rng.choice(WORDS)
        await asyncio.sleep(rng.random() * 0.3)
        kind = rng.random()
        if kind < 0.1:
            pending = model.generate_async(text, **settings)
            await asyncio.sleep(0)
            pending.cancel()
            with suppress(asyncio.CancelledError):
                await pending
            return "cancelled"
        if kind < 0.2:
            answer = await model.generate_async(text, deadline=rng.choice([0.0, 0.001]), **settings)
            whole = model.generate(text, **settings)
            if (
                answer.reason is Reason.DEADLINE
                and settings["beam_size"] == 1
                and "return_alternatives" not in settings
            ):
                for found in answer.hypotheses:
                    assert any(found.tokens == h.tokens[: len(found.tokens)] for h in whole.hypotheses)
            return "deadline"
        if kind < 0.25 and "return_alternatives" not in settings:
            with pytest.raises(RuntimeError, match="this callback is broken"):
                await model.generate_async(TextRequest(text=text, on_tokens=broken), **settings)
            return "failed"
        if kind < 0.4:
            texts = [rng.choice(WORDS) for _ in range(rng.randint(1, 9))]
            answers = await model.generate_async(texts, **settings)
            assert [a.texts for a in answers] == [model.generate(t, **settings).texts for t in texts]
            return "list"
        answer = await model.generate_async(text, request_id=str(number), **settings)
        expected = model.generate(text, **settings)
        assert [h.tokens for h in answer.hypotheses] == [h.tokens for h in expected.hypotheses]
        assert answer.texts == expected.texts
        return "answered"

    async def everybody(model: Model) -> list[str]:
        return await asyncio.gather(*(one(model, number) for number in range(400)))

    with tfm_export.load(tiny_bundle, threads=1, workers=2) as model:
        outcomes = asyncio.run(everybody(model))
        assert {*outcomes} == {"cancelled", "deadline", "failed", "list", "answered"}
        assert model.waiting == 0


def test_texts_that_come_while_others_are_decoded_join_them(tiny_bundle: Path) -> None:
    sizes: list[int] = []

    class Sizes(Observer):
        def stepped(self, size: int, seconds: float) -> None:
            sizes.append(size)
            assert seconds > 0

    with tfm_export.load(tiny_bundle, threads=1, workers=1, observer=Sizes()) as model:
        with held(model) as first:
            others = [model.generate_async(word, max_decoding_length=5) for word in WORDS]
            assert model.waiting == len(WORDS)
        texts = [other.result(60).text for other in others]
        assert first.result(60).text == model.generate("transformer").text
        assert texts == [model.generate(word, max_decoding_length=5).text for word in WORDS]
    assert 1 + len(WORDS) in sizes  # other options do not keep anybody from the batch


def test_no_text_waits_for_a_whole_list(model: Model) -> None:
    order: list[str] = []
    with held(model):
        many = model.generate_async([TextRequest(text=LONG, on_tokens=lambda _: order.append("list"))] * 200)
        model.generate_async([LONG] * 200)
        single = model.generate_async(TextRequest(text="a", on_tokens=lambda _: order.append("single")))
    single.result(60)
    assert order.count("list") < 100 * len(many.result(60)[0].tokens)


def test_what_has_expired_is_never_encoded_and_answered_at_once(tiny_bundle: Path, monkeypatch: Any) -> None:
    with tfm_export.load(tiny_bundle, threads=1, workers=1) as model:
        encoded: list[int] = []
        encode = model.step_model.encode
        monkeypatch.setattr(
            model.step_model, "encode", lambda ids, *a, **o: encoded.append(len(ids)) or encode(ids, *a, **o)
        )
        cancelled = threading.Event()
        with held(model):
            late = model.generate_async(["hello"] * 40, deadline=0.01)
            own = model.generate_async([TextRequest(text="hello", deadline=0.01), "hello"], deadline=60.0)
            event = model.generate_async(["hello", "a"], cancelled=cancelled)
            unwanted = model.generate_async("hello")
            cancelled.set()
            unwanted.cancel()
            assert unwanted.done
            time.sleep(0.02)
        assert {(a.reason, a.score, a.text) for a in late.result(60)} == {(Reason.DEADLINE, None, "")}
        assert [a.reason for a in own.result(60)] == [Reason.DEADLINE, Reason.END]
        assert {a.reason for a in event.result(60)} == {Reason.CANCELLED}
        assert sum(encoded) == 2  # the one that held the others, and the one that had time


def test_a_full_queue_refuses_more_and_says_when_to_come_again(tiny_bundle: Path) -> None:
    with tfm_export.load(tiny_bundle, threads=1, workers=1, max_waiting=3) as model:
        with held(model):
            taken = model.generate_async(["hello"] * 5)  # a list is taken whole, while there is room at all
            with pytest.raises(Overloaded, match="5 sources wait already, of at most 3") as full:
                model.generate_async("a")
            assert 0 < full.value.retry_after < 60
            taken.cancel()
            assert model.generate_async("a").done is False
        assert model.generate_async("a").result(60).text == model.generate("a").text


def test_one_bad_request_spoils_no_other(model: Model) -> None:
    def constraint(_: list[int]) -> list[int]:
        raise KeyError("no such state")

    with held(model):
        good = [model.generate_async(word) for word in WORDS]
        bad = model.generate_async(TextRequest(text="hello", constraint=constraint))
        worse = model.generate_async(["hello", ""])
    with pytest.raises(KeyError):
        bad.result(60)
    with pytest.raises(RequestError, match="text 1: the text is empty"):
        worse.result(60)
    assert [g.result(60).text for g in good] == [model.generate(word).text for word in WORDS]


@pytest.mark.parametrize("drain", [None, 0.0, 30.0])
def test_closing_answers_what_was_taken_as_far_as_it_is_to(tiny_bundle: Path, drain: float | None) -> None:
    model = tfm_export.load(tiny_bundle, threads=1, workers=1)
    expected = model.generate("hello").text
    with held(model) as begun:
        waiting = [model.generate_async("hello") for _ in range(40)]
        closing = threading.Thread(target=lambda: model.close(drain))
        closing.start()
        while model._closed is False:
            time.sleep(0.001)
        with pytest.raises(ModelClosed, match="the model is closed"):
            model.generate_async("hello")
        if drain != 30.0:
            closing.join(60)
    closing.join(60)
    if drain == 30.0:
        assert {pending.result(60).text for pending in waiting} == {expected}
        assert begun.result(60).reason is Reason.END
        return
    for pending in waiting:
        with pytest.raises(ModelClosed, match="closed before this was decoded"):
            pending.result(60)
    if drain is None:
        assert begun.result(60).reason is Reason.END
    else:
        with pytest.raises(ModelClosed):
            begun.result(60)


def test_a_dropped_model_ends_its_threads_and_a_wanted_answer_keeps_it(tiny_bundle: Path) -> None:
    before = threading.active_count()
    assert tfm_export.load(tiny_bundle).generate_async("hello").result(60).reason is Reason.END
    gc.collect()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_a_program_may_end_while_much_waits(tiny_bundle: Path) -> None:
    code = f"import tfm_export; m = tfm_export.load({str(tiny_bundle)!r}); p = m.generate_async(['hello'] * 4000)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_stream_gives_the_pieces_of_the_answer(model: Model) -> None:
    async def follow(word: str, **settings: Any) -> tuple[str, Generation | None]:
        async with model.stream_async(word, **settings) as pieces:
            return "".join([piece.text async for piece in pieces]), pieces.answer

    async def several() -> list[tuple[str, Generation | None]]:
        return await asyncio.gather(*(follow(word, beam_size=size) for word in WORDS for size in (1, 3)))

    for (told, answer), (word, size) in zip(
        asyncio.run(several()), [(word, size) for word in WORDS for size in (1, 3)], strict=True
    ):
        assert answer is not None
        assert told == answer.text == model.generate(word, beam_size=size).text

    async def leave() -> None:
        stream = model.stream_async(LONG)
        async for _ in stream:
            break
        await stream.aclose()
        with pytest.raises(RequestError, match="the text is empty"):
            _ = [piece async for piece in model.stream_async("")]
        with pytest.raises(RequestError, match="a stream follows one search"):
            model.stream_async("a", sampling_topk=2, num_hypotheses=2)

    asyncio.run(leave())
    assert model.waiting == 0


def test_observers_are_told_and_harm_nobody(tiny_bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    reports: list[Report] = []

    class Watch(Observer):
        def answered(self, report: Report) -> None:
            reports.append(report)
            raise ValueError("a broken observer")

    caplog.set_level(logging.INFO, "tfm_export")
    with tfm_export.load(tiny_bundle, observer=Watch()) as model:
        answer = model.generate_async("hello", request_id="r-1").result(60)
        model.generate_async(["hello", "a"], request_id="r-2", deadline=0.0).result(60)
        with pytest.raises(RequestError):
            model.generate_async("", request_id="r-3").result(60)
    outcomes = [(report.request_id, report.outcome) for report in reports]
    assert outcomes == [("r-1", "end token"), ("r-2", "deadline"), ("r-2", "deadline"), ("r-3", "RequestError")]
    first = reports[0]
    assert (first.source_tokens, first.target_tokens) == (6, len(answer.tokens))
    assert 0 <= first.queue_seconds < first.seconds
    lines = [record for record in caplog.records if hasattr(record, "request_id")]
    assert [record.request_id for record in lines] == ["r-1", "r-2", "r-2", "r-3"]
    assert lines[0].getMessage().startswith("r-1: end token, 6 tokens to ")
    assert "a broken observer" in caplog.text


@pytest.mark.parametrize("wrong", [0, -1, True, "2", 2.5, 10**6])
def test_workers_are_a_number_of_threads(tiny_bundle: Path, wrong: Any) -> None:
    with pytest.raises(RequestError, match="workers must be an integer from 1"):
        tfm_export.load(tiny_bundle, workers=wrong)


def test_memory_does_not_grow_with_what_was_answered(model: Model) -> None:
    """Nothing that belongs to a call is kept once it has its answer."""

    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    def ask(count: int) -> None:
        options: list[Callable[[int], dict[str, Any]]] = [
            lambda _: {},
            lambda n: {"max_decoding_length": 1 + n % 30, "deadline": 30.0},
            lambda n: {"sampling_topk": 3, "seed": n % 50},
        ]
        for n in range(count):
            model.generate_async(["a", "it"], **options[n % 3](n)).result(60)

    ask(300)  # the options that are remembered
    before = objects()
    ask(600)
    assert objects() < before + 500


def test_options_given_whole_are_decoded_together_too(model: Model) -> None:
    with held(model):
        pending = [model.generate_async("hello", options=DecodeOptions(max_decoding_length=n)) for n in range(1, 9)]
    whole = model.generate("hello", max_decoding_length=8).tokens
    for n, one in enumerate(pending, 1):
        assert one.result(60).tokens == whole[:n]


def test_an_empty_list_has_an_empty_answer(tiny_bundle: Path) -> None:
    model = tfm_export.load(tiny_bundle, threads=1, workers=1)
    assert model.generate_async([]).result(10) == model.generate([]) == []
    assert model.generate_ids_async([]).result(10) == []
    begin = time.monotonic()
    model.close(drain=30.0)  # nothing is due
    assert time.monotonic() - begin < 10
