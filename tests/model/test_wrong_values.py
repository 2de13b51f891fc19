"""Values of wrong types and sizes get a sentence; what a caller's code raises costs its own request."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tfm_export
from tfm_export import DecodeOptions, RequestError, TextRequest
from tfm_export.decoding import Reason, Request
from tfm_export.model import Model

OPTIONS: list[dict[str, Any]] = [
    {"beam_size": True},
    {"beam_size": "4"},
    {"beam_size": 2.5},
    {"num_hypotheses": True},
    {"max_batch_size": False},
    {"max_batch_size": 2.0},
    {"forced_bos": True},
    {"forced_bos": 3.7},
    {"forced_eos": "x y z"},
    {"length_penalty": True},
    {"length_penalty": "1"},
    {"max_decoding_length": True},
    {"end_token": [True]},
    {"start_tokens": [1.5]},
    {"target_prefix": [3.7]},
    {"suppress_sequences": [[True]]},
    {"sampling_topk": 2, "seed": True},
    {"deadline": True},
    {"deadline": "soon"},
    {"budget": True},
    {"long_source": 3},
    {"beam_size": [2]},
    {"end_token": True},
    {"end_token": {2: 3}},
    {"disable_unk": 1},
    {"return_scores": "no"},
    {"disable_unk": None},
    {"constraint": 5},
    {"options": {"beam_size": 2}},
    {"options": 5},
    {"beams": 4},
    {"target_prefix": {4: 5}},
]


@pytest.mark.parametrize("settings", OPTIONS, ids=str)
def test_settings_of_wrong_types_are_refused(model: Model, settings: dict[str, Any]) -> None:
    for ask in (model.generate, model.generate_async, model.stream):
        with pytest.raises(RequestError, match=r"must be|ids|is no token|tokens that|no option .beams"):
            ask("hello", **settings)


@pytest.mark.parametrize(
    "texts", [{"hello": 1}, {"hello"}, b"hello", 3, None, [b"hello"], [None], [["hello"]]], ids=str
)
def test_what_is_no_text_is_refused(model: Model, texts: Any) -> None:
    with pytest.raises(RequestError, match=r"expected a text|a text must be a str|must be ids"):
        model.generate(texts)


def test_numpy_integers_are_numbers(model: Model) -> None:
    settings = {"beam_size": np.int64(2), "max_decoding_length": np.int32(5), "num_hypotheses": np.int8(2)}
    assert len(model.generate("hello", **settings).hypotheses) == 2


@pytest.mark.parametrize("threads", [True, 2.5, "2", 0])
def test_threads_are_a_number(tiny_bundle: Path, threads: Any) -> None:
    with pytest.raises(RequestError, match="threads must be"):
        tfm_export.load(tiny_bundle, threads=threads)


@pytest.mark.parametrize("settings", [{"window": 0}, {"window": True}, {"workers": 0}, {"on_error": "ignore"}], ids=str)
def test_an_iterable_is_checked_when_it_is_called(model: Model, settings: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="must be"):
        model.generate_iterable(["hello"], **settings)


def test_a_text_without_end_is_refused_by_its_length(model: Model) -> None:
    with pytest.raises(RequestError, match=r"the text has 4,000,000 characters") as told:
        model.generate("ab" * 2_000_000)
    assert len(str(told.value)) < 300
    with pytest.raises(RequestError) as told:
        model.generate("é" * 1000)
    assert len(str(told.value)) < 500


def test_a_model_is_not_copied(model: Model) -> None:
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="load the bundle in each process"):
            copied(model)


class BrokenError(Exception):
    """Raised by a caller's own code."""


def broken(_: Sequence[Any]) -> Any:
    raise BrokenError


@pytest.mark.parametrize("beam_size", [1, 3])
@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"constraint": broken}, BrokenError),
        ({"on_tokens": broken}, BrokenError),
        ({"constraint": lambda _: [10_000]}, RequestError),
        ({"constraint": lambda _: [3.7]}, RequestError),
        ({"constraint": lambda _: []}, RequestError),
        ({"constraint": lambda _: 7}, RequestError),
        ({"constraint": lambda _: {4: 5}}, RequestError),
    ],
    ids=["constraint", "callback", "beyond", "float", "nothing", "no list", "a dict"],
)
def test_a_request_that_goes_wrong_costs_nobody_else(
    model: Model, fields: dict[str, Callable[..., Any]], kind: type[Exception], beam_size: int
) -> None:
    bad, words = TextRequest(text="hello", **fields), ["a", "zz", "parity"]
    expected = [model.generate(word, beam_size=beam_size).text for word in words]
    pending = [model.generate_async(word, beam_size=beam_size) for word in words]
    failing = model.generate_async(bad, beam_size=beam_size)
    with pytest.raises(kind):
        failing.result(60)
    assert [one.result(60).text for one in pending] == expected
    with pytest.raises(kind):
        model.generate([*words, bad], beam_size=beam_size)
    if issubclass(kind, RequestError):
        answers = list(model.generate_iterable([words[0], bad, *words[1:]], on_error="yield", beam_size=beam_size))
        assert isinstance(answers.pop(1), RequestError)
        assert [getattr(answer, "text", None) for answer in answers] == expected


def test_an_error_of_one_request_does_not_decode_the_others_again(model: Model) -> None:
    told: list[int] = []
    texts = [TextRequest(text="zz", on_tokens=lambda tokens: told.extend(t.token for t in tokens))]
    bad = TextRequest(text="hello", constraint=lambda _: [])
    good, failed = model.generate_iterable([*texts, bad], on_error="yield")
    assert isinstance(failed, RequestError)
    assert told[: len(getattr(good, "tokens", []))] == getattr(good, "tokens", None)
    assert len(told) <= len(getattr(good, "tokens", [])) + 1


def test_too_little_memory_is_told(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = model.step_model.encode

    def small(ids: Any, *arrays: Any, **options: Any) -> Any:
        if len(ids) > 1:
            raise MemoryError
        return encode(ids, *arrays, **options)

    expected = [model.generate(word).text for word in ("hello", "zz", "a")]
    monkeypatch.setattr(model.step_model, "encode", small)
    answers = model.generate_iterable(["hello", "zz", "a"], on_error="yield")
    assert [getattr(answer, "text", answer) for answer in answers] == expected
    monkeypatch.setattr(model.step_model, "encode", lambda *_, **__: small([0, 0]))
    (answer,) = model.generate_iterable(["hello"], on_error="yield")
    assert str(answer).startswith("there is not enough memory to decode this")
    with pytest.raises(RequestError, match="there is not enough memory to decode this"):
        model.generate_async("hello").result(60)


def test_options_and_requests_refuse_booleans() -> None:
    for make in (lambda: DecodeOptions(beam_size=True), lambda: Request(source=[1], priority=True)):
        with pytest.raises(RequestError, match="must be an integer"):
            make()
    assert Request(source=[1], deadline=1).deadline == 1
    assert Reason.END.value == "end token"


@pytest.mark.parametrize(
    "arguments",
    [
        {"variant": ["w8"]},
        {"draft": ["w8"]},
        {"max_waiting": 0},
        {"max_waiting": "2"},
        {"max_waiting": True},
        {"observer": 5},
        {"check_hashes": "no"},
        {"copy": "no"},
    ],
    ids=str,
)
def test_arguments_of_load_have_their_types(tiny_bundle: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="must be"):
        tfm_export.load(tiny_bundle, **arguments)
    for path in (5, None, b"bundle"):
        with pytest.raises(RequestError, match="path must be"):
            tfm_export.load(path)  # type: ignore[arg-type]


def test_other_calls_refuse_what_they_cannot_take(model: Model) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: model.score(5, ["a"]),  # type: ignore[arg-type]
        lambda: model.score(["a"], None),  # type: ignore[arg-type]
        lambda: model.score({"a": 1}, ["a"]),  # type: ignore[arg-type]
        lambda: model.score(["a"], [[4]], max_batch_size=True),  # type: ignore[list-item]
        lambda: model.score(["a"], [[4]], max_batch_size=2.5),  # type: ignore[list-item, arg-type]
        lambda: model.generate_iterable("text"),
        lambda: model.generate_iterable({"text": 1}),
        lambda: model.generate_iterable(5),  # type: ignore[call-overload]
        lambda: model.generate_ids([[True, False]]),
        lambda: model.generate_ids([b"ab"]),
        lambda: model.stream_async("a"),
        lambda: model.close(drain=-1.0),
        lambda: model.close(drain="x"),  # type: ignore[arg-type]
        lambda: Request(source=[1], seed=True),
        lambda: Request(source=[1], admitted=True),
        lambda: Request(source=[1], draw="x"),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(RequestError):
            call()
    assert model.generate("hello").reason is Reason.END


def test_errors_can_be_sent_to_another_process() -> None:
    sent = pickle.loads(pickle.dumps(tfm_export.Overloaded("full", retry_after=2.0)))  # noqa: S301 (made here)
    assert (str(sent), sent.retry_after) == (str(tfm_export.Overloaded("full", retry_after=2.0)), 2.0)
