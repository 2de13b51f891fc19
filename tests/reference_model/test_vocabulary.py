"""Text to ids and back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_model import Vocabulary

SPECIAL = ("<pad>", "<s>", "</s>")


def test_tokens_are_the_special_ones_and_then_those_of_the_texts_sorted() -> None:
    vocabulary = Vocabulary.from_texts(["ba", "cab"], split="characters", special_tokens=SPECIAL)
    assert vocabulary.tokens == (*SPECIAL, "a", "b", "c")
    assert vocabulary.encode("abc") == [3, 4, 5]
    words = Vocabulary.from_texts(["HH AH", "<s> AH"], split="words", special_tokens=SPECIAL)
    assert words.tokens == (*SPECIAL, "AH", "HH")


@settings(deadline=None)
@given(st.lists(st.text("abc dé", min_size=1), min_size=1))
def test_characters_come_back(texts: list[str]) -> None:
    vocabulary = Vocabulary.from_texts(texts, split="characters", special_tokens=SPECIAL)
    for text in texts:
        assert vocabulary.decode(vocabulary.encode(text)) == text.strip()


@settings(deadline=None)
@given(st.lists(st.lists(st.text("abcdé", min_size=1), min_size=1), min_size=1))
def test_words_come_back_with_single_spaces(lines: list[list[str]]) -> None:
    texts = ["  ".join(words) + "\t" for words in lines]
    vocabulary = Vocabulary.from_texts(texts, split="words", special_tokens=SPECIAL)
    for words, text in zip(lines, texts, strict=True):
        assert vocabulary.decode(vocabulary.encode(text)) == " ".join(words)


def test_lower_case_is_part_of_the_vocabulary() -> None:
    lower = Vocabulary.from_texts(["Ab"], split="characters", special_tokens=SPECIAL, lowercase=True)
    assert lower.encode("AB") == lower.encode("ab") == [3, 4]
    exact = Vocabulary.from_texts(["Ab"], split="characters", special_tokens=SPECIAL)
    with pytest.raises(ValueError, match="'a'"):
        exact.encode("ab")


def test_all_unknown_tokens_are_named() -> None:
    vocabulary = Vocabulary((*SPECIAL, "a"), "characters")
    with pytest.raises(ValueError, match=r"'b' 'c' \(in 'abcb'\)"):
        vocabulary.encode("abcb")


def test_what_is_no_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="a several times"):
        Vocabulary(("a", "b", "a"), "words")
    with pytest.raises(ValueError, match="characters, words, found 'bytes'"):
        Vocabulary(("a",), "bytes")
