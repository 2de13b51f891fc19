"""The loop: requests join the batch, a step is run, the search chooses, and what has come to its end leaves."""

from __future__ import annotations

import time
from collections.abc import Sequence
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
from tfm_export.decoding.request import Request, RequestState, SettledToken
from tfm_export.decoding.result import Hypothesis, Reason, Result, Statistics
from tfm_export.decoding.sampling import generator
from tfm_export.decoding.scores import Editor
from tfm_export.decoding.search import Search, SearchContext
from tfm_export.decoding.waiting import WaitingRequests
from tfm_export.errors import RequestError
from tfm_export.runtime.step_model import StepModel

Answers = list[tuple[int, Result]]


class DecodingSession:
    """Decodes requests in batches; others may be added while some are decoded. Not to be used by two threads at once.

    Of the requests that wait the one with the highest priority joins the batch first, of equals the one that came
    first; after it has been overtaken 256 times, a request is the next whatever its priority. The next one is waited
    for: while it does not fit, nobody joins, so that its time comes at the latest when the batch has been decoded to
    its end.

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
        options: how to decode.
        special: the model's ids that are not text.

    Attributes:
        pending: requests that have no answer yet.

    Raises:
        RequestError: the model cannot serve these options.
    """

    def __init__(self, model: StepModel, options: DecodeOptions, special: SpecialIds) -> None:
        check_options(model, options, special)
        self._start, self._pad = list(options.start_tokens or [special.bos]), special.for_sources.pad
        self._options, self._refill_at = options, model.capabilities.refill_at
        end_ids, longest = options.end_ids(special), longest_target(model, options)
        self._editor = Editor(options, end_ids, self._start, special.unk, longest)
        context = SearchContext(
            options=options,
            editor=self._editor,
            end_ids=end_ids,
            longest=longest,
            offered=model.dimensions.candidates,
            vocabulary=model.dimensions.target_vocabulary_size,
        )
        self._search: Search = Greedy(context) if options.beam_size == 1 else Beam(context)
        slots = len(self._start) + options.beam_size * longest
        attention = AttentionHistory(len(self._start) - 1) if options.needs_attention else None
        self._batch = Batch(model, options.beam_size, slots, attention)
        self._waiting = WaitingRequests()
        self._added, self._closed, self.pending = 0, False, 0

    def add(self, request: Request) -> int:
        """Have a request wait for a place in the batch.

        Args:
            request: one that the model can serve, as `check_requests` makes sure of.

        Returns:
            Its number, which `step` gives with its answer.

        Raises:
            RequestError: the session is closed.
        """
        if self._closed:
            raise RequestError("the decoding session is closed", "another DecodingSession")
        o, begin = self._options, self._options.begin(request.target_prefix)
        forced = () if o.prefix_bias_beta else begin
        constraint = request.constraint or o.constraint
        seed = o.seed if request.seed is None else request.seed
        state = RequestState(
            number=self._added,
            request=request,
            forced=forced,
            wished=begin if o.prefix_bias_beta else (),
            constraint=constraint,
            edits=self._editor.may_edit(constraint),
            random=generator(seed, request.draw) if o.samples else None,
            prompt=[*self._start, *forced],
            distributions=[[] for _ in range(o.beam_size)],
        )
        self._waiting.add(state)
        self._added, self.pending = self._added + 1, self.pending + 1
        return state.number

    def step(self) -> Answers:
        """Run a step, or several where nobody waits for single tokens, unless requests are given up first.

        Returns:
            The requests that came to their end, by number, and their results.

        Raises:
            RequestError: the options leave no token that may follow.
            NumericError: the model gave a number that is not finite. After an error, a session is to be closed.
        """
        batch, ended = self._batch, self._given_up()
        answers = [] if ended else self._admit()
        if batch.live and not ended and not answers:
            taken, ended = self._run_ahead() or (1, self._step())
            for state in batch.live:
                state.steps += taken
        for row, state in enumerate(batch.live):
            if state.request.on_tokens is not None and self._tell_settled(row, state, row in ended):
                ended.setdefault(row, Reason.CALLBACK)
        for row in sorted(ended, reverse=True):
            state, hypotheses = batch.live[row], self._search.hypotheses(batch, row)
            answers.append((state.number, self._result(state, hypotheses, ended[row])))
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

    # Joining.

    def _admit(self) -> Answers:
        """Let waiting requests join, as many as there is room for, if they are worth the interruption.

        Returns:
            Answers to those that were given up while they waited.
        """
        batch, size = self._batch, len(self._batch.live)
        if size == self.pending or (size and self._free < self._refill_at * self._options.max_batch_size):
            return []
        length = batch_length = batch.source_length if size else 0
        joining: list[RequestState] = []
        answers: Answers = []
        while self._waiting:
            state = self._waiting.first
            longest = max(length, len(state.request.source))
            # Much shorter sources would be padded to the batch's length: they wait for a batch of their own.
            if not self._fits(size + len(joining) + 1, longest) or len(state.request.source) * 2 < batch_length:
                break
            self._waiting.take().begin()
            if reason := state.given_up():
                answers.append((state.number, self._unbegun(state, reason)))
            else:
                joining.append(state)
                length = longest
        if joining:
            batch.join(joining, self._pad)
        return answers

    @property
    def _free(self) -> int:
        """How much of the batch is free, in batch_type."""
        each = self._batch.source_length if self._options.batch_type == "tokens" else 1
        return self._options.max_batch_size - len(self._batch.live) * each

    def _fits(self, size: int, length: int) -> bool:
        """Whether there may be so many sources, padded to this length; one alone may always be."""
        needed = size * length if self._options.batch_type == "tokens" else size
        return size == 1 or needed <= self._options.max_batch_size

    def _unbegun(self, state: RequestState, reason: Reason) -> Result:
        """The answer to a request that was given up before it joined the batch: what was forced."""
        tokens, attends = [*state.forced], self._options.needs_attention
        shape = len(tokens), len(state.request.source)
        nothing = Hypothesis(
            tokens=tokens,
            score=0.0,
            log_probs=[0.0] * len(tokens),
            finished=False,
            attention=np.zeros(shape, np.float32) if attends else None,
        )
        self._tell(state, nothing.tokens, [0.0] * len(tokens))
        return self._result(state, [nothing], reason)

    # A step.

    def _given_up(self) -> dict[int, Reason]:
        return {row: reason for row, state in enumerate(self._batch.live) if (reason := state.given_up())}

    def _run_ahead(self) -> tuple[int, dict[int, Reason]] | None:
        if any(state.request.on_tokens is not None for state in self._batch.live):
            return None
        given_up: dict[int, Reason] = {}

        def interrupted() -> bool:
            given_up.update(self._given_up())
            return bool(given_up)

        run = self._search.run_ahead(self._batch, interrupted)
        return None if run is None else (run[0], given_up | dict(run[1]))

    def _step(self) -> dict[int, Reason]:
        batch = self._batch
        output = batch.step(full=self._search.plan(batch))
        return dict(self._search.advance(batch, output)) if batch.ready.size else {}

    # Telling.

    def _tell_settled(self, row: int, state: RequestState, ended: bool) -> bool:
        if not ended:
            return self._tell(state, *self._search.settled(self._batch, row))
        best = self._search.hypotheses(self._batch, row)[0]
        return self._tell(state, best.tokens, best.log_probs or [])

    def _tell(self, state: RequestState, tokens: list[int], log_probs: list[float]) -> bool:
        """Pass on the tokens that were settled since the last time. Returns whether the request wants to end there."""
        fresh = [SettledToken(*pair) for pair in zip(tokens[state.told :], log_probs[state.told :], strict=False)]
        state.told, tell = len(tokens), state.request.on_tokens
        return bool(tell is not None and fresh and tell(fresh))

    def _result(self, state: RequestState, hypotheses: list[Hypothesis], reason: Reason) -> Result:
        o, seconds = self._options, time.perf_counter() - state.began
        if not o.return_scores:
            hypotheses = [replace(hypothesis, log_probs=None) for hypothesis in hypotheses]
        if o.needs_attention and not (o.return_attention or o.replace_unknowns):
            hypotheses = [replace(hypothesis, attention=None) for hypothesis in hypotheses]
        costs = Statistics(steps=state.steps, seconds=seconds, cache_bytes=self._batch.cache_bytes)
        return Result(hypotheses=hypotheses, statistics=costs, reason=reason)


def decode(model: StepModel, requests: Sequence[Request], options: DecodeOptions, special: SpecialIds) -> list[Result]:
    """A result for each of the requests, which were checked; the longest sources are decoded first."""
    order = sorted(range(len(requests)), key=lambda i: -len(requests[i].source))
    results: dict[int, Result] = {}
    with DecodingSession(model, options, special) as session:
        for i in order:
            session.add(requests[i])
        while session.pending:
            results.update((order[number], result) for number, result in session.step())
    return [results[i] for i in range(len(requests))]
