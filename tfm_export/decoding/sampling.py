"""Drawing a token instead of taking the best."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator, Philox

from tfm_export.decoding.options import DecodeOptions
from tfm_export.decoding.scores import Doubles
from tfm_export.runtime.step_model import Ids


def generator(seed: int | None, draw: int) -> Generator:
    """Random numbers that depend on a request's seed and on which of its samples it is, and on nothing else."""
    return Generator(Philox() if seed is None else Philox(key=[seed, draw]))


def sample(values: Doubles, ids: Ids, options: DecodeOptions, random: Generator | None) -> int:
    """Draw a token.

    Tokens are laid out in the order of their ids, not of their scores: two that are nearly as likely may come in either
    order from one run to the next, and must not swap what they are drawn by.

    Args:
        values: [M] log-probabilities; -inf where a token may not follow.
        ids: [M].
        options: temperature and top-p.
        random: one number is taken.

    Returns:
        The place of the token in `ids`.
    """
    assert random is not None, "a request whose tokens are drawn has a generator"
    order = np.argsort(ids, kind="stable")
    below_best = values[order].astype(np.float64) - values.max()
    with np.errstate(over="ignore"):  # at a temperature near 0 all but the best go to minus infinity, as they should
        weights = np.exp(below_best / options.sampling_temperature)
    if options.sampling_topp < 1:
        weights = np.where(_nucleus(weights, options.sampling_topp), weights, 0.0)
    sums = np.cumsum(weights)
    place = np.searchsorted(sums, random.random() * sums[-1], side="right")
    return int(order[min(place, np.flatnonzero(weights)[-1])])


def _nucleus(weights: Doubles, topp: float) -> np.typing.NDArray[np.bool_]:
    """The fewest of the largest weights that reach a part of the sum."""
    order = np.argsort(-weights, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    kept = np.zeros(len(weights), np.bool_)
    kept[order[before < topp * weights.sum()]] = True
    return kept
