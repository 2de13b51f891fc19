"""Requests in other threads: awaited, cancelled, closed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import tfm_export
import tfm_export.tokenizer
from tfm_export import RequestError
from tfm_export.decoding import Reason, SettledToken
from tfm_export.model import Model, TextRequest


def test_requests_are_awaited(model: Model) -> None:
    async def ask() -> list[Any]:
        return await asyncio.gather(model.generate_async("hello"), model.generate_async(["zz", "a"], beam_size=2))

    one, many = asyncio.run(ask())
    assert one.hypotheses == model.generate("hello").hypotheses
    assert [g.hypotheses for g in many] == [g.hypotheses for g in model.generate(["zz", "a"], beam_size=2)]
    pending = model.generate_async("hello")
    assert pending.result(timeout=60).text == one.text
    assert pending.done
    with pytest.raises(RequestError, match="the text is empty"):
        model.generate_async("").result(timeout=60)
    with pytest.raises(RequestError, match="beam_size must be at least 1"):
        model.generate_async("hello", beam_size=0)


def held_back() -> tuple[TextRequest, threading.Event, threading.Event]:
    """A request that stops at its first token, an event that it sets there, and one that it waits for."""
    begun, go_on = threading.Event(), threading.Event()

    def wait(_: list[SettledToken]) -> None:
        begun.set()
        assert go_on.wait(60)

    return TextRequest(text="transformer", on_tokens=wait), begun, go_on


def test_cancelling_ends_the_work_that_has_begun(model: Model) -> None:
    request, begun, go_on = held_back()
    pending = model.generate_async(request)
    assert begun.wait(60)
    assert not pending.done
    pending.cancel()
    go_on.set()
    generation = pending.result(timeout=60)
    assert (len(generation.tokens), generation.reason) == (1, Reason.CANCELLED)


def test_cancelling_a_task_ends_the_work_it_awaits(model: Model) -> None:
    request, begun, go_on = held_back()
    pending = model.generate_async(request)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pending, 0.05)

    assert begun.wait(60)
    asyncio.run(give_up())
    go_on.set()
    assert pending.result(timeout=60).reason is Reason.CANCELLED


def test_time_spent_waiting_for_a_thread_counts(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfm_export.model.model.usable_cpus", lambda: 1)
    request, begun, go_on = held_back()
    with tfm_export.load(tiny_bundle, threads=1) as model:
        model.generate_async(request)
        assert begun.wait(60)
        late, own = model.generate_async("hello", deadline=0.01), TextRequest(text="hello", deadline=0.01)
        patient, never = model.generate_async([own, "hello"], deadline=60.0), model.generate_async("hello")
        time.sleep(0.02)
        go_on.set()
        assert (late.result(60).reason, late.result(60).tokens) == (Reason.DEADLINE, [])
        assert [answer.reason for answer in patient.result(60)] == [Reason.DEADLINE, Reason.END]
        assert never.result(60).reason is Reason.END


def test_closing_drops_the_requests_that_wait(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfm_export.model.model.usable_cpus", lambda: 1)
    request, begun, go_on = held_back()
    with tfm_export.load(tiny_bundle, threads=1) as model:
        first, second = model.generate_async(request), model.generate_async("hello")
        assert begun.wait(60)
    go_on.set()
    assert first.result(timeout=60).reason is Reason.END
    with pytest.raises(concurrent.futures.CancelledError):
        second.result(timeout=60)
    with pytest.raises(RequestError, match="the model is closed"):
        model.generate_async("hello")
