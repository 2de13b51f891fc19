"""The live batch: which row holds which sentence, where its next tokens go in the cache, and what they may see.

Every row is a sentence with K queries a step (its beams; K is 1 for greedy search). The cache is append-only: query k
of a step writes slot write_index + k of its row, and the row's mask says which slots are on query k's own path.
Re-ranking beams permutes mask rows; no step moves or copies a cache. When a row is full, the slots that are on no
query's path any more are given up, and the others move together. A row first takes in its prompt (the start token
and a forced prefix), several tokens a step. Rows that join while others decode take in theirs beside them, K a step.

Letters: R rows allocated, B rows live (the first B), K queries of a decoding row, Q queries of this step, C slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfm_export.decoding.attention import AttentionHistory
from tfm_export.runtime.step_model import LARGEST_STEP, Floats, Ids, Mask, Sentences, StepModel, StepOutput

FIRST_CAPACITY = 32
STEPS_AHEAD = 4  # that a row which was packed has room for, at least
MULTIPLE = 16  # of slots: as long as a vector of numbers


class Rows:
    """A batch whose sentences join and leave at different times.

    Args:
        model: what runs the steps.
        width: K.
        longest: slots that the longest target will need; capacity grows up to it.
        history: keeps what every query attends to; None where nobody wants to know.
    """

    def __init__(self, model: StepModel, width: int, longest: int, history: AttentionHistory | None = None) -> None:
        self.size = 0
        self.width = width
        self.model = model
        self._longest = longest
        self._history = history
        self._sentences: Sentences | None = None
        self._source_length = 0
        self._beams = np.arange(width)
        self._capacity = FIRST_CAPACITY
        self._prompts: list[list[int]] = []
        self._prompting = self._left = False
        self._goes_ahead = history is None and model.capabilities.steps_greedily
        self._packs = history is None and model.capabilities.packs
        self._ids: Ids = np.zeros((0, width), np.int64)
        self._positions: Ids = np.zeros((0, width), np.int64)
        self._write_index: Ids = np.zeros(0, np.int64)
        self._mask: Mask = np.zeros((0, 1, width, 0), np.bool_)
        self._spare: Mask = np.zeros((0, width, 0), np.bool_)
        self.index: Ids = np.arange(0)

    # What the search reads and steers.

    @property
    def capacity(self) -> int:
        """C, the slots of each row."""
        return self._capacity

    @property
    def cache_bytes(self) -> int:
        """A row's self-attention cache, in 32-bit floats."""
        dimensions = self.model.dimensions
        return 2 * dimensions.decoder_layers * dimensions.heads * dimensions.head_size * 4 * self._capacity

    @property
    def source_length(self) -> int:
        """S, to which the sources are padded."""
        return self._source_length

    @property
    def ready(self) -> Ids:
        """The rows for which the last step said what may follow: those with no prompt left."""
        if not self._prompting:
            return self.index[: self.size]
        return np.flatnonzero([not prompt for prompt in self._prompts[: self.size]])

    def feed(self, rows: Ids, tokens: Ids) -> None:
        """Make tokens [len(rows), K] the next step's."""
        self._ids[rows] = tokens

    def rerank(self, rows: Ids, parents: Ids) -> None:
        """Let query k of each of the rows go on from the path of query parents[row, k]."""
        follow(self._mask[:, 0], self._spare, rows, parents)

    def attention(self, row: int, query: int, tokens: int, source_length: int) -> Floats | None:
        """What the path of a query attends to; see `AttentionHistory.of`. None where it is not kept."""
        if self._history is None:
            return None
        return self._history.of(row, self._mask[row, 0, query], tokens, source_length)

    # A step.

    def step(self, *, full: bool) -> StepOutput:
        """Run the decoder over every row's next tokens.

        Returns:
            [B, K, ...], or [B, 1, ...] when every row was taking in its prompt. What follows a prompt that has just
            come to its end stands in the last query.
        """
        if self._prompting:
            return self._step_with_prompts(full)
        self._make_room(self.width)
        size = self.size
        self._mark_own_slots(self.index[:size])
        output = self._run(self._ids[:size], self._positions[:size], self._mask[:size], full)
        self._write_index[:size] += self.width
        self._positions[:size] += 1
        return output

    def step_greedily(self, steps: int, until: Callable[[list[int]], bool]) -> tuple[Ids, Floats] | None:
        """Run the decoder several times, each time over the best token of the time before.

        Args:
            steps: at most so many.
            until: see `Sentences.step_greedily`.

        Returns:
            The best tokens [B, n] after the n steps that were taken, and their log-probabilities [B, n]; None, and no
            step was taken, where that cannot be done.
        """
        if self._prompting or not self._goes_ahead:
            return None
        self._make_room(1)
        assert self._sentences is not None, "a step needs a row"
        rows, begin = self.index[: self.size], self._write_index[: self.size]
        self._mark_own_slots(rows)
        steps = min(steps, self._capacity - max(begin.tolist()))
        found = self._sentences.step_greedily(
            self._ids[: self.size],
            self._positions[: self.size],
            begin,
            self._mask[: self.size],
            steps=steps,
            until=until,
        )
        taken = found[0].shape[1]
        self._mask[rows[:, None], 0, 0, begin[:, None] + np.arange(taken)] = True
        self._write_index[: self.size] += taken
        self._positions[: self.size] += taken
        return found

    def _step_with_prompts(self, full: bool) -> StepOutput:
        size, prompts = self.size, self._prompts[: self.size]
        decoding = np.flatnonzero([not prompt for prompt in prompts])
        queries = self.width
        if not decoding.size:
            most = LARGEST_STEP // (size * self.model.dimensions.target_vocabulary_size)
            queries = max(min(max(map(len, prompts)), most), 1)
        self._make_room(queries)
        if queries == self.width:
            ids, positions, mask = self._ids, self._positions, self._mask
        else:
            ids, positions = np.zeros((size, queries), np.int64), np.zeros((size, queries), np.int64)
            mask = np.zeros((size, 1, queries, self._capacity), np.bool_)
        self._mark_own_slots(decoding)
        taken = np.full(size, self.width)
        for row, prompt in enumerate(prompts):
            if prompt:
                piece = min(queries, len(prompt))
                taken[row] = piece
                # Queries beyond the piece repeat its last token: they see what it sees, so they say what it says.
                offsets = np.minimum(np.arange(queries), piece - 1)
                ids[row] = np.asarray(prompt)[offsets]
                positions[row] = self._write_index[row] + offsets
                mask[row, 0] = np.arange(self._capacity) <= positions[row, :, None]
        output = self._run(ids[:size], positions[:size], mask[:size], full)
        self._positions[decoding] += 1
        self._write_index[:size] += taken
        for row, prompt in enumerate(prompts):
            if prompt:
                self._end_piece(row, int(taken[row]))
        self._prompting = any(self._prompts[:size])
        return output if decoding.size else _last_query(output)

    def _end_piece(self, row: int, piece: int) -> None:
        del self._prompts[row][:piece]
        done = int(self._write_index[row])
        self._positions[row] = done
        self._mask[row, 0] = np.arange(self._capacity) < done

    def _mark_own_slots(self, rows: Ids) -> None:
        self._mask[rows[:, None], 0, self._beams, self._write_index[rows][:, None] + self._beams] = True

    def _run(self, ids: Ids, positions: Ids, mask: Mask, full: bool) -> StepOutput:
        assert self._sentences is not None, "a step needs a row"
        output = self._sentences.step(ids, positions, self._write_index[: self.size], mask, full=full)
        if self._history is not None:
            assert output.attention is not None, "a model that gives attention gave none"
            self._history.record(self._write_index[: self.size], output.attention, self._capacity)
        return output

    # Joining and leaving.

    def join(self, sources: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], pad: int) -> None:
        """Encode sources and put them behind the live rows.

        Args:
            sources: ids of each.
            prompts: what each decoder takes in first.
            pad: fills shorter sources.
        """
        if not self.size:
            self._capacity = max(FIRST_CAPACITY, max(map(len, prompts)) + self.width)
        first = self.size
        ids, mask = padded(sources, pad)
        fresh = self.model.encode(ids, mask, capacity=self._capacity)
        if self._sentences is None:
            self._sentences, self._source_length = fresh, ids.shape[1]
        else:
            self._sentences.append(fresh)
            self._source_length = max(self._source_length, ids.shape[1])
        self._reserve(first + len(sources))
        self.size = first + len(sources)
        self._write_index[first : self.size] = 0
        self._mask[first : self.size] = False
        self._prompts[first:] = [list(prompt) for prompt in prompts]
        self._prompting = True

    def leave(self, row: int) -> None:
        """Take a row out of the batch: the last live row is moved into its place. `settle` must follow."""
        assert self._sentences is not None, "only a row can leave"
        self.size -= 1
        last, self._left = self.size, True
        prompt = self._prompts.pop()
        if row == last:
            return
        self._sentences.move(last, row)
        if self._history is not None:
            self._history.move(last, row)
        for array in (self._ids, self._positions, self._write_index, self._mask):
            array[row] = array[last]
        self._prompts[row] = prompt

    def settle(self) -> None:
        """Give up the rows that `leave` emptied."""
        if self._left and self._sentences is not None and self.size:
            self._sentences.shrink(self.size)
        if not self.size:
            self._sentences = None
        self._left, self._prompting = False, any(self._prompts)

    # Memory.

    def _make_room(self, queries: int) -> None:
        needed = max(self._write_index[: self.size].tolist()) + queries
        if needed <= self._capacity:
            return
        assert self._sentences is not None, "growing needs a row"
        if self._packs:
            self._pack(self._sentences, queries)
        else:
            self._capacity = max(needed, min(2 * self._capacity, self._longest))
            self._sentences.grow(self._capacity)
        self._reserve(len(self._write_index))

    def _pack(self, sentences: Sentences, queries: int) -> None:
        """Give up the slots that no query sees, and have room for some steps."""
        mask = self._mask[: self.size, 0]
        seen = mask.any(axis=1)
        kept = seen.sum(axis=1)
        most = int(kept.max())
        slots = np.argsort(~seen, axis=1, kind="stable")[:, :most]
        ahead = max(STEPS_AHEAD * self.width, most // 4)
        capacity = -(-(most + queries + ahead) // MULTIPLE) * MULTIPLE
        capacity = max(most + queries, min(capacity, self._longest))
        sentences.pack(slots, capacity)
        self._mask = np.zeros((len(self._mask), 1, self.width, capacity), np.bool_)
        self._mask[: self.size, 0, :, :most] = np.take_along_axis(mask, slots[:, None], axis=2)
        self._write_index[: self.size] = kept
        self._capacity = capacity

    def _reserve(self, rows: int) -> None:
        """Have arrays for so many rows of this capacity, keeping what the live ones hold."""
        rows, width, capacity = max(rows, len(self._write_index)), self.width, self._capacity
        if rows == len(self._write_index) and capacity == self._mask.shape[3] == self._spare.shape[2]:
            return
        self._ids = _enlarged(self._ids, (rows, width), self.size)
        self._positions = _enlarged(self._positions, (rows, width), self.size)
        self._write_index = _enlarged(self._write_index, (rows,), self.size)
        self._mask = _enlarged(self._mask, (rows, 1, width, capacity), self.size)
        self._spare = np.zeros((rows, width, capacity), np.bool_)
        self.index = np.arange(rows)


def _enlarged(array: NDArray[Any], shape: tuple[int, ...], rows: int) -> NDArray[Any]:
    new = np.zeros(shape, array.dtype)
    if rows:
        new[(slice(rows), *map(slice, array.shape[1:]))] = array[:rows]
    return new


def padded(sequences: Sequence[Sequence[int]], pad: int) -> tuple[Ids, Mask]:
    """Sequences as rows of one array, and where they are."""
    shape = len(sequences), max(map(len, sequences))
    ids, mask = np.full(shape, pad, np.int64), np.zeros(shape, np.bool_)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = True
    return ids, mask


def follow(array: NDArray[Any], spare: NDArray[Any], rows: Ids, parents: Ids) -> None:
    """array[row, k] = array[row, parents[row, k]] for some rows of an array [R, K, L], by way of a spare one."""
    width, length = array.shape[1:]
    places = rows[:, None] * width + parents
    # mode="clip" lets numpy write straight into `out`; no place is out of range.
    moved = np.take(array.reshape(-1, length), places, axis=0, out=spare[: len(rows)], mode="clip")
    array[rows] = moved


def _last_query(output: StepOutput) -> StepOutput:
    log_probs: Floats | None = None if output.log_probs is None else output.log_probs[:, -1:]
    level: Floats | None = None if output.log_normaliser is None else output.log_normaliser[:, -1:]
    return StepOutput(output.top_log_probs[:, -1:], output.top_ids[:, -1:], log_probs, level)
