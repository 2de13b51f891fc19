"""The example service: batches form, errors stay with their texts, nothing that was taken is lost at the end."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import pytest

import tfm_export
from examples.embed_engine import service
from examples.embed_engine.batcher import Batcher, ClosingError, OverloadedError
from tests.skips import ON_LINUX, skip_if
from tfm_export import DecodeOptions, Model, NumericError, RequestError, TextRequest

ROOT = Path(__file__).parents[2]
TEXTS = ["hello", "parity", "a", "don't", "transformer", "x", "checkpoint", "graphene", "ab", "bundle"]
OPTIONS = DecodeOptions(max_decoding_length=30)  # what the bundle says, too


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> Iterator[Model]:
    with tfm_export.load(tiny_bundle, device="cpu", threads=1) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def expected(model: Model) -> dict[str, str]:
    """What each text gives alone."""
    return {text: model.generate(text, options=OPTIONS).text for text in TEXTS}


class Held:
    """Keeps a batcher's thread in the middle of a batch until it is let go."""

    def __init__(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Semaphore(0), threading.Event()
        self.batches: list[list[str]] = []
        iterate = model.generate_iterable

        def held(texts: Any, **settings: Any) -> Any:
            requests = list(texts)
            self.batches.append([request.text for request in requests])
            self.begun.release()
            assert self.go.wait(30)
            return iterate(requests, **settings)

        monkeypatch.setattr(model, "generate_iterable", held)


def test_texts_of_many_threads_are_decoded_together_and_right(model: Model, expected: dict[str, str]) -> None:
    batcher = Batcher(model, OPTIONS, max_batch_size=8, max_wait=0.05, workers=2)
    many = TEXTS * 6
    with ThreadPoolExecutor(len(many)) as threads:
        answers = threads.map(lambda text: batcher.submit(TextRequest(text=text)).result(60).text, many)
        assert list(answers) == [expected[text] for text in many]
    batcher.close(seconds=5)
    assert batcher.counts.answered == len(many)
    assert len(many) / 8 <= batcher.counts.batches < len(many) / 3


def test_a_text_waits_for_others_only_so_long(model: Model, expected: dict[str, str]) -> None:
    batcher = Batcher(model, OPTIONS, max_wait=0.2)
    begin = time.monotonic()
    assert batcher.submit(TextRequest(text="hello")).result(60).text == expected["hello"]
    assert time.monotonic() - begin >= 0.2
    begin = time.monotonic()
    batcher._max_batch_size = 1  # full at once
    batcher.submit(TextRequest(text="a")).result(60)
    assert batcher.counts.waited < 0.4
    batcher.close(seconds=5)
    assert batcher.counts.batches == 2


def test_a_bad_text_spoils_nobody_elses_batch(
    model: Model, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = Batcher(model, OPTIONS, max_wait=0.1)
    with pytest.raises(RequestError, match="the text is empty"):
        batcher.submit(TextRequest(text=""))
    # One that fails only when it is decoded.
    answers = model._runner.answers

    def failing(sources: Any, *others: Any) -> Any:
        if any(one.text == "a" for one in sources):
            raise NumericError("not a number")
        return answers(sources, *others)

    monkeypatch.setattr(model._runner, "answers", failing)
    futures = {text: batcher.submit(TextRequest(text=text)) for text in TEXTS}
    for text, future in futures.items():
        if text == "a":
            with pytest.raises(NumericError):
                future.result(60)
        else:
            assert future.result(60).text == expected[text]
    batcher.close(seconds=5)
    assert (batcher.counts.failed, batcher.counts.refused) == (1, 1)


def test_a_bug_reaches_the_callers_and_the_thread_goes_on(
    model: Model, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batcher = Batcher(model, OPTIONS, max_wait=0)
    with monkeypatch.context() as broken:
        broken.setattr(model, "generate_iterable", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            batcher.submit(TextRequest(text="hello")).result(60)
    assert "a batch of 1 texts failed" in caplog.text
    assert batcher.submit(TextRequest(text="hello")).result(60).text == expected["hello"]
    batcher.close(seconds=5)


def test_more_than_may_wait_are_refused_and_cancelled_ones_are_left_out(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(model, monkeypatch)
    batcher = Batcher(model, OPTIONS, max_wait=0, max_waiting=3)
    first = batcher.submit(TextRequest(text="hello"))
    assert held.begun.acquire(timeout=30)
    waiting = [batcher.submit(TextRequest(text=text)) for text in ("a", "x", "ab")]
    with pytest.raises(OverloadedError, match="3 texts wait already"):
        batcher.submit(TextRequest(text="parity"))
    assert waiting[1].cancel()
    assert not first.cancel()
    held.go.set()
    assert [future.result(60).text != "" for future in (first, waiting[0], waiting[2])] == [True] * 3
    batcher.close(seconds=5)
    assert held.batches == [["hello"], ["a", "ab"]]


def test_the_time_in_the_queue_counts_for_the_deadline(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(model, monkeypatch)
    batcher = Batcher(model, OPTIONS, max_wait=0)
    batcher.submit(TextRequest(text="hello"))
    assert held.begun.acquire(timeout=30)
    late = batcher.submit(TextRequest(text="parity", deadline=0.01))
    time.sleep(0.02)
    held.go.set()
    answer = late.result(60)
    assert (answer.reason.value, answer.tokens) == ("deadline", [])
    batcher.close(seconds=5)


def test_what_was_taken_is_answered_before_the_end(
    model: Model, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(model, monkeypatch)
    batcher = Batcher(model, OPTIONS, max_batch_size=2, max_wait=10)
    futures = [batcher.submit(TextRequest(text=text)) for text in TEXTS[:5]]
    assert held.begun.acquire(timeout=30)
    closing = threading.Thread(target=batcher.close, kwargs={"seconds": 30})
    closing.start()
    while not batcher._closing:
        time.sleep(0.001)
    with pytest.raises(ClosingError):
        batcher.submit(TextRequest(text="late"))
    held.go.set()
    assert [future.result(60).text for future in futures] == [expected[text] for text in TEXTS[:5]]
    closing.join(60)
    assert not closing.is_alive()


def test_without_time_those_that_wait_are_told_and_the_others_give_what_they_have(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(model, monkeypatch)
    batcher = Batcher(model, OPTIONS, max_batch_size=1, max_wait=0)
    first, second = (batcher.submit(TextRequest(text=text)) for text in ("hello", "parity"))
    assert held.begun.acquire(timeout=30)
    closing = threading.Thread(target=batcher.close, kwargs={"seconds": 0})
    closing.start()
    with pytest.raises(ClosingError):
        second.result(60)
    held.go.set()
    assert first.result(60).reason.value == "cancelled"
    closing.join(60)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "the body must be"),
        (b'{"texts": []}', "the body must be"),
        (b'{"texts": ["a", 1]}', "the body must be"),
        (json.dumps({"texts": ["a"] * 257}).encode(), "up to 256 texts, found 257"),
        (b'{"texts": ["a"], "deadline": -1}', "deadline must be a number of seconds"),
        (b'{"texts": ["a"], "deadline": NaN}', "deadline must be a number of seconds"),
        (b'{"texts": ["a"], "deadline": true}', "deadline must be a number of seconds"),
    ],
)
def test_a_body_that_is_none(body: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        service.parse(body)


class Process:
    """The service as a process of its own."""

    def __init__(self, bundle: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "examples.embed_engine", str(bundle), "--device", "cpu", "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--threads", "1", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline()
        found = re.search(r":(\d+):", self.first_line)
        self.port = int(found[1]) if found else 0

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, str]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, body)
            with closing(connection.getresponse()) as response:
                return response.status, response.read().decode()

    def generate(self, **state: Any) -> tuple[int, dict[str, Any]]:
        status, text = self.ask("POST", "/generate", json.dumps(state).encode())
        return status, json.loads(text)

    def end(self) -> tuple[int, str, str]:
        output, errors = self.process.communicate(timeout=60)
        return self.process.returncode, output, errors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def running(tiny_bundle: Path) -> Iterator[Process]:
    with Process(tiny_bundle, "--max-wait", "20") as process:
        assert "fp32 with ONNX Runtime on the CPU" in process.first_line
        yield process


@pytest.mark.slow
@skip_if(sys.platform == "win32", "SIGTERM", *ON_LINUX)
def test_the_service_answers_and_ends_in_order(running: Process, expected: dict[str, str]) -> None:
    assert running.ask("GET", "/health")[0] == 200
    assert running.ask("GET", "/nowhere")[0] == running.ask("POST", "/nowhere", b"{}")[0] == 404
    assert running.ask("POST", "/generate", b"{")[0] == 400
    assert running.ask("POST", "/generate", b" " * (service.LARGEST_BODY + 1))[0] == 413

    status, found = running.generate(texts=["hello", "", "parity"])
    assert status == 200
    assert [one.get("text") for one in found["answers"]] == [expected["hello"], None, expected["parity"]]
    assert "the text is empty" in found["answers"][1]["error"]
    assert running.generate(texts=[""])[0] == 422
    assert running.generate(texts=["hello"], deadline=0)[1]["answers"][0]["reason"] == "deadline"
    assert "embed_engine_answered 3" in running.ask("GET", "/metrics")[1].splitlines()

    # A connection that asks nothing more must not keep the service from ending.
    with closing(http.client.HTTPConnection("127.0.0.1", running.port)) as idle:
        idle.request("GET", "/health")
        idle.getresponse().read()
        running.process.send_signal(signal.SIGTERM)
        code, output, errors = running.end()
    assert (code, "Traceback" in errors, "ended in" in output) == (0, False, True), errors


@pytest.mark.slow
@skip_if(sys.platform == "win32", "SIGTERM", *ON_LINUX)
def test_the_service_ends_in_the_middle_of_much_work(running: Process, expected: dict[str, str]) -> None:
    with ThreadPoolExecutor(16) as threads:
        answers = [threads.submit(running.generate, texts=[text]) for text in TEXTS * 5]
        answers[0].result(60)
        running.process.send_signal(signal.SIGTERM)
        codes = []
        for text, answer in zip(TEXTS * 5, answers, strict=True):
            try:
                status, state = answer.result(60)
            except OSError:  # it came after the service stopped listening
                continue
            codes.append(status)
            assert status == 503 or state["answers"][0]["text"] == expected[text]
    assert codes.count(200) >= 1
    code, output, errors = running.end()
    assert (code, "Traceback" in errors) == (0, False), errors
    counts = re.search(r"answered=(\d+), failed=(\d+)", output)
    assert counts
    assert (int(counts[1]), int(counts[2])) == (codes.count(200), 0)  # what was answered has arrived


@pytest.mark.slow
def test_a_bundle_that_is_none_and_a_port_that_is_taken(tiny_bundle: Path, tmp_path: Path) -> None:
    with Process(tmp_path) as nothing:
        code, _, errors = nothing.end()
    assert (code, "is not a bundle" in errors) == (1, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with Process(tiny_bundle, "--port", port) as second:
            code, _, errors = second.end()
    assert (code, "cannot be listened on" in errors) == (1, True), errors
    assert "Traceback" not in errors


def test_the_readme_shows_options_that_there_are() -> None:
    text = (ROOT / "examples/embed_engine/README.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"--[a-z][a-z-]+", text))
    main = (ROOT / "examples/embed_engine/__main__.py").read_text(encoding="utf-8")
    assert shown <= set(re.findall(r"--[a-z][a-z-]+", main)) | {"--fp16", "--inputs"}
    assert os.access(ROOT / "examples/embed_engine/batcher.py", os.R_OK)
