"""Lines of input that are objects in JSON: a text, and what is its own among the options."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from tfm_export.errors import RequestError
from tfm_export.model import TextRequest

FIELDS = ("text", "source_language", "target_language", "target_prefix", "seed", "deadline", "priority")
assert {*FIELDS} <= {field.name for field in fields(TextRequest)}


def parse_request(line: str) -> TextRequest | RequestError:
    """The request that a line describes, or what is wrong with it."""
    try:
        state: Any = json.loads(line)
    except ValueError as problem:
        return RequestError(f"the line is not JSON: {problem}", 'an object such as {"text": "hello"}')
    if not isinstance(state, dict) or "text" not in state:
        return RequestError("the line is no object with a text", 'an object such as {"text": "hello"}')
    if others := sorted({*state} - {*FIELDS}):
        return RequestError(f"the line has {', '.join(others)}; known are {', '.join(FIELDS)}")
    try:
        return TextRequest(**state)
    except RequestError as problem:
        return problem


def source_of(line: str) -> str:
    """What a line has as its text; the line itself if it has none."""
    request = parse_request(line)
    return request.text if isinstance(request, TextRequest) and isinstance(request.text, str) else line
