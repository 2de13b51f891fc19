"""The loaded model: decodes, scores and streams, for one caller or many."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NoReturn, Self, overload

from tfm_export.bundle import Bundle
from tfm_export.decoding import DecodeOptions, Request, SettledToken, score
from tfm_export.decoding.checks import check_options
from tfm_export.decoding.request import Cancellation, are_ids, check_ending
from tfm_export.errors import ModelClosed, RequestError, TfmExportError
from tfm_export.model.answers import AsyncStream, Generation, Pending, Piece, Stream
from tfm_export.model.observer import Observer, Observers
from tfm_export.model.requests import (
    Call,
    Either,
    LongSource,
    Source,
    SourceReader,
    SpecialTokens,
    TextRequest,
    collect,
)
from tfm_export.model.runner import OnError, Runner
from tfm_export.model.scheduler import Scheduler, Ticket
from tfm_export.runtime.step_model import StepModel
from tfm_export.runtime.threads import MOST_THREADS, usable_cpus
from tfm_export.tokenizer import Tokenizer

Text = str | TextRequest
Ids = Sequence[int] | Request
MAX_WAITING = 4096  # sources
MOST_OPTIONS = 256  # that a model remembers

Raise = Literal["raise"]
Yield = Literal["yield"]


class Model:
    """A model in service. Safe to use from several threads, which share one copy of the weights.

    Settings are the same wherever a method takes them: fields of `DecodeOptions` by name, or all of them as `options`,
    and long_source, deadline, budget, cancelled, source_language, target_language and special_tokens, which `call`
    explains.

    >>> model.generate("hello", beam_size=4).text
    'HH EH L OW'

    Attributes:
        bundle: where it comes from.
        step_model: the backend.
        tokenizer: None if the bundle has none; then only ids go in and out.
        backend: what the backend is, for people, such as "fp32 with ONNX Runtime on the CPU".
    """

    def __init__(
        self,
        bundle: Bundle,
        step_model: StepModel,
        tokenizer: Tokenizer | None,
        *,
        backend: str = "",
        special_tokens: SpecialTokens = "read",
        workers: int | None = None,
        max_waiting: int = MAX_WAITING,
        observer: Observer | None = None,
    ) -> None:
        self.bundle, self.step_model, self.tokenizer = bundle, step_model, tokenizer
        self.backend = backend or type(step_model).__name__
        self._special_tokens = special_tokens
        self._reader = SourceReader(bundle, step_model, tokenizer)
        self._runner = Runner(bundle, step_model, tokenizer)
        self._closed = False
        self._options: dict[Any, DecodeOptions] = {}  # that were asked for and are known to be valid
        self._scheduler = Scheduler(
            self._runner,
            workers=_workers(workers, step_model),
            max_waiting=max_waiting,
            observer=Observers(*([] if observer is None else [observer])),
        )
        weakref.finalize(self, self._scheduler.end)

    # Text in, text out.

    @overload
    def generate(self, text: Text, **settings: Any) -> Generation: ...

    @overload
    def generate(self, text: Sequence[Text], **settings: Any) -> list[Generation]: ...

    def generate(self, text: Text | Sequence[Text], **settings: Any) -> Generation | list[Generation]:
        """Decode one text, or many.

        >>> model.generate("hello").text
        'HH EH L OW'
        >>> [generation.text for generation in model.generate(["a", "hello"], beam_size=1)]
        ['AA', 'HH EH L OW']

        Args:
            text: a source text or a sequence of them; as a `TextRequest` where it has options of its own.
            **settings: fields of `DecodeOptions`, long_source, deadline, budget, cancelled.

        Returns:
            A generation for a text, or a list of them, in order, for a sequence.

        Raises:
            RequestError: a text or an option that the model cannot serve; all that is wrong, before anything runs.
            NumericError: the model gave a number that is not finite.
        """
        generations: Generation | list[Generation] = self._generate(text, self.call(**settings))
        return generations

    @overload
    def generate_async(self, text: Text, *, request_id: str = "", **settings: Any) -> Pending[Generation]: ...

    @overload
    def generate_async(
        self, text: Sequence[Text], *, request_id: str = "", **settings: Any
    ) -> Pending[list[Generation]]: ...

    def generate_async(self, text: Text | Sequence[Text], *, request_id: str = "", **settings: Any) -> Pending[Any]:
        """Decode one text, or many, together with those of all other callers.

        An idle model starts at once; what comes while it runs joins the batch. Each text of a list waits for its own
        turn, and texts that come by themselves do not wait for the whole list. A text that has expired or was cancelled
        before it joined a batch is not decoded.

        >>> pending = model.generate_async("hello", deadline=60.0)
        >>> pending.result().text
        'HH EH L OW'

        Args:
            text: a source text or a sequence of them; as a `TextRequest` where it has options of its own.
            request_id: the caller's name for the call, which observers and the log get.
            **settings: fields of `DecodeOptions` and the settings of `call`; deadlines count from this call.

        Returns:
            What can be awaited, waited for and cancelled, and gives what `generate` does.

        Raises:
            RequestError: an option that the model cannot serve; what is wrong with a text comes with the answer.
            Overloaded: as many sources wait as `load` allows (max_waiting).
        """
        one = isinstance(text, Text)
        items = [text] if isinstance(text, Text) else text
        return self._submit("text", items, self._reader.text, request_id, self.call(**settings), one=one)

    def stream_async(self, text: Text, *, request_id: str = "", **settings: Any) -> AsyncStream[Piece]:
        """Decode one text together with those of all other callers, and give its tokens as they settle.

        >>> import asyncio
        >>> async def follow():
        ...     return [piece.text async for piece in model.stream_async("hello")]
        >>> asyncio.run(follow())
        ['HH', ' EH', ' L', ' OW']

        Args:
            text: a source text, or a `TextRequest`.
            request_id: the caller's name for the call, which observers and the log get.
            **settings: fields of `DecodeOptions`, long_source, deadline, cancelled; deadlines count from this call.

        Returns:
            An asynchronous iterator over pieces, whose texts together are the generation's.

        Raises:
            RequestError: an option that the model, or a stream, cannot serve; what is wrong with the text comes when
                the stream is read.
            Overloaded: as many sources wait as `load` allows (max_waiting).
        """
        call = self.call(**settings)
        check_stream(call.options)
        asked, pieces = text if isinstance(text, TextRequest) else TextRequest(text=text), self._runner.pieces()

        def begin(tell: Callable[[list[SettledToken]], None]) -> Pending[Generation]:
            own = asked.on_tokens

            def on_tokens(tokens: list[SettledToken]) -> bool:
                tell(tokens)
                return bool(own is not None and own(tokens))

            return self._submit(
                "text", [replace(asked, on_tokens=on_tokens)], self._reader.text, request_id, call, one=True
            )

        return AsyncStream(begin, pieces.add, pieces.rest)

    @overload
    def generate_iterable(
        self, texts: Iterable[Text], *, on_error: Raise = "raise", **settings: Any
    ) -> Iterator[Generation]: ...

    @overload
    def generate_iterable(
        self, texts: Iterable[Text | RequestError], *, on_error: Yield, **settings: Any
    ) -> Iterator[Generation | TfmExportError]: ...

    def generate_iterable(
        self,
        texts: Iterable[Text | RequestError],
        *,
        on_error: OnError = "raise",
        window: int | None = None,
        workers: int = 1,
        **settings: Any,
    ) -> Iterator[Generation | TfmExportError]:
        """Decode a stream of texts of any length in constant memory.

        On a CPU, one thread for each of several batches gets more done than several threads for one batch:
        `load(path, threads=1)` and as many workers as CPUs is what `tfm-export run` takes for files.

        >>> for answer in model.generate_iterable(["hello", ""], on_error="yield"):
        ...     print(type(answer).__name__, getattr(answer, "text", answer))
        Generation HH EH L OW
        RequestError the text is empty

        Args:
            texts: source texts, or `TextRequest`s; read a window at a time. A `RequestError` among them is its own
                answer.
            on_error: "raise" the error of a text in its place, or "yield" it there and go on.
            window: texts read and sorted by length at once; None for 16 batches of each worker.
            workers: how many threads decode, each batches of its own.
            **settings: fields of `DecodeOptions`, long_source, deadline, budget, cancelled.

        Returns:
            A generation, or an error, for each text, in order.

        Raises:
            RequestError: an option that the model cannot serve.
        """
        call = self.call(**settings)
        return self._runner.iterate(texts, self._reader.text, call, window=window, workers=workers, on_error=on_error)

    def stream(self, text: Text, **settings: Any) -> Stream[Piece]:
        """Decode one text and give its tokens as soon as they can no longer change.

        >>> for piece in model.stream("hello"):
        ...     print(piece.text, end="|", flush=True)
        HH| EH| L| OW|

        Args:
            text: a source text, or a `TextRequest`.
            **settings: fields of `DecodeOptions`, long_source, deadline, budget, cancelled.

        Returns:
            An iterator over pieces, whose texts together are the generation's; `answer` holds that at the end.

        Raises:
            RequestError: a text or an option that the model, or a stream, cannot serve.
        """
        call = self.call(**settings)
        check_stream(call.options)
        return Stream(self._runner.tokens(self._reader.text(text, call), call.options))

    def score(
        self,
        texts: Sequence[str],
        targets: Sequence[str],
        *,
        add_end_token: bool = True,
        max_batch_size: int = 32,
        long_source: LongSource = "refuse",
        options: DecodeOptions | None = None,
        **option_fields: Any,
    ) -> list[list[float]]:
        """How likely targets are, under the same options as `generate` decodes with; see `decoding.score`.

        >>> likely, unlikely = model.score(["hello", "hello"], ["HH EH L OW", "AH"])
        >>> sum(likely) > sum(unlikely)
        True

        Args:
            texts: source texts.
            targets: a target text for each.
            add_end_token: score the end token after each target, too.
            max_batch_size: pairs at once.
            long_source: "refuse" texts longer than the model takes, or "truncate" them.
            options: how targets are decoded, all of it; DecodeOptions() for the model by itself.
            **option_fields: fields of `DecodeOptions`; the bundle's defaults hold for the others.

        Returns:
            For each pair, the log-probability of every token of the target. If the options have a forced_bos, it is
            the first token of every target, whether or not the text has it.

        Raises:
            RequestError: a pair that the model cannot serve; all that is wrong, before anything runs.
        """
        self._check_open()
        if len(texts) != len(targets):
            raise RequestError(f"there must be a target for each text, found {len(texts)} and {len(targets)}")

        options = self.decode_options(options, **option_fields)
        first = [] if options.forced_bos is None else [options.forced_bos]

        def encode(pair: tuple[str, str]) -> tuple[list[int], list[int]]:
            source, target = self._reader.encode(pair[0]), self._reader.target(pair[1])
            return self._reader.cut(source, long_source), target if target[:1] == first else [*first, *target]

        pairs = collect("pair", zip(texts, targets, strict=True), encode)
        sources, wanted = [source for source, _ in pairs], [target for _, target in pairs]
        return self.score_ids(
            sources, wanted, add_end_token=add_end_token, max_batch_size=max_batch_size, options=options
        )

    # Ids in, ids out.

    def generate_ids(self, sources: Sequence[Ids], **settings: Any) -> list[Generation]:
        """Decode sources given as ids, exactly what the encoder gets: nothing is appended.

        >>> ids = model.encode_text("hello").ids
        >>> model.generate_ids([ids])[0].tokens == model.generate("hello").tokens
        True

        Args:
            sources: the ids of each, or a `decoding.Request` where it has options of its own.
            **settings: fields of `DecodeOptions`, long_source, deadline, budget, cancelled.

        Returns:
            A generation without texts for each source, in order.

        Raises:
            RequestError: a source or an option that the model cannot serve; all that is wrong, before anything runs.
            NumericError: the model gave a number that is not finite.
        """
        call = self.call(**settings)
        read = collect("source", sources, lambda ids: self._reader.ids(ids, call))
        return self._runner.answers(read, call.options)

    def generate_ids_async(
        self, sources: Sequence[Ids], *, request_id: str = "", **settings: Any
    ) -> Pending[list[Generation]]:
        """Decode sources given as ids together with those of all other callers; see `generate_async`.

        >>> ids = model.encode_text("hello").ids
        >>> model.generate_ids_async([ids]).result()[0].tokens == model.generate("hello").tokens
        True

        Args:
            sources: the ids of each, or a `decoding.Request` where it has options of its own.
            request_id: the caller's name for the call, which observers and the log get.
            **settings: fields of `DecodeOptions` and the settings of `call`; deadlines count from this call.

        Returns:
            What can be awaited, waited for and cancelled, and gives what `generate_ids` does.

        Raises:
            RequestError: an option that the model cannot serve; what is wrong with a source comes with the answer.
            Overloaded: as many sources wait as `load` allows (max_waiting).
        """
        return self._submit("source", sources, self._reader.ids, request_id, self.call(**settings), one=False)

    @overload
    def generate_ids_iterable(
        self, sources: Iterable[Ids], *, on_error: Raise = "raise", **settings: Any
    ) -> Iterator[Generation]: ...

    @overload
    def generate_ids_iterable(
        self, sources: Iterable[Ids], *, on_error: Yield, **settings: Any
    ) -> Iterator[Generation | TfmExportError]: ...

    def generate_ids_iterable(
        self,
        sources: Iterable[Ids],
        *,
        on_error: OnError = "raise",
        window: int | None = None,
        workers: int = 1,
        **settings: Any,
    ) -> Iterator[Generation | TfmExportError]:
        """Decode a stream of sources of ids, of any length, in constant memory.

        >>> sources = (model.encode_text(text).ids for text in ("a", "hello"))
        >>> [len(generation.tokens) for generation in model.generate_ids_iterable(sources)]
        [1, 4]

        Args:
            sources: the ids of each, or `decoding.Request`s; read a window at a time.
            on_error: "raise" the error of a source in its place, or "yield" it there and go on.
            window: sources read and sorted by length at once; None for 16 batches of each worker.
            workers: how many threads decode, each batches of its own.
            **settings: fields of `DecodeOptions`, long_source, deadline, budget, cancelled.

        Returns:
            A generation without texts, or an error, for each source, in order.

        Raises:
            RequestError: an option that the model cannot serve.
        """
        call = self.call(**settings)
        return self._runner.iterate(sources, self._reader.ids, call, window=window, workers=workers, on_error=on_error)

    def stream_ids(self, source: Ids, **settings: Any) -> Stream[SettledToken]:
        """Decode one source of ids and give its tokens as soon as they can no longer change.

        >>> stream = model.stream_ids(model.encode_text("hello").ids)
        >>> [token.token for token in stream] == stream.answer.tokens
        True

        Args:
            source: its ids, or a `decoding.Request`.
            **settings: fields of `DecodeOptions`, long_source, deadline, budget, cancelled.

        Returns:
            An iterator over tokens; `answer` holds the generation at the end.

        Raises:
            RequestError: a source or an option that the model, or a stream, cannot serve.
        """
        call = self.call(**settings)
        return Stream(self._runner.tokens(self._reader.ids(source, call), call.options))

    def score_ids(
        self,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        *,
        add_end_token: bool = True,
        max_batch_size: int = 32,
        options: DecodeOptions | None = None,
        **option_fields: Any,
    ) -> list[list[float]]:
        """How likely targets given as ids are, under the same options as `generate` decodes with.

        A forced_bos is part of the targets, as it is of those that `generate_ids` gives.

        >>> source, target = model.encode_text("hello").ids, model.generate("hello").tokens
        >>> [len(log_probs) for log_probs in model.score_ids([source], [target])]
        [5]

        Args:
            sources: ids of each.
            targets: ids of a target for each, without start and end token.
            add_end_token: score the end token after each target, too.
            max_batch_size: pairs at once.
            options: how targets are decoded, all of it; DecodeOptions() for the model by itself.
            **option_fields: fields of `DecodeOptions`; the bundle's defaults hold for the others.

        Returns:
            For each pair, the log-probability of every token of the target.

        Raises:
            RequestError: a pair that the model cannot serve; all that is wrong, before anything runs.
        """
        self._check_open()
        return score(
            self.step_model,
            sources,
            targets,
            self.bundle.manifest.special_ids,
            options=self.decode_options(options, **option_fields),
            max_batch_size=max_batch_size,
            add_end_token=add_end_token,
        )

    # What a call is made of.

    def call(
        self,
        *,
        options: DecodeOptions | None = None,
        long_source: LongSource = "refuse",
        deadline: float | None = None,
        budget: float | None = None,
        cancelled: Cancellation | None = None,
        source_language: str | None = None,
        target_language: str | None = None,
        special_tokens: SpecialTokens | None = None,
        **option_fields: Any,
    ) -> Call:
        """The settings that every way of decoding takes.

        >>> model.generate("hello", long_source="truncate", deadline=60.0, beam_size=2).reason.value
        'end token'

        Args:
            options: how to decode, all of it.
            long_source: "refuse" sources longer than the model takes, or "truncate" them, which the answer tells; the
                end token is kept.
            deadline: seconds after which a source gives what it has. They count for each source from its joining a
                batch: no time counts in which it waits for other sources, or for who reads the answers.
            budget: seconds from this call on after which all of its sources give what they have, for
                `Reason.BUDGET`; those that have not joined a batch by then are answered without being decoded.
            cancelled: a `threading.Event` or the like, asked before every step; once it is set, sources give what they
                have.
            source_language: the language that texts are in, by name ("fra_Latn", "fr") or token ("__fr__"), for models
                that are told it; None leaves it to the tokenizer. An unknown one is refused, with the nearest names.
            target_language: the language to translate texts to, for multilingual models.
            special_tokens: what becomes of a special token, such as "</s>", that a text spells: "read" it as the
                tokenizer's own library does, or "escape" it, so that it is text like any other, which a public service
                should do. None is what `load` was told.
            **option_fields: fields of `DecodeOptions`; the bundle's defaults hold for the others.

        Raises:
            RequestError: the options are not valid, or the model is closed.
        """
        self._check_open()
        check_ending(deadline, cancelled, budget)
        return Call(
            options=self.decode_options(options, **option_fields),
            long_source=long_source,
            deadline=deadline,
            ends_at=None if budget is None or budget == math.inf else time.perf_counter() + budget,
            cancelled=cancelled,
            source_language=source_language,
            target_language=target_language,
            special_tokens=special_tokens or self._special_tokens,
        )

    def decode_options(self, options: DecodeOptions | None = None, **option_fields: Any) -> DecodeOptions:
        """The options that a request is decoded with.

        >>> model.decode_options(beam_size=4, suppress_sequences=["OW"]).suppress_sequences
        ((27,),)

        Args:
            options: all of them, or None.
            **option_fields: fields of `DecodeOptions`; the bundle's defaults hold for the others. target_prefix and
                suppress_sequences may be text, forced_bos a token.

        Raises:
            RequestError: both were given, they are not valid, or the model cannot serve them.
        """
        key: Any = None
        if options is not None and option_fields:
            raise RequestError(f"options were given, and {', '.join(option_fields)} beside them: give one or the other")
        if options is None:
            key = tuple((name, type(value), value) for name, value in option_fields.items())
            try:
                if (found := self._options.get(key)) is not None:
                    return found
            except TypeError:  # lists and the like
                key = None
            known = self._reader.known_target
            if isinstance(prefix := option_fields.get("target_prefix"), str):
                option_fields["target_prefix"] = known(prefix)
            if isinstance(sequences := option_fields.get("suppress_sequences"), Sequence):
                option_fields["suppress_sequences"] = [known(s) if isinstance(s, str) else s for s in sequences]
            if isinstance(first := option_fields.get("forced_bos"), str):
                option_fields["forced_bos"] = self._reader.target_token(first, "forced_bos")
            options = DecodeOptions(**self._defaults(option_fields), **option_fields)
        model, special = self.step_model, self.bundle.manifest.special_ids
        check_options(model, options, special, offered=model.capabilities.offers_attention)
        if key is not None and len(self._options) < MOST_OPTIONS:
            self._options[key] = options
        return options

    def encode_text(
        self,
        text: str,
        *,
        long_source: LongSource = "refuse",
        source_language: str | None = None,
        target_language: str | None = None,
        special_tokens: SpecialTokens | None = None,
    ) -> Source:
        """The ids that the encoder gets for a text.

        >>> model.encode_text("ab").ids
        [4, 5, 2]

        Args:
            text: a source text.
            long_source: "refuse" a text longer than the model takes, or "truncate" it.
            source_language: as for `call`.
            target_language: as for `call`.
            special_tokens: as for `call`.

        Raises:
            RequestError: the bundle has no tokenizer, or the text is empty, unknown to it, or too long.
        """
        call = Call(
            options=DecodeOptions(),
            long_source=long_source,
            source_language=source_language,
            target_language=target_language,
            special_tokens=special_tokens or self._special_tokens,
        )
        return self._reader.text(text, call)

    def check_ids(self, ids: Iterable[int], *, long_source: LongSource = "refuse") -> Source:
        """Make sure that the model can take a source.

        >>> model.check_ids([4, 5, 2]).truncated
        False

        Args:
            ids: of the source.
            long_source: "refuse" more than the model takes, or "truncate" them.

        Raises:
            RequestError: they are not integers, out of range, none, or too many.
        """
        return self._reader.ids(ids, Call(options=DecodeOptions(), long_source=long_source))

    # Its life.

    def warm_up(self) -> None:
        """Run the graphs once, so that the first request does not pay for what they set up on their first run."""
        self._check_open()
        length = min(8, self.step_model.limits.max_source_length)
        longest = min(2, self.step_model.limits.max_target_length)
        self.generate_ids([[0] * length], options=DecodeOptions(max_decoding_length=longest))

    @property
    def waiting(self) -> int:
        """Sources given to `generate_async` and `stream_async` that wait for a place in a batch."""
        return self._scheduler.waiting

    def close(self, drain: float | None = None) -> None:
        """Free the model; new requests are refused with `ModelClosed`.

        Args:
            drain: seconds in which all that `generate_async` has taken is decoded; what has no answer then gets
                `ModelClosed`. None decodes what is in a batch to its end; what waits gets `ModelClosed` at once.
        """
        self._closed = True
        self._scheduler.close(drain)
        self._runner.close()
        self.step_model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _generate(self, text: Any, call: Call) -> Any:
        one = isinstance(text, Text)
        sources = collect("text", [text] if one else text, lambda item: self._reader.text(item, call))
        generations = self._runner.answers(sources, call.options)
        return generations[0] if one else generations

    def _submit(
        self, name: str, items: Any, read: Callable[[Any, Call], Source], request_id: str, call: Call, *, one: bool
    ) -> Pending[Any]:
        """Hand items of a call to the scheduler, which reads and decodes them."""
        if not isinstance(items, Sequence):
            raise RequestError(f"expected a {name}, or a sequence with a {name} each, found {items!r}")
        given_up, admitted = threading.Event(), time.perf_counter()
        cancelled = given_up if call.cancelled is None else Either(call.cancelled, given_up)
        ticket = Ticket(
            read=lambda call: collect(name, items, lambda item: read(item, call)),
            size=len(items),
            call=replace(call, cancelled=cancelled, admitted=admitted),
            given_up=given_up,
            admitted=admitted,
            request_id=request_id,
        )
        self._scheduler.submit(ticket)
        # Who waits for an answer keeps the model: it is closed when it is dropped.
        return Pending(ticket.future, partial(self._give_up, ticket), _only if one else list)

    def _give_up(self, ticket: Ticket) -> None:
        self._scheduler.give_up(ticket)

    def _defaults(self, given: dict[str, Any]) -> dict[str, Any]:
        """The bundle's defaults for the options that were not given and do not contradict those that were."""
        generation = self.bundle.manifest.generation
        samples = given.get("sampling_topk", generation.options.get("sampling_topk", 1)) != 1
        searches = given.get("sampling_topk") == 1 or given.get("beam_size", 1) not in {1, None}
        defaults = {
            "max_decoding_length": generation.max_length,
            "beam_size": 1 if samples else generation.beam_size,
            "length_penalty": generation.length_penalty,
            **{name: value for name, value in generation.options.items() if not (searches and "sampling" in name)},
        }
        return {name: value for name, value in defaults.items() if name not in given}

    def _check_open(self) -> None:
        if self._closed:
            raise ModelClosed("the model is closed", "load the bundle again")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a model cannot be copied or pickled: load the bundle in each process, with tfm_export.load")


def check_stream(options: DecodeOptions) -> None:
    """Refuse options that a stream cannot serve.

    Raises:
        RequestError: they make several searches of one source, or change its tokens at the end.
    """
    if options.replace_unknowns:
        raise RequestError("replace_unknowns needs the whole target: a stream cannot have it")
    if options.return_alternatives or (options.samples and options.num_hypotheses > 1):
        raise RequestError("a stream follows one search; these options make several of one source")


def _only(answers: list[Generation]) -> Generation:
    return answers[0]


def _workers(wanted: int | None, step_model: StepModel) -> int:
    """How many batches are decoded at the same time: as many as have CPUs of their own, or one on a GPU."""
    if wanted is not None:
        if not are_ids([wanted]) or isinstance(wanted, bool) or not 1 <= wanted <= MOST_THREADS:
            raise RequestError(f"workers must be an integer from 1 to {MOST_THREADS:,}, found {wanted!r}")
        return wanted
    threads = step_model.capabilities.threads
    return 1 if threads is None else max(1, usable_cpus() // threads)
