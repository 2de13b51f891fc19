"""The front door: sources in, results out, in their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from tfm_export.bundle import SpecialIds
from tfm_export.decoding.alternatives import alternatives
from tfm_export.decoding.engine import decode
from tfm_export.decoding.options import DecodeOptions
from tfm_export.decoding.result import Request, Result, merged
from tfm_export.runtime.step_model import StepModel

# Sources are sorted by length within so many batches.
BATCHES_AHEAD = 16


def generate(
    model: StepModel, sources: Sequence[Sequence[int] | Request], options: DecodeOptions, special: SpecialIds
) -> list[Result]:
    """Decode sources.

    They are decoded in batches, the longest first; a result does not depend on who else is in the batch.

    Args:
        model: what runs the steps.
        sources: ids of each, exactly as the encoder gets them, or a `Request`.
        options: how to decode.
        special: the model's ids that are not text.

    Returns:
        A result for each source, in their order.

    Raises:
        RequestError: the model cannot serve a source or an option; all that is wrong, before anything is decoded.
    """
    requests = [source if isinstance(source, Request) else Request(source=source) for source in sources]
    if options.return_alternatives:
        return alternatives(model, requests, options, special)
    draws = options.num_hypotheses if options.samples else 1
    drawn = decode(model, [replace(r, draw=d) for r in requests for d in range(draws)], options, special)
    return [merged(drawn[i : i + draws]) for i in range(0, len(drawn), draws)]


def generate_iterable(
    model: StepModel, sources: Iterable[Sequence[int] | Request], options: DecodeOptions, special: SpecialIds
) -> Iterator[Result]:
    """Decode a stream of sources of any length in constant memory.

    Args:
        model: what runs the steps.
        sources: as `generate` takes them; read a window at a time.
        options: how to decode.
        special: the model's ids that are not text.

    Yields:
        A result for each source, in their order.
    """
    sources = iter(sources)
    # Counted in tokens, a batch holds at least one source and at most as many as it holds tokens.
    window = BATCHES_AHEAD * options.max_batch_size if options.batch_type == "examples" else 32 * BATCHES_AHEAD
    while some := list(islice(sources, window)):
        yield from generate(model, some, options, special)
