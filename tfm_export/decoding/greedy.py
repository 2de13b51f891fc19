"""Greedy search and sampling: one hypothesis a sentence, one token a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfm_export.decoding.options import DecodeOptions
from tfm_export.decoding.result import Hypothesis, Reason, Request, SettledToken
from tfm_export.decoding.rows import Rows
from tfm_export.runtime.step_model import Floats, Ids, StepOutput


class Greedy:
    """The state of a batch that is searched greedily.

    Args:
        options: how to decode.
        end_ids: what ends a target.
        longest: the longest target.
    """

    width = 1

    def __init__(self, options: DecodeOptions, end_ids: Sequence[int], longest: int) -> None:
        self._options, self._end_ids, self._longest = options, np.asarray(end_ids), longest
        self._tokens = np.zeros((0, longest), np.int64)
        self._log_probs = np.zeros((0, longest), np.float32)
        self._length = np.zeros(0, np.int64)
        self._prefix = np.zeros(0, np.int64)

    def join(self, row: int, request: Request, prefix: Sequence[int]) -> None:
        """Begin a sentence, behind the live ones, with a forced prefix."""
        del request
        if row >= len(self._length):
            self._reserve(row + 1)
        self._tokens[row, : len(prefix)] = prefix
        self._log_probs[row, : len(prefix)] = 0
        self._length[row] = self._prefix[row] = len(prefix)

    def move(self, source: int, target: int) -> None:
        """Copy the state of a row over another's."""
        for array in (self._tokens, self._log_probs, self._length, self._prefix):
            array[target] = array[source]

    def advance(self, rows: Rows, output: StepOutput) -> list[tuple[int, Reason]]:
        """Append a token to every row that is ready.

        Returns:
            The rows that came to their end.
        """
        ready = rows.ready
        tokens, values = self._choose(ready, output)
        place = self._length[ready]
        self._tokens[ready, place] = tokens
        self._log_probs[ready, place] = values
        self._length[ready] = place = place + 1
        rows.feed(ready, tokens[:, None])
        ended, full = self._is_end(tokens), place == self._longest
        if not (ended | full).any():
            return []
        return [
            (int(row), Reason.END if end else Reason.LENGTH)
            for row, end, stop in zip(ready, ended, ended | full, strict=True)
            if stop
        ]

    def _choose(self, ready: Ids, output: StepOutput) -> tuple[Ids, Floats]:
        return output.top_ids[ready, -1, 0], output.top_log_probs[ready, -1, 0]

    def settled(self, row: int, known: int) -> list[SettledToken]:
        """The tokens of a row that can no longer change, beyond the first `known`."""
        stop = int(self._length[row])
        pairs = zip(self._tokens[row, known:stop].tolist(), self._log_probs[row, known:stop].tolist(), strict=True)
        return [SettledToken(token, value) for token, value in pairs]

    def hypotheses(self, row: int) -> list[Hypothesis]:
        """What a row has come to."""
        length = int(self._length[row])
        tokens, values = self._tokens[row, :length].tolist(), self._log_probs[row, :length].tolist()
        finished = length > self._prefix[row] and tokens[-1] in self._end_ids
        return [
            Hypothesis(
                tokens=tokens[:-1] if finished and not self._options.return_end_token else tokens,
                score=sum(values) / self._options.divisor(length, int(self._prefix[row])),
                log_probs=values if self._options.return_scores else None,
                finished=finished,
            )
        ]

    def _is_end(self, tokens: Ids) -> np.typing.NDArray[np.bool_]:
        return tokens == self._end_ids if len(self._end_ids) == 1 else np.isin(tokens, self._end_ids)

    def _reserve(self, rows: int) -> None:
        rows = max(rows, 2 * len(self._length))
        for name in ("_tokens", "_log_probs", "_length", "_prefix"):
            old = getattr(self, name)
            new = np.zeros((rows, *old.shape[1:]), old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)
