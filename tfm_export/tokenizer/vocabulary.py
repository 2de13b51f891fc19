"""Tokens that are characters, or words between white space."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tfm_export.bundle import Bundle, SpecialIds
from tfm_export.errors import BundleError, RequestError
from tfm_export.quotation import quote
from tfm_export.tokenizer.languages import AS_IT_IS, Languages, Reading, TargetStart

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

    def tokenize(self, text: str, *, as_text: bool = False) -> list[str]:  # noqa: ARG002 (for sides that have codes)
        """The tokens of a text, whether or not they are known; as_text: what spells a language's code is none."""
        if self.lowercase:
            text = text.lower()
        return list(text.strip()) if self.split == "characters" else text.split()

    def pieces(self, text: str, *, as_text: bool = False) -> list[str]:  # noqa: ARG002
        """What each token of a text is in the text itself, in its own case."""
        if self.split == "words":
            return text.split()
        return [c for c in text.strip() for _ in (c.lower() if self.lowercase else c)]  # some lower cases are longer

    def join(self, tokens: Sequence[str]) -> str:
        """The text of tokens."""
        return ("" if self.split == "characters" else " ").join(tokens)

    def settled(self, tokens: Sequence[str]) -> str:
        """The beginning of their text that stands, whatever tokens follow."""
        return self.join(tokens)

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
        source_language: the language that sources are in where nobody says; None if they need none.
    """

    def __init__(self, source: Side, target: Side, special: SpecialIds, *, source_language: str | None = None) -> None:
        self._language = source_language
        self._source, self._target, self._special = source, target, special
        self._source_ids, self._target_ids = (
            {token: i for i, token in enumerate(side.tokens) if i not in {ids.pad, ids.bos, ids.eos}}
            for side, ids in ((source, special.for_sources), (target, special))
        )
        self._source_languages, self._target_languages = (
            Languages(ids.items()) for ids in (self._source_ids, self._target_ids)
        )

    def encode_source(self, text: str, reading: Reading = AS_IT_IS) -> list[int]:
        """The ids of a source text, with the end token where the model wants it; see `Tokenizer.encode_source`."""
        as_text, unk = _spells_no_language(reading), self._special.for_sources.unk
        known = self._source_ids
        if as_text:
            known = {token: i for token, i in known.items() if token not in self._source_languages.tokens}
        if not (ids := self._encode(text, self._source, known, unk, as_text=as_text)):
            raise RequestError("the text is empty")
        before, behind = self._language_ids(reading)
        return [*self._special.wrap_source([*before, *ids]), *behind]

    def split_source(self, text: str, reading: Reading = AS_IT_IS) -> list[str]:
        """The tokens of a source text as they stand in it; see `Tokenizer.split_source`."""
        before = self._special.source_starts_with_bos + len(self._language_ids(reading)[0])
        return [*[""] * before, *self._source.pieces(text, as_text=_spells_no_language(reading))]

    def begin_target(self, language: str) -> TargetStart:
        """What tells the decoder to write in a language; see `Tokenizer.begin_target`."""
        if self._source_languages.in_sources:
            self._source_languages.id_of(language, "target_language")
            return TargetStart()
        wanted = self._target_languages.id_of(language, "target_language")
        return TargetStart(start=wanted) if self._target_languages.behind else TargetStart(forced=wanted)

    def target_id(self, token: str) -> int | None:
        """The id of a token; see `Tokenizer.target_id`."""
        return self._target.tokens.index(token) if token in self._target.tokens else None

    def _language_ids(self, reading: Reading) -> tuple[list[int], list[int]]:
        """The tokens of languages before a source's own, and behind its end token."""
        languages = self._source_languages
        if languages.in_sources:
            if reading.source_language is not None:
                raise RequestError("source_language: the model's sources name the target's language alone")
            target = reading.target_language
            return ([] if target is None else [languages.id_of(target, "target_language")]), []
        source = self._language if reading.source_language is None else reading.source_language
        if source is None:
            return [], []
        own = [languages.id_of(source, "source_language")]
        return ([], own) if languages.behind else (own, [])

    def encode_target(self, text: str) -> list[int]:
        """The ids of a target text, without start and end token; see `Tokenizer.encode_target`."""
        return self._encode(text, self._target, self._target_ids, self._special.unk)

    def decode_target(self, ids: Sequence[int], replacements: Mapping[int, str] | None = None) -> str:
        """The text of a target; see `Tokenizer.decode_target`."""
        return self._target.join(self._shown(ids, replacements or {}))

    def settled_target(self, ids: Sequence[int]) -> str:
        """The text of a target that stands, whatever ids follow; see `Tokenizer.settled_target`."""
        return self._target.settled(self._shown(ids, {}))

    def _shown(self, ids: Sequence[int], replacements: Mapping[int, str]) -> list[str]:
        """The tokens of a target that are part of its text, or what stands in their places."""
        languages = self._target_languages.ids if not self._source_languages.in_sources else set()
        left_out = {self._special.pad, self._special.bos, self._special.eos, *languages}
        names = enumerate(zip(ids, self._target.names(ids), strict=True))
        return [replacements.get(place, token) for place, (i, token) in names if i not in left_out]

    def _encode(
        self, text: str, side: Side, ids: Mapping[str, int], unk: int | None, *, as_text: bool = False
    ) -> list[int]:
        tokens = side.tokenize(text, as_text=as_text)
        unknown = sorted({token for token in tokens if token not in ids})
        if unknown and unk is None:
            raise RequestError(
                f"{quote(text)} has {side.split} that the model does not know: {' '.join(map(quote, unknown))}",
                f"write it with what the model was trained on: {_sample(ids)}",
            )
        return [ids[token] if unk is None else ids.get(token, unk) for token in tokens]

    def source_tokens(self, ids: Sequence[int]) -> list[str]:
        """The token of each source id."""
        return self._source.names(ids)

    def target_tokens(self, ids: Sequence[int]) -> list[str]:
        """The token of each target id."""
        return self._target.names(ids)


def _spells_no_language(reading: Reading) -> bool:
    """Whether a code of a language at the beginning of a text is text: it is one of the caller's that counts."""
    return reading.escape or reading.target_language is not None


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
        problems.append(f"split must be one of {', '.join(SPLITS)}, found {quote(state['split'])}")
    if not isinstance(state["lowercase"], bool):
        problems.append(f"lowercase must be true or false, found {quote(state['lowercase'])}")
    return problems
