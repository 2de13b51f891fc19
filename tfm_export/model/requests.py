"""What a model is asked: sources and targets as text or ids, checked and turned into what decoding takes."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from tfm_export.bundle import Bundle
from tfm_export.decoding import Constraint, DecodeOptions, Request, SettledToken
from tfm_export.decoding.result import Cancellation, check_ending
from tfm_export.errors import RequestError
from tfm_export.tokenizer import Tokenizer

LongSource = Literal["refuse", "truncate"]
LONG_SOURCE = ("refuse", "truncate")

ItemT = TypeVar("ItemT")
EncodedT = TypeVar("EncodedT")


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """A text and what is its own among the options; for ids it is `decoding.Request`.

    Attributes:
        text: the source.
        target_prefix: what the target begins with, as text or ids; None takes the options' prefix.
        constraint: see `decoding.Request`.
        seed: see `decoding.Request`.
        deadline: see `decoding.Request`; None takes the call's.
        cancelled: see `decoding.Request`; the call's counts too.
        on_tokens: see `decoding.Request`.
    """

    text: str
    target_prefix: str | Sequence[int] | None = None
    constraint: Constraint | None = None
    seed: int | None = None
    deadline: float | None = None
    cancelled: Cancellation | None = None
    on_tokens: Callable[[list[SettledToken]], bool | None] | None = None


@dataclass(frozen=True, kw_only=True)
class Source:
    """What the encoder gets for one source.

    Attributes:
        ids: within the model's vocabulary and no longer than it takes.
        truncated: tokens were cut off at the end.
    """

    ids: list[int]
    truncated: bool = False


class Either:
    """A cancellation that is set once one of several is."""

    def __init__(self, *parts: Cancellation | None) -> None:
        self._parts = [part for part in parts if part is not None]

    def is_set(self) -> bool:
        """Whether to stop."""
        return any(part.is_set() for part in self._parts)


@dataclass(frozen=True, kw_only=True)
class Call:
    """What holds for every source of a call.

    Attributes:
        options: how to decode.
        long_source: what to do with sources that are too long.
        deadline: see `decoding.Request`.
        cancelled: see `decoding.Request`.
        begin: when the call was made, on the clock of `time.perf_counter`.
    """

    options: DecodeOptions
    long_source: LongSource = "refuse"
    deadline: float | None = None
    cancelled: Cancellation | None = None
    begin: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        check_ending(self.deadline, self.cancelled)

    def request(self, request: Request) -> Request:
        """A request with the call's cancellation beside its own, and the call's deadline where it has none.

        The time since the call, such as that spent waiting for a thread, is taken off the deadline.
        """
        deadline = self.deadline if request.deadline is None else request.deadline
        if deadline is not None:
            deadline = max(deadline - (time.perf_counter() - self.begin), 0.0)
        both = Either(request.cancelled, self.cancelled) if request.cancelled and self.cancelled else None
        return replace(request, deadline=deadline, cancelled=both or request.cancelled or self.cancelled)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A source, ready to be decoded.

    Attributes:
        source: what the encoder gets.
        request: the same with its options.
        text: where it came from, if that is text.
    """

    source: Source
    request: Request
    text: str | None = None


class SourceReader:
    """Turns texts and ids into what a bundle's model takes.

    Args:
        bundle: with the model's sizes and limits.
        tokenizer: None if the bundle has none.
    """

    def __init__(self, bundle: Bundle, tokenizer: Tokenizer | None) -> None:
        self._path, self._manifest, self._tokenizer = bundle.path, bundle.manifest, tokenizer

    @property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer.

        Raises:
            RequestError: it has none.
        """
        if self._tokenizer is None:
            raise RequestError(
                f"{self._path} has no tokenizer: it takes ids, not text", "generate_ids (--ids on the command line)"
            )
        return self._tokenizer

    def text(self, text: str, *, long_source: LongSource) -> Source:
        """The ids of a source text; see `Model.encode_text`."""
        tokenizer = self.tokenizer
        _check_text(text)
        return self.ids(tokenizer.encode_source(text), long_source=long_source)

    def ids(self, ids: Iterable[int], *, long_source: LongSource) -> Source:
        """Ids that the model takes; see `Model.check_ids`."""
        if long_source not in LONG_SOURCE:
            raise RequestError(f"long_source must be one of {', '.join(LONG_SOURCE)}, found {long_source!r}")
        ids = _integers(ids)
        if not ids:
            raise RequestError("the source is empty: the encoder needs at least one token")
        size = self._manifest.dimensions.source_vocabulary_size
        if wrong := sorted({i for i in ids if not 0 <= i < size}):
            raise RequestError(f"ids must be from 0 to {size - 1}, found {', '.join(map(str, wrong))}")
        limit = self._manifest.limits.max_source_length
        if len(ids) <= limit:
            return Source(ids=ids)
        if long_source == "refuse":
            raise RequestError(
                f"the source has {len(ids)} tokens; the model takes at most {limit}",
                "long_source='truncate' (--long-source truncate) to cut it, or split the text",
            )
        special = self._manifest.special_ids
        keeps_end = special.source_ends_with_eos and ids[-1] == special.eos
        return Source(ids=[*ids[: limit - 1], special.eos] if keeps_end else ids[:limit], truncated=True)

    def target(self, target: str | Sequence[int]) -> list[int]:
        """The ids of a target, which decoding checks.

        Raises:
            RequestError: it is text and the bundle has no tokenizer, or it is not text, or has unknown tokens.
        """
        if not isinstance(target, str):
            return _integers(target)
        _check_text(target)
        return self.tokenizer.encode_target(target)

    def known_target(self, target: str | Sequence[int]) -> list[int]:
        """The ids of a target that decoding is to follow: text must not have unknown tokens.

        Raises:
            RequestError: see `target`.
        """
        ids, unk = self.target(target), self._manifest.special_ids.unk
        if isinstance(target, str) and unk in ids:
            raise RequestError(f"{target!r} has tokens that the model's targets do not have")
        return ids

    def text_request(self, item: str | TextRequest, call: Call) -> Prepared:
        """A text, ready to be decoded.

        Raises:
            RequestError: the model cannot take it.
        """
        asked = item if isinstance(item, TextRequest) else TextRequest(text=item)
        source = self.text(asked.text, long_source=call.long_source)
        request = Request(
            source=source.ids,
            target_prefix=None if asked.target_prefix is None else self.known_target(asked.target_prefix),
            constraint=asked.constraint,
            seed=asked.seed,
            deadline=asked.deadline,
            cancelled=asked.cancelled,
            on_tokens=asked.on_tokens,
        )
        return Prepared(source=source, request=call.request(request), text=asked.text)

    def ids_request(self, item: Sequence[int] | Request, call: Call) -> Prepared:
        """A source of ids, ready to be decoded.

        Raises:
            RequestError: the model cannot take it.
        """
        request = item if isinstance(item, Request) else Request(source=item)
        source = self.ids(request.source, long_source=call.long_source)
        return Prepared(source=source, request=call.request(replace(request, source=source.ids)))


def collect(name: str, items: Iterable[ItemT], encode: Callable[[ItemT], EncodedT]) -> list[EncodedT]:
    """Encode every item; one error for all that cannot be encoded, which says which they are if there are several.

    Raises:
        RequestError: some cannot be encoded, or there is no sequence of them.
    """
    if not isinstance(items, Iterable):
        raise RequestError(f"expected a {name}, or a sequence with a {name} each, found {items!r}")
    items, encoded, errors = list(items), [], []
    for number, item in enumerate(items):
        try:
            encoded.append(encode(item))
        except RequestError as error:
            errors.append((number, error))
    if not errors:
        return encoded
    if len(items) == 1:
        raise errors[0][1]
    problems = [f"{name} {number}: {problem}" for number, error in errors for problem in error.problems]
    raise RequestError(problems, errors[0][1].hint)


def _integers(ids: Iterable[int]) -> list[int]:
    if not isinstance(ids, Iterable):
        raise RequestError(f"ids must be integers, one for each token, found {ids!r}")
    ids = list(ids)
    if wrong := [i for i in ids if not hasattr(i, "__index__")]:
        raise RequestError(f"ids must be integers, found {', '.join(map(repr, wrong))}")
    return [operator.index(i) for i in ids]


def _check_text(text: str) -> None:
    """Refuse what is not text; bytes that Python could not decode arrive as lone surrogates."""
    if not isinstance(text, str):
        raise RequestError(f"a text must be a str, found {type(text).__name__}", "generate_ids for ids")
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        code = ord(text[problem.start])
        found = f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"code point U+{code:04X}"
        raise RequestError(f"the text is not UTF-8: {found} at place {problem.start}") from None
