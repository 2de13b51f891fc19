"""The paths of the server."""

from __future__ import annotations

import asyncio
import hmac
import logging
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import tfm_export
from tfm_export.errors import ModelClosed, TfmExportError
from tfm_export.serve import inference, openapi, tensors
from tfm_export.serve.limits import Refusal, RequestLimits, refusal
from tfm_export.serve.metrics import Metrics
from tfm_export.serve.served import ServedModels, Version

LOG = logging.getLogger("tfm_export")
OPEN = ("/v2/health/live", "/v2/health/ready")  # no key is needed for these
CLOSED_REQUEST = 499  # nginx's status for a client that has gone
WINDOW = {"gzip": 31, "deflate": 15}  # of zlib

Handler = Callable[[Request], Awaitable[Response]]


class Service:
    """Answers requests.

    Args:
        models: in service.
        limits: of a request.
        metrics: what is counted.
        api_keys: of which a request must have one; none lets all in.
        control: allow that models are loaded and unloaded by requests.

    Attributes:
        ending: the server ends: it is not ready, and connections are closed after their answers.
        active: requests that have no answer yet.
    """

    def __init__(
        self, models: ServedModels, limits: RequestLimits, metrics: Metrics, *, api_keys: list[str], control: bool
    ) -> None:
        self.models, self.limits, self.metrics = models, limits, metrics
        self._keys, self._control = [key.encode() for key in api_keys], control
        self.ending, self.active = False, 0

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = []
        for path, method, handler in self.paths():
            routes.append(Route(path, self._answered(handler), methods=[method]))
        return Starlette(routes=routes, exception_handlers={404: _not_found, 405: _not_found})

    def paths(self) -> list[tuple[str, str, Handler]]:
        """Every path with its method and what answers it."""
        model, version = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
        found: list[tuple[str, str, Handler]] = [
            ("/v2/health/live", "GET", self._live),
            ("/v2/health/ready", "GET", self._ready),
            ("/v2", "GET", self._server),
            ("/metrics", "GET", self._metrics),
            ("/openapi.json", "GET", self._openapi),
            ("/docs", "GET", self._docs),
            ("/v2/repository/index", "POST", self._index),
            ("/v2/repository/models/{model}/load", "POST", self._load),
            ("/v2/repository/models/{model}/unload", "POST", self._unload),
        ]
        for start in (model, version):
            found += [
                (start, "GET", self._model),
                (f"{start}/ready", "GET", self._model_ready),
                (f"{start}/config", "GET", self._config),
                (f"{start}/infer", "POST", self._infer),
                (f"{start}/generate", "POST", self._generate),
                (f"{start}/generate_stream", "POST", self._generate_stream),
            ]
        return found

    def _answered(self, handler: Handler) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """A handler whose errors are answers, and whose answers are counted."""

        async def answer(request: Request) -> Response:
            self.active += 1
            try:
                response = await self._response(handler, request)
            finally:
                self.active -= 1
            self.metrics.responses.labels(str(response.status_code)).inc()
            if self.ending:
                response.headers["Connection"] = "close"
            return response

        return answer

    async def _response(self, handler: Handler, request: Request) -> Response:
        try:
            self._check_key(request)
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=CLOSED_REQUEST)
        except (Refusal, TfmExportError) as problem:
            if told := refusal(problem):
                return _refused(told)
            return self._failed(problem)
        except Exception as problem:  # noqa: BLE001 (the log has it, the client and health are told)
            return self._failed(problem)

    def _failed(self, problem: Exception) -> Response:
        """An error that is not about the request: of a device, or a bug."""
        LOG.error("a request failed; health fails from now on", exc_info=problem)
        self.models.problem = problem
        return _refused(Refusal(503, ["the server has failed, and its log says why"], {"Retry-After": "10"}))

    def _check_key(self, request: Request) -> None:
        if not self._keys or request.url.path in OPEN:
            return
        given = request.headers.get("authorization", "")
        key = given[7:] if given[:7].lower() == "bearer " else request.headers.get("x-api-key", "")
        # Every key is compared, so that the time tells nothing.
        if not sum(hmac.compare_digest(key.encode(), known) for known in self._keys):
            raise Refusal(401, ["an API key is needed: Authorization: Bearer KEY"], {"WWW-Authenticate": "Bearer"})

    # Health, metadata and control.

    async def _live(self, _: Request) -> Response:
        problem = self.models.problem
        return Response(status_code=200) if problem is None else _refused(Refusal(503, ["the server has failed"]))

    async def _ready(self, _: Request) -> Response:
        if self.ending:
            return _refused(Refusal(503, ["the server ends"]))
        return Response(status_code=200) if self.models.ready else _refused(Refusal(503, ["models are missing"]))

    async def _server(self, _: Request) -> Response:
        extensions = ["binary_tensor_data", "generate", "model_repository", "parameters"]
        return JSONResponse({"name": "tfm-export", "version": tfm_export.__version__, "extensions": extensions})

    async def _metrics(self, _: Request) -> Response:
        return Response(self.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _openapi(self, _: Request) -> Response:
        return JSONResponse(openapi.description(self.limits))

    async def _docs(self, _: Request) -> Response:
        return HTMLResponse(openapi.page(self.limits))

    async def _model(self, request: Request) -> Response:
        version = self._version(request)
        return JSONResponse(inference.metadata(version, self.models.versions(version.name)))

    async def _model_ready(self, request: Request) -> Response:
        self._version(request)
        ready = self.models.problem is None and not self.ending
        return Response(status_code=200) if ready else _refused(Refusal(503, ["the server has failed, or ends"]))

    async def _config(self, request: Request) -> Response:
        version = self._version(request)
        told = inference.metadata(version, [])
        names = {"inputs": "input", "outputs": "output"}
        tensors_of = {
            ours: [
                {"name": t["name"], "data_type": f"TYPE_{_triton(t['datatype'])}", "dims": t["shape"]} for t in told[k]
            ]
            for k, ours in names.items()
        }
        return JSONResponse({"name": version.name, "platform": "tfm_export", "max_batch_size": 0, **tensors_of})

    async def _index(self, _: Request) -> Response:
        rows = []
        for name in self.models.names:
            versions = self.models.versions(name)
            rows += [{"name": name, "version": number, "state": "READY"} for number in versions]
            rows += [] if versions else [{"name": name, "state": "UNAVAILABLE"}]
        return JSONResponse(rows)

    async def _load(self, request: Request) -> Response:
        self._check_control()
        await asyncio.to_thread(self.models.load, request.path_params["model"])
        return Response(status_code=200)

    async def _unload(self, request: Request) -> Response:
        self._check_control()
        await asyncio.to_thread(self.models.unload, request.path_params["model"])
        return Response(status_code=200)

    def _check_control(self) -> None:
        if not self._control:
            raise Refusal(403, ["models are not loaded by requests here: start the server with --model-control"])

    # Decoding.

    async def _infer(self, request: Request) -> Response:
        asked = tensors.parse_request(await self._body(request), request.headers.get(tensors.HEADER_LENGTH))
        version, outputs = await self._decoded(request, lambda v: inference.infer(v, asked, self.limits))
        content, headers = tensors.response(asked, version.name, version.number, outputs)
        return Response(content, headers=headers)

    async def _generate(self, request: Request) -> Response:
        state = tensors.parse_object(await self._body(request))
        _, answer = await self._decoded(request, lambda v: inference.generate(v, state, self.limits))
        return JSONResponse(answer)

    async def _generate_stream(self, request: Request) -> Response:
        state = tensors.parse_object(await self._body(request))
        # What is wrong with a request has a status of its own: the first event comes before the answer begins.
        _, (events, first) = await self._decoded(
            request, lambda v: _begun(inference.generate_stream(v, state, self.limits))
        )

        async def told() -> Any:
            self.active += 1
            try:
                yield inference.event(first)
                async for state in events:
                    yield inference.event(state)
            except Exception as problem:  # noqa: BLE001 (the status is sent already)
                answer = refusal(problem)
                if answer is None:
                    self._failed(problem)
                yield inference.event({"error": "; ".join(answer.problems) if answer else "the server has failed"})
            finally:
                self.active -= 1
                await events.aclose()

        return StreamingResponse(told(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def _decoded(
        self, request: Request, work: Callable[[Version], Coroutine[Any, Any, Any]]
    ) -> tuple[Version, Any]:
        """The version that a request is for, or its successor if it is replaced, and what work with it comes to."""
        version = self._version(request)
        while True:
            try:
                return version, await _unless_gone(request, work(version))
            except ModelClosed:
                if (now := self._version(request)) is version:
                    raise
                version = now

    def _version(self, request: Request) -> Version:
        return self.models.version(request.path_params["model"], request.path_params.get("version"))

    async def _body(self, request: Request) -> bytes:
        """The body, no larger than it may be, decompressed."""
        most, coding = self.limits.body_bytes, request.headers.get("content-encoding", "identity").lower()
        if coding != "identity" and coding not in WINDOW:
            raise Refusal(415, [f"Content-Encoding must be one of {', '.join(WINDOW)}"])
        told = request.headers.get("content-length", "0")
        if told.isdecimal() and int(told) > most:
            raise Refusal(413, [f"a body has at most {most:,} bytes"], {"Connection": "close"})
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise Refusal(413, [f"a body has at most {most:,} bytes"], {"Connection": "close"})
            parts.append(part)
        body = b"".join(parts)
        if coding == "identity":
            return body
        try:
            decoder = zlib.decompressobj(WINDOW[coding])
            body = decoder.decompress(body, most)
        except zlib.error as problem:
            raise Refusal(400, [f"the body is not {coding}: {problem}"]) from None
        if decoder.unconsumed_tail:
            raise Refusal(413, [f"a body has at most {most:,} bytes when it is decompressed"])
        return body


async def _begun(events: AsyncIterator[dict[str, Any]]) -> tuple[AsyncIterator[dict[str, Any]], dict[str, Any]]:
    return events, await anext(events)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """What some work comes to; it is given up when the client goes."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refused(told: Refusal) -> Response:
    return JSONResponse({"error": "; ".join(told.problems)}, status_code=told.status, headers=dict(told.headers))


async def _not_found(request: Request, problem: Exception) -> Response:
    status = getattr(problem, "status_code", 404)
    return _refused(Refusal(status, [f"there is no {request.method} {request.url.path[:200]}"]))


def _triton(datatype: str) -> str:
    return "STRING" if datatype == "BYTES" else datatype
