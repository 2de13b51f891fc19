"""Text to ids and back by lists of tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tfm_export.bundle import Bundle, GenerationDefaults, Limits, Manifest, SpecialIds, write_text
from tfm_export.errors import BundleError, RequestError
from tfm_export.graph import Dimensions
from tfm_export.tokenizer import FILE, Tokenizer, load_tokenizer

LETTERS = ["<pad>", "<s>", "</s>", "<unk>", *"abcé'-"]
WORDS = ["<pad>", "<s>", "</s>", "<unk>", "the", "cat", "Sat"]
STATE: dict[str, Any] = {
    "kind": "vocabulary",
    "source": {"tokens": LETTERS, "split": "characters", "lowercase": True},
    "target": {"tokens": WORDS, "split": "words", "lowercase": False},
}
SPECIAL = SpecialIds(pad=0, bos=1, eos=2, source_ends_with_eos=True)


def bundle_with(folder: Path, state: Any, special: SpecialIds = SPECIAL) -> Bundle:
    manifest = Manifest(
        dimensions=Dimensions(
            source_vocabulary_size=len(LETTERS),
            target_vocabulary_size=len(WORDS),
            decoder_layers=1,
            heads=1,
            head_size=2,
            candidates=7,
        ),
        limits=Limits(max_source_length=9, max_target_length=9),
        special_ids=special,
        generation=GenerationDefaults(max_length=9),
    )
    bundle = Bundle(folder, manifest)
    (folder / "tokenizer").mkdir()
    write_text(folder / FILE, state if isinstance(state, str) else json.dumps(state))
    bundle.add_files({FILE: "for the test"})
    return bundle


def tokenizer_of(folder: Path, state: Any = STATE, **special: Any) -> Tokenizer:
    tokenizer = load_tokenizer(bundle_with(folder, state, replace(SPECIAL, **special)))
    assert tokenizer is not None
    return tokenizer


def swapped(**source: Any) -> dict[str, Any]:
    """The same with words as sources."""
    return {"kind": "vocabulary", "source": {**STATE["target"], **source}, "target": STATE["source"]}


def test_characters(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    assert tokenizer.encode_source("  CAB-é'\n") == [6, 4, 5, 9, 7, 8, 2]
    assert tokenizer.source_tokens([6, 4, 2]) == ["c", "a", "</s>"]


def test_words(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    assert tokenizer.decode_target([1, 4, 5, 6, 2, 0, 0]) == "the cat Sat"
    assert tokenizer.decode_target([]) == ""
    assert tokenizer.decode_target([3]) == "<unk>"
    assert tokenizer.target_tokens([1, 5, 2]) == ["<s>", "cat", "</s>"]


def test_the_end_token_is_appended_where_the_model_wants_it(tmp_path: Path) -> None:
    assert tokenizer_of(tmp_path, source_ends_with_eos=False).encode_source("ab") == [4, 5]


def test_unknown_tokens_are_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as error:
        tokenizer_of(tmp_path).encode_source("abzaxz")
    assert error.value.problems == ["'abzaxz' has characters that the model does not know: 'x' 'z'"]


def test_unknown_tokens_become_unk_where_there_is_one(tmp_path: Path) -> None:
    assert tokenizer_of(tmp_path, unk=3).encode_source("azb") == [4, 3, 5, 2]


@pytest.mark.parametrize("text", ["", " ", "\t\n"])
@pytest.mark.parametrize("ends", [True, False])
def test_empty_text_is_refused(tmp_path: Path, text: str, ends: bool) -> None:
    with pytest.raises(RequestError, match="the text is empty"):
        tokenizer_of(tmp_path, source_ends_with_eos=ends).encode_source(text)


def words_bundle(folder: Path, **fields: Any) -> Tokenizer:
    """Words in, with vocabularies of swapped sizes."""
    bundle = bundle_with(folder, swapped(**fields))
    dimensions = replace(bundle.manifest.dimensions, source_vocabulary_size=7, target_vocabulary_size=len(LETTERS))
    bundle.manifest = replace(bundle.manifest, dimensions=dimensions)
    tokenizer = load_tokenizer(bundle)
    assert tokenizer is not None
    return tokenizer


def test_words_in_and_characters_out(tmp_path: Path) -> None:
    tokenizer = words_bundle(tmp_path)
    assert tokenizer.encode_source(" the\tcat  Sat ") == [4, 5, 6, 2]
    assert tokenizer.decode_target([6, 4, 5]) == "cab"


def test_target_texts(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    assert tokenizer.encode_target(" the Sat\n") == [4, 6]
    assert tokenizer.encode_target(" ") == []
    with pytest.raises(RequestError, match="'the dog' has words that the model does not know: 'dog'"):
        tokenizer.encode_target("the dog")
    (tmp_path / "unk").mkdir()
    assert tokenizer_of(tmp_path / "unk", unk=3).encode_target("the dog </s>") == [4, 3, 3]


def test_tokens_of_a_target_can_be_replaced(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, unk=3)
    assert tokenizer.decode_target([1, 4, 3, 2], {2: "dog", 1: "a"}) == "a dog"
    (tmp_path / "letters").mkdir()
    assert words_bundle(tmp_path / "letters").decode_target([6, 3], {1: "x"}) == "cx"


def test_the_pieces_of_a_source_stand_beside_its_ids(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, unk=3)
    assert tokenizer.split_source(" Ca\u0130x") == ["C", "a", "\u0130", "\u0130", "x"]  # two letters in lower case
    assert len(tokenizer.encode_source(" Ca\u0130x")) == 5 + 1
    (tmp_path / "words").mkdir()
    assert words_bundle(tmp_path / "words", lowercase=True).split_source(" THE  Cat") == ["THE", "Cat"]


def test_no_text_can_spell_a_special_token(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"words that the model does not know: '</s>' '<pad>' '<s>'"):
        words_bundle(tmp_path).encode_source("the <pad> cat </s> <s>")


def test_lowercase_is_the_sides_own(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="does not know: 'CAT'"):
        words_bundle(tmp_path).encode_source("CAT")
    (tmp_path / "lower").mkdir()
    assert words_bundle(tmp_path / "lower", lowercase=True).encode_source("CAT") == [5, 2]


@pytest.mark.parametrize("method", ["decode_target", "source_tokens", "target_tokens"])
@pytest.mark.parametrize("wrong", [-1, 10, 99])
def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path, method: str, wrong: int) -> None:
    with pytest.raises(RequestError, match=f"found {wrong}"):
        getattr(tokenizer_of(tmp_path), method)([4, wrong])


def test_a_bundle_without_tokenizer(tmp_path: Path) -> None:
    bundle = bundle_with(tmp_path, STATE)
    bundle.manifest = replace(bundle.manifest, files={})
    assert load_tokenizer(bundle) is None


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("{", "does not describe a tokenizer"),
        ("[]", "does not describe a tokenizer"),
        ("{}", "does not describe a tokenizer: 'kind'"),
        ({"kind": "runes"}, "is of kind 'runes'; this tfm-export reads vocabulary"),
        ({"kind": ["vocabulary"]}, r"is of kind \['vocabulary'\]"),
        ({**STATE, "source": None}, "the tokenizer's source side must have tokens, split and lowercase"),
        ({**STATE, "target": {"tokens": WORDS}}, "the tokenizer's target side must have"),
        ({**STATE, "target": {**STATE["target"], "tokens": WORDS[:-1]}}, "must have the model's 7 tokens, found 6"),
        ({**STATE, "target": {**STATE["target"], "tokens": [1] * 7}}, "target tokens must be a list of strings"),
        ({**STATE, "source": {**STATE["source"], "split": "bytes"}}, "found 'bytes'"),
        ({**STATE, "source": {**STATE["source"], "lowercase": 1}}, "lowercase must be true or false, found 1"),
    ],
)
def test_a_tokenizer_that_is_not_one(tmp_path: Path, state: Any, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        load_tokenizer(bundle_with(tmp_path, state))
