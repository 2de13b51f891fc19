"""`make gpu-check` without a GPU says so; its contenders do the same work on a CPU; its tables hold what was found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check
from benchmarks.contenders import SOURCES
from benchmarks.gpu_contenders import CELLS, CONTENDERS, ROUNDS, Skipped, measure
from benchmarks.work import prepare

GPU = {"index": 0, "name": "NVIDIA L4", "compute_capability": "8.9", "memory_bytes": 24_000_000_000}


def gpus(*devices: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"gpus": {"devices": list(devices), "driver": "580.65.06", **more}}


def test_without_a_gpu_it_says_so_and_leaves_results_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_check, "doctor", lambda: gpus(problem="there is no NVIDIA driver"))
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--output", str(tmp_path / "result.json")])
    gpu_check.main()
    assert capsys.readouterr().out == "There is no GPU here, so nothing was checked: there is no NVIDIA driver\n"
    assert not (tmp_path / "result.json").exists()


REPORTED = """
import pytest
def test_good(record_property): record_property("share", "80 of 80")
def test_bad(): assert 1 == 2
@pytest.fixture
def broken(): raise ValueError("broken")
def test_error(broken): ...
def test_left_out(): pytest.skip("needs a GPU: there is none")
"""


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What is read from a real report of pytest's."""
    tmp_path = tmp_path_factory.mktemp("reported")
    (tmp_path / "test_some.py").write_text(REPORTED, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={tmp_path / 'report.xml'}"]
    subprocess.run([*command, f"--rootdir={tmp_path}", tmp_path], capture_output=True, check=False, cwd=tmp_path)
    return gpu_check.read_report((tmp_path / "report.xml").read_text(encoding="utf-8"))


def test_every_outcome_has_its_reason(checks: list[dict[str, Any]]) -> None:
    found = {check["name"].partition("::")[2]: check for check in checks}
    assert {name: check["outcome"] for name, check in found.items()} == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_error": "failed",
        "test_left_out": "skipped",
    }
    assert found["test_good"]["figures"] == {"share": "80 of 80"}
    assert "assert 1 == 2" in found["test_bad"]["reason"]
    assert "broken" in found["test_error"]["reason"]
    assert found["test_left_out"]["reason"] == "needs a GPU: there is none"


def cell(batch: int, beam: int, seconds: list[float], tokens: list[list[int]]) -> dict[str, Any]:
    return {"batch": batch, "beam": beam, "seconds": seconds, "tokens": tokens}


@pytest.fixture
def found(checks: list[dict[str, Any]]) -> dict[str, Any]:
    contenders = {
        "tfm-export, rtx, fp16": {
            "cells": [cell(2, 1, [0.32, 0.16, 0.64], [[1], [2]]), cell(2, 4, [0.64], [[1], [2]])]
        },
        "torch eager, float16": {"cells": [cell(2, 1, [0.032], [[1], [3]])]},
    }
    return {
        "gpu": GPU,
        "machine": {"cpu": "a CPU"},
        "doctor": gpus(GPU),
        "checks": checks,
        "benchmark": {
            "target_tokens": 32,
            "engines": {"rtx_fp16": 12.34},
            "contenders": contenders,
            "skipped": {"CTranslate2, float16": "this ctranslate2 finds no GPU"},
        },
    }


def test_the_tables_hold_outcomes_medians_and_what_was_left_out(found: dict[str, Any]) -> None:
    text = gpu_check.tables(found)
    rows = [[value.strip() for value in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert text.startswith("NVIDIA L4, compute capability 8.9, driver 580.65.06; a CPU")
    assert ["tfm-export, rtx, fp16", "10.000 (2 of 2)", "20.000 (2 of 2)"] in rows
    assert ["torch eager, float16", "1.000 (1 of 2)", ""] in rows
    assert ["rtx_fp16", "12.3"] in rows
    assert ["CTranslate2, float16", "this ctranslate2 finds no GPU"] in rows
    assert [row[1:2] + row[3:] for row in rows if row[0].endswith("test_good")] == [["passed", "share: 80 of 80"]]
    assert [name.partition("::")[2] for name in gpu_check.failures(found)] == ["test_bad", "test_error"]


def test_a_contender_of_ours_that_breaks_down_is_a_failure(found: dict[str, Any]) -> None:
    found["checks"] = []
    found["benchmark"]["skipped"] = {
        "tfm-export, rtx, fp32": "failed with exit code 1: KeyError",
        "tfm-export, tensorrt, fp32": "the bundle has no engine 'tensorrt_fp32'",
        "torch compiled, float16": "failed with exit code 1: no compiler",
    }
    assert gpu_check.failures(found) == ["tfm-export, rtx, fp32"]


def test_with_a_gpu_everything_is_written_and_failures_are_the_exit_code(
    found: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_check, "doctor", lambda: gpus(GPU))
    monkeypatch.setattr(gpu_check, "run_tests", lambda _: found["checks"])
    monkeypatch.setattr(gpu_check, "benchmark", lambda *_: found["benchmark"])
    output = tmp_path / "new" / "result.json"
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--output", str(output)])
    with pytest.raises(SystemExit, match="2 failed"):
        gpu_check.main()
    printed = capsys.readouterr().out
    assert json.loads(output.read_text())["gpu"] == GPU
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--output", str(output), "--table"])
    gpu_check.main()
    assert capsys.readouterr().out.splitlines()[0] == printed.splitlines()[0]


def test_measuring_leaves_out_the_first_round_and_what_a_contender_does_not_do() -> None:
    class Contender:
        calls = 0

        def generate(self, sources: list[list[int]], beam: int) -> list[list[int]]:
            if beam > 1:
                raise Skipped("greedy search only")
            self.calls += 1
            return [[self.calls] * 32 for _ in sources]

    result = measure(Contender(), [[1]] * 32, [(2, 1), (2, 4)], 3)
    assert len(result["cells"][0]["seconds"]) == 3
    assert result["cells"][0]["tokens"] == [[4] * 32] * 2
    assert result["skipped_cells"] == {"batch 2, beam 4": "greedy search only"}


def test_no_time_and_a_program_that_fails_are_reasons(tmp_path: Path) -> None:
    assert gpu_check.run_contender("torch eager, float32", tmp_path, 0) == {"skipped": "no time left"}
    failed = gpu_check.run_contender("torch eager, float32", tmp_path, 60, "cpu")["skipped"]
    assert failed.startswith("failed with exit code 1: ")
    assert "sources.json" in failed


@pytest.mark.slow
def test_the_contenders_do_the_same_work_and_those_without_a_gpu_say_so(tmp_path: Path) -> None:
    prepare(tmp_path, lambda _: None, preset="tiny", vocabulary=60)
    by_ctranslate2 = gpu_check.run_contender("CTranslate2, float32", tmp_path, 120, "cpu")
    assert [(c["batch"], c["beam"], len(c["seconds"])) for c in by_ctranslate2["cells"]] == [
        (*c, ROUNDS) for c in CELLS
    ]
    sources = json.loads((tmp_path / SOURCES).read_text())
    for name in ("tfm-export, ONNX Runtime, fp32", "torch eager, float32"):
        result = measure(CONTENDERS[name](tmp_path, "cpu"), sources, CELLS, 1)
        for ours, theirs in zip(result["cells"], by_ctranslate2["cells"], strict=True):
            assert ours["tokens"] == theirs["tokens"], name
    for name in ("tfm-export, rtx, fp16", "tfm-export, ONNX Runtime, fp32", "torch eager, float16"):
        with pytest.raises(Skipped):
            CONTENDERS[name](tmp_path, "0")
