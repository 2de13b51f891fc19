"""Reading files that may be anything: nothing in them is executed, and every refusal says why."""

from __future__ import annotations

import pickle
import pickletools
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from tfm_export.errors import CheckpointError

MOST_PICKLE_BYTES = 16_000_000  # of a pickle that is only looked at to name what it needs


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
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="Detected pickle protocol"
            )  # what cannot be read is refused below
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
    classes = _classes_needed(path)
    if classes:
        return CheckpointError(
            f"{path} is a pickle that needs {', '.join(classes)}; loading it could run code: refused",
            "save the weights alone: torch.save(model.state_dict(), ...) or reference_model.save_checkpoint",
        )
    return CheckpointError(
        f"{path} is not a PyTorch checkpoint: {_first_line(message)}", "expected a file written by torch.save"
    )


def _classes_needed(path: Path) -> list[str]:
    """The functions and classes that a pickle names beyond those of tensors, read without executing any of it."""
    names: set[str] = set()
    strings: list[str] = []
    try:
        for opcode, argument, _ in pickletools.genops(_pickle_bytes(path)):
            if opcode.name == "GLOBAL":
                names.add(str(argument).replace(" ", "."))
            elif opcode.name == "STACK_GLOBAL":
                names.add(".".join(strings[-2:]))
            elif isinstance(argument, str):
                strings.append(argument)
    except (ValueError, KeyError, OSError, zipfile.BadZipFile):
        pass  # not a pickle to its end: what was found so far is told
    harmless = ("torch._utils._rebuild", "torch.Float", "torch.Half", "torch.BFloat16", "collections.OrderedDict")
    return sorted(name for name in names if not name.startswith(harmless))


def _pickle_bytes(path: Path) -> bytes:
    """The pickle in a file of torch.save, without the tensors' data; or the start of any other file."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
            with archive.open(name) as file:
                return file.read(MOST_PICKLE_BYTES)
    with open(path, "rb") as file:
        return file.read(MOST_PICKLE_BYTES)


def _first_line(problem: object) -> str:
    lines = str(problem).strip().splitlines()
    return lines[0] if lines else type(problem).__name__
