"""Greedy search and sampling: one hypothesis a sentence, one token a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from tfm_export.decoding.candidates import Candidates, Scores
from tfm_export.decoding.histories import Histories
from tfm_export.decoding.result import Reason
from tfm_export.decoding.rows import Rows
from tfm_export.decoding.sampling import generator, sample
from tfm_export.decoding.search import Scored, Setting, Task
from tfm_export.runtime.step_model import Floats, Ids, StepOutput


@dataclass
class _Row:
    task: Task
    random: Generator
    distributions: list[Floats]


class Greedy:
    """The state of a batch that is searched greedily, or sampled.

    Args:
        setting: what holds for every request.
    """

    width = 1

    def __init__(self, setting: Setting) -> None:
        self._setting, self._options = setting, setting.options
        wanted = 1 if not self._options.samples else self._options.sampling_topk or setting.vocabulary
        self._candidates = Candidates(setting.editor, wanted, setting.offered, setting.vocabulary)
        self._histories = Histories(1)
        self._rows: list[_Row] = []

    def join(self, task: Task) -> None:
        """Begin a sentence, behind the live ones."""
        self._histories.join(len(self._rows), task.forced)
        self._rows.append(_Row(task, generator(task.seed, task.request.draw), []))

    def leave(self, row: int) -> None:
        """Forget a row; the last one takes its place."""
        self._histories.move(len(self._rows) - 1, row)
        self._rows[row] = self._rows[-1]
        self._rows.pop()

    def plan(self) -> bool:
        """Note what the next step's scores need; True if it must fetch log_probs."""
        edits = None
        if any(row.task.edits for row in self._rows):
            edits = [[self._setting.edit(row.task, self._histories.of(i, 0)[0])] for i, row in enumerate(self._rows)]
        return self._candidates.plan(edits) or self._options.return_logits_vocab

    def run_ahead(self, rows: Rows, interrupted: Callable[[], bool]) -> tuple[int, list[tuple[int, Reason]]] | None:
        """Take several steps at once, until a row comes to its end; see `Search.run_ahead`."""
        o = self._options
        if o.samples or o.return_logits_vocab or any(row.task.edits for row in self._rows):
            return None
        every, ends = rows.index[: rows.size], self._setting.end_ids
        found = rows.step_greedily(
            self._setting.longest - max(self._histories.length[every].tolist()),
            lambda tokens: any(token in ends for token in tokens) or interrupted(),
        )
        if found is None:
            return None
        tokens, values = found
        for place in range(tokens.shape[1]):
            self._histories.append(every, tokens[:, place, None], values[:, place, None])
        rows.feed(every, tokens[:, -1:])
        return tokens.shape[1], self._at_their_end(every, tokens[:, -1])

    def advance(self, rows: Rows, output: StepOutput) -> list[tuple[int, Reason]]:
        """Append a token to every row that is ready.

        Returns:
            The rows that came to their end.
        """
        ready = rows.ready
        values, ids = self._candidates.best(output, ready)
        if self._candidates.edited:
            self._setting.check_possible(values[:, -1, 0], ready, self._histories)
        values, tokens = self._draw(values[:, -1], ids[:, -1], ready)
        if self._options.return_logits_vocab:
            for row in ready.tolist():
                self._rows[row].distributions.append(self._candidates.whole(output, row, -1).astype(np.float32))
        self._histories.append(ready, tokens[:, None], values[:, None])
        rows.feed(ready, tokens[:, None])
        return self._at_their_end(ready, tokens)

    def _at_their_end(self, ready: Ids, tokens: Ids) -> list[tuple[int, Reason]]:
        ends, longest, lengths = self._setting.end_ids, self._setting.longest, self._histories.length[ready]
        return [
            (row, Reason.END if token in ends else Reason.LENGTH)
            for row, token, length in zip(ready.tolist(), tokens.tolist(), lengths.tolist(), strict=True)
            if token in ends or length >= longest
        ]

    def _draw(self, values: Scores, ids: Ids, ready: Ids) -> tuple[Scores, Ids]:
        if not self._options.samples:
            return values[:, 0], ids[:, 0]
        draws = [
            sample(values[place], ids[place], self._options, self._rows[row].random)
            for place, row in enumerate(ready.tolist())
        ]
        place = np.arange(len(ready))
        return values[place, draws], ids[place, draws]

    def settled(self, row: int) -> tuple[list[int], list[float]]:
        """Those tokens of a live row that can no longer change, and their log-probabilities."""
        return self._histories.of(row, 0)

    def hypotheses(self, rows: Rows, row: int) -> list[Scored]:
        """What a row has come to."""
        (tokens, values), entry = self._histories.of(row, 0), self._rows[row]
        attention = rows.attention(row, 0, len(tokens), len(entry.task.request.source))
        return [self._setting.scored(tokens, values, int(self._histories.prefix[row]), entry.distributions, attention)]
