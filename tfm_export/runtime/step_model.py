"""The seam between decoding and backends: what every backend gives, what it may give, and all that decoding may use.

A backend is a `StepModel`, which encodes sources to `Sentences`, which take steps. Both are protocols to inherit from:
what every backend must give has no body here, what it may give has one that refuses, and `Capabilities` says which of
the latter it gives. Decoding asks nothing else of a backend, its class least of all.

Shapes: B sentences, S source length, Q target tokens of a step, C cache slots a sentence, V target vocabulary,
N candidates, K beams. Arrays are numpy's, on the host; keys and values stay where the backend keeps them.
"""

# Bodies that refuse have no use for their arguments.
# ruff: noqa: ARG002

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from tfm_export.bundle import Limits
from tfm_export.graph import Dimensions

Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
Floats = NDArray[np.float32]
Until = Callable[[list[int]], bool]  # is told the best token of each row; True if no step is to follow

# A prompt is taken in by pieces such that a step's log_probs [B, Q, V] stay below this many numbers.
LARGEST_STEP = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a model gives beyond what every model must. The defaults are those of a model that gives nothing more.

    Attributes:
        gives_attention: every step gives attention.
        offers_attention: `StepModel.with_attention` gives a model whose steps give attention.
        steps_greedily: its sentences have `Sentences.step_greedily`.
        steps_beams: its sentences have `Sentences.step_beams`.
        packs: its sentences have `Sentences.pack`.
        refill_at: the part of a batch that must be free before sentences join those under way; 1: they join none. Where
            a step costs what its rows cost, a batch that is decoded to its end is cheaper: its prompts are taken in
            with one query each, and no sentence attends over as many slots as one that began earlier.
        threads: how many threads of the CPU a step computes with; None where others compute, or nobody knows.
    """

    gives_attention: bool = False
    offers_attention: bool = False
    steps_greedily: bool = False
    steps_beams: bool = False
    packs: bool = False
    refill_at: float = 1.0
    threads: int | None = None


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


@dataclass(frozen=True)
class BeamSteps:
    """Several steps of a beam search, n of them ranked and one more taken.

    Attributes:
        tokens: [B, n, K], those that live on after each ranked step, the best first.
        parents: [B, n, K], the beams that they extend, numbered as before that step.
        log_probs: [B, n, K], of each token.
        output: of the step after these, [B, K, N], which nobody has ranked yet.
    """

    tokens: Ids
    parents: Ids
    log_probs: Floats
    output: StepOutput


def _not_given(capability: str) -> NoReturn:
    raise NotImplementedError(f"Capabilities.{capability} does not promise this")


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

    def grow(self, capacity: int) -> None:
        """Give every row `capacity` slots, keeping what is written and zeroing the rest."""
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

    # What `Capabilities` promises.

    def step_greedily(
        self, target_ids: Ids, positions: Ids, write_index: Ids, self_mask: Mask, *, steps: int, until: Until
    ) -> tuple[Ids, Floats]:
        """Take several steps of one token, each with the best that the step before named, in the slot behind.

        Between two steps of decoding, much is done that a greedy search has no need for.

        Args:
            target_ids: [B, 1], of the first step.
            positions: [B, 1], of the first step.
            write_index: [B], of the first step.
            self_mask: [B, 1, 1, C], of the first step; each later one also sees the slots that were written since.
            steps: at most so many; neither slots nor positions may run out.
            until: asked before each step but the first.

        Returns:
            The best tokens [B, n] after the n steps that were taken, and their log-probabilities [B, n].

        Raises:
            RequestError: as `step`.
            NumericError: as `step`; perhaps only after the last step.
        """
        _not_given("steps_greedily")

    def step_beams(
        self,
        target_ids: Ids,
        positions: Ids,
        write_index: Ids,
        self_mask: Mask,
        scores: NDArray[np.float64],
        *,
        end_ids: Ids,
        steps: int,
        until: Callable[[], bool],
    ) -> BeamSteps:
        """Take several steps of K tokens, ranking the beams after all but the last, as beam search does.

        To rank is to keep the K largest sums of a beam's score and the log-probability of one of its N candidates,
        added in float64; of equal sums that of the lower beam, then of the better candidate. The token goes into the
        K slots behind, sees what its parent saw and itself, and has the sum as its score.

        Args:
            target_ids: [B, K], of the first step.
            positions: [B, K], of the first step.
            write_index: [B], of the first step.
            self_mask: [B, 1, K, C], of the first step.
            scores: [B, K], of the beams that take the first step; -inf for one that is dead.
            end_ids: a step is the last one if any row would keep one of these, or a sum of -inf.
            steps: at most so many; neither slots nor positions may run out.
            until: asked between two steps, perhaps not between all; True if the next one is to be the last.

        Raises:
            RequestError: as `step`.
            NumericError: as `step`; perhaps only after the last step.
        """
        _not_given("steps_beams")

    def pack(self, slots: Ids, capacity: int) -> None:
        """Keep some slots of each row, and give every row `capacity` of them; those behind hold any finite numbers.

        Args:
            slots: [B, n], the slots of each row that become its first n, in their order.
            capacity: n or more.
        """
        _not_given("packs")


class StepModel(Protocol):
    """A model ready to run on some backend. Safe to use from several threads.

    Attributes:
        dimensions: the sizes that the graphs show.
        limits: the longest sequences.
        capabilities: what it may give, and gives.
    """

    dimensions: Dimensions
    limits: Limits
    capabilities: Capabilities

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

    # What `Capabilities` promises.

    def with_attention(self) -> StepModel:
        """A model that is this one but for steps that give attention; perhaps slower. To be closed, too.

        Raises:
            RequestError: the bundle was exported without the graph for it, or the model is closed.
            BackendUnavailable: nothing here can run that graph.
        """
        _not_given("offers_attention")


class WrappedModel(StepModel):
    """A model that passes everything on to another; what changes something about a model begins with this."""

    def __init__(self, model: StepModel) -> None:
        self._model = model
        self.dimensions, self.limits, self.capabilities = model.dimensions, model.limits, model.capabilities

    def encode(self, source_ids: Ids, source_mask: Mask, *, capacity: int) -> Sentences:
        """Run the encoder; see `StepModel.encode`."""
        return self._model.encode(source_ids, source_mask, capacity=capacity)

    def close(self) -> None:
        """Close the model."""
        self._model.close()

    def with_attention(self) -> Self:
        """Wrap the model that gives attention."""
        other = copy.copy(self)
        WrappedModel.__init__(other, self._model.with_attention())
        return other


class WrappedSentences(Sentences):
    """Sentences that pass everything on to others; what changes or watches a step begins with this."""

    def __init__(self, sentences: Sentences) -> None:
        self._sentences = sentences

    @property
    def size(self) -> int:
        """B: rows in use."""
        return self._sentences.size

    @property
    def capacity(self) -> int:
        """C: slots of each row."""
        return self._sentences.capacity

    def step(
        self, target_ids: Ids, positions: Ids, write_index: Ids, self_mask: Mask, *, full: bool = False
    ) -> StepOutput:
        """Take a step; see `Sentences.step`."""
        return self._sentences.step(target_ids, positions, write_index, self_mask, full=full)

    def grow(self, capacity: int) -> None:
        """Give every row more slots; see `Sentences.grow`."""
        self._sentences.grow(capacity)

    def move(self, source: int, target: int) -> None:
        """Copy a row over another; see `Sentences.move`."""
        self._sentences.move(source, target)

    def shrink(self, size: int) -> None:
        """Keep the first rows; see `Sentences.shrink`."""
        self._sentences.shrink(size)

    def read(self, name: str) -> Floats:
        """Copy a cache; see `Sentences.read`."""
        return self._sentences.read(name)

    def append(self, other: Sentences) -> None:
        """Copy the rows of others that are wrapped likewise; see `Sentences.append`."""
        assert isinstance(other, WrappedSentences), "sentences of another model"
        self._sentences.append(other._sentences)  # noqa: SLF001 (of its own kind)

    def step_greedily(
        self, target_ids: Ids, positions: Ids, write_index: Ids, self_mask: Mask, *, steps: int, until: Until
    ) -> tuple[Ids, Floats]:
        """Take several steps; see `Sentences.step_greedily`."""
        return self._sentences.step_greedily(target_ids, positions, write_index, self_mask, steps=steps, until=until)

    def step_beams(
        self,
        target_ids: Ids,
        positions: Ids,
        write_index: Ids,
        self_mask: Mask,
        scores: NDArray[np.float64],
        *,
        end_ids: Ids,
        steps: int,
        until: Callable[[], bool],
    ) -> BeamSteps:
        """Take several steps of beams; see `Sentences.step_beams`."""
        return self._sentences.step_beams(
            target_ids, positions, write_index, self_mask, scores, end_ids=end_ids, steps=steps, until=until
        )

    def pack(self, slots: Ids, capacity: int) -> None:
        """Give up slots; see `Sentences.pack`."""
        self._sentences.pack(slots, capacity)
