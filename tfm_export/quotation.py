"""Quoting what a file says: short, whatever its length and nesting, and without what a terminal would obey."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Any

MOST_CHARACTERS = 120  # of a value or a name
MOST_NAMES = 10


class _ShortRepr(reprlib.Repr):
    """Python's notation of a value, of bounded length and depth."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, MOST_CHARACTERS, MOST_CHARACTERS

    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002 (reprlib's signature)
        """A number; one of very many digits by its size, since Python refuses to write it."""
        return repr(x) if x.bit_length() < 400 else f"an integer of {x.bit_length():,} bits"

    def repr_instance(self, x: Any, level: int) -> str:  # noqa: ARG002
        """Anything else: tensors and arrays by their shape."""
        shape = getattr(x, "shape", None)
        if shape is not None:
            return f"{type(x).__name__} of shape {list(shape)}"
        return shorten(repr(x))


_SHORT = _ShortRepr()


def quote(value: Any) -> str:
    """A value in Python's notation, for a message: `repr`, but short whatever the value holds."""
    return shorten(_SHORT.repr(value), 4 * MOST_CHARACTERS)


def shorten(text: object, most: int = MOST_CHARACTERS) -> str:
    """A text as it is, for a message: what cannot be printed is escaped, and the middle of a long one is left out.

    Args:
        text: a name, a path, a token; what is no string is quoted.
        most: characters to keep, about.
    """
    if not isinstance(text, str):
        return quote(text)
    if len(text) > most:
        text = f"{text[: most * 2 // 3]}...{text[len(text) - most // 3 :]}"
    return printable(text)


def shorten_all(names: Iterable[object], most: int = MOST_NAMES) -> str:
    """Names, separated by commas; of many the first, and how many more there are."""
    found = [*names]
    shown = ", ".join(map(shorten, found[:most]))
    return f"{shown} and {len(found) - most:,} more" if len(found) > most else shown


def printable(text: str) -> str:
    """A text in which characters that no terminal shows, or no file holds, are escaped; lines stay lines."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
