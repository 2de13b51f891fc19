"""The front door: sources in, results out, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tfm_export.bundle import SpecialIds
from tfm_export.decoding.alternatives import alternatives
from tfm_export.decoding.engine import decode
from tfm_export.decoding.options import DecodeOptions
from tfm_export.decoding.result import Request, Result, merged
from tfm_export.runtime.step_model import StepModel


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
