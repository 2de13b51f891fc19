"""What costs seconds to make is made once, for all workers of a run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

Once = Callable[[str, Callable[[Path], object]], Path]


def shared_folder(config: pytest.Config, factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this run see, and no other run; without workers, this process's."""
    base = factory.getbasetemp()
    # Not the environment variable of pytest-xdist: a pytest that a test starts has that too, and is no worker.
    folder = (base.parent if hasattr(config, "workerinput") else base) / "once"
    folder.mkdir(exist_ok=True)
    return folder


def make_once(root: Path, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that the first to ask for it makes, while others wait.

    It is not renamed into place, because some things, virtual environments among them, hold their own path. Instead a
    file beside it says that it is whole: what a killed worker left behind lacks that, and is made anew.

    Args:
        root: see `shared_folder`.
        name: of the folder; one for each thing.
        make: fills the folder, which is there and empty.

    Returns:
        The folder. Do not change what is in it: copy it.
    """
    folder, whole = root / name, root / f"{name}.whole"
    with FileLock(root / f"{name}.lock"):
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            whole.touch()
    return folder
