"""The server as a process: what clients get, what is refused, and that nothing which was taken is lost."""

from __future__ import annotations

import gzip
import http.client
import json
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

import tfm_export
from tests.serve.conftest import Running, Start
from tfm_export.model import Model

GENERATE, STREAM, INFER = (f"/v2/models/tiny/{name}" for name in ("generate", "generate_stream", "infer"))
WORDS = ["hello", "parity", "a", "don't", "transformer", "zz"]


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> Model:
    return tfm_export.load(tiny_bundle)


def test_health_and_metadata(server: Running) -> None:
    assert server.ask("/v2/health/live")[0] == server.ask("/v2/health/ready")[0] == 200
    assert server.ask("/v2")[2]["name"] == "tfm-export"
    told = server.ask("/v2/models/tiny")[2]
    assert (told["versions"], told["inputs"][0]["name"]) == (["1"], "text_input")
    assert server.ask("/v2/models/tiny/versions/1/ready")[0] == 200
    assert server.ask("/v2/repository/index", b"")[2] == [{"name": "tiny", "version": "1", "state": "READY"}]


@pytest.mark.parametrize(
    "parameters",
    [{}, {"beam_size": 3, "num_hypotheses": 2}, {"sampling_topk": 5, "seed": 3}, {"max_decoding_length": 3}],
)
def test_generate_gives_what_the_library_gives(server: Running, model: Model, parameters: dict[str, Any]) -> None:
    for word in WORDS:
        status, _, told = server.ask(GENERATE, {"text_input": word, "parameters": parameters})
        expected = model.generate(word, **parameters)
        assert (status, told["text_output"], told["reason"]) == (200, expected.text, expected.reason.value)
        assert told["score"] == pytest.approx(expected.score, abs=1e-4)  # batch mates change the last digits
        if len(expected.texts or ()) > 1:
            assert [one["text_output"] for one in told["hypotheses"]] == expected.texts


def test_streams_are_events_whose_texts_are_the_answer(server: Running, model: Model) -> None:
    status, headers, body = server.ask(STREAM, {"text_input": "transformer"})
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    events = [json.loads(event.removeprefix("data: ")) for event in body.strip().split("\n\n")]
    assert "".join(event["text_output"] for event in events) == model.generate("transformer").text
    assert events[-1]["reason"] == "end token"
    assert server.ask(STREAM, {"text_input": ""})[0] == 400


def test_infer_takes_texts_and_gives_tensors(server: Running, model: Model) -> None:
    texts = {"name": "text_input", "datatype": "BYTES", "shape": [3, 1], "data": [["hello"], ["a"], ["zz"]]}
    status, _, told = server.ask(INFER, {"id": "7", "inputs": [texts], "parameters": {"beam_size": 2}})
    outputs = {output["name"]: output for output in told["outputs"]}
    assert (status, told["id"], outputs["text_output"]["shape"]) == (200, "7", [3, 1])
    answers = model.generate(["hello", "a", "zz"], beam_size=2)
    assert outputs["text_output"]["data"] == [answer.text for answer in answers]
    longest = max(len(answer.tokens) for answer in answers)
    assert outputs["output_ids"]["shape"] == [3, 1, longest]
    assert outputs["output_ids"]["data"][:longest] == answers[0].tokens + [0] * (longest - len(answers[0].tokens))


def test_infer_takes_ids_as_bytes_and_compressed(server: Running, model: Model) -> None:
    sources = [model.encode_text(word).ids for word in ("hello", "a")]
    ids = np.zeros((2, len(sources[0])), "<i8")
    for row, source in enumerate(sources):
        ids[row, : len(source)] = source
    lengths = np.array([len(source) for source in sources], "<i4")
    contents = [ids.tobytes(), lengths.tobytes()]
    tensors = [
        {"name": name, "datatype": kind, "shape": list(array.shape), "parameters": {"binary_data_size": len(content)}}
        for name, kind, array, content in zip(
            ("input_ids", "input_lengths"), ("INT64", "INT32"), (ids, lengths), contents, strict=True
        )
    ]
    header = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
    body = gzip.compress(b"".join([header, *contents]))
    headers = {"Inference-Header-Content-Length": str(len(header)), "Content-Encoding": "gzip"}
    address = urlsplit(server.address)
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    connection.request("POST", INFER, body, headers)
    answer = connection.getresponse()
    content, length = answer.read(), int(answer.headers["inference-header-content-length"])
    connection.close()
    outputs, place = {}, length
    for output in json.loads(content[:length])["outputs"]:
        size = output["parameters"]["binary_data_size"]
        outputs[output["name"]] = content[place : place + size]
        place += size
    assert place == len(content)
    found = np.frombuffer(outputs["output_lengths"], "<i8").tolist()
    assert found == [len(answer.tokens) for answer in model.generate_ids(sources)]


BAD: list[tuple[str, Any, int, str]] = [
    (GENERATE, b"{", 400, "not JSON"),
    (GENERATE, b"[1]", 400, "must be a JSON object"),
    (GENERATE, b"[" * 2000, 400, "not JSON"),
    (GENERATE, {}, 400, "text_input must be a string"),
    (GENERATE, {"text_input": "a", "more": 1}, 400, "there is no field 'more'"),
    (GENERATE, {"text_input": "a", "parameters": 3}, 400, "parameters must be an object"),
    (GENERATE, {"text_input": "a", "parameters": {"beams": 3, "x": 1}}, 400, "parameter 'x' is unknown"),
    (GENERATE, {"text_input": "a", "parameters": {"beam_size": 0}}, 400, "beam_size must be at least 1"),
    (GENERATE, {"text_input": "a", "parameters": {"beam_size": 99}}, 400, "beam_size must be at most 16 here"),
    (GENERATE, {"text_input": "a", "parameters": {"deadline": "soon"}}, 400, "deadline must be a float"),
    (GENERATE, {"text_input": "a", "parameters": {"constraint": [1]}}, 400, "parameter 'constraint' is unknown"),
    (GENERATE, {"text_input": "a" * 500}, 400, "tokens; the model takes at most"),
    (GENERATE, {"text_input": "a", "parameters": {"deadline": 0}}, 504, "time was over"),
    (GENERATE, {"text_input": "a" * 5000}, 413, "at most 4,096 bytes"),
    ("/v2/models/none/generate", {"text_input": "a"}, 404, "model 'none' is not loaded"),
    ("/v2/models/tiny/versions/2/generate", {"text_input": "a"}, 404, "no version '2'"),
    ("/v2/nothing", {}, 404, "there is no POST /v2/nothing"),
    (INFER, {}, 400, "inputs must be a list"),
    (INFER, {"inputs": [{"name": "text_input"}]}, 400, "datatype must be one of BYTES"),
    (INFER, {"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}, 400, "no input 'x'"),
    (INFER, {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [2], "data": ["a"]}]}, 400, "2 elements"),
    (
        INFER,
        {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [9], "data": ["a"] * 9}]},
        400,
        "at most 8",
    ),
    (
        INFER,
        {"inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [1, 1], "data": [999]}]},
        400,
        "lacks: 999",
    ),
    (
        INFER,
        {"inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [1, 1], "data": [2**70]}]},
        400,
        "input_ids",
    ),
    ("/v2/repository/models/tiny/unload", b"", 403, "--model-control"),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), BAD)
def test_what_cannot_be_served_is_told(server: Running, path: str, body: Any, status: int, message: str) -> None:
    found, _, told = server.ask(path, body)
    assert found == status
    assert message in told["error"]
    assert "Traceback" not in told["error"]
    assert server.ask("/v2/health/ready")[0] == 200


def test_a_decompressed_body_is_no_larger_than_it_may_be(server: Running) -> None:
    bomb = gzip.compress(b'{"text_input": "' + b"a" * (1 << 20) + b'"}')
    assert len(bomb) < 4096
    assert server.ask(GENERATE, bomb, headers={"Content-Encoding": "gzip"})[0] == 413
    assert server.ask(GENERATE, b"no gzip", headers={"Content-Encoding": "gzip"})[0] == 400
    assert server.ask(GENERATE, b"x", headers={"Content-Encoding": "br"})[0] == 415


def test_numbers_pages_and_the_description(server: Running) -> None:
    server.ask(GENERATE, {"text_input": "hello"})
    numbers = server.ask("/metrics")[2]
    assert 'tfm_export_answers_total{model="tiny",outcome="end token"}' in numbers
    assert "tfm_export_batch_size_bucket" in numbers
    described = server.ask("/openapi.json")[2]
    assert {"/v2/models/{model}/generate", "/v2/models/{model}/infer", "/metrics"} <= described["paths"].keys()
    page = server.ask("/docs")[2]
    assert "/v2/models/{model}/generate_stream" in page
    assert "http" not in page.replace("https://", "").replace("HTTP", "")[:200]


def test_requests_of_clients_that_have_gone_are_given_up(server: Running) -> None:
    address = urlsplit(server.address)
    for _ in range(20):
        with socket.create_connection((address.hostname, address.port)) as client:
            body = b'{"text_input": "transformer"}'
            client.sendall(
                b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (GENERATE.encode(), len(body), body)
            )
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(b"GET nonsense\r\n\r\n" + bytes(range(256)))
    assert server.ask(GENERATE, {"text_input": "hello"})[0] == 200


def test_keys_are_asked_for_and_health_needs_none(start: Start, tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first\nsecond\n")
    server = start(tiny_bundle, "--name", "tiny", "--api-keys", tmp_path / "keys")
    body = {"text_input": "a"}
    assert server.ask("/v2/health/ready")[0] == 200
    assert [server.ask(path, given)[0] for path, given in ((GENERATE, body), ("/metrics", None), ("/docs", None))] == [
        401
    ] * 3
    assert server.ask(GENERATE, body, headers={"Authorization": "Bearer third"})[0] == 401
    assert server.ask(GENERATE, body, headers={"Authorization": "Bearer second"})[0] == 200
    assert server.ask(GENERATE, body, headers={"X-API-Key": "first"})[0] == 200


def test_everything_that_was_taken_is_answered_when_the_server_ends(start: Start, tiny_bundle: Path) -> None:
    server = start(tiny_bundle, "--name", "tiny", "--threads", 1)
    begun, statuses = threading.Barrier(65), list[int]()

    def client(_: int) -> None:
        begun.wait()
        statuses.append(server.ask(GENERATE, {"text_input": "transformer", "parameters": {"beam_size": 4}})[0])

    with ThreadPoolExecutor(64) as clients:
        asked = [clients.submit(client, number) for number in range(64)]
        begun.wait()
        time.sleep(0.05)
        code, log = server.end()
        for one in asked:
            one.result(60)
    assert (code, statuses) == (0, [200] * 64)
    assert "Traceback" not in log


def test_a_bundle_is_replaced_without_a_failed_request(start: Start, tiny_bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_bundle, tmp_path / "models" / "tiny" / "1")
    server = start("--watch", tmp_path / "models", "--model-control", "--threads", 1)
    assert server.ask("/v2/models/tiny")[2]["versions"] == ["1"]
    statuses, ended = list[int](), threading.Event()

    def client() -> None:
        while not ended.is_set():
            statuses.append(server.ask(GENERATE, {"text_input": "hello"})[0])

    clients = [threading.Thread(target=client) for _ in range(6)]
    for one in clients:
        one.start()
    shutil.copytree(tiny_bundle, tmp_path / "new")
    (tmp_path / "new").rename(tmp_path / "models" / "tiny" / "2")
    assert server.ask("/v2/repository/models/tiny/load", b"")[0] == 200
    assert server.ask("/v2/models/tiny")[2]["versions"] == ["1", "2"]
    shutil.rmtree(tmp_path / "models" / "tiny" / "1")
    server.process.send_signal(signal.SIGHUP)
    shutil.copytree(tiny_bundle, tmp_path / "models" / "other")
    deadline = time.monotonic() + 30
    while server.ask("/v2/models/tiny")[2]["versions"] != ["2"] or server.ask("/v2/models/other/ready")[0] != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (tmp_path / "models" / "bad").mkdir()
    (tmp_path / "models" / "bad" / "bundle.json").write_text("{}")
    time.sleep(2.5)
    ended.set()
    for one in clients:
        one.join()
    assert server.process.poll() is None, server.log.read_text()
    assert {*statuses} == {200}
    assert len(statuses) > 20
    assert server.ask("/v2/health/ready")[0] == 200
    code, log = server.end()
    assert code == 0
    assert "model bad cannot be loaded" in log


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "name a BUNDLE"), (["nothing"], "is not a bundle"), (["a/x", "b/x"], "two bundles have the same name")],
)
def test_a_server_that_cannot_start_says_why(start: Start, arguments: list[str], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        start(*arguments)
