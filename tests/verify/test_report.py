"""Verdicts: what passes, what fails, and what is said of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from tfm_export.decoding import Hypothesis
from tfm_export.verify import steps
from tfm_export.verify.golden import BeamGolden, Golden, _beam_difference, _compare, _greedy_difference
from tfm_export.verify.page import parity_page
from tfm_export.verify.report import GenerationComparison, ParityReport, TensorComparison, reports_json

GOLDEN = [
    Golden(text="a", source_ids=[3], tokens=[5, 6, 2], log_probs=[-1.0, -1.0, -1.0], margins=[0.5, 1e-6, 0.7]),
    Golden(text="b", source_ids=[4], tokens=[7, 2], log_probs=[-1.0, -1.0], margins=[0.5, 0.1]),
    Golden(text=None, source_ids=[4], tokens=[8, 8, 8], log_probs=[-1.0, -1.0, -1.0], margins=[0.5, 0.1, 0.2]),
]
TOKENS = [g.tokens for g in GOLDEN]


def greedy(found: list[list[int]], golden: list[Golden] = GOLDEN) -> GenerationComparison:
    hypotheses = [Hypothesis(tokens=tokens, score=0.0, log_probs=None, finished=True) for tokens in found]
    return _compare("greedy", golden, hypotheses, _greedy_difference, 1e-4)


def report(**changes: object) -> ParityReport:
    tensor = TensorComparison(name="log_probs", error=2e-5, rounding=1e-5, limit=1e-4)
    parts = {
        "variant": "fp32",
        "backend": "onnxruntime-cpu",
        "synthetic": False,
        "graph": [tensor],
        "kernels": [tensor],
        "argmax_agreement": 1.0,
        "generations": [greedy(TOKENS)],
    }
    return ParityReport(**{**parts, **changes})


def test_the_same_tokens_pass() -> None:
    comparison = greedy(TOKENS)
    assert (comparison.count, comparison.identical, comparison.ties, comparison.divergences) == (3, 3, [], [])
    assert comparison.passed
    assert report().passed
    assert report().problems() == []


def test_a_divergence_where_two_tokens_are_level_is_a_tie() -> None:
    comparison = greedy([[5, 9, 9, 9], *TOKENS[1:]])
    assert comparison.passed
    assert (comparison.identical, comparison.divergences) == (2, [])
    tie = comparison.ties[0]
    assert (tie.index, tie.step, tie.expected, tie.found, tie.margin) == (0, 1, 6, 9, 1e-6)


@pytest.mark.parametrize(
    ("found", "index", "step", "expected_token", "found_token"),
    [
        ([[9, 6, 2], *TOKENS[1:]], 0, 0, 5, 9),
        ([TOKENS[0], [7], TOKENS[2]], 1, 1, 2, None),
        ([TOKENS[0], [7, 2, 4], TOKENS[2]], 1, 2, None, 4),
        ([*TOKENS[:2], []], 2, 0, 8, None),
    ],
)
def test_other_divergences_fail_and_are_named(
    found: list[list[int]], index: int, step: int, expected_token: int | None, found_token: int | None
) -> None:
    comparison = greedy(found)
    assert not comparison.passed
    first = comparison.divergences[0]
    assert (first.index, first.step, first.expected, first.found) == (index, step, expected_token, found_token)
    problem = report(generations=[comparison]).problems()[0]
    assert f"input {index}" in problem
    assert f"token {step}" in problem


def test_a_margin_that_is_not_a_number_is_no_tie() -> None:
    golden = [Golden(text=None, source_ids=[3], tokens=[5], log_probs=[0.0], margins=[float("nan")])]
    assert not greedy([[6]], golden).passed


@pytest.mark.parametrize(("score", "tie"), [(-0.80001, True), (-0.79999, True), (-0.7, False), (-0.9, False)])
def test_another_beam_hypothesis_is_a_tie_if_its_score_is_level(score: float, tie: bool) -> None:
    golden = [replace(GOLDEN[0], beam=BeamGolden(tokens=[5, 7, 2], score=-0.8))]
    found = Hypothesis(tokens=[5, 8], score=score, log_probs=None, finished=False)
    comparison = _compare("beam 4", golden, [found], partial(_beam_difference, 1.0), 1e-4)
    assert comparison.passed == tie
    different = (comparison.ties if tie else comparison.divergences)[0]
    assert (different.step, different.expected, different.found) == (1, 7, 8)
    assert different.margin == abs(score + 0.8)


def test_comparing_nothing_fails() -> None:
    empty = GenerationComparison(name="greedy", count=0, identical=0, tie_margin=1e-4)
    assert not report(generations=[empty]).passed
    assert report(generations=[empty]).problems()


@pytest.mark.parametrize("error", [1.1e-4, float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("verdict", "said"), [("graph", "the graph is not the model"), ("kernels", "onnxruntime-cpu does not compute")]
)
def test_a_tensor_beyond_its_limit_fails(verdict: str, said: str, error: float) -> None:
    bad = TensorComparison(name="self_key_1", error=error, rounding=1e-5, limit=1e-4)
    judged = report(**{verdict: [bad]})
    assert not judged.passed
    assert f"self_key_1: {said}" in judged.problems()[0]
    assert "at most 1.00e-04" in judged.problems()[0]


def test_the_share_of_a_limit() -> None:
    assert TensorComparison(name="x", error=2e-5, rounding=1e-5, limit=1.6e-4).share == 0.125
    exact, wrong = (TensorComparison(name="x", error=e, rounding=0, limit=0) for e in (0.0, 1e-300))
    assert (exact.share, exact.passed) == (0, True)
    assert (wrong.share, wrong.passed) == (np.inf, False)


def test_errors_that_are_not_numbers_count_as_infinite() -> None:
    assert steps.distances({"x": np.array([1.0, np.nan])}, {"x": np.array([1.0, 1.0])}) == {"x": np.inf}


def test_another_token_that_is_as_good_is_no_error() -> None:
    log_probs = np.array([[[-1.0, -0.5, -0.5]]])
    for ids, error in (([[[1, 2]]], 0), ([[[2, 1]]], 0), ([[[1, 0]]], 0.5)):
        found = {"top_log_probs": np.array([[[-0.5, -0.5]]]), "top_ids": np.array(ids)}
        assert steps.distances(found, {"log_probs": log_probs}) == {"top_log_probs": error}


def test_the_json_tells_every_verdict() -> None:
    state = json.loads(reports_json([report(), report(graph=[])]))
    assert state["passed"] is True
    first, second = state["variants"]
    assert first["passed"] is True
    assert first["graph"][0]["passed"] is first["kernels"][0]["passed"] is True
    assert first["generations"][0]["passed"] is True
    assert first["generations"][0]["identical"] == 3
    assert second["graph"] == []
    bad = report(generations=[greedy([[9], *TOKENS[1:]])])
    state = json.loads(reports_json([report(), bad]))
    assert [state["passed"], *(v["passed"] for v in state["variants"])] == [False, True, False]


def test_the_page_shows_the_verdict_and_escapes_texts() -> None:
    golden = [replace(GOLDEN[0], text="<script>&"), *GOLDEN[1:]]
    bad = report(generations=[greedy([[9], *TOKENS[1:]], golden)])
    page = parity_page([report(), bad], "Parity")
    assert page.count("<h2>") == 2
    assert "FAILED" in page
    assert "&lt;script&gt;&amp;" in page
    assert "<script>" not in page
    assert "log_probs" in page
    assert "FAILED" not in parity_page([report()], "Parity")


def test_a_limit_that_is_no_number_accepts_nothing() -> None:
    judged = TensorComparison(name="log_probs", error=1e-9, rounding=math.inf, limit=math.inf)
    assert not judged.passed
    assert judged.share == math.inf
    exact = TensorComparison(name="log_probs", error=0.0, rounding=0.0, limit=0.0)
    assert exact.passed
    assert exact.share == 0


def test_the_hint_tells_who_is_wrong() -> None:
    bad = TensorComparison(name="log_probs", error=1.0, rounding=1e-6, limit=1e-5)
    assert "report this" in report(graph=[bad], kernels=[bad]).hint
    assert "pip install --upgrade onnxruntime" in report(kernels=[bad]).hint
    assert "--checkpoint" in report(generations=[greedy([[9, 6, 2], *TOKENS[1:]])]).hint
