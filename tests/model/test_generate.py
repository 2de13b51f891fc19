"""The loaded model: text and ids in, generations out, what is refused, and scores of given targets."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tfm_export
import tfm_export.tokenizer
from tests.conftest import build_tiny_model
from tests.model.conftest import WORDS, rewrite_manifest
from tfm_export import RequestError
from tfm_export.bundle import Bundle, GenerationDefaults
from tfm_export.decoding import DecodeOptions, Reason
from tfm_export.model import Model, TextRequest


def test_generations_are_those_of_the_reference_search(model: Model) -> None:
    import torch

    from reference_model import SpecialIds
    from reference_model.search import greedy
    from tests.numerics import log_prob_limit

    reference = build_tiny_model(0, norm_first=True, final_norm=True)
    limit = 2 * log_prob_limit(reference)
    for word, generation in zip(WORDS, model.generate(WORDS), strict=True):
        ids = torch.tensor([model.encode_text(word).ids])
        expected = greedy(reference, ids, torch.ones_like(ids, dtype=torch.bool), SpecialIds(), 30)[0]
        assert generation.tokens == expected.tokens
        assert generation.hypotheses[0].log_probs == pytest.approx(expected.log_probs, rel=0, abs=limit)
        assert generation.text == " ".join(f"p{i - 4}" for i in expected.tokens)


def test_one_text_gives_one_generation(model: Model) -> None:
    one, many = model.generate("hello"), model.generate(["hello"])
    assert (one.text, one.tokens) == (many[0].text, many[0].tokens)
    assert one.score == one.hypotheses[0].score
    assert not one.source_truncated
    assert one.statistics.steps >= len(one.tokens)
    assert model.generate([]) == []


def test_several_hypotheses_come_with_their_texts(model: Model) -> None:
    generation = model.generate("hello", beam_size=3, num_hypotheses=3)
    assert len(generation.texts) == len(set(generation.texts)) == 3
    assert generation.texts == [model.tokenizer.decode_target(h.tokens) for h in generation.hypotheses]


def test_ids_in_ids_out(model: Model) -> None:
    ids = [model.encode_text(word).ids for word in WORDS]
    assert ids[2] == [4, 2]
    results = model.generate_ids([np.array(ids[0]), *ids[1:]])
    texts = model.generate(WORDS)
    assert [(r.tokens, r.score, r.hypotheses, r.reason) for r in results] == [
        (g.tokens, g.score, g.hypotheses, g.reason) for g in texts
    ]
    assert (results[0].texts, results[0].source_truncated, type(results[0])) == (None, False, type(texts[0]))
    with pytest.raises(RequestError, match="an answer to ids has no text"):
        _ = results[0].text


def test_the_bundles_defaults_hold_unless_a_request_says_otherwise(copied: Path) -> None:
    generation = {"max_length": 7, "beam_size": 3, "length_penalty": 0.5}
    rewrite_manifest(copied, generation=generation)
    with tfm_export.load(copied) as model:
        assert len(model.generate("hello").tokens) <= 7
        options = model.decode_options()
        assert (options.max_decoding_length, options.beam_size, options.length_penalty) == (7, 3, 0.5)
        assert model.decode_options(beam_size=2, max_decoding_length=9).beam_size == 2
        assert model.decode_options(sampling_topk=5).beam_size == 1  # beams and draws exclude each other
        assert model.decode_options(DecodeOptions()) == DecodeOptions()


def test_draws_that_are_the_bundles_default_give_way_to_beams(copied: Path) -> None:
    draws = {"sampling_topk": 5, "sampling_topp": 0.9, "sampling_temperature": 0.7}
    rewrite_manifest(copied, generation={"max_length": 7, "beam_size": 1, "options": draws})
    with tfm_export.load(copied) as model:
        drawn = model.decode_options()
        assert {name: getattr(drawn, name) for name in draws} == draws
        assert model.decode_options(sampling_topk=2).sampling_topp == 0.9
        for searched in (model.decode_options(beam_size=3), model.decode_options(sampling_topk=1)):
            assert (searched.samples, searched.sampling_topp, searched.sampling_temperature) == (False, 1.0, 1.0)


def test_lengths_beyond_the_table_are_refused(model: Model) -> None:
    with pytest.raises(RequestError, match="max_decoding_length is 65; the model's targets have at most 64 tokens"):
        model.generate("hello", max_decoding_length=65)
    assert model.generate("hello", max_decoding_length=64).tokens


def test_options_come_in_one_way(model: Model) -> None:
    with pytest.raises(RequestError, match="options were given, and beam_size beside them"):
        model.generate("hello", options=DecodeOptions(), beam_size=2)
    with pytest.raises(RequestError, match="beam_size must be at least 1"):
        model.generate("hello", beam_size=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the text is empty"),
        ("  ", "the text is empty"),
        ("naïve 1", r"'naïve 1' has characters that the model does not know: ' ' '1' 'ï'"),
        ("a\udcffb", "the text is not UTF-8: byte 0xff at place 1"),
        ("\ud800", r"the text is not UTF-8: code point U\+D800 at place 0"),
        (b"hello", "a text must be a str, found bytes"),
        ([5, 6], "a text must be a str, found int"),
    ],
)
def test_texts_that_cannot_be_served(model: Model, text: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        model.generate([text] if isinstance(text, bytes) else text)


@pytest.mark.parametrize("found", [None, 5, 1.5])
def test_what_is_no_text_and_no_sequence_is_refused(model: Model, found: Any) -> None:
    with pytest.raises(RequestError, match=f"expected a text, or a sequence with a text each, found {found}"):
        model.generate(found)
    with pytest.raises(RequestError, match=f"expected a source, or a sequence with a source each, found {found}"):
        model.generate_ids(found)


def test_all_that_is_wrong_is_told_before_anything_runs(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.step_model, "encode", lambda *_, **__: pytest.fail("the encoder ran"))
    with pytest.raises(RequestError) as error:
        model.generate(["hello", "", "a1"])
    assert error.value.problems == [
        "text 1: the text is empty",
        "text 2: 'a1' has characters that the model does not know: '1'",
    ]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the source is empty"),
        ([4, 31], "the source has ids that the vocabulary of 31 lacks: 31"),
        ([-1], "the source has ids that the vocabulary of 31 lacks: -1"),
        ([4, 4.5, "a"], "ids must be integers, found 4.5, 'a'"),
        (4, "ids must be integers, one for each token, found 4"),
    ],
)
def test_ids_that_cannot_be_served(model: Model, ids: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        model.generate_ids([ids])


def test_long_sources_are_refused_or_cut_and_it_is_told(model: Model) -> None:
    longest, longer = "a" * 63, "a" * 80
    assert not model.generate(longest).source_truncated
    with pytest.raises(RequestError, match="the source has 81 tokens; the model takes at most 64"):
        model.generate(longer)
    cut = model.generate(["b", longer], long_source="truncate")
    assert [g.source_truncated for g in cut] == [False, True]
    by_ids = model.generate_ids([[4, 2], [4] * 80 + [2]], long_source="truncate")
    assert [r.source_truncated for r in by_ids] == [False, True]
    assert cut[1].tokens == model.generate(longest).tokens  # 63 letters and the end token, which is kept
    assert model.encode_text(longer, long_source="truncate").ids == [4] * 63 + [2]
    assert model.check_ids([4] * 80, long_source="truncate").ids == [4] * 64
    with pytest.raises(RequestError, match="long_source must be one of refuse, truncate, found 'cut'"):
        model.generate("a", long_source="cut")  # type: ignore[call-overload]


def test_sources_without_end_token_are_cut_at_the_end(model: Model) -> None:
    manifest = model.bundle.manifest
    special = replace(manifest.special_ids, source_ends_with_eos=False)
    bundle = Bundle(model.bundle.path, replace(manifest, special_ids=special))
    plain = Model(bundle, model.step_model, model.tokenizer)
    assert plain.check_ids([4] * 70 + [2], long_source="truncate").ids == [4] * 64


def test_eight_threads_get_what_one_gets(model: Model) -> None:
    expected = [model.generate(word, max_decoding_length=20) for word in WORDS]
    beams = model.generate(WORDS, beam_size=2, max_decoding_length=12)

    def work(number: int) -> bool:
        for turn in range(4):
            index = (number + turn) % len(WORDS)
            alone = model.generate(WORDS[index], max_decoding_length=20)
            same = alone.hypotheses == expected[index].hypotheses
            together = model.generate(WORDS, beam_size=2, max_decoding_length=12)
            if not same or [g.hypotheses for g in together] != [g.hypotheses for g in beams]:
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_requests_have_options_of_their_own(model: Model) -> None:
    plain, *own = model.generate(
        [
            "hello",
            TextRequest(text="hello", target_prefix="p20 p21"),
            TextRequest(text="hello", target_prefix=[24]),
            TextRequest(text="hello", deadline=0),
            TextRequest(text="hello", constraint=lambda tokens: {7} if len(tokens) < 2 else {2}),
        ]
    )
    assert plain.text == model.generate("hello").text
    assert [g.tokens[:2] for g in own[:2]] == [[24, 25], [24, own[1].tokens[1]]]
    assert (own[2].tokens, own[2].reason) == ([], Reason.DEADLINE)
    assert own[3].text == "p3 p3"
    drawn = model.generate([TextRequest(text="zz", seed=seed) for seed in (1, 2, 1)], sampling_topk=0)
    assert drawn[0].tokens == drawn[2].tokens != drawn[1].tokens


def test_a_call_can_be_given_up(model: Model) -> None:
    given_up = threading.Event()
    given_up.set()
    assert model.generate("hello", cancelled=given_up).reason is Reason.CANCELLED
    assert model.generate_ids([[4, 2]], deadline=0)[0].reason is Reason.DEADLINE
    own = TextRequest(text="hello", cancelled=threading.Event())
    assert model.generate(own, cancelled=given_up).reason is Reason.CANCELLED
    assert model.generate(replace(own, cancelled=given_up), cancelled=threading.Event()).reason is Reason.CANCELLED


def test_targets_in_options_may_be_text(model: Model) -> None:
    options = model.decode_options(target_prefix="p1 p2", suppress_sequences=["p3", [4, 5]])
    assert (options.target_prefix, options.suppress_sequences) == ((5, 6), ((7,), (4, 5)))
    with pytest.raises(RequestError, match="'p99' has words that the model does not know"):
        model.generate("hello", target_prefix="p99")
    special = replace(model.bundle.manifest.special_ids, unk=3)
    bundle = Bundle(model.bundle.path, replace(model.bundle.manifest, special_ids=special))
    with_unk = Model(bundle, model.step_model, tfm_export.tokenizer.load_tokenizer(bundle))
    with pytest.raises(RequestError, match="'p1 p99' has tokens that the model's targets do not have"):
        with_unk.decode_options(target_prefix="p1 p99")


def test_scores_are_under_the_options_of_decoding(model: Model) -> None:
    from tests.numerics import bundle_log_prob_limit

    limit = 2 * bundle_log_prob_limit(model.bundle.manifest)
    rules: dict[str, Any] = {"forced_bos": 5, "forced_eos": 2, "max_decoding_length": 4, "suppress_sequences": [[3]]}
    generation = model.generate("hello", **rules)
    log_probs = generation.hypotheses[0].log_probs
    assert log_probs[0] == 0
    # The text does not have what was forced upon the ids.
    for text in (generation.text, model.tokenizer.decode_target(generation.tokens[1:])):
        (scores,) = model.score(["hello"], [text], **rules)
        assert scores == pytest.approx(log_probs, rel=0, abs=limit)
    ids = model.encode_text("hello").ids
    (scores,) = model.score_ids([ids], [generation.tokens], **rules)
    assert scores == pytest.approx(log_probs, rel=0, abs=limit)
    defaults = GenerationDefaults(max_length=4, beam_size=1, options={"forced_bos": 5, "forced_eos": 2})
    bundle = Bundle(model.bundle.path, replace(model.bundle.manifest, generation=defaults))
    with_defaults = Model(bundle, model.step_model, tfm_export.tokenizer.load_tokenizer(bundle))
    assert with_defaults.score_ids([ids], [[5, 6, 7]])[0][::3] == [0, 0]
    (bare,) = with_defaults.score_ids([ids], [[5, 6, 7]], options=tfm_export.DecodeOptions())
    assert max(bare) < 0
    with_defaults._runner.close()


def test_scores_are_the_log_probabilities_of_decoding(model: Model) -> None:
    generations = model.generate(WORDS)
    from tests.numerics import bundle_log_prob_limit

    limit = 2 * bundle_log_prob_limit(model.bundle.manifest)
    scores = model.score(WORDS, [g.text for g in generations], max_batch_size=2)
    for generation, values in zip(generations, scores, strict=True):
        log_probs = generation.hypotheses[0].log_probs
        assert values[: len(log_probs)] == pytest.approx(log_probs, rel=0, abs=limit)
        assert len(values) == len(generation.tokens) + 1
    assert len(model.score_ids([[4, 2]], [[5, 6]], add_end_token=False)[0]) == 2
    with pytest.raises(RequestError, match="there must be a target for each text, found 2 and 1"):
        model.score(["a", "b"], ["p1"])
    with pytest.raises(RequestError) as error:
        model.score(["", "b"], ["p1", "q"])
    assert error.value.problems == [
        "pair 0: the text is empty",
        "pair 1: 'q' has words that the model does not know: 'q'",
    ]
