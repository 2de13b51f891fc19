"""`tfm-export bench` on a tiny bundle: every figure is there, files are written, an earlier result is compared with."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import tfm_export
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
        rounds = zip(cell["first_seconds"], cell["seconds"], strict=True)  # of one clock: other rounds may be faster
        assert all(0 < first < whole for first, whole in rounds)
        assert cell["first_seconds_median"] == pytest.approx(sum(cell["first_seconds"]) / 2)
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


def test_a_draft_is_measured_beside_what_it_guesses_for(tiny_variants: Path) -> None:
    cells = ["--variant", "fp32", "--variant", "fp32+w8", "--rounds", "2", "--batch", "1", "--beam", "1", "--json"]
    code, text, error = run(str(tiny_variants), *cells, "--tokens", "9")
    assert code == 0, error
    state = json.loads(text)
    assert [loading["backend"] for loading in state["loadings"]] == ["OnnxModel", "SpeculativeModel"]
    assert [(cell["variant"], cell["tokens"]) for cell in state["cells"]] == [("fp32", 9), ("fp32+w8", 9)]


def test_exactly_so_many_tokens_are_decoded(tiny_bundle: Path) -> None:
    code, text, _ = run(str(tiny_bundle), "--rounds", "2", "--batch", "2", "--beam", "1", "--tokens", "7", "--json")
    assert code == 0
    assert json.loads(text)["cells"][0]["tokens"] == 14


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--variant", "w8"], 1, "has no variant 'w8'; it has fp32"),
        (["--variant", "fp32+w8"], 1, "has no variant 'w8'; it has fp32"),
        (["--variant", "fp32+fp32"], 1, "the draft of fp32 must be another variant"),
        (["--variant", "fp32+"], 1, "has no variant ''"),
        (["--plot", "x.gif"], 2, "--plot draws .png, .svg, .pdf, .html, found x.gif"),
        (["-o", "no/such/folder/x.json"], 1, "no/such/folder is not a folder"),
        (["--compare", "missing.json"], 2, "'missing.json' does not exist"),
        (["--rounds", "1"], 2, "1 is not in the range x>=2"),
    ],
)
def test_what_cannot_be_measured_is_told(tiny_bundle: Path, arguments: list[str], code: int, message: str) -> None:
    found, _, error = run(str(tiny_bundle), *arguments)
    assert found == code
    assert message in error


def test_a_trained_model_is_measured_until_its_sentences_end(g2p_bundle: Path, tmp_path: Path) -> None:
    words, page = tmp_path / "words.txt", tmp_path / "speed.html"
    words.write_text("a\ntransformer\nbundle\n", encoding="utf-8")
    code, text, error = run(
        str(g2p_bundle), "--inputs", str(words), *QUICK, "--json", "--plot", str(page), "--threads", "1"
    )
    assert code == 0, error
    state = json.loads(text)
    with tfm_export.load(g2p_bundle, device="cpu") as model:
        lengths = [len(g.hypotheses[0].tokens) + 1 for g in model.generate(["a", "transformer", "bundle"])]
    greedy = {cell["batch"]: cell["tokens"] for cell in state["cells"] if cell["beam"] == 1}
    assert greedy == {1: lengths[0], 3: sum(lengths)}  # the end token is decoded too
    assert state["work"]["longest_source"] == len("transformer") + 1
    assert state["machine"]["versions"]["onnxruntime"]
    html = page.read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>")
    assert "<svg" in html
    assert not re.search(r"<(script|img|link)", html)
    assert html.count("<tr>") == 1 + len(state["cells"])
    for cell in state["cells"]:
        assert f"<td>{cell['step_seconds_p50'] * 1e3:.2f}</td>" in html


def test_verdicts_are_told_and_are_in_the_json(tiny_bundle: Path, tmp_path: Path) -> None:
    before, arguments = tmp_path / "before.json", ["--rounds", "4", "--batch", "2", "--beam", "1", "--threads", "1"]
    assert run(str(tiny_bundle), *arguments, "-o", str(before))[0] == 0
    state = json.loads(before.read_text(encoding="utf-8"))
    for factor, verdict in ((1e4, "faster"), (1e-4, "slower")):
        changed = copy.deepcopy(state)
        changed["machine"]["cpu"] = "another one"
        changed["cells"][0]["seconds"] = [seconds * factor for seconds in state["cells"][0]["seconds"]]
        before.write_text(json.dumps(changed), encoding="utf-8")
        code, text, _ = run(str(tiny_bundle), *arguments, "--compare", str(before), "--json")
        (found,) = json.loads(text)["comparison"]
        assert (code, found["verdict"], found["batch"]) == (0, verdict, 2)
        assert found["ratio"] == pytest.approx(found["before"] / found["after"])
    code, text, _ = run(str(tiny_bundle), *arguments, "--compare", str(before))
    assert code == 0
    assert text.rstrip().endswith("slower")
    assert "taken on another machine: cpu another one, now" in text


def test_a_foreign_file_is_refused_before_anything_is_measured(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"speed": 3}', encoding="utf-8")
    code, text, error = run(str(tiny_bundle), "--compare", str(tmp_path / "other.json"))
    assert (code, text) == (1, "")
    assert "other.json is not a result of tfm-export bench" in error
    assert "measuring" not in error


def test_results_are_not_replaced_unasked(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("mine", encoding="utf-8")
    code, _, error = run(str(tiny_bundle), *QUICK, "-o", str(tmp_path / "r.json"))
    assert code == 1
    assert "exists already" in error
    assert (tmp_path / "r.json").read_text(encoding="utf-8") == "mine"


def test_ctrl_c_ends_all_processes_and_leaves_no_file(tiny_bundle: Path, tmp_path: Path) -> None:
    arguments = [
        str(tiny_bundle),
        "--rounds",
        "100000",
        "--batch",
        "1",
        "-o",
        str(tmp_path / "r.json"),
        "--threads",
        "1",
    ]
    command = [sys.executable, "-m", "tfm_export.cli", "bench", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        seen = ""
        while "measuring batch 1" not in seen:
            seen += (character := process.stderr.read(1))
            assert character, seen
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole group
        _, errors = process.communicate(timeout=60)  # the workers hold stderr open: it ends when all have
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
