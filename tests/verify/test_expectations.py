"""The user's own pairs against the reading of their checkpoint: a torch.nn.Transformer and its own greedy decoding."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints.test_huggingface import LONGEST
from tests.checkpoints.test_huggingface import build as build_huggingface
from tests.decoding.fake_model import SPECIAL, FakeModel, random_table
from tests.oracles.own_model import RIGHT, TARGET, WORDS, own_json, own_lines, own_model, save_own
from tfm_export.bundle import Limits
from tfm_export.checkpoints import read_checkpoint
from tfm_export.checkpoints.answers import how_to_answer
from tfm_export.errors import ParityError, RequestError
from tfm_export.tokenizer.vocabulary import Side, VocabularyTokenizer
from tfm_export.verify import Expectations, ExpectedComparison, parse_expectations
from tfm_export.verify.expectation_file import Expectation
from tfm_export.verify.expectations import ReadModel, compare_expectations
from tfm_export.verify.reading import check_source

pytestmark = [
    pytest.mark.usefixtures("one_torch_thread"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]
Check = Callable[..., ExpectedComparison]


@lru_cache
def lines() -> tuple[str, ...]:
    return tuple(own_lines(own_model()))


@lru_cache
def json_lines(*, total: bool = False) -> tuple[str, ...]:
    return tuple(own_json(own_model(), total=total))


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Reads their checkpoint with some answers, and holds that to pairs."""
    checkpoint = save_own(own_model(), tmp_path)

    def run(pairs: Any = None, **answers: Any) -> ExpectedComparison:
        given = {name: value for name, value in {**RIGHT, **answers}.items() if value is not None}
        expectations = parse_expectations(lines() if pairs is None else pairs, "pairs")
        return check_source(read_checkpoint(checkpoint, given), expectations, progress=lambda _: None)

    return run


def refusal(check: Check, pairs: Any = None, **answers: Any) -> ParityError:
    with pytest.raises(ParityError) as caught:
        check(pairs, **answers)
    return caught.value


def test_right_answers_give_their_pairs(check: Check) -> None:
    found = check()
    assert (found.count, found.mismatches, found.ties) == (len(WORDS), [], [])
    assert found.text() == f"your own pairs: {len(WORDS)} of {len(WORDS)} as expected"


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ({"heads": 2}, "--heads 6"),
        ({"norm_first": False}, "--norm-first"),
        ({"scale_embeddings": True}, "--no-scale-embeddings"),
        ({"bos": 5}, "--bos 1"),
        ({"eos": 7}, "--eos 2"),
        ({"source_starts_with_bos": False}, "--source-starts-with-bos"),
        ({"source_ends_with_eos": False}, "--source-ends-with-eos"),
        ({"heads": 2, "norm_first": False}, "--heads 6 --norm-first"),
        ({"norm_first": False, "source_ends_with_eos": False}, "--norm-first --source-ends-with-eos"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_wrong_answers_are_refused_and_the_right_ones_told(check: Check, wrong: dict[str, Any], hint: str) -> None:
    error = refusal(check, **wrong)
    assert error.exit_code == 3
    assert error.hint is not None
    assert error.hint.split(";")[0] == hint
    text = str(error)
    assert f"of {len(WORDS)} pairs do not come out as expected" in text
    for name, value in wrong.items():
        assert f"{name} {str(value).lower()}" in text, "the answers that it rests on"
    assert f"{len(WORDS)} of {len(WORDS)} come out as expected" in text


def test_the_first_token_that_differs_is_told(check: Check) -> None:
    source, output = lines()[2].split("\t")
    assert source == "parrot"
    pairs = [*lines()[:2], f"{source}\t{output[:3]}A{output[4:]}", *lines()[3:]]
    error = refusal(check, pairs)
    assert error.problems[:2] == [
        f"pairs: 1 of {len(WORDS)} pairs do not come out as expected",
        f"line 3 ('parrot'): token 4: expected 'A' (3), found {output[3]!r} ({TARGET.index(output[3])})",
    ]
    assert "none makes all pairs come out" in error.problems[-1]


def test_a_target_that_goes_on_after_what_is_expected_is_another_one(check: Check) -> None:
    source, output = lines()[2].split("\t")
    error = refusal(check, [f"{source}\t{output[:-2]}"])
    assert f"token {len(output) - 1}: expected the end, found {output[-2]!r}" in error.problems[1]


def test_the_number_of_targets_at_the_limit_of_the_user_needs_no_end(check: Check) -> None:
    source, output = lines()[2].split("\t")
    pair = {"source": source, "expected": output[:4], "options": {"max_decoding_length": 4}}
    assert check([json.dumps(pair)]).passed


def test_an_activation_that_changes_no_token_shows_in_log_probabilities(check: Check) -> None:
    found = check(json_lines())
    assert (found.passed, found.with_log_probs) == (True, len(WORDS))
    assert check(json_lines(total=True)).with_log_probs == len(WORDS)
    assert check(activation="gelu_tanh").passed, "tokens alone do not tell these two apart"
    for total in (False, True):
        error = refusal(check, json_lines(total=total), activation="gelu_tanh")
        assert error.hint == "--activation gelu"
        assert "log-probability" in error.problems[1]


def test_the_limit_of_log_probabilities_follows_the_digits_of_the_file(check: Check) -> None:
    state = [json.loads(line) for line in json_lines()]
    rounded = [json.dumps({**s, "log_probs": [round(p, 3) for p in s["log_probs"]]}) for s in state]
    found = check(rounded)
    assert found.passed
    assert 5e-4 <= found.limit < 1e-3
    off = [json.dumps({**s, "log_probs": [round(p - 2e-3, 3) for p in s["log_probs"]]}) for s in state]
    assert f"{len(WORDS)} of {len(WORDS)}" in refusal(check, off).problems[0]


def test_options_of_beams_do_not_come_to_greedy_search() -> None:
    one, four = (
        Expectation(number=1, source_ids=[1], tokens=[1], options=options) for options in ({}, {"beam_size": 4})
    )
    defaults = {"num_hypotheses": 4, "patience": 2.0, "forced_bos": 3}
    read = ReadModel(model=FakeModel(random_table()), tokenizer=None, special=SPECIAL, defaults=defaults)
    assert read.options(one) == {"forced_bos": 3}
    assert read.options(four) == {**defaults, "beam_size": 4}


def test_a_text_that_goes_on_with_tokens_that_are_not_shown_is_another_one() -> None:
    """The end token was taken for another one: what comes after it are tokens that no text shows."""
    target = Side(tokens=("<pad>", "<s>", "</s>", "<unk>", "a"), split="characters", lowercase=False)
    tokenizer = VocabularyTokenizer(target, target, SPECIAL)
    pair = Expectation(number=1, source="a", text="a")

    model = FakeModel(lambda _, path: np.log([0.02, 0.02, 0.02, 0.02, 0.92] if len(path) == 1 else [0.92, *[0.02] * 4]))
    read = ReadModel(model=model, tokenizer=tokenizer, special=SPECIAL)
    found = compare_expectations(read, Expectations("pairs", [pair]), limit=1e-5)
    assert [m.what for m in found.mismatches] == ["token 2: expected the end, found '<pad>' (0)"]


def test_ids_are_taken_as_they_are(check: Check) -> None:
    tokens = RIGHT["source_tokens"]
    pairs = [
        json.dumps({"source_ids": [1, *(tokens.index(c) for c in s["source"]), 2], "tokens": s["tokens"]})
        for s in map(json.loads, json_lines())
    ]
    assert check(pairs).passed
    assert check(pairs, source_starts_with_bos=False).passed, "nothing is put around ids"
    with_end = [json.dumps({**json.loads(p), "tokens": [*json.loads(p)["tokens"], 2]}) for p in pairs]
    assert check([p for p in with_end if len(json.loads(p)["tokens"]) <= 20]).passed


def test_without_a_tokenizer_both_sides_are_ids(check: Check) -> None:
    none = dict.fromkeys(("source_tokens", "target_tokens", "source_split", "target_split"))
    tokens = RIGHT["source_tokens"]
    pairs = [
        f"1 {' '.join(str(tokens.index(c)) for c in s['source'])} 2\t{' '.join(map(str, s['tokens']))}"
        for s in map(json.loads, json_lines())
    ]
    assert check(pairs, **none).passed
    assert "expected ids, found 'BJGQBBM'" in str(refusal(check, ["4 5\tBJGQBBMM"[:11]], **none))


def test_a_source_that_the_reading_cannot_encode_is_told(check: Check) -> None:
    error = refusal(check, [*lines(), "x?\tA"])
    assert "line 13 ('x?'): the source cannot be decoded" in error.problems[1]


def refused_hint(path: Path, answers: dict[str, Any]) -> str | None:
    with pytest.raises(ParityError) as caught:
        check_source(read_checkpoint(path, answers), parse_expectations(lines(), "pairs"), progress=lambda _: None)
    return caught.value.hint


def test_the_other_weights_of_a_file_are_tried(tmp_path: Path) -> None:
    state = own_model().state_dict()
    noise = {name: weight + 0.3 * torch.randn_like(weight) for name, weight in state.items()}
    torch.save({"model": noise, "ema": state}, tmp_path / "own.pt")
    assert refused_hint(tmp_path / "own.pt", RIGHT) == "--weights ema"
    assert refused_hint(tmp_path / "own.pt", {**RIGHT, "weights": "model"}) == "--weights ema"


def test_no_candidate_is_asked_for_more_than_its_tables_hold(tmp_path: Path) -> None:
    """Tables of positions of two lengths, whose roles the search exchanges, under the limits of an export."""
    state = own_model().state_dict()
    table = state.pop("pos_emb.weight")
    torch.save({**state, "one.weight": table[:10], "two.weight": table}, tmp_path / "own.pt")
    keys = {"one.weight": "source_positions", "two.weight": "target_positions"}
    source = read_checkpoint(tmp_path / "own.pt", {**RIGHT, "keys": keys, "heads": 2})
    limits = Limits(max_source_length=10, max_target_length=20)
    with pytest.raises(ParityError) as caught:
        check_source(source, parse_expectations(lines(), "pairs"), limits=limits, progress=lambda _: None)
    assert caught.value.hint == "--heads 6"


def test_exchanged_tables_are_found(tmp_path: Path) -> None:
    names = {"src_emb.weight": "one.weight", "tgt_emb.weight": "two.weight"}
    torch.save({names.get(n, n): w for n, w in own_model().state_dict().items()}, tmp_path / "own.pt")
    right = {"one.weight": "source_embedding", "two.weight": "target_embedding"}
    wrong = {"one.weight": "target_embedding", "two.weight": "source_embedding"}
    hint = f'"keys": {json.dumps(right)} in --config FILE'
    assert refused_hint(tmp_path / "own.pt", {**RIGHT, "keys": wrong}) == hint


@pytest.mark.parametrize("name", ["bart", "m2m_100"])
def test_the_models_own_decoding_options_apply_but_for_its_beams(tmp_path: Path, name: str) -> None:
    """Forced first tokens and forbidden repetition: with one beam, as transformers' own greedy search."""
    model = build_huggingface(name)
    model.save_pretrained(tmp_path)
    source, pairs = read_checkpoint(tmp_path), []
    for length in range(1, 7):
        ids = [*torch.randint(3, 50, (length,)).tolist(), source.special_ids.eos]
        output = model.generate(torch.tensor([ids]), num_beams=1, max_new_tokens=LONGEST, use_cache=False)
        tokens = output[0, 1:].tolist()
        tokens = tokens[: tokens.index(source.special_ids.eos)] if source.special_ids.eos in tokens else tokens
        pairs.append({"source_ids": ids, "tokens": tokens, "options": {"max_decoding_length": LONGEST}})
    assert source.answers == {}, "its files say everything"
    expectations = parse_expectations(map(json.dumps, pairs), "pairs")
    assert check_source(source, expectations, progress=lambda _: None).passed


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "pairs has no pairs"),
        (["cat"], "line 1: expected a source, one tab and its output; found 0 tabs"),
        (["a\tb", "a\tb\tc"], "line 2: expected a source, one tab and its output; found 2 tabs"),
        (['{"source": "a", "expected": "b"}', "a\tb"], "line 2: expected JSON, as on the first line"),
        (['{"source": "a"}'], 'expected either "expected" (a text) or "tokens" (ids)'),
        (['{"source": "a", "source_ids": [1], "tokens": [1]}'], 'expected either "source" (a text)'),
        (['{"source": "a", "text": "b", "expected": "b"}'], "there is no 'text' in a pair"),
        (['{"source": "a", "tokens": ["b"]}'], '"tokens" must be a list of ids'),
        (['{"source": "a", "tokens": [1], "log_probs": "x"}'], '"log_probs" must be'),
        (['{"source": "a", "tokens": [1], "options": {"beam": 4}}'], "pairs take no option 'beam'"),
        (['{"source": "a", "tokens": [1], "options": {"beam_size": 0}}'], "beam_size must be at least 1"),
        (['{"source": "a", "tokens": [1], "options": {"sampling_topk": 5}}'], "pairs take no option 'sampling_topk'"),
    ],
)
def test_a_file_that_has_no_pairs_is_told_line_by_line(pairs: list[str], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_expectations(pairs, "pairs")
    assert message in str(caught.value)


def test_what_to_type() -> None:
    assert [how_to_answer(*a) for a in (("heads", 6), ("norm_first", True), ("norm_first", False), ("pad", 0))] == [
        "--heads 6",
        "--norm-first",
        "--norm-last",
        "--pad 0",
    ]
    assert how_to_answer("layer_norm_epsilon", 1e-6) == "--layer-norm-epsilon 1e-06"
    assert how_to_answer("lowercase", True) == '"lowercase": true in --config FILE'
