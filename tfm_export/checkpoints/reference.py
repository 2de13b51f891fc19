"""Checkpoints that `reference_model.save_checkpoint` wrote: they say everything themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from torch import Tensor

from reference_model import TransformerConfig
from reference_model.checkpoint import FORMAT, FORMAT_VERSION, GenerationDefaults, SpecialIds
from tfm_export.checkpoints.files import Contents
from tfm_export.checkpoints.key_map import KeyMap, refuse
from tfm_export.checkpoints.partial import PartialCheckpoint
from tfm_export.checkpoints.settings import setting_problem
from tfm_export.checkpoints.vocabularies import SIDES, token_problems, vocabulary_files
from tfm_export.quotation import quote

HINT = "save it again with reference_model.save_checkpoint"
DICTIONARIES = ("config", "weights", "special_ids", "generation", "training")
PARTS = {"format_version": int, "vocabularies": list, **dict.fromkeys(DICTIONARIES, dict)}
# The parts that are plain values, each with what it becomes.
RECORDS = {"config": TransformerConfig, "special_ids": SpecialIds, "generation": GenerationDefaults}
VOCABULARY = ("tokens", "split", "lowercase")


def read(contents: Contents, settings: Mapping[str, Any]) -> PartialCheckpoint | None:
    """What such a file tells; None if it is another one.

    Raises:
        CheckpointError: naming every part and value that is missing, or is not of the type that it should have.
    """
    state = contents.state
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        return None
    if problems := [*_part_problems(state)] or [*_value_problems(state)]:
        raise refuse(contents.path, problems, HINT)
    weights = state["weights"]
    keys = KeyMap(weights, placed=dict(weights), used={*weights})
    found = PartialCheckpoint(contents.path, "a checkpoint of reference_model", keys, {}, hint=HINT)
    found.training = state["training"]
    if settings:
        found.problems.append(f"it says everything itself: leave out {', '.join(settings)}, which would have no effect")
    for part, name, value in _values(state):
        found.know("generation_length" if (part, name) == ("generation", "max_length") else name, value, f"its {part}")
    for name, value in {"unk": None, "source_starts_with_bos": False}.items():
        found.know(name, value, "the format")
    longest, length = found.value("longest_target") or found.value("max_length"), found.value("generation_length")
    if not 1 <= length <= longest:
        found.problems.append(
            f"generation max_length {length} is not in 1..{longest}, the length of the position table"
        )
    sides = {}
    for side, vocabulary in zip(SIDES, filter(None, state["vocabularies"]), strict=False):
        found.problems += token_problems(side, vocabulary["tokens"], found.value(f"{side}_vocabulary_size"))
        sides[side] = {name: vocabulary[name] for name in VOCABULARY}
    found.tokenizer = vocabulary_files(sides) if sides else {}
    return found


def _part_problems(state: Mapping[str, Any]) -> Iterator[str]:
    for part, kind in PARTS.items():
        if part not in state:
            yield f"it has no {part}"
        elif not isinstance(state[part], kind):
            yield f"{part} must be of type {kind.__name__}, found {type(state[part]).__name__}"


def _values(state: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Each value of a record, as part, name and value; what an older file does not have is the default, or None."""
    for part, record in RECORDS.items():
        for field in fields(record):
            default = None if field.default is MISSING else field.default
            yield part, field.name, state[part].get(field.name, default)


def _value_problems(state: Mapping[str, Any]) -> Iterator[str]:
    """Values of another type than a checkpoint has: a number in quotes, or a tensor, may pass for what it is not."""
    if state["format_version"] > FORMAT_VERSION:
        yield f"expected format_version {FORMAT_VERSION} or older, found {state['format_version']}"
    for part, name, value in _values(state):
        if problem := setting_problem(name, value):
            yield f"{part} {problem}"
    for part, record in RECORDS.items():
        yield from (
            f"{part} has no {quote(name)}" for name in state[part] if name not in {f.name for f in fields(record)}
        )
    if not all(isinstance(name, str) and isinstance(weight, Tensor) for name, weight in state["weights"].items()):
        yield "weights must be tensors by name"
    try:
        json.dumps(state["training"], ensure_ascii=False).encode()
    except (TypeError, ValueError) as problem:
        yield f"training must hold what JSON can: {problem}"
    yield from _vocabulary_problems(state["vocabularies"])


def _vocabulary_problems(vocabularies: list[Any]) -> Iterator[str]:
    if len(vocabularies) != len(SIDES):
        yield f"vocabularies must be two, found {len(vocabularies)}"
    elif len([v for v in vocabularies if v]) == 1:
        yield "it has a vocabulary for one side only"
    for side, vocabulary in zip(SIDES, vocabularies, strict=False):
        if vocabulary and not isinstance(vocabulary, dict):
            yield f"{side} vocabulary must be a dictionary, found {type(vocabulary).__name__}"
        elif vocabulary:
            for name in VOCABULARY:
                setting = name if name == "lowercase" else f"{side}_{name}"
                if problem := setting_problem(setting, vocabulary.get(name)):
                    yield problem
