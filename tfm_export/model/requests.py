"""What a model is asked: sources and targets as text or ids, checked and turned into what decoding takes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

from tfm_export.bundle import Bundle
from tfm_export.decoding import Constraint, DecodeOptions, Request, SettledToken
from tfm_export.decoding.checks import request_problems
from tfm_export.decoding.request import Cancellation, check_ending
from tfm_export.errors import RequestError
from tfm_export.quotation import quote
from tfm_export.runtime.step_model import StepModel
from tfm_export.tokenizer import Tokenizer
from tfm_export.tokenizer.languages import AS_IT_IS, Reading

LongSource = Literal["refuse", "truncate"]
LONG_SOURCE = ("refuse", "truncate")
SpecialTokens = Literal["read", "escape"]
SPECIAL_TOKENS = ("read", "escape")
MOST_CHARACTERS = 1000  # of a token, on the average of a text
SHORTER = "long_source='truncate' (--long-source truncate) to cut it, or split the text"

OF_TEXTS = {"text", "source_language", "target_language"}

ItemT = TypeVar("ItemT")
EncodedT = TypeVar("EncodedT")


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """A text and what is its own among the options.

    >>> from tfm_export import TextRequest
    >>> model.generate(["hello", TextRequest(text="hello", target_prefix="HH AH")])[1].text
    'HH AH L OW'

    Attributes:
        text: the source.
        target_prefix: what the target begins with, as text or ids; None takes the options' prefix.
        source_language: the language it is in, by its name or token; None takes the call's.
        target_language: the language to translate it to; None takes the call's.
        constraint: which tokens may follow what; None takes the options' constraint.
        seed: of this text's samples; None takes the options' seed.
        deadline: seconds after which it gives what it has; None takes the call's.
        admitted: the time on the clock of `time.perf_counter` from which its deadline counts; None is the moment when
            it joins a batch, so that no time counts in which it waits for others.
        cancelled: asked before every step, as the call's is; once either is set, the text gives what it has.
        on_tokens: called with the tokens that a step settled; True ends the text there.
        priority: of the texts that wait the highest joins a batch first.

    Raises:
        RequestError: deadline or cancelled is not of its type; of the others that is told when the text is decoded.
    """

    text: str
    target_prefix: str | Sequence[int] | None = None
    source_language: str | None = None
    target_language: str | None = None
    constraint: Constraint | None = None
    seed: int | None = None
    deadline: float | None = None
    admitted: float | None = None
    cancelled: Cancellation | None = None
    on_tokens: Callable[[list[SettledToken]], bool | None] | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        check_ending(self.deadline, self.cancelled)


@dataclass(frozen=True, kw_only=True)
class Source:
    """What the encoder gets for one source, and what it came from.

    >>> model.encode_text("ab").ids
    [4, 5, 2]

    Attributes:
        request: what decoding is asked for it; the model can serve it.
        text: where it came from, if that is text.
        truncated: tokens were cut off at the end.
        reading: how the text was read.
    """

    request: Request
    text: str | None
    truncated: bool
    reading: Reading = AS_IT_IS

    @property
    def ids(self) -> Sequence[int]:
        """The ids, within the model's vocabulary and no more than it takes."""
        return self.request.source


class Either:
    """A cancellation that is set once one of several is."""

    def __init__(self, *parts: Cancellation | None) -> None:
        self._parts = [part for part in parts if part is not None]

    def is_set(self) -> bool:
        """Whether to stop."""
        return any(part.is_set() for part in self._parts)


@dataclass(frozen=True, kw_only=True)
class Call:
    """What holds for every source of a call that has nothing of its own.

    Attributes:
        options: how to decode.
        long_source: what to do with sources that are too long.
        deadline: seconds after which a source gives what it has; they count from its joining a batch.
        ends_at: the time of `time.perf_counter` at which the budget of the whole call is over.
        cancelled: asked before every step, beside a source's own.
        admitted: when the call came, on the clock of `time.perf_counter`: deadlines count from then; None lets them
            count from when each source joins a batch.
        source_language: the language that texts are in.
        target_language: the language to translate them to.
        special_tokens: what becomes of special tokens that a text spells.
    """

    options: DecodeOptions
    long_source: LongSource = "refuse"
    deadline: float | None = None
    ends_at: float | None = None
    cancelled: Cancellation | None = None
    admitted: float | None = None
    source_language: str | None = None
    target_language: str | None = None
    special_tokens: SpecialTokens = "read"

    def __post_init__(self) -> None:
        check_ending(self.deadline, self.cancelled)
        if self.long_source not in LONG_SOURCE:
            raise RequestError(f"long_source must be one of {', '.join(LONG_SOURCE)}, found {quote(self.long_source)}")
        if self.special_tokens not in SPECIAL_TOKENS:
            found = quote(self.special_tokens)
            raise RequestError(f"special_tokens must be one of {', '.join(SPECIAL_TOKENS)}, found {found}")


class SourceReader:
    """Turns texts and ids into what a bundle's model takes: the one place where they are checked.

    Args:
        bundle: where the model comes from.
        model: with its sizes and limits.
        tokenizer: None if the bundle has none.
    """

    def __init__(self, bundle: Bundle, model: StepModel, tokenizer: Tokenizer | None) -> None:
        self._path, self._special = bundle.path, bundle.manifest.special_ids
        self._model, self._tokenizer = model, tokenizer

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

    def text(self, item: str | TextRequest | RequestError, call: Call) -> Source:
        """A text, ready to be decoded; an error in the place of one is raised.

        Raises:
            RequestError: the model cannot take it.
        """
        if isinstance(item, RequestError):
            raise item
        asked = item if isinstance(item, TextRequest) else TextRequest(text=item)
        if call.long_source == "refuse":
            _check_text(asked.text)
            self.refuse_endless(asked.text)
        prefix = None if asked.target_prefix is None else self.known_target(asked.target_prefix)
        reading = Reading(
            source_language=call.source_language if asked.source_language is None else asked.source_language,
            target_language=call.target_language if asked.target_language is None else asked.target_language,
            escape=call.special_tokens == "escape",
        )
        source = self._source(asked, asked.text, self.encode(asked.text, reading), prefix, call, reading)
        return replace(source, reading=reading)

    def ids(self, item: Iterable[int] | Request, call: Call) -> Source:
        """A source of ids, ready to be decoded.

        Raises:
            RequestError: the model cannot take it.
        """
        asked = item if isinstance(item, Request) else Request(source=_integers(item))
        if named := [n for n in ("source_language", "target_language") if getattr(call, n) is not None]:
            raise RequestError(
                f"{', '.join(named)}: ids are exactly what the encoder gets, and name no language",
                "forced_bos for the target's, which takes a token such as 'fra_Latn'",
            )
        return self._source(asked, None, _integers(asked.source), asked.target_prefix, call)

    def encode(self, text: str, reading: Reading = AS_IT_IS) -> list[int]:
        """The ids of a source text.

        Raises:
            RequestError: the bundle has no tokenizer, or the text is none, is empty or unknown to it.
        """
        tokenizer = self.tokenizer
        _check_text(text)
        return tokenizer.encode_source(text, reading)

    def refuse_endless(self, text: str) -> None:
        """Refuse a text by its length, before time is spent on its tokens.

        Raises:
            RequestError: it has so many characters that it surely has too many tokens.
        """
        most = self._model.limits.max_source_length * MOST_CHARACTERS
        if len(text) > most:
            raise RequestError(
                f"the text has {len(text):,} characters: more than {most:,} are more tokens than the model takes",
                SHORTER,
            )

    def cut(self, ids: list[int], long_source: LongSource) -> list[int]:
        """Ids without those that are too many, if they are to be cut; the end token is kept."""
        limit, special = self._model.limits.max_source_length, self._special
        if len(ids) <= limit or long_source == "refuse":
            return ids
        keeps_end = special.source_ends_with_eos and ids[-1] == special.for_sources.eos
        return [*ids[: limit - 1], ids[-1]] if keeps_end else ids[:limit]

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
            RequestError: it has, or is not a target at all.
        """
        ids, unk = self.target(target), self._special.unk
        if isinstance(target, str) and unk in ids:
            raise RequestError(f"{quote(target)} has tokens that the model's targets do not have")
        return ids

    def target_token(self, token: str, name: str) -> int:
        """The id of a token of targets, or of a language's.

        Raises:
            RequestError: there is none; the languages nearest to it are told.
        """
        found = self.tokenizer.target_id(token)
        if found is not None:
            return found
        start = self.tokenizer.begin_target(token)
        if (found := start.start if start.forced is None else start.forced) is None:
            raise RequestError(f"{name} {token!r} is no token of targets")
        return found

    def _source(
        self,
        asked: TextRequest | Request,
        text: str | None,
        ids: list[int],
        prefix: Sequence[int] | None,
        call: Call,
        reading: Reading = AS_IT_IS,
    ) -> Source:
        own: dict[str, Any] = {f.name: getattr(asked, f.name) for f in fields(asked) if f.name not in OF_TEXTS}
        if reading.target_language is not None:
            begin = self.tokenizer.begin_target(reading.target_language)
            own |= {"forced_bos": begin.forced, "start_token": begin.start}
        if own["deadline"] is None:
            own["deadline"] = call.deadline
        if asked.admitted is None:
            own["admitted"] = call.admitted
        if call.ends_at is not None:
            own["ends_at"] = call.ends_at
        if call.cancelled is not None:
            own["cancelled"] = Either(asked.cancelled, call.cancelled) if asked.cancelled else call.cancelled
        fitting = self.cut(ids, call.long_source)
        request = Request(**{**own, "source": fitting, "target_prefix": prefix})
        if problems := list(request_problems(self._model, request, call.options, "the source")):
            raise RequestError(problems, SHORTER if len(fitting) > self._model.limits.max_source_length else None)
        return Source(request=request, text=text, truncated=len(fitting) < len(ids))


def collect(name: str, items: Iterable[ItemT], encode: Callable[[ItemT], EncodedT]) -> list[EncodedT]:
    """Encode every item; one error for all that cannot be encoded, which says which they are if there are several.

    Raises:
        RequestError: some cannot be encoded, or there is no sequence of them.
    """
    given: object = items
    if isinstance(given, Mapping | bytes | str) or not isinstance(given, Iterable):
        raise RequestError(f"expected a {name}, or a sequence with a {name} each, found {quote(given)}")
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
        raise RequestError(f"ids must be integers, one for each token, found {quote(ids)}")
    ids = list(ids)
    if wrong := [i for i in ids if not hasattr(i, "__index__")]:
        raise RequestError(f"ids must be integers, found {', '.join(map(quote, wrong))}")
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
