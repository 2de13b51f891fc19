"""The seam between decoding and the backends: what every runtime gives, and all that decoding may use.

Shapes: B sentences, S source length, Q target tokens of a step, C cache slots a sentence, V target vocabulary,
N candidates. Arrays are numpy's, on the host; keys and values stay where the backend keeps them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tfm_export.bundle import Limits
from tfm_export.graph import Dimensions

Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
Floats = NDArray[np.float32]

# A prompt is taken in by pieces such that a step's log_probs [B, Q, V] stay below this many numbers.
LARGEST_STEP = 1 << 24


@dataclass(frozen=True)
class StepOutput:
    """What a step says about the token after each query.

    Attributes:
        top_log_probs: [B, Q, N], the best first.
        top_ids: [B, Q, N], the token of each.
        log_probs: [B, Q, V] if they were fetched.
        log_normaliser: [B, Q] with log_probs, what logits are above log-probabilities, from backends that tell it.
        attention: [B, Q, S], the weights of one layer's cross-attention, the mean over its heads, from models that
            give it.

    The arrays may be overwritten by the next step of the same `Sentences`: copy what must last.
    """

    top_log_probs: Floats
    top_ids: Ids
    log_probs: Floats | None
    log_normaliser: Floats | None = None
    attention: Floats | None = None


class Sentences(Protocol):
    """A batch of sentences being decoded: their cross-attention keys and values, and their append-only caches.

    Row i is a sentence. All rows have the same source length and capacity. Caches hold finite numbers from the start.
    Not to be used by two threads at once.
    """

    @property
    def size(self) -> int:
        """B: rows in use."""
        ...

    @property
    def capacity(self) -> int:
        """C: slots of each row."""
        ...

    def step(
        self, target_ids: Ids, positions: Ids, write_index: Ids, self_mask: Mask, *, full: bool = False
    ) -> StepOutput:
        """Write Q tokens into the cache and say what may follow each.

        Args:
            target_ids: [B, Q].
            positions: [B, Q], each token's place in its target; the start token has 0.
            write_index: [B], the slot of each row's first query; write_index + Q must not pass the capacity.
            self_mask: [B, 1, Q, C], the slots each query sees; at least one.
            full: fetch log_probs too.

        Raises:
            RequestError: an array of another shape, a slot or position or id out of range, a query that sees nothing.
            NumericError: a best log-probability that is not finite.
        """
        ...

    def step_greedily(
        self,
        target_ids: Ids,
        positions: Ids,
        write_index: Ids,
        self_mask: Mask,
        *,
        steps: int,
        until: Callable[[list[int]], bool],
    ) -> tuple[Ids, Floats] | None:
        """Take several steps of one token, each with the best that the step before named, in the slot behind.

        Between two steps of decoding, much is done that a greedy search has no need for.

        Args:
            target_ids: [B, 1], of the first step, as the next three.
            positions: [B, 1].
            write_index: [B].
            self_mask: [B, 1, 1, C]; each later step also sees the slots that were written since.
            steps: at most so many; neither slots nor positions may run out.
            until: is told the best token of each row before the next step is taken; True if there is to be none.

        Returns:
            The best tokens [B, n] after the n steps that were taken, and their log-probabilities [B, n]; None from
            backends that do not do this.

        Raises:
            RequestError: as `step`.
            NumericError: as `step`; only after the last step.
        """
        ...

    def grow(self, capacity: int) -> None:
        """Give every row `capacity` slots, keeping what is written and zeroing the rest."""
        ...

    def pack(self, slots: Ids, capacity: int) -> bool:
        """Keep some slots of each row, and give every row `capacity` of them; those behind hold any finite numbers.

        Args:
            slots: [B, n], the slots of each row that become its first n, in their order.
            capacity: n or more.

        Returns:
            Whether that was done. A backend may have reasons to leave its caches where they are.
        """
        ...

    def move(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`: its keys, values and source mask."""
        ...

    def shrink(self, size: int) -> None:
        """Keep the first `size` rows."""
        ...

    def read(self, name: str) -> Floats:
        """A copy of a self-attention cache [B, H, C, D] or cross-attention tensor [B, H, S, D], for verification.

        Args:
            name: as in the graph's table: self_key_0, self_value_0, cross_key_0, ...
        """
        ...

    def append(self, other: Sentences) -> None:
        """Copy the rows of freshly encoded sentences of the same model behind this batch's rows.

        The shorter sources of the two are padded (zeros, source mask False); the new rows get this batch's capacity.
        """
        ...


class StepModel(Protocol):
    """A model ready to run on some backend. Safe to use from several threads."""

    @property
    def dimensions(self) -> Dimensions:
        """The sizes that the graphs show."""
        ...

    @property
    def limits(self) -> Limits:
        """The longest sequences."""
        ...

    @property
    def gives_attention(self) -> bool:
        """Whether steps give attention."""
        ...

    @property
    def refill_at(self) -> float:
        """The part of a batch that must be free before sentences join those under way; 1: they join none.

        Where a step costs what its rows cost, a batch that is decoded to its end is cheaper: its prompts are taken in
        with one query each, and no sentence attends over as many slots as one that began earlier.
        """
        ...

    def encode(self, source_ids: Ids, source_mask: Mask, *, capacity: int) -> Sentences:
        """Run the encoder on a padded batch and set up its caches.

        Args:
            source_ids: [B, S].
            source_mask: [B, S], False at padding; every row has at least one True.
            capacity: slots of each row to begin with.
        """
        ...

    def close(self) -> None:
        """Free what the backend holds."""
        ...
