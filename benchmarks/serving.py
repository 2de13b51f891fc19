"""What live traffic costs: callers one by one beside lists, in this process and over HTTP, and CTranslate2 in threads.

    python -m benchmarks.serving [--bundle tfm_bundle] [--variant fp32] [--beam-size 1] [--seconds 5] [--json FILE]

Callers ask for a word, wait for the answer, and ask for the next one (a closed loop). CPU time is that of the process
that decodes, its event loop and its callers included, for each answer. Over HTTP the server is `tfm-export serve` in a
process of its own, and an open loop sends requests at random times (Poisson) at parts of what the server answered in
the closed loop of most clients. Words are those of examples/g2p.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

import tfm_export
from benchmarks.machine import describe

ROOT = Path(__file__).parent.parent
CALLERS = (1, 16, 64)
LOADS = (0.5, 0.8, 0.95)
LARGE_LIST = 512

Ask = Callable[[str], Awaitable[Any]]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=Path("tfm_bundle"))
    parser.add_argument("--variant", default="fp32")
    parser.add_argument("--beam-size", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    arguments = parser.parse_args()
    words = (ROOT / "examples/g2p/words.txt").read_text(encoding="utf-8").split()
    results = {
        "machine": describe(),
        "variant": arguments.variant,
        "beam_size": arguments.beam_size,
        "in_process": in_process(arguments, words),
        "http": over_http(arguments, words),
    }
    print_tables(results)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def in_process(arguments: argparse.Namespace, words: list[str]) -> dict[str, dict[str, float]]:
    """CPU milliseconds an answer of lists and of callers, with one thread; latencies of callers."""
    found: dict[str, dict[str, float]] = {}
    settings = {"beam_size": arguments.beam_size}
    with tfm_export.load(arguments.bundle, variant=arguments.variant, threads=1, workers=1) as model:
        model.generate(words[:64], **settings)
        for size in (*CALLERS, LARGE_LIST):
            answers, cpu = 0, time.process_time()
            end = time.perf_counter() + arguments.seconds
            while time.perf_counter() < end:
                model.generate([words[(answers + i) % len(words)] for i in range(size)], **settings)
                answers += size
            found[f"lists of {size}"] = {"cpu_ms": 1e3 * (time.process_time() - cpu) / answers}
        for callers in CALLERS:
            cpu = time.process_time()
            seconds = asyncio.run(
                closed_loop(lambda word: model.generate_async(word, **settings), words, callers, arguments.seconds)
            )
            cost = 1e3 * (time.process_time() - cpu) / len(seconds)
            found[f"{callers} callers"] = {"cpu_ms": cost, **percentiles(seconds)}
    return found


async def closed_loop(ask: Ask, words: list[str], callers: int, seconds: float) -> list[float]:
    """The seconds of every answer."""
    found, end = [], time.perf_counter() + seconds

    async def caller(number: int) -> None:
        place = number * 37
        while (begin := time.perf_counter()) < end:
            await ask(words[place % len(words)])
            found.append(time.perf_counter() - begin)
            place += 1

    await asyncio.gather(*(caller(number) for number in range(callers)))
    return found


async def open_loop(ask: Ask, words: list[str], rate: float, seconds: float) -> list[float]:
    """The seconds of every answer, each from the time at which its request was due."""
    rng, found, asked = random.Random(5), list[float](), list[asyncio.Task[None]]()
    due = begin = time.perf_counter()

    async def one(word: str, due: float) -> None:
        await ask(word)
        found.append(time.perf_counter() - due)

    while due < begin + seconds:
        await asyncio.sleep(max(due - time.perf_counter(), 0))
        asked.append(asyncio.create_task(one(rng.choice(words), due)))
        due += rng.expovariate(rate)
    await asyncio.gather(*asked)
    return found


class Client:
    """Keeps connections to a server, as a service in front of it does.

    Args:
        address: host and port.
        path: that texts are posted to.
        parameters: of every request.
    """

    def __init__(self, address: tuple[str, int], path: str, parameters: dict[str, Any]) -> None:
        self._address, self._path, self._parameters = address, path, parameters
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, text: str) -> bytes:
        """The body of the answer to a text."""
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(*self._address)
        body = json.dumps({"text_input": text, "parameters": self._parameters}).encode()
        head = f"POST {self._path} HTTP/1.1\r\nHost: {self._address[0]}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        told = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", told, re.IGNORECASE)
        answer = await reader.readexactly(int(length[1]) if length else 0)
        if b" 200 " not in told.split(b"\r\n", 1)[0]:
            raise RuntimeError(answer.decode())
        self._idle.append((reader, writer))
        return answer


def over_http(arguments: argparse.Namespace, words: list[str]) -> dict[str, dict[str, float]]:
    """Answers a second and latencies of `tfm-export serve` with one thread."""
    command = [sys.executable, "-m", "tfm_export", "serve", str(arguments.bundle), "--name", "model", "--port", "0"]
    command += ["--variant", arguments.variant, "--threads", "1", "--workers", "1", "--log-level", "warning"]
    found: dict[str, dict[str, float]] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = re.fullmatch(r"listening at http://(\S+):(\d+)\n", server.stdout.readline())
        assert address is not None
        best = 0.0

        async def measure(loop: Callable[[Ask], Awaitable[list[float]]]) -> dict[str, float]:
            client = Client(
                (address[1], int(address[2])), "/v2/models/model/generate", {"beam_size": arguments.beam_size}
            )
            begin = time.perf_counter()
            seconds = await loop(client.ask)
            return {"per_second": len(seconds) / (time.perf_counter() - begin), **percentiles(seconds)}

        try:
            for callers in CALLERS:
                cell = asyncio.run(measure(lambda ask, n=callers: closed_loop(ask, words, n, arguments.seconds)))
                found[f"{callers} clients"], best = cell, max(best, cell["per_second"])
            for load in LOADS:
                cell = asyncio.run(measure(lambda ask, r=load * best: open_loop(ask, words, r, arguments.seconds)))
                found[f"open loop at {load:.0%}"] = cell
        finally:
            server.terminate()
    return found


def percentiles(seconds: list[float]) -> dict[str, float]:
    """In milliseconds."""
    return {f"p{n}_ms": 1e3 * float(np.percentile(seconds, n)) for n in (50, 99)}


def print_tables(results: dict[str, Any]) -> None:
    """Print what was measured."""
    for name in ("in_process", "http"):
        print(f"\n{name.replace('_', ' ')}, {results['variant']}, beam size {results['beam_size']}")
        for row, cells in results[name].items():
            print(f"  {row:18}", "  ".join(f"{key} {value:8.2f}" for key, value in cells.items()))


if __name__ == "__main__":
    main()
