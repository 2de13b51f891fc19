"""How far a long job is: step after step with its time, or on one line of a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

import click

WIDTH = 24
INTERVAL = 0.1  # seconds; a line drawn more often only costs time


class ProgressBar:
    """A bar, where the amount of work is known, and rates.

    Args:
        total: bytes of input, None where it is not known.
        stream: where to draw; nothing is drawn unless it is a terminal.
        enabled: False draws nothing.
        clock: seconds.
    """

    def __init__(
        self,
        total: int | None,
        *,
        stream: TextIO | None = None,
        enabled: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._total, self._stream, self._clock = total, stream or sys.stderr, clock
        self._enabled = enabled and self._stream.isatty()
        self._begin = self._drawn = clock()
        self._bytes = self._lines = self._tokens = self._shown = 0

    def advance(self, line: str, tokens: int, *, pause: bool = False) -> None:
        """Count a line that is done, and the tokens of its answer.

        Args:
            line: as it was read.
            tokens: how many it gave.
            pause: more may be long in coming, so the figures must be up to date.
        """
        if not self._enabled:
            return
        self._lines += 1
        self._tokens += tokens
        self._bytes += len(line.encode(errors="surrogateescape")) + 1
        if pause or self._clock() - self._drawn >= INTERVAL:
            self._drawn = self._clock()
            self._draw(self.text())

    def text(self) -> str:
        """The line."""
        seconds = max(self._clock() - self._begin, 1e-9)
        rates = f"{self._lines:,} lines, {self._lines / seconds:,.1f} lines/s, {self._tokens / seconds:,.0f} tokens/s"
        if not self._total:
            return rates
        share = min(self._bytes / self._total, 1.0)
        left = round(seconds * (1 - share) / share) if share else 0
        full = round(WIDTH * share)
        return f"{'█' * full}{'░' * (WIDTH - full)} {share:4.0%}  {rates}, {left // 60}:{left % 60:02} left"

    def clear(self) -> None:
        """Make room for a message; the next line done draws the progress again."""
        if self._shown:
            self._draw("")
            self._stream.write("\r")

    def finish(self) -> None:
        """Leave the last figures on the terminal."""
        if self._enabled and self._lines:
            self._total = None
            self._draw(self.text())
            self._stream.write("\n")
            self._shown = 0

    def _draw(self, text: str) -> None:
        self._stream.write("\r" + text.ljust(self._shown))
        self._stream.flush()
        self._shown = len(text)


class Stopwatch:
    """Prints what begins and, when the next thing does or the block ends, how long the last one took.

    What is told again with another count behind its last comma ("..., 32 of 200") is one thing: on a terminal the count
    goes up in place, elsewhere it stays the first one.
    """

    def __init__(self) -> None:
        self._started: float | None = None
        self._thing, self._shown = "", ""

    def begin(self, what: str) -> None:
        """Say what begins, or how far it has come."""
        thing = _without_count(what)
        if self._started is not None and thing == self._thing != what:
            if sys.stderr.isatty():
                click.echo(f"\r{what} ... ".ljust(len(self._shown) + 1), nl=False, err=True)
                self._shown = f"{what} ... "
            return
        self.end()
        self._thing, self._shown = thing, f"{what} ... "
        click.echo(self._shown, nl=False, err=True)
        self._started = time.perf_counter()

    def end(self) -> None:
        """The last thing is over."""
        if self._started is not None:
            click.echo(f"{time.perf_counter() - self._started:.1f} s", err=True)
        self._started = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def _without_count(what: str) -> str:
    """What is being done, without how far it is."""
    thing, _, count = what.rpartition(", ")
    return thing if thing and count[:1].isdigit() else what
