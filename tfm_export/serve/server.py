"""The process of the server: it listens, reloads, and ends without losing what it has taken."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from tfm_export.errors import RequestError
from tfm_export.serve.app import Service
from tfm_export.serve.limits import RequestLimits
from tfm_export.serve.metrics import Metrics
from tfm_export.serve.served import ServedModels

LOG = logging.getLogger("tfm_export")
WATCH_SECONDS = 2.0
LAST_CALLS_SECONDS = 0.5  # for who has connected, or connects since a balancer does not know yet that the server ends
BACKLOG = 2048


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How a server runs.

    Attributes:
        host: the address to listen at.
        port: 0 takes one that is free.
        grace: seconds in which all that was taken is answered once the server is to end.
        limits: of a request.
        connections: that may be open; None for any number.
        api_keys: of which a request must have one; none lets all in.
        control: allow that models are loaded and unloaded by requests.
        watch: a folder whose folders are models.
        certificate: a file in PEM, for TLS.
        key: of the certificate.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    grace: float = 20.0
    limits: RequestLimits = field(default_factory=RequestLimits)
    connections: int | None = None
    api_keys: tuple[str, ...] = ()
    control: bool = False
    watch: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


class Server(uvicorn.Server):
    """Uvicorn, with its signals taken care of here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield


def serve(
    models: ServedModels, options: ServerOptions, metrics: Metrics, started: Callable[[str], None] = lambda _: None
) -> None:
    """Serve until SIGTERM or SIGINT; then answer what was taken, and return.

    Args:
        models: loaded.
        options: how.
        metrics: what is counted; the models' observers count there too.
        started: told the address once requests are taken.

    Raises:
        RequestError: the address cannot be listened at.
    """
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listener = socket.create_server((options.host, options.port), family=family, backlog=BACKLOG)
    except OSError as problem:
        raise RequestError(f"{options.host}:{options.port} cannot be listened at: {problem}") from None
    service = Service(models, options.limits, metrics, api_keys=[*options.api_keys], control=options.control)
    config = uvicorn.Config(
        service.app(),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        limit_concurrency=options.connections,
        backlog=BACKLOG,
        timeout_keep_alive=75,
        ssl_certfile=options.certificate,
        ssl_keyfile=options.key,
    )
    scheme = "http" if options.certificate is None else "https"
    with contextlib.closing(listener):
        address = f"{scheme}://{options.host}:{listener.getsockname()[1]}"
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(_serve(Server(config), service, listener, options, lambda: started(address)))


async def _serve(
    server: Server,
    service: Service,
    listener: socket.socket,
    options: ServerOptions,
    started: Callable[[], None],
) -> None:
    loop, ends, reload = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ends.set)
    loop.add_signal_handler(signal.SIGHUP, reload.set)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    reloading = asyncio.create_task(_reload(service.models, reload, options.watch))
    while not server.started and not serving.done():  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(0.01)
    started()
    ending = asyncio.create_task(ends.wait())
    await asyncio.wait([serving, ending], return_when=asyncio.FIRST_COMPLETED)
    await _end(server, service, options.grace)
    reloading.cancel()
    await serving


async def _end(server: Server, service: Service, grace: float) -> None:
    """Be no longer ready, answer everything that was taken, then close."""
    end = time.monotonic() + grace
    service.ending = True
    await asyncio.sleep(min(LAST_CALLS_SECONDS, grace))
    while service.active and time.monotonic() < end:  # noqa: ASYNC110 (requests end in many places)
        await asyncio.sleep(0.01)
    left = max(end - time.monotonic(), 0.0)
    server.config.timeout_graceful_shutdown = max(1, round(left))
    server.should_exit = True
    await asyncio.to_thread(service.models.close, left)


async def _reload(models: ServedModels, wanted: asyncio.Event, watch: Path | None) -> None:
    """Reload models on SIGHUP, and what changes in a watched folder."""
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(wanted.wait(), None if watch is None else WATCH_SECONDS)
        wanted.clear()
        try:
            if watch is not None:
                await asyncio.to_thread(models.watch, watch)
            else:
                await asyncio.to_thread(models.reload_changed)
        except Exception:
            LOG.exception("models could not be reloaded")
