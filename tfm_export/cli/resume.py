"""A long run that can go on where it stopped: what its output so far was made from, and how many lines are done."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from tfm_export.bundle import MANIFEST, file_hash, write_text
from tfm_export.decoding import DecodeOptions
from tfm_export.errors import RequestError
from tfm_export.text_files import read_text

AFRESH = "the same input and options, or begin again without --resume"
FILES = ("bundle", "input")
# How much is decoded at once changes no answer.
NOT_RECORDED = {"max_batch_size", "batch_type", "constraint"}


def record_path(partial: Path) -> Path:
    """Where the record of an unfinished output is: beside it."""
    return partial.with_name(partial.name + ".json")


def run_record(bundle: Path, inputs: Path, options: DecodeOptions, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What decides about the lines of an output, as JSON has it.

    Args:
        bundle: the folder.
        inputs: the file of lines.
        options: how they are decoded.
        settings: what else changes them, by the names of the command line's options.
    """
    recorded = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in NOT_RECORDED}
    state = {"bundle": file_hash(bundle / MANIFEST), "input": file_hash(inputs), **recorded, **settings}
    found: dict[str, Any] = json.loads(json.dumps(state))
    return found


def begin_output(partial: Path, record: Mapping[str, Any] | None, *, resume: bool, numbered: bool) -> int:
    """Note what an output is made from, or go on with an earlier one.

    Args:
        partial: where it is written.
        record: what it is made from; None if that cannot be read again.
        resume: go on with what is there.
        numbered: as for `resume_at`.

    Returns:
        How many lines of input an earlier run has answered.

    Raises:
        RequestError: it cannot be gone on with.
    """
    if os.path.isfile(partial):
        if resume and record is not None:
            return resume_at(partial, record, numbered=numbered)
        click.echo(f"{partial} of an earlier run is begun again; --resume goes on with it", err=True)
    try:
        record_path(partial).unlink(missing_ok=True)
        if record is not None:
            write_text(record_path(partial), json.dumps(record, indent=1) + "\n")
    except OSError as problem:
        raise RequestError(f"{partial} cannot be written: {problem.strerror}", "another file with -o") from problem
    return 0


def resume_at(partial: Path, record: Mapping[str, Any], *, numbered: bool) -> int:
    """Cut what is not whole off an unfinished output.

    Args:
        partial: the output so far.
        record: of the run that is to go on with it.
        numbered: a line of input has several lines of output, which begin with its number; the last may lack some.

    Returns:
        How many lines of input it answers.

    Raises:
        RequestError: the output was made from something else, or nothing tells from what.
    """
    path = record_path(partial)
    try:
        earlier = json.loads(read_text(path))
    except (OSError, ValueError) as problem:
        raise RequestError(
            f"{path}, which tells what {partial} was made from, cannot be read: {problem}", AFRESH
        ) from None
    names = sorted({*earlier, *record}) if isinstance(earlier, dict) else []
    changed = [name for name in names if earlier.get(name) != record.get(name)]
    if changed or not names:
        told = [
            f"{n} was {earlier.get(n)!r}, and is {record.get(n)!r}" for n in changed if n not in ("bundle", "input")
        ]
        told += [f"the {name} is another one" for name in ("bundle", "input") if name in changed]
        raise RequestError(
            [f"{partial} cannot be gone on with: {problem}" for problem in told or ["no record"]], AFRESH
        )
    done, size = _whole_lines(partial, numbered=numbered)
    with partial.open("r+b") as file:
        file.truncate(size)
    return done


def _whole_lines(partial: Path, *, numbered: bool) -> tuple[int, int]:
    """How many lines of input are answered completely, and how many bytes their answers have."""
    done = size = offset = 0
    last = b""
    with partial.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            if not numbered:
                done, size = done + 1, size + len(line)
                continue
            number = line.partition(b"\t")[0]
            if number != last:  # whatever came before is whole
                done, size, last = int(number) - 1, offset, number
            offset += len(line)
    return done, size
