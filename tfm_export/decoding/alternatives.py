"""One hypothesis for each of the likeliest tokens at a place."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tfm_export.bundle import SpecialIds
from tfm_export.decoding.options import DecodeOptions
from tfm_export.decoding.request import Request, target_beginning
from tfm_export.decoding.result import Hypothesis, Reason, Result, merged
from tfm_export.decoding.session import decode
from tfm_export.errors import RequestError
from tfm_export.runtime.step_model import StepModel

GIVEN_UP = (Reason.DEADLINE, Reason.CANCELLED)  # before there was an alternative to go on from


def alternatives(
    model: StepModel, requests: Sequence[Request], options: DecodeOptions, special: SpecialIds
) -> list[Result]:
    """Go on from each of the num_hypotheses likeliest tokens after the forced prefix.

    Returns:
        For each request, hypotheses in the order of their alternatives' likelihood. The score of each is its
        alternative's log-probability and the score of what was searched for after it.

    Raises:
        RequestError: a request wants its tokens as they come, of several hypotheses at once.
    """
    if any(request.on_tokens is not None for request in requests):
        raise RequestError("on_tokens follows one hypothesis, return_alternatives makes several")
    requests = [replace(r, target_prefix=target_beginning(r, options), forced_bos=None) for r in requests]
    firsts = _first_tokens(model, requests, options, special)
    branches = [
        replace(request, target_prefix=first.tokens)
        for request, result in zip(requests, firsts, strict=True)
        if result.reason not in GIVEN_UP
        for first in result.hypotheses
    ]
    onward = replace(
        options,
        **_searched(options),
        num_hypotheses=1,
        length_formula="without_prefix",
        end_after_prefix="any_rank",
        begin_suppress_tokens=(),
    )
    rest = iter(decode(model, branches, onward, special))
    return [
        result
        if result.reason in GIVEN_UP
        else merged([_joined(first, next(rest)) for first in result.hypotheses], keep_order=True)
        for result in firsts
    ]


def _first_tokens(
    model: StepModel, requests: Sequence[Request], options: DecodeOptions, special: SpecialIds
) -> list[Result]:
    """The likeliest tokens after each prefix, as hypotheses that end with them."""
    same_length = defaultdict(list)
    for i, request in enumerate(requests):
        same_length[len(request.target_prefix or ())].append(i)
    results: dict[int, Result] = {}
    for length, group in same_length.items():
        one_more = replace(
            options,
            **_searched(options),
            beam_size=options.num_hypotheses,
            patience=1.0,
            length_penalty=0.0,
            coverage_penalty=0.0,
            return_attention=False,
            replace_unknowns=False,
            min_decoding_length=length + 1,
            max_decoding_length=length + 1,
            forced_eos=None,
            sampling_topk=1,
            sampling_topp=1.0,
            sampling_temperature=1.0,
            seed=None,
            return_scores=True,
        )
        results.update(zip(group, decode(model, [requests[i] for i in group], one_more, special), strict=True))
    return [_likely(results[i], options.min_alternative_expansion_prob) for i in range(len(requests))]


def _searched(options: DecodeOptions) -> dict[str, Any]:
    """The changes to options under which what comes after a prefix is searched for."""
    return {
        "return_alternatives": False,
        "min_alternative_expansion_prob": 0.0,
        "forced_bos": None,
        "target_prefix": (),
        "score_change": options.rules.score_change,
    }


def _likely(result: Result, least: float) -> Result:
    """The alternatives that are likely enough; the likeliest is kept in any case, so that there is an answer."""
    best, *others = result.hypotheses
    return replace(result, hypotheses=[best, *(h for h in others if math.exp((h.log_probs or [0.0])[-1]) >= least)])


def _joined(first: Hypothesis, onward: Result) -> Result:
    """A branch as if it had been searched for from its alternative on."""
    (rest,), place, log_prob = onward.hypotheses, len(first.tokens) - 1, first.rank
    log_probs = rest.log_probs and [*rest.log_probs[:place], log_prob, *rest.log_probs[place + 1 :]]
    return replace(onward, hypotheses=[replace(rest, score=rest.rank + log_prob, log_probs=log_probs)])
