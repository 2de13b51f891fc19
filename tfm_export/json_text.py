"""JSON of unknown origin: what cannot be read is a `ValueError` with a sentence, also where Python would overflow."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tfm_export.quotation import shorten, shorten_all
from tfm_export.text_files import decode_text

# Each list and object takes 56 to 64 bytes, of two in the text. Tokenizers with the most merges have a million.
MOST_CONTAINERS = 4_000_000
MOST_LEVELS = 100
SURROGATE = re.compile("[\ud800-\udfff]")  # what Python has in the place of a byte that is not UTF-8
LONE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str | bytes, *, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value that a text in JSON stands for.

    Args:
        text: the text, or its bytes in UTF-8.
        object_pairs_hook: makes something of an object's names and values; see `unique`.

    Raises:
        ValueError: it is not JSON, is nested too deeply, has too many parts, or has text that no file can hold.
    """
    if isinstance(text, bytes):
        text = decode_text(text)
    if text.count("[") + text.count("{") > MOST_CONTAINERS:
        raise ValueError(f"it has more than {MOST_CONTAINERS:,} lists and objects")
    try:
        value = json.loads(text, object_pairs_hook=object_pairs_hook)
        _check_levels(value)
        if LONE_SURROGATE.search(text):
            _check_text(value)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def write_json(value: Any, *, indent: int) -> str:
    """A value in JSON, for people and programs; names of files that are not UTF-8 come back from it as they were."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _check_levels(value: Any) -> None:
    """Refuse what recursive functions could not follow."""
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [
            part
            for item in level
            if isinstance(item, dict | list)
            for part in (item.values() if isinstance(item, dict) else item)
            if isinstance(part, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"it has more than {MOST_LEVELS} lists and objects in each other")


def _check_text(value: Any) -> None:
    """Refuse halves of surrogate pairs, which JSON can spell and UTF-8 cannot."""
    if isinstance(value, str):
        if value.encode(errors="ignore").decode() != value:
            raise ValueError(f"it has a text with half a character: {shorten(value)}")
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_text(name)
            _check_text(item)
    elif isinstance(value, list):
        for item in value:
            _check_text(item)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON in which every name occurs once.

    Raises:
        ValueError: one occurs twice, and which of both is meant nobody can tell.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in found if names.count(name) > 1} if len(names) < 10_000 else ())
        raise ValueError(f"it names {shorten_all(twice) or 'something'} several times")
    return found
