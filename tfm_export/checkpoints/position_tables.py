"""Embeddings, projections and tables of positions: which are one, and whether a table is the paper's sinusoids."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from reference_model.model import sinusoid_table
from tfm_export.checkpoints.partial import PartialCheckpoint

DEFAULT_LENGTH = 512


def place_tables(
    found: PartialCheckpoint,
    *,
    embeddings: Mapping[str, str],
    projection: str,
    bias: str,
    positions: Mapping[str, str] | None,
) -> None:
    """Put embeddings, projection and tables of positions in their places, tied as the checkpoint says.

    Args:
        found: knows share_embeddings and tie_projection; gets to know positions and the longest sequences.
        embeddings: the file's name of each side's embedding.
        projection: the file's name of the projection's weight.
        bias: the file's name of the projection's bias, [V] or [1, V]; zero where the file has none.
        positions: the file's name of each side's table of positions; None where the caller places them.
    """
    keys, target = found.keys, embeddings["target"]
    places = {target: ["target_embedding.weight"]}
    if found.value("share_embeddings"):
        target = embeddings["source"]
        places = {target: ["source_embedding.weight", "target_embedding.weight"]}
        if embeddings["target"] != target:
            keys.ignore([embeddings["target"]], "the same as the source embedding")
    else:
        places[embeddings["source"]] = ["source_embedding.weight"]
    if not found.value("tie_projection"):
        places[projection] = ["projection.weight"]
    else:
        places[target].append("projection.weight")
        if projection not in embeddings.values() and projection not in keys.ignored:
            keys.ignore([projection], "the same as the target embedding")
    for key, names in places.items():
        keys.put(names, key)
    keys.bias("projection.bias", bias, Tensor.flatten)
    if positions is not None:
        place_positions(found, positions)


def place_positions(found: PartialCheckpoint, names: Mapping[str, str]) -> None:
    """Tell what kind of positions a model has by its tables, and put them in their places.

    Args:
        found: is asked for positions where there is no table.
        names: the file's name of each side's table; both sides may have the same.
    """
    keys = found.keys
    tables = {side: as_table(keys.tensors[name]) for side, name in names.items() if name in keys}
    if len(tables) < 2 or any(table is None for table in tables.values()):
        _ask_for_positions(found)
        return
    lengths = {side: len(table) for side, table in tables.items() if table is not None}
    if all(is_sinusoidal(table) for table in tables.values() if table is not None):
        found.infer("positions", "sinusoidal", "its table, which holds the paper's sinusoids")
        keys.ignore(names.values(), "computed anew: the paper's sinusoids")
    else:
        found.infer("positions", "learned", "its tables of positions")
        if names["source"] == names["target"]:
            keys.put(["source_positions.table", "target_positions.table"], names["source"], squeezed)
        else:
            for side, name in names.items():
                keys.put(f"{side}_positions.table", name, squeezed)
    found.infer("max_length", lengths["source"], "its table of positions")
    if lengths["target"] != lengths["source"]:
        found.infer("longest_target", lengths["target"], "its table of positions")


def _ask_for_positions(found: PartialCheckpoint) -> None:
    positions = found.ask("positions", "the file has no table of them: sinusoidal, or none")
    if positions == "learned":
        found.problems.append("positions cannot be learned: the file has no table of them that is not used otherwise")
    if positions is not None and "max_length" not in found.settings:
        found.know("max_length", DEFAULT_LENGTH, "the default")
        found.notes.append(f"max_length is {DEFAULT_LENGTH}, the default: the file does not say how long texts may be")


def as_table(tensor: Tensor) -> Tensor | None:
    """A table [rows, M] in any of its usual forms [rows, M], [1, rows, M], [rows, 1, M]; None for all others."""
    if tensor.dim() == 3 and 1 in tensor.shape[:2]:
        tensor = squeezed(tensor)
    return tensor if tensor.dim() == 2 and tensor.numel() else None


def squeezed(tensor: Tensor) -> Tensor:
    """[1, rows, M] and [rows, 1, M] -> [rows, M]."""
    if tensor.dim() != 3:
        return tensor
    return tensor[0] if tensor.size(0) == 1 else tensor[:, 0]


def is_sinusoidal(table: Tensor) -> bool:
    """Whether a table [rows, M] is the paper's, to the last bit; others are kept as they are."""
    rows, width = table.shape
    return width % 2 == 0 and table.dtype == torch.float32 and torch.equal(table, sinusoid_table(rows, width))
