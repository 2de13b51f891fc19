"""The loop: sentences join the batch, a step is run, the search chooses, finished sentences leave."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tfm_export.bundle import SpecialIds
from tfm_export.decoding.attention import AttentionHistory
from tfm_export.decoding.beam import Beam
from tfm_export.decoding.greedy import Greedy
from tfm_export.decoding.options import DecodeOptions
from tfm_export.decoding.result import Reason, Request, Result, SettledToken, Statistics
from tfm_export.decoding.rows import Rows
from tfm_export.decoding.scores import Editor
from tfm_export.decoding.search import Search, Setting, Task
from tfm_export.errors import RequestError
from tfm_export.graph import DECODER_STEP_ATTENTION, Dimensions
from tfm_export.runtime.step_model import StepModel

FEW_TOKENS, SURELY_THERE = 4, 1e9  # a target that is begun at least; bytes that are not asked for
NO_ATTENTION = f"a bundle that has {DECODER_STEP_ATTENTION}: tfm-export onnx CHECKPOINT --attention"


@dataclass
class _Live:
    """A request in the batch."""

    number: int
    task: Task
    start: float
    steps: int = 0
    told: int = 0

    def given_up(self) -> Reason | None:
        """Why the request is to end before the search does."""
        request = self.task.request
        if request.cancelled is not None and request.cancelled.is_set():
            return Reason.CANCELLED
        if request.deadline is not None and time.perf_counter() - self.start >= request.deadline:
            return Reason.DEADLINE
        return None


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
        self._start = list(options.start_tokens or [special.bos])
        most = model.limits.max_target_length - len(self._start) + 1
        if problems := list(_options_beyond_model(model, options, special, most)):
            lacks_attention = options.needs_attention and not model.capabilities.gives_attention
            raise RequestError(problems, NO_ATTENTION if lacks_attention else None)
        self.model, self.options, self._pad = model, options, special.pad
        self._longest = options.max_decoding_length or most
        if problem := _beyond_memory(model.dimensions, options.beam_size, self._longest):
            raise RequestError(problem, "a smaller beam_size")
        end_ids = options.end_ids(special)
        self._setting = Setting(
            options=options,
            editor=Editor(options, end_ids, self._start, special.unk, self._longest),
            end_ids=end_ids,
            longest=self._longest,
            offered=model.dimensions.candidates,
            vocabulary=model.dimensions.target_vocabulary_size,
        )

    def run(self, requests: Sequence[Request]) -> Iterator[list[tuple[int, Result]]]:
        """Decode, in the order given.

        Yields:
            After one or several steps, the requests that came to their end: their places in `requests` and their
            results.

        Raises:
            RequestError: a request cannot be served; nothing has been decoded.
        """
        tasks = [self._task(request) for request in requests]
        if problems := [p for number, task in enumerate(tasks) for p in self._problems(number, task)]:
            raise RequestError(problems)
        history = AttentionHistory(len(self._start) - 1) if self.options.needs_attention else None
        rows = Rows(self.model, self.options.beam_size, self._slots, history)
        batch = _Batch(self._setting, rows, self._start, self._pad)
        waiting = deque(enumerate(tasks))
        while waiting or batch.live:
            batch.admit(waiting)
            yield batch.step()

    @property
    def _slots(self) -> int:
        """Cache slots that the longest target needs."""
        return len(self._start) + self.options.beam_size * self._longest

    def _task(self, request: Request) -> Task:
        o = self.options
        prefix = tuple(o.target_prefix if request.target_prefix is None else request.target_prefix)
        forced = prefix if o.forced_bos is None else (o.forced_bos, *prefix)
        constraint = request.constraint or o.constraint
        return Task(
            request=request,
            forced=() if o.prefix_bias_beta else forced,
            wished=prefix if o.prefix_bias_beta else (),
            constraint=constraint,
            seed=o.seed if request.seed is None else request.seed,
            edits=self._setting.editor.may_edit(constraint),
        )

    def _problems(self, number: int, task: Task) -> Iterator[str]:
        yield from source_problems(number, task.request.source, self.model)
        prefix, name = task.forced or task.wished, f"target_prefix of source {number}"
        yield from ids_beyond(name, prefix, self.model.dimensions.target_vocabulary_size)
        if len(prefix) >= self._longest:
            yield f"{name} has {len(prefix)} tokens: of the {self._longest} of a target none is left to search for"
        if self.options.forced_bos is not None and len(task.forced) > 1:
            yield f"{name} and forced_bos both say how the target begins: give one"


class _Batch:
    """The requests being decoded together."""

    def __init__(self, setting: Setting, rows: Rows, start: list[int], pad: int) -> None:
        self._setting, self._rows, self._start, self._pad = setting, rows, start, pad
        self._options = setting.options
        self._search: Search = Greedy(setting) if self._options.beam_size == 1 else Beam(setting)
        self.live: list[_Live] = []

    def admit(self, waiting: deque[tuple[int, Task]]) -> None:
        """Let waiting requests join, as many as there is room for, if they are worth the interruption."""
        if self.live and self._free < self._rows.model.capabilities.refill_at * self._options.max_batch_size:
            return
        count = self._room(waiting)
        if not count:
            return
        joining = [waiting.popleft() for _ in range(count)]
        for number, task in joining:
            self._search.join(task)
            self.live.append(_Live(number, task, time.perf_counter()))
        prompts = [[*self._start, *task.forced] for _, task in joining]
        self._rows.join([task.request.source for _, task in joining], prompts, self._pad)

    @property
    def _free(self) -> int:
        """How much of the batch is free, in batch_type."""
        each = self._rows.source_length if self._options.batch_type == "tokens" else 1
        return self._options.max_batch_size - len(self.live) * each

    def _room(self, waiting: deque[tuple[int, Task]]) -> int:
        """How many may join."""
        batch = self._rows.source_length if self.live else 0
        count, longest, tokens = 0, batch, self._options.batch_type == "tokens"
        for _, task in waiting:
            length = max(longest, len(task.request.source))
            size = len(self.live) + count + 1
            if size > 1 and (size * length if tokens else size) > self._options.max_batch_size:
                break
            # Much shorter sources would be padded to the batch's length: they wait for a batch of their own.
            if len(task.request.source) * 2 < batch:
                break
            count, longest = count + 1, length
        return count

    def step(self) -> list[tuple[int, Result]]:
        """Run a step, or several where nobody waits for single tokens, unless requests are given up first.

        Returns:
            The requests that came to their end, by number, and their results.
        """
        done = self._given_up()
        if not done:
            taken, done = self._run_ahead() or (1, self._step())
            for entry in self.live:
                entry.steps += taken
        for row, entry in enumerate(self.live):
            if entry.task.request.on_tokens is not None and self._tell(row, entry, row in done):
                done.setdefault(row, Reason.CALLBACK)
        results = [self._leave(row, done[row]) for row in sorted(done, reverse=True)]
        if done:
            self._rows.settle()
        return results

    def _run_ahead(self) -> tuple[int, dict[int, Reason]] | None:
        if any(entry.task.request.on_tokens is not None for entry in self.live):
            return None
        given_up: dict[int, Reason] = {}

        def interrupted() -> bool:
            given_up.update(self._given_up())
            return bool(given_up)

        run = self._search.run_ahead(self._rows, interrupted)
        return None if run is None else (run[0], given_up | dict(run[1]))

    def _given_up(self) -> dict[int, Reason]:
        return {row: reason for row, entry in enumerate(self.live) if (reason := entry.given_up())}

    def _step(self) -> dict[int, Reason]:
        output = self._rows.step(full=self._search.plan())
        return dict(self._search.advance(self._rows, output)) if self._rows.ready.size else {}

    def _tell(self, row: int, entry: _Live, ended: bool) -> bool:
        """Pass on the tokens that were settled since the last time. Returns whether the request wants to end there."""
        if ended:
            best = self._search.hypotheses(self._rows, row)[0]
            tokens, log_probs = best.hypothesis(self._options).tokens, best.log_probs
        else:
            tokens, log_probs = self._search.settled(row)
        fresh = [SettledToken(*pair) for pair in zip(tokens[entry.told :], log_probs[entry.told :], strict=False)]
        entry.told = len(tokens)
        tell = entry.task.request.on_tokens
        return bool(tell is not None and fresh and tell(fresh))

    def _leave(self, row: int, reason: Reason) -> tuple[int, Result]:
        entry = self.live[row]
        result = Result(
            hypotheses=[scored.hypothesis(self._options) for scored in self._search.hypotheses(self._rows, row)],
            statistics=Statistics(
                steps=entry.steps, seconds=time.perf_counter() - entry.start, cache_bytes=self._rows.cache_bytes
            ),
            reason=reason,
        )
        self._search.leave(row)
        self._rows.leave(row)
        self.live[row] = self.live[-1]
        self.live.pop()
        return entry.number, result


def decode(model: StepModel, requests: Sequence[Request], options: DecodeOptions, special: SpecialIds) -> list[Result]:
    """One result for each request; see `generate`."""
    order = sorted(range(len(requests)), key=lambda i: -len(requests[i].source))
    results: dict[int, Result] = {}
    for done in Engine(model, options, special).run([requests[i] for i in order]):
        results.update((order[number], result) for number, result in done)
    return [results[i] for i in range(len(requests))]


def source_problems(number: int, source: Sequence[int], model: StepModel) -> Iterator[str]:
    """Why a model cannot take a source."""
    name, limit = f"source {number}", model.limits.max_source_length
    if not len(source):
        yield f"{name} is empty: the encoder needs at least one token"
    if len(source) > limit:
        yield f"{name} has {len(source)} tokens, the model takes at most {limit}"
    yield from ids_beyond(name, source, model.dimensions.source_vocabulary_size)


def ids_beyond(name: str, ids: Sequence[int], size: int) -> Iterator[str]:
    """Which ids a vocabulary lacks."""
    if wrong := sorted({int(i) for i in ids if not 0 <= i < size}):
        yield f"{name} has ids that the vocabulary of {size} lacks: {', '.join(map(str, wrong))}"


def _beyond_memory(dimensions: Dimensions, width: int, longest: int) -> str | None:
    """Why this machine cannot even begin a sentence with so many beams; None if it can."""
    tokens = min(FEW_TOKENS, longest)
    slot = 2 * dimensions.decoder_layers * dimensions.heads * dimensions.head_size * 4
    # The caches, and the mask of which slots each beam sees, which is there twice.
    needed = width * tokens * slot + 2 * width * width * tokens
    if needed <= SURELY_THERE or needed <= (there := _memory_bytes()):
        return None
    return (
        f"beam_size is {width}: targets of {tokens} tokens need {needed / 1e9:,.0f} GB a sentence, "
        f"and this machine has {there / 1e9:,.0f} GB"
    )


def _memory_bytes() -> float:
    """Of the machine; infinite where it does not tell."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return math.inf


def _options_beyond_model(model: StepModel, options: DecodeOptions, special: SpecialIds, limit: int) -> Iterator[str]:
    size = model.dimensions.target_vocabulary_size
    if not model.capabilities.gives_attention:
        for name in options.attention_options:
            yield f"{name} needs attention weights, which this model's decoder step does not give"
    if options.max_decoding_length is not None and options.max_decoding_length > limit:
        yield f"max_decoding_length is {options.max_decoding_length}, the model's targets have at most {limit} tokens"
    if options.min_decoding_length > limit:
        yield f"min_decoding_length is {options.min_decoding_length}, the model's targets have at most {limit} tokens"
    if options.sampling_topk > size:
        yield f"sampling_topk is {options.sampling_topk}, the vocabulary has {size} tokens"
    named: dict[str, Sequence[int]] = {
        "end_token": options.end_ids(special),
        "start_tokens": options.start_tokens or (),
    }
    named["suppress_sequences"] = [i for sequence in options.suppress_sequences for i in sequence]
    for name in ("forced_bos", "forced_eos"):
        named[name] = () if getattr(options, name) is None else (getattr(options, name),)
    for name, ids in named.items():
        yield from ids_beyond(name, ids, size)
    if options.disable_unk and special.unk is None:
        yield "disable_unk: this model's vocabulary has no unknown token"
