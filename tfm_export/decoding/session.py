"""The loop: requests join the batch, a step is run, the search chooses, and what has come to its end leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

import numpy as np

from tfm_export.bundle import SpecialIds
from tfm_export.decoding.attention import AttentionHistory
from tfm_export.decoding.batch import Batch
from tfm_export.decoding.beam import Beam
from tfm_export.decoding.checks import check_options, longest_target
from tfm_export.decoding.greedy import Greedy
from tfm_export.decoding.options import DecodeOptions
from tfm_export.decoding.request import Request, RequestState, SettledToken, target_beginning
from tfm_export.decoding.result import Hypothesis, Reason, Result, Statistics
from tfm_export.decoding.sampling import generator
from tfm_export.decoding.scores import Editor
from tfm_export.decoding.search import Search, SearchContext
from tfm_export.decoding.waiting import WaitingRequests
from tfm_export.errors import RequestError
from tfm_export.runtime.step_model import Ids, StepModel

Answers = list[tuple[int, Result | Exception]]

MOST_SEARCHES = 64  # of different options that a session remembers


class DecodingSession:
    """Decodes requests in batches; others may be added while some are decoded. Not to be used by two threads at once.

    Of the requests that wait the one with the highest priority joins the batch first, of equals the one that came
    first; after 256 of higher priority it is the turn of another one. The next one is waited for: while it does not
    fit, nobody joins, so that its time comes at the latest when the batch has been decoded to its end.

    Requests may have options of their own: all but those of a batch's shape (`DecodeOptions.batch_shape`).

    >>> from tfm_export.decoding import DecodeOptions, DecodingSession, Request
    >>> step_model, special = model.step_model, model.bundle.manifest.special_ids
    >>> with DecodingSession(step_model, DecodeOptions(), special) as session:
    ...     number = session.add(Request(source=model.encode_text("hello").ids))
    ...     while session.pending:
    ...         for answered, result in session.step():
    ...             print(answered == number, model.tokenizer.decode_target(result.tokens))
    True HH EH L OW

    Args:
        model: what runs the steps.
        options: how to decode what has no options of its own.
        special: the model's ids that are not text.

    Attributes:
        pending: requests that have no answer yet.
        refill_at: the part of a batch that must be free before requests join those under way.
        mixes_lengths: sources join a batch of much longer ones, which they are padded to; they do not wait for its end.

    Raises:
        RequestError: the model cannot serve these options.
    """

    def __init__(self, model: StepModel, options: DecodeOptions, special: SpecialIds) -> None:
        self._model, self._options, self._special = model, options, special
        self._searches: dict[DecodeOptions, Search] = {}
        self._search = self._search_for(options)
        self._latest = options, self._search
        context = self._search.context
        attention = AttentionHistory(len(context.start) - 1) if options.needs_attention else None
        self._batch = Batch(model, options.beam_size, context.slots, attention)
        self._waiting = WaitingRequests[RequestState]()
        self._added, self._closed, self.pending = 0, False, 0
        self.refill_at, self.mixes_lengths = model.capabilities.refill_at, False

    def add(self, request: Request, options: DecodeOptions | None = None) -> int:
        """Have a request wait for a place in the batch.

        Args:
            request: one that the model can serve under its options, as `check_requests` makes sure of.
            options: how to decode it; None takes the session's.

        Returns:
            Its number, which `step` gives with its answer.

        Raises:
            RequestError: the session is closed, the model cannot serve the options, or their batches have another
                shape than the session's.
        """
        if self._closed:
            raise RequestError("the decoding session is closed", "another DecodingSession")
        if options is not None and options is not self._latest[0]:
            self._latest = options, self._search_for(options)
        search = self._search if options is None else self._latest[1]
        context, o = search.context, search.context.options
        self._batch.allow(context.slots)
        begin = target_beginning(request, o)
        forced = begin if not o.prefix_bias_beta else begin[: request.forced_bos is not None]
        constraint = request.constraint or o.constraint
        seed = (options or self._options).seed if request.seed is None else request.seed
        start = context.start if request.start_token is None else (*context.start[:-1], request.start_token)
        state = RequestState(
            number=self._added,
            search=search,
            request=request,
            forced=forced,
            wished=begin if o.prefix_bias_beta else (),
            constraint=constraint,
            edits=context.editor.may_edit(constraint),
            source=context.editor.source_rules(request.source),
            random=generator(seed, request.draw) if o.samples else None,
            prompt=[*start, *forced],
            distributions=[[] for _ in range(o.beam_size)],
        )
        self._waiting.add(state, priority=request.priority)
        self._added, self.pending = self._added + 1, self.pending + 1
        return state.number

    def has_room(self, source_length: int) -> bool:
        """Whether another source of so many tokens could join the batch now, were nobody before it."""
        batch, size = self._batch, self.pending
        if not batch.live:
            return self._fits(size + 1, source_length)
        if self._free < self.refill_at * self._options.max_batch_size or self._is_short(source_length):
            return False
        return self._fits(size + 1, max(batch.source_length, source_length))

    def step(self, interrupted: Callable[[], bool] | None = None) -> Answers:
        """Run a step, or several where nobody waits for single tokens, unless requests are given up first.

        Args:
            interrupted: asked between two steps; True if the next one is to wait for another call.

        Returns:
            The requests that came to their end, by number, and their results; or an exception: one that the request's
            constraint or callback raised, or a `RequestError` where the options leave no token that may follow.

        Raises:
            NumericError: the model gave a number that is not finite. After an error, a session is to be closed.
        """
        batch, ended = self._batch, self._given_up()
        answers = [] if ended else self._admit()
        if batch.live and not ended and not answers:
            taken, ended = self._run_ahead(interrupted) or (1, self._step())
            for state in batch.live:
                state.steps += taken
        for row, state in enumerate(batch.live):
            if self._wants_to_end(row, state, row in ended):
                ended.setdefault(row, Reason.CALLBACK)
        for row in sorted(ended, reverse=True):
            state = batch.live[row]
            if state.problem is not None:
                answers.append((state.number, state.problem))
            else:
                answers.append((state.number, self._result(state, state.search.hypotheses(batch, row), ended[row])))
            batch.leave(row)
        if ended:
            batch.settle()
        self.pending -= len(answers)
        return answers

    def close(self) -> None:
        """Take no more requests, and drop those that have no answer yet."""
        self._closed, self.pending = True, 0
        self._waiting.clear()
        self._batch.live.clear()
        self._batch.settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _search_for(self, options: DecodeOptions) -> Search:
        """What chooses tokens under some options; requests of the same ones share it."""
        if options.seed is not None:  # the one option that every request tends to have for itself
            options = replace(options, seed=None)
        try:
            if (found := self._searches.get(options)) is not None:
                return found
        except TypeError:  # a constraint that has no hash
            return self._new_search(options)
        if len(self._searches) >= MOST_SEARCHES:
            del self._searches[next(iter(self._searches))]
        search = self._searches[options] = self._new_search(options)
        return search

    def _new_search(self, options: DecodeOptions) -> Search:
        if options.batch_shape != self._options.batch_shape:
            raise RequestError(
                f"the session decodes batches of {self._options.batch_shape}, found options of {options.batch_shape}",
                "another DecodingSession",
            )
        check_options(self._model, options, self._special)
        start, end_ids = tuple(options.start_tokens or [self._special.bos]), options.end_ids(self._special)
        longest = longest_target(self._model, options)
        context = SearchContext(
            options=options,
            editor=Editor(options, end_ids, start, self._special.unk, longest),
            start=start,
            end_ids=end_ids,
            longest=longest,
            offered=self._model.dimensions.candidates,
            vocabulary=self._model.dimensions.target_vocabulary_size,
        )
        return Greedy(context) if options.beam_size == 1 else Beam(context)

    # Joining.

    def _admit(self) -> Answers:
        """Let waiting requests join, as many as there is room for, if they are worth the interruption.

        Returns:
            Answers to those that were given up while they waited.
        """
        batch, size = self._batch, len(self._batch.live)
        if size == self.pending or (size and self._free < self.refill_at * self._options.max_batch_size):
            return []
        length = batch.source_length if size else 0
        joining: list[RequestState] = []
        answers: Answers = []
        while self._waiting:
            state = self._waiting.first
            longest = max(length, len(state.request.source))
            if not self._fits(size + len(joining) + 1, longest) or (size and self._is_short(len(state.request.source))):
                break
            self._waiting.take().begin()
            if reason := state.given_up():
                answers.append((state.number, unbegun(state.request, state.search.context.options, reason)))
            else:
                joining.append(state)
                length = longest
        if joining:
            batch.join(joining, self._special.for_sources.pad)
        return answers

    @property
    def _free(self) -> int:
        """How much of the batch is free, in batch_type."""
        each = self._batch.source_length if self._options.batch_type == "tokens" else 1
        return self._options.max_batch_size - len(self._batch.live) * each

    def _is_short(self, length: int) -> bool:
        """Whether a source would mostly be padding, and waits for a batch of its own unless lengths are mixed."""
        return not self.mixes_lengths and length * 2 < self._batch.source_length

    def _fits(self, size: int, length: int) -> bool:
        """Whether there may be so many sources, padded to this length; one alone may always be."""
        needed = size * length if self._options.batch_type == "tokens" else size
        return size == 1 or needed <= self._options.max_batch_size

    # A step.

    def _given_up(self) -> dict[int, Reason]:
        return {row: reason for row, state in enumerate(self._batch.live) if (reason := state.given_up())}

    def _run_ahead(self, interrupted: Callable[[], bool] | None) -> tuple[int, dict[int, Reason]] | None:
        live = self._batch.live
        search = live[0].search
        if any(state.request.on_tokens is not None or state.search is not search for state in live):
            return None
        given_up: dict[int, Reason] = {}

        def is_over() -> bool:
            given_up.update(self._given_up())
            return bool(given_up) or (interrupted is not None and interrupted())

        run = search.run_ahead(self._batch, is_over)
        return None if run is None else (run[0], given_up | dict(run[1]))

    def _step(self) -> dict[int, Reason]:
        batch, searches = self._batch, self._rows_by_search(self._batch.rows)
        full = [search.plan(batch, rows) for search, rows in searches]
        output = batch.step(full=any(full))
        ended: dict[int, Reason] = {}
        for search, rows in self._rows_by_search(batch.ready):
            ended.update(search.advance(batch, output, rows))
        return ended

    def _rows_by_search(self, rows: Ids) -> list[tuple[Search, Ids]]:
        """Which of the rows each search chooses the tokens of."""
        live = self._batch.live
        rows_of: dict[Search, list[int]] = {}
        for row in rows.tolist():
            rows_of.setdefault(live[row].search, []).append(row)
        if len(rows_of) == 1:
            return [(next(iter(rows_of)), rows)]
        return [(search, np.array(those)) for search, those in rows_of.items()]

    # Telling.

    def _wants_to_end(self, row: int, state: RequestState, ended: bool) -> bool:
        """Tell a request what has settled. Returns whether it is to end, since it wants to or something went wrong."""
        if state.problem is None and state.request.on_tokens is not None:
            try:
                return self._tell_settled(row, state, ended)
            except Exception as problem:  # noqa: BLE001 (whoever asked is told)
                state.problem = problem
        return state.problem is not None

    def _tell_settled(self, row: int, state: RequestState, ended: bool) -> bool:
        if not ended:
            return self._tell(state, *state.search.settled(self._batch, row))
        best = state.search.hypotheses(self._batch, row)[0]
        return self._tell(state, best.tokens, best.log_probs or [])

    def _tell(self, state: RequestState, tokens: list[int], log_probs: list[float]) -> bool:
        """Pass on the tokens that were settled since the last time. Returns whether the request wants to end there."""
        fresh = [SettledToken(*pair) for pair in zip(tokens[state.told :], log_probs[state.told :], strict=False)]
        state.told, tell = len(tokens), state.request.on_tokens
        return bool(tell is not None and fresh and tell(fresh))

    def _result(self, state: RequestState, hypotheses: list[Hypothesis], reason: Reason) -> Result:
        o, seconds = state.search.context.options, time.perf_counter() - state.began
        if not o.return_scores:
            hypotheses = [replace(hypothesis, log_probs=None) for hypothesis in hypotheses]
        if o.needs_attention and not (o.return_attention or o.replace_unknowns):
            hypotheses = [replace(hypothesis, attention=None) for hypothesis in hypotheses]
        costs = Statistics(steps=state.steps, seconds=seconds, cache_bytes=self._batch.cache_bytes)
        return Result(hypotheses=hypotheses, statistics=costs, reason=reason)


def unbegun(request: Request, options: DecodeOptions, reason: Reason) -> Result:
    """The answer to a request that was given up before it joined a batch: what was forced; it is told of that."""
    begin = target_beginning(request, options)
    tokens = [*(begin[: request.forced_bos is not None] if options.prefix_bias_beta else begin)]
    log_probs, shape = [0.0] * len(tokens), (len(tokens), len(request.source))
    if tokens and request.on_tokens is not None:
        request.on_tokens([SettledToken(token, 0.0) for token in tokens])
    nothing = Hypothesis(
        tokens=tokens,
        score=None,
        log_probs=log_probs if options.return_scores else None,
        finished=False,
        attention=np.zeros(shape, np.float32) if options.return_attention or options.replace_unknowns else None,
    )
    return Result(hypotheses=[nothing], statistics=Statistics(steps=0, seconds=0.0, cache_bytes=0), reason=reason)


def decode(model: StepModel, requests: Sequence[Request], options: DecodeOptions, special: SpecialIds) -> list[Result]:
    """A result for each of the requests, which were checked; see `decode_each`.

    Raises:
        Exception: what a request has in the place of a result.
    """
    results = []
    for result in decode_each(model, requests, options, special):
        if isinstance(result, Exception):
            raise result
        results.append(result)
    return results


def decode_each(
    model: StepModel, requests: Sequence[Request], options: DecodeOptions, special: SpecialIds
) -> list[Result | Exception]:
    """A result, or an exception of its own, for each of the requests; the longest sources are decoded first."""
    order = sorted(range(len(requests)), key=lambda i: -len(requests[i].source))
    results: dict[int, Result | Exception] = {}
    with DecodingSession(model, options, special) as session:
        for i in order:
            session.add(requests[i])
        while session.pending:
            results.update((order[number], result) for number, result in session.step())
    return [results[i] for i in range(len(requests))]
