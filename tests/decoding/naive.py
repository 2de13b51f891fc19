"""Searches over a table that are too simple to be wrong: no cache, no batch, lists."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tests.decoding.fake_model import SPECIAL, Table

Path = tuple[tuple[int, ...], float]


@dataclass(frozen=True)
class Naive:
    """A sentence's table and limits."""

    table: Table
    source: tuple[int, ...]
    longest: int

    def after(self, tokens: tuple[int, ...]) -> list[float]:
        """The log-probabilities of the token after some, as float32 holds them."""
        scores = self.table(self.source, (SPECIAL.bos, *tokens)).astype("float32")
        return [float(s) for s in scores]

    def all_targets(self, tokens: tuple[int, ...] = (), total: float = 0.0) -> Iterator[Path]:
        """Every target there is, and the sum of its log-probabilities."""
        for token, value in enumerate(self.after(tokens)):
            path = (*tokens, token), total + value
            if token == SPECIAL.eos or len(path[0]) == self.longest:
                yield path
            else:
                yield from self.all_targets(*path)

    def greedy(self, tokens: tuple[int, ...] = ()) -> Path:
        """The likeliest token at every step, after a prefix."""
        total = 0.0
        while len(tokens) < self.longest:
            scores = self.after(tokens)
            token = max(range(len(scores)), key=scores.__getitem__)
            tokens, total = (*tokens, token), total + scores[token]
            if token == SPECIAL.eos:
                break
        return tokens, total

    def beam(
        self,
        size: int,
        length_penalty: float,
        *,
        early_stopping: bool | str | None = None,
        patience: float = 1.0,
        wanted: int = 1,
        prefix: tuple[int, ...] = (),
    ) -> list[Path]:
        """Beam search; by CTranslate2's rules where early_stopping is None, else by Hugging Face's.

        Returns:
            Targets and what they are ranked by, the best first.
        """
        ours, done, top_done = early_stopping is None, [], False
        free = 0 if ours else len(prefix)
        live: list[Path] = [(prefix, 0.0)]
        for length in range(len(prefix) + 1, self.longest + 1):
            ways = [((*t, token), s + v) for t, s in live for token, v in enumerate(self.after(t))]
            ways.sort(key=lambda way: -way[1])
            if ours and prefix and length == len(prefix) + 1:
                # The ends that are not the very best stay in their places, dead.
                ways = [(t, -math.inf if rank and t[-1] == SPECIAL.eos else s) for rank, (t, s) in enumerate(ways)]
            for rank, (tokens, total) in enumerate(ways[:size]):
                if total > -math.inf and (tokens[-1] == SPECIAL.eos or length == self.longest):
                    top_done |= rank == 0
                    done.append((tokens, total / (length - free) ** length_penalty))
            done.sort(key=lambda way: -way[1])
            live = [way for way in ways[: 2 * size] if way[1] == -math.inf or way[0][-1] != SPECIAL.eos][:size]
            live = [way for way in live if way[1] > -math.inf]
            if ours and length_penalty == 0:
                stop = top_done and len(done) >= wanted
            elif ours:
                stop = len(done) >= math.floor(size * patience + 0.5)
            else:
                done = done[:size]
                stop = len(done) == size and (
                    early_stopping is True
                    or self.hope(live[0][1], length, free, length_penalty, early_stopping) <= done[-1][1]
                )
            if stop:
                break
        return done[:wanted]

    def hope(
        self, total: float, length: int, free: int, length_penalty: float, early_stopping: bool | str | None
    ) -> float:
        """What Hugging Face's rule thinks that a live hypothesis may come to."""
        if early_stopping == "never" and length_penalty > 0:
            length = self.longest
        return total / (length - free) ** length_penalty
