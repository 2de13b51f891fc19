"""A file of the user's own pairs: sources with what their own code gave for them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from decimal import Decimal
from typing import Any

from tfm_export.decoding import DecodeOptions
from tfm_export.errors import RequestError
from tfm_export.tokenizer.sources import MOST_PROBLEMS

FORM = 'a source, a tab and its output on each line, or JSON lines with "source" and "expected"'
NAMES = ("source", "source_ids", "expected", "tokens", "log_probs", "options")
# What does not decide which tokens come out, or draws them at random.
NOT_OPTIONS = ("constraint", "sampling_topk", "sampling_topp", "sampling_temperature", "seed", "return_alternatives")


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """A pair of the user's.

    Attributes:
        number: of its line in the file.
        source: the text; None where ids are given.
        source_ids: exactly what the encoder gets; None where a text is given.
        text: the expected output; None where tokens are given.
        tokens: its ids, with or without the end token; None where a text is given.
        log_probs: of the first tokens, or of all, end token included; empty where they are not given.
        total: the log-probability of the whole target, end token included; None where it is not given.
        options: fields of `DecodeOptions`; none for greedy search.
    """

    number: int
    source: str | None = None
    source_ids: list[int] | None = None
    text: str | None = None
    tokens: list[int] | None = None
    log_probs: list[float] = field(default_factory=list)
    total: float | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Expectations:
    """The pairs of a file.

    Attributes:
        name: of the file, for messages.
        pairs: at least one.
        resolution: the unit in the last place of its log-probabilities.
    """

    name: str
    pairs: list[Expectation]
    resolution: float = 0.0


def parse_expectations(lines: Iterable[str], name: str) -> Expectations:
    """The pairs of a file.

    >>> parse_expectations(["hello\\tHH EH L OW"], "pairs.tsv").pairs[0].text
    'HH EH L OW'

    Args:
        lines: of the file; empty ones are left out.
        name: of the file, for messages.

    Raises:
        RequestError: naming the lines that are no pairs.
    """
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise RequestError(f"{name} has no pairs", FORM)
    as_json = numbered[0][1].lstrip().startswith("{")
    pairs, problems, places = [], list[str](), list[int]()
    for number, line in numbered:
        try:
            pairs.append(_json_pair(number, line, places) if as_json else _tab_pair(number, line))
        except RequestError as error:
            problems += [f"{name}, line {number}: {problem}" for problem in error.problems]
    if problems:
        more = len(problems) - MOST_PROBLEMS
        raise RequestError([*problems[:MOST_PROBLEMS], *([f"and {more} more"] if more > 0 else [])], FORM)
    return Expectations(name, pairs, 10.0 ** min(places) if places else 0.0)


def _tab_pair(number: int, line: str) -> Expectation:
    parts = line.rstrip("\r\n").split("\t")
    if len(parts) != 2:
        raise RequestError(f"expected a source, one tab and its output; found {len(parts) - 1} tabs")
    return Expectation(number=number, source=parts[0], text=parts[1])


def _json_pair(number: int, line: str, places: list[int]) -> Expectation:
    """A pair of a line of JSON; the last decimal places of its log-probabilities are added to `places`."""
    try:
        state = json.loads(line, parse_float=Decimal)
    except ValueError as problem:
        raise RequestError(f"expected JSON, as on the first line: {problem}") from None
    if not isinstance(state, dict):
        raise RequestError("expected an object")
    problems = [f"there is no {name!r} in a pair: {', '.join(NAMES)}" for name in state.keys() - {*NAMES}]
    for one, other in (("source", "source_ids"), ("expected", "tokens")):
        if (one in state) == (other in state):
            problems.append(f'expected either "{one}" (a text) or "{other}" (ids)')
    problems += [f'"{n}" must be a text' for n in ("source", "expected") if not isinstance(state.get(n, ""), str)]
    for name in ("source_ids", "tokens"):
        ids = state.get(name, [])
        if not isinstance(ids, list) or any(type(i) is not int or i < 0 for i in ids):
            problems.append(f'"{name}" must be a list of ids')
    given = state.get("log_probs", [])
    numbers = given if isinstance(given, list) else [given]
    if any(isinstance(n, bool) or not isinstance(n, int | Decimal) for n in numbers):
        problems.append('"log_probs" must be the numbers of the tokens, or one number, their sum')
    options, wrong = _options(state.get("options", {}))
    if numbers and "start_tokens" in options:
        problems.append('"log_probs" are those after the model\'s start token: they exclude "start_tokens"')
    if problems := [*problems, *wrong]:
        raise RequestError(problems)
    places += [int(n.as_tuple().exponent) for n in numbers if isinstance(n, Decimal)]
    return Expectation(
        number=number,
        source=state.get("source"),
        source_ids=state.get("source_ids"),
        text=state.get("expected"),
        tokens=state.get("tokens"),
        log_probs=[float(n) for n in numbers] if isinstance(given, list) else [],
        total=None if isinstance(given, list) else float(given),
        options=options,
    )


def _options(state: Any) -> tuple[dict[str, Any], list[str]]:
    """Decoding options of JSON, and what is wrong about them."""
    if not isinstance(state, dict):
        return {}, ['"options" must be an object']
    options: dict[str, Any] = {n: float(value) if isinstance(value, Decimal) else value for n, value in state.items()}
    known = {f.name for f in fields(DecodeOptions)} - {*NOT_OPTIONS}
    if unknown := [name for name in options if name not in known]:
        return {}, [f"pairs take no option {name!r}: decode them with beams, or greedily" for name in unknown]
    try:
        DecodeOptions(**options)
    except RequestError as error:
        return {}, error.problems
    return options, []
