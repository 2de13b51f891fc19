"""The loaded model: what it answers, what it refuses, and that threads do not disturb each other."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tfm_export
import tfm_export.tokenizer
from tests.conftest import build_tiny_model
from tfm_export import BundleError, NumericError, RequestError
from tfm_export.bundle import MANIFEST, Bundle
from tfm_export.decoding import DecodeOptions, Reason, Request, SettledToken
from tfm_export.model import Model, TextRequest
from tfm_export.model.requests import Call

ROOT = Path(__file__).parent.parent
WORDS = ["hello", "parity", "a", "don't", "transformer", "zz"]


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> Iterator[Model]:
    with tfm_export.load(tiny_bundle) as loaded:
        yield loaded


@pytest.fixture
def copied(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A bundle to damage."""
    return shutil.copytree(tiny_bundle, tmp_path / "bundle")


def rewrite_manifest(bundle: Path, **fields: Any) -> None:
    state = json.loads((bundle / MANIFEST).read_text())
    (bundle / MANIFEST).write_text(json.dumps({**state, **fields}))


def test_generations_are_those_of_the_reference_search(model: Model) -> None:
    import torch

    from reference_model import SpecialIds
    from reference_model.search import greedy

    reference = build_tiny_model(0, norm_first=True, final_norm=True)
    for word, generation in zip(WORDS, model.generate(WORDS), strict=True):
        ids = torch.tensor([model.encode_text(word).ids])
        expected = greedy(reference, ids, torch.ones_like(ids, dtype=torch.bool), SpecialIds(), 30)[0]
        assert generation.tokens == expected.tokens
        assert generation.hypotheses[0].log_probs == pytest.approx(expected.log_probs, abs=1e-4)
        assert generation.text == " ".join(f"p{i - 4}" for i in expected.tokens)


def test_one_text_gives_one_generation(model: Model) -> None:
    one, many = model.generate("hello"), model.generate(["hello"])
    assert (one.text, one.tokens) == (many[0].text, many[0].tokens)
    assert one.score == one.hypotheses[0].score
    assert not one.source_truncated
    assert one.statistics.steps >= len(one.tokens)
    assert model.generate([]) == []


def test_several_hypotheses_come_with_their_texts(model: Model) -> None:
    generation = model.generate("hello", beam_size=3, num_hypotheses=3)
    assert len(generation.texts) == len(set(generation.texts)) == 3
    assert generation.texts == [model.tokenizer.decode_target(h.tokens) for h in generation.hypotheses]


def test_ids_in_ids_out(model: Model) -> None:
    ids = [model.encode_text(word).ids for word in WORDS]
    assert ids[2] == [4, 2]
    results = model.generate_ids([np.array(ids[0]), *ids[1:]])
    assert [r.hypotheses[0].tokens for r in results] == [g.tokens for g in model.generate(WORDS)]


def test_the_bundles_defaults_hold_unless_a_request_says_otherwise(copied: Path) -> None:
    generation = {"max_length": 7, "beam_size": 3, "length_penalty": 0.5}
    rewrite_manifest(copied, generation=generation)
    with tfm_export.load(copied) as model:
        assert len(model.generate("hello").tokens) <= 7
        options = model.decode_options()
        assert (options.max_decoding_length, options.beam_size, options.length_penalty) == (7, 3, 0.5)
        assert model.decode_options(beam_size=2, max_decoding_length=9).beam_size == 2
        assert model.decode_options(sampling_topk=5).beam_size == 1  # beams and draws exclude each other
        assert model.decode_options(DecodeOptions()) == DecodeOptions()


def test_lengths_beyond_the_table_are_refused(model: Model) -> None:
    with pytest.raises(RequestError, match="max_decoding_length is 65; the model's targets have at most 64 tokens"):
        model.generate("hello", max_decoding_length=65)
    assert model.generate("hello", max_decoding_length=64).tokens


def test_options_come_in_one_way(model: Model) -> None:
    with pytest.raises(RequestError, match="options were given, and beam_size beside them"):
        model.generate("hello", options=DecodeOptions(), beam_size=2)
    with pytest.raises(RequestError, match="beam_size must be at least 1"):
        model.generate("hello", beam_size=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the text is empty"),
        ("  ", "the text is empty"),
        ("naïve 1", r"'naïve 1' has characters that the model does not know: ' ' '1' 'ï'"),
        ("a\udcffb", "the text is not UTF-8: byte 0xff at place 1"),
        ("\ud800", r"the text is not UTF-8: code point U\+D800 at place 0"),
        (b"hello", "a text must be a str, found bytes"),
        ([5, 6], "a text must be a str, found int"),
    ],
)
def test_texts_that_cannot_be_served(model: Model, text: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        model.generate([text] if isinstance(text, bytes) else text)


@pytest.mark.parametrize("found", [None, 5, 1.5])
def test_what_is_no_text_and_no_sequence_is_refused(model: Model, found: Any) -> None:
    with pytest.raises(RequestError, match=f"expected a text, or a sequence with a text each, found {found}"):
        model.generate(found)
    with pytest.raises(RequestError, match=f"expected a source, or a sequence with a source each, found {found}"):
        model.generate_ids(found)


def test_all_that_is_wrong_is_told_before_anything_runs(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.step_model, "encode", lambda *_, **__: pytest.fail("the encoder ran"))
    with pytest.raises(RequestError) as error:
        model.generate(["hello", "", "a1"])
    assert error.value.problems == [
        "text 1: the text is empty",
        "text 2: 'a1' has characters that the model does not know: '1'",
    ]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the source is empty"),
        ([4, 31], "ids must be from 0 to 30, found 31"),
        ([-1], "ids must be from 0 to 30, found -1"),
        ([4, 4.5, "a"], "ids must be integers, found 4.5, 'a'"),
        (4, "ids must be integers, one for each token, found 4"),
    ],
)
def test_ids_that_cannot_be_served(model: Model, ids: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        model.generate_ids([ids])


def test_long_sources_are_refused_or_cut_and_it_is_told(model: Model) -> None:
    longest, longer = "a" * 63, "a" * 80
    assert not model.generate(longest).source_truncated
    with pytest.raises(RequestError, match="the source has 81 tokens; the model takes at most 64"):
        model.generate(longer)
    cut = model.generate(["b", longer], long_source="truncate")
    assert [g.source_truncated for g in cut] == [False, True]
    by_ids = model.generate_ids([[4, 2], [4] * 80 + [2]], long_source="truncate")
    assert [r.source_truncated for r in by_ids] == [False, True]
    assert cut[1].tokens == model.generate(longest).tokens  # 63 letters and the end token, which is kept
    assert model.encode_text(longer, long_source="truncate").ids == [4] * 63 + [2]
    assert model.check_ids([4] * 80, long_source="truncate").ids == [4] * 64
    with pytest.raises(RequestError, match="long_source must be one of refuse, truncate, found 'cut'"):
        model.generate("a", long_source="cut")  # type: ignore[call-overload]


def test_sources_without_end_token_are_cut_at_the_end(model: Model) -> None:
    manifest = model.bundle.manifest
    special = replace(manifest.special_ids, source_ends_with_eos=False)
    bundle = Bundle(model.bundle.path, replace(manifest, special_ids=special))
    plain = Model(bundle, model.step_model, model.tokenizer)
    assert plain.check_ids([4] * 70 + [2], long_source="truncate").ids == [4] * 64


def test_eight_threads_get_what_one_gets(model: Model) -> None:
    expected = [model.generate(word, max_decoding_length=20) for word in WORDS]
    beams = model.generate(WORDS, beam_size=2, max_decoding_length=12)

    def work(number: int) -> bool:
        for turn in range(4):
            index = (number + turn) % len(WORDS)
            alone = model.generate(WORDS[index], max_decoding_length=20)
            same = alone.hypotheses == expected[index].hypotheses
            together = model.generate(WORDS, beam_size=2, max_decoding_length=12)
            if not same or [g.hypotheses for g in together] != [g.hypotheses for g in beams]:
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_requests_have_options_of_their_own(model: Model) -> None:
    plain, *own = model.generate(
        [
            "hello",
            TextRequest(text="hello", target_prefix="p20 p21"),
            TextRequest(text="hello", target_prefix=[24]),
            TextRequest(text="hello", deadline=0),
            TextRequest(text="hello", constraint=lambda tokens: {7} if len(tokens) < 2 else {2}),
        ]
    )
    assert plain.text == model.generate("hello").text
    assert [g.tokens[:2] for g in own[:2]] == [[24, 25], [24, own[1].tokens[1]]]
    assert (own[2].tokens, own[2].reason) == ([], Reason.DEADLINE)
    assert own[3].text == "p3 p3"
    drawn = model.generate([TextRequest(text="zz", seed=seed) for seed in (1, 2, 1)], sampling_topk=0)
    assert drawn[0].tokens == drawn[2].tokens != drawn[1].tokens


def test_a_call_can_be_given_up(model: Model) -> None:
    given_up = threading.Event()
    given_up.set()
    assert model.generate("hello", cancelled=given_up).reason is Reason.CANCELLED
    assert model.generate_ids([[4, 2]], deadline=0)[0].reason is Reason.DEADLINE
    own = TextRequest(text="hello", cancelled=threading.Event())
    assert model.generate(own, cancelled=given_up).reason is Reason.CANCELLED
    assert model.generate(replace(own, cancelled=given_up), cancelled=threading.Event()).reason is Reason.CANCELLED


def test_targets_in_options_may_be_text(model: Model) -> None:
    options = model.decode_options(target_prefix="p1 p2", suppress_sequences=["p3", [4, 5]])
    assert (options.target_prefix, options.suppress_sequences) == ((5, 6), ((7,), (4, 5)))
    with pytest.raises(RequestError, match="'p99' has words that the model does not know"):
        model.generate("hello", target_prefix="p99")
    special = replace(model.bundle.manifest.special_ids, unk=3)
    bundle = Bundle(model.bundle.path, replace(model.bundle.manifest, special_ids=special))
    with_unk = Model(bundle, model.step_model, tfm_export.tokenizer.load_tokenizer(bundle))
    with pytest.raises(RequestError, match="'p1 p99' has tokens that the model's targets do not have"):
        with_unk.decode_options(target_prefix="p1 p99")


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


def test_time_spent_waiting_for_a_thread_counts() -> None:
    call = Call(options=DecodeOptions(), deadline=10.0, begin=time.perf_counter() - 4)
    assert 5.0 < (call.request(Request(source=[4])).deadline or 0) < 6.1
    assert call.request(Request(source=[4], deadline=1.0)).deadline == 0
    assert Call(options=DecodeOptions()).request(Request(source=[4])).deadline is None


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


def test_scores_are_the_log_probabilities_of_decoding(model: Model) -> None:
    generations = model.generate(WORDS)
    scores = model.score(WORDS, [g.text for g in generations], max_batch_size=2)
    for generation, values in zip(generations, scores, strict=True):
        log_probs = generation.hypotheses[0].log_probs
        assert values[: len(log_probs)] == pytest.approx(log_probs, abs=1e-4)
        assert len(values) == len(generation.tokens) + 1
    assert len(model.score_ids([[4, 2]], [[5, 6]], add_end_token=False)[0]) == 2
    with pytest.raises(RequestError, match="there must be a target for each text, found 2 and 1"):
        model.score(["a", "b"], ["p1"])
    with pytest.raises(RequestError) as error:
        model.score(["", "b"], ["p1", "q"])
    assert error.value.problems == [
        "pair 0: the text is empty",
        "pair 1: 'q' has words that the model does not know: 'q'",
    ]


class Attending:
    """The tiny model of PyTorch, which makes one that gives attention, and counts how often."""

    def __init__(self, limits: Any) -> None:
        from tfm_export.runtime.torch_model import TorchModel

        self.reference = build_tiny_model(0, norm_first=True, final_norm=True)
        self.plain = TorchModel(self.reference, limits=limits)
        self.attending = TorchModel(self.reference, limits=limits, attention_layer=1)
        self.made = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def with_attention(self) -> Any:
        self.made += 1
        return self.attending


@pytest.fixture
def attending(model: Model) -> Model:
    """A model that gives attention, and has an unknown token."""
    manifest = model.bundle.manifest
    bundle = Bundle(model.bundle.path, replace(manifest, special_ids=replace(manifest.special_ids, unk=3)))
    return Model(bundle, Attending(manifest.limits), tfm_export.tokenizer.load_tokenizer(bundle))


def test_attention_is_loaded_when_it_is_wanted_and_once(attending: Model) -> None:
    assert attending.generate("hello").hypotheses[0].attention is None
    assert attending.step_model.made == 0
    for _ in range(2):
        best = attending.generate(["a", "hello"], return_attention=True)[1].hypotheses[0]
        assert best.attention.shape == (len(best.tokens), 6)
        np.testing.assert_allclose(best.attention.sum(1), 1, atol=1e-5)
    assert attending.generate("hello", beam_size=2, coverage_penalty=0.2).hypotheses
    assert attending.step_model.made == 1


def test_unknown_tokens_are_replaced_by_what_they_attend_to(attending: Model) -> None:
    request = TextRequest(text="Naïve", target_prefix=[3, 5, 3])
    plain = attending.generate(request, return_attention=True)
    weights = plain.hypotheses[0].attention[:, :5]  # the end token is no word
    expected = plain.text.split()
    assert [expected[0], expected[2]] == ["<unk>", "<unk>"]
    expected[0], expected[2] = ("Naïve"[i] for i in weights[[0, 2]].argmax(1))
    replaced = attending.generate(request, replace_unknowns=True)
    assert replaced.text.split() == expected
    assert replaced.tokens == plain.tokens


def test_a_bundle_without_the_graph_for_attention_says_how_to_get_it(model: Model) -> None:
    with pytest.raises(
        RequestError, match=r"decoder_step_attention\.onnx.*\nTry: tfm-export onnx CHECKPOINT --attention"
    ):
        model.generate("hello", return_attention=True)


def test_a_closed_model_answers_nothing(tiny_bundle: Path) -> None:
    with tfm_export.load(tiny_bundle, threads=1) as model:
        model.warm_up()
    model.close()  # a second time does no harm
    requests = (
        lambda: model.generate("a"),
        lambda: model.generate_ids([[4]]),
        lambda: model.generate_iterable(["a"]),
        lambda: model.stream("a"),
        lambda: model.score_ids([[4]], [[5]]),
        model.warm_up,
    )
    for request in requests:
        with pytest.raises(RequestError, match="the model is closed"):
            request()


def test_a_bundle_without_tokenizer_takes_ids(copied: Path) -> None:
    files = json.loads((copied / MANIFEST).read_text())["files"]
    rewrite_manifest(copied, files={k: v for k, v in files.items() if not k.startswith("tokenizer/")})
    with tfm_export.load(copied) as model:
        assert model.tokenizer is None
        assert model.generate_ids([[4, 5, 2]])[0].hypotheses
        with pytest.raises(RequestError, match="has no tokenizer: it takes ids, not text"):
            model.generate("a")


def test_damaged_bundles_are_refused(copied: Path) -> None:
    graph = copied / "onnx" / "fp32" / "decoder_step.onnx"
    content = bytearray(graph.read_bytes())
    content[len(content) // 2] ^= 1
    graph.write_bytes(content)
    with pytest.raises(BundleError, match=r"decoder_step\.onnx was altered"):
        tfm_export.load(copied)
    graph.unlink()
    (copied / "onnx" / "fp32" / "encoder.onnx").write_bytes(b"")
    with pytest.raises(BundleError) as error:
        tfm_export.load(copied, check_hashes=False)
    assert len(error.value.problems) == 2
    assert "decoder_step.onnx is missing" in error.value.problems[0] + error.value.problems[1]


def test_only_what_is_used_is_read_through(copied: Path) -> None:
    with open(copied / "golden.jsonl", "r+b") as file:
        file.write(b"#")
    with tfm_export.load(copied) as model:
        assert model.generate("hello").text
    with pytest.raises(BundleError, match=r"golden\.jsonl was altered"):
        Bundle.open(copied)
    (copied / "golden.jsonl").unlink()  # but all is to be there
    with pytest.raises(BundleError, match=r"golden\.jsonl is missing"):
        tfm_export.load(copied)


def test_newer_bundles_are_refused(copied: Path) -> None:
    rewrite_manifest(copied, format_version=99)
    with pytest.raises(BundleError, match="has format version 99; this tfm-export reads up to"):
        tfm_export.load(copied)


def test_a_folder_that_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is not a bundle"):
        tfm_export.load(tmp_path)
    with pytest.raises(BundleError, match="is not a bundle"):
        tfm_export.load(tmp_path / "nowhere")


def imported(script: str) -> set[str]:
    """The modules that a script leaves behind."""
    script += "\nimport sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(run.stdout.splitlines()[-1].split())


def test_the_package_itself_is_light() -> None:
    script = "import tfm_export; tfm_export.RequestError; assert 'load' in dir(tfm_export); tfm_export.__version__"
    assert not imported(script) & {"numpy", "torch", "onnx", "onnxruntime", "click", "tfm_export.model"}


def test_service_needs_neither_torch_nor_onnx(tiny_bundle: Path) -> None:
    script = f"import tfm_export; print(tfm_export.load({str(tiny_bundle)!r}).generate('hello').text)"
    modules = imported(script)
    assert "onnxruntime" in modules
    assert not modules & {"torch", "onnx", "onnxscript", "reference_model", "transformers", "tensorrt"}


def test_names_that_are_not_there() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = tfm_export.nonsense  # type: ignore[attr-defined]
