"""The service: JSON over HTTP, with nothing but the standard library around the batcher.

POST /generate   {"texts": ["hello", ...], "deadline": 0.5}  ->  {"answers": [{"text", "score", "reason"}, ...]}
GET  /health     200 while it takes requests, 503 before its end
GET  /metrics    counters in Prometheus' text format
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from concurrent.futures import Future
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from examples.embed_engine.batcher import Batcher, ClosingError, OverloadedError
from tfm_export import Generation, Model, RequestError, TextRequest, TfmExportError

LARGEST_BODY, MOST_UNREAD = 1 << 20, 1 << 24
MOST_TEXTS = 256
IDLE_SECONDS = 10.0  # after which a connection that asks nothing is closed


class Service(ThreadingHTTPServer):
    """Listens, and has one thread for each connection.

    Attributes:
        model: what decodes.
        batcher: what its texts go through.
        ending: whether it takes nothing more.
    """

    daemon_threads = True  # idle connections must not keep the process alive; `end` waits for the others
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], model: Model, batcher: Batcher) -> None:
        super().__init__(address, Handler)
        self.model, self.batcher, self.ending = model, batcher, False
        self._busy, self._changed = 0, threading.Condition()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no error of ours; anything else is printed with its traceback."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def enter(self) -> None:
        """A request is being answered."""
        with self._changed:
            self._busy += 1

    def leave(self) -> None:
        """It has its answer."""
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()

    def end(self, *, seconds: float) -> None:
        """Stop listening, answer what was asked so far, and go.

        Args:
            seconds: to do so; see `Batcher.close`.
        """
        self.ending = True
        self.shutdown()
        self.batcher.close(seconds=seconds)
        with self._changed:
            self._changed.wait_for(lambda: not self._busy, timeout=IDLE_SECONDS)
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of a connection."""

    server: Service
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        """Health and metrics."""
        if self.path == "/health":
            status = HTTPStatus.SERVICE_UNAVAILABLE if self.server.ending else HTTPStatus.OK
            self._send(
                status, {"status": "ending" if self.server.ending else "ok", "backend": self.server.model.backend}
            )
        elif self.path == "/metrics":
            self._send_text(HTTPStatus.OK, "text/plain; version=0.0.4", metrics(self.server.batcher))
        else:
            self._send(HTTPStatus.NOT_FOUND, {"error": f"there is no {self.path}"})

    def do_POST(self) -> None:
        """Decode texts."""
        self.server.enter()
        try:
            self._send(*self._generate())
        finally:
            self.server.leave()

    def _generate(self) -> tuple[HTTPStatus, dict[str, Any]]:
        try:
            length = int(self.headers.get("Content-Length", "-1"))
        except ValueError:
            length = -1
        if not 0 <= length <= LARGEST_BODY:
            self.close_connection = True
            self.rfile.read(min(max(length, 0), MOST_UNREAD))  # whoever is still sending would not read the answer
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": f"a body has 0 to {LARGEST_BODY:,} bytes"}
        body = self.rfile.read(length)
        if self.path != "/generate":
            return HTTPStatus.NOT_FOUND, {"error": f"there is no {self.path}"}
        try:
            texts, deadline = parse(body)
        except ValueError as problem:
            return HTTPStatus.BAD_REQUEST, {"error": str(problem)}
        return answer(self.server.batcher, texts, deadline)

    def _send(self, status: HTTPStatus, body: dict[str, Any]) -> None:
        self._send_text(status, "application/json", json.dumps(body, ensure_ascii=False))

    def _send_text(self, status: HTTPStatus, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            self.send_header("Retry-After", "1")
        if self.server.ending:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 (http.server's name)
        """Say nothing of every request: /metrics counts them."""


def parse(body: bytes) -> tuple[list[str], float | None]:
    """The texts and the deadline of a request.

    Raises:
        ValueError: the body is not of the form that it should have.
    """
    try:
        state = json.loads(body)
    except ValueError as problem:
        raise ValueError(f"the body is not JSON: {problem}") from None
    texts = state.get("texts") if isinstance(state, dict) else None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError('the body must be {"texts": [one or more strings], "deadline": seconds}')
    if len(texts) > MOST_TEXTS:
        raise ValueError(f"a request has up to {MOST_TEXTS} texts, found {len(texts)}")
    deadline = state.get("deadline")
    if deadline is not None and (type(deadline) not in {int, float} or not deadline >= 0):
        raise ValueError(f"deadline must be a number of seconds, found {deadline!r}")
    return texts, deadline


def answer(batcher: Batcher, texts: list[str], deadline: float | None) -> tuple[HTTPStatus, dict[str, Any]]:
    """Decode the texts of a request; one that cannot be decoded has an error in its place."""
    submitted: list[Future[Generation]] = []
    try:
        submitted.extend(_submit(batcher, TextRequest(text=text, deadline=deadline)) for text in texts)
        answers = [_state(future) for future in submitted]
    except (OverloadedError, ClosingError) as problem:
        for future in submitted:
            future.cancel()
        return HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(problem) or "the service ends"}
    bad = all("error" in one for one in answers)
    return HTTPStatus.UNPROCESSABLE_ENTITY if bad else HTTPStatus.OK, {"answers": answers}


def _submit(batcher: Batcher, request: TextRequest) -> Future[Generation]:
    """What will hold the answer, or holds why there is none."""
    try:
        return batcher.submit(request)
    except RequestError as problem:
        refused: Future[Generation] = Future()
        refused.set_exception(problem)
        return refused


def _state(future: Future[Generation]) -> dict[str, Any]:
    """An answer as JSON has it, once it is there."""
    try:
        found = future.result()
    except TfmExportError as problem:
        return {"error": str(problem)}
    return {"text": found.text, "score": found.score, "reason": found.reason.value}


def metrics(batcher: Batcher) -> str:
    """Counters in Prometheus' text format."""
    counts = {**vars(batcher.counts), "waiting": batcher.waiting}
    return "".join(f"embed_engine_{name} {value}\n" for name, value in counts.items())


def serve(service: Service, stop: queue.SimpleQueue[int], *, seconds: float) -> None:
    """Serve until told to stop; then answer what was asked, and return.

    Args:
        service: listening.
        stop: a signal puts its number here. Of what threads wait for each other with, this alone may be used in a
            signal's handler.
        seconds: for the answers that are due at the end.
    """
    thread = threading.Thread(target=service.serve_forever, name="listener", daemon=True)
    thread.start()
    while True:
        try:
            # Python runs handlers when the main thread is awake: one that waits for ever may sleep through a signal.
            stop.get(timeout=0.5)
            break
        except queue.Empty:
            continue
    begin = time.monotonic()
    service.end(seconds=seconds)
    thread.join()
    print(f"ended in {time.monotonic() - begin:.1f} s: {service.batcher.counts}", flush=True)
