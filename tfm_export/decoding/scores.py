"""Everything that changes a step's scores: lengths, penalties, suppression, constraints, a wished prefix.

What is changed is known before the step from the tokens so far: an `Edit` names the few tokens concerned. So a step
whose scores stay as they are fetches the best N only, and one that changes some looks those up in log_probs and
corrects the normaliser by their mass, without another pass over the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tfm_export.decoding.constraints import Constraint
from tfm_export.decoding.options import DecodeOptions, pairs
from tfm_export.decoding.source_rules import NO_SOURCE_RULES, SourceRules, ngrams
from tfm_export.errors import RequestError
from tfm_export.quotation import quote
from tfm_export.runtime.step_model import Floats, Ids

Doubles = NDArray[np.float64]

# Below this remaining mass, 1 - mass of the changed tokens has lost too many digits: sum up the rest itself.
LEAST_MASS = 0.1
LARGEST_LOG_FACTOR = 60.0  # of exponential_decay_length_penalty


@dataclass(frozen=True)
class Edit:
    """How the scores after one hypothesis are changed.

    Attributes:
        banned: tokens that may not follow.
        penalised: tokens that the target has already and that get less likely.
        copied: tokens of the source, which get likelier.
        biases: what is added to the scores of tokens, each of which is named once.
        end_factor: how many times as large the scores of end tokens become, as if they were positive.
        allowed: the only tokens that may follow; None where all may.
        wish: the token that the wished prefix goes on with.
        forced: the token that must follow, with log-probability 0.
    """

    banned: frozenset[int] = frozenset()
    penalised: frozenset[int] = frozenset()
    copied: frozenset[int] = frozenset()
    biases: tuple[tuple[int, float], ...] = ()
    end_factor: float = 1.0
    allowed: frozenset[int] | None = None
    wish: int | None = None
    forced: int | None = None


NO_EDIT = Edit()


class Editor:
    """Knows, for every hypothesis, how its scores are changed, and changes them.

    Args:
        options: how to decode.
        end_ids: what ends a target.
        start: what the decoder starts from.
        unk: the unknown token.
        longest: the longest target.
    """

    def __init__(
        self, options: DecodeOptions, end_ids: Sequence[int], start: Sequence[int], unk: int | None, longest: int
    ) -> None:
        self._options, self._end_ids, self._longest = options, end_ids, longest
        self._on_logits = options.rules.score_change == "before_softmax"
        self._early = self._on_logits or options.renormalize_logits
        self._start = list(start) if options.rules.start_token_repeats else []
        suppressed = {sequence[0] for sequence in options.suppress_sequences if len(sequence) == 1}
        if options.disable_unk and unk is not None:
            suppressed.add(unk)
        self._suppressed = frozenset(suppressed)
        self._sequences = [list(sequence) for sequence in options.suppress_sequences if len(sequence) > 1]
        biases = pairs(options.sequence_bias)
        self._token_biases = {sequence[0]: bias for sequence, bias in biases if len(sequence) == 1}
        self._sequence_biases = [(sequence, bias) for sequence, bias in biases if len(sequence) > 1]

    def may_edit(self, request_constraint: Constraint | None) -> bool:
        """Whether any hypothesis can ever get an edit; if not, none need be asked for."""
        o = self._options
        return bool(
            self._suppressed
            or self._sequences
            or o.min_decoding_length
            or o.repetition_penalty != 1
            or o.no_repeat_ngram_size
            or o.source_options
            or o.begin_suppress_tokens
            or o.sequence_bias
            or o.exponential_decay_length_penalty
            or o.prefix_bias_beta
            or o.forced_eos is not None
            or (request_constraint or o.constraint) is not None
        )

    def source_rules(self, source: Sequence[int]) -> SourceRules:
        """What a source's tokens change after any target."""
        o, size = self._options, self._options.encoder_no_repeat_ngram_size
        return SourceRules(
            tokens=frozenset(source) if o.encoder_repetition_penalty != 1 else frozenset(),
            ngrams=ngrams(source, size) if size else {},
        )

    def edit(
        self,
        tokens: list[int],
        prefix: Sequence[int],
        constraint: Constraint | None,
        *,
        forced: int = 0,
        source: SourceRules = NO_SOURCE_RULES,
        start_token: int | None = None,
    ) -> Edit:
        """What is changed after some tokens.

        Args:
            tokens: of the target so far, without the start token.
            prefix: the wished prefix.
            constraint: which tokens may follow.
            forced: how many tokens the target begins with that were not chosen.
            source: what the source's tokens change.
            start_token: what the decoder starts from, where that is a request's own.
        """
        o = self._options
        if o.forced_eos is not None and len(tokens) == self._longest - 1:
            return Edit(forced=o.forced_eos)
        start = self._start if start_token is None else [*self._start[:-1], start_token][: len(self._start)]
        banned, history = set(self._suppressed), [*start, *tokens]
        if len(tokens) < o.min_decoding_length:
            banned.update(self._end_ids)
        if o.no_repeat_ngram_size:
            banned.update(_repeating(history, o.no_repeat_ngram_size))
        for sequence in self._sequences:
            if _may_complete(history, sequence):
                banned.add(sequence[-1])
        if len(tokens) == forced:
            banned.update(o.begin_suppress_tokens)
        if source.ngrams:
            banned.update(source.ngrams.get(tuple(history[len(history) - o.encoder_no_repeat_ngram_size + 1 :]), ()))
        wished = bool(o.prefix_bias_beta) and len(tokens) < len(prefix) and tokens == list(prefix[: len(tokens)])
        allowed = None if constraint is None else constraint(tokens)
        if allowed is not None and (isinstance(allowed, Mapping) or not isinstance(allowed, Iterable)):
            raise RequestError(
                f"a constraint must give the ids that may follow, or None for all, found {quote(allowed)}"
            )
        return Edit(
            banned=frozenset(banned),
            penalised=frozenset(history) if o.repetition_penalty != 1 else frozenset(),
            copied=source.tokens,
            biases=self._biases_after(history),
            end_factor=self._end_factor(len(tokens) - (forced if o.forced_bos is None else 0)),
            allowed=None if allowed is None else frozenset(allowed),
            wish=prefix[len(tokens)] if wished else None,
        )

    def _biases_after(self, history: list[int]) -> tuple[tuple[int, float], ...]:
        biases = dict(self._token_biases)
        for sequence, bias in self._sequence_biases:
            if _may_complete(history, sequence):
                biases[sequence[-1]] = biases.get(sequence[-1], 0.0) + bias
        return tuple(biases.items())

    def _end_factor(self, searched: int) -> float:
        """What exponential_decay_length_penalty makes of the scores of end tokens after so many tokens."""
        if (decay := self._options.exponential_decay_length_penalty) is None or searched <= decay[0]:
            return 1.0
        # Beyond the largest, which no score can overflow, an end token follows in any case.
        return math.exp(min((searched - decay[0]) * math.log(decay[1]), LARGEST_LOG_FACTOR))

    def needs_log_probs(self, edit: Edit, candidates: int, wanted: int) -> bool:
        """Whether the best `candidates` tokens of a step do not suffice to know the best `wanted` after an edit."""
        if edit == NO_EDIT or edit.forced is not None:
            return False
        only_bans = edit == Edit(banned=edit.banned)
        return self._early or not only_bans or len(edit.banned) > candidates - wanted

    def best(
        self, edit: Edit, top: tuple[Floats, Ids], log_probs: Floats | None, log_normaliser: float | None, wanted: int
    ) -> tuple[Doubles, Ids]:
        """The best tokens after an edit.

        Args:
            edit: what is changed.
            top: log-probabilities and ids, each [N], of the best tokens before, the best first.
            log_probs: [V]; None only where `needs_log_probs` said so.
            log_normaliser: what logits are above log-probabilities; needed where penalties act on logits.
            wanted: how many.

        Returns:
            Log-probabilities and ids, the best first; fewer than `wanted` where no more may follow.
        """
        if edit.forced is not None:
            return np.zeros(1), np.array([edit.forced])
        if log_probs is None:
            keep = ~np.isin(top[1], list(edit.banned))
            return top[0][keep][:wanted].astype(np.float64), top[1][keep][:wanted]
        ids, values = self._replaced(edit, log_probs, log_normaliser)
        if edit.allowed is not None:
            rest_values, rest_ids = np.zeros(0), np.zeros(0, np.int64)
            shift = -float(np.logaddexp.reduce(values)) if self._early and values.size else 0.0
        else:
            keep = ~np.isin(top[1], ids)
            if keep.sum() < wanted and len(keep) < len(log_probs):
                return _sorted(*self._whole(edit, log_probs, log_normaliser), wanted)
            rest_values, rest_ids = top[0][keep][:wanted].astype(np.float64), top[1][keep][:wanted]
            shift = self._shift(log_probs, ids, values)
        values, ids = np.concatenate([rest_values, values]) + shift, np.concatenate([rest_ids, ids])
        return _sorted(self._wished(edit, values, ids), ids, wanted)

    def whole(self, edit: Edit, log_probs: Floats, log_normaliser: float | None) -> Doubles:
        """The log-probabilities of the whole vocabulary [V] after an edit; -inf where a token may not follow."""
        return self._whole(edit, log_probs, log_normaliser)[0]

    def _whole(self, edit: Edit, log_probs: Floats, log_normaliser: float | None) -> tuple[Doubles, Ids]:
        everything = np.arange(len(log_probs))
        changed = np.full(len(log_probs), -np.inf)
        if edit.forced is not None:
            changed[edit.forced] = 0
            return changed, everything
        ids, values = self._replaced(edit, log_probs, log_normaliser)
        if edit.allowed is None:
            changed[:] = log_probs
        changed[ids] = values
        if self._early and ids.size:
            changed -= np.logaddexp.reduce(changed) if np.isfinite(changed).any() else 0.0
        return self._wished(edit, changed, everything), everything

    def _replaced(self, edit: Edit, log_probs: Floats, log_normaliser: float | None) -> tuple[Ids, Doubles]:
        """The tokens whose scores an edit names, and those scores before they are normalised again."""
        biases = dict(edit.biases)
        named = edit.penalised | edit.banned | edit.copied | biases.keys()
        if edit.end_factor != 1:
            named |= {*self._end_ids}
        if edit.wish is not None:
            named |= {edit.wish}
        ids = _array(named if edit.allowed is None else edit.allowed)
        values = log_probs[ids].astype(np.float64)
        if biases:
            values += np.array([biases.get(token, 0.0) for token in ids.tolist()])
        o = self._options
        if edit.copied or edit.penalised or edit.end_factor != 1:
            level = self._logit_level(log_normaliser)
            values += level
            _multiply(values, np.isin(ids, _array(edit.copied)), 1 / o.encoder_repetition_penalty)
            _multiply(values, np.isin(ids, _array(edit.penalised)), o.repetition_penalty)
            if edit.end_factor != 1:
                ends = np.isin(ids, self._end_ids) & np.isfinite(values)
                values[ends] += np.abs(values[ends]) * (edit.end_factor - 1)
            values -= level
        values[np.isin(ids, _array(edit.banned))] = -np.inf
        return ids, values

    def _logit_level(self, log_normaliser: float | None) -> float:
        if not self._on_logits:
            return 0.0
        if log_normaliser is None:
            raise RequestError(
                "penalties multiply logits, of which this runtime's decoder step gives no normaliser",
                hint="score_change='after_softmax', which lets them act on log-probabilities",
            )
        return log_normaliser

    def _shift(self, log_probs: Floats, ids: Ids, values: Doubles) -> float:
        """What brings the probabilities back to a sum of 1, where they are to be."""
        if not self._early or not ids.size:
            return 0.0
        mass = 1 - math.fsum(np.exp(log_probs[ids].astype(np.float64)))
        if mass < LEAST_MASS:
            rest = log_probs.astype(np.float64)
            rest[ids] = -np.inf
            mass = math.fsum(np.exp(rest))
        mass += math.fsum(np.exp(values))
        return -math.log(mass) if mass > 0 else 0.0

    def _wished(self, edit: Edit, values: Doubles, ids: Ids) -> Doubles:
        """(1 - beta) p for all but the wished token, which gets beta more; nothing for one that may not follow."""
        wished = (ids == edit.wish) & (values > -np.inf)
        if edit.wish is None or not wished.any():
            return values
        beta = self._options.prefix_bias_beta
        values = values + math.log1p(-beta)
        values[wished] = np.logaddexp(values[wished], math.log(beta))
        return values


def _may_complete(history: list[int], sequence: Sequence[int]) -> bool:
    """Whether all of a sequence but its last token stands at the end."""
    return history[len(history) - len(sequence) + 1 :] == [*sequence[:-1]]


def _multiply(scores: Doubles, where: NDArray[np.bool_], penalty: float) -> None:
    """Make some scores `penalty` times less likely, in place: a negative one is multiplied, another one divided."""
    some = scores[where]
    scores[where] = np.where(some < 0, some * penalty, some / penalty)


def _repeating(tokens: list[int], size: int) -> set[int]:
    """The tokens that would end an n-gram that is there already."""
    tail = tokens[len(tokens) - size + 1 :]
    if len(tokens) < size:
        return set()
    return {tokens[i + size - 1] for i in range(len(tokens) - size + 1) if tokens[i : i + size - 1] == tail}


def _array(ids: Collection[int]) -> Ids:
    return np.fromiter(sorted(ids), np.int64, len(ids))


def _sorted(values: Doubles, ids: Ids, wanted: int) -> tuple[Doubles, Ids]:
    """The best, those that may not follow left out."""
    possible = np.flatnonzero(values > -np.inf)
    if 4 * wanted < len(possible):
        possible = possible[np.argpartition(-values[possible], wanted)[:wanted]]
    order = possible[np.argsort(-values[possible], kind="stable")][:wanted]
    return values[order], ids[order]
