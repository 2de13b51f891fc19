"""Reading other people's checkpoints: every format becomes a `SourceModel`, checked before anything is exported."""

from __future__ import annotations

from pathlib import Path

from tfm_export.checkpoints import reference
from tfm_export.checkpoints.files import load_weights_only
from tfm_export.checkpoints.source_model import SourceModel
from tfm_export.errors import CheckpointError

__all__ = ["SourceModel", "read_checkpoint"]


def read_checkpoint(path: str | Path) -> SourceModel:
    """Read a checkpoint of any known format.

    Args:
        path: the file. It is never executed: only tensors, numbers, strings and containers are read from it.

    Raises:
        CheckpointError: the file is missing, damaged, unsafe, of no known format, or does not describe a whole model.
    """
    path = Path(path)
    state = load_weights_only(path)
    if reference.recognises(state):
        return reference.read(state, path)
    raise CheckpointError(
        f"{path} is not a checkpoint of a known format: expected one written by reference_model.save_checkpoint",
        "python -m reference_model.train writes such a file; load the weights into a reference_model.Transformer and "
        "use reference_model.save_checkpoint for a model trained elsewhere",
    )
