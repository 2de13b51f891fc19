"""The front door: sources in, results out, in their order; or the tokens of one as they come."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tfm_export.bundle import SpecialIds
from tfm_export.decoding.alternatives import alternatives
from tfm_export.decoding.checks import check_requests
from tfm_export.decoding.options import DecodeOptions
from tfm_export.decoding.request import Request, SettledToken
from tfm_export.decoding.result import Result, merged
from tfm_export.decoding.session import DecodingSession, decode_each
from tfm_export.errors import RequestError
from tfm_export.runtime.step_model import StepModel


def generate(
    model: StepModel,
    sources: Sequence[Sequence[int] | Request],
    options: DecodeOptions,
    special: SpecialIds,
    *,
    checked: bool = False,
) -> list[Result]:
    """Decode sources.

    They are decoded in batches, the longest first; a result does not depend on who else is in the batch.

    >>> from tfm_export.decoding import DecodeOptions, generate
    >>> sources, special = [model.encode_text(text).ids for text in ("hello", "a")], model.bundle.manifest.special_ids
    >>> [len(result.tokens) for result in generate(model.step_model, sources, DecodeOptions(), special)]
    [4, 1]

    Args:
        model: what runs the steps.
        sources: ids of each, exactly as the encoder gets them, or a `Request`.
        options: how to decode.
        special: the model's ids that are not text.
        checked: the caller knows already that the model can serve the sources.

    Returns:
        A result for each source, in their order.

    Raises:
        RequestError: the model cannot serve a source or an option; all that is wrong, before anything is decoded.
    """
    requests = [source if isinstance(source, Request) else Request(source=source) for source in sources]
    if not checked:
        check_requests(model, requests, options, special)
    if options.return_alternatives:
        return alternatives(model, requests, options, special)
    return _raised(_generate_each(model, requests, options, special))


def generate_each(
    model: StepModel, requests: Sequence[Request], options: DecodeOptions, special: SpecialIds
) -> list[Result | Exception]:
    """Decode requests that were checked: a result for each, or the exception of its own constraint or callback."""
    if options.return_alternatives:
        return [*alternatives(model, requests, options, special)]
    return _generate_each(model, requests, options, special)


def _generate_each(
    model: StepModel, requests: Sequence[Request], options: DecodeOptions, special: SpecialIds
) -> list[Result | Exception]:
    draws = options.num_hypotheses if options.samples else 1
    if draws == 1:
        return decode_each(model, requests, options, special)
    drawn = decode_each(model, [replace(r, draw=d) for r in requests for d in range(draws)], options, special)
    found: list[Result | Exception] = []
    for place in range(0, len(drawn), draws):
        several = drawn[place : place + draws]
        problem = next((one for one in several if isinstance(one, Exception)), None)
        found.append(problem or merged([one for one in several if isinstance(one, Result)]))
    return found


def _raised(results: Sequence[Result | Exception]) -> list[Result]:
    """The results, unless one is an exception: that is raised."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return [result for result in results if isinstance(result, Result)]


def stream(
    model: StepModel, request: Request, options: DecodeOptions, special: SpecialIds, *, checked: bool = False
) -> Iterator[SettledToken | Result]:
    """Decode one source and tell its tokens as soon as they can no longer change.

    Greedy search and sampling settle a token a step; a beam search settles what all its live and finished hypotheses
    begin with. Closing the iterator ends the search.

    >>> from tfm_export.decoding import DecodeOptions, Request, stream
    >>> request, special = Request(source=model.encode_text("hello").ids), model.bundle.manifest.special_ids
    >>> *tokens, result = stream(model.step_model, request, DecodeOptions(), special)
    >>> [token.token for token in tokens] == result.tokens
    True

    Args:
        model: what runs the steps.
        request: the source, and what is its own among the options.
        options: how to decode.
        special: the model's ids that are not text.
        checked: the caller knows already that the model can serve the source.

    Yields:
        The tokens of the best hypothesis, in order, then the result.

    Raises:
        RequestError: the model cannot serve the request, or the options make several searches of it.
    """
    if options.return_alternatives or (options.samples and options.num_hypotheses > 1):
        raise RequestError("a stream follows one search; these options make several of one source")
    if not checked:
        check_requests(model, [request], options, special)
    settled: list[SettledToken] = []

    def keep(tokens: list[SettledToken]) -> bool:
        settled.extend(tokens)
        return bool(request.on_tokens and request.on_tokens(tokens))

    told = 0
    with DecodingSession(model, options, special) as session:
        session.add(replace(request, on_tokens=keep))
        while session.pending:
            answers = session.step()
            told += len(settled)
            yield from settled
            settled.clear()
            for _, result in answers:
                if isinstance(result, Exception):
                    raise result
                # Of a beam search that a callback ended, the best hypothesis goes on behind what had settled.
                rest = slice(told, None)
                log_probs = result.hypotheses[0].log_probs or [math.nan] * len(result.tokens)
                yield from map(SettledToken, result.tokens[rest], log_probs[rest])
                yield result
