"""The log-probabilities of targets that are given: those that a search would give them, under the same options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from tfm_export.bundle import SpecialIds
from tfm_export.decoding.batch import padded
from tfm_export.decoding.checks import check_options, ids_beyond, longest_target, source_problems
from tfm_export.decoding.options import DecodeOptions
from tfm_export.decoding.request import are_ids
from tfm_export.decoding.scores import NO_EDIT, Editor
from tfm_export.errors import RequestError
from tfm_export.quotation import quote
from tfm_export.runtime.step_model import LARGEST_STEP, Floats, Ids, StepModel


def score(
    model: StepModel,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    special: SpecialIds,
    *,
    options: DecodeOptions | None = None,
    max_batch_size: int = 32,
    add_end_token: bool = True,
) -> list[list[float]]:
    """How likely targets are.

    A token has the log-probability that `generate` gives it under the same options: 0 where these force it (target
    prefix, forced_bos, forced_eos), and changed by suppressed tokens, repeated n-grams, penalties, the least length, a
    constraint and prefix_bias_beta. -inf is that of a token that may not stand there, and of all that follow it. What
    chooses among targets has no part in it: beams, sampling, length and coverage penalties. A target longer than
    max_decoding_length is scored as if that were higher, without a forced end.

    Several tokens are scored a step, under a causal mask; so few that a step's log_probs stay below
    `LARGEST_STEP` numbers, however long the targets are.

    >>> from tfm_export.decoding import score
    >>> source, special = model.encode_text("hello").ids, model.bundle.manifest.special_ids
    >>> likely, unlikely = score(model.step_model, [source, source], [[18, 13, 23, 27], [18]], special)
    >>> len(likely), sum(likely) > sum(unlikely)
    (5, True)

    Args:
        model: what runs the steps.
        sources: ids of each, exactly as the encoder gets them.
        targets: ids of each, without start and end token.
        special: the model's ids that are not text.
        options: under which the targets are scored; None is the model by itself.
        max_batch_size: pairs at once.
        add_end_token: score the end token after each target, too; of several end tokens the first.

    Returns:
        For each pair, the log-probability of every token of the target.

    Raises:
        RequestError: a source, a target or an option cannot be served; all that is wrong, before anything is scored.
    """
    # What needs attention weights does not change log-probabilities.
    options = replace(options or DecodeOptions(), coverage_penalty=0.0, return_attention=False, replace_unknowns=False)
    check_options(model, options, special)
    kinds = {"sources": sources, "targets": targets}
    problems = [
        f"{name} must be sequences of ids (integers), found {quote(ids)} at place {number}"
        for name, sequences in kinds.items()
        for number, ids in enumerate(sequences)
        if not are_ids(ids)
    ]
    if not are_ids([max_batch_size]):
        problems.append(f"max_batch_size must be an integer, found {quote(max_batch_size)}")
    elif max_batch_size < 1:
        problems.append(f"max_batch_size must be at least 1, found {max_batch_size}")
    if problems:
        raise RequestError(problems)
    whole = [[*target, *(options.end_ids(special)[:1] if add_end_token else ())] for target in targets]
    if problems := list(_problems(model, sources, whole, options)):
        raise RequestError(problems)
    order = sorted(range(len(sources)), key=lambda i: (-len(whole[i]), -len(sources[i])))
    scores: list[list[float]] = [[] for _ in sources]
    for begin in range(0, len(order), max_batch_size):
        batch = [i for i in order[begin : begin + max_batch_size] if whole[i]]
        if batch:
            rows = _score_batch(model, [sources[i] for i in batch], [whole[i] for i in batch], special, options)
            for i, row in zip(batch, rows, strict=True):
                scores[i] = row[: len(whole[i])].tolist()
    return scores


def _score_batch(
    model: StepModel,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    special: SpecialIds,
    options: DecodeOptions,
) -> Floats:
    """[B, T]; nothing to go by beyond the end of a target."""
    expected, _ = padded(targets, special.pad)
    rows, start = len(targets), options.start_tokens or (special.bos,)
    given = np.concatenate([np.broadcast_to(start, (rows, len(start))), expected[:, :-1]], axis=1)
    length, first = given.shape[1], len(start) - 1  # what follows query `first` is the target's first token
    piece = max(min(length, LARGEST_STEP // (rows * model.dimensions.target_vocabulary_size)), 1)
    sentences = model.encode(*padded(sources, special.for_sources.pad), capacity=length)
    edited = _EditedScores(model, sources, targets, special, options)
    scores: Floats = np.zeros(expected.shape, np.float32)
    for begin in range(0, length, piece):
        place = np.arange(begin, min(begin + piece, length))
        output = sentences.step(
            given[:, place],
            np.broadcast_to(place, (rows, len(place))),
            np.full(rows, begin),
            np.broadcast_to(_causal(place, length), (rows, 1, len(place), length)),
            full=True,
        )
        assert output.log_probs is not None, "a step was asked for its log_probs"
        skipped = max(first - begin, 0)  # start tokens that the target does not follow yet
        told, log_probs = place[skipped:] - first, output.log_probs[:, skipped:]
        scores[:, told] = np.take_along_axis(log_probs, expected[:, told, None], axis=-1)[:, :, 0]
        level = None if output.log_normaliser is None else output.log_normaliser[:, skipped:]
        edited.write(scores, log_probs, level, told)
    return scores


class _EditedScores:
    """Gives the tokens of targets the log-probabilities that options change.

    Args:
        model: what runs the steps.
        sources: ids of each.
        targets: ids of each, with the end token.
        special: the model's ids that are not text.
        options: how to decode.
    """

    def __init__(
        self,
        model: StepModel,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        special: SpecialIds,
        options: DecodeOptions,
    ) -> None:
        self._targets, self._constraint, begin = targets, options.constraint, options.begin(None)
        self._forced = () if options.prefix_bias_beta else begin
        self._wished = begin if options.prefix_bias_beta else ()
        start, longest = list(options.start_tokens or [special.bos]), longest_target(model, options)
        ends = options.end_ids(special)
        ending = Editor(options, ends, start, special.unk, longest)
        longer = Editor(replace(options, forced_eos=None), ends, start, special.unk, longest)
        self._editors = [ending if len(target) <= longest else longer for target in targets]
        self._sources = [ending.source_rules(source) for source in sources]
        self._possible = [True] * len(targets)

    def write(self, scores: Floats, log_probs: Floats, log_normaliser: Floats | None, places: Ids) -> None:
        """Put changed log-probabilities into scores [B, T].

        Args:
            scores: those that the model gives the targets.
            log_probs: [B, Q, V], at these places of the targets.
            log_normaliser: [B, Q]; needed where penalties act on logits.
            places: [Q], each place once, in order.
        """
        for row, target in enumerate(self._targets):
            for query, place in enumerate(places[places < len(target)].tolist()):
                level = None if log_normaliser is None else float(log_normaliser[row, query])
                # Nothing is asked of a constraint beyond a token that may not be there.
                found = self._score(row, place, log_probs[row, query], level) if self._possible[row] else -np.inf
                if found is not None:
                    scores[row, place] = found
                    self._possible[row] = found > -np.inf

    def _score(self, row: int, place: int, log_probs: Floats, log_normaliser: float | None) -> float | None:
        """The log-probability of the token at a place of a target; None where it is the model's."""
        target, editor = self._targets[row], self._editors[row]
        if place < len(self._forced):
            return 0.0 if target[place] == self._forced[place] else -np.inf
        if not editor.may_edit(self._constraint):
            return None
        edit = editor.edit(
            list(target[:place]), self._wished, self._constraint, forced=len(self._forced), source=self._sources[row]
        )
        return None if edit == NO_EDIT else float(editor.whole(edit, log_probs, log_normaliser)[target[place]])


def _causal(place: Ids, length: int) -> np.typing.NDArray[np.bool_]:
    return np.arange(length) <= place[:, None]


def _problems(
    model: StepModel, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], options: DecodeOptions
) -> Iterator[str]:
    if len(sources) != len(targets):
        yield f"there must be a target for each source, found {len(sources)} sources and {len(targets)} targets"
    for number, source in enumerate(sources):
        yield from source_problems(model, source, f"source {number}")
    yield from ids_beyond("target_prefix", options.begin(None), model.dimensions.target_vocabulary_size)
    limit = longest_target(model, replace(options, max_decoding_length=None))
    for number, target in enumerate(targets):
        if len(target) > limit:
            yield f"target {number} has {len(target)} tokens, the model takes at most {limit}"
        yield from ids_beyond(f"target {number}", target, model.dimensions.target_vocabulary_size)
