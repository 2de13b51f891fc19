"""Tokens as they come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tfm_export.bundle import SpecialIds
from tfm_export.decoding.engine import Engine
from tfm_export.decoding.options import DecodeOptions
from tfm_export.decoding.result import Request, Result, SettledToken
from tfm_export.errors import RequestError
from tfm_export.runtime.step_model import StepModel


def stream(
    model: StepModel, request: Request, options: DecodeOptions, special: SpecialIds
) -> Iterator[SettledToken | Result]:
    """Decode one source and tell its tokens as soon as they can no longer change.

    Greedy search and sampling settle a token a step; a beam search settles what all its live and finished hypotheses
    begin with. Closing the iterator ends the search.

    Args:
        model: what runs the steps.
        request: the source, and what is its own among the options.
        options: how to decode.
        special: the model's ids that are not text.

    Yields:
        The tokens of the best hypothesis, in order, then the result.

    Raises:
        RequestError: the model cannot serve the request, or the options make several searches of it.
    """
    if options.return_alternatives or (options.samples and options.num_hypotheses > 1):
        raise RequestError("a stream follows one search; these options make several of one source")
    settled: list[SettledToken] = []

    def keep(tokens: list[SettledToken]) -> bool:
        settled.extend(tokens)
        return bool(request.on_tokens and request.on_tokens(tokens))

    for done in Engine(model, options, special).run([replace(request, on_tokens=keep)]):
        yield from settled
        settled.clear()
        yield from (result for _, result in done)
