"""Drives a batch of sentences by hand and holds every step to the whole target decoded at once, alone, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tests.numerics import log_prob_limit
from tfm_export.runtime.step_model import Sentences, StepModel, StepOutput
from tfm_export.runtime.torch_model import TorchModel

RNG = np.random.default_rng


def padded(sources: list[list[int]], width: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """source_ids and source_mask."""
    width = width or max(map(len, sources))
    ids, mask = np.zeros((len(sources), width), np.int64), np.zeros((len(sources), width), np.bool_)
    for row, source in enumerate(sources):
        ids[row, : len(source)], mask[row, : len(source)] = source, True
    return ids, mask


def causal(capacity: int, queries: int) -> NDArray[np.bool_]:
    """self_mask [1, 1, Q, C] of Q tokens written from slot 0 on."""
    return (np.arange(capacity) <= np.arange(queries)[:, None])[None, None]


def whole_target(model: StepModel, source: list[int], target: list[int]) -> NDArray[np.float64]:
    """log_probs [T, V] of one sentence, its target taken in one step."""
    sentences = model.encode(*padded([source]), capacity=len(target))
    ids = np.array([target])
    output = sentences.step(
        ids, np.arange(len(target))[None], np.zeros(1, np.int64), causal(len(target), len(target)), full=True
    )
    assert output.log_probs is not None
    return np.array(output.log_probs[0], np.float64)


@dataclass
class Row:
    """A sentence on its way: what it was fed, the slots where that is, and how many were written in all."""

    source: list[int]
    fed: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    written: int = 0


class Batch:
    """Sentences of a backend beside what they should be; errors are in parts of what float32 may be off."""

    def __init__(self, model: StepModel, exact: TorchModel, sources: list[list[int]], capacity: int) -> None:
        self.model, self.exact, self.limit = model, exact, log_prob_limit(exact.model)
        self.rows = [Row(source) for source in sources]
        self.sentences: Sentences = model.encode(*padded(sources), capacity=capacity)
        self._rng = RNG(len(sources))

    def step(self, queries: int = 1) -> float:
        """Feed random tokens to every row, each at its own slot and position; the largest error."""
        size, capacity = len(self.rows), self.sentences.capacity
        ids = self._rng.integers(0, self.model.dimensions.target_vocabulary_size, (size, queries))
        positions, write_index = np.zeros((size, queries), np.int64), np.zeros(size, np.int64)
        mask = np.zeros((size, 1, queries, capacity), np.bool_)
        for i, row in enumerate(self.rows):
            write_index[i] = row.written
            row.written += queries
            for q in range(queries):
                positions[i, q] = len(row.fed)
                row.fed.append(int(ids[i, q]))
                row.slots.append(int(write_index[i]) + q)
                mask[i, 0, q, row.slots] = True
        return self._error(self.sentences.step(ids, positions, write_index, mask, full=True), queries)

    def step_greedily(self, steps: int, until: Callable[[list[int]], bool]) -> float | None:
        """Feed token 1 to every row and what is best from there on; the largest error. None if it cannot."""
        if not self.model.capabilities.steps_greedily:
            return None
        size, capacity = len(self.rows), self.sentences.capacity
        ids, positions = np.ones((size, 1), np.int64), np.array([[len(row.fed)] for row in self.rows])
        write_index = np.array([row.written for row in self.rows])
        mask = np.zeros((size, 1, 1, capacity), np.bool_)
        for i, row in enumerate(self.rows):
            mask[i, 0, 0, [*row.slots, row.written]] = True
        tokens, log_probs = self.sentences.step_greedily(ids, positions, write_index, mask, steps=steps, until=until)
        worst, taken = 0.0, tokens.shape[1]
        for i, row in enumerate(self.rows):
            row.fed += [1, *tokens[i, :-1].tolist()]
            row.slots += range(row.written, row.written + taken)
            row.written += taken
            expected = whole_target(self.exact, row.source, row.fed)[-taken:]
            chosen = expected[np.arange(taken), tokens[i]]
            worst = max(worst, float(np.abs(log_probs[i] - chosen).max()), float((expected.max(-1) - chosen).max()))
        return worst / self.limit

    def _error(self, output: StepOutput, queries: int) -> float:
        assert output.log_probs is not None
        worst = 0.0
        for i, row in enumerate(self.rows):
            expected = whole_target(self.exact, row.source, row.fed)[-queries:]
            worst = max(worst, float(np.abs(output.log_probs[i] - expected).max()))
            top = np.take_along_axis(expected, output.top_ids[i], -1)
            worst = max(worst, float(np.abs(output.top_log_probs[i] - top).max()))
            assert (np.diff(output.top_log_probs[i], axis=-1) <= 0).all()
        return worst / self.limit

    def forget(self, row: int, tokens: int) -> None:
        """Let the last tokens of a row be a path that is not followed."""
        del self.rows[row].fed[-tokens:], self.rows[row].slots[-tokens:]

    def pack(self, capacity: int) -> bool:
        """Keep the slots that are on a path; False if the backend does not."""
        if not self.model.capabilities.packs:
            return False
        slots = np.zeros((len(self.rows), max(len(row.slots) for row in self.rows)), np.int64)
        for i, row in enumerate(self.rows):
            slots[i, : len(row.slots)] = row.slots
        self.sentences.pack(slots, capacity)
        for row in self.rows:
            row.written = len(row.slots)
            row.slots = [*range(row.written)]
        return True

    def leave(self, row: int) -> None:
        """As decoding does it: the last row takes the place."""
        self.sentences.move(len(self.rows) - 1, row)
        self.sentences.shrink(len(self.rows) - 1)
        self.rows[row] = self.rows[-1]
        self.rows.pop()

    def join(self, sources: list[list[int]], capacity: int = 1) -> None:
        """New sentences come in behind."""
        self.sentences.append(self.model.encode(*padded(sources), capacity=capacity))
        self.rows += [Row(source) for source in sources]
