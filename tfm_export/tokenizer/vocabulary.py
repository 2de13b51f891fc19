"""Tokens that are characters, or words between white space."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tfm_export.bundle import Bundle, SpecialIds
from tfm_export.errors import BundleError, RequestError

SPLITS = ("characters", "words")


@dataclass(frozen=True, kw_only=True)
class Side:
    """The tokens of sources or of targets.

    Attributes:
        tokens: the token of every id.
        split: "characters" (a token is a character) or "words" (tokens are separated by white space).
        lowercase: text is put in lower case before it is split.
    """

    tokens: tuple[str, ...]
    split: str
    lowercase: bool

    def tokenize(self, text: str) -> list[str]:
        """The tokens of a text, whether or not they are known."""
        if self.lowercase:
            text = text.lower()
        return list(text.strip()) if self.split == "characters" else text.split()

    def pieces(self, text: str) -> list[str]:
        """What each token of a text is in the text itself, in its own case."""
        if self.split == "words":
            return text.split()
        return [c for c in text.strip() for _ in (c.lower() if self.lowercase else c)]  # some lower cases are longer

    def join(self, tokens: Sequence[str]) -> str:
        """The text of tokens."""
        return ("" if self.split == "characters" else " ").join(tokens)

    def names(self, ids: Sequence[int]) -> list[str]:
        """The tokens of ids.

        Raises:
            RequestError: an id that is not in the vocabulary.
        """
        size = len(self.tokens)
        wrong = sorted({i for i in ids if not 0 <= i < size})
        if wrong:
            raise RequestError(f"an id must be from 0 to {size - 1}, found {', '.join(map(str, wrong))}")
        return [self.tokens[i] for i in ids]


class VocabularyTokenizer:
    """A `Tokenizer` of two lists of tokens.

    Args:
        source: tokens of sources.
        target: tokens of targets.
        special: the ids that no text can name, whatever it spells.
    """

    def __init__(self, source: Side, target: Side, special: SpecialIds) -> None:
        self._source, self._target, self._special = source, target, special
        self._source_ids, self._target_ids = (
            {token: i for i, token in enumerate(side.tokens) if i not in {ids.pad, ids.bos, ids.eos}}
            for side, ids in ((source, special.for_sources), (target, special))
        )

    def encode_source(self, text: str) -> list[int]:
        """The ids of a source text, with the end token where the model wants it; see `Tokenizer.encode_source`."""
        if not (ids := self._encode(text, self._source, self._source_ids, self._special.for_sources.unk)):
            raise RequestError("the text is empty")
        return self._special.wrap_source(ids)

    def split_source(self, text: str) -> list[str]:
        """The tokens of a source text as they stand in it; see `Tokenizer.split_source`."""
        return [*[""] * self._special.source_starts_with_bos, *self._source.pieces(text)]

    def encode_target(self, text: str) -> list[int]:
        """The ids of a target text, without start and end token; see `Tokenizer.encode_target`."""
        return self._encode(text, self._target, self._target_ids, self._special.unk)

    def decode_target(self, ids: Sequence[int], replacements: Mapping[int, str] | None = None) -> str:
        """The text of a target; see `Tokenizer.decode_target`."""
        left_out = (self._special.pad, self._special.bos, self._special.eos)
        tokens = [
            (replacements or {}).get(place, token)
            for place, (i, token) in enumerate(zip(ids, self._target.names(ids), strict=True))
            if i not in left_out
        ]
        return self._target.join(tokens)

    def _encode(self, text: str, side: Side, ids: Mapping[str, int], unk: int | None) -> list[int]:
        tokens = side.tokenize(text)
        unknown = sorted({token for token in tokens if token not in ids})
        if unknown and unk is None:
            raise RequestError(
                f"{text!r} has {side.split} that the model does not know: {' '.join(map(repr, unknown))}",
                f"write it with what the model was trained on: {_sample(ids)}",
            )
        return [ids[token] if unk is None else ids.get(token, unk) for token in tokens]

    def source_tokens(self, ids: Sequence[int]) -> list[str]:
        """The token of each source id."""
        return self._source.names(ids)

    def target_tokens(self, ids: Sequence[int]) -> list[str]:
        """The token of each target id."""
        return self._target.names(ids)


def _sample(tokens: Iterable[str], most: int = 40) -> str:
    """The first tokens of a vocabulary, for a message."""
    first = list(islice(tokens, most + 1))
    return " ".join(first[:most]) + (" ..." if len(first) > most else "")


def load(state: dict[str, Any], bundle: Bundle) -> VocabularyTokenizer:
    """Read the contents of tokenizer.json and hold them to the model's sizes.

    Raises:
        BundleError: naming everything that does not fit.
    """
    dimensions = bundle.manifest.dimensions
    sizes = {"source": dimensions.source_vocabulary_size, "target": dimensions.target_vocabulary_size}
    problems = [f"the tokenizer's {name} {p}" for name in sizes for p in _side_problems(state.get(name), sizes[name])]
    if problems:
        raise BundleError(problems, "export the bundle again")
    source, target = (
        Side(tokens=tuple(state[name]["tokens"]), split=state[name]["split"], lowercase=state[name]["lowercase"])
        for name in sizes
    )
    return VocabularyTokenizer(source, target, bundle.manifest.special_ids)


def _side_problems(state: Any, size: int) -> list[str]:
    if not isinstance(state, dict) or state.keys() != {"tokens", "split", "lowercase"}:
        return ["side must have tokens, split and lowercase"]
    problems = []
    tokens = state["tokens"]
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        problems.append("tokens must be a list of strings")
    elif len(tokens) != size:
        problems.append(f"vocabulary must have the model's {size} tokens, found {len(tokens)}")
    if state["split"] not in SPLITS:
        problems.append(f"split must be one of {', '.join(SPLITS)}, found {state['split']!r}")
    if not isinstance(state["lowercase"], bool):
        problems.append(f"lowercase must be true or false, found {state['lowercase']!r}")
    return problems
