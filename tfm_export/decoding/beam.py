"""Beam search over an append-only cache: re-ranking moves rows of masks and tokens, never keys and values.

Each step extends the K hypotheses of a sentence, looks at the best extensions in order, sets aside those among the
first K that have come to an end, and lets the first K that have not live on.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tfm_export.decoding.batch import Batch
from tfm_export.decoding.request import RequestState
from tfm_export.decoding.result import Hypothesis, Reason
from tfm_export.decoding.scores import Doubles
from tfm_export.decoding.search import Ended, Search, SearchContext
from tfm_export.decoding.top_tokens import Scores
from tfm_export.runtime.step_model import Ids, StepOutput


def extensions(scores: Doubles, values: Scores, ids: Ids, count: int) -> tuple[Doubles, Ids, Ids, Scores]:
    """The best ways to extend the hypotheses of each row by a token.

    Args:
        scores: [R, Q], the sum of each hypothesis; -inf for a dead one.
        values: [R, Q, M], log-probabilities of what may follow.
        ids: [R, Q, M], the tokens.
        count: how many are wanted.

    Returns:
        Each [R, count], the best first: sums, the hypotheses that are extended (0..Q-1), tokens, their
        log-probabilities. Where there are fewer, the rest have a sum of -inf.
    """
    rows, _, most = ids.shape
    sums = (scores[:, :, None] + values).reshape(rows, -1)
    order, place = np.argsort(-sums, axis=1, kind="stable")[:, :count], np.arange(rows)[:, None]
    found = sums[place, order]
    if (missing := count - order.shape[1]) > 0:
        order = np.pad(order, ((0, 0), (0, missing)))
        found = np.pad(found, ((0, 0), (0, missing)), constant_values=-np.inf)
    tokens, gained = ids.reshape(rows, -1)[place, order], values.reshape(rows, -1)[place, order]
    return found, order // most, tokens, gained


class Beam(Search):
    """Keeps the K best hypotheses of every sentence.

    Args:
        context: what holds for the search's rows.
    """

    def __init__(self, context: SearchContext) -> None:
        self._width = context.options.beam_size
        # So many that K of them have not ended, even if every hypothesis offers every end token.
        self._count = (1 + len(context.end_ids)) * self._width
        super().__init__(context, self._count)

    def run_ahead(self, batch: Batch, interrupted: Callable[[], bool]) -> tuple[int, Ended] | None:
        """Take several steps in one go, until one at which a hypothesis may come to an end.

        None where the backend ranks no beams, or something is done between two steps: scores are changed, whole
        distributions are kept, or, under Hugging Face's rule, a search ends since its live hypotheses get worse.
        """
        if not batch.can_step_beams or self._options.return_logits_vocab or self._top.wanted > self.context.offered:
            return None
        watched = self._options.rules.stop_rule == "huggingface"
        if any(state.edits or (watched and state.finished) for state in batch.live):
            return None
        steps = self.context.longest - max(batch.histories.length[batch.rows].tolist())
        taken, output = batch.step_beams(steps, np.array(self.context.end_ids), interrupted)
        self._top.plan(None)
        return taken, self.advance(batch, output, batch.rows)

    def advance(self, batch: Batch, output: StepOutput, ready: Ids) -> Ended:
        """Extend the hypotheses of each of the rows, and name those that came to their end."""
        context, histories = self.context, batch.histories
        first = self._width - output.top_ids.shape[1]  # after a prompt there is one query, that of the last hypothesis
        values, ids = self._top.best(output, ready)  # [R, Q, M]
        # Each [R, M'], the best first.
        sums, parents, tokens, gained = extensions(histories.scores[ready, first:], values, ids, self._count)
        parents += first
        self._refuse_dead_ends(sums, ready, batch)
        self._silence_ends_after_prefix(sums, tokens, ready, batch)
        full = histories.length[ready] + 1 >= context.longest
        ended = (context.is_end(tokens) & (sums > -np.inf)) | full[:, None]
        if self._options.return_logits_vocab:
            self._keep_distributions(output, ready, batch)
        self._set_aside(batch, ready, ended, sums, parents, tokens, gained)
        # Each [R, K]: the best that have not ended live on.
        place, chosen = np.arange(len(ready))[:, None], np.argsort(ended, axis=1, kind="stable")[:, : self._width]
        sums = np.where(ended, -np.inf, sums)[place, chosen]
        parents, tokens, gained = parents[place, chosen], tokens[place, chosen], gained[place, chosen]
        histories.scores[ready] = sums
        batch.extend(ready, tokens, gained, parents)
        if self._options.return_logits_vocab:
            for row, order in zip(ready.tolist(), parents.tolist(), strict=True):
                kept = batch.live[row].distributions
                batch.live[row].distributions = [list(kept[parent]) for parent in order]
        return self._at_their_end(batch, ready, full)

    def _refuse_dead_ends(self, sums: Doubles, ready: Ids, batch: Batch) -> None:
        self.context.note_dead_ends(sums[:, 0], ready, batch)

    def _silence_ends_after_prefix(self, sums: Doubles, tokens: Ids, ready: Ids, batch: Batch) -> None:
        """Under CTranslate2's rule, right after a forced prefix only the best candidate may end; others die there."""
        if self._options.rules.end_after_prefix == "any_rank":
            return
        length, prefix = batch.histories.length[ready], batch.histories.prefix[ready]
        begins = (prefix > 0) & (length == prefix)
        if begins.any():
            silenced = self.context.is_end(tokens) & begins[:, None]
            silenced[:, 0] = False
            sums[silenced] = -np.inf

    def _set_aside(
        self,
        batch: Batch,
        ready: Ids,
        ended: NDArray[np.bool_],
        sums: Doubles,
        parents: Ids,
        tokens: Ids,
        gained: Scores,
    ) -> None:
        """Keep those of the first K extensions that have come to an end, in order, of equals the first."""
        places, ranks = np.nonzero(ended[:, : self._width] & (sums[:, : self._width] > -np.inf))
        if not places.size:
            return
        found = (ready[places], ranks, *(array[places, ranks] for array in (parents, tokens, gained)))
        for row, rank, parent, token, value in zip(*(array.tolist() for array in found), strict=True):
            state = batch.live[row]
            state.top_finished |= rank == 0
            state.finished.append(self.context.hypothesis(batch, row, parent, ([token], [value])))
            state.finished.sort(key=lambda hypothesis: -hypothesis.rank)

    def _at_their_end(self, batch: Batch, ready: Ids, full: NDArray[np.bool_]) -> Ended:
        done, histories = [], batch.histories
        every = zip(ready.tolist(), full.tolist(), histories.scores[ready].max(axis=1).tolist(), strict=True)
        for row, is_full, best in every:
            state = batch.live[row]
            if not (state.finished or is_full or best == -np.inf):
                continue
            prefix = self.context.counted_prefix(int(histories.prefix[row]), batch.live[row].request)
            if self._needs_no_more(state, best, int(histories.length[row]), prefix):
                done.append((row, Reason.LENGTH if is_full else Reason.END))
        return done

    def _needs_no_more(self, state: RequestState, best_live: float, length: int, prefix: int) -> bool:
        """Whether a search may stop, by the options' stop rule.

        Args:
            state: with what has finished.
            best_live: the best sum of those that live on.
            length: their tokens.
            prefix: how many of those do not count as searched for.
        """
        o, rules, finished = self._options, self._options.rules, state.finished
        if best_live == -np.inf:
            return True
        if rules.stop_rule == "ctranslate2":
            if o.length_penalty == 0 and o.coverage_penalty == 0:
                return state.top_finished and len(finished) >= o.num_hypotheses
            return len(finished) >= o.enough
        del finished[o.beam_size :]
        if len(finished) < o.beam_size or rules.early_stopping is True:
            return len(finished) >= o.beam_size
        if rules.early_stopping == "never" and o.length_penalty > 0:
            length = self.context.longest
        return best_live / o.divisor(length, prefix) <= finished[-1].rank

    def _keep_distributions(self, output: StepOutput, ready: Ids, batch: Batch) -> None:
        queries = output.top_ids.shape[1]
        for row in ready.tolist():
            for query in range(queries):
                beam = self._width - queries + query
                if batch.histories.scores[row, beam] > -np.inf:
                    whole = self._top.whole(output, row, query)
                    batch.live[row].distributions[beam].append(whole.astype(np.float32))

    def _live(self, batch: Batch, row: int) -> list[int]:
        """The hypotheses of a row that are not dead."""
        return np.flatnonzero(batch.histories.scores[row] > -np.inf).tolist()

    def settled(self, batch: Batch, row: int) -> tuple[list[int], list[float]]:
        """What all live and finished hypotheses of a row begin with."""
        live = [batch.histories.of(row, beam) for beam in self._live(batch, row)]
        paths = [tokens for tokens, _ in live] + [hypothesis.tokens for hypothesis in batch.live[row].finished]
        common = 0
        for column in zip(*paths, strict=False):
            if len(set(column)) > 1:
                break
            common += 1
        tokens, log_probs = live[0]
        return tokens[:common], log_probs[:common]

    def hypotheses(self, batch: Batch, row: int) -> list[Hypothesis]:
        """What has finished in a row; while there is not enough of that, the live ones too."""
        found = list(batch.live[row].finished)
        if len(found) < self._options.num_hypotheses:
            live = [self.context.hypothesis(batch, row, beam) for beam in self._live(batch, row)]
            found += sorted(live, key=lambda hypothesis: -hypothesis.rank)
        return found[: self._options.num_hypotheses]
