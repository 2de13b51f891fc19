"""`tfm-export serve`: bundles in service over HTTP."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tfm_export.cli.options import backend_option, device_option, threads_option, variant_option
from tfm_export.errors import RequestError
from tfm_export.extras import require
from tfm_export.text_files import read_text, split_lines

if TYPE_CHECKING:
    from tfm_export.model import Model
    from tfm_export.runtime.backends import Backend


@click.command("serve")
@click.argument("bundles", metavar="[BUNDLE]...", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--name", "names", multiple=True, help="The model's name, of each BUNDLE in turn.  [default: its folder's]"
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes one that is free."
)
@click.option(
    "--watch",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A folder whose folders are models: what is new, changed or gone there is loaded, swapped or dropped.",
)
@click.option("--model-control", is_flag=True, help="Let requests load and unload models.")
@click.option("--grace", type=click.FloatRange(0), default=20.0, show_default=True, help="Seconds to end in.")
@click.option("--timeout", type=click.FloatRange(0), default=60.0, show_default=True, help="Seconds of a request.")
@click.option("--max-body", type=click.IntRange(1), default=1 << 20, show_default=True, help="Bytes of a body.")
@click.option("--max-texts", type=click.IntRange(1), default=256, show_default=True, help="Sources of a request.")
@click.option("--max-beams", type=click.IntRange(1), default=16, show_default=True, help="Beams of a request.")
@click.option("--max-waiting", type=click.IntRange(1), default=4096, show_default=True, help="Sources in the queue.")
@click.option("--max-connections", type=click.IntRange(1), help="Connections.  [default: any number]")
@click.option(
    "--api-keys",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A file of keys, one a line: a request needs one of them.",
)
@click.option("--tls-certificate", type=click.Path(path_type=Path, exists=True), help="A file in PEM: serve HTTPS.")
@click.option("--tls-key", type=click.Path(path_type=Path, exists=True), help="The certificate's key.")
@click.option(
    "--special-tokens",
    type=click.Choice(["escape", "read"]),
    default="escape",
    show_default=True,
    help="What becomes of special tokens, such as </s>, that texts spell.",
)
@click.option(
    "--log-level",
    type=click.Choice(["info", "warning"]),
    default="info",
    show_default=True,
    help="info logs a line for every source.",
)
@backend_option
@device_option
@variant_option
@threads_option
@click.option("--workers", type=click.IntRange(1), help="Batches decoded at once.  [default: CPUs by threads]")
def command(
    *,
    bundles: tuple[Path, ...],
    names: tuple[str, ...],
    host: str,
    port: int,
    watch: Path | None,
    model_control: bool,
    grace: float,
    timeout: float,
    max_body: int,
    max_texts: int,
    max_beams: int,
    max_waiting: int,
    max_connections: int | None,
    api_keys: Path | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
    special_tokens: str,
    log_level: str,
    backend: Backend,
    device: str | None,
    variant: str | None,
    threads: int | None,
    workers: int | None,
) -> None:
    """Serve bundles over HTTP: the Open Inference Protocol v2 (KServe, Triton), and Triton's generate.

    Requests of all clients are decoded together. /docs lists the paths, /metrics has numbers for Prometheus. SIGHUP
    loads bundles that were replaced, without a failed request; SIGTERM answers what was taken, and ends.

    \b
    Example:
      tfm-export serve tfm_bundle
      tfm-export serve --watch models --host 0.0.0.0 --api-keys keys.txt
      curl localhost:8000/v2/models/tfm_bundle/generate -d '{"text_input": "hello"}'
    """
    require("starlette", extra="serve")
    require("uvicorn", extra="serve")
    require("prometheus_client", extra="serve")
    import tfm_export
    from tfm_export.serve import RequestLimits, ServedModels, ServerOptions, serve
    from tfm_export.serve.metrics import Metrics, PrometheusObserver

    if not bundles and watch is None:
        raise click.UsageError("name a BUNDLE, or --watch a folder")
    if names and len(names) != len(bundles):
        raise click.UsageError(f"there must be a --name for each BUNDLE: found {len(names)} for {len(bundles)}")
    folders = dict(zip(names or [path.resolve().name for path in bundles], bundles, strict=True))
    if len(folders) != len(bundles):
        raise click.UsageError("two bundles have the same name: give each a --name")
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    metrics = Metrics()

    def load(path: Path, name: str) -> Model:
        return tfm_export.load(
            path,
            backend=backend,
            device=device,
            variant=variant,
            threads=threads,
            workers=workers,
            max_waiting=max_waiting,
            special_tokens=special_tokens,  # type: ignore[arg-type]
            observer=PrometheusObserver(metrics, name),
        )

    models = ServedModels(folders, load, drain=grace)
    models.load_all()
    if watch is not None:
        models.watch(watch)
    options = ServerOptions(
        host=host,
        port=port,
        grace=grace,
        limits=RequestLimits(body_bytes=max_body, texts=max_texts, seconds=timeout, hypotheses=max_beams),
        connections=max_connections,
        api_keys=() if api_keys is None else _keys(api_keys),
        control=model_control,
        watch=watch,
        certificate=tls_certificate,
        key=tls_key,
    )
    serve(models, options, metrics, lambda address: click.echo(f"listening at {address}"))


def _keys(path: Path) -> tuple[str, ...]:
    keys = tuple(line.strip() for line in split_lines(read_text(path)) if line.strip())
    if not keys:
        raise RequestError(f"{path} has no keys", "a key a line")
    return keys
