"""Reading files that may be anything: nothing in them is executed, and every refusal says why."""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from tfm_export.errors import CheckpointError


def load_weights_only(path: Path) -> Any:
    """The contents of a file that torch.save wrote, if they are tensors, numbers, strings and containers.

    Raises:
        CheckpointError: there is no such file, it is damaged or something else, or it wants code to be executed.
    """
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; expected a checkpoint file", "name the .pt file in it")
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist", "check the path")
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} is empty", "copy it again")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as problem:
        raise _refusal(path, str(problem)) from problem
    # torch.load raises whatever its reader stumbles over in a damaged file.
    except (RuntimeError, EOFError, KeyError, IndexError, ValueError, TypeError, AttributeError, OSError) as problem:
        raise CheckpointError(
            f"{path} is damaged or not a PyTorch checkpoint: {_first_line(problem)}",
            "copy it again and compare its size and hash with the original's",
        ) from problem


def _refusal(path: Path, message: str) -> CheckpointError:
    needs = re.findall(r"(?:GLOBAL|global) ([\w.]+)", message)
    if needs:
        return CheckpointError(
            f"{path} is a pickle that needs {', '.join(sorted(set(needs)))}; loading it could run code: refused",
            "save the weights alone: torch.save(model.state_dict(), ...) or reference_model.save_checkpoint",
        )
    return CheckpointError(
        f"{path} is not a PyTorch checkpoint: {_first_line(message)}", "expected a file written by torch.save"
    )


def _first_line(problem: object) -> str:
    lines = str(problem).strip().splitlines()
    return lines[0] if lines else type(problem).__name__
