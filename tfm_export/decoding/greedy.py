"""Greedy search and sampling: one hypothesis a sentence, one token a step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tfm_export.decoding.batch import Batch
from tfm_export.decoding.result import Hypothesis, Reason
from tfm_export.decoding.sampling import sample
from tfm_export.decoding.search import Ended, Search, SearchContext
from tfm_export.decoding.top_tokens import Scores
from tfm_export.runtime.step_model import Ids, StepOutput


class Greedy(Search):
    """Appends the best token of every step, or one that is drawn.

    Args:
        context: what holds for the search's rows.
    """

    def __init__(self, context: SearchContext) -> None:
        o = context.options
        super().__init__(context, 1 if not o.samples else o.sampling_topk or context.vocabulary)

    def run_ahead(self, batch: Batch, interrupted: Callable[[], bool]) -> tuple[int, Ended] | None:
        """Take several steps in one go until a row comes to its end; None where something is done between two steps."""
        o, rows, ends = self._options, batch.rows, self.context.end_ids
        if not batch.can_step_greedily or o.samples or o.return_logits_vocab or any(s.edits for s in batch.live):
            return None
        taken, tokens = batch.step_greedily(
            self.context.longest - max(batch.histories.length[rows].tolist()),
            lambda tokens: any(token in ends for token in tokens) or interrupted(),
        )
        return taken, self._at_their_end(batch, rows, tokens)

    def advance(self, batch: Batch, output: StepOutput, ready: Ids) -> Ended:
        """Append a token to each of the rows, and name those that came to their end."""
        values, ids = self._top.best(output, ready)  # [R, Q, M]; what follows is in the last query
        if self._top.edited:
            self.context.note_dead_ends(values[:, -1, 0], ready, batch)
        values, tokens = self._draw(values[:, -1], ids[:, -1], ready, batch)  # [R]
        if self._options.return_logits_vocab:
            for row in ready.tolist():
                batch.live[row].distributions[0].append(self._top.whole(output, row, -1).astype(np.float32))
        batch.extend(ready, tokens[:, None], values[:, None])
        return self._at_their_end(batch, ready, tokens)

    def _at_their_end(self, batch: Batch, ready: Ids, tokens: Ids) -> Ended:
        ends, longest, lengths = self.context.end_ids, self.context.longest, batch.histories.length[ready]
        return [
            (row, Reason.END if token in ends else Reason.LENGTH)
            for row, token, length in zip(ready.tolist(), tokens.tolist(), lengths.tolist(), strict=True)
            if token in ends or length >= longest
        ]

    def _draw(self, values: Scores, ids: Ids, ready: Ids, batch: Batch) -> tuple[Scores, Ids]:
        """One of the best tokens [R, M] of each row."""
        if not self._options.samples:
            return values[:, 0], ids[:, 0]
        draws = [
            0 if batch.live[row].problem else sample(values[place], ids[place], self._options, batch.live[row].random)
            for place, row in enumerate(ready.tolist())
        ]
        place = np.arange(len(ready))
        return values[place, draws], ids[place, draws]

    def settled(self, batch: Batch, row: int) -> tuple[list[int], list[float]]:
        """All tokens that a row has, and their log-probabilities."""
        return batch.histories.of(row, 0)

    def hypotheses(self, batch: Batch, row: int) -> list[Hypothesis]:
        """What a row has come to."""
        return [self.context.hypothesis(batch, row, 0)]
