"""The user's own pairs: sources with what their own code gave for them, and whether a model gives the same.

Parity says that graphs compute what PyTorch computes with our reading of a checkpoint. These pairs say whether that
reading is the user's model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from itertools import zip_longest
from typing import Any

from tfm_export.bundle import SpecialIds
from tfm_export.decoding import DecodeOptions, Hypothesis, generate, score
from tfm_export.errors import RequestError
from tfm_export.runtime.step_model import StepModel
from tfm_export.tokenizer import Tokenizer
from tfm_export.tokenizer.sources import MOST_PROBLEMS

FORM = 'a source, a tab and its output on each line, or JSON lines with "source" and "expected"'
NAMES = ("source", "source_ids", "expected", "tokens", "log_probs", "options")
# What does not decide which tokens come out, or draws them at random.
NOT_OPTIONS = ("constraint", "sampling_topk", "sampling_topp", "sampling_temperature", "seed", "return_alternatives")
OF_BEAMS = ("patience", "early_stopping", "num_hypotheses", "length_penalty")
SPARE_TOKENS = 8  # past the longest expected target: a target that has not ended by then is another one
FEW = 8  # pairs by which rounding is measured


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


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """A pair that does not come out as expected.

    Attributes:
        number: of its line.
        source: for people.
        what: in words: the first token that differs, the log-probability, or why it cannot be decoded.
        margin: between the log-probabilities of the two first tokens that differ, where both are known.
    """

    number: int
    source: str
    what: str
    margin: float = math.inf


@dataclass(frozen=True, kw_only=True)
class ExpectedComparison:
    """The user's own pairs, held to what a model gives.

    Attributes:
        count: pairs.
        with_log_probs: of them, those whose log-probabilities were compared, too.
        limit: the largest accepted difference of a token's log-probability; that between two tokens is a tie.
        needed: the share that must come out as expected, ties counted as such.
        ties: pairs whose first tokens that differ are equally likely.
        mismatches: the others.
    """

    count: int
    with_log_probs: int
    limit: float
    needed: float = 1.0
    ties: list[Mismatch] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """As many came out as expected as must."""
        return self.count > 0 and 1 - len(self.mismatches) / self.count >= self.needed

    def text(self) -> str:
        """In a line, for people."""
        told = f"your own pairs: {self.count - len(self.mismatches)} of {self.count} as expected"
        if self.with_log_probs:
            told += f", {self.with_log_probs} with log-probabilities (limit {self.limit:.1e} a token)"
        return told + (f", {len(self.ties)} ties" if self.ties else "")

    def problems(self) -> list[str]:
        """What failed, in sentences: how many, and the first few."""
        if self.passed:
            return []
        counted = f"{len(self.mismatches)} of {self.count} pairs do not come out as expected"
        return [counted, *(f"line {m.number} ({m.source}): {m.what}" for m in self.mismatches[:3])]


@dataclass(frozen=True, kw_only=True)
class ReadModel:
    """What decodes pairs: a model, and how texts become its ids.

    Attributes:
        model: PyTorch's reading of a checkpoint, or a bundle's graphs.
        tokenizer: None where it takes ids only.
        special: its special ids.
        defaults: the decoding options that the model is meant for, such as a forced first token; not its beams.
    """

    model: StepModel
    tokenizer: Tokenizer | None
    special: SpecialIds
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def options(self, pair: Expectation) -> dict[str, Any]:
        """How a pair is decoded: as it says, else as the model is meant to be, and greedily.

        Raises:
            RequestError: the options exclude each other.
        """
        options = {**self.defaults, **pair.options}
        if options.get("beam_size", 1) == 1:
            options = {name: value for name, value in options.items() if name not in OF_BEAMS or name in pair.options}
        DecodeOptions(**options)
        return options

    def source(self, pair: Expectation) -> list[int]:
        """What the encoder gets.

        Raises:
            RequestError: the text cannot be encoded.
        """
        return pair_source(pair, self.tokenizer)

    def target(self, pair: Expectation) -> list[int]:
        """The expected tokens, without the end token.

        Raises:
            RequestError: the text cannot be encoded.
        """
        if pair.tokens is None:
            assert pair.text is not None
            ids = _ids(pair.text) if self.tokenizer is None else self.tokenizer.encode_target(pair.text)
            first = [*DecodeOptions(**self.options(pair)).begin(None)] if self.tokenizer is not None else []
            return ids if ids[: len(first)] == first else [*first, *ids]
        return self.without_end(pair, pair.tokens)

    def without_end(self, pair: Expectation, tokens: list[int]) -> list[int]:
        """Tokens without the end token."""
        ends = DecodeOptions(**self.options(pair)).end_ids(self.special)
        return tokens[:-1] if tokens and tokens[-1] in ends else tokens

    def token_text(self, token: int | None) -> str:
        """A token, for people."""
        if token is None:
            return "the end"
        name = "" if self.tokenizer is None else f"{self.tokenizer.target_tokens([token])[0]!r} "
        return f"{name}({token})" if name else str(token)


def pair_source(pair: Expectation, tokenizer: Tokenizer | None) -> list[int]:
    """What the encoder gets for a pair.

    Raises:
        RequestError: the text cannot be encoded.
    """
    if pair.source_ids is not None:
        return pair.source_ids
    assert pair.source is not None
    return _ids(pair.source) if tokenizer is None else tokenizer.encode_source(pair.source)


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


def _ids(line: str) -> list[int]:
    words = line.split()
    if wrong := [word for word in words if not (word.isascii() and word.isdecimal() and len(word) < 10)]:
        raise RequestError(f"the model has no tokenizer: expected ids, found {', '.join(map(repr, wrong[:5]))}")
    return [int(word) for word in words]


def compare_expectations(
    read: ReadModel,
    expectations: Expectations,
    *,
    limit: float,
    log_probs: bool = True,
    needed: float = 1.0,
) -> ExpectedComparison:
    """Decode all pairs and hold them to what is expected.

    Args:
        read: what decodes them.
        expectations: the pairs.
        limit: how far rounding may take the log-probability of a token.
        log_probs: compare log-probabilities, where they are given.
        needed: the share that must come out as expected.
    """
    found = dict(_decoded(read, expectations.pairs))
    known = [p for p in expectations.pairs if log_probs and (p.log_probs or p.total is not None)]
    likely = {pair.number: row for pair, row in zip(known, expected_log_probs(read, known), strict=True)}
    mismatches, ties, compared = list[Mismatch](), list[Mismatch](), 0
    for pair in expectations.pairs:
        hypothesis = found[pair.number]
        mismatch = (
            Mismatch(number=pair.number, source=_source_text(pair), what=hypothesis)
            if isinstance(hypothesis, str)
            else _difference(read, pair, hypothesis)
        )
        if mismatch is None and (row := likely.get(pair.number)):
            compared += 1
            mismatch = _log_prob_difference(pair, row, limit + expectations.resolution / 2)
        if mismatch is not None:
            (ties if mismatch.margin <= 2 * limit else mismatches).append(mismatch)
    return ExpectedComparison(
        count=len(expectations.pairs),
        with_log_probs=compared,
        limit=limit + expectations.resolution / 2,
        needed=needed,
        ties=ties,
        mismatches=mismatches,
    )


def _decoded(read: ReadModel, pairs: Sequence[Expectation]) -> Iterator[tuple[int, Hypothesis | str]]:
    """By the number of each pair, its hypothesis, or why there is none."""
    groups: dict[str, list[tuple[Expectation, list[int]]]] = {}
    for pair in pairs:
        try:
            source, options = read.source(pair), read.options(pair)
            problem = _source_problem(read, source)
        except RequestError as error:
            problem = " ".join(error.problems)
        if problem:
            yield pair.number, f"the source cannot be decoded: {problem}"
        else:
            groups.setdefault(json.dumps(options, sort_keys=True), []).append((pair, source))
    for key, group in groups.items():
        options = json.loads(key)
        longest = read.model.limits.max_target_length
        if "max_decoding_length" not in options and options.get("beam_size", 1) == 1:
            lengths = [_length(read, pair) for pair, _ in group]
            options = {**options, "max_decoding_length": min(max(lengths) + SPARE_TOKENS, longest)}
        results = generate(read.model, [ids for _, ids in group], DecodeOptions(**options), read.special)
        for (pair, _), result in zip(group, results, strict=True):
            yield pair.number, result.hypotheses[0]


def _length(read: ReadModel, pair: Expectation) -> int:
    """How many tokens an expected target has, or at most has where it cannot be told."""
    try:
        return len(read.target(pair))
    except RequestError:
        return len(pair.text or "")


def _source_problem(read: ReadModel, ids: Sequence[int]) -> str:
    longest, size = read.model.limits.max_source_length, read.model.dimensions.source_vocabulary_size
    if not 1 <= len(ids) <= longest:
        return f"it has {len(ids)} tokens, the model takes 1 to {longest}"
    return "" if max(ids) < size else f"id {max(ids)} is outside the source vocabulary of {size}"


def _source_text(pair: Expectation) -> str:
    return repr(pair.source) if pair.source is not None else f"ids {pair.source_ids}"


def _difference(read: ReadModel, pair: Expectation, found: Hypothesis) -> Mismatch | None:
    """The first token that is not the expected one."""
    tokens = read.without_end(pair, found.tokens)
    cut = not found.finished and _was_free(read, pair, len(found.tokens))
    try:
        expected = read.target(pair)
    except RequestError as error:
        text = f"what is expected, {pair.text!r}, cannot be encoded: {' '.join(error.problems)}"
        return Mismatch(number=pair.number, source=_source_text(pair), what=text)
    if tokens == expected and not cut:
        return None
    if pair.text is not None and read.tokenizer is not None and not cut:
        text = read.tokenizer.decode_target(tokens)
        if text.strip() == pair.text.strip():
            return None
    step = next((i for i, (a, b) in enumerate(zip_longest(expected, tokens)) if a != b), len(expected))
    there, here = (row[step] if step < len(row) else None for row in (expected, tokens))
    what = f"token {step + 1}: expected {read.token_text(there)}, found {read.token_text(here)}"
    if there == here:
        what = f"after its {step} tokens: expected the end, found none"
    plain = not read.options(pair)  # a step's choice is the likeliest token, and nothing else
    margin = _margin(read, pair, expected, tokens, step) if plain and there != here else math.inf
    return Mismatch(number=pair.number, source=_source_text(pair), what=what, margin=margin)


def _was_free(read: ReadModel, pair: Expectation, length: int) -> bool:
    """Whether a target could have gone on: no limit of the model or of the user's ended it."""
    longest = min(read.model.limits.max_target_length, read.options(pair).get("max_decoding_length") or math.inf)
    return length < longest


def _margin(read: ReadModel, pair: Expectation, expected: list[int], found: list[int], step: int) -> float:
    """How much less likely the expected token is than the one that greedy search found."""
    ways = [[*row[:step], row[step] if step < len(row) else read.special.eos] for row in (expected, found)]
    if (
        max(ways[0]) >= read.model.dimensions.target_vocabulary_size
        or len(ways[0]) > read.model.limits.max_target_length
    ):
        return math.inf
    there, here = score(read.model, [read.source(pair)] * 2, ways, read.special, add_end_token=False)
    return abs(there[-1] - here[-1])


def _log_prob_difference(pair: Expectation, found: Sequence[float], limit: float) -> Mismatch | None:
    """The log-probability that is farthest from the expected one, if it is too far."""
    source = _source_text(pair)
    if pair.total is not None:
        if abs(sum(found) - pair.total) <= limit * len(found):
            return None
        what = f"log-probability: expected {pair.total:.6g}, found {sum(found):.6g}"
        return Mismatch(number=pair.number, source=source, what=what)
    if len(pair.log_probs) > len(found):
        what = f"expected {len(pair.log_probs)} log-probabilities, found {len(found)} tokens, end token included"
        return Mismatch(number=pair.number, source=source, what=what)
    off = [abs(a - b) for a, b in zip(pair.log_probs, found, strict=False)]
    if not off or max(off) <= limit:
        return None
    step = off.index(max(off))
    what = f"log-probability of token {step + 1}: expected {pair.log_probs[step]:.6g}, found {found[step]:.6g}"
    return Mismatch(number=pair.number, source=source, what=what)


def expected_log_probs(read: ReadModel, pairs: Sequence[Expectation]) -> list[list[float] | None]:
    """How likely each token of each expected target is, end token included; None where it cannot be asked."""
    sources, targets, places = [], [], []
    for place, pair in enumerate(pairs):
        try:
            source, target = read.source(pair), read.target(pair)
        except RequestError:
            continue
        longest, size = read.model.limits.max_target_length, read.model.dimensions.target_vocabulary_size
        end = [read.special.eos] * (len(target) < longest and _was_free(read, pair, len(target)))
        whole = [*target, *end]
        if whole and not _source_problem(read, source) and len(whole) <= longest and max(whole) < size:
            sources.append(source)
            targets.append(whole)
            places.append(place)
    rows = score(read.model, sources, targets, read.special, max_batch_size=FEW, add_end_token=False)
    found: Mapping[int, list[float]] = dict(zip(places, rows, strict=True))
    return [found.get(place) for place in range(len(pairs))]
