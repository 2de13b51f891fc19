"""The loaded model: decodes, scores and streams, for one caller or many."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, overload

from tfm_export.bundle import DEFAULT_PATH, TOKENIZER, Bundle
from tfm_export.decoding import DecodeOptions, Request, SettledToken, score
from tfm_export.decoding.result import Cancellation
from tfm_export.errors import RequestError, TfmExportError
from tfm_export.graph import GENERATE
from tfm_export.model.answers import Generation, IdsResult, Pending, Piece, Stream
from tfm_export.model.requests import Call, Either, LongSource, Source, SourceReader, TextRequest, collect
from tfm_export.model.runner import OnError, Runner, ids_result
from tfm_export.runtime.backends import Backend, BackendChoice, DeviceName, backend_choices, open_backend
from tfm_export.runtime.step_model import StepModel
from tfm_export.runtime.threads import usable_cpus
from tfm_export.tokenizer import Tokenizer, load_tokenizer

Text = str | TextRequest
Ids = Sequence[int] | Request
Raise = Literal["raise"]
Yield = Literal["yield"]


class Model:
    """A model in service. Safe to use from several threads, which share one copy of the weights.

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
        self._reader = SourceReader(bundle, tokenizer)
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

        Args:
            text: a source text or a sequence of them; as a `TextRequest` where it has options of its own.
            **settings: see `call`.

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

        Args:
            text: see `generate`.
            **settings: see `call`; the time that the call waits for a thread is taken off its deadline.

        Returns:
            What can be awaited, waited for and cancelled, and gives what `generate` does.

        Raises:
            RequestError: an option that the model cannot serve; what is wrong with a text comes with the answer.
        """
        call, given_up = self.call(**settings), threading.Event()
        call = replace(call, cancelled=Either(call.cancelled, given_up))
        with self._lock:
            self._check_open()
            if self._workers is None:
                self._workers = ThreadPoolExecutor(usable_cpus(), thread_name_prefix="tfm-export")
            return Pending(self._workers.submit(self._generate, text, call), given_up)

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

        Args:
            texts: see `generate`; read a window at a time.
            on_error: "raise" the error of a text in its place, or "yield" it there and go on.
            window: texts read and sorted by length at once; None for 16 batches of each worker.
            workers: how many threads decode, each batches of its own.
            **settings: see `call`.

        Returns:
            A generation, or an error, for each text, in order.

        Raises:
            RequestError: an option that the model cannot serve.
        """
        call = self.call(**settings)
        prepare, answer = self._reader.text_request, self._runner.generation
        return self._runner.iterate(texts, prepare, answer, call, window=window, workers=workers, on_error=on_error)

    def stream(self, text: Text, **settings: Any) -> Stream[Piece, Generation]:
        """Decode one text and give its tokens as soon as they can no longer change.

        >>> for piece in model.stream("hello"):  # doctest: +SKIP
        ...     print(piece.text, end="", flush=True)

        Args:
            text: see `generate`.
            **settings: see `call`.

        Returns:
            An iterator over pieces, whose texts together are the generation's; `answer` holds that at the end.

        Raises:
            RequestError: see `generate`.
        """
        call = self.call(**settings)
        if call.options.replace_unknowns:
            raise RequestError("replace_unknowns needs the whole target: a stream cannot have it")
        return Stream(self._runner.pieces(self._reader.text_request(text, call), call))

    def score(
        self,
        texts: Sequence[str],
        targets: Sequence[str],
        *,
        add_end_token: bool = True,
        max_batch_size: int = 32,
        long_source: LongSource = "refuse",
    ) -> list[list[float]]:
        """How likely targets are.

        Args:
            texts: source texts.
            targets: a target text for each.
            add_end_token: score the end token after each target, too.
            max_batch_size: pairs at once.
            long_source: see `call`.

        Returns:
            For each pair, the log-probability of every token of the target.

        Raises:
            RequestError: a pair that the model cannot serve; all that is wrong, before anything runs.
        """
        self._check_open()
        if len(texts) != len(targets):
            raise RequestError(f"there must be a target for each text, found {len(texts)} and {len(targets)}")

        def encode(pair: tuple[str, str]) -> tuple[list[int], list[int]]:
            return self.encode_text(pair[0], long_source=long_source).ids, self._reader.target(pair[1])

        pairs = collect("pair", zip(texts, targets, strict=True), encode)
        sources, wanted = [source for source, _ in pairs], [target for _, target in pairs]
        return self.score_ids(sources, wanted, add_end_token=add_end_token, max_batch_size=max_batch_size)

    # Ids in, ids out.

    def generate_ids(self, sources: Sequence[Ids], **settings: Any) -> list[IdsResult]:
        """Decode sources given as ids, exactly what the encoder gets: nothing is appended.

        Args:
            sources: the ids of each, or a `Request` where it has options of its own.
            **settings: see `call`.

        Returns:
            A result for each source, in order.

        Raises:
            RequestError: see `generate`.
            NumericError: see `generate`.
        """
        call = self.call(**settings)
        prepared = collect("source", sources, lambda ids: self._reader.ids_request(ids, call))
        return self._runner.answers(prepared, ids_result, call)

    @overload
    def generate_ids_iterable(
        self, sources: Iterable[Ids], *, on_error: Raise = "raise", **settings: Any
    ) -> Iterator[IdsResult]: ...

    @overload
    def generate_ids_iterable(
        self, sources: Iterable[Ids], *, on_error: Yield, **settings: Any
    ) -> Iterator[IdsResult | TfmExportError]: ...

    def generate_ids_iterable(
        self,
        sources: Iterable[Ids],
        *,
        on_error: OnError = "raise",
        window: int | None = None,
        workers: int = 1,
        **settings: Any,
    ) -> Iterator[IdsResult | TfmExportError]:
        """Decode a stream of sources of ids; see `generate_iterable` and `generate_ids`."""
        call = self.call(**settings)
        prepare = self._reader.ids_request
        return self._runner.iterate(
            sources, prepare, ids_result, call, window=window, workers=workers, on_error=on_error
        )

    def stream_ids(self, source: Ids, **settings: Any) -> Stream[SettledToken, IdsResult]:
        """Decode one source of ids and give its tokens as soon as they can no longer change; see `stream`."""
        call = self.call(**settings)
        return Stream(self._runner.tokens(self._reader.ids_request(source, call), call))

    def score_ids(
        self,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        *,
        add_end_token: bool = True,
        max_batch_size: int = 32,
    ) -> list[list[float]]:
        """How likely targets given as ids are, without start and end token; see `score`."""
        self._check_open()
        special = self.bundle.manifest.special_ids
        return score(
            self.step_model, sources, targets, special, max_batch_size=max_batch_size, add_end_token=add_end_token
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

        Args:
            options: how to decode, all of it.
            long_source: "refuse" sources longer than the model takes, or "truncate" them, which the answer tells; the
                end token is kept.
            deadline: seconds after which a source gives what it has; they count from its admission to a batch.
            cancelled: a `threading.Event` or the like, asked before every step; once it is set, sources give what they
                have.
            **option_fields: see `decode_options`.

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

        Args:
            options: all of them, or None.
            **option_fields: fields of `DecodeOptions`; the bundle's defaults hold for the others. target_prefix and
                suppress_sequences may be text.

        Raises:
            RequestError: both were given, they are not valid, or a target would be longer than the model makes.
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
        limit = self.step_model.limits.max_target_length
        if options.max_decoding_length is not None and options.max_decoding_length > limit:
            raise RequestError(
                f"max_decoding_length is {options.max_decoding_length}; the model's targets have at most {limit} tokens"
            )
        return options

    def encode_text(self, text: str, *, long_source: LongSource = "refuse") -> Source:
        """The ids that the encoder gets for a text.

        Args:
            text: a source text.
            long_source: see `call`.

        Raises:
            RequestError: the bundle has no tokenizer, or the text is empty, unknown to it, or too long.
        """
        return self._reader.text(text, long_source=long_source)

    def check_ids(self, ids: Iterable[int], *, long_source: LongSource = "refuse") -> Source:
        """Make sure that the model can take a source.

        Args:
            ids: of the source.
            long_source: see `call`.

        Raises:
            RequestError: they are not integers, out of range, none, or too many.
        """
        return self._reader.ids(ids, long_source=long_source)

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _generate(self, text: Any, call: Call) -> Any:
        one = isinstance(text, Text)
        prepared = collect("text", [text] if one else text, lambda item: self._reader.text_request(item, call))
        generations = self._runner.answers(prepared, self._runner.generation, call)
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


def _files_used(bundle: Bundle, ways: Iterable[BackendChoice]) -> list[str]:
    """The files of a bundle that ways to run it read: a service waits until their hashes are known."""
    folders = [
        folder
        for way in ways
        for folder in ([f"onnx/{of}/" for of in way.variants] if way.engine is None else [f"engines/{way.engine}/"])
    ]
    used = (f"{TOKENIZER}/", *folders)
    return [n for n in bundle.manifest.files if n.startswith(used) and not n.endswith(f"/{GENERATE}")]


def load(
    path: str | Path = DEFAULT_PATH,
    *,
    backend: Backend = "auto",
    device: DeviceName = None,
    variant: str | None = None,
    draft: str | None = None,
    threads: int | None = None,
    check_hashes: bool = True,
) -> Model:
    """Load a bundle on the first backend that runs here; `tfm_export.runtime.backends` has the order.

    Args:
        path: the bundle's folder.
        backend: "onnxruntime" or "tensorrt" for no other; "auto" for any.
        device: the number of a GPU, or "cuda:0", or "cpu", for no other; None for any.
        variant: the precision. None is fp32 with ONNX Runtime, and an engine of any precision. "auto" is the fastest
            that was made for a CPU, by the speeds that the bundle records (`Bundle.fastest_variant`), or an engine.
        draft: another precision that guesses the next tokens of greedy search and sampling: the same tokens sooner,
            where a step of up to 4 sentences costs what reading the weights costs. Only the CPU is left then. See
            docs/decoding.md.
        threads: threads to compute with on a CPU; None for the CPUs this process may use.
        check_hashes: read every file that may be used and compare its hash with the manifest's; of all others, and
            otherwise, only sizes are compared.

    Raises:
        BackendUnavailable: a library, a driver or a GPU is missing; it says which, and what to do.
        BundleError: it is not a bundle, is damaged or of a newer format, or has no such variant.
        RequestError: an argument means nothing, or threads is less than 1.
    """
    bundle = Bundle.open(path, check_hashes=False)
    if check_hashes:
        ways = backend_choices(bundle, backend=backend, device=device, variant=variant, draft=draft)
        bundle.check(_files_used(bundle, ways))
    tokenizer = load_tokenizer(bundle)
    chosen, step_model = open_backend(
        bundle, backend=backend, device=device, variant=variant, draft=draft, threads=threads
    )
    return Model(bundle, step_model, tokenizer, backend=str(chosen))
