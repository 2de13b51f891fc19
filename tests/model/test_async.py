"""Answers that are waited for: awaited, made tasks of, cancelled."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

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


def test_a_pending_answer_is_a_coroutine(model: Model) -> None:
    async def ask() -> list[str]:
        tasks = [asyncio.create_task(model.generate_async(word)) for word in ("hello", "zz")]
        async with asyncio.TaskGroup() as group:
            tasks.append(group.create_task(model.generate_async("a")))
        return [(await task).text for task in tasks]

    assert asyncio.run(ask()) == [generation.text for generation in model.generate(["hello", "zz", "a"])]


def test_a_loop_that_ends_before_the_answer_harms_nobody(model: Model) -> None:
    request, begun, go_on = held_back()
    pending = model.generate_async(request)

    async def look() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(pending)), 0.01)

    assert begun.wait(60)
    asyncio.run(look())
    go_on.set()
    assert len(pending.result(timeout=60).tokens) > 0
    assert model.generate_async("hello").result(60).text == model.generate("hello").text
