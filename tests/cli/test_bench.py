"""`tfm-export bench` on a tiny bundle: every figure is there, files are written, an earlier result is compared with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tfm_export.cli import cli

QUICK = ["--rounds", "2", "--batch", "1", "--batch", "3", "--beam", "1", "--beam", "2"]


def run(*arguments: str) -> tuple[int, str, str]:
    outcome = CliRunner().invoke(cli, ["bench", *arguments])
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), outcome.exception
    return outcome.exit_code, outcome.stdout, outcome.stderr


def test_every_cell_is_measured(tiny_bundle: Path, tmp_path: Path) -> None:
    before, plot = tmp_path / "before.json", tmp_path / "speed.png"
    code, text, _ = run(str(tiny_bundle), *QUICK, "-o", str(before), "--plot", str(plot), "--threads", "1")
    assert code == 0, text
    assert "first token ms" in text
    state = json.loads(before.read_text(encoding="utf-8"))
    assert [(c["batch"], c["beam"]) for c in state["cells"]] == [(1, 1), (3, 1), (1, 2), (3, 2)]
    for cell in state["cells"]:
        assert len(cell["seconds"]) == 2
        assert 0 < cell["first_seconds_median"] < min(cell["seconds"])
        assert 0 < cell["step_seconds_p50"] <= cell["step_seconds_p90"] <= cell["step_seconds_p99"]
        assert cell["tokens_per_second"] > 0
    (loading,) = state["loadings"]
    assert (loading["variant"], loading["threads"]) == ("fp32", 1)
    assert loading["provider"] == "CPUExecutionProvider"
    assert loading["load_seconds"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    code, text, _ = run(str(tiny_bundle), *QUICK, "--compare", str(before), "--threads", "1")
    assert code == 0
    assert text.count(" x  ") == 4


def test_exactly_so_many_tokens_are_decoded(tiny_bundle: Path) -> None:
    code, text, _ = run(str(tiny_bundle), "--rounds", "2", "--batch", "2", "--beam", "1", "--tokens", "7", "--json")
    assert code == 0
    assert json.loads(text)["cells"][0]["tokens"] == 14


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--variant", "w8"], 1, "has no variant 'w8'; it has fp32"),
        (["--plot", "x.gif"], 2, "--plot draws .png, .svg, .pdf, found x.gif"),
        (["--rounds", "1"], 2, "1 is not in the range x>=2"),
    ],
)
def test_what_cannot_be_measured_is_told(tiny_bundle: Path, arguments: list[str], code: int, message: str) -> None:
    found, _, error = run(str(tiny_bundle), *arguments)
    assert found == code
    assert message in error
