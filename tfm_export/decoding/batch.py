"""The live batch: which row holds which request, where its next tokens go in the cache, and what they may see.

Every row is a sentence with K queries a step (its beams; K is 1 for greedy search). The cache is append-only: query k
of a step writes slot write_index + k of its row, and the row's mask says which slots are on query k's own path.
Re-ranking beams permutes mask rows; no step moves or copies a cache. When a row is full, the slots that are on no
query's path any more are given up, and the others move together. A row first takes in its prompt (the start token
and a forced prefix), several tokens a step. Rows that join while others decode take in theirs beside them, K a step.

All that there is of a row is here, or reached from here. Rows have no gaps: when one leaves, the last takes its place,
in `Batch.leave` and nowhere else.

Letters: R rows allocated, B rows live (the first B), K queries of a decoding row, Q queries of this step, C slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfm_export.decoding.attention import AttentionHistory
from tfm_export.decoding.histories import Histories, enlarged, follow
from tfm_export.decoding.request import RequestState
from tfm_export.runtime.step_model import LARGEST_STEP, Floats, Ids, Mask, Sentences, StepModel, StepOutput

FIRST_CAPACITY = 32
STEPS_AHEAD = 4  # that a row which was packed has room for, at least
MULTIPLE = 16  # of slots: as long as a vector of numbers


class Batch:
    """Requests that are decoded together, which join and leave at different times.

    Args:
        model: what runs the steps.
        width: K.
        longest: slots that the longest target will need; capacity grows up to it.
        attention: keeps what every query attends to; None where nobody wants to know.

    Attributes:
        live: the request of each row.
        histories: the hypotheses of each row.
        source_length: S, to which the sources are padded.
        capacity: C.
    """

    def __init__(self, model: StepModel, width: int, longest: int, attention: AttentionHistory | None = None) -> None:
        self.live: list[RequestState] = []
        self.histories = Histories(width)
        self.source_length, self.capacity = 0, FIRST_CAPACITY
        self._model, self._width, self._longest, self._attention = model, width, longest, attention
        self._steps_greedily = attention is None and model.capabilities.steps_greedily
        self._steps_beams = attention is None and model.capabilities.steps_beams
        self._packs = attention is None and model.capabilities.packs
        self._sentences: Sentences | None = None
        self._beams = np.arange(width)
        self._prompting = self._left = False
        self._ids: Ids = np.zeros((0, width), np.int64)
        self._positions: Ids = np.zeros((0, width), np.int64)
        self._write_index: Ids = np.zeros(0, np.int64)
        self._mask: Mask = np.zeros((0, 1, width, 0), np.bool_)
        self._spare: Mask = np.zeros((0, width, 0), np.bool_)
        self._index: Ids = np.arange(0)

    def allow(self, longest: int) -> None:
        """Let rows have so many slots."""
        self._longest = max(self._longest, longest)

    # What the search reads and steers.

    @property
    def rows(self) -> Ids:
        """All live rows."""
        return self._index[: len(self.live)]

    @property
    def ready(self) -> Ids:
        """The rows for which the last step said what may follow: those with no prompt left."""
        if not self._prompting:
            return self.rows
        return np.flatnonzero([not state.prompt for state in self.live])

    @property
    def can_step_greedily(self) -> bool:
        """Whether `step_greedily` can be had now: the backend gives it, and every row is ready."""
        return self._steps_greedily and not self._prompting

    @property
    def can_step_beams(self) -> bool:
        """Whether `step_beams` can be had now: the backend gives it, and every row is ready."""
        return self._steps_beams and not self._prompting

    @property
    def cache_bytes(self) -> int:
        """A row's self-attention cache, in 32-bit floats."""
        dimensions = self._model.dimensions
        return 2 * dimensions.decoder_layers * dimensions.heads * dimensions.head_size * 4 * self.capacity

    def extend(self, rows: Ids, tokens: Ids, log_probs: NDArray[np.floating[Any]], parents: Ids | None = None) -> None:
        """Let hypothesis k of each of the rows have one more of tokens [len(rows), K], which the next step takes in.

        Args:
            rows: some rows.
            tokens: [len(rows), K].
            log_probs: [len(rows), K].
            parents: [len(rows), K], the hypotheses that they extend; None where each extends itself.
        """
        if parents is not None:
            self.histories.rerank(rows, parents)
            follow(self._mask[:, 0], self._spare, rows, parents)
        self.histories.append(rows, tokens, log_probs)
        self._ids[rows] = tokens

    def attention(self, row: int, query: int, tokens: int) -> Floats | None:
        """What so many tokens on the path of a query attend to, [tokens, source length]; None if it is not kept."""
        if self._attention is None:
            return None
        return self._attention.of(row, self._mask[row, 0, query], tokens, len(self.live[row].request.source))

    # A step.

    def step(self, *, full: bool) -> StepOutput:
        """Run the decoder over every row's next tokens.

        Returns:
            [B, K, ...], or [B, 1, ...] when every row was taking in its prompt. What follows a prompt that has just
            come to its end stands in the last query.
        """
        if self._prompting:
            return self._step_with_prompts(full)
        self._make_room(self._width)
        size = len(self.live)
        self._mark_own_slots(self._index[:size])
        output = self._run(self._ids[:size], self._positions[:size], self._mask[:size], full)
        self._write_index[:size] += self._width
        self._positions[:size] += 1
        return output

    def step_greedily(self, steps: int, until: Callable[[list[int]], bool]) -> tuple[int, Ids]:
        """Run the decoder several times, each time over the best token of the time before.

        Args:
            steps: at most so many.
            until: is told the best token of each row before the next step is taken; True if there is to be none.

        Returns:
            How many steps were taken, n, and the best token [B] after the last; all n are in the histories.
        """
        sentences, steps = self._several(steps)
        tokens, log_probs = sentences.step_greedily(*self._step_arrays, steps=steps, until=until)
        rows, size, taken = self.rows, len(self.live), tokens.shape[1]
        self._mask[rows[:, None], 0, 0, self._write_index[:size, None] + np.arange(taken)] = True
        self._write_index[:size] += taken
        self._positions[:size] += taken
        for place in range(taken):
            self.histories.append(rows, tokens[:, place, None], log_probs[:, place, None])
        self._ids[:size] = tokens[:, -1:]
        return taken, tokens[:, -1]

    def step_beams(self, steps: int, end_ids: Ids, until: Callable[[], bool]) -> tuple[int, StepOutput]:
        """Run the decoder several times, its beams ranked after all but the last time.

        Args:
            steps: at most so many.
            end_ids: a step is the last one if any row would keep one of these, or a hypothesis that is dead.
            until: asked between two steps; True if the next one is to be the last.

        Returns:
            How many steps were taken, and the last one's output [B, K, ...]; what the others chose is in the histories.
        """
        sentences, steps = self._several(steps)
        rows, size = self.rows, len(self.live)
        scores = self.histories.scores[:size]
        found = sentences.step_beams(*self._step_arrays, scores, end_ids=end_ids, steps=steps, until=until)
        ranked = found.tokens.shape[1]
        for place in range(ranked + 1):
            self._write_index[:size] += self._width
            self._positions[:size] += 1
            if place < ranked:
                parents, log_probs = found.parents[:, place], found.log_probs[:, place]
                scores = np.take_along_axis(scores, parents, axis=1) + log_probs
                self.extend(rows, found.tokens[:, place], log_probs, parents)
                self._mark_own_slots(rows)
        self.histories.scores[:size] = scores
        return ranked + 1, found.output

    @property
    def _step_arrays(self) -> tuple[Ids, Ids, Ids, Mask]:
        size = len(self.live)
        return self._ids[:size], self._positions[:size], self._write_index[:size], self._mask[:size]

    def _several(self, steps: int) -> tuple[Sentences, int]:
        """Make ready for several steps. Returns how many there is room for, of so many."""
        assert self._sentences is not None, "a step needs a row"
        self._make_room(self._width)
        self._mark_own_slots(self.rows)
        room = self.capacity - max(self._write_index[: len(self.live)].tolist())
        return self._sentences, min(steps, room // self._width)

    def _step_with_prompts(self, full: bool) -> StepOutput:
        size, prompts = len(self.live), [state.prompt for state in self.live]
        decoding = self.ready
        queries = self._width
        if not decoding.size:
            most = LARGEST_STEP // (size * self._model.dimensions.target_vocabulary_size)
            queries = max(min(max(map(len, prompts)), most), 1)
        self._make_room(queries)
        if queries == self._width:
            ids, positions, mask = self._ids, self._positions, self._mask
        else:
            ids, positions = np.zeros((size, queries), np.int64), np.zeros((size, queries), np.int64)
            mask = np.zeros((size, 1, queries, self.capacity), np.bool_)
        self._mark_own_slots(decoding)
        taken = np.full(size, self._width)
        for row, prompt in enumerate(prompts):
            if prompt:
                piece = min(queries, len(prompt))
                taken[row] = piece
                # Queries beyond the piece repeat its last token: they see what it sees, so they say what it says.
                offsets = np.minimum(np.arange(queries), piece - 1)
                ids[row] = np.asarray(prompt)[offsets]
                positions[row] = self._write_index[row] + offsets
                mask[row, 0] = np.arange(self.capacity) <= positions[row, :, None]
        output = self._run(ids[:size], positions[:size], mask[:size], full)
        self._positions[decoding] += 1
        self._write_index[:size] += taken
        for row, prompt in enumerate(prompts):
            if prompt:
                del prompt[: int(taken[row])]
                done = int(self._write_index[row])
                self._positions[row] = done
                self._mask[row, 0] = np.arange(self.capacity) < done
        self._prompting = any(prompts)
        return output if decoding.size else _last_query(output)

    def _mark_own_slots(self, rows: Ids) -> None:
        self._mask[rows[:, None], 0, self._beams, self._write_index[rows][:, None] + self._beams] = True

    def _run(self, ids: Ids, positions: Ids, mask: Mask, full: bool) -> StepOutput:
        assert self._sentences is not None, "a step needs a row"
        begin = self._write_index[: len(self.live)]
        output = self._sentences.step(ids, positions, begin, mask, full=full)
        if self._attention is not None:
            assert output.attention is not None, "a model that gives attention gave none"
            self._attention.record(begin, output.attention, self.capacity)
        return output

    # Joining and leaving.

    def join(self, states: Sequence[RequestState], pad: int) -> None:
        """Encode the sources of requests and put them behind the live rows.

        Args:
            states: of the requests, with a prompt each.
            pad: fills shorter sources.
        """
        if not self.live:
            self.capacity = max(FIRST_CAPACITY, max(len(state.prompt) for state in states) + self._width)
        ids, mask = padded([state.request.source for state in states], pad)
        fresh = self._model.encode(ids, mask, capacity=self.capacity)
        if self._sentences is None:
            self._sentences, self.source_length = fresh, ids.shape[1]
        else:
            self._sentences.append(fresh)
            self.source_length = max(self.source_length, ids.shape[1])
        first, size = len(self.live), len(self.live) + len(states)
        self._reserve(size)
        self._write_index[first:size] = 0
        self._mask[first:size] = False
        for row, state in enumerate(states, first):
            self.histories.join(row, state.forced)
        self.live += states
        self._prompting = True

    def leave(self, row: int) -> None:
        """Take a row out of the batch; the last one takes its place. `settle` must follow."""
        assert self._sentences is not None, "only a row can leave"
        state, last, self._left = self.live.pop(), len(self.live), True
        if row == last:
            return
        self._sentences.move(last, row)
        self.live[row] = state
        for array in (self._ids, self._positions, self._write_index, self._mask, *self.histories.arrays):
            array[row] = array[last]
        if self._attention is not None and last < len(self._attention.weights):  # it has taken a step
            self._attention.weights[row] = self._attention.weights[last]

    def settle(self) -> None:
        """Give up the rows that `leave` emptied."""
        if self._left and self._sentences is not None and self.live:
            self._sentences.shrink(len(self.live))
        if not self.live:
            self._sentences = None
        self._left, self._prompting = False, any(state.prompt for state in self.live)

    # Memory.

    def _make_room(self, queries: int) -> None:
        needed = max(self._write_index[: len(self.live)].tolist()) + queries
        if needed <= self.capacity:
            return
        assert self._sentences is not None, "growing needs a row"
        if self._packs:
            self._pack(self._sentences, queries)
        else:
            self.capacity = max(needed, min(2 * self.capacity, self._longest))
            self._sentences.grow(self.capacity)
        self._reserve(len(self._write_index))

    def _pack(self, sentences: Sentences, queries: int) -> None:
        """Give up the slots that no query sees, and have room for some steps."""
        mask = self._mask[: len(self.live), 0]
        seen = mask.any(axis=1)
        kept = seen.sum(axis=1)
        most = int(kept.max())
        slots = np.argsort(~seen, axis=1, kind="stable")[:, :most]
        ahead = max(STEPS_AHEAD * self._width, most // 4)
        capacity = -(-(most + queries + ahead) // MULTIPLE) * MULTIPLE
        capacity = max(most + queries, min(capacity, self._longest))
        sentences.pack(slots, capacity)
        self._mask = np.zeros((len(self._mask), 1, self._width, capacity), np.bool_)
        self._mask[: len(self.live), 0, :, :most] = np.take_along_axis(mask, slots[:, None], axis=2)
        self._write_index[: len(self.live)] = kept
        self.capacity = capacity

    def _reserve(self, rows: int) -> None:
        """Have arrays for so many rows of this capacity, keeping what the live ones hold."""
        rows, width, capacity = max(rows, len(self._write_index)), self._width, self.capacity
        if rows == len(self._write_index) and capacity == self._mask.shape[3] == self._spare.shape[2]:
            return
        self._ids = enlarged(self._ids, (rows, width), len(self.live))
        self._positions = enlarged(self._positions, (rows, width), len(self.live))
        self._write_index = enlarged(self._write_index, (rows,), len(self.live))
        self._mask = enlarged(self._mask, (rows, 1, width, capacity), len(self.live))
        self._spare = np.zeros((rows, width, capacity), np.bool_)
        self._index = np.arange(rows)


def padded(sequences: Sequence[Sequence[int]], pad: int) -> tuple[Ids, Mask]:
    """Sequences as rows of one array, and where they are."""
    shape = len(sequences), max(map(len, sequences))
    ids, mask = np.full(shape, pad, np.int64), np.zeros(shape, np.bool_)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = True
    return ids, mask


def _last_query(output: StepOutput) -> StepOutput:
    log_probs: Floats | None = None if output.log_probs is None else output.log_probs[:, -1:]
    level: Floats | None = None if output.log_normaliser is None else output.log_normaliser[:, -1:]
    return StepOutput(output.top_log_probs[:, -1:], output.top_ids[:, -1:], log_probs, level)
