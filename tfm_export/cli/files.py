"""Lines in and out: standard streams or files of any size."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

import click

from tfm_export.cli.resume import record_path
from tfm_export.errors import RequestError


def file_bytes(file: BinaryIO) -> int | None:
    """The size of a file on disk; None for a pipe or a terminal."""
    try:
        return os.fstat(file.fileno()).st_size or None
    except OSError:  # a stream in memory
        return None


def refuse_to_replace(*paths: Path | None, force: bool) -> None:
    """Make sure that nothing will be lost.

    Raises:
        RequestError: naming the files that are there already.
    """
    found = [path for path in paths if path is not None and os.path.isfile(path) and not force]
    if found:
        raise RequestError([f"{path} exists already" for path in found], "--force to replace it")


def partial_path(path: Path) -> Path:
    """Where a file is written until it is whole; beside the file itself where `path` is a link to it."""
    path = path.resolve() if path.is_symlink() else path
    return path.with_name(path.name + ".partial")


@contextmanager
def output_file(
    path: Path | None, *, append: bool = False, is_whole: Callable[[], bool] = lambda: True
) -> Iterator[TextIO]:
    """A file to write lines to: standard output, or a path at which the file appears once it is whole.

    Until then it is `partial_path`, which stays, with the lines that are done, if the work is cut short, or does not
    come to its end. What is not a file, such as a pipe or /dev/null, is written to as it stands.

    Args:
        path: of the file; None for standard output.
        append: go on with what an earlier run left at `partial_path`.
        is_whole: asked at the end, whether the work has come to its own.

    Raises:
        RequestError: the file cannot be written.
    """
    if path is None:
        yield sys.stdout
        return
    special = is_special(path)
    partial = path if special else partial_path(path)
    try:
        file = partial.open("a" if append else "w", encoding="utf-8", newline="\n")
    except OSError as problem:
        raise RequestError(f"{partial} cannot be written: {problem.strerror}", "another file with -o") from problem
    if special:
        with file:
            yield file
        return
    try:
        with file:
            yield file
    except BaseException:
        _tell_of_partial(partial)
        raise
    if not is_whole():
        _tell_of_partial(partial)
        return
    partial.replace(path.resolve() if path.is_symlink() else path)
    record_path(partial).unlink(missing_ok=True)


def is_special(path: Path) -> bool:
    """Whether this is there and is not a file, but a pipe or a device."""
    return os.path.exists(path) and not os.path.isfile(path)


def _tell_of_partial(partial: Path) -> None:
    if partial.stat().st_size:
        click.echo(f"what was done is in {partial}", err=True)
    else:
        partial.unlink()
        record_path(partial).unlink(missing_ok=True)
