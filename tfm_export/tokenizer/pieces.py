"""Tokens that are pieces of words: SentencePiece models, or codes of subword-nmt, and lists of tokens."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tfm_export.bundle import TOKENIZER, Bundle
from tfm_export.errors import BundleError
from tfm_export.extras import require
from tfm_export.quotation import quote
from tfm_export.text_files import decode_text
from tfm_export.tokenizer.settled import settled_bytes
from tfm_export.tokenizer.vocabulary import Side, VocabularyTokenizer

SPACE = "\u2581"  # what SentencePiece has in the place of a space
VERSIONS = ("0.1", "0.2")  # of subword-nmt's codes
LANGUAGE = re.compile(r">>[^<>\s]+<<")


class Splitter(Protocol):
    """How texts become pieces, and pieces texts."""

    def split(self, text: str, *, as_text: bool = False) -> list[str]:
        """The pieces of a text; as_text: what spells a language's code is none."""
        ...

    def join(self, pieces: Sequence[str]) -> str:
        """The text of pieces."""
        ...

    def settled(self, pieces: Sequence[str]) -> str:
        """The beginning of their text that stands, whatever pieces follow."""
        ...


class SentencePieces:
    """A SentencePiece model.

    Args:
        model: the bytes of its file.
        language_codes: a text may begin with the language to translate to, such as ">>fra<<", which is one token.
    """

    def __init__(self, model: bytes, *, language_codes: bool) -> None:
        import sentencepiece

        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._language_codes = language_codes
        self._rewrites = rewrites_targets(model)

    def split(self, text: str, *, as_text: bool = False) -> list[str]:
        """The pieces of a text."""
        code = LANGUAGE.match(text) if self._language_codes and not as_text else None
        rest = text[code.end() :] if code else text
        return [*([code[0]] if code else []), *self._processor.encode(rest, out_type=str)]

    def join(self, pieces: Sequence[str]) -> str:
        """The text of pieces."""
        text: str = self._processor.decode(list(pieces))
        # A piece of the other side's vocabulary that this model does not have comes back as it is.
        return text.replace(SPACE, " ").strip()

    def settled(self, pieces: Sequence[str]) -> str:
        """The text of pieces, but for bytes at the end that are no character yet."""
        return "" if self._rewrites else settled_bytes(self.join(pieces))


def rewrites_targets(model: bytes) -> bool:
    """Whether a SentencePiece model has rules that rewrite the text of pieces, which may change all of it.

    Args:
        model: a message of Protocol Buffers; the rules are in its field 5, and there in field 2 or 5.
    """
    return any(
        number == 5 and any(inner in (2, 5) and content for inner, content in _fields(rules))
        for number, rules in _fields(model)
    )


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields of a message that have a length, by their numbers: texts, bytes, messages."""
    place = 0

    def number() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place, value, shift = place + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while place < len(message):
        field, wire = divmod(number(), 8)
        if wire == 0:
            number()
            continue
        size = {1: 8, 5: 4}.get(wire) or number()
        if wire == 2:
            yield field, message[place : place + size]
        place += size


class BytePairs:
    """Codes of subword-nmt: words are separated by spaces, and a piece that goes on ends with "@@".

    Args:
        codes: the text of their file.
    """

    def __init__(self, codes: bytes) -> None:
        from subword_nmt.apply_bpe import BPE

        text = decode_text(codes)
        for number, line in enumerate(io.StringIO(text), 1):  # the library would end the process, or fail at texts
            if number == 1 and line.startswith("#version:"):
                if line.split()[-1] not in VERSIONS:
                    raise ValueError(f"its version must be one of {', '.join(VERSIONS)}, found {quote(line)}")
            elif len(line.strip("\r\n ").split(" ")) != 2:
                raise ValueError(f"line {number} must be two units, separated by a space, found {quote(line)}")
        self._codes = BPE(io.StringIO(text))

    def split(self, text: str, *, as_text: bool = False) -> list[str]:  # noqa: ARG002 (there are no codes)
        """The pieces of a text."""
        pieces: list[str] = self._codes.process_line(text).split()
        return pieces

    def join(self, pieces: Sequence[str]) -> str:
        """The text of pieces."""
        return (" ".join(pieces) + " ").replace("@@ ", "").removesuffix(" ")

    def settled(self, pieces: Sequence[str]) -> str:
        """The same: every piece stands for itself."""
        return self.join(pieces)


@dataclass(frozen=True, kw_only=True)
class PieceSide(Side):
    """The tokens of a side, found by a splitter."""

    splitter: Splitter

    def tokenize(self, text: str, *, as_text: bool = False) -> list[str]:
        """The pieces of a text."""
        return self.splitter.split(text, as_text=as_text)

    def pieces(self, text: str, *, as_text: bool = False) -> list[str]:
        """The same: pieces stand for themselves."""
        return self.splitter.split(text, as_text=as_text)

    def join(self, tokens: Sequence[str]) -> str:
        """The text of tokens."""
        return self.splitter.join(tokens)

    def settled(self, tokens: Sequence[str]) -> str:
        """The beginning of their text that stands, whatever tokens follow."""
        return self.splitter.settled(tokens)


def load(state: dict[str, Any], bundle: Bundle) -> VocabularyTokenizer:
    """Read the models that tokenizer.json names.

    Raises:
        BackendUnavailable: a library is missing.
        BundleError: naming everything that does not fit.
    """
    dimensions = bundle.manifest.dimensions
    sizes = {"source": dimensions.source_vocabulary_size, "target": dimensions.target_vocabulary_size}
    problems = [
        f"the tokenizer's {name} {p}" for name in sizes for p in _problems(state.get(name), sizes[name], bundle)
    ]
    if problems:
        raise BundleError(problems, "export the bundle again")
    source, target = (
        PieceSide(
            tokens=tuple(state[name]["tokens"]),
            split="pieces",
            lowercase=False,
            splitter=_splitter(
                state[name], bundle.folder / TOKENIZER, language_codes=bool(state.get("language_codes"))
            ),
        )
        for name in sizes
    )
    language = state.get("source_language")
    return VocabularyTokenizer(source, target, bundle.manifest.special_ids, source_language=language)


def _problems(side: Any, size: int, bundle: Bundle) -> list[str]:
    if not isinstance(side, dict) or side.keys() != {"tokens", "splitter", "file"}:
        return ["side must have tokens, splitter and file"]
    problems = []
    if not isinstance(side["splitter"], str) or side["splitter"] not in SPLITTERS:
        problems.append(f"splitter must be one of {', '.join(SPLITTERS)}, found {quote(side['splitter'])}")
    if f"{TOKENIZER}/{side['file']}" not in bundle.manifest.files:
        problems.append(f"file {side['file']} is not in the bundle")
    tokens = side["tokens"]
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        problems.append("tokens must be a list of strings")
    elif len(tokens) != size:
        problems.append(f"vocabulary must have the model's {size} tokens, found {len(tokens)}")
    return problems


def _splitter(side: dict[str, Any], folder: Path, *, language_codes: bool) -> Splitter:
    content = (folder / side["file"]).read_bytes()
    library = SPLITTERS[side["splitter"]]
    require(library, extra="tokenizers")
    try:
        if side["splitter"] == "sentencepiece":
            return SentencePieces(content, language_codes=language_codes)
        return BytePairs(content)
    except (Exception, SystemExit) as problem:  # the libraries raise whatever they stumble over
        raise BundleError(f"{side['file']} is no file of {library}: {problem}", "export the bundle again") from problem


SPLITTERS = {"sentencepiece": "sentencepiece", "bpe": "subword_nmt"}
