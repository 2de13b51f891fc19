"""Sources to answers: all at once, window by window, or token by token."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Literal, TypeVar

import numpy as np

from tfm_export.bundle import Bundle
from tfm_export.decoding import DecodeOptions, DecodingSession, Hypothesis, Result, SettledToken, generate, stream
from tfm_export.decoding.generate import generate_each
from tfm_export.decoding.request import are_ids
from tfm_export.errors import NumericError, RequestError, TfmExportError
from tfm_export.model.answers import Generation, Piece
from tfm_export.model.requests import Call, Either, Source
from tfm_export.quotation import quote
from tfm_export.runtime.forks import tell_of_forks
from tfm_export.runtime.step_model import StepModel
from tfm_export.runtime.threads import MOST_THREADS
from tfm_export.tokenizer import Tokenizer

OnError = Literal["raise", "yield"]
ON_ERROR = ("raise", "yield")

NO_MEMORY = "there is not enough memory to decode this", "a smaller beam_size"  # a problem and a hint

# Sources are sorted by length within so many batches.
BATCHES_AHEAD = 16

ItemT = TypeVar("ItemT")
Read = Callable[[ItemT, Call], Source]
Answered = list[Generation | TfmExportError]
Window = list[Source | TfmExportError]
Decoded = Generator[tuple[Window, Answered], None, None]


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
        tell_of_forks(self)

    def after_fork(self) -> None:
        """In a fork, nobody holds the lock; see `tfm_export.runtime.forks`."""
        self._lock = threading.Lock()

    def answers(self, sources: Sequence[Source], options: DecodeOptions) -> list[Generation]:
        """Decode together."""
        requests = [source.request for source in sources]
        results = generate(self._model_for(options), requests, options, self._special, checked=True)
        return [self.generation(*pair, options) for pair in zip(sources, results, strict=True)]

    def iterate(
        self,
        items: Iterable[ItemT],
        read: Read[ItemT],
        call: Call,
        *,
        window: int | None,
        workers: int,
        on_error: OnError,
    ) -> Iterator[Generation | TfmExportError]:
        """Decode a window of items at a time, and give an answer, or an error, for each of them, in order."""
        given: object = items
        if isinstance(given, Mapping | AbstractSet | bytes | str) or not isinstance(given, Iterable):
            raise RequestError(f"expected an iterable of texts, or of sources, found {quote(given)}")
        if on_error not in ON_ERROR:
            raise RequestError(f"on_error must be one of {', '.join(ON_ERROR)}, found {quote(on_error)}")
        if window is not None and not (are_ids([window]) and window >= 1):
            raise RequestError(f"window must be an integer of at least 1, found {quote(window)}")
        if not (are_ids([workers]) and 1 <= workers <= MOST_THREADS):
            raise RequestError(f"workers must be an integer from 1 to {MOST_THREADS:,}, found {quote(workers)}")
        batch = call.options.max_batch_size if call.options.batch_type == "examples" else 32
        size = window or BATCHES_AHEAD * batch * workers
        return self._iterate(items, read, call, size=size, workers=workers, on_error=on_error)

    def _iterate(
        self,
        items: Iterable[ItemT],
        read: Read[ItemT],
        call: Call,
        *,
        size: int,
        workers: int,
        on_error: OnError,
    ) -> Iterator[Generation | TfmExportError]:
        given_up = threading.Event()
        if workers > 1:
            call = replace(call, cancelled=Either(call.cancelled, given_up))
        windows = _windows(items, read, call, size)
        decoded: Decoded
        if workers > 1:
            decoded = self._decoded_by(workers, windows, call.options, given_up)
        else:
            decoded = ((w, self._each(_readable(w), call.options)) for w in windows)
        with closing(decoded):
            for sources, answers in decoded:
                each = iter(answers)
                for one in sources:
                    found = next(each) if isinstance(one, Source) else one
                    if isinstance(found, TfmExportError) and on_error == "raise":
                        raise found
                    yield found

    def _decoded_by(
        self, workers: int, windows: Iterable[Window], options: DecodeOptions, given_up: threading.Event
    ) -> Decoded:
        """Windows decoded by several threads, which all have their share of each; the next one is begun meanwhile.

        Args:
            workers: how many threads.
            windows: what to decode.
            options: how.
            given_up: is set when the caller wants no more, and cancels all that is being decoded.
        """

        def gathered(window: Window, shares: list[Future[Answered]]) -> tuple[Window, Answered]:
            every = [iter(share.result()) for share in shares]
            return window, [next(every[number % workers]) for number in range(len(_readable(window)))]

        with ThreadPoolExecutor(workers, thread_name_prefix="tfm-export") as pool:
            ahead: deque[tuple[Window, list[Future[Answered]]]] = deque()
            try:
                for window in windows:
                    sources = _readable(window)
                    ahead.append(
                        (window, [pool.submit(self._each, sources[n::workers], options) for n in range(workers)])
                    )
                    if len(ahead) > 1:
                        yield gathered(*ahead.popleft())
                while ahead:
                    yield gathered(*ahead.popleft())
            finally:
                given_up.set()
                pool.shutdown(wait=False, cancel_futures=True)  # what runs ends at its next step

    def _each(self, sources: Sequence[Source], options: DecodeOptions) -> Answered:
        """Decode together; where that fails, in halves, so that all but those that fail have their answers."""
        try:
            requests = [source.request for source in sources]
            results = generate_each(self._model_for(options), requests, options, self._special)
            return [self._answered(*pair, options) for pair in zip(sources, results, strict=True)]
        except MemoryError:
            if len(sources) == 1:
                return [RequestError(*NO_MEMORY)]
        except (RequestError, NumericError) as error:
            if len(sources) == 1:
                return [error]
        middle = len(sources) // 2
        return self._each(sources[:middle], options) + self._each(sources[middle:], options)

    def _answered(
        self, source: Source, result: Result | Exception, options: DecodeOptions
    ) -> Generation | TfmExportError:
        """The answer to a source, or an error of ours; what a caller's own code raised is raised again."""
        if isinstance(result, TfmExportError):
            return result
        if isinstance(result, Exception):
            raise result
        return self.generation(source, result, options)

    def tokens(self, source: Source, options: DecodeOptions) -> Generator[SettledToken, None, Generation]:
        """Decode one source token by token; the tokens of a text are pieces of its target."""
        pieces = self.pieces()
        for item in stream(self._model_for(options), source.request, options, self._special, checked=True):
            if isinstance(item, Result):
                answer = self.generation(source, item, options)
                if source.text is not None:
                    yield from pieces.rest(answer)
                return answer
            if source.text is None or self._tokenizer is None:
                yield item
                continue
            yield from pieces.add([item])
        raise AssertionError("a stream ends with its result")

    def pieces(self) -> Pieces:
        """What makes pieces of a target's tokens."""
        assert self._tokenizer is not None, "there is text"
        return Pieces(self._tokenizer)

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

    def session(self, options: DecodeOptions) -> DecodingSession:
        """An open batch for requests of these options, and others of the same shape."""
        return DecodingSession(self._model_for(options), options, self._special)

    def generation(self, source: Source, result: Result, options: DecodeOptions) -> Generation:
        """The answer to a source that decoding gave a result for."""
        texts = None
        if source.text is not None:
            texts = [self._text(source, source.text, hypothesis, options) for hypothesis in result.hypotheses]
        return Generation(**vars(result), texts=texts, source_truncated=source.truncated)

    def _text(self, source: Source, text: str, hypothesis: Hypothesis, options: DecodeOptions) -> str:
        assert self._tokenizer is not None  # the source came from it
        ids, unk = hypothesis.tokens, self._special.unk
        places = [place for place, token in enumerate(ids) if token == unk] if options.replace_unknowns else []
        if not places:
            return self._tokenizer.decode_target(ids)
        assert hypothesis.attention is not None
        words = self._tokenizer.split_source(text, source.reading)[: len(source.ids)]
        # The end token has no word, however much attention it gets.
        best = np.argmax(hypothesis.attention[places, : len(words)], axis=1).tolist()
        return self._tokenizer.decode_target(ids, {p: words[word] for p, word in zip(places, best, strict=True)})


class Pieces:
    """Makes pieces of a target's tokens, as these settle; a piece is there once its text can no longer change.

    Args:
        tokenizer: the bundle's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._told = ""
        self._held: SettledToken | None = None  # the last token, while what it adds may still change

    def add(self, tokens: list[SettledToken]) -> list[Piece]:
        """The pieces that some more tokens make."""
        pieces = []
        for token in tokens:
            self._ids.append(token.token)
            stands = max(self._told, self._tokenizer.settled_target(self._ids), key=len)
            whole, more = stands == self._tokenizer.decode_target(self._ids), stands[len(self._told) :]
            held = self._held
            if held is not None:
                pieces.append(Piece(held.token, held.log_prob, "" if whole else more))
            if whole:
                pieces.append(Piece(token.token, token.log_prob, more))
            if whole or held is not None:
                self._told = stands
            self._held = None if whole else token
        return pieces

    def rest(self, answer: Generation) -> list[Piece]:
        """What is left to be told once the answer is there: tokens that had not settled, and what was held."""
        log_probs = answer.hypotheses[0].log_probs or [math.nan] * len(answer.tokens)
        pairs = [*zip(answer.tokens, log_probs, strict=False)][len(self._ids) :]
        pieces, held = self.add([SettledToken(*pair) for pair in pairs]), self._held
        self._held = None
        return pieces if held is None else [*pieces, Piece(held.token, held.log_prob, answer.text[len(self._told) :])]


def _windows(items: Iterable[ItemT], read: Read[ItemT], call: Call, size: int) -> Iterator[Window]:
    items = iter(items)
    while some := list(islice(items, size)):
        yield [_source_or_error(read, item, call) for item in some]


def _source_or_error(read: Read[ItemT], item: ItemT, call: Call) -> Source | TfmExportError:
    try:
        return read(item, call)
    except RequestError as error:
        return error


def _readable(window: Window) -> list[Source]:
    return [one for one in window if isinstance(one, Source)]
