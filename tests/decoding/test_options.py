"""What is refused, and what compatibility means."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest

from tests.decoding.fake_model import SPECIAL, FakeModel, random_table
from tfm_export.decoding import DecodeOptions, Request, generate
from tfm_export.errors import RequestError

REFUSED: dict[str, dict[str, Any]] = {
    "beam_size must be an integer, found '4'": {"beam_size": "4"},
    "num_hypotheses must be an integer, found None": {"num_hypotheses": None},
    "max_decoding_length must be an integer, found 3.5": {"max_decoding_length": 3.5},
    "length_penalty must be a number, found '1'": {"length_penalty": "1"},
    "target_prefix must be ids, found [1.5]": {"target_prefix": [1.5]},
    "target_prefix must be ids, found 5": {"target_prefix": 5},
    "start_tokens must be ids, found 5": {"start_tokens": 5},
    "end_token must be ids, found 'x'": {"end_token": "x"},
    "end_token must be ids, found 1.5": {"end_token": 1.5},
    "suppress_sequences must be sequences of ids, found [1]": {"suppress_sequences": [1]},
    "suppress_sequences must be sequences of ids, found 5": {"suppress_sequences": 5},
    "begin_suppress_tokens must be ids, found 5": {"begin_suppress_tokens": 5},
    "sequence_bias must be pairs of a sequence of ids and a number, found [[4, 5]]": {"sequence_bias": [[4, 5]]},
    "sequence_bias must be pairs of a sequence of ids and a number, found 5": {"sequence_bias": 5},
    "sequence_bias must be pairs of a sequence of ids and a number, found ['ab']": {"sequence_bias": ["ab"]},
    "sequence_bias must not hold an empty sequence": {"sequence_bias": [[[], 1.0]]},
    "sequence_bias must hold finite numbers, found -inf": {"sequence_bias": {(4,): -math.inf}},
    "exponential_decay_length_penalty must be an integer and a number": {"exponential_decay_length_penalty": (1.5, 2)},
    "must be a start of at least 0 and a finite factor above 0": {"exponential_decay_length_penalty": (-1, 1.1)},
    "a finite factor above 0, found [2, 0]": {"exponential_decay_length_penalty": [2, 0]},
    "encoder_no_repeat_ngram_size must be at least 0": {"encoder_no_repeat_ngram_size": -1},
    "encoder_repetition_penalty must be above 0": {"encoder_repetition_penalty": 0.0},
    "exponential_decay_length_penalty and return_alternatives exclude": {
        "exponential_decay_length_penalty": (2, 1.1),
        "return_alternatives": True,
    },
    "beam_size must be at least 1": {"beam_size": 0},
    "num_hypotheses must be at least 1": {"num_hypotheses": 0},
    "max_batch_size must be at least 1": {"max_batch_size": 0},
    "no_repeat_ngram_size must be at least 0": {"no_repeat_ngram_size": -1},
    "min_decoding_length must be at least 0": {"min_decoding_length": -1},
    "max_decoding_length must be at least 1": {"max_decoding_length": 0},
    "sampling_topk must be at least 0": {"sampling_topk": -1},
    "sampling_temperature must be at least 0": {"sampling_temperature": -1, "sampling_topk": 0},
    "seed must be at least 0": {"seed": -1, "sampling_topk": 0},
    "patience must be above 0, found 0.0": {"patience": 0.0, "beam_size": 2},
    "repetition_penalty must be above 0": {"repetition_penalty": 0.0},
    "length_penalty must be from -50 to 50, found inf": {"length_penalty": float("inf")},
    "length_penalty must be from -50 to 50, found nan": {"length_penalty": float("nan")},
    "length_penalty must be from -50 to 50, found 1000": {"length_penalty": 1000},
    "beam_size must be at most 2147483647": {"beam_size": 10**20},
    "max_batch_size must be at most 2147483647": {"max_batch_size": 10**20},
    "no_repeat_ngram_size must be at most 2147483647": {"no_repeat_ngram_size": 10**20},
    "seed must be at most 9223372036854775807": {"seed": 2**63, "sampling_topk": 0},
    "patience must be above 0, found nan": {"patience": float("nan"), "beam_size": 2},
    "patience must be above 0, found inf": {"patience": float("inf"), "beam_size": 2},
    "sampling_topp must be above 0 and at most 1": {"sampling_topp": 1.5, "sampling_topk": 0},
    "prefix_bias_beta must be at least 0 and below 1": {"prefix_bias_beta": 1.0},
    "min_alternative_expansion_prob must be from 0 to 1": {
        "min_alternative_expansion_prob": 2,
        "return_alternatives": True,
    },
    "compatibility must be one of": {"compatibility": "fairseq"},
    "batch_type must be one of": {"batch_type": "words"},
    "stop_rule must be one of": {"stop_rule": "never"},
    "early_stopping must be one of": {"early_stopping": "sometimes", "compatibility": "huggingface"},
    "length_formula must be one of": {"length_formula": "log"},
    "score_change must be one of": {"score_change": "during"},
    "end_after_prefix must be one of": {"end_after_prefix": "no"},
    "suppress_sequences must not hold an empty sequence": {"suppress_sequences": [[4], []]},
    "end_token must name at least one id": {"end_token": []},
    "start_tokens must name at least one id": {"start_tokens": []},
    "min_decoding_length 5 is above max_decoding_length 4": {"min_decoding_length": 5, "max_decoding_length": 4},
    "early_stopping belongs to Hugging Face's stop rule": {"early_stopping": True, "beam_size": 2},
    "patience belongs to CTranslate2's stop rule": {"patience": 2.0, "compatibility": "huggingface", "beam_size": 2},
    "over a beam_size above 1": {"patience": 2.0},
    "sampling draws single tokens": {"sampling_topk": 0, "beam_size": 2},
    "sampling_topp has no effect": {"sampling_topp": 0.5},
    "sampling_temperature has no effect": {"sampling_temperature": 0.5},
    "seed has no effect": {"seed": 1},
    "num_hypotheses 3 is more than the 2": {"num_hypotheses": 3, "beam_size": 2},
    "prefix_bias_beta and return_alternatives exclude": {"prefix_bias_beta": 0.5, "return_alternatives": True},
    "prefix_bias_beta and forced_bos exclude": {"prefix_bias_beta": 0.5, "forced_bos": 4},
    "forced_bos and target_prefix both say": {"forced_bos": 4, "target_prefix": [3]},
    "min_alternative_expansion_prob has no effect": {"min_alternative_expansion_prob": 0.1},
    "coverage_penalty must be a finite number": {"coverage_penalty": float("nan")},
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_makes_no_sense_is_refused(problem: str) -> None:
    with pytest.raises(RequestError) as caught:
        DecodeOptions(**REFUSED[problem])
    assert len(caught.value.problems) == 1
    assert problem in caught.value.problems[0]


def test_biases_may_be_a_mapping_and_the_last_of_two_holds() -> None:
    options = DecodeOptions(sequence_bias=[[[4, 5], 1.0], [[6], 2], [[4, 5], 3.0]])
    assert options == DecodeOptions(sequence_bias={(4, 5): 3.0, (6,): 2.0})
    assert replace(options) == options


@pytest.mark.parametrize("length_penalty", [-50, 50])
@pytest.mark.parametrize("formula", ["with_prefix", "gnmt"])
def test_the_largest_penalties_rank_the_longest_targets(length_penalty: float, formula: Any) -> None:
    options = DecodeOptions(length_penalty=length_penalty, length_formula=formula)
    divisors = [options.divisor(length, 0) for length in (1, 2**20)]
    assert all(0 < 1e6 / divisor < math.inf for divisor in divisors)
    assert (divisors[0] < divisors[1]) == (length_penalty > 0)


def test_any_patience_is_a_number_of_hypotheses() -> None:
    assert DecodeOptions(patience=1e308, beam_size=2).enough > 10**9
    assert DecodeOptions(patience=1e-308, beam_size=2).enough == 1


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        DecodeOptions(beam_size=0, sampling_topp=3, coverage_penalty=float("inf"))
    assert len(caught.value.problems) >= 3


BEYOND_MODEL: dict[str, dict[str, Any]] = {
    "max_decoding_length is 13": {"max_decoding_length": 13},
    "max_decoding_length is 12; the model's targets have at most 11": {
        "max_decoding_length": 12,
        "start_tokens": [1, 3],
    },
    "min_decoding_length is 13": {"min_decoding_length": 13},
    "sampling_topk is 6": {"sampling_topk": 6},
    "end_token has ids that the vocabulary of 5 lacks: 5": {"end_token": [2, 5]},
    "start_tokens has ids": {"start_tokens": [9]},
    "suppress_sequences has ids": {"suppress_sequences": [[4, 7]]},
    "begin_suppress_tokens has ids": {"begin_suppress_tokens": [4, 7]},
    "sequence_bias has ids": {"sequence_bias": [[[4, 7], 1.0]]},
    "forced_bos has ids": {"forced_bos": 5},
    "forced_eos has ids": {"forced_eos": -1},
    "target_prefix of source 0 has ids": {"target_prefix": [8]},
    "target_prefix of source 0 has 12 tokens": {"target_prefix": [3] * 12},
    "coverage_penalty needs attention weights": {"coverage_penalty": 0.2},
    "return_attention needs attention weights": {"return_attention": True},
    "replace_unknowns needs attention weights": {"replace_unknowns": True},
    "tfm-export onnx CHECKPOINT --attention": {"return_attention": True},
}


@pytest.mark.parametrize("problem", BEYOND_MODEL)
def test_what_the_model_cannot_do_is_refused(problem: str) -> None:
    with pytest.raises(RequestError) as caught:
        generate(FakeModel(random_table()), [(5,)], DecodeOptions(**BEYOND_MODEL[problem]), SPECIAL)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"seed": seed} for seed in (-1, 2**63, 1.5, "1")),
        *({"deadline": deadline} for deadline in (float("nan"), "1", 10**400)),
        *({"target_prefix": prefix} for prefix in ([1.5], 5, [[1]], ["A"])),
        *({"cancelled": cancelled} for cancelled in (True, "no", 5)),
        *({"on_tokens": on_tokens} for on_tokens in (True, "print")),
    ],
    ids=str,
)
def test_what_a_request_has_of_its_own_is_of_its_type(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(wrong))} must "):
        Request(source=(5,), **wrong)


def test_a_deadline_may_never_come() -> None:
    assert Request(source=(5,), deadline=float("inf")).deadline == float("inf")


@pytest.mark.parametrize("beams", [10**6, 2**31 - 1])
def test_beams_that_no_memory_holds_are_refused_before_anything_runs(beams: int) -> None:
    model = FakeModel(random_table())
    with pytest.raises(RequestError, match=f"beam_size is {beams}: targets of 4 tokens need .* GB a sentence"):
        generate(model, [(5,)], DecodeOptions(beam_size=beams), SPECIAL)
    assert model.encodes == 0


def test_disable_unk_needs_an_unknown_token() -> None:
    with pytest.raises(RequestError, match="no unknown token"):
        generate(FakeModel(random_table()), [(5,)], DecodeOptions(disable_unk=True), replace(SPECIAL, unk=None))


def test_sources_that_cannot_be_served_are_all_named_before_anything_is_decoded() -> None:
    model = FakeModel(random_table())
    sources = [(), (5,), (5,) * 13, (50, -1), Request(source=(5,), target_prefix=[7])]
    with pytest.raises(RequestError) as caught:
        generate(model, sources, DecodeOptions(), SPECIAL)
    assert len(caught.value.problems) == 4
    assert model.encodes == 0
    with pytest.raises(RequestError, match="forced_bos both say"):
        generate(model, [Request(source=(5,), target_prefix=[3])], DecodeOptions(forced_bos=4), SPECIAL)


def test_compatibility_sets_the_rules_that_are_not_chosen() -> None:
    ours, theirs = DecodeOptions(beam_size=2), DecodeOptions(beam_size=2, compatibility="huggingface")
    for field in fields(ours.rules):
        if field.name != "early_stopping":
            assert getattr(ours.rules, field.name) != getattr(theirs.rules, field.name)
    mixed = DecodeOptions(beam_size=2, compatibility="huggingface", score_change="before_softmax")
    assert mixed.rules == replace(theirs.rules, score_change="before_softmax")
    assert DecodeOptions(compatibility="huggingface").rules.score_change == "before_softmax"


@pytest.mark.parametrize(
    ("formula", "expected"), [("with_prefix", 8**0.5), ("without_prefix", 5**0.5), ("gnmt", (13 / 6) ** 0.5)]
)
def test_length_formulas(formula: Any, expected: float) -> None:
    options = DecodeOptions(length_penalty=0.5, length_formula=formula)
    assert options.divisor(8, 3) == pytest.approx(expected)


def test_options_are_values() -> None:
    options = DecodeOptions(suppress_sequences=[[4]], target_prefix=[3])
    assert options == DecodeOptions(suppress_sequences=((4,),), target_prefix=(3,))
    with pytest.raises(AttributeError):
        options.beam_size = 3  # type: ignore[misc]
