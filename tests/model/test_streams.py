"""Token by token, and texts without end: windows, workers, errors in their place."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers

from tests.model.conftest import WORDS
from tfm_export import NumericError, RequestError, TextRequest
from tfm_export.decoding import Reason, SettledToken
from tfm_export.model import Model
from tfm_export.tokenizer.huggingface import HuggingFaceTokenizer


@pytest.mark.parametrize("fields", [{}, {"beam_size": 3}, {"sampling_topk": 5, "seed": 1}, {"target_prefix": "p1 p2"}])
def test_a_stream_gives_the_generation_piece_by_piece(model: Model, fields: dict[str, Any]) -> None:
    whole = model.generate("transformer", **fields)
    stream = model.stream("transformer", **fields)
    assert len(whole.tokens) > 2
    assert stream.answer is None
    pieces = list(stream)
    assert [piece.token for piece in pieces] == whole.tokens
    assert "".join(piece.text for piece in pieces) == whole.text
    assert stream.answer is not None
    assert stream.answer.hypotheses == whole.hypotheses


def test_characters_of_several_tokens_come_whole(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are bytes, and some of them one of a pair with a letter: of what is drawn, much is no character."""
    names = [*bytes_to_names("👩\u200d🚀 日本".encode()), "aÃ", "ab", "."]
    size, special = model.step_model.dimensions.target_vocabulary_size, model.bundle.manifest.special_ids
    theirs = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"{names[i % len(names)]}{'.' * (i // len(names))}": i for i in range(size)})
    )
    theirs.decoder = tokenizers.decoders.ByteLevel()
    monkeypatch.setattr(model._runner, "_tokenizer", HuggingFaceTokenizer(theirs, special))
    corrupt = 0
    for seed in range(60):
        stream = model.stream("transformer", sampling_topk=0, seed=seed, sampling_temperature=3.0)
        pieces = list(stream)
        assert stream.answer is not None
        assert [piece.token for piece in pieces] == stream.answer.tokens
        assert "".join(piece.text for piece in pieces) == stream.answer.text
        corrupt += "\ufffd" in stream.answer.text
    assert corrupt > 30


def bytes_to_names(text: bytes) -> list[str]:
    """What ByteLevel calls each byte, once."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [*dict.fromkeys(alphabet.pre_tokenize_str(text.decode())[0][0])]


def test_a_callback_that_ends_a_beam_search_leaves_no_part_of_the_answer_out(model: Model) -> None:
    asked = TextRequest(text="transformer", target_prefix="p1 p2", on_tokens=lambda _: True)
    stream = model.stream(asked, beam_size=4)
    pieces = list(stream)
    assert stream.answer is not None
    assert stream.answer.reason is Reason.CALLBACK
    assert [piece.token for piece in pieces] == stream.answer.tokens
    assert "".join(piece.text for piece in pieces) == stream.answer.text


def test_a_stream_of_ids(model: Model) -> None:
    stream = model.stream_ids([4] * 70, long_source="truncate")
    settled = list(stream)
    assert all(isinstance(item, SettledToken) for item in settled)
    assert stream.answer is not None
    assert [item.token for item in settled] == stream.answer.hypotheses[0].tokens
    assert stream.answer.source_truncated


def test_a_stream_that_is_closed_searches_no_further(model: Model) -> None:
    with model.stream("transformer") as stream:
        next(stream)
    assert list(stream) == []
    assert stream.answer is None
    with pytest.raises(RequestError, match="replace_unknowns needs the whole target"):
        model.stream("hello", replace_unknowns=True)
    with pytest.raises(RequestError, match="the text is empty"):
        model.stream("")


def test_texts_without_end_are_decoded_a_window_at_a_time(model: Model) -> None:
    read = 0

    def texts() -> Iterator[str]:
        nonlocal read
        for word in itertools.cycle(WORDS):
            read += 1
            yield word

    expected = [g.text for g in model.generate(WORDS)]
    generations = model.generate_iterable(texts(), window=4, max_batch_size=2)
    for number, generation in enumerate(itertools.islice(generations, 14)):
        assert generation.text == expected[number % len(WORDS)]
        assert read == number // 4 * 4 + 4
    assert [r.hypotheses[0].tokens for r in model.generate_ids_iterable([[4, 2]])] == [model.generate("a").tokens]


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("window", [None, 1, 4])
def test_several_workers_give_the_same_answers_in_the_same_order(
    model: Model, workers: int, window: int | None
) -> None:
    words = [*WORDS, "", "a1", *reversed(WORDS)]
    settings: dict[str, Any] = {"on_error": "yield", "window": window, "beam_size": 2, "max_batch_size": 2}
    expected, found = (list(model.generate_iterable(words, workers=n, **settings)) for n in (1, workers))
    assert [str(answer) if isinstance(answer, RequestError) else answer.text for answer in found] == [
        str(answer) if isinstance(answer, RequestError) else answer.text for answer in expected
    ]
    ids = [[4, 5, 2], [6, 2], [7, 8, 9, 2], [5, 2], [4, 4, 2]]
    alone, together = (
        [result.hypotheses[0].tokens for result in model.generate_ids_iterable(ids, workers=n, window=window)]
        for n in (1, workers)
    )
    assert together == alone
    with pytest.raises(RequestError, match="the text is empty"):
        list(model.generate_iterable(["hello", "", "a"], workers=workers, window=window))


def test_workers_end_when_nobody_wants_their_answers(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    length, steps, threads = 20, [0], set[threading.Thread]()
    encode = model.step_model.encode

    class Slow:
        """Sentences of which a step takes a while."""

        def __init__(self, sentences: Any) -> None:
            self._sentences = sentences

        def __getattr__(self, name: str) -> Any:
            return getattr(self._sentences, name)

        def step(self, *arguments: Any, **options: Any) -> Any:
            time.sleep(0.02)
            steps[0] += 1
            return self._sentences.step(*arguments, **options)

    def slow(*arguments: Any, **options: Any) -> Any:
        threads.add(threading.current_thread())
        return Slow(encode(*arguments, **options))

    monkeypatch.setattr(model.step_model, "encode", slow)
    settings = {"min_decoding_length": length, "max_decoding_length": length, "max_batch_size": 1, "window": 2}
    answers = model.generate_iterable(["a", "b"] * 100, workers=2, **settings)
    next(answers)  # of the first window, when the second is begun
    before = steps[0]
    answers.close()  # type: ignore[attr-defined]
    assert len(threads) == 2
    assert not [thread for thread in threads if thread.is_alive()]
    assert steps[0] - before < length  # to their end, the two of the second window would take twice as many


@pytest.mark.parametrize("workers", [1, 2])
def test_no_deadline_counts_the_time_of_other_texts_nor_of_whoever_makes_or_reads_them(
    model: Model, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Each text takes a small part of its deadline, all of them together several of it."""
    encode, deadline, words = model.step_model.encode, 0.5, ["hello", "a"] * 40

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.05)
        return encode(*arguments, **options)

    def produced() -> Iterator[str]:
        for number, word in enumerate(words):
            time.sleep(deadline + 0.1 if number == 5 else 0)
            yield word

    monkeypatch.setattr(model.step_model, "encode", slow)
    begin, found = time.perf_counter(), []
    for generation in model.generate_iterable(
        produced(), deadline=deadline, window=40, max_batch_size=2, max_decoding_length=3, workers=workers
    ):
        time.sleep(deadline + 0.1 if len(found) == 20 else 0)  # the next window may have been decoded by then, or not
        found.append(generation)
    assert time.perf_counter() - begin > 3 * deadline
    assert [generation.reason for generation in found if generation.reason is Reason.DEADLINE] == []
    assert [generation.tokens for generation in found[:2]] == [
        generation.tokens for generation in model.generate(words[:2], max_decoding_length=3)
    ]


@pytest.mark.parametrize(
    "settings",
    [{"on_error": "ignore"}, {"window": 0}, {"window": 1.5}, {"workers": 0}, {"workers": "2"}, {"workers": 2000}],
)
def test_a_stream_of_texts_refuses_settings_that_mean_nothing(model: Model, settings: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(settings))):
        list(model.generate_iterable(["hello"], **settings))


def test_an_error_in_a_stream_of_texts_comes_in_its_place(model: Model) -> None:
    words = ["hello", "", "zz", "b4d"]
    generations = model.generate_iterable(words)
    assert next(generations).text == model.generate("hello").text
    with pytest.raises(RequestError, match="the text is empty"):
        next(generations)
    answers = list(model.generate_iterable(iter(words), on_error="yield"))
    assert [type(answer).__name__ for answer in answers] == ["Generation", "RequestError", "Generation", "RequestError"]
    with pytest.raises(RequestError, match="beam_size must be at least 1"):
        model.generate_iterable(words, beam_size=0)


def test_one_sentences_bad_numbers_do_not_lose_the_others(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, expected = model.step_model.encode, [g.text for g in model.generate(WORDS)]

    def overflowing(source_ids: Any, *arguments: Any, **fields: Any) -> Any:
        if (source_ids[:, 0] == 29).any():  # "zz"
            raise NumericError("not finite")
        return encode(source_ids, *arguments, **fields)

    monkeypatch.setattr(model.step_model, "encode", overflowing)
    answers = list(model.generate_iterable(WORDS, on_error="yield"))
    assert [getattr(answer, "text", None) for answer in answers] == [*expected[:5], None]
    assert isinstance(answers[5], NumericError)
