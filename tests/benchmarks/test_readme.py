"""README's figures are those of the results, and change with them."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest

from benchmarks.readme import BEGIN, END, README, RESULTS, section, with_section


def test_the_readme_says_what_the_results_say() -> None:
    text = README.read_text(encoding="utf-8")
    assert with_section(text, section()) == text, "python -m benchmarks.readme writes it anew"


def test_figures_are_those_of_the_results(tmp_path: Path) -> None:
    shutil.copy(RESULTS / "generation.json", tmp_path)
    file = tmp_path / "generation.json"
    results = json.loads(file.read_text(encoding="utf-8"))
    changed = copy.deepcopy(results)
    for cell in changed["cells"]:
        seconds = {
            "tfm-export": 0.48,
            "tfm-export fp32+w8": 0.32,
            "CTranslate2 MKL": 0.96,
            "CTranslate2 oneDNN": 0.64,
        }
        cell["seconds"] = [seconds.get(cell["contender"], 0.16)]
    file.write_text(json.dumps(changed), encoding="utf-8")
    rows = [line for line in section(tmp_path).splitlines() if line.startswith("| 1, greedy")]
    assert len(rows) == 1
    cells = [cell.strip() for cell in rows[0].strip("|").split("|")]
    assert "10.0" in cells
    assert "20.0" in cells  # the faster of the two libraries
    assert "30.0" not in cells
    assert "**2.00 x**" in cells  # the faster of ours, with and without a draft


def test_only_what_lies_between_the_comments_changes() -> None:
    assert with_section(f"a\n{BEGIN}\nold\n{END}\nb", "new") == f"a\n{BEGIN}\n\nnew\n\n{END}\nb"
    with pytest.raises(ValueError, match="expected <!-- what"):
        with_section("a", "new")


def test_pictures_are_small() -> None:
    assert (RESULTS / "scaling.png").stat().st_size < 100_000
