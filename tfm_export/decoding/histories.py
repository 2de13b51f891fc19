"""What every hypothesis of every row has so far: tokens, their log-probabilities, and what is forced of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfm_export.decoding.rows import follow
from tfm_export.runtime.step_model import Floats, Ids

FIRST_LENGTH = 16


class Histories:
    """The live hypotheses of a batch, K a row. Memory grows with the longest one, by doubling.

    Attributes:
        tokens: [R, K, L], of which a row's first `length` hold.
        log_probs: [R, K, L].
        length: [R], tokens of each hypothesis of a row.
        prefix: [R], how many of them were forced.
    """

    def __init__(self, width: int) -> None:
        self.tokens: Ids = np.zeros((0, width, FIRST_LENGTH), np.int64)
        self.log_probs: Floats = np.zeros((0, width, FIRST_LENGTH), np.float32)
        self.length: Ids = np.zeros(0, np.int64)
        self.prefix: Ids = np.zeros(0, np.int64)
        self._spare = np.zeros_like(self.tokens), np.zeros_like(self.log_probs)

    def join(self, row: int, prefix: Sequence[int]) -> None:
        """Begin a row with forced tokens."""
        rows, length = len(self.length), self.tokens.shape[2]
        if row >= rows or len(prefix) > length:
            self._reserve(max(2 * rows, row + 1) if row >= rows else rows, max(length, len(prefix)))
        self.tokens[row, :, : len(prefix)] = prefix
        self.log_probs[row, :, : len(prefix)] = 0
        self.length[row] = self.prefix[row] = len(prefix)

    def append(self, rows: Ids, tokens: Ids, log_probs: NDArray[np.floating[Any]]) -> None:
        """Lengthen every hypothesis of the rows by one of tokens [len(rows), K]."""
        place = self.length[rows]
        if max(place.tolist()) >= self.tokens.shape[2]:
            self._reserve(len(self.length), 2 * self.tokens.shape[2])
        self.tokens[rows, :, place] = tokens
        self.log_probs[rows, :, place] = log_probs
        self.length[rows] = place + 1

    def rerank(self, rows: Ids, parents: Ids) -> None:
        """Let hypothesis k of each of the rows go on from parents[row, k]."""
        follow(self.tokens, self._spare[0], rows, parents)
        follow(self.log_probs, self._spare[1], rows, parents)

    def move(self, source: int, target: int) -> None:
        """Copy a row over another."""
        for array in (self.tokens, self.log_probs, self.length, self.prefix):
            array[target] = array[source]

    def of(self, row: int, hypothesis: int) -> tuple[list[int], list[float]]:
        """The tokens and log-probabilities of a hypothesis."""
        length = int(self.length[row])
        return self.tokens[row, hypothesis, :length].tolist(), self.log_probs[row, hypothesis, :length].tolist()

    def _reserve(self, rows: int, length: int) -> None:
        for name in ("tokens", "log_probs"):
            old = getattr(self, name)
            new = np.zeros((rows, old.shape[1], length), old.dtype)
            new[: len(old), :, : old.shape[2]] = old
            setattr(self, name, new)
        for name in ("length", "prefix"):
            setattr(self, name, np.resize(getattr(self, name), rows) if len(self.length) else np.zeros(rows, np.int64))
        self._spare = np.zeros_like(self.tokens), np.zeros_like(self.log_probs)
