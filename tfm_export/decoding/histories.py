"""What every hypothesis of every row has so far: tokens, their log-probabilities, their sum, and what was forced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tfm_export.decoding.scores import Doubles
from tfm_export.runtime.step_model import Floats, Ids

T = TypeVar("T", bound=np.generic)
FIRST_LENGTH = 16


class Histories:
    """The live hypotheses of a batch, K a row. Memory grows with the longest one, by doubling.

    Attributes:
        tokens: [R, K, L], of which a row's first `length` hold.
        log_probs: [R, K, L].
        length: [R], tokens of each hypothesis of a row.
        prefix: [R], how many of them were forced.
        scores: [R, K], what a beam search ranks by; -inf for a hypothesis that is dead.
    """

    def __init__(self, width: int) -> None:
        self.tokens: Ids = np.zeros((0, width, FIRST_LENGTH), np.int64)
        self.log_probs: Floats = np.zeros((0, width, FIRST_LENGTH), np.float32)
        self.length: Ids = np.zeros(0, np.int64)
        self.prefix: Ids = np.zeros(0, np.int64)
        self.scores: Doubles = np.zeros((0, width))
        self._spare = np.zeros_like(self.tokens), np.zeros_like(self.log_probs)

    def join(self, row: int, prefix: Sequence[int]) -> None:
        """Begin a row with forced tokens. Until the decoder has taken them in, only the last hypothesis lives."""
        rows, length = len(self.length), self.tokens.shape[2]
        if row >= rows or len(prefix) > length:
            self._reserve(max(2 * rows, row + 1) if row >= rows else rows, max(length, len(prefix)))
        self.tokens[row, :, : len(prefix)] = prefix
        self.log_probs[row, :, : len(prefix)] = 0
        self.length[row] = self.prefix[row] = len(prefix)
        self.scores[row] = -np.inf
        self.scores[row, -1] = 0

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

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """All that there is of each row."""
        return self.tokens, self.log_probs, self.length, self.prefix, self.scores

    def of(self, row: int, hypothesis: int) -> tuple[list[int], list[float]]:
        """The tokens and log-probabilities of a hypothesis."""
        length = int(self.length[row])
        return self.tokens[row, hypothesis, :length].tolist(), self.log_probs[row, hypothesis, :length].tolist()

    def _reserve(self, rows: int, length: int) -> None:
        old, width = self.scores.shape
        self.tokens = enlarged(self.tokens, (rows, width, length), old)
        self.log_probs = enlarged(self.log_probs, (rows, width, length), old)
        self.length, self.prefix = enlarged(self.length, (rows,), old), enlarged(self.prefix, (rows,), old)
        self.scores = enlarged(self.scores, (rows, width), old)
        self._spare = np.zeros_like(self.tokens), np.zeros_like(self.log_probs)


def follow(array: NDArray[Any], spare: NDArray[Any], rows: Ids, parents: Ids) -> None:
    """array[row, k] = array[row, parents[row, k]] for some rows of an array [R, K, L], by way of a spare one."""
    width, length = array.shape[1:]
    places = rows[:, None] * width + parents
    # mode="clip" lets numpy write straight into `out`; no place is out of range.
    moved = np.take(array.reshape(-1, length), places, axis=0, out=spare[: len(rows)], mode="clip")
    array[rows] = moved


def enlarged(array: NDArray[T], shape: tuple[int, ...], rows: int) -> NDArray[T]:
    """An array of this shape with what the first `rows` rows of another hold, and 0 elsewhere."""
    new = np.zeros(shape, array.dtype)
    if rows:
        new[(slice(rows), *map(slice, array.shape[1:]))] = array[:rows]
    return new
