"""docs/any_language.md: its table is the graph's, and what it says is run is run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import click
import pytest

from tests.examples.conftest import Example, g2p
from tests.examples.javascript import needs_node, needs_packages
from tests.test_docs import ROOT, blocks, console_commands
from tfm_export import graph
from tfm_export.cli import cli

__all__ = ["g2p"]

DOCUMENT = ROOT / "docs/any_language.md"


@pytest.fixture
def folder(g2p: Example, tmp_path: Path) -> Path:
    """A folder with a bundle in it."""
    (tmp_path / "tfm_bundle").symlink_to(g2p.bundle)
    return tmp_path


def test_the_table_is_the_graphs() -> None:
    rows = re.findall(r"^\| (→ )?`(\w+)` \| (\w+) \| (\[.*?\]) \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    letters = {"batch": "B", "source": "S", "target": "T"}
    specs = [("", spec) for spec in graph.generate_inputs()] + [("→ ", spec) for spec in graph.generate_outputs()]
    assert rows == [
        (arrow, spec.name, spec.dtype, f"[{', '.join(letters[str(axis)] for axis in spec.axes)}]")
        for arrow, spec in specs
    ]


def test_the_python_snippet_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    ((_, text),) = blocks(DOCUMENT, "python")
    found: dict = {}
    exec(text, found)  # noqa: S102
    assert [len(target) for target in found["targets"]] == found["lengths"].tolist()
    assert [target[-1] for target in found["targets"]] == [2, 2]


@needs_node
@needs_packages("node")
def test_the_javascript_snippet_gives_what_the_python_snippet_gives(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    ((_, python),) = blocks(DOCUMENT, "python")
    found: dict = {}
    exec(python, found)  # noqa: S102
    ((_, script),) = blocks(DOCUMENT, "js")
    (folder / "node_modules").symlink_to(ROOT / "examples/node/node_modules")
    (folder / "snippet.mjs").write_text(script + "\nconsole.log(JSON.stringify(targets));\n", encoding="utf-8")
    done = subprocess.run(["node", "snippet.mjs"], capture_output=True, text=True, check=False, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip().replace(" ", "") == str(found["targets"]).replace(" ", "")


def test_the_commands_are_those_of_the_command_line() -> None:
    ((_, text),) = blocks(DOCUMENT, "console")
    for line in console_commands(text):
        program, name, *arguments = line.split()
        command = cli.get_command(click.Context(cli), name)
        assert program == "tfm-export"
        assert command is not None
        options = {option for parameter in command.params for option in parameter.opts}
        assert {a for a in arguments if a.startswith("-")} <= options
