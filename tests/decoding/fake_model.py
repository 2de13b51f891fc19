"""A StepModel whose answers are a table, and which watches how it is used.

Its cache holds the written tokens and their positions, NaN where nothing was written. What may follow a query depends
on the tokens that its mask lets it see, and on nothing else.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tfm_export.bundle import Limits, SpecialIds
from tfm_export.errors import NumericError, RequestError
from tfm_export.graph import Dimensions
from tfm_export.runtime.step_model import (
    BeamSteps,
    Capabilities,
    Floats,
    Ids,
    Mask,
    Sentences,
    StepModel,
    StepOutput,
    Until,
)

SPECIAL = SpecialIds(pad=0, bos=1, eos=2, source_ends_with_eos=False, unk=3)

# (source, tokens from the start token on) -> log-probabilities [V] of the next token.
Table = Callable[[tuple[int, ...], tuple[int, ...]], NDArray[np.float64]]


def random_table(vocabulary: int = 5, seed: int = 0, sharpness: float = 2.0) -> Table:
    """Independent random logits after every prefix of every source."""

    def table(source: tuple[int, ...], path: tuple[int, ...]) -> NDArray[np.float64]:
        generator = np.random.default_rng([seed, zlib.crc32(repr((source, path)).encode())])
        logits = generator.normal(size=vocabulary) * sharpness
        return logits - np.logaddexp.reduce(logits)

    return table


def long_table(vocabulary: int = 7, seed: int = 0) -> Table:
    """Targets of some 20 tokens, some much longer."""
    random = random_table(vocabulary, seed)

    def table(source: tuple[int, ...], path: tuple[int, ...]) -> np.ndarray:
        values = random(source, path).copy()
        if np.random.default_rng([len(path), len(source)]).random() < 0.7:
            values[SPECIAL.eos] = -9.0
        return values - np.logaddexp.reduce(values)

    return table


def attended(source: tuple[int, ...], path: tuple[int, ...]) -> Floats:
    """What the last token of a path attends to: weights for every source token."""
    generator = np.random.default_rng(zlib.crc32(repr((path, source)).encode()))
    return generator.dirichlet(np.full(len(source), 0.5)).astype(np.float32)


class FakeModel(StepModel):
    """See the module.

    Args:
        table: what follows what.
        vocabulary: V.
        candidates: N.
        longest: limit of both sides.
        gives_attention: whether steps tell what `attended` says, with NaN at padding.
        refill_at: see `Capabilities.refill_at`.
        packs: whether slots can be given up.
        runs_ahead: whether it takes several greedy steps in one go; `runs` has how many each time.
        ranks_beams: whether it takes several steps of beams in one go; `runs` has how many each time.
    """

    def __init__(
        self,
        table: Table,
        vocabulary: int = 5,
        candidates: int = 5,
        longest: int = 12,
        *,
        gives_attention: bool = False,
        refill_at: float = 0.25,
        packs: bool = True,
        runs_ahead: bool = False,
        ranks_beams: bool = False,
    ) -> None:
        self.capabilities = Capabilities(
            gives_attention=gives_attention,
            refill_at=refill_at,
            packs=packs,
            steps_greedily=runs_ahead,
            steps_beams=ranks_beams,
        )
        self.runs: list[int] = []
        self.table, self.encodes, self.steps, self.full_steps = table, 0, 0, 0
        self.moves, self.grows, self.packings, self.appends, self.rows_stepped = 0, 0, 0, 0, 0
        self.queries: list[int] = []
        self.dimensions = Dimensions(
            source_vocabulary_size=50,
            target_vocabulary_size=vocabulary,
            decoder_layers=1,
            heads=1,
            head_size=1,
            candidates=min(candidates, vocabulary),
        )
        self.limits = Limits(max_source_length=longest, max_target_length=longest)

    def encode(self, source_ids: Ids, source_mask: Mask, *, capacity: int) -> FakeSentences:
        assert source_mask.any(1).all()
        assert source_ids.shape == source_mask.shape
        self.encodes += 1
        sources = [tuple(ids[mask].tolist()) for ids, mask in zip(source_ids, source_mask, strict=True)]
        return FakeSentences(self, sources, capacity, source_ids.shape[1])

    def close(self) -> None: ...


class FakeSentences(Sentences):
    """Rows of (token, position) slots."""

    def __init__(self, model: FakeModel, sources: Sequence[tuple[int, ...]], capacity: int, width: int) -> None:
        self.model, self.sources, self.width = model, list(sources), width
        self.slots = np.full((len(sources), capacity, 2), np.nan)
        self.said: dict[tuple[int, int, bool], StepOutput] = {}  # written over by the next step of that kind

    @property
    def size(self) -> int:
        return len(self.sources)

    @property
    def capacity(self) -> int:
        return int(self.slots.shape[1])

    def step(
        self, target_ids: Ids, positions: Ids, write_index: Ids, self_mask: Mask, *, full: bool = False
    ) -> StepOutput:
        size, queries = target_ids.shape
        model, vocabulary = self.model, self.model.dimensions.target_vocabulary_size
        self._check(target_ids, positions, write_index, self_mask)
        model.steps, model.full_steps = model.steps + 1, model.full_steps + full
        model.rows_stepped += size
        model.queries.append(queries)
        log_probs: Floats = np.empty((size, queries, vocabulary), np.float32)
        attention = (
            np.full((size, queries, self.width), np.nan, np.float32) if model.capabilities.gives_attention else None
        )
        for row in range(size):
            place = slice(write_index[row], write_index[row] + queries)
            self.slots[row, place, 0], self.slots[row, place, 1] = target_ids[row], positions[row]
            for query in range(queries):
                seen = self.slots[row, self_mask[row, 0, query]]
                if np.isnan(seen).any():
                    raise NumericError(f"row {row}, query {query} sees a slot that was not written")
                path, order = seen[:, 0].astype(int), seen[:, 1]
                assert (order == np.arange(len(order))).all(), f"positions {order} of path {path}"
                assert path[-1] == target_ids[row, query], "a query must see itself last"
                source = self.sources[row]
                log_probs[row, query] = model.table(source, tuple(path.tolist()))
                if attention is not None:
                    attention[row, query, : len(source)] = attended(source, tuple(path.tolist()))
        order = np.argsort(-log_probs, axis=-1, kind="stable")[..., : model.dimensions.candidates]
        top = np.take_along_axis(log_probs, order, -1)
        said = StepOutput(top, order, log_probs if full else None, attention=attention)
        bound = self.said.setdefault((size, queries, full), said)
        for name, array in vars(said).items():
            if array is not None:
                getattr(bound, name)[:] = array
        return bound

    def step_greedily(
        self, target_ids: Ids, positions: Ids, write_index: Ids, self_mask: Mask, *, steps: int, until: Until
    ) -> tuple[Ids, Floats]:
        assert self.model.capabilities.steps_greedily, "asked for what it does not give"
        ids, mask = target_ids, self_mask.copy()
        found: list[StepOutput] = []
        while True:
            output = self.step(ids, positions + len(found), write_index + len(found), mask)
            found.append(copy.deepcopy(output))
            ids = found[-1].top_ids[:, :, 0]
            if len(found) == steps or until(ids[:, 0].tolist()):
                self.model.runs.append(len(found))
                tokens = np.concatenate([o.top_ids[:, :, 0] for o in found], axis=1)
                return tokens, np.concatenate([o.top_log_probs[:, :, 0] for o in found], axis=1)
            mask[np.arange(self.size), 0, 0, write_index + len(found)] = True

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
        rows, beams = target_ids.shape
        ids, mask, ranked = target_ids, self_mask, list[tuple[Ids, Ids, Floats]]()
        while True:
            taken = len(ranked)
            output = copy.deepcopy(self.step(ids, positions + taken, write_index + taken * beams, mask))
            found = [self._best_beams(scores[row], output, row) for row in range(rows)]
            parents, tokens, log_probs, sums = (np.array(part) for part in zip(*found, strict=True))
            if taken + 1 >= steps or np.isin(tokens, end_ids).any() or (sums == -np.inf).any():
                break
            ranked.append((tokens, parents, log_probs.astype(np.float32)))
            steps = len(ranked) + 1 if until() else steps
            ids, scores, mask = tokens, sums, np.take_along_axis(mask, parents[:, None, :, None], axis=2)
            for row, beam in np.ndindex(rows, beams):
                mask[row, 0, beam, write_index[row] + len(ranked) * beams + beam] = True
        self.model.runs.append(taken + 1)
        shape = 0, rows, beams
        every = (np.array(part) for part in zip(*ranked, strict=True)) if ranked else [np.zeros(shape, int)] * 3
        return BeamSteps(*(part.swapaxes(0, 1) for part in every), output)

    def _best_beams(self, scores: NDArray[np.float64], output: StepOutput, row: int) -> list[list[float]]:
        """Parents, tokens, log-probabilities and sums of those that live on, by the letter of the contract."""
        ways = [
            (-(scores[beam] + float(value)), beam, rank, int(token), float(value))
            for beam in range(len(scores))
            for rank, (value, token) in enumerate(
                zip(output.top_log_probs[row, beam], output.top_ids[row, beam], strict=True)
            )
        ]
        best = sorted(ways)[: len(scores)]
        return [[way[1] for way in best], [w[3] for w in best], [w[4] for w in best], [-w[0] for w in best]]

    def _check(self, target_ids: Ids, positions: Ids, write_index: Ids, self_mask: Mask) -> None:
        size, queries = target_ids.shape
        if size != self.size or positions.shape != (size, queries) or write_index.shape != (size,):
            raise RequestError(f"shapes {target_ids.shape} {positions.shape} {write_index.shape} for {self.size} rows")
        if self_mask.shape != (size, 1, queries, self.capacity) or self_mask.dtype != np.bool_:
            raise RequestError(f"mask {self_mask.shape} for {(size, 1, queries, self.capacity)}")
        if (write_index + queries > self.capacity).any() or (write_index < 0).any():
            raise RequestError(f"write_index {write_index} + {queries} passes the capacity {self.capacity}")
        if not self_mask.any(-1).all():
            raise RequestError("a query sees nothing")
        if positions.min() < 0 or positions.max() >= self.model.limits.max_target_length:
            raise RequestError(f"position {positions.max()} is not in the table")
        if target_ids.min() < 0 or target_ids.max() >= self.model.dimensions.target_vocabulary_size:
            raise RequestError("id out of range")

    def grow(self, capacity: int) -> None:
        assert capacity > self.capacity
        self.model.grows += 1
        more = np.full((self.size, capacity - self.capacity, 2), np.nan)
        self.slots = np.concatenate([self.slots, more], axis=1)

    def pack(self, slots: Ids, capacity: int) -> None:
        assert self.model.capabilities.packs, "asked for what it does not give"
        self.model.packings += 1
        kept = np.take_along_axis(self.slots, slots[:, :, None], axis=1)
        assert kept.shape[0] == self.size
        self.slots = np.pad(kept, ((0, 0), (0, capacity - kept.shape[1]), (0, 0)), constant_values=np.nan)

    def move(self, source: int, target: int) -> None:
        self.model.moves += 1
        self.slots[target], self.sources[target] = self.slots[source], self.sources[source]

    def shrink(self, size: int) -> None:
        assert 0 < size <= self.size
        self.slots, self.sources = self.slots[:size].copy(), self.sources[:size]

    def append(self, other: Sentences) -> None:
        assert isinstance(other, FakeSentences)
        self.model.appends += 1
        fresh = np.full((other.size, self.capacity, 2), np.nan)
        self.slots = np.concatenate([self.slots, fresh])
        self.sources += other.sources
        self.said.clear()
        self.width = max(self.width, other.width)
