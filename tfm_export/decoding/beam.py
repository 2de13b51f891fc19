"""Beam search over an append-only cache: re-ranking moves rows of masks and tokens, never keys and values.

Each step extends the K hypotheses of a sentence, looks at the best extensions in order, sets aside those among the
first K that have come to an end, and lets the first K that have not live on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tfm_export.decoding.candidates import Candidates, Scores
from tfm_export.decoding.histories import Histories
from tfm_export.decoding.options import DecodeOptions
from tfm_export.decoding.result import Reason
from tfm_export.decoding.rows import Rows
from tfm_export.decoding.scores import Doubles
from tfm_export.decoding.search import Scored, Setting, Task
from tfm_export.runtime.step_model import Floats, Ids, StepOutput


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


@dataclass
class Pool:
    """The finished hypotheses of a sentence."""

    best: list[Scored] = field(default_factory=list)
    top_finished: bool = False

    def add(self, scored: Scored) -> None:
        """Keep them in order, the best first; of equals the first."""
        self.best.append(scored)
        self.best.sort(key=lambda s: -s.score)


@dataclass
class _Row:
    task: Task
    pool: Pool
    distributions: list[list[Floats]]


class Stop:
    """Tells when a sentence needs no further search. See `DecodeOptions.stop_rule`."""

    def __init__(self, options: DecodeOptions, longest: int) -> None:
        self._options, self._longest, self._rules = options, longest, options.rules

    def __call__(self, pool: Pool, best_live: float, length: int, prefix: int) -> bool:
        """Whether to stop.

        Args:
            pool: what has finished.
            best_live: the best sum of those that live on.
            length: their tokens.
            prefix: how many of those do not count as searched for.
        """
        o = self._options
        if best_live == -np.inf:
            return True
        if self._rules.stop_rule == "ctranslate2":
            if o.length_penalty == 0 and o.coverage_penalty == 0:
                return pool.top_finished and len(pool.best) >= o.num_hypotheses
            return len(pool.best) >= o.enough
        del pool.best[o.beam_size :]
        if len(pool.best) < o.beam_size or self._rules.early_stopping is True:
            return len(pool.best) >= o.beam_size
        if self._rules.early_stopping == "never" and o.length_penalty > 0:
            length = self._longest
        return best_live / o.divisor(length, prefix) <= pool.best[-1].score


class Beam:
    """The state of a batch that is searched with K beams a sentence.

    Args:
        setting: what holds for every request.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting, self._options = setting, setting.options
        self.width = setting.options.beam_size
        # So many that K of them have not ended, even if every hypothesis offers every end token.
        self._count = (1 + len(setting.end_ids)) * self.width
        self._candidates = Candidates(setting.editor, self._count, setting.offered, setting.vocabulary)
        self._stop = Stop(self._options, setting.longest)
        self._histories = Histories(self.width)
        self._scores: Doubles = np.zeros((0, self.width))
        self._rows: list[_Row] = []

    def join(self, task: Task) -> None:
        """Begin a sentence, behind the live ones. Until its prompt is taken in, only its last hypothesis lives."""
        row = len(self._rows)
        if row >= len(self._scores):
            self._scores = np.concatenate([self._scores, np.zeros((row + 1, self.width))])
        self._scores[row] = -np.inf
        self._scores[row, -1] = 0
        self._histories.join(row, task.forced)
        self._rows.append(_Row(task, Pool(), [[] for _ in range(self.width)]))

    def leave(self, row: int) -> None:
        """Forget a row; the last one takes its place."""
        last = len(self._rows) - 1
        self._histories.move(last, row)
        self._scores[row] = self._scores[last]
        self._rows[row] = self._rows[last]
        self._rows.pop()

    def plan(self) -> bool:
        """Note what the next step's scores need; True if it must fetch log_probs."""
        edits = None
        if any(row.task.edits for row in self._rows):
            edits = [
                [self._setting.edit(row.task, self._histories.of(i, beam)[0]) for beam in range(self.width)]
                for i, row in enumerate(self._rows)
            ]
        return self._candidates.plan(edits) or self._options.return_logits_vocab

    def run_ahead(self, rows: Rows, interrupted: Callable[[], bool]) -> None:
        """Not possible: what lives on is chosen after every step."""

    def advance(self, rows: Rows, output: StepOutput) -> list[tuple[int, Reason]]:
        """Extend the hypotheses of every row that is ready.

        Returns:
            The rows that came to their end.
        """
        ready, first = rows.ready, self.width - output.top_ids.shape[1]
        values, ids = self._candidates.best(output, ready)
        sums, parents, tokens, gained = extensions(self._scores[ready, first:], values, ids, self._count)
        parents += first
        self._refuse_dead_ends(sums, ready)
        self._silence_ends_after_prefix(sums, tokens, ready)
        full = self._histories.length[ready] + 1 >= self._setting.longest
        ended = (self._setting.is_end(tokens) & (sums > -np.inf)) | full[:, None]
        if self._options.return_logits_vocab:
            self._keep_distributions(output, ready)
        self._set_aside(rows, ended, sums, parents, tokens, gained)
        place, chosen = np.arange(len(ready))[:, None], np.argsort(ended, axis=1, kind="stable")[:, : self.width]
        sums = np.where(ended, -np.inf, sums)[place, chosen]
        parents, tokens, gained = parents[place, chosen], tokens[place, chosen], gained[place, chosen]
        self._scores[ready] = sums
        self._histories.rerank(ready, parents)
        self._histories.append(ready, tokens, gained)
        if self._options.return_logits_vocab:
            for row, order in zip(ready.tolist(), parents.tolist(), strict=True):
                kept = self._rows[row].distributions
                self._rows[row].distributions = [list(kept[parent]) for parent in order]
        rows.rerank(ready, parents)
        rows.feed(ready, tokens)
        return self._at_their_end(ready, full)

    def _refuse_dead_ends(self, sums: Doubles, ready: Ids) -> None:
        lost = ready[sums[:, 0] == -np.inf].tolist()
        if lost and not all(self._rows[row].pool.best for row in lost):
            self._setting.check_possible(sums[:, 0], ready, self._histories)

    def _silence_ends_after_prefix(self, sums: Doubles, tokens: Ids, ready: Ids) -> None:
        """Under CTranslate2's rule, right after a forced prefix only the best candidate may end; others die there."""
        if self._options.rules.end_after_prefix == "any_rank":
            return
        length, prefix = self._histories.length[ready], self._histories.prefix[ready]
        begins = (prefix > 0) & (length == prefix)
        if begins.any():
            silenced = self._setting.is_end(tokens) & begins[:, None]
            silenced[:, 0] = False
            sums[silenced] = -np.inf

    def _set_aside(
        self,
        rows: Rows,
        ended: NDArray[np.bool_],
        sums: Doubles,
        parents: Ids,
        tokens: Ids,
        gained: Scores,
    ) -> None:
        """Put those of the first K extensions that have come to an end into their sentence's pool."""
        places, ranks = np.nonzero(ended[:, : self.width] & (sums[:, : self.width] > -np.inf))
        if not places.size:
            return
        found = (rows.ready[places], ranks, *(array[places, ranks] for array in (parents, tokens, gained)))
        for row, rank, parent, token, value in zip(*(array.tolist() for array in found), strict=True):
            pool = self._rows[row].pool
            pool.top_finished |= rank == 0
            pool.add(self._scored(rows, row, parent, ([token], [value])))

    def _scored(self, rows: Rows, row: int, beam: int, extension: tuple[list[int], list[float]] = ([], [])) -> Scored:
        """One of a row's hypotheses, extended by tokens and their log-probabilities."""
        (tokens, log_probs), entry = self._histories.of(row, beam), self._rows[row]
        tokens, log_probs = tokens + extension[0], log_probs + extension[1]
        attention = rows.attention(row, beam, len(tokens), len(entry.task.request.source))
        forced = int(self._histories.prefix[row])
        return self._setting.scored(tokens, log_probs, forced, entry.distributions[beam], attention)

    def _at_their_end(self, ready: Ids, full: NDArray[np.bool_]) -> list[tuple[int, Reason]]:
        done = []
        every = zip(ready.tolist(), full.tolist(), self._scores[ready].max(axis=1).tolist(), strict=True)
        for row, is_full, best in every:
            pool = self._rows[row].pool
            if not (pool.best or is_full or best == -np.inf):
                continue
            prefix = self._setting.counted_prefix(int(self._histories.prefix[row]))
            if self._stop(pool, best, int(self._histories.length[row]), prefix):
                done.append((row, Reason.LENGTH if is_full else Reason.END))
        return done

    def _keep_distributions(self, output: StepOutput, ready: Ids) -> None:
        queries = output.top_ids.shape[1]
        for row in ready.tolist():
            for query in range(queries):
                beam = self.width - queries + query
                if self._scores[row, beam] > -np.inf:
                    whole = self._candidates.whole(output, row, query)
                    self._rows[row].distributions[beam].append(whole.astype(np.float32))

    def _live(self, row: int) -> list[int]:
        return np.flatnonzero(self._scores[row] > -np.inf).tolist()

    def settled(self, row: int) -> tuple[list[int], list[float]]:
        """What all live and finished hypotheses of a row begin with."""
        live = [self._histories.of(row, beam) for beam in self._live(row)]
        paths = [tokens for tokens, _ in live] + [scored.tokens for scored in self._rows[row].pool.best]
        common = 0
        for column in zip(*paths, strict=False):
            if len(set(column)) > 1:
                break
            common += 1
        tokens, log_probs = live[0]
        return tokens[:common], log_probs[:common]

    def hypotheses(self, rows: Rows, row: int) -> list[Scored]:
        """What has finished in a row; while there is not enough of that, the live ones too."""
        pool = list(self._rows[row].pool.best)
        if len(pool) < self._options.num_hypotheses:
            pool += sorted((self._scored(rows, row, beam) for beam in self._live(row)), key=lambda s: -s.score)
        return pool[: self._options.num_hypotheses]
