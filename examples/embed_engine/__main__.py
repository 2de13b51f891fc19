"""Load a bundle on the best backend of this machine, and serve it: `python -m examples.embed_engine tfm_bundle`."""

from __future__ import annotations

import argparse
import queue
import signal
import sys
import threading
from pathlib import Path

import tfm_export
from examples.embed_engine.service import Service


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080, help="0 takes one that is free")
    parser.add_argument("--device", help="cpu, or the number of a GPU")
    parser.add_argument("--variant", help="the precision")
    parser.add_argument("--threads", type=int, help="to compute with on a CPU")
    parser.add_argument("--grace", type=float, default=20.0, help="seconds to answer what is due at the end")
    arguments = parser.parse_args()
    stop: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stop.put(number))
    try:
        model = tfm_export.load(
            arguments.bundle,
            device=arguments.device,
            variant=arguments.variant,
            threads=arguments.threads,
            special_tokens="escape",
        )
    except tfm_export.TfmExportError as problem:
        sys.exit(f"the bundle cannot be served: {problem}")
    model.warm_up()  # before it listens: the first caller pays for nothing
    try:
        service = Service((arguments.host, arguments.port), model)
    except OSError as problem:
        sys.exit(f"{arguments.host}:{arguments.port} cannot be listened on: {problem}")
    threading.Thread(target=service.serve_forever, daemon=True).start()
    print(f"listening on http://{arguments.host}:{service.server_port}: {model.backend}", flush=True)
    while (
        True
    ):  # Python runs handlers when the main thread is awake: one that waits for ever may sleep through a signal
        try:
            stop.get(timeout=0.5)
            break
        except queue.Empty:
            continue
    service.end(seconds=arguments.grace)


if __name__ == "__main__":
    main()
