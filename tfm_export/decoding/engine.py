"""The loop: sentences join the batch, a step is run, the search chooses, finished sentences leave."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from tfm_export.bundle import SpecialIds
from tfm_export.decoding.greedy import Greedy
from tfm_export.decoding.options import DecodeOptions
from tfm_export.decoding.result import Hypothesis, Reason, Request, Result, SettledToken, Statistics
from tfm_export.decoding.rows import Rows
from tfm_export.errors import RequestError
from tfm_export.runtime.step_model import StepModel, StepOutput

# New sentences join once this part of the batch is free: encoding a few at once is cheaper than one by one.
JOIN_AT = 0.25


class Search(Protocol):
    """A way to choose tokens; keeps a state for every row."""

    @property
    def width(self) -> int:
        """K, queries of a row at each step."""
        ...

    def join(self, row: int, request: Request, prefix: Sequence[int]) -> None:
        """Begin a sentence, behind the live ones, with a forced prefix."""
        ...

    def move(self, source: int, target: int) -> None:
        """Copy the state of a row over another's."""
        ...

    def advance(self, rows: Rows, output: StepOutput) -> list[tuple[int, Reason]]:
        """Choose the next tokens of every ready row, feed them, and name the rows that came to their end."""
        ...

    def settled(self, row: int, known: int) -> list[SettledToken]:
        """The tokens of a row that can no longer change, beyond the first `known`."""
        ...

    def hypotheses(self, row: int) -> list[Hypothesis]:
        """What a row has come to, the best first."""
        ...


@dataclass
class _Live:
    """A request in the batch."""

    number: int
    request: Request
    start: float
    steps: int = 0
    told: int = 0


class Engine:
    """Decodes requests in batches.

    Args:
        model: what runs the steps.
        options: how to decode.
        special: the model's ids that are not text.

    Raises:
        RequestError: the model cannot serve these options.
    """

    def __init__(self, model: StepModel, options: DecodeOptions, special: SpecialIds) -> None:
        problems = [*_options_beyond_model(model, options, special), *_not_yet(options)]
        if problems:
            raise RequestError(problems)
        self.model, self.options, self.special = model, options, special
        self.longest = options.max_decoding_length or model.limits.max_target_length
        self._start = list(options.start_tokens or [special.bos])

    def run(self, requests: Sequence[Request]) -> Iterator[list[tuple[int, Result]]]:
        """Decode, in the order given.

        Yields:
            After each step, the requests that came to their end: their places in `requests` and their results.

        Raises:
            RequestError: a request cannot be served; nothing has been decoded.
        """
        problems = [p for number, request in enumerate(requests) for p in self._problems(number, request)]
        if problems:
            raise RequestError(problems)
        waiting = deque(enumerate(requests))
        search = Greedy(self.options, self.options.end_ids(self.special), self.longest)
        rows = Rows(self.model, search.width, len(self._start) + search.width * self.longest)
        live: list[_Live] = []
        while waiting or live:
            self._admit(waiting, live, rows, search)
            done = [(row, reason) for row, entry in enumerate(live) if (reason := _given_up(entry))]
            if not done:
                ended = search.advance(rows, rows.step(full=False))
                done = self._after_step(live, search, ended)
            yield [self._leave(row, reason, live, rows, search) for row, reason in sorted(done, key=_row, reverse=True)]
            rows.settle()

    def _admit(self, waiting: deque[tuple[int, Request]], live: list[_Live], rows: Rows, search: Search) -> None:
        count = self._admissible(waiting, rows)
        if not count or (live and count < min(len(waiting), JOIN_AT * self.options.max_batch_size)):
            return
        joining = [waiting.popleft() for _ in range(count)]
        prefixes = [self._prefix(request) for _, request in joining]
        for row, ((number, request), prefix) in enumerate(zip(joining, prefixes, strict=True), start=len(live)):
            search.join(row, request, prefix)
            live.append(_Live(number, request, time.perf_counter()))
        prompts = [[*self._start, *prefix] for prefix in prefixes]
        rows.join([request.source for _, request in joining], prompts, self.special.pad)

    def _admissible(self, waiting: deque[tuple[int, Request]], rows: Rows) -> int:
        limit, length, count = self.options.max_batch_size, rows.source_length if rows.size else 0, 0
        for _, request in waiting:
            length = max(length, len(request.source))
            size = rows.size + count + 1
            if (size if self.options.batch_type == "examples" else size * length) > limit and size > 1:
                break
            count += 1
        return count

    def _after_step(
        self, live: list[_Live], search: Search, ended: list[tuple[int, Reason]]
    ) -> list[tuple[int, Reason]]:
        done = dict(ended)
        for row, entry in enumerate(live):
            entry.steps += 1
            if entry.request.on_tokens is not None:
                tokens = search.settled(row, entry.told)
                entry.told += len(tokens)
                if tokens and entry.request.on_tokens(tokens):
                    done.setdefault(row, Reason.CALLBACK)
        return list(done.items())

    def _leave(self, row: int, reason: Reason, live: list[_Live], rows: Rows, search: Search) -> tuple[int, Result]:
        entry, hypotheses = live[row], search.hypotheses(row)
        seconds = time.perf_counter() - entry.start
        statistics = Statistics(steps=entry.steps, seconds=seconds, cache_bytes=rows.capacity * self._slot_bytes)
        moved = rows.leave(row)
        last = live.pop()
        if moved is not None:
            search.move(moved, row)
            live[row] = last
        return entry.number, Result(hypotheses=hypotheses, statistics=statistics, reason=reason)

    @property
    def _slot_bytes(self) -> int:
        dimensions = self.model.dimensions
        return 2 * dimensions.decoder_layers * dimensions.heads * dimensions.head_size * 4

    def _prefix(self, request: Request) -> list[int]:
        return list(self.options.target_prefix if request.target_prefix is None else request.target_prefix)

    def _problems(self, number: int, request: Request) -> Iterator[str]:
        name, length, limit = f"source {number}", len(request.source), self.model.limits.max_source_length
        if not length:
            yield f"{name} is empty: the encoder needs at least one token"
        if length > limit:
            yield f"{name} has {length} tokens, the model takes at most {limit}"
        yield from _ids_beyond(name, request.source, self.model.dimensions.source_vocabulary_size)
        prefix, size = self._prefix(request), self.model.dimensions.target_vocabulary_size
        yield from _ids_beyond(f"target_prefix of {name}", prefix, size)
        if len(prefix) >= self.longest:
            yield (
                f"target_prefix of {name} has {len(prefix)} tokens, which leaves none of the {self.longest} of a target "
                "to search for"
            )


def generate(
    model: StepModel, sources: Sequence[Sequence[int] | Request], options: DecodeOptions, special: SpecialIds
) -> list[Result]:
    """Decode sources.

    They are decoded in batches, the longest first; a result does not depend on who else is in the batch.

    Args:
        model: what runs the steps.
        sources: ids of each, exactly as the encoder gets them, or a `Request`.
        options: how to decode.
        special: the model's ids that are not text.

    Returns:
        A result for each source, in their order.

    Raises:
        RequestError: the model cannot serve a source or an option; all that is wrong, before anything is decoded.
    """
    requests = [source if isinstance(source, Request) else Request(source=source) for source in sources]
    order = sorted(range(len(requests)), key=lambda i: -len(requests[i].source))
    results: dict[int, Result] = {}
    for done in Engine(model, options, special).run([requests[i] for i in order]):
        results.update((order[number], result) for number, result in done)
    return [results[i] for i in range(len(requests))]


def _row(ended: tuple[int, Reason]) -> int:
    return ended[0]


def _given_up(entry: _Live) -> Reason | None:
    request = entry.request
    if request.cancelled is not None and request.cancelled.is_set():
        return Reason.CANCELLED
    if request.deadline is not None and time.perf_counter() - entry.start >= request.deadline:
        return Reason.DEADLINE
    return None


def _ids_beyond(name: str, ids: Sequence[int], size: int) -> Iterator[str]:
    if wrong := sorted({int(i) for i in ids if not 0 <= i < size}):
        yield f"{name} has ids that the vocabulary of {size} lacks: {', '.join(map(str, wrong))}"


def _options_beyond_model(model: StepModel, options: DecodeOptions, special: SpecialIds) -> Iterator[str]:
    size, limit = model.dimensions.target_vocabulary_size, model.limits.max_target_length
    if options.max_decoding_length is not None and options.max_decoding_length > limit:
        yield f"max_decoding_length is {options.max_decoding_length}, the model's targets have at most {limit} tokens"
    if options.min_decoding_length > limit:
        yield f"min_decoding_length is {options.min_decoding_length}, the model's targets have at most {limit} tokens"
    named = {"end_token": options.end_ids(special), "start_tokens": options.start_tokens or ()}
    named["suppress_sequences"] = [i for sequence in options.suppress_sequences for i in sequence]
    for name in ("forced_bos", "forced_eos"):
        named[name] = () if getattr(options, name) is None else (getattr(options, name),)
    for name, ids in named.items():
        yield from _ids_beyond(name, ids, size)
    if options.disable_unk and special.unk is None:
        yield "disable_unk: this model's vocabulary has no unknown token"


def _not_yet(options: DecodeOptions) -> Iterator[str]:
    plain = DecodeOptions(
        target_prefix=options.target_prefix,
        start_tokens=options.start_tokens,
        end_token=options.end_token,
        max_decoding_length=options.max_decoding_length,
        max_batch_size=options.max_batch_size,
    )
    free = {"batch_type", "compatibility", "length_penalty", "return_scores", "return_end_token", "length_formula"}
    for field in fields(options):
        if field.name not in free and getattr(options, field.name) != getattr(plain, field.name):
            yield f"{field.name} is not supported yet"
