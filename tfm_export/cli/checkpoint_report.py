"""What a checkpoint tells of itself, and what it does not, for people and for programs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from tfm_export.cli.checkpoint_adapter import load_factory
from tfm_export.cli.expect import read_expectations
from tfm_export.cli.progress import Stopwatch
from tfm_export.cli.reports import print_check, table
from tfm_export.errors import CheckpointError, ParityError
from tfm_export.extras import require
from tfm_export.json_text import write_json

if TYPE_CHECKING:
    from tfm_export.checkpoints import PartialCheckpoint, SourceModel
    from tfm_export.tokenizer.special_tokens import NamedSpecialIds


def print_checkpoint(
    path: Path,
    settings: dict[str, Any],
    *,
    adapter: str | None = None,
    expect: BinaryIO | None = None,
    as_json: bool,
) -> None:
    """Print what a checkpoint tells; one that cannot be exported as it is makes the command fail.

    Raises:
        CheckpointError: it is of no known format, or naming what does not fit; after all else was printed.
        ParityError: the user's own pairs do not come out as expected; after all else was printed.
    """
    for module in ("torch", "safetensors"):
        require(module, extra="export")
    from tfm_export.checkpoints import inspect_checkpoint, read_adapter

    special: NamedSpecialIds | None
    if adapter is not None:
        source = read_adapter(path, load_factory(adapter), settings)
        state, special = _adapter_state(source, adapter), source.special_tokens
    else:
        state, special = _checkpoint_state(inspect_checkpoint(path, settings))
    if special is not None:
        state |= _special_state(special)
    wrong = None
    if expect is not None and not state["problems"]:
        state["expected"], wrong = _expected_state(path, settings, expect)
    if as_json:
        click.echo(write_json({"path": str(path), **state}, indent=2))
    else:
        _print(path, state, special)
    if state["problems"]:
        raise CheckpointError(state["problems"], "docs/checkpoints.md tells what is supported")
    if wrong is not None:
        raise wrong


def _expected_state(
    path: Path, settings: dict[str, Any], expect: BinaryIO
) -> tuple[dict[str, Any], ParityError | None]:
    """Whether the user's own pairs come out as expected, and what is wrong if they do not.

    Raises:
        CheckpointError: naming what is missing.
    """
    from tfm_export.checkpoints import read_checkpoint
    from tfm_export.verify.reading import check_source

    expectations = read_expectations(expect)
    assert expectations is not None
    source = read_checkpoint(path, settings)
    with Stopwatch() as stopwatch:
        try:
            found = check_source(source, expectations, progress=stopwatch.begin)
        except ParityError as error:
            return {"passed": False, "problems": error.problems, "hint": error.hint}, error
    return {"passed": True, **asdict(found), "text": found.text()}, None


def _adapter_state(source: SourceModel, adapter: str) -> dict[str, Any]:
    facts = {**asdict(source.model.config), **asdict(source.special_ids)}
    return {
        "format": f"a model of your own, by {adapter}",
        "found": {name: {"value": value, "origin": "its configuration"} for name, value in facts.items()},
        "missing": {},
        "problems": [],
        "notes": source.notes,
    }


def _checkpoint_state(partial: PartialCheckpoint) -> tuple[dict[str, Any], NamedSpecialIds | None]:
    from tfm_export.checkpoints.settings import SETTINGS, how_to_say

    problems, special = partial.all_problems(), None
    try:
        special = partial.special_tokens()
    except CheckpointError as error:
        problems += error.problems
    missing = {
        name: {"question": SETTINGS[name].question, "known": known, "say": how_to_say(name)}
        for name, known in partial.missing.items()
    }
    state = {
        "format": partial.format,
        "found": {name: asdict(fact) for name, fact in partial.facts.items()},
        "options": partial.options,
        "missing": missing,
        "problems": problems,
        "notes": [*partial.notes, *partial.keys.notes()],
    }
    return state, special


def _special_state(special: NamedSpecialIds) -> dict[str, Any]:
    sides = {
        side: {role: {"id": i, "token": token} for role, (i, token) in special.of(side).items()}
        for side in ("source", "target")
    }
    return {"special_tokens": sides, "warnings": [*special.doubts()]}


def _print(path: Path, state: dict[str, Any], special: NamedSpecialIds | None) -> None:
    click.echo(f"{path}: {state['format']}\n")
    rows = [[name.replace("_", " "), str(fact["value"]), fact["origin"]] for name, fact in state["found"].items()]
    click.echo(table([["found", "", "from"], *rows]))
    if state.get("options"):
        click.echo()
        click.echo(table([["decoding", ""], *([name, str(value)] for name, value in state["options"].items())]))
    click.echo()
    if special is not None:
        click.echo(table(special.rows()))
        click.echo()
    for note in state["notes"]:
        click.echo(f"note: {note}")
    for warning in state.get("warnings", ()):
        click.echo(f"warning: {warning}")
    if state["missing"]:
        rows = [
            [entry["say"], f"{name.replace('_', ' ')}: {entry['question']}" + _bracketed(entry["known"])]
            for name, entry in state["missing"].items()
        ]
        click.echo()
        click.echo(table([["missing: say it with", ""], *rows]))
    elif not state["problems"]:
        click.echo("nothing is missing: tfm-export onnx takes it as it is")
    if "expected" in state and state["expected"]["passed"]:
        print_check(True, state["expected"]["text"])


def _bracketed(text: str) -> str:
    return f" ({text})" if text else ""
