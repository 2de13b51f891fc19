"""Tokens that are pieces of words: SentencePiece models, or codes of subword-nmt, and lists of tokens."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tfm_export.bundle import TOKENIZER, Bundle
from tfm_export.errors import BundleError
from tfm_export.extras import require
from tfm_export.quotation import quote
from tfm_export.tokenizer.vocabulary import Side, VocabularyTokenizer

VERSIONS = ("0.1", "0.2")  # of subword-nmt's codes
LANGUAGE = re.compile(r">>[^<>\s]+<<")


class Splitter(Protocol):
    """How texts become pieces, and pieces texts."""

    def split(self, text: str) -> list[str]:
        """The pieces of a text."""
        ...

    def join(self, pieces: Sequence[str]) -> str:
        """The text of pieces."""
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

    def split(self, text: str) -> list[str]:
        """The pieces of a text."""
        code = LANGUAGE.match(text) if self._language_codes else None
        rest = text[code.end() :] if code else text
        return [*([code[0]] if code else []), *self._processor.encode(rest, out_type=str)]

    def join(self, pieces: Sequence[str]) -> str:
        """The text of pieces."""
        text: str = self._processor.decode(list(pieces))
        return text.strip()


class BytePairs:
    """Codes of subword-nmt: words are separated by spaces, and a piece that goes on ends with "@@".

    Args:
        codes: the text of their file.
    """

    def __init__(self, codes: bytes) -> None:
        from subword_nmt.apply_bpe import BPE

        text = codes.decode()
        for number, line in enumerate(io.StringIO(text), 1):  # the library would end the process, or fail at texts
            if number == 1 and line.startswith("#version:"):
                if line.split()[-1] not in VERSIONS:
                    raise ValueError(f"its version must be one of {', '.join(VERSIONS)}, found {quote(line)}")
            elif len(line.strip("\r\n ").split(" ")) != 2:
                raise ValueError(f"line {number} must be two units, separated by a space, found {quote(line)}")
        self._codes = BPE(io.StringIO(text))

    def split(self, text: str) -> list[str]:
        """The pieces of a text."""
        pieces: list[str] = self._codes.process_line(text).split()
        return pieces

    def join(self, pieces: Sequence[str]) -> str:
        """The text of pieces."""
        return (" ".join(pieces) + " ").replace("@@ ", "").removesuffix(" ")


@dataclass(frozen=True, kw_only=True)
class PieceSide(Side):
    """The tokens of a side, found by a splitter."""

    splitter: Splitter

    def tokenize(self, text: str) -> list[str]:
        """The pieces of a text."""
        return self.splitter.split(text)

    def pieces(self, text: str) -> list[str]:
        """The same: pieces stand for themselves."""
        return self.splitter.split(text)

    def join(self, tokens: Sequence[str]) -> str:
        """The text of tokens."""
        return self.splitter.join(tokens)


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
            splitter=_splitter(state[name], bundle.path / TOKENIZER, language_codes=bool(state.get("language_codes"))),
        )
        for name in sizes
    )
    return VocabularyTokenizer(source, target, bundle.manifest.special_ids)


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
