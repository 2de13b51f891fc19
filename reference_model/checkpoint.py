"""A trained model in one file: weights, configuration, vocabularies, special ids, generation defaults.

The file is read with `torch.load(weights_only=True)`: it holds tensors, numbers, strings, lists and dictionaries,
and nothing in it is ever executed.
"""

from __future__ import annotations

import copy
import os
import pickle
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from reference_model.config import TransformerConfig
from reference_model.model import Transformer
from reference_model.vocabulary import Vocabulary

FORMAT = "reference_model"
FORMAT_VERSION = 1
PARTS = ("format_version", "config", "weights", "vocabularies", "special_ids", "generation", "training")


@dataclass(frozen=True, kw_only=True)
class SpecialIds:
    """The ids that are not text. Both vocabularies use the same ones.

    Attributes:
        pad: fills the end of short sequences.
        bos: what the decoder starts from.
        eos: ends a target.
        source_ends_with_eos: the model was trained on sources that end with eos.
    """

    pad: int = 0
    bos: int = 1
    eos: int = 2
    source_ends_with_eos: bool = True


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """How the model is meant to be decoded.

    Attributes:
        max_length: the longest target, end token included.
        beam_size: hypotheses kept at each step; 1 is greedy.
        length_penalty: a hypothesis is ranked by its log-probability / length ** length_penalty.
    """

    max_length: int
    beam_size: int = 1
    length_penalty: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a checkpoint file holds. `training` tells where the weights come from: steps, losses, the command."""

    model: Transformer
    source_vocabulary: Vocabulary | None
    target_vocabulary: Vocabulary | None
    special_ids: SpecialIds
    generation: GenerationDefaults
    training: dict[str, Any] = field(default_factory=dict)


def write_atomically(state: dict[str, Any], path: Path) -> None:
    """`torch.save` to a temporary file beside `path`, then rename: the file is whole or is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def save_checkpoint(checkpoint: Checkpoint, path: str | Path, *, half: bool = False) -> None:
    """Write a checkpoint.

    Args:
        checkpoint: what to write.
        path: the file.
        half: store float weights in fp16, half the size; they are computed with in fp32 all the same.
    """
    model = copy.deepcopy(checkpoint.model).half() if half else checkpoint.model  # a copy keeps tied weights tied
    vocabularies = (checkpoint.source_vocabulary, checkpoint.target_vocabulary)
    state = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "config": asdict(checkpoint.model.config),
        "weights": model.state_dict(),
        "vocabularies": [v and {**asdict(v), "tokens": list(v.tokens)} for v in vocabularies],
        "special_ids": asdict(checkpoint.special_ids),
        "generation": asdict(checkpoint.generation),
        "training": checkpoint.training,
    }
    write_atomically(state, Path(path))


def read_file(path: str | Path) -> Any:
    """The contents of a file that `write_atomically` wrote.

    Raises:
        ValueError: it holds something else than tensors and plain values, which is not executed; or it is damaged.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    # In a file of another kind torch.load raises whatever its reader stumbles over.
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, TypeError, AttributeError) as problem:
        raise ValueError(
            "expected a file of tensors and plain values; it is damaged, or something else that is not read because "
            "reading it could execute code"
        ) from problem


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint, the model in fp32 and evaluation mode.

    Raises:
        ValueError: the file is something else, damaged, of a newer version, or lacks a part; or its configuration is
            wrong.
        RuntimeError: its weights do not fit its configuration.
    """
    return checkpoint_from_state(read_file(path))


def checkpoint_from_state(state: Any) -> Checkpoint:
    """The checkpoint that the contents of a file describe; raises as `load_checkpoint` does."""
    found = state.get("format") if isinstance(state, dict) else None
    if found != FORMAT:
        raise ValueError(f"expected a checkpoint with format {FORMAT!r}, found {found!r}")
    if missing := [name for name in PARTS if name not in state]:
        raise ValueError(f"the checkpoint lacks {', '.join(missing)}")
    if state["format_version"] > FORMAT_VERSION:
        raise ValueError(f"expected format_version {FORMAT_VERSION} or older, found {state['format_version']}")
    model = Transformer(TransformerConfig(**state["config"]))
    model.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in state["weights"].items()})
    source, target = (v and Vocabulary(tuple(v["tokens"]), v["split"], v["lowercase"]) for v in state["vocabularies"])
    return Checkpoint(
        model=model.eval(),
        source_vocabulary=source,
        target_vocabulary=target,
        special_ids=SpecialIds(**state["special_ids"]),
        generation=GenerationDefaults(**state["generation"]),
        training=state["training"],
    )
