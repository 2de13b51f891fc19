"""What greedy and beam search share: what holds for every request, what a request brings, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tfm_export.decoding.attention import coverage
from tfm_export.decoding.constraints import Constraint
from tfm_export.decoding.histories import Histories
from tfm_export.decoding.options import DecodeOptions
from tfm_export.decoding.result import Hypothesis, Reason, Request
from tfm_export.decoding.rows import Rows
from tfm_export.decoding.scores import NO_EDIT, Edit, Editor
from tfm_export.errors import RequestError
from tfm_export.runtime.step_model import Floats, Ids, StepOutput


@dataclass(frozen=True, kw_only=True)
class Task:
    """A request with the options filled in.

    Attributes:
        request: as it came.
        forced: the tokens that the target begins with.
        wished: the tokens that prefix_bias_beta draws it to.
        constraint: which tokens may follow.
        seed: of its samples.
        edits: whether its scores can ever be changed.
    """

    request: Request
    forced: tuple[int, ...]
    wished: tuple[int, ...]
    constraint: Constraint | None
    seed: int | None
    edits: bool


@dataclass(slots=True)
class Scored:
    """A hypothesis while it may still be compared with others.

    Attributes:
        score: what it is ranked by.
        tokens: the end token included, if it came.
        log_probs: of each token.
        finished: an end token came.
        distributions: what each token was chosen from.
        attention: [tokens, source length], what each token attends to; None where it is not kept.
    """

    score: float
    tokens: list[int]
    log_probs: list[float]
    finished: bool
    distributions: list[Floats]
    attention: Floats | None

    def hypothesis(self, options: DecodeOptions) -> Hypothesis:
        """What the caller gets of it."""
        drop_end = self.finished and not options.return_end_token
        tokens = self.tokens[:-1] if drop_end else self.tokens
        attention = self.attention if options.return_attention or options.replace_unknowns else None
        return Hypothesis(
            tokens=tokens,
            score=self.score,
            log_probs=self.log_probs if options.return_scores else None,
            finished=self.finished,
            distributions=np.stack(self.distributions) if self.distributions else None,
            attention=None if attention is None else attention[: len(tokens)],
        )


class Setting:
    """What holds for every request of an engine.

    Attributes:
        options: how to decode.
        editor: makes the edits.
        end_ids: what ends a target.
        longest: the longest target.
        offered: N, tokens that a step names.
        vocabulary: V.
    """

    def __init__(
        self,
        *,
        options: DecodeOptions,
        editor: Editor,
        end_ids: Sequence[int],
        longest: int,
        offered: int,
        vocabulary: int,
    ) -> None:
        self.options, self.editor, self.end_ids = options, editor, end_ids
        self.longest, self.offered, self.vocabulary = longest, offered, vocabulary

    def counted_prefix(self, forced: int) -> int:
        """How many of the forced tokens do not count as searched for; that of forced_bos does."""
        return 0 if self.options.forced_bos is not None else forced

    def is_end(self, tokens: Ids) -> NDArray[np.bool_]:
        """Which tokens end a target."""
        return tokens == self.end_ids[0] if len(self.end_ids) == 1 else np.isin(tokens, self.end_ids)

    def edit(self, task: Task, tokens: list[int]) -> Edit:
        """How the scores after some tokens are changed."""
        return self.editor.edit(tokens, task.wished, task.constraint) if task.edits else NO_EDIT

    def scored(
        self,
        tokens: list[int],
        log_probs: list[float],
        forced: int,
        distributions: list[Floats],
        attention: Floats | None,
    ) -> Scored:
        """A hypothesis of which the first `forced` tokens were not searched for."""
        finished = len(tokens) > forced and tokens[-1] in self.end_ids
        prefix = self.counted_prefix(forced)
        score = sum(log_probs) / self.options.divisor(len(tokens), prefix)
        if self.options.coverage_penalty and attention is not None:
            left_out = prefix if self.options.rules.length_formula == "without_prefix" else 0
            score += self.options.coverage_penalty * coverage(attention[left_out:])
        return Scored(score, tokens, log_probs, finished, distributions, attention)

    def check_possible(self, best: NDArray[np.floating[Any]], rows: Ids, histories: Histories) -> None:
        """Refuse to go on where nothing may follow.

        Raises:
            RequestError: naming the tokens after which that is so.
        """
        if (best == -np.inf).any():
            row = int(rows[np.argmin(best)])
            raise RequestError(
                f"after the tokens {histories.of(row, 0)[0]} of the target, the options leave none that may follow",
                hint="a constraint that allows the end token there, or fewer suppressed tokens",
            )


class Search(Protocol):
    """A way to choose tokens, with a state for every row."""

    @property
    def width(self) -> int:
        """K, queries of a row at each step."""
        ...

    def join(self, task: Task) -> None:
        """Begin a sentence, behind the live ones."""
        ...

    def leave(self, row: int) -> None:
        """Forget a row; the last one takes its place."""
        ...

    def plan(self) -> bool:
        """Note what the next step's scores need; True if it must fetch log_probs."""
        ...

    def run_ahead(self, rows: Rows, interrupted: Callable[[], bool]) -> tuple[int, list[tuple[int, Reason]]] | None:
        """Take several steps in one go, until a row comes to its end or the cache is full.

        Args:
            rows: the batch.
            interrupted: is asked between two steps; True ends them.

        Returns:
            How many steps were taken, and the rows that came to their end, if any did; None if only `advance` can tell
            what is fed next, and no step was taken.
        """
        ...

    def advance(self, rows: Rows, output: StepOutput) -> list[tuple[int, Reason]]:
        """Choose the next tokens of every ready row, feed them, and name the rows that came to their end."""
        ...

    def settled(self, row: int) -> tuple[list[int], list[float]]:
        """Those tokens of a live row that can no longer change, and their log-probabilities."""
        ...

    def hypotheses(self, rows: Rows, row: int) -> list[Scored]:
        """What a row has come to, the best first."""
        ...
