"""Documents that cannot drift: commands and snippets run, links resolve, docs/cli.md is what the commands say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tfm_export.cli import COMMANDS, cli
from tfm_export.cli.reference import reference_text

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    path
    for folder in (".", "docs", "examples", "benchmarks")
    for path in (ROOT / folder).glob("*.md" if folder == "." else "**/*.md")
    if "node_modules" not in path.parts
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def blocks(path: Path, *languages: str) -> Iterator[tuple[str, str]]:
    """The fenced blocks of a document in some languages, in order: language and text."""
    for language, text in FENCE.findall(path.read_text(encoding="utf-8")):
        if language in languages:
            yield language, text


def console_commands(text: str) -> list[str]:
    """The commands of a console block. Output is not shown there: numbers and times differ between machines."""
    lines = text.splitlines()
    assert all(line.startswith("$ ") for line in lines), f"every line of a console block begins with $, found {lines}"
    return [line.removeprefix("$ ") for line in lines]


def heading_anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives a document's headings."""
    prose = FENCE.sub("", path.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_command_line_reference_is_what_the_command_line_says() -> None:
    assert (ROOT / "docs/cli.md").read_text(encoding="utf-8") == reference_text(), "make docs writes it anew"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_with_an_example_that_parses(name: str) -> None:
    context = click.Context(cli, info_name="tfm-export")
    command = cli.get_command(context, name)
    assert command is not None
    help_text = command.get_help(click.Context(command, info_name=name, parent=context))
    examples = re.findall(rf"^    tfm-export {name} (.*)$", help_text.partition("Example:")[2], re.MULTILINE)
    assert examples, "a command's help ends with an example"
    options = {option for parameter in command.params for option in parameter.opts if option.startswith("-")}
    for example in examples:
        assert set(re.findall(r"(?<!\S)--?[a-z][\w-]*", example)) <= options
    for parameter in command.params:
        assert isinstance(parameter, click.Argument) or getattr(parameter, "help", None), (
            f"{parameter.name} has no help"
        )


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path: Path) -> None:
    broken = []
    for link in LINK.findall(FENCE.sub("", path.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue  # the web
        target, _, anchor = link.partition("#")
        file = path.parent / target if target else path
        if not file.exists() or (anchor and anchor not in heading_anchors(file)):
            broken.append(link)
    assert broken == []


def test_the_readme_names_make_targets_and_extras_that_there_are() -> None:
    commands = [c for _, text in blocks(ROOT / "README.md", "console") for c in console_commands(text)]
    assert commands[:2] == ["make demo", "make test"], "the two commands come first"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = (ROOT / "README.md").read_text(encoding="utf-8") + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\bmake ([a-z-]+)(?=[`\n ]*(?:#|[`\n]))", text)) <= targets
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {extra for extras in re.findall(r"pip install '[^']*\[([\w,-]+)\]'", text) for extra in extras.split(",")}
    assert named
    assert named <= set(project["optional-dependencies"])


def test_every_decision_is_in_the_list() -> None:
    folder = ROOT / "docs/decisions"
    assert set(re.findall(r"\((\d{4}-[\w-]+\.md)\)", (folder / "README.md").read_text(encoding="utf-8"))) == {
        path.name for path in folder.glob("0*.md")
    }


@pytest.mark.slow
def test_every_command_and_snippet_of_the_readme_runs(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("node_modules"))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    run = 0
    for language, text in blocks(ROOT / "README.md", "console", "python"):
        if language == "python":
            pieces = [[sys.executable, "-c", text]]
        else:
            lines = [line for line in console_commands(text) if not line.startswith(("make ", "pip install "))]
            pieces = [["bash", "-euo", "pipefail", "-c", line] for line in lines]
        for piece in pieces:
            done = subprocess.run(
                piece, cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{piece[-1]}\n{done.stdout}{done.stderr}"
            run += 1
    assert run >= 6, "the quick start was found"
    lines = (tmp_path / "phones.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len((ROOT / "examples/g2p/words.txt").read_text(encoding="utf-8").splitlines())


def test_the_web_example_names_what_is_to_be_shipped() -> None:
    """tests/examples/test_web.py runs the page with just these files."""
    from tests.examples.test_web import BUNDLE, PAGE, RUNTIME

    text = (ROOT / "examples/web/README.md").read_text(encoding="utf-8")
    assert [name for name in (*PAGE, *RUNTIME, *BUNDLE) if name not in text] == []
