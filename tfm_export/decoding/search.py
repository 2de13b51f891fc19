"""What greedy and beam search share: what holds for every request of a session, and what each of them does in a step.

A search keeps nothing of a row: hypotheses, masks and caches are the batch's, and move with its rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfm_export.decoding.attention import coverage
from tfm_export.decoding.batch import Batch
from tfm_export.decoding.options import DecodeOptions
from tfm_export.decoding.result import Hypothesis, Reason
from tfm_export.decoding.scores import NO_EDIT, Edit, Editor
from tfm_export.decoding.top_tokens import TopTokens
from tfm_export.errors import RequestError
from tfm_export.runtime.step_model import Ids, StepOutput

Ended = list[tuple[int, Reason]]  # rows that came to their end, and why


@dataclass(frozen=True, kw_only=True)
class SearchContext:
    """What holds for every request of a session.

    Attributes:
        options: how to decode.
        editor: makes the edits.
        end_ids: what ends a target.
        longest: the longest target.
        offered: N, tokens that a step names.
        vocabulary: V.
    """

    options: DecodeOptions
    editor: Editor
    end_ids: tuple[int, ...]
    longest: int
    offered: int
    vocabulary: int

    def counted_prefix(self, forced: int) -> int:
        """How many of the forced tokens do not count as searched for; that of forced_bos does."""
        return 0 if self.options.forced_bos is not None else forced

    def is_end(self, tokens: Ids) -> NDArray[np.bool_]:
        """Which tokens end a target."""
        return tokens == self.end_ids[0] if len(self.end_ids) == 1 else np.isin(tokens, self.end_ids)

    def edits(self, batch: Batch) -> list[list[Edit]] | None:
        """How the scores after every hypothesis [B][K] are changed; None where no request's ever are."""
        if not any(state.edits for state in batch.live):
            return None
        return [self._edits_of(batch, row) for row in range(len(batch.live))]

    def _edits_of(self, batch: Batch, row: int) -> list[Edit]:
        """How the scores after a row's hypotheses [K] are changed. Nothing is asked of a constraint after dead ones."""
        state, width, histories = batch.live[row], self.options.beam_size, batch.histories
        if not state.edits:
            return [NO_EDIT] * width

        def edit(beam: int) -> Edit:
            return self.editor.edit(histories.of(row, beam)[0], state.wished, state.constraint)

        if state.prompt:  # it has one hypothesis, and what follows that may stand in any query
            return [edit(width - 1)] * width
        alive = (histories.scores[row] > -np.inf).tolist()
        return [edit(beam) if alive[beam] else NO_EDIT for beam in range(width)]

    def hypothesis(
        self, batch: Batch, row: int, beam: int, extension: tuple[list[int], list[float]] = ([], [])
    ) -> Hypothesis:
        """One of a row's hypotheses, extended by tokens and their log-probabilities."""
        o, forced = self.options, int(batch.histories.prefix[row])
        tokens, log_probs = batch.histories.of(row, beam)
        tokens, log_probs = tokens + extension[0], log_probs + extension[1]
        attention, distributions = batch.attention(row, beam, len(tokens)), batch.live[row].distributions[beam]
        finished = len(tokens) > forced and tokens[-1] in self.end_ids
        prefix = self.counted_prefix(forced)
        score = sum(log_probs) / o.divisor(len(tokens), prefix)
        if o.coverage_penalty and attention is not None:
            left_out = prefix if o.rules.length_formula == "without_prefix" else 0
            score += o.coverage_penalty * coverage(attention[left_out:])
        if finished and not o.return_end_token:
            tokens, attention = tokens[:-1], attention if attention is None else attention[:-1]
        return Hypothesis(
            tokens=tokens,
            score=score,
            log_probs=log_probs,
            finished=finished,
            distributions=np.stack(distributions) if distributions else None,
            attention=attention,
        )

    def check_possible(self, best: NDArray[np.floating[Any]], rows: Ids, batch: Batch) -> None:
        """Refuse to go on where nothing may follow.

        Raises:
            RequestError: naming the tokens after which that is so.
        """
        if (best == -np.inf).any():
            row = int(rows[np.argmin(best)])
            raise RequestError(
                f"after the tokens {batch.histories.of(row, 0)[0]} of the target, the options leave none that may "
                "follow",
                hint="a constraint that allows the end token there, or fewer suppressed tokens",
            )


class Search(ABC):
    """A way to choose tokens.

    Args:
        context: what holds for every request.
        wanted: how many of the best tokens after each hypothesis it looks at.
    """

    def __init__(self, context: SearchContext, wanted: int) -> None:
        self._context, self._options = context, context.options
        self._top = TopTokens(context.editor, wanted, context.offered, context.vocabulary)

    def plan(self, batch: Batch) -> bool:
        """Note what the next step's scores need; True if it must fetch log_probs."""
        return self._top.plan(self._context.edits(batch)) or self._options.return_logits_vocab

    @abstractmethod
    def run_ahead(self, batch: Batch, interrupted: Callable[[], bool]) -> tuple[int, Ended] | None:
        """Take several steps in one go, as far as the backend and the options allow that.

        Args:
            batch: whose rows are fed with what comes next.
            interrupted: is asked between two steps; True ends them.

        Returns:
            How many steps were taken, and the rows that came to their end, if any did; None if no step was taken, and
            the next one is for `plan` and `advance`.
        """

    @abstractmethod
    def advance(self, batch: Batch, output: StepOutput) -> Ended:
        """Choose the next tokens of every ready row, feed them, and name the rows that came to their end."""

    @abstractmethod
    def settled(self, batch: Batch, row: int) -> tuple[list[int], list[float]]:
        """Those tokens of a live row that can no longer change, and their log-probabilities."""

    @abstractmethod
    def hypotheses(self, batch: Batch, row: int) -> list[Hypothesis]:
        """What a row has come to, the best first."""
