"""Load a bundle on the best backend of this machine, and serve it: `python -m examples.embed_engine tfm_bundle`."""

from __future__ import annotations

import argparse
import logging
import queue
import signal
import sys
from pathlib import Path

import tfm_export
from examples.embed_engine.batcher import Batcher
from examples.embed_engine.service import Service, serve


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080, help="0 takes one that is free")
    parser.add_argument("--backend", default="auto", choices=["auto", "onnxruntime", "tensorrt"])
    parser.add_argument("--device", help="cpu, or the number of a GPU")
    parser.add_argument("--variant", help="the precision")
    parser.add_argument("--threads", type=int, help="to compute with on a CPU")
    parser.add_argument("--beam-size", type=int, help="the bundle's unless it is given")
    parser.add_argument("--max-batch-size", type=int, default=32, help="texts decoded together")
    parser.add_argument("--max-wait", type=float, default=5.0, help="milliseconds that a text waits for others")
    parser.add_argument("--workers", type=int, default=1, help="batches decoded at the same time; 2 on a GPU")
    parser.add_argument("--grace", type=float, default=20.0, help="seconds to answer what is due at the end")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")

    stop: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stop.put(number))
    try:
        model = tfm_export.load(
            arguments.bundle,
            backend=arguments.backend,
            device=arguments.device,
            variant=arguments.variant,
            threads=arguments.threads,
        )
    except tfm_export.TfmExportError as problem:
        sys.exit(f"the bundle cannot be served: {problem}")
    with model:
        model.warm_up()  # before it listens: the first caller pays for nothing
        beam = {} if arguments.beam_size is None else {"beam_size": arguments.beam_size}
        batcher = Batcher(
            model,
            model.decode_options(**beam),
            max_batch_size=arguments.max_batch_size,
            max_wait=arguments.max_wait / 1e3,
            workers=arguments.workers,
        )
        try:
            service = Service((arguments.host, arguments.port), model, batcher)
            print(f"listening on http://{arguments.host}:{service.server_port}: {model.backend}", flush=True)
            serve(service, stop, seconds=arguments.grace)
        except OSError as problem:
            sys.exit(f"{arguments.host}:{arguments.port} cannot be listened on: {problem}")
        finally:
            batcher.close(seconds=0)


if __name__ == "__main__":
    main()
