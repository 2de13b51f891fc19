"""A bundle, loaded: text in and text out, or ids in and ids out.

>>> import tfm_export
>>> with tfm_export.load("tfm_bundle") as model:  # doctest: +SKIP
...     print(model.generate("hello").text)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

from tfm_export.bundle import DEFAULT_PATH, Bundle
from tfm_export.decoding import DecodeOptions, Hypothesis, Result, Statistics, generate
from tfm_export.errors import RequestError
from tfm_export.runtime.step_model import StepModel
from tfm_export.tokenizer import Tokenizer, load_tokenizer

LongSource = Literal["refuse", "truncate"]
LONG_SOURCE = ("refuse", "truncate")

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Source:
    """What the encoder gets for one source.

    Attributes:
        ids: within the model's vocabulary and no longer than it takes.
        truncated: tokens were cut off at the end.
    """

    ids: list[int]
    truncated: bool = False


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What a model made of one text.

    Attributes:
        texts: the text of each hypothesis, the best first.
        hypotheses: tokens and scores, the best first.
        source_truncated: the source was longer than the model takes and was cut, as the caller wished.
        statistics: what it cost.
    """

    texts: list[str]
    hypotheses: list[Hypothesis]
    source_truncated: bool
    statistics: Statistics

    @property
    def text(self) -> str:
        """The best hypothesis as text."""
        return self.texts[0]

    @property
    def tokens(self) -> list[int]:
        """The target ids of the best hypothesis."""
        return self.hypotheses[0].tokens

    @property
    def score(self) -> float:
        """The score of the best hypothesis."""
        return self.hypotheses[0].score


class Model:
    """A model in service. Safe to use from several threads, which share one copy of the weights.

    Attributes:
        bundle: where it comes from.
        step_model: the backend.
        tokenizer: None if the bundle has none; then only ids go in and out.
    """

    def __init__(self, bundle: Bundle, step_model: StepModel, tokenizer: Tokenizer | None) -> None:
        self.bundle, self.step_model, self.tokenizer = bundle, step_model, tokenizer
        self._closed = False

    @overload
    def generate(
        self,
        text: str,
        *,
        options: DecodeOptions | None = ...,
        long_source: LongSource = ...,
        **option_fields: Any,
    ) -> Generation: ...

    @overload
    def generate(
        self,
        text: Sequence[str],
        *,
        options: DecodeOptions | None = ...,
        long_source: LongSource = ...,
        **option_fields: Any,
    ) -> list[Generation]: ...

    def generate(
        self,
        text: str | Sequence[str],
        *,
        options: DecodeOptions | None = None,
        long_source: LongSource = "refuse",
        **option_fields: Any,
    ) -> Generation | list[Generation]:
        """Decode one text, or many.

        Args:
            text: a source text or a sequence of them.
            options: how to decode, all of it.
            long_source: "refuse" sources longer than the model takes, or "truncate" them, which the result tells; the
                end token is kept.
            **option_fields: fields of `DecodeOptions`; the bundle's defaults hold for the others.

        Returns:
            A generation for a text, or a list of them, in order, for a sequence.

        Raises:
            RequestError: a text or an option that the model cannot serve; all that is wrong, before anything runs.
            NumericError: the model gave a number that is not finite.
        """
        self._check_open()
        texts = [text] if isinstance(text, str) else text
        sources = _collect("text", texts, lambda one: self.encode_text(one, long_source=long_source))
        results = self._run(sources, self.decode_options(options, **option_fields))
        generations = [self._generation(s, r) for s, r in zip(sources, results, strict=True)]
        return generations[0] if isinstance(text, str) else generations

    def generate_ids(
        self,
        sources: Sequence[Sequence[int]],
        *,
        options: DecodeOptions | None = None,
        long_source: LongSource = "refuse",
        **option_fields: Any,
    ) -> list[Result]:
        """Decode sources given as ids, exactly what the encoder gets: nothing is appended.

        Args:
            sources: the ids of each.
            options: see `generate`.
            long_source: see `generate`; those longer than `bundle.manifest.limits.max_source_length` are meant.
            **option_fields: see `generate`.

        Returns:
            A result for each source, in order.

        Raises:
            RequestError: see `generate`.
            NumericError: see `generate`.
        """
        self._check_open()
        checked = _collect("source", sources, lambda ids: self.check_ids(ids, long_source=long_source))
        return self._run(checked, self.decode_options(options, **option_fields))

    def decode_options(self, options: DecodeOptions | None = None, **option_fields: Any) -> DecodeOptions:
        """The options that a request is decoded with.

        Args:
            options: all of them, or None.
            **option_fields: fields of `DecodeOptions`; the bundle's defaults hold for the others.

        Raises:
            RequestError: both were given, they are not valid, or a target would be longer than the model makes.
        """
        if options is not None and option_fields:
            raise RequestError(f"options were given, and {', '.join(option_fields)} beside them: give one or the other")
        if options is None:
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
            long_source: see `generate`.

        Raises:
            RequestError: the bundle has no tokenizer, or the text is empty, unknown to it, or too long.
        """
        if self.tokenizer is None:
            raise RequestError(
                f"{self.bundle.path} has no tokenizer: it takes ids, not text",
                "generate_ids (--ids on the command line)",
            )
        if not isinstance(text, str):
            raise RequestError(f"a text must be a str, found {type(text).__name__}", "generate_ids for ids")
        return self.check_ids(self.tokenizer.encode_source(text), long_source=long_source)

    def check_ids(self, ids: Iterable[int], *, long_source: LongSource = "refuse") -> Source:
        """Make sure that the model can take a source.

        Args:
            ids: of the source.
            long_source: see `generate`.

        Raises:
            RequestError: they are not integers, out of range, none, or too many.
        """
        if long_source not in LONG_SOURCE:
            raise RequestError(f"long_source must be one of {', '.join(LONG_SOURCE)}, found {long_source!r}")
        try:
            ids = [operator.index(i) for i in ids]
        except TypeError as problem:
            raise RequestError(f"ids must be integers: {problem}") from None
        if not ids:
            raise RequestError("the source is empty: the encoder needs at least one token")
        size = self.step_model.dimensions.source_vocabulary_size
        if wrong := sorted({i for i in ids if not 0 <= i < size}):
            raise RequestError(f"ids must be from 0 to {size - 1}, found {', '.join(map(str, wrong))}")
        limit = self.step_model.limits.max_source_length
        if len(ids) <= limit:
            return Source(ids=ids)
        if long_source == "refuse":
            raise RequestError(
                f"the source has {len(ids)} tokens; the model takes at most {limit}",
                "long_source='truncate' (--long-source truncate) to cut it, or split the text",
            )
        special = self.bundle.manifest.special_ids
        keeps_end = special.source_ends_with_eos and ids[-1] == special.eos
        return Source(ids=[*ids[: limit - 1], special.eos] if keeps_end else ids[:limit], truncated=True)

    def warm_up(self) -> None:
        """Run the graphs once, so that the first request does not pay for what they set up on their first run."""
        self._check_open()
        length = min(8, self.step_model.limits.max_source_length)
        longest = min(2, self.step_model.limits.max_target_length)
        self.generate_ids([[0] * length], options=DecodeOptions(max_decoding_length=longest))

    def close(self) -> None:
        """Free the model. Requests that are being decoded in other threads come to their end; new ones are refused."""
        self._closed = True
        self.step_model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, sources: list[Source], options: DecodeOptions) -> list[Result]:
        return generate(self.step_model, [s.ids for s in sources], options, self.bundle.manifest.special_ids)

    def _generation(self, source: Source, result: Result) -> Generation:
        assert self.tokenizer is not None  # the source came from it
        return Generation(
            texts=[self.tokenizer.decode_target(hypothesis.tokens) for hypothesis in result.hypotheses],
            hypotheses=result.hypotheses,
            source_truncated=source.truncated,
            statistics=result.statistics,
        )

    def _defaults(self, given: dict[str, Any]) -> dict[str, Any]:
        """The bundle's defaults for the options that were not given and do not contradict those that were."""
        generation = self.bundle.manifest.generation
        samples = given.get("sampling_topk", 1) != 1
        defaults = {
            "max_decoding_length": generation.max_length,
            "beam_size": 1 if samples else generation.beam_size,
            "length_penalty": generation.length_penalty,
        }
        return {name: value for name, value in defaults.items() if name not in given}

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("the model is closed", "load the bundle again")


def load(
    path: str | Path = DEFAULT_PATH, *, threads: int | None = None, check_hashes: bool = True, variant: str = "fp32"
) -> Model:
    """Load a bundle on this machine's CPU.

    Args:
        path: the bundle's folder.
        threads: threads to compute with; None for the CPUs this process may use.
        check_hashes: read every file and compare its hash with the manifest's; otherwise only sizes are compared.
        variant: the precision, a folder under onnx/.

    Raises:
        BackendUnavailable: ONNX Runtime is missing or too old.
        BundleError: it is not a bundle, is damaged or of a newer format, or has no such variant.
        RequestError: threads is less than 1.
    """
    from tfm_export.runtime.onnx_runtime import OnnxModel

    bundle = Bundle.open(path, check_hashes=check_hashes)
    tokenizer = load_tokenizer(bundle)
    return Model(bundle, OnnxModel(bundle, variant=variant, threads=threads), tokenizer)


def _collect(name: str, items: Iterable[_T], encode: Callable[[_T], Source]) -> list[Source]:
    """Encode every item; one error for all that cannot be encoded, which says which they are if there are several."""
    items, sources, errors = list(items), [], []
    for number, item in enumerate(items):
        try:
            sources.append(encode(item))
        except RequestError as error:
            errors.append((number, error))
    if not errors:
        return sources
    if len(items) == 1:
        raise errors[0][1]
    problems = [f"{name} {number}: {problem}" for number, error in errors for problem in error.problems]
    raise RequestError(problems, errors[0][1].hint)
