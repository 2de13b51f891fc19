"""The options of a request: the library's, by their names, as far as a client of a server may choose them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tfm_export.decoding import DecodeOptions
from tfm_export.quotation import quote
from tfm_export.serve.limits import Refusal, RequestLimits

# Options that are Python functions, that make answers of another form, or that shape the batches of others.
NOT_OF_CLIENTS = {
    "constraint",
    "return_attention",
    "return_logits_vocab",
    "return_scores",
    "replace_unknowns",
    "max_batch_size",
    "batch_type",
}
OF_OPTIONS = tuple(field.name for field in fields(DecodeOptions) if field.name not in NOT_OF_CLIENTS)
# Settings of calls, with the JSON types of their values.
OF_CALLS: dict[str, tuple[type, ...]] = {
    "deadline": (int, float),
    "long_source": (str,),
    "source_language": (str,),
    "target_language": (str,),
    "special_tokens": (str,),
    "priority": (int,),
}
IGNORED = {"binary_data_output", "stream", "sequence_id", "sequence_start", "sequence_end", "timeout"}
BEAMS = ("beam_size", "num_hypotheses")


def request_settings(given: Mapping[str, Any], limits: RequestLimits) -> tuple[dict[str, Any], int]:
    """The settings of `Model.generate_async` that a client has chosen, and the priority of its texts.

    Args:
        given: the request's parameters.
        limits: of the server.

    Raises:
        Refusal: one is unknown or not allowed; all that is wrong. What its value means is checked by the library.
    """
    problems = [
        f"parameter {quote(name)} is unknown; known are {', '.join((*OF_OPTIONS, *OF_CALLS))}"
        for name in given
        if name not in OF_OPTIONS and name not in OF_CALLS and name not in IGNORED
    ]
    settings = {name: value for name, value in given.items() if name not in IGNORED}
    for name, types in OF_CALLS.items():
        if name in settings and (isinstance(settings[name], bool) or not isinstance(settings[name], types)):
            problems.append(f"{name} must be a {types[-1].__name__}, found {quote(settings[name])}")
    for name in BEAMS:
        value = settings.get(name)
        if isinstance(value, int) and value > limits.hypotheses:
            problems.append(f"{name} must be at most {limits.hypotheses} here, found {value}")
    if problems:
        raise Refusal(400, problems)
    settings["deadline"] = min(settings.get("deadline", limits.seconds), limits.seconds)
    return settings, settings.pop("priority", 0)
