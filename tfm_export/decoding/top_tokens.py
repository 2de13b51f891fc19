"""The best tokens after every query of a step, with all edits made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfm_export.decoding.scores import NO_EDIT, Doubles, Edit, Editor
from tfm_export.runtime.step_model import Floats, Ids, StepOutput

# Log-probabilities as a step gave them, or in double precision where they were changed.
Scores = NDArray[np.floating[Any]]


class TopTokens:
    """Decides what a step must fetch, and reads the best tokens from what it gave.

    Args:
        editor: makes the edits.
        wanted: how many tokens after each query.
        offered: N, how many a step names by itself.
        vocabulary: V.

    Attributes:
        wanted: how many tokens after each query.
    """

    def __init__(self, editor: Editor, wanted: int, offered: int, vocabulary: int) -> None:
        self._editor = editor
        self.wanted = min(wanted, vocabulary)
        self._offered = offered
        self._edits: Mapping[int, Sequence[Edit]] = {}

    def plan(self, edits: Mapping[int, Sequence[Edit]] | None) -> bool:
        """Take note of the next step's edits, K for each row that has any, or None where none is made.

        Returns:
            Whether the step must fetch log_probs.
        """
        changed = any(edit is not NO_EDIT and edit != NO_EDIT for row in (edits or {}).values() for edit in row)
        self._edits = edits if edits and changed else {}
        if self.wanted > self._offered:
            return True
        return any(
            self._editor.needs_log_probs(edit, self._offered, self.wanted)
            for row in self._edits.values()
            for edit in row
        )

    @property
    def edited(self) -> bool:
        """Whether the next step's scores are changed anywhere."""
        return bool(self._edits)

    def best(self, output: StepOutput, rows: Ids) -> tuple[Scores, Ids]:
        """Log-probabilities and ids, each [R, Q, wanted], of what may follow in the given rows, the best first.

        Where fewer may follow, the rest have -inf.
        """
        if self._edits:
            return self._edited(output, rows)
        if self.wanted <= self._offered:
            return output.top_log_probs[rows, :, : self.wanted], output.top_ids[rows, :, : self.wanted]
        log_probs = _log_probs(output)[rows]
        ids = np.argpartition(-log_probs, self.wanted - 1, axis=-1)[..., : self.wanted]
        values = np.take_along_axis(log_probs, ids, axis=-1)
        order = np.argsort(-values, axis=-1, kind="stable")
        return np.take_along_axis(values, order, axis=-1), np.take_along_axis(ids, order, axis=-1)

    def _edited(self, output: StepOutput, rows: Ids) -> tuple[Doubles, Ids]:
        queries = output.top_ids.shape[1]
        values = np.full((len(rows), queries, self.wanted), -np.inf)
        ids = np.zeros((len(rows), queries, self.wanted), np.int64)
        for place, row in enumerate(rows.tolist()):
            for query in range(queries):
                top = output.top_log_probs[row, query], output.top_ids[row, query]
                log_probs = None if output.log_probs is None else output.log_probs[row, query]
                best = self._editor.best(self.edit(row, query), top, log_probs, _level(output, row, query), self.wanted)
                values[place, query, : len(best[0])], ids[place, query, : len(best[1])] = best
        return values, ids

    def whole(self, output: StepOutput, row: int, query: int) -> Doubles:
        """The log-probabilities [V] after a query; the step must have fetched them."""
        edit = self.edit(row, query)
        return self._editor.whole(edit, _log_probs(output)[row, query], _level(output, row, query))

    def edit(self, row: int, query: int) -> Edit:
        """What is changed after a query; of a prompt one query counts, and the row's hypotheses are all the same."""
        return self._edits[row][query] if row in self._edits else NO_EDIT


def _log_probs(output: StepOutput) -> Floats:
    assert output.log_probs is not None, "a step was not asked for its log_probs"
    return output.log_probs


def _level(output: StepOutput, row: int, query: int) -> float | None:
    return None if output.log_normaliser is None else float(output.log_normaliser[row, query])
