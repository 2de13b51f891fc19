"""What greedy and beam search share: what holds for requests of the same options, and what each of them does in a step.

A search keeps nothing of a row: hypotheses, masks and caches are the batch's, and move with its rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfm_export.decoding.attention import coverage
from tfm_export.decoding.batch import Batch
from tfm_export.decoding.options import DecodeOptions
from tfm_export.decoding.request import Request, are_ids
from tfm_export.decoding.result import Hypothesis, Reason
from tfm_export.decoding.scores import NO_EDIT, Edit, Editor
from tfm_export.decoding.top_tokens import TopTokens
from tfm_export.errors import RequestError
from tfm_export.quotation import quote
from tfm_export.runtime.step_model import Ids, StepOutput

Ended = list[tuple[int, Reason]]  # rows that came to their end, and why


@dataclass(frozen=True, kw_only=True)
class SearchContext:
    """What holds for every request of the same options.

    Attributes:
        options: how to decode.
        editor: makes the edits.
        start: what the decoder starts from.
        end_ids: what ends a target.
        longest: the longest target.
        offered: N, tokens that a step names.
        vocabulary: V.
    """

    options: DecodeOptions
    editor: Editor
    start: tuple[int, ...]
    end_ids: tuple[int, ...]
    longest: int
    offered: int
    vocabulary: int

    @property
    def slots(self) -> int:
        """Of the cache, that the longest target needs."""
        return len(self.start) + self.options.beam_size * self.longest

    def counted_prefix(self, forced: int, request: Request) -> int:
        """How many of a request's forced tokens do not count as searched for; that of forced_bos does."""
        first = self.options.forced_bos if request.forced_bos is None else request.forced_bos
        return forced if first is None else max(forced - 1, 0)

    def is_end(self, tokens: Ids) -> NDArray[np.bool_]:
        """Which tokens end a target."""
        return tokens == self.end_ids[0] if len(self.end_ids) == 1 else np.isin(tokens, self.end_ids)

    def edits(self, batch: Batch, rows: Ids) -> dict[int, list[Edit]] | None:
        """How the scores after the hypotheses of some rows are changed, K each; None where none's ever are."""
        edited = [row for row in rows.tolist() if batch.live[row].edits]
        if not edited:
            return None
        return {row: self._edits_of(batch, row) for row in edited}

    def _edits_of(self, batch: Batch, row: int) -> list[Edit]:
        """The edits of a row's hypotheses. Dead ones have that of the first living one: no constraint is asked.

        What a constraint raises is the request's `problem`, and no one else's.
        """
        state, alive = batch.live[row], (batch.histories.scores[row] > -np.inf).tolist()
        try:
            edits = {
                beam: self.editor.edit(
                    batch.histories.of(row, beam)[0],
                    state.wished,
                    state.constraint,
                    forced=len(state.forced),
                    source=state.source,
                    start_token=state.request.start_token,
                )
                for beam, lives in enumerate(alive)
                if lives
            }
            self._check_allowed(edits.values())
        except Exception as problem:  # noqa: BLE001 (whoever asked is told)
            state.problem = problem
            edits = {}
        first = next(iter(edits.values()), NO_EDIT)
        return [edits.get(beam, first) for beam in range(len(alive))]

    def _check_allowed(self, edits: Iterable[Edit]) -> None:
        """Refuse what a constraint allows and the vocabulary has not."""
        for edit in edits:
            if edit.allowed is None:
                continue
            if wrong := [i for i in edit.allowed if not are_ids([i]) or not 0 <= i < self.vocabulary]:
                raise RequestError(
                    f"a constraint allows ids that the vocabulary of {self.vocabulary} lacks: "
                    f"{', '.join(quote(i) for i in wrong[:8])}"
                )

    def hypothesis(
        self, batch: Batch, row: int, beam: int, extension: tuple[list[int], list[float]] = ([], [])
    ) -> Hypothesis:
        """One of a row's hypotheses, extended by tokens and their log-probabilities."""
        o, forced = self.options, int(batch.histories.prefix[row])
        tokens, log_probs = batch.histories.of(row, beam)
        tokens, log_probs = tokens + extension[0], log_probs + extension[1]
        attention, distributions = batch.attention(row, beam, len(tokens)), batch.live[row].distributions[beam]
        finished = len(tokens) > forced and tokens[-1] in self.end_ids
        prefix = self.counted_prefix(forced, batch.live[row].request)
        score = sum(log_probs) / o.divisor(len(tokens), prefix) if len(tokens) > prefix else None
        if score is not None and o.coverage_penalty and attention is not None:
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

    def note_dead_ends(self, best: NDArray[np.floating[Any]], rows: Ids, batch: Batch) -> None:
        """Where nothing may follow, that is the request's `problem`, which names the tokens after which it is so."""
        for row in rows[best == -np.inf].tolist():
            state = batch.live[row]
            if state.problem or state.finished:
                continue
            state.problem = RequestError(
                f"after the tokens {batch.histories.of(row, 0)[0]} of the target, the options leave none that may "
                "follow",
                hint="a constraint that allows the end token there, or fewer suppressed tokens",
            )


class Search(ABC):
    """A way to choose tokens, for the rows of a batch whose requests have the same options.

    Args:
        context: what holds for these.
        wanted: how many of the best tokens after each hypothesis it looks at.
    """

    def __init__(self, context: SearchContext, wanted: int) -> None:
        self.context, self._options = context, context.options
        self._top = TopTokens(context.editor, wanted, context.offered, context.vocabulary)

    def plan(self, batch: Batch, rows: Ids) -> bool:
        """Note what the next step's scores need in the search's rows; True if it must fetch log_probs."""
        return self._top.plan(self.context.edits(batch, rows)) or self._options.return_logits_vocab

    @abstractmethod
    def run_ahead(self, batch: Batch, interrupted: Callable[[], bool]) -> tuple[int, Ended] | None:
        """Take several steps in one go, as far as the backend and the options allow that.

        Args:
            batch: all of whose rows are the search's; they are fed with what comes next.
            interrupted: is asked between two steps; True ends them.

        Returns:
            How many steps were taken, and the rows that came to their end, if any did; None if no step was taken, and
            the next one is for `plan` and `advance`.
        """

    @abstractmethod
    def advance(self, batch: Batch, output: StepOutput, ready: Ids) -> Ended:
        """Choose the next tokens of the search's ready rows, feed them, and name those that came to their end."""

    @abstractmethod
    def settled(self, batch: Batch, row: int) -> tuple[list[int], list[float]]:
        """Those tokens of a live row that can no longer change, and their log-probabilities."""

    @abstractmethod
    def hypotheses(self, batch: Batch, row: int) -> list[Hypothesis]:
        """What a row has come to, the best first."""
