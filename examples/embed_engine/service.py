"""The service: JSON over HTTP, with nothing but the standard library around `model.generate_async`.

POST /generate   {"texts": ["hello", ...], "deadline": 0.5}  ->  {"answers": [{"text", "score", "reason"}, ...]}
GET  /health     200 while it takes requests; 503 before its end, and once its device has failed
"""

from __future__ import annotations

import json
import select
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tfm_export import Generation, Model, ModelClosed, Overloaded, RequestError
from tfm_export.model import Pending

LARGEST_BODY, MOST_TEXTS = 1 << 20, 256
IDLE_SECONDS = 10.0  # after which a connection that asks nothing is closed
LAST_CALLS_SECONDS = 0.5  # for clients that do not know yet that the service ends

Answer = tuple[HTTPStatus, dict[str, Any]]


# This is what to copy.


def generate(model: Model, texts: list[str], deadline: float | None) -> Answer:
    """Decode the texts of a request together with those of all others; one that cannot be decoded has an error.

    Raises:
        Exception: the device has failed, or there is a bug: the service is not healthy any more.
    """
    pending: list[Pending[Generation]] = []
    answers: list[dict[str, Any]] = []
    try:
        pending.extend(model.generate_async(text, deadline=deadline) for text in texts)
        answers.extend(map(answer, pending))
    except (Overloaded, ModelClosed) as problem:
        for one in pending:
            one.cancel()
        retry_after = getattr(problem, "retry_after", 1.0)
        return HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(problem), "retry_after": retry_after}
    bad = all("error" in one for one in answers)
    return HTTPStatus.UNPROCESSABLE_ENTITY if bad else HTTPStatus.OK, {"answers": answers}


def answer(pending: Pending[Generation]) -> dict[str, Any]:
    """An answer as JSON has it, once it is there."""
    try:
        found = pending.result()
    except ModelClosed:
        raise
    except RequestError as problem:
        return {"error": str(problem)}
    return {"text": found.text, "score": found.score, "reason": found.reason.value}


# The rest is Python's own server.


class Service(ThreadingHTTPServer):
    """Listens, and has one thread for each connection.

    Attributes:
        model: what decodes.
        ending: whether it ends.
        failed: what went wrong with the device, if anything did.
    """

    daemon_threads = True  # idle connections must not keep the process alive; `end` waits for the others
    request_queue_size = 512

    def __init__(self, address: tuple[str, int], model: Model) -> None:
        super().__init__(address, Handler)
        self.model, self.ending, self.failed = model, False, False
        self.busy, self.changed = 0, threading.Condition()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no error of ours; anything else is printed with its traceback."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def end(self, *, seconds: float) -> None:
        """Be no longer healthy, answer whoever has connected, and go.

        Args:
            seconds: to do so; what has no answer then gets 503.
        """
        self.ending = True
        time.sleep(min(LAST_CALLS_SECONDS, seconds))
        self.shutdown()
        while select.select([self.socket], [], [], 0)[0]:  # those who connected and were not accepted yet
            self.handle_request()
        self.model.close(drain=seconds)
        with self.changed:
            self.changed.wait_for(lambda: not self.busy, timeout=IDLE_SECONDS)
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of a connection."""

    server: Service
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        """Health."""
        if self.path != "/health":
            self._send(HTTPStatus.NOT_FOUND, {"error": f"there is no {self.path}"})
        elif self.server.ending or self.server.failed:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, {"status": "failed" if self.server.failed else "ending"})
        else:
            self._send(HTTPStatus.OK, {"status": "ok", "backend": self.server.model.backend})

    def do_POST(self) -> None:
        """Decode texts."""
        with self.server.changed:
            self.server.busy += 1
        try:
            self._send(*self._generate())
        finally:
            with self.server.changed:
                self.server.busy -= 1
                self.server.changed.notify_all()

    def _generate(self) -> Answer:
        told = self.headers.get("Content-Length", "")
        if not told.isdecimal() or int(told) > LARGEST_BODY:
            self.close_connection = True
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": f"a body has 0 to {LARGEST_BODY:,} bytes"}
        body = self.rfile.read(int(told))
        if self.path != "/generate":
            return HTTPStatus.NOT_FOUND, {"error": f"there is no {self.path}"}
        try:
            texts, deadline = parse(body)
        except ValueError as problem:
            return HTTPStatus.BAD_REQUEST, {"error": str(problem)}
        try:
            return generate(self.server.model, texts, deadline)
        except Exception as problem:  # noqa: BLE001 (health tells, and so does the answer)
            self.server.failed = True
            self.log_error("the device has failed: %s", problem)
            return HTTPStatus.SERVICE_UNAVAILABLE, {"error": "the service has failed", "retry_after": 10.0}

    def _send(self, status: HTTPStatus, body: dict[str, Any]) -> None:
        content = json.dumps(body, ensure_ascii=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if "retry_after" in body:
            self.send_header("Retry-After", str(max(1, round(body["retry_after"]))))
        if self.server.ending:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 (http.server's name)
        """Say nothing of every request: an observer of the model counts them."""

    def log_error(self, format: str, *arguments: Any) -> None:  # noqa: A002
        """Say what went wrong."""
        print(format % arguments, file=sys.stderr)


def parse(body: bytes) -> tuple[list[str], float | None]:
    """The texts and the deadline of a request.

    Raises:
        ValueError: the body is not of the form that it should have.
    """
    try:
        state = json.loads(body)
    except (ValueError, RecursionError) as problem:
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
