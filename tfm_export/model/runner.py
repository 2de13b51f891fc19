"""Prepared sources to answers: all at once, window by window, or token by token."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any, Literal, TypeVar

import numpy as np

from tfm_export.bundle import Bundle
from tfm_export.decoding import DecodeOptions, Hypothesis, Result, SettledToken, generate, stream
from tfm_export.decoding.result import are_ids
from tfm_export.errors import NumericError, RequestError, TfmExportError
from tfm_export.model.answers import Generation, IdsResult, Piece
from tfm_export.model.requests import Call, Either, Prepared
from tfm_export.runtime.step_model import StepModel
from tfm_export.runtime.threads import MOST_THREADS
from tfm_export.tokenizer import Tokenizer

OnError = Literal["raise", "yield"]
ON_ERROR = ("raise", "yield")

# Sources are sorted by length within so many batches.
BATCHES_AHEAD = 16

ItemT = TypeVar("ItemT")
AnswerT = TypeVar("AnswerT")
Prepare = Callable[[ItemT, Call], Prepared]
Answer = Callable[[Prepared, Result, Call], AnswerT]
Window = list[Prepared | TfmExportError]
OfWindow = tuple[Window, list[AnswerT | TfmExportError]]
Decoded = Generator[OfWindow[AnswerT], None, None]


class Runner:
    """Runs decoding for a bundle's model.

    Args:
        bundle: with the model's special ids.
        step_model: the backend.
        tokenizer: None if the bundle has none.
    """

    def __init__(self, bundle: Bundle, step_model: StepModel, tokenizer: Tokenizer | None) -> None:
        self._special, self._step_model, self._tokenizer = bundle.manifest.special_ids, step_model, tokenizer
        self._attending: StepModel | None = None
        self._lock = threading.Lock()

    def answers(self, prepared: Sequence[Prepared], answer: Answer[AnswerT], call: Call) -> list[AnswerT]:
        """Decode together."""
        model = self._model_for(call.options)
        results = generate(model, [p.request for p in prepared], call.options, self._special)
        return [answer(p, result, call) for p, result in zip(prepared, results, strict=True)]

    def iterate(
        self,
        items: Iterable[ItemT],
        prepare: Prepare[ItemT],
        answer: Answer[AnswerT],
        call: Call,
        *,
        window: int | None,
        workers: int,
        on_error: OnError,
    ) -> Iterator[AnswerT | TfmExportError]:
        """Decode a window of items at a time; see `Model.generate_iterable`."""
        if on_error not in ON_ERROR:
            raise RequestError(f"on_error must be one of {', '.join(ON_ERROR)}, found {on_error!r}")
        if window is not None and not (are_ids([window]) and window >= 1):
            raise RequestError(f"window must be an integer of at least 1, found {window!r}")
        if not (are_ids([workers]) and 1 <= workers <= MOST_THREADS):
            raise RequestError(f"workers must be an integer from 1 to {MOST_THREADS:,}, found {workers!r}")
        batch = call.options.max_batch_size if call.options.batch_type == "examples" else 32
        size, given_up = window or BATCHES_AHEAD * batch * workers, threading.Event()
        if workers == 1:
            decoded = self._decoded(_windows(items, prepare, call, size), answer, call)
        else:
            call = replace(call, cancelled=Either(call.cancelled, given_up))
            windows = _windows(items, prepare, call, size)
            decoded = self._decoded_by(workers, windows, answer, call, given_up)
        with closing(decoded):
            for prepared, answers in decoded:
                each = iter(answers)
                for one in prepared:
                    found = next(each) if isinstance(one, Prepared) else one
                    if isinstance(found, TfmExportError) and on_error == "raise":
                        raise found
                    yield found

    def _decoded(self, windows: Iterable[Window], answer: Answer[AnswerT], call: Call) -> Decoded[AnswerT]:
        """Each window with the answers to what of it could be prepared."""
        for window in windows:
            yield window, self._each(_prepared(window), answer, call)

    def _decoded_by(
        self, workers: int, windows: Iterable[Window], answer: Answer[AnswerT], call: Call, given_up: threading.Event
    ) -> Decoded[AnswerT]:
        """The same by several threads, which all have their share of each window; the next one is begun meanwhile.

        Args:
            workers: how many threads.
            windows: what to decode.
            answer: makes the answers.
            call: its cancellation is set by given_up.
            given_up: is set when the caller wants no more.
        """

        def gathered(window: Window, shares: list[Future[list[AnswerT | TfmExportError]]]) -> OfWindow[AnswerT]:
            answers: list[Any] = [None] * len(_prepared(window))
            for number, share in enumerate(shares):
                answers[number::workers] = share.result()
            return window, answers

        with ThreadPoolExecutor(workers, thread_name_prefix="tfm-export") as pool:
            ahead: deque[tuple[Window, list[Future[list[AnswerT | TfmExportError]]]]] = deque()
            try:
                for window in windows:
                    every = _prepared(window)
                    shares = [pool.submit(self._each, every[n::workers], answer, call) for n in range(workers)]
                    ahead.append((window, shares))
                    if len(ahead) > 1:
                        yield gathered(*ahead.popleft())
                while ahead:
                    yield gathered(*ahead.popleft())
            finally:
                given_up.set()
                pool.shutdown(wait=False, cancel_futures=True)  # what runs ends at its next step

    def _each(
        self, prepared: Sequence[Prepared], answer: Answer[AnswerT], call: Call
    ) -> list[AnswerT | TfmExportError]:
        """Decode together; where that fails, in halves, so that all but those that fail have their answers."""
        try:
            return [*self.answers(prepared, answer, call)]
        except (RequestError, NumericError) as error:
            if len(prepared) == 1:
                return [error]
        middle = len(prepared) // 2
        return self._each(prepared[:middle], answer, call) + self._each(prepared[middle:], answer, call)

    def pieces(self, prepared: Prepared, call: Call) -> Generator[Piece, None, Generation]:
        """Decode one text token by token."""
        assert self._tokenizer is not None  # the source came from it
        settled = self.tokens(prepared, call)
        ids: list[int] = []
        told = ""
        while True:
            try:
                token = next(settled)
            except StopIteration as end:
                return self.generation(prepared, end.value, call)
            ids.append(token.token)
            text = self._tokenizer.decode_target(ids)
            yield Piece(token.token, token.log_prob, text[len(told) :])
            told = text

    def tokens(self, prepared: Prepared, call: Call) -> Generator[SettledToken, None, IdsResult]:
        """Decode one source token by token."""
        steps = stream(self._model_for(call.options), prepared.request, call.options, self._special)
        for item in steps:
            if isinstance(item, Result):
                return ids_result(prepared, item, call)
            yield item
        raise AssertionError("a stream ends with its result")

    def generation(self, prepared: Prepared, result: Result, call: Call) -> Generation:
        """The answer to a text."""
        return Generation(
            texts=[self._text(prepared, hypothesis, call) for hypothesis in result.hypotheses],
            hypotheses=result.hypotheses,
            source_truncated=prepared.source.truncated,
            statistics=result.statistics,
            reason=result.reason,
        )

    def close(self) -> None:
        """Free what this has loaded."""
        with self._lock:
            if self._attending is not None:
                self._attending.close()

    def _model_for(self, options: DecodeOptions) -> StepModel:
        """The step model, or the slower one that gives attention where the options need it."""
        model = self._step_model
        can = model.capabilities
        if not options.needs_attention or can.gives_attention or not can.offers_attention:
            return model  # decoding refuses a model that does not give what the options need
        with self._lock:
            if self._attending is None:
                self._attending = model.with_attention()
            return self._attending

    def _text(self, prepared: Prepared, hypothesis: Hypothesis, call: Call) -> str:
        assert self._tokenizer is not None
        assert prepared.text is not None  # the source came from it
        ids, unk = hypothesis.tokens, self._special.unk
        places = [place for place, token in enumerate(ids) if token == unk] if call.options.replace_unknowns else []
        if not places:
            return self._tokenizer.decode_target(ids)
        assert hypothesis.attention is not None
        words = self._tokenizer.split_source(prepared.text)[: len(prepared.source.ids)]
        # The end token has no word, however much attention it gets.
        best = np.argmax(hypothesis.attention[places, : len(words)], axis=1).tolist()
        return self._tokenizer.decode_target(ids, {p: words[word] for p, word in zip(places, best, strict=True)})


def ids_result(prepared: Prepared, result: Result, _: Call) -> IdsResult:
    """The answer to a source of ids."""
    return IdsResult(**vars(result), source_truncated=prepared.source.truncated)


def _windows(items: Iterable[ItemT], prepare: Prepare[ItemT], call: Call, size: int) -> Iterator[Window]:
    items = iter(items)
    while some := list(islice(items, size)):
        yield [_prepared_or_error(prepare, item, call) for item in some]


def _prepared(window: Window) -> list[Prepared]:
    return [one for one in window if isinstance(one, Prepared)]


def _prepared_or_error(prepare: Prepare[ItemT], item: ItemT, call: Call) -> Prepared | TfmExportError:
    try:
        return prepare(item, call)
    except RequestError as error:
        return error
