"""Speculative decoding: a cheaper variant guesses the next tokens, the model takes them all in one step.

A step of few rows costs what reading the weights costs, whether it takes in one token of each or several. So a draft,
the same model in fewer bits, runs some tokens ahead of the search, and the model takes in the token that it was asked
about together with those that were guessed. As long as the search goes on with what was guessed, the answers are there
already. They are the model's own, whatever was guessed: a bad draft costs time, never a token.

Sentences are guessed whose search has one query a step: greedy search, and sampling. Of beams all would have to be
guessed at once, in their order, which does not pay. Letters as in `step_model`; L tokens are guessed.
Source: Leviathan et al. 2022, Fast Inference from Transformers via Speculative Decoding, arXiv 2211.17192.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfm_export.errors import NumericError, RequestError
from tfm_export.runtime.checks import check_step_arrays
from tfm_export.runtime.step_model import (
    LARGEST_STEP,
    BeamSteps,
    Floats,
    Ids,
    Mask,
    Sentences,
    StepModel,
    StepOutput,
    Until,
    WrappedModel,
)

MOST_ROWS = 4  # of a batch that is guessed: with more, arithmetic costs more than reading the weights
MOST_GUESSES = 7
FIRST_GUESSES = 4
LONGEST_REST = 4  # steps without guesses; if then none is right either, there are no more
_CANNOT = NumericError, RequestError, MemoryError  # what keeps a draft from guessing, and no request from its answer


class SpeculativeModel(WrappedModel):
    """A model whose next tokens a draft guesses. Safe to use from several threads.

    Args:
        model: whose answers these are.
        draft: makes the guesses; with the same vocabularies and limits.
        end_ids: the tokens behind which there is nothing to guess.
    """

    def __init__(self, model: StepModel, draft: StepModel, end_ids: Collection[int]) -> None:
        super().__init__(model)
        self._draft, self._end_ids = draft, end_ids

    def encode(self, source_ids: Ids, source_mask: Mask, *, capacity: int) -> SpeculativeSentences:
        """Run the encoder on a padded batch and set up its caches; see `StepModel.encode`.

        The draft's follows once it is known that there is something to guess.
        """
        sentences = self._model.encode(source_ids, source_mask, capacity=capacity)
        return SpeculativeSentences(sentences, self._draft, np.array(source_ids), np.array(source_mask), self._end_ids)

    def close(self) -> None:
        """Free both models."""
        super().close()
        self._draft.close()


@dataclass
class _Ahead:
    """What the model has taken in last: the token of each row that it was asked about, and those that were guessed.

    Attributes:
        target_ids: [B, 1 + L].
        write_index: [B], the slot of each row's first.
        output: what the model said.
        asked: how many of the tokens were asked about.
    """

    target_ids: Ids
    write_index: Ids
    output: StepOutput
    asked: int = 1

    def goes_on_with(self, target_ids: Ids, write_index: Ids, full: bool) -> bool:
        """Whether these are the tokens that come next, and all that is wanted is there."""
        return (
            np.array_equal(self.target_ids[:, self.asked : self.asked + 1], target_ids)
            and np.array_equal(self.write_index + self.asked, write_index)
            and (self.output.log_probs is not None or not full)
        )

    def output_of(self, query: int) -> StepOutput:
        """What the model said about one of the tokens."""
        return self._selected((slice(None), slice(query, query + 1)))

    def rows(self, rows: list[int]) -> _Ahead:
        """What is known of some rows."""
        return _Ahead(self.target_ids[rows], self.write_index[rows], self._selected(rows), self.asked)

    def _selected(self, part: list[int] | tuple[slice, slice]) -> StepOutput:
        fields: dict[str, Any] = {n: array if array is None else array[part] for n, array in vars(self.output).items()}
        return StepOutput(**fields)


class SpeculativeSentences(Sentences):
    """A batch of sentences some of whose next tokens were taken in before anybody asked; see `Sentences`."""

    def __init__(
        self, sentences: Sentences, draft: StepModel, source_ids: Ids, source_mask: Mask, end_ids: Collection[int]
    ) -> None:
        self._sentences, self._end_ids = sentences, end_ids
        self._draft_model: StepModel | None = draft  # None once nothing is guessed any more
        self._source_ids, self._source_mask = source_ids, source_mask
        self._draft: Sentences | None = None  # until there is something to guess
        self._paths: list[list[int]] = [[] for _ in range(sentences.size)]  # the token in each slot
        self._drafted = [0] * sentences.size  # how many of these the draft has taken in
        self._ahead: _Ahead | None = None
        self._pace = _Pace()

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
        """Write Q tokens into the cache and say what may follow each; see `Sentences.step`."""
        if self._draft_model is None:
            return self._sentences.step(target_ids, positions, write_index, self_mask, full=full)
        check_step_arrays(target_ids, positions, write_index, self_mask, size=self.size, capacity=self.capacity)
        if not self._go_on(positions, write_index, self_mask):
            self._give_up()
            return self._sentences.step(target_ids, positions, write_index, self_mask, full=full)
        ahead, begin = self._ahead, write_index.tolist()
        for row, ids in enumerate(target_ids.tolist()):
            self._paths[row][begin[row] :] = ids
        if ahead and ahead.goes_on_with(target_ids, write_index, full):
            ahead.asked += 1
            return ahead.output_of(ahead.asked - 1)
        if ahead:
            self._pace.judge(right=ahead.asked - 1, wrong=ahead.target_ids.shape[1] - ahead.asked)
        self._ahead, self._drafted = None, list(map(min, self._drafted, begin))
        # The first step of a row is its prompt, which may be that of beams: of these nothing is guessed.
        guessed = self._guess() if target_ids.shape[1] == 1 and min(begin) else []
        if not guessed:
            return self._sentences.step(target_ids, positions, write_index, self_mask, full=full)
        return self._step_ahead(np.stack([target_ids[:, 0], *guessed], axis=1), write_index, full)

    def _step_ahead(self, ids: Ids, write_index: Ids, full: bool) -> StepOutput:
        """Take in tokens [B, 1 + L], of which the first were asked about."""
        places = write_index[:, None] + np.arange(ids.shape[1])
        try:
            output = self._sentences.step(ids, places, write_index, self._before(places), full=full)
        except NumericError:
            # Perhaps of a guess that nobody asks about. What it wrote may not be finite, and masked slots must be: the
            # tokens that were asked about are written there, too.
            self._give_up()
            ids, places = (np.repeat(array[:, :1], array.shape[1], axis=1) for array in (ids, places))
            output = self._sentences.step(ids, places, write_index, self._before(places), full=full)
            return _Ahead(ids, write_index, output).output_of(0)
        self._ahead = _Ahead(ids, write_index.copy(), output)
        return self._ahead.output_of(0)

    def step_greedily(
        self, target_ids: Ids, positions: Ids, write_index: Ids, self_mask: Mask, *, steps: int, until: Until
    ) -> tuple[Ids, Floats]:
        """Take several steps, one by one while they are guessed; see `Sentences.step_greedily`."""
        if self.size > MOST_ROWS:
            self._give_up()
        tokens: list[Ids] = []
        log_probs: list[Floats] = []
        mask = self_mask.copy()
        while self._draft_model is not None:
            output = self.step(target_ids, positions, write_index, mask)
            target_ids = output.top_ids[:, :, 0].copy()
            tokens.append(target_ids)
            log_probs.append(output.top_log_probs[:, :, 0].copy())
            if len(tokens) >= steps or until(target_ids[:, 0].tolist()):
                break
            positions, write_index = positions + 1, write_index + 1
            mask[np.arange(self.size), 0, 0, write_index] = True
        else:
            rest = self._sentences.step_greedily(
                target_ids, positions, write_index, mask, steps=steps - len(tokens), until=until
            )
            tokens.append(rest[0])
            log_probs.append(rest[1])
        return np.concatenate(tokens, axis=1), np.concatenate(log_probs, axis=1)

    def step_beams(self, *arrays: Any, **settings: Any) -> BeamSteps:
        """Take several steps of beams, none of which is guessed; see `Sentences.step_beams`."""
        self._give_up()
        return self._sentences.step_beams(*arrays, **settings)

    def grow(self, capacity: int) -> None:
        """Give every row `capacity` slots, keeping what is written and zeroing the rest."""
        self._have_both(lambda sentences: sentences.grow(capacity))

    def pack(self, slots: Ids, capacity: int) -> None:
        """Keep some slots of each row; see `Sentences.pack`."""
        if self._draft_model is not None and not self._draft_model.capabilities.packs:
            self._give_up()
        self._have_both(lambda sentences: sentences.pack(slots, capacity))
        self._ahead, self._drafted = None, [min(drafted, slots.shape[1]) for drafted in self._drafted]

    def move(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`."""
        self._have_both(lambda sentences: sentences.move(source, target))
        rows = np.arange(self.size)
        rows[target] = source
        self._keep(rows.tolist())

    def shrink(self, size: int) -> None:
        """Keep the first `size` rows."""
        self._have_both(lambda sentences: sentences.shrink(size))
        self._keep([*range(size)])

    def read(self, name: str) -> Floats:
        """A copy of a cache or a cross-attention tensor; see `Sentences.read`."""
        return self._sentences.read(name)

    def append(self, other: Sentences) -> None:
        """Copy the rows of freshly encoded sentences of the same model behind this batch's rows."""
        if not isinstance(other, SpeculativeSentences):
            raise RequestError("sentences can only join a batch of the same model")
        self._sentences.append(other._sentences)  # noqa: SLF001 (of the same class)
        self._give_up()

    # What is known of each row, and what the draft knows.

    def _go_on(self, positions: Ids, write_index: Ids, self_mask: Mask) -> bool:
        """Whether every query goes on from all that its row has before it, as it does but for beams."""
        return (
            np.array_equal(positions[:, 0], write_index)
            and all(0 <= begin <= len(path) for begin, path in zip(write_index.tolist(), self._paths, strict=True))
            and np.array_equal(self_mask, self._before(positions))
        )

    def _before(self, positions: Ids) -> Mask:
        """The self_mask of queries that see everything up to themselves."""
        mask: Mask = np.arange(self.capacity) <= positions[:, None, :, None]
        return mask

    def _have_both(self, act: Callable[[Sentences], None]) -> None:
        """Have the model do something, and the draft; if that cannot, do without."""
        act(self._sentences)
        try:
            if self._draft is not None:
                act(self._draft)
        except _CANNOT:
            self._give_up()

    def _give_up(self) -> None:
        """Guess nothing any more."""
        self._draft_model = self._draft = self._ahead = None

    def _keep(self, rows: list[int]) -> None:
        """Have what is known of some rows in the place of what was known of the first ones."""
        if self._draft_model is None:
            return
        self._paths = [self._paths[row].copy() for row in rows]
        self._drafted = [self._drafted[row] for row in rows]
        self._source_ids, self._source_mask = self._source_ids[rows], self._source_mask[rows]
        self._ahead = self._ahead and self._ahead.rows(rows)

    def _guess(self) -> list[Ids]:
        """Tokens [B] that may follow, one after the other."""
        assert self._draft_model is not None, "asked only where something is guessed"
        lengths = [len(path) for path in self._paths]
        numbers = self.size * self._behind(lengths) * self._draft_model.dimensions.target_vocabulary_size
        if self.size > MOST_ROWS or numbers > LARGEST_STEP or self._pace.hopeless:
            self._give_up()
            return []
        count = self._pace.plan(min(self.capacity, self._draft_model.limits.max_target_length) - max(lengths))
        if count < 1:
            return []
        try:
            guessed = self._guesses(self._draft_model, lengths, count)
        except _CANNOT:
            self._give_up()
            return []
        if not guessed:
            self._pace.judge(right=0, wrong=1)
        return guessed

    def _guesses(self, model: StepModel, lengths: list[int], count: int) -> list[Ids]:
        if self._draft is None:
            self._draft = model.encode(self._source_ids, self._source_mask, capacity=self.capacity)
        best = self._catch_up(self._draft, lengths)
        self._drafted = lengths
        if self._all_end(best.tolist()):
            return []
        if count == 1 or not model.capabilities.steps_greedily:
            return [best]
        places = np.array(lengths)
        following, _ = self._draft.step_greedily(
            best[:, None], places[:, None], places, self._before(places[:, None]), steps=count - 1, until=self._all_end
        )
        tokens = list(following.T)
        self._drafted = [length + len(tokens) for length in lengths]
        return [best, *(tokens[:-1] if self._all_end(tokens[-1].tolist()) else tokens)]

    def _behind(self, lengths: list[int]) -> int:
        """How many tokens of a row the draft has not taken in, at most."""
        return max(length - drafted for length, drafted in zip(lengths, self._drafted, strict=True))

    def _catch_up(self, draft: Sentences, lengths: list[int]) -> Ids:
        """Have the draft take in the tokens that it has not, and say the best [B] behind them."""
        most, ends = self._behind(lengths), np.array(lengths)
        begin = np.maximum(ends - most, 0)
        # Queries beyond a row's last token repeat it and say what it says; what they write is written over later.
        places = np.minimum(begin[:, None] + np.arange(most), ends[:, None] - 1)
        ids = np.array([[path[i] for i in row] for path, row in zip(self._paths, places.tolist(), strict=True)])
        output = draft.step(ids, places, begin, self._before(places))
        return output.top_ids[:, -1, 0].copy()  # the next step may write over it

    def _all_end(self, tokens: list[int]) -> bool:
        return all(token in self._end_ids for token in tokens)


class _Pace:
    """How many tokens to guess: more while guesses are right, fewer when they are not, and none for a while.

    Attributes:
        hopeless: so many first guesses were wrong, one after the other, that there should be no more.
    """

    def __init__(self) -> None:
        self.hopeless = False
        self._most = FIRST_GUESSES
        self._rest, self._next_rest = 0, 0  # steps without guesses: still to come, and after the next wrong first guess

    def plan(self, room: int) -> int:
        """How many tokens to guess now, of so many that there is room for."""
        if self._rest:
            self._rest -= 1
            return 0
        return min(self._most, room)

    def judge(self, *, right: int, wrong: int) -> None:
        """Learn from the guesses that were made last.

        Args:
            right: how many were asked about.
            wrong: how many were not.
        """
        if not wrong:
            self._most = min(self._most + (right == self._most), MOST_GUESSES)
        else:
            self._most = max(self._most - 1, 1)
        if right:
            self._next_rest = 0
        else:
            self.hopeless = self._next_rest == LONGEST_REST
            self._rest, self._next_rest = self._next_rest, max(2 * self._next_rest, 1)
