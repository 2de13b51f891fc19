"""docs/decoding.md: its table has every option with its default, its rules are those that hold, its snippets run."""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from tfm_export.decoding import DecodeOptions
from tfm_export.decoding.options import COMPATIBILITIES

TEXT = (Path(__file__).parent.parent / "docs/decoding.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    table = re.search(r"^\|.*?(?=\n\n)", TEXT.partition(f"\n## {heading}\n")[2], re.MULTILINE | re.DOTALL)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[0].splitlines()[2:]]


def test_every_option_is_there_with_its_default() -> None:
    found = {cells[0].strip("`| "): cells[1].strip("`") for cells in rows("Options")}
    assert found == {field.name: repr(field.default) for field in fields(DecodeOptions)}
    assert all(len(cells) == 5 for cells in rows("Options"))


@pytest.mark.parametrize("compatibility", COMPATIBILITIES)
def test_the_rules_are_those_that_hold(compatibility: str) -> None:
    column = 1 + COMPATIBILITIES.index(compatibility)
    rules = asdict(DecodeOptions(compatibility=compatibility, beam_size=2).rules)  # type: ignore[arg-type]
    told = {cells[0].strip("`| "): cells[column] for cells in rows("Rules that differ")}
    assert told.keys() == rules.keys()
    for name, value in rules.items():
        if told[name] != "–":
            assert told[name].startswith(f"`{value}`")


def test_the_snippets_run(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(tiny_bundle, tmp_path / "tfm_bundle")
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert len(snippets) == 3
    for snippet in snippets:
        exec(compile(snippet, "docs/decoding.md", "exec"), {})  # noqa: S102 (what a reader would run)
