"""Lines of a file as sources: real inputs to verify and to calibrate with."""

from __future__ import annotations

from collections.abc import Sequence

from tfm_export.bundle import Manifest
from tfm_export.errors import RequestError
from tfm_export.quotation import quote
from tfm_export.tokenizer import Tokenizer

MOST_PROBLEMS = 10  # named; a wrong file has as many as lines


def encode_sources(
    lines: Sequence[str], tokenizer: Tokenizer | None, manifest: Manifest, *, what: str
) -> list[list[int]]:
    """What the encoder gets for each line.

    Args:
        lines: texts; without a tokenizer, ids separated by spaces, exactly as the encoder is to get them.
        tokenizer: the bundle's.
        manifest: of the bundle.
        what: a line is called in messages.

    Raises:
        RequestError: lines that the model does not take.
    """
    longest, sources, problems = manifest.limits.max_source_length, [], []
    size = manifest.dimensions.source_vocabulary_size
    for number, line in enumerate(lines, 1):
        try:
            ids = _ids(line, size) if tokenizer is None else tokenizer.encode_source(line)
        except RequestError as problem:
            problems += [f"{what} {number}: {text}" for text in problem.problems]
            continue
        if len(ids) > longest:
            problems.append(f"{what} {number} has {len(ids)} tokens; the longest source is {longest}")
        sources.append(ids)
    if problems:
        more = len(problems) - MOST_PROBLEMS
        raise RequestError(
            [*problems[:MOST_PROBLEMS], *([f"and {more} more"] if more > 0 else [])],
            "inputs that the model is meant for"
            if tokenizer
            else "the bundle has no tokenizer: ids, separated by spaces",
        )
    return sources


def _ids(line: str, size: int) -> list[int]:
    words = line.split()
    if not words:
        raise RequestError("there are no ids")
    if wrong := [word for word in words if not (word.isascii() and word.isdecimal() and int(word) < size)]:
        raise RequestError(f"expected ids from 0 to {size - 1}, found {', '.join(map(quote, wrong[:5]))}")
    return [int(word) for word in words]
