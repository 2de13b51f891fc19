"""When another hypothesis than PyTorch's is as right."""

from __future__ import annotations

import math

import pytest

from tfm_export.decoding import Hypothesis
from tfm_export.verify.golden import BeamGolden, Golden, _beam_difference, tie_margin


def margin(length_penalty: float, *, score: float, closest: float = math.inf) -> float:
    """Of a beam hypothesis of 4 tokens that scores -0.8, and another of 2 tokens."""
    beam = BeamGolden(tokens=[5, 7, 9, 2], score=-0.8, margin=closest)
    golden = Golden(text=None, source_ids=[3], tokens=[5], log_probs=[0.0], margins=[1.0], beam=beam)
    found = Hypothesis(tokens=[5, 2], score=score, log_probs=None, finished=True)
    difference = _beam_difference(length_penalty, 0, golden, found)
    assert difference is not None
    return difference.margin


def test_the_margin_is_that_of_a_token_whatever_the_length_penalty() -> None:
    assert margin(1.0, score=-0.9) == pytest.approx(0.1)
    assert margin(0.0, score=-0.9) == pytest.approx(0.1 / 4)  # the score is a sum, of up to four errors
    assert margin(0.5, score=-0.9) == pytest.approx(0.1 / 2)


def test_a_hypothesis_that_was_all_but_kept_may_come_to_another_score() -> None:
    assert margin(1.0, score=-1.8, closest=2e-7) == pytest.approx(2e-7)


def test_bundles_that_tell_pytorchs_own_error_keep_their_margin() -> None:
    assert tie_margin({"own_error": 3e-4}) == 6e-4
    assert tie_margin({"own_error": 1e-6}) == 1e-4
    assert tie_margin({"tie_margin": 3e-5}) == 3e-5
