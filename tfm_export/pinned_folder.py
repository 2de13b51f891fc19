"""Reading the files of one folder, while its name may come to lead to another; files whose names are not UTF-8.

Services are updated by renaming folders and by flipping links. Whoever reads several files by name may then get some
of the old folder and some of the new one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DATA = "..data"  # in a volume of Kubernetes: the link that an update flips; all the others lead through it


@contextmanager
def pinned_folder(path: Path) -> Iterator[Path]:
    """A path that leads to the same folder as long as the block runs, whatever becomes of the folder's name.

    It is for opening files, not for messages. Where the system has no such paths, it is the folder's path without
    links; whoever needs to be sure there compares `stamp`s of what was opened. If there is no such folder, or none
    that can be opened, it is `path`.

    Args:
        path: of the folder.
    """
    place = Path(os.path.realpath(path / DATA if os.path.lexists(path / DATA) else path))
    try:
        descriptor = os.open(place, getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0))
    except OSError:
        yield path
        return
    try:
        link = Path(f"/proc/self/fd/{descriptor}")
        yield link if link.is_dir() else place
    finally:
        os.close(descriptor)


@contextmanager
def utf8_path(path: Path) -> Iterator[Path]:
    """A path to the same file that libraries take which want UTF-8, as long as the block runs.

    Raises:
        OSError: the file cannot be opened.
    """
    if str(path).encode(errors="ignore").decode() == str(path):
        yield path
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        link = Path(f"/proc/self/fd/{descriptor}")
        yield link if link.exists() else path
    finally:
        os.close(descriptor)


def stamp(status: os.stat_result) -> tuple[int, ...]:
    """What tells a file from others, and from itself before it was written to.

    The time of its last change of any kind is no part of that: a hard link to a file changes it.
    """
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
