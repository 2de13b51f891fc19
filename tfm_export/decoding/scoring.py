"""The log-probabilities of targets that are given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tfm_export.bundle import SpecialIds
from tfm_export.decoding.batch import padded
from tfm_export.decoding.checks import ids_beyond, source_problems
from tfm_export.decoding.request import are_ids
from tfm_export.errors import RequestError
from tfm_export.quotation import quote
from tfm_export.runtime.step_model import LARGEST_STEP, Floats, Ids, StepModel


def score(
    model: StepModel,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    special: SpecialIds,
    *,
    max_batch_size: int = 32,
    add_end_token: bool = True,
) -> list[list[float]]:
    """How likely targets are.

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
        max_batch_size: pairs at once.
        add_end_token: score the end token after each target, too.

    Returns:
        For each pair, the log-probability of every token of the target.

    Raises:
        RequestError: a source or a target cannot be served; all that is wrong, before anything is scored.
    """
    kinds = {"sources": sources, "targets": targets}
    problems = [
        f"{name} must be sequences of ids (integers), found {quote(ids)} at place {number}"
        for name, sequences in kinds.items()
        for number, ids in enumerate(sequences)
        if not are_ids(ids)
    ]
    if max_batch_size < 1:
        problems.append(f"max_batch_size must be at least 1, found {max_batch_size}")
    if problems:
        raise RequestError(problems)
    whole = [[*target, *([special.eos] if add_end_token else [])] for target in targets]
    if problems := list(_problems(model, sources, whole)):
        raise RequestError(problems)
    order = sorted(range(len(sources)), key=lambda i: (-len(whole[i]), -len(sources[i])))
    scores: list[list[float]] = [[] for _ in sources]
    for begin in range(0, len(order), max_batch_size):
        batch = [i for i in order[begin : begin + max_batch_size] if whole[i]]
        if batch:
            rows = _score_batch(model, [sources[i] for i in batch], [whole[i] for i in batch], special)
            for i, row in zip(batch, rows, strict=True):
                scores[i] = row[: len(whole[i])].tolist()
    return scores


def _score_batch(
    model: StepModel, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], special: SpecialIds
) -> Floats:
    """[B, T]; nothing to go by beyond the end of a target."""
    expected, _ = padded(targets, special.pad)
    rows, length = expected.shape
    given = np.concatenate([np.full((rows, 1), special.bos), expected[:, :-1]], axis=1)
    piece = max(min(length, LARGEST_STEP // (rows * model.dimensions.target_vocabulary_size)), 1)
    sentences = model.encode(*padded(sources, special.for_sources.pad), capacity=length)
    scores: Floats = np.zeros((rows, length), np.float32)
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
        scores[:, place] = np.take_along_axis(output.log_probs, expected[:, place, None], axis=-1)[:, :, 0]
    return scores


def _causal(place: Ids, length: int) -> np.typing.NDArray[np.bool_]:
    return np.arange(length) <= place[:, None]


def _problems(model: StepModel, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> Iterator[str]:
    if len(sources) != len(targets):
        yield f"there must be a target for each source, found {len(sources)} sources and {len(targets)} targets"
    for number, source in enumerate(sources):
        yield from source_problems(model, source, f"source {number}")
    limit = model.limits.max_target_length
    for number, target in enumerate(targets):
        if len(target) > limit:
            yield f"target {number} has {len(target)} tokens, the model takes at most {limit}"
        yield from ids_beyond(f"target {number}", target, model.dimensions.target_vocabulary_size)
