"""Checkpoints that `reference_model.save_checkpoint` wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reference_model import Checkpoint, Transformer, TransformerConfig, Vocabulary
from reference_model import checkpoint as reference_checkpoint
from reference_model.checkpoint import FORMAT, checkpoint_from_state
from tfm_export.bundle import GenerationDefaults, SpecialIds
from tfm_export.checkpoints.key_map import MOST_POSITIONS, WEIGHT_TYPES, form
from tfm_export.checkpoints.settings import KINDS
from tfm_export.checkpoints.source_model import SourceModel
from tfm_export.checkpoints.vocabularies import vocabulary_files
from tfm_export.decoding import DecodeOptions
from tfm_export.errors import CheckpointError, RequestError

# The parts of a checkpoint that are plain values, each with what it becomes.
RECORDS = {
    "config": TransformerConfig,
    "special_ids": reference_checkpoint.SpecialIds,
    "generation": reference_checkpoint.GenerationDefaults,
}


def recognises(state: Any) -> bool:
    """Whether the contents of a file are such a checkpoint."""
    return isinstance(state, dict) and state.get("format") == FORMAT


def read(state: dict[str, Any], path: Path) -> SourceModel:
    """The model that such a checkpoint describes.

    Raises:
        CheckpointError: naming all that does not fit.
    """
    try:
        if problems := [*_value_problems(state)]:
            raise CheckpointError([f"{path}: {problem}" for problem in problems], "save the whole model again")
        config, weights = TransformerConfig(**state["config"]), state["weights"]
        problems = _weight_problems(config, weights)
        checkpoint = None if problems else checkpoint_from_state(state)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        kind = "has no field" if isinstance(problem, KeyError) else "does not fit its format:"
        raise CheckpointError(
            f"{path} {kind} {problem}", "save it again with reference_model.save_checkpoint"
        ) from None
    if checkpoint is not None:
        problems += _id_problems(checkpoint)
    if problems or checkpoint is None:
        raise CheckpointError([f"{path}: {problem}" for problem in problems], "save the whole model again")
    dtypes = sorted({str(w.dtype).removeprefix("torch.") for w in weights.values() if w.dtype != torch.float32})
    return SourceModel(
        path=path,
        model=checkpoint.model,
        special_ids=SpecialIds(**asdict(checkpoint.special_ids)),
        generation=GenerationDefaults(**asdict(checkpoint.generation)),
        tokenizer=_tokenizer(checkpoint.source_vocabulary, checkpoint.target_vocabulary),
        training=checkpoint.training,
        notes=[f"weights stored as {name} are computed with in float32" for name in dtypes],
    )


def _value_problems(state: dict[str, Any]) -> Iterator[str]:
    """Values of another type than a checkpoint has: a number in quotes, or a tensor, may pass for what it is not."""
    for part, record in RECORDS.items():
        for field in fields(record):
            kinds, expected = KINDS[str(field.type)]
            value = state[part].get(field.name, None if field.default is MISSING else field.default)
            if not isinstance(value, kinds) or isinstance(value, bool) != (kinds == (bool,)):
                yield f"{part} {field.name} must be {expected}, found {value!r}"
    try:
        json.dumps(state["training"], ensure_ascii=False).encode()
    except (TypeError, ValueError) as problem:
        yield f"training must hold what JSON can: {problem}"
    if not isinstance(state["training"], dict):
        yield f"training must be a dictionary, found {state['training']!r}"
    for side, vocabulary in zip(("source", "target"), state["vocabularies"], strict=True):
        wrong = [token for token in vocabulary["tokens"] if not _is_text(token)] if vocabulary else []
        yield from (f"{side} tokens must be strings, found {token!r}" for token in wrong)


def _is_text(token: Any) -> bool:
    """Whether it is a string without lone surrogates, which no file can hold."""
    return isinstance(token, str) and token.encode(errors="ignore").decode() == token


def _weight_problems(config: TransformerConfig, weights: Any) -> list[str]:
    """Compare the weights with the configuration without allocating what the configuration asks for."""
    if not isinstance(weights, dict) or not all(isinstance(w, Tensor) for w in weights.values()):
        return ["its weights are not a dictionary of tensors"]
    if config.encoder_layers + config.decoder_layers > len(weights):
        return [f"its configuration has more layers than the file has tensors ({len(weights)})"]
    for name in ("max_length", "longest_target"):
        if getattr(config, name) > MOST_POSITIONS:
            return [f"{name} {getattr(config, name)} is more than {MOST_POSITIONS}"]
    try:
        with torch.device("meta"):
            expected = {name: tuple(w.shape) for name, w in Transformer(config).state_dict().items()}
    except RuntimeError as problem:
        return [f"its configuration has sizes that no memory holds: {problem}"]
    problems = [f"missing: {name} {list(expected[name])}" for name in expected if name not in weights]
    problems += [f"unexpected: {name} {list(w.shape)}" for name, w in weights.items() if name not in expected]
    for name, weight in weights.items():
        if name in expected and tuple(weight.shape) != expected[name]:
            problems.append(f"{name}: expected shape {list(expected[name])}, found {list(weight.shape)}")
        elif weight.layout != torch.strided or weight.dtype not in WEIGHT_TYPES or weight.is_meta:
            problems.append(f"{name}: expected dense floating-point numbers, found {form(weight)}")
        elif count := int((~weight.float().isfinite()).sum()):
            problems.append(f"{name}: {count} of {weight.numel()} weights are not finite numbers in float32")
    return problems


def _id_problems(checkpoint: Checkpoint) -> list[str]:
    config, special = checkpoint.model.config, checkpoint.special_ids
    sizes = {"source": config.source_vocabulary_size, "target": config.target_vocabulary_size}
    problems = []
    for side, vocabulary in (("source", checkpoint.source_vocabulary), ("target", checkpoint.target_vocabulary)):
        if vocabulary is not None and len(vocabulary.tokens) != sizes[side]:
            problems.append(
                f"its {side} vocabulary has {len(vocabulary.tokens)} tokens, its embedding {sizes[side]} rows"
            )
    places = {"pad": ("source",), "bos": ("target",), "eos": ("source", "target")}
    for name, sides in places.items():
        value = getattr(special, name)
        problems += [f"{name} id {value} is outside the {s} vocabulary" for s in sides if not 0 <= value < sizes[s]]
    if (checkpoint.source_vocabulary is None) != (checkpoint.target_vocabulary is None):
        problems.append("it has a vocabulary for one side only")
    if not 1 <= checkpoint.generation.max_length <= config.max_target_length:
        problems.append(
            f"generation max_length {checkpoint.generation.max_length} is not in 1..{config.max_target_length}, "
            "the length of the position table"
        )
    try:
        generation = checkpoint.generation
        DecodeOptions(beam_size=generation.beam_size, length_penalty=generation.length_penalty)
    except RequestError as error:
        problems += [f"generation {problem}" for problem in error.problems]
    return problems


def _tokenizer(source: Vocabulary | None, target: Vocabulary | None) -> dict[str, bytes]:
    if source is None or target is None:
        return {}
    sides = {name: {**asdict(v), "tokens": list(v.tokens)} for name, v in (("source", source), ("target", target))}
    return vocabulary_files(sides)
