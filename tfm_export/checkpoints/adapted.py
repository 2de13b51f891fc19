"""Reading a checkpoint with an adapter: code of the user's makes the model, and what it makes is checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfm_export.bundle import GenerationDefaults
from tfm_export.checkpoints.adapter import Adapter, AdapterConfig
from tfm_export.checkpoints.answers import answered
from tfm_export.checkpoints.files import read_contents
from tfm_export.checkpoints.partial import DECODING, GIVEN, Fact, value_problems
from tfm_export.checkpoints.settings import SETTINGS, check_settings, how_to_say
from tfm_export.checkpoints.source_model import SourceModel
from tfm_export.checkpoints.special_ids import ROLES, SPECIAL_IDS, make_special_ids, told_sources, told_target
from tfm_export.checkpoints.vocabularies import assumed_splits, given_tokens, given_vocabulary
from tfm_export.checkpoints.wrapping import find_weights
from tfm_export.errors import CheckpointError

# Makes the adapter of a checkpoint's path.
Factory = Callable[[Path], Adapter]
NEEDED = ("pad", "bos", "eos")
OF_TOKENS = tuple(
    f"{side}_{kind}" for side in ("source", "target") for kind in ("tokens", "dictionary", "subwords", "split")
)
TAKEN = (*SPECIAL_IDS, *DECODING, *OF_TOKENS, "dictionary_format", "lowercase")


def read_weights(path: str | Path, place: str | None = None) -> dict[str, Tensor]:
    """The weights of a checkpoint by name, read without executing anything, for an adapter to load.

    Args:
        path: the file, or a folder of Hugging Face.
        place: where in the file they are, such as "ema"; where they usually are by default.

    Raises:
        CheckpointError: the file is missing, damaged, unsafe, or holds no weights.
    """
    return find_weights(read_contents(Path(path)).state, place).tensors


def read_adapter(path: str | Path, factory: Factory, settings: Mapping[str, Any] | None = None) -> SourceModel:
    """The model that a factory makes of a checkpoint, checked.

    Args:
        path: of the checkpoint; the factory reads it.
        factory: code of the user's.
        settings: the special ids, the tokens, and decoding defaults.

    Raises:
        CheckpointError: naming all that does not fit.
    """
    path, given = Path(path), check_settings(settings or {}, "the settings")
    if not path.exists():
        raise CheckpointError(f"{path} does not exist", "check the path")
    told = _told_ids(given)
    known = {**{name: i for name, (i, _) in told.items()}, **given}
    adapter = factory(path)
    if not isinstance(adapter, Adapter):
        raise CheckpointError(
            f"the adapter's function gave {type(adapter).__name__}; expected a tfm_export.export.Adapter",
            "examples/custom_model shows one",
        )
    if (problems := [*_setting_problems(known, adapter.config)]) or (problems := _weight_problems(adapter)):
        raise CheckpointError([f"{path}: {problem}" for problem in problems], _hint(known))
    notes = [*_as_float32(adapter), *(f"{name} is {i}: {origin}" for name, (i, origin) in told.items())]
    if problems := _shape_problems(adapter):
        raise CheckpointError(
            [f"{path}: {problem}" for problem in problems], "docs/checkpoints.md tells what is expected"
        )
    if not adapter.has_decode:
        notes.append("the adapter has no decode of its own: the graphs were held to its decode_step in PyTorch")
    notes += assumed_splits(given)
    config: Any = adapter.config
    tokenizer, said = given_vocabulary(path, given, config, "lines")
    return SourceModel(
        path=path,
        model=adapter,
        special_ids=make_special_ids(known),
        generation=GenerationDefaults(max_length=config.max_target_length, **_chosen(given, *DECODING)),
        tokenizer=tokenizer,
        settings=given,
        notes=[*notes, *said],
        answers=answered({name: Fact(given[name], GIVEN) for name in SPECIAL_IDS if name in given}, given, GIVEN),
    )


def _told_ids(given: dict[str, Any]) -> dict[str, tuple[int | None, str]]:
    """The special ids that dictionaries tell where the settings do not, by name, and where they come from."""
    tokens = given_tokens(given, "lines")
    told: dict[str, tuple[int | None, str]] = {}
    for role in ROLES:
        if role not in given and (of_target := told_target(role, tokens)):
            told[role] = of_target
    known = {**{name: i for name, (i, _) in told.items()}, **given}
    return told | {name: fact for name, fact in told_sources(known, tokens).items() if name not in given}


def _setting_problems(given: dict[str, Any], config: AdapterConfig) -> list[str]:
    problems = [f"{name} has no effect on an adapter" for name in given if name not in TAKEN]
    problems += [f"{name} is missing: {SETTINGS[name].question}" for name in NEEDED if name not in given]
    return [*problems, *value_problems(config, _chosen(given, *SPECIAL_IDS, *DECODING))]


def _chosen(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: given[name] for name in names if name in given}


def _hint(given: dict[str, Any]) -> str:
    missing = " ".join(how_to_say(name) for name in NEEDED if name not in given)
    return missing or "docs/checkpoints.md tells what an adapter takes"


def _weight_problems(adapter: Adapter) -> list[str]:
    weights = dict(adapter.named_parameters())
    elsewhere = {name: str(w.device) for name, w in weights.items() if w.device.type != "cpu"}
    return [
        *(f"{name} is on the device {device}; expected the CPU" for name, device in elsewhere.items()),
        *(
            f"{name} has numbers that are not finite"
            for name, weight in weights.items()
            if name not in elsewhere and not bool(weight.isfinite().all())
        ),
    ]


def _as_float32(adapter: Adapter) -> list[str]:
    """Put it in float32 and evaluation mode."""
    types = {str(w.dtype).removeprefix("torch.") for w in adapter.parameters() if w.is_floating_point()} - {"float32"}
    adapter.float().eval()
    return [f"weights stored as {name} are computed with in float32" for name in sorted(types)]


@torch.inference_mode()
def _shape_problems(adapter: Adapter) -> list[str]:
    """Run its parts once on a little batch, and look at what they give."""
    config = adapter.config
    batch, source, target = 2, min(5, config.max_length), min(3, config.max_target_length)
    source_mask = torch.ones(batch, source, dtype=torch.bool)
    memory: Any = adapter.encode(torch.zeros(batch, source, dtype=torch.long), source_mask)
    if not isinstance(memory, Tensor) or memory.shape[:2] != (batch, source):
        return [f"encode must give the memory [B, S, M] of [{batch}, {source}] ids, found {_shape(memory)}"]
    problems = []
    cross = adapter.cross_keys_values(memory)
    if len(cross) != config.decoder_layers:
        return [f"cross_keys_values must give {config.decoder_layers} pairs, one a decoder layer; found {len(cross)}"]
    target_ids = torch.zeros(batch, target, dtype=torch.long)
    logits, cache = adapter.decode_with_cache(target_ids, memory, source_mask)
    for name, layers, length in (("cross_keys_values", cross, source), ("cache.update", cache, target)):
        expected = (batch, config.heads, length, config.head_size)
        problems += [
            f"{name}: layer {i} has a {part} of shape {_shape(tensor)}; expected [B, H, length, D], {list(expected)}"
            for i, pair in enumerate(layers)
            for part, tensor in zip(("key", "value"), pair, strict=True)
            if tensor.shape != expected
        ]
    results = {"decode_step": logits, "decode": adapter.decode(target_ids, memory, source_mask)}
    wanted = (batch, target, config.target_vocabulary_size)
    for name, found in results.items():
        if found.shape != wanted or found.dtype != torch.float32:
            problems.append(f"{name} must give float32 logits [B, Q, V], {list(wanted)}; found {_shape(found)}")
    return problems


def _shape(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
