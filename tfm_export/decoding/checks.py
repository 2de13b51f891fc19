"""What decoding refuses: options that a model cannot serve, and requests that it cannot serve under them.

Requests are checked once, where they come in: by `generate`, `stream` and `score` for those who use decoding by itself,
and by `tfm_export.Model` for those who use that. Sessions below trust them; a runtime still makes sure that nothing
reaches beyond its memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence

from tfm_export.bundle import SpecialIds
from tfm_export.decoding.options import DecodeOptions, pairs
from tfm_export.decoding.request import Request, target_beginning
from tfm_export.errors import RequestError
from tfm_export.graph import DECODER_STEP_ATTENTION, Dimensions
from tfm_export.runtime.step_model import StepModel

FEW_TOKENS, SURELY_THERE = 4, 1e9  # a target that is begun at least; bytes that are not asked for
NO_ATTENTION = f"a bundle that has {DECODER_STEP_ATTENTION}: tfm-export onnx CHECKPOINT --attention"


def longest_target(model: StepModel, options: DecodeOptions) -> int:
    """Tokens of the longest target, of a model that can serve these options."""
    return options.max_decoding_length or _most(model, options)


def check_options(model: StepModel, options: DecodeOptions, special: SpecialIds, *, offered: bool = False) -> None:
    """Refuse options that a model cannot serve.

    Args:
        model: what is to decode.
        options: how.
        special: the model's ids that are not text.
        offered: there is, or will be, another model for options that need attention.

    Raises:
        RequestError: naming all that is wrong.
    """
    attends = offered or model.capabilities.gives_attention
    problems = [
        f"{name} needs attention weights, which this model's decoder step does not give"
        for name in ([] if attends else options.attention_options)
    ]
    if problems := [*problems, *_options_beyond_model(model, options, special)]:
        raise RequestError(problems, NO_ATTENTION if options.needs_attention and not attends else None)
    if problem := _beyond_memory(model.dimensions, options.beam_size, longest_target(model, options)):
        raise RequestError(problem, "a smaller beam_size")


def check_requests(model: StepModel, requests: Sequence[Request], options: DecodeOptions, special: SpecialIds) -> None:
    """Refuse options and requests that a model cannot serve.

    >>> from tfm_export.decoding import DecodeOptions, Request, check_requests
    >>> sources, special = ([11, 8, 2], [11, 999]), model.bundle.manifest.special_ids
    >>> try:
    ...     check_requests(model.step_model, [Request(source=ids) for ids in sources], DecodeOptions(), special)
    ... except tfm_export.RequestError as error:
    ...     print(error)
    source 1 has ids that the vocabulary of 30 lacks: 999

    Raises:
        RequestError: naming all that is wrong, and which request it is of.
    """
    check_options(model, options, special)
    if problems := [p for i, r in enumerate(requests) for p in request_problems(model, r, options, f"source {i}")]:
        raise RequestError(problems)


def request_problems(model: StepModel, request: Request, options: DecodeOptions, name: str) -> Iterator[str]:
    """Why a model cannot serve a request.

    Args:
        model: what is to decode.
        request: a source and what is its own.
        options: how to decode; those that the model can serve.
        name: what the source is called in what is told.
    """
    yield from source_problems(model, request.source, name)
    begin, longest = target_beginning(request, options), longest_target(model, options)
    name = f"target_prefix of {name}"
    start = () if request.start_token is None else (request.start_token,)
    yield from ids_beyond(name, (*begin, *start), model.dimensions.target_vocabulary_size)
    if len(begin) + options.return_alternatives >= longest:
        yield f"{name} has {len(begin)} tokens: of the {longest} of a target none is left to search for"
    if options.forced_bos is not None and request.forced_bos is None and len(begin) > 1:
        yield f"{name} and forced_bos both say how the target begins: give one"


def source_problems(model: StepModel, source: Sequence[int], name: str) -> Iterator[str]:
    """Why a model cannot take a source of this name."""
    limit = model.limits.max_source_length
    if not len(source):
        yield f"{name} is empty: the encoder needs at least one token"
    if len(source) > limit:
        yield f"{name} has {len(source)} tokens; the model takes at most {limit}"
    yield from ids_beyond(name, source, model.dimensions.source_vocabulary_size)


def ids_beyond(name: str, ids: Sequence[int], size: int) -> Iterator[str]:
    """Which ids a vocabulary lacks."""
    if wrong := sorted({int(i) for i in ids if not 0 <= i < size}):
        yield f"{name} has ids that the vocabulary of {size} lacks: {', '.join(map(str, wrong))}"


def _most(model: StepModel, options: DecodeOptions) -> int:
    start = len(options.start_tokens) if options.start_tokens else 1
    return model.limits.max_target_length - start + 1


def _beyond_memory(dimensions: Dimensions, width: int, longest: int) -> str | None:
    """Why this machine cannot even begin a sentence with so many beams; None if it can."""
    tokens = min(FEW_TOKENS, longest)
    slot = 2 * dimensions.decoder_layers * dimensions.heads * dimensions.head_size * 4
    # The caches, and the mask of which slots each beam sees, which is there twice.
    needed = width * tokens * slot + 2 * width * width * tokens
    if needed <= SURELY_THERE or needed <= (there := _memory_bytes()):
        return None
    return (
        f"beam_size is {width}: targets of {tokens} tokens need {needed / 1e9:,.0f} GB a sentence, "
        f"and this machine has {there / 1e9:,.0f} GB"
    )


def _memory_bytes() -> float:
    """Of the machine; infinite where it does not tell."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return math.inf


def _options_beyond_model(model: StepModel, options: DecodeOptions, special: SpecialIds) -> Iterator[str]:
    size, limit = model.dimensions.target_vocabulary_size, _most(model, options)
    if options.max_decoding_length is not None and options.max_decoding_length > limit:
        yield f"max_decoding_length is {options.max_decoding_length}; the model's targets have at most {limit} tokens"
    if options.min_decoding_length > limit:
        yield f"min_decoding_length is {options.min_decoding_length}; the model's targets have at most {limit} tokens"
    if options.sampling_topk > size:
        yield f"sampling_topk is {options.sampling_topk}, the vocabulary has {size} tokens"
    named: dict[str, Sequence[int]] = {
        "end_token": options.end_ids(special),
        "start_tokens": options.start_tokens or (),
        "begin_suppress_tokens": options.begin_suppress_tokens,
    }
    named["suppress_sequences"] = [i for sequence in options.suppress_sequences for i in sequence]
    named["sequence_bias"] = [i for sequence, _ in pairs(options.sequence_bias) for i in sequence]
    for name in ("forced_bos", "forced_eos"):
        named[name] = () if getattr(options, name) is None else (getattr(options, name),)
    for name, ids in named.items():
        yield from ids_beyond(name, ids, size)
    sources = model.dimensions.source_vocabulary_size
    for name in options.source_options if sources > size else ():
        yield f"{name} needs one vocabulary: sources have {sources} tokens, targets have {size}"
    if options.disable_unk and special.unk is None:
        yield "disable_unk: this model's vocabulary has no unknown token"
