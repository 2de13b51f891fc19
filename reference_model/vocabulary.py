"""Text to ids and back, for models whose tokens are characters or words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

SPLITS = ("characters", "words")


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of one side, in the order of their ids.

    Attributes:
        tokens: the token of every id.
        split: "characters" (a token is a character) or "words" (tokens are separated by white space).
        lowercase: text is put in lower case before it is split.
    """

    tokens: tuple[str, ...]
    split: str
    lowercase: bool = False

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, found {self.split!r}")
        if len(set(self.tokens)) != len(self.tokens):
            twice = sorted({t for t in self.tokens if self.tokens.count(t) > 1})
            raise ValueError(f"every token must stand in the vocabulary once, found {', '.join(twice)} several times")

    @classmethod
    def from_texts(
        cls, texts: Iterable[str], *, split: str, special_tokens: tuple[str, ...], lowercase: bool = False
    ) -> Vocabulary:
        """The special tokens, then every token that the texts use, sorted."""
        bare = cls((), split, lowercase)
        found = {token for text in texts for token in bare.tokenize(text)}
        return cls((*special_tokens, *sorted(found - set(special_tokens))), split, lowercase)

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of every token."""
        return {token: i for i, token in enumerate(self.tokens)}

    def tokenize(self, text: str) -> list[str]:
        """The tokens of a text, whether or not the vocabulary has them."""
        if self.lowercase:
            text = text.lower()
        return list(text.strip()) if self.split == "characters" else text.split()

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without start and end tokens.

        Raises:
            ValueError: naming the tokens that the vocabulary lacks.
        """
        tokens = self.tokenize(text)
        unknown = sorted({token for token in tokens if token not in self.ids})
        if unknown:
            raise ValueError(f"not in the vocabulary: {' '.join(map(repr, unknown))} (in {text!r})")
        return [self.ids[token] for token in tokens]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids."""
        return ("" if self.split == "characters" else " ").join(self.tokens[i] for i in ids)
