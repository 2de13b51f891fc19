"""Reading other people's checkpoints: every format becomes a `SourceModel`, checked before anything is exported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfm_export.checkpoints.adapted import Factory, read_adapter, read_weights
from tfm_export.checkpoints.adapter import Adapter, AdapterConfig, Cache, attend, slot_positions
from tfm_export.checkpoints.files import read_contents
from tfm_export.checkpoints.partial import Fact, PartialCheckpoint
from tfm_export.checkpoints.recognise import recognise_checkpoint
from tfm_export.checkpoints.settings import check_settings, read_settings
from tfm_export.checkpoints.source_model import SourceModel
from tfm_export.checkpoints.told import settings_of

__all__ = [
    "Adapter",
    "AdapterConfig",
    "Cache",
    "Fact",
    "Factory",
    "PartialCheckpoint",
    "SourceModel",
    "attend",
    "inspect_checkpoint",
    "read_adapter",
    "read_checkpoint",
    "read_settings",
    "read_weights",
    "settings_of",
    "slot_positions",
]


def read_checkpoint(path: str | Path, settings: Mapping[str, Any] | None = None) -> SourceModel:
    """Read a checkpoint of any known format.

    Args:
        path: the file, or a folder with a configuration and weights. Nothing in it is executed: only tensors, numbers,
            strings and containers are read.
        settings: what the file does not say, by the names of `settings.SETTINGS`.

    Raises:
        CheckpointError: the file is missing, damaged, unsafe, of no known format, or does not describe a whole model.
    """
    return inspect_checkpoint(path, settings).finish()


def inspect_checkpoint(path: str | Path, settings: Mapping[str, Any] | None = None) -> PartialCheckpoint:
    """What a checkpoint tells, whole or not.

    Raises:
        CheckpointError: the file is missing, damaged, unsafe or of no known format.
    """
    given = check_settings(settings or {}, "the settings")
    return recognise_checkpoint(read_contents(Path(path)), given)
