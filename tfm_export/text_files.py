"""Texts of files and streams: UTF-8, with a byte order mark or not; lines end at a line feed and nowhere else."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tfm_export.errors import RequestError

MARK = codecs.BOM_UTF8  # what editors of Windows put before a text, of which it is no part


def decode_text(content: bytes, *, errors: str = "strict") -> str:
    """The text of a file's bytes.

    Args:
        content: all of them.
        errors: what becomes of bytes that are not UTF-8, as `bytes.decode` says.

    Raises:
        UnicodeDecodeError: there are some, and errors is "strict".
    """
    return content.removeprefix(MARK).decode("utf-8", errors)


def read_text(path: str | Path) -> str:
    """The text of a file.

    Raises:
        OSError: it cannot be read.
        UnicodeDecodeError: it is not UTF-8.
    """
    return decode_text(Path(path).read_bytes())


def split_lines(text: str) -> list[str]:
    """The lines of a text, without their ends; separators of Unicode, such as U+2028, are part of a line."""
    lines = text.split("\n")
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]


def read_lines(file: BinaryIO) -> Iterator[str]:
    """The lines of a file; bytes that are not UTF-8 come as lone surrogates, for whoever takes the line to refuse."""
    for number, line in enumerate(file):
        content = line.removesuffix(b"\n").removesuffix(b"\r")
        yield (content if number else content.removeprefix(MARK)).decode(errors="surrogateescape")


def read_texts(file: BinaryIO) -> list[str]:
    """The lines of a file.

    Raises:
        RequestError: it is not text in UTF-8.
    """
    try:
        return split_lines(decode_text(file.read()))
    except UnicodeDecodeError as problem:
        raise RequestError(f"{file.name} is not text in UTF-8: {problem}", "save it in UTF-8") from None
