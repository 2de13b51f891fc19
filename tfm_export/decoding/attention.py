"""The attention of every hypothesis, kept like the cache: append-only.

What a query attends to is written once, at the slot of the cache that the query writes. The mask that says which slots
a hypothesis sees therefore also says which weights are its own, and re-ranking moves none of them.
"""

from __future__ import annotations

import math

import numpy as np

from tfm_export.decoding.histories import enlarged
from tfm_export.runtime.step_model import Floats, Ids, Mask


class AttentionHistory:
    """What a batch attends to.

    Args:
        skip: queries at the beginning of a target that no token follows which counts: all start tokens but the last.

    Attributes:
        weights: [R, C, S], for rows that have taken a step.
    """

    def __init__(self, skip: int) -> None:
        self._skip = skip
        self.weights: Floats = np.zeros((0, 0, 0), np.float32)

    def record(self, write_index: Ids, attention: Floats, capacity: int) -> None:
        """Note what the queries of a step, [B, Q, S], attend to; those of row i write from slot write_index[i] on."""
        rows, queries, source = attention.shape
        self._reserve(rows, capacity, source)
        slots = write_index[:, None] + np.arange(queries)
        self.weights[np.arange(rows)[:, None], slots, :source] = attention

    def of(self, row: int, path: Mask, tokens: int, source_length: int) -> Floats:
        """What a hypothesis attends to.

        Args:
            row: of its sentence.
            path: [C], the slots it sees.
            tokens: how many it has.
            source_length: of its sentence.

        Returns:
            [tokens, source_length]; 0 for forced tokens that the decoder has not taken in yet.
        """
        weights: Floats = np.zeros((tokens, source_length), np.float32)
        if slots := np.flatnonzero(path)[self._skip : self._skip + tokens].tolist():
            weights[: len(slots)] = self.weights[row, slots, :source_length]
        return weights

    def _reserve(self, *shape: int) -> None:
        old = self.weights
        if any(new > size for new, size in zip(shape, old.shape, strict=True)):
            self.weights = enlarged(old, tuple(map(max, shape, old.shape)), len(old))


def coverage(attention: Floats) -> float:
    """How well a target covers its source: sum_j log(min(sum_t attention[t, j], 1)), at most 0 (Wu et al. 2016).

    Source tokens that no target token attends to at all are left out, as CTranslate2 does.
    """
    sums = attention.sum(axis=0, dtype=np.float64)
    return math.fsum(np.log(np.minimum(sums[sums > 0], 1)))
