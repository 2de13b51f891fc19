"""How much of the text of tokens stands, whatever tokens follow: for the decoders of Hugging Face's `tokenizers`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REPLACEMENT = "\ufffd"  # what bytes become that are no character, or not yet
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_IN_BYTES = frozenset("<0x>123456789abcdefABCDEF")
# Each token becomes text by itself, but for what is known of its place: whether it is the first.
_BY_TOKEN = ("Metaspace", "WordPiece", "CTC", "Replace", "Strip")


def settled_bytes(text: str) -> str:
    """Text without what bytes that follow may complete to a character, or to white space that is stripped."""
    return text.rstrip(REPLACEMENT).rstrip()


@dataclass(frozen=True, kw_only=True)
class SettledText:
    """What of a decoder's text can no longer change.

    Attributes:
        known: the decoder is one of which this can be said before the end.
        byte_runs: tokens for bytes become characters together: with the last of a run, all of it may change.
        suffix: what the last token loses, and what becomes a space in the others.
        unsure: characters that may change, or go, at the end of the text.
    """

    known: bool = True
    byte_runs: bool = False
    suffix: str | None = None
    unsure: str = ""

    def of(self, tokens: Sequence[str], decode: Callable[[list[str]], str]) -> str:
        """The beginning of the text of tokens that stands, whatever tokens follow them.

        Args:
            tokens: all so far that show.
            decode: the decoder.
        """
        if not self.known:
            return ""
        count = len(tokens)
        while count and self._may_change(tokens[count - 1]):
            count -= 1
        text = decode(list(tokens[:count]))
        return text.rstrip(self.unsure) if self.unsure else text

    def _may_change(self, last: str) -> bool:
        """Whether the text of a token depends on the one behind it."""
        if self.byte_runs and _BYTE.search(last):
            return True
        if not self.suffix:
            return False
        return last.find(self.suffix) not in (-1, len(last) - len(self.suffix))


def settled_text(decoder: Mapping[str, Any] | None) -> SettledText:
    """What is known of a decoder.

    Args:
        decoder: as tokenizer.json describes it; None joins tokens by spaces.

    Returns:
        The rule; of a decoder that is not known, one under which text stands only at the end.
    """
    parts = _parts(decoder)
    unknown, byte_runs, unsure, whole = SettledText(known=False), False, "", False
    for place, part in enumerate(parts):
        kind = part.get("type")
        if kind == "BPEDecoder":
            return SettledText(suffix=str(part.get("suffix"))) if len(parts) == 1 else unknown
        if kind == "ByteFallback":
            if whole or not all(_keeps_bytes(before) for before in parts[:place]):
                return unknown
            byte_runs = True
        elif kind == "ByteLevel":
            if whole:
                return unknown
            whole, unsure = True, unsure + REPLACEMENT
        elif kind == "Fuse":
            whole = True
        elif kind not in _BY_TOKEN or (whole and not _by_character(part)):
            return unknown
        elif whole and kind == "Strip":
            unsure += str(part.get("content"))
    return SettledText(byte_runs=byte_runs, unsure=unsure)


def _parts(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The decoders of a sequence, one after the other."""
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [part for one in decoder.get("decoders", []) for part in _parts(one)]
    return [decoder]


def _replaced(part: Mapping[str, Any]) -> str | None:
    """The character that a decoder replaces; None if it is of another kind, or replaces more."""
    pattern = part.get("pattern")
    found = pattern.get("String") if part.get("type") == "Replace" and isinstance(pattern, dict) else None
    return found if isinstance(found, str) and len(found) == 1 else None


def _keeps_bytes(part: Mapping[str, Any]) -> bool:
    """Whether no token for a byte comes from another one: a character is replaced by one that is in none."""
    content = str(part.get("content", ""))
    return _replaced(part) is not None and len(content) == 1 and content not in _IN_BYTES


def _by_character(part: Mapping[str, Any]) -> bool:
    """Whether a whole text may grow behind what a decoder made of its beginning."""
    if part.get("type") == "Strip":
        return part.get("content") != REPLACEMENT
    return _replaced(part) not in (None, REPLACEMENT)
