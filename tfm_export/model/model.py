"""The loaded model: decodes, scores and streams, for one caller or many."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal, Self, overload

from tfm_export.bundle import Bundle
from tfm_export.decoding import DecodeOptions, Request, SettledToken, score
from tfm_export.decoding.checks import check_options
from tfm_export.decoding.request import Cancellation
from tfm_export.errors import RequestError, TfmExportError
from tfm_export.model.answers import Generation, Pending, Piece, Stream
from tfm_export.model.requests import Call, Either, LongSource, Source, SourceReader, TextRequest, collect
from tfm_export.model.runner import OnError, Runner
from tfm_export.runtime.step_model import StepModel
from tfm_export.runtime.threads import usable_cpus
from tfm_export.tokenizer import Tokenizer

Text = str | TextRequest
Ids = Sequence[int] | Request
Raise = Literal["raise"]
Yield = Literal["yield"]


class Model:
    """A model in service. Safe to use from several threads, which share one copy of the weights.

    Settings are the same wherever a method takes them: fields of `DecodeOptions` by name, or all of them as `options`,
    and long_source, deadline and cancelled, which `call` explains.

    >>> model.generate("hello", beam_size=4).text
    'HH EH L OW'

    Attributes:
        bundle: where it comes from.
        step_model: the backend.
        tokenizer: None if the bundle has none; then only ids go in and out.
        backend: what the backend is, for people, such as "fp32 with ONNX Runtime on the CPU".
    """

    def __init__(
        self, bundle: Bundle, step_model: StepModel, tokenizer: Tokenizer | None, *, backend: str = ""
    ) -> None:
        self.bundle, self.step_model, self.tokenizer = bundle, step_model, tokenizer
        self.backend = backend or type(step_model).__name__
        self._reader = SourceReader(bundle, step_model, tokenizer)
        self._runner = Runner(bundle, step_model, tokenizer)
        self._closed = False
        self._lock = threading.Lock()
        self._workers: ThreadPoolExecutor | None = None

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
            **settings: fields of `DecodeOptions`, long_source, deadline, cancelled.

        Returns:
            A generation for a text, or a list of them, in order, for a sequence.

        Raises:
            RequestError: a text or an option that the model cannot serve; all that is wrong, before anything runs.
            NumericError: the model gave a number that is not finite.
        """
        generations: Generation | list[Generation] = self._generate(text, self.call(**settings))
        return generations

    @overload
    def generate_async(self, text: Text, **settings: Any) -> Pending[Generation]: ...

    @overload
    def generate_async(self, text: Sequence[Text], **settings: Any) -> Pending[list[Generation]]: ...

    def generate_async(self, text: Text | Sequence[Text], **settings: Any) -> Pending[Any]:
        """Decode one text, or many, in another thread, of which there are as many as CPUs; calls beyond that wait.

        >>> pending = model.generate_async("hello", deadline=60.0)
        >>> pending.result().text
        'HH EH L OW'

        Args:
            text: a source text or a sequence of them; as a `TextRequest` where it has options of its own.
            **settings: fields of `DecodeOptions`, long_source, deadline, cancelled; the time that the call waits for a
                thread is taken off deadlines.

        Returns:
            What can be awaited, waited for and cancelled, and gives what `generate` does.

        Raises:
            RequestError: an option that the model cannot serve; what is wrong with a text comes with the answer.
        """
        call, given_up, begin = self.call(**settings), threading.Event(), time.perf_counter()
        call = replace(call, cancelled=Either(call.cancelled, given_up))
        with self._lock:
            self._check_open()
            if self._workers is None:
                self._workers = ThreadPoolExecutor(usable_cpus(), thread_name_prefix="tfm-export")
            return Pending(self._workers.submit(self._generate, text, call, since=begin), given_up)

    @overload
    def generate_iterable(
        self, texts: Iterable[Text], *, on_error: Raise = "raise", **settings: Any
    ) -> Iterator[Generation]: ...

    @overload
    def generate_iterable(
        self, texts: Iterable[Text], *, on_error: Yield, **settings: Any
    ) -> Iterator[Generation | TfmExportError]: ...

    def generate_iterable(
        self,
        texts: Iterable[Text],
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
            texts: source texts, or `TextRequest`s; read a window at a time.
            on_error: "raise" the error of a text in its place, or "yield" it there and go on.
            window: texts read and sorted by length at once; None for 16 batches of each worker.
            workers: how many threads decode, each batches of its own.
            **settings: fields of `DecodeOptions`, long_source, deadline, cancelled.

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
            **settings: fields of `DecodeOptions`, long_source, deadline, cancelled.

        Returns:
            An iterator over pieces, whose texts together are the generation's; `answer` holds that at the end.

        Raises:
            RequestError: a text or an option that the model, or a stream, cannot serve.
        """
        call = self.call(**settings)
        if call.options.replace_unknowns:
            raise RequestError("replace_unknowns needs the whole target: a stream cannot have it")
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
            **settings: fields of `DecodeOptions`, long_source, deadline, cancelled.

        Returns:
            A generation without texts for each source, in order.

        Raises:
            RequestError: a source or an option that the model cannot serve; all that is wrong, before anything runs.
            NumericError: the model gave a number that is not finite.
        """
        call = self.call(**settings)
        read = collect("source", sources, lambda ids: self._reader.ids(ids, call))
        return self._runner.answers(read, call.options)

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
            **settings: fields of `DecodeOptions`, long_source, deadline, cancelled.

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
            **settings: fields of `DecodeOptions`, long_source, deadline, cancelled.

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
        cancelled: Cancellation | None = None,
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
            cancelled: a `threading.Event` or the like, asked before every step; once it is set, sources give what they
                have.
            **option_fields: fields of `DecodeOptions`; the bundle's defaults hold for the others.

        Raises:
            RequestError: the options are not valid, or the model is closed.
        """
        self._check_open()
        return Call(
            options=self.decode_options(options, **option_fields),
            long_source=long_source,
            deadline=deadline,
            cancelled=cancelled,
        )

    def decode_options(self, options: DecodeOptions | None = None, **option_fields: Any) -> DecodeOptions:
        """The options that a request is decoded with.

        >>> model.decode_options(beam_size=4, suppress_sequences=["OW"]).suppress_sequences
        ((27,),)

        Args:
            options: all of them, or None.
            **option_fields: fields of `DecodeOptions`; the bundle's defaults hold for the others. target_prefix and
                suppress_sequences may be text.

        Raises:
            RequestError: both were given, they are not valid, or the model cannot serve them.
        """
        if options is not None and option_fields:
            raise RequestError(f"options were given, and {', '.join(option_fields)} beside them: give one or the other")
        if options is None:
            known = self._reader.known_target
            if isinstance(prefix := option_fields.get("target_prefix"), str):
                option_fields["target_prefix"] = known(prefix)
            if isinstance(sequences := option_fields.get("suppress_sequences"), Sequence):
                option_fields["suppress_sequences"] = [known(s) if isinstance(s, str) else s for s in sequences]
            options = DecodeOptions(**self._defaults(option_fields), **option_fields)
        model, special = self.step_model, self.bundle.manifest.special_ids
        check_options(model, options, special, offered=model.capabilities.offers_attention)
        return options

    def encode_text(self, text: str, *, long_source: LongSource = "refuse") -> Source:
        """The ids that the encoder gets for a text.

        >>> model.encode_text("ab").ids
        [4, 5, 2]

        Args:
            text: a source text.
            long_source: "refuse" a text longer than the model takes, or "truncate" it.

        Raises:
            RequestError: the bundle has no tokenizer, or the text is empty, unknown to it, or too long.
        """
        return self._reader.text(text, Call(options=DecodeOptions(), long_source=long_source))

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

    def close(self) -> None:
        """Free the model. Requests that are being decoded in other threads come to their end; new ones are refused."""
        with self._lock:
            self._closed = True
            if self._workers is not None:
                self._workers.shutdown(wait=False, cancel_futures=True)
        self._runner.close()
        self.step_model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _generate(self, text: Any, call: Call, since: float | None = None) -> Any:
        if since is not None:
            call = replace(call, waited=time.perf_counter() - since)
        one = isinstance(text, Text)
        sources = collect("text", [text] if one else text, lambda item: self._reader.text(item, call))
        generations = self._runner.answers(sources, call.options)
        return generations[0] if one else generations

    def _defaults(self, given: dict[str, Any]) -> dict[str, Any]:
        """The bundle's defaults for the options that were not given and do not contradict those that were."""
        generation = self.bundle.manifest.generation
        samples = given.get("sampling_topk", 1) != 1
        defaults = {
            "max_decoding_length": generation.max_length,
            "beam_size": 1 if samples else generation.beam_size,
            "length_penalty": generation.length_penalty,
            **generation.options,
        }
        return {name: value for name, value in defaults.items() if name not in given}

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("the model is closed", "load the bundle again")
