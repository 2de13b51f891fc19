"""`tfm-export quantize` as a user types it, and what the other commands make of the variants."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import tfm_export
from tests.cli.conftest import Invoke
from tfm_export.cli import quantize as command
from tfm_export.quantize import METHODS, METRICS, speed

ANY = ("--min-agreement", "0", "--keep", "--threads", "1")


@pytest.fixture
def invoke(invoke: Invoke, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Runs a command in a folder that holds the tiny bundle as tfm_bundle."""
    monkeypatch.setattr(speed, "SECONDS", 0.0)
    shutil.copytree(tiny_bundle, "tfm_bundle")
    return invoke


def test_the_help_names_what_the_library_has() -> None:
    assert list(METRICS) == command.METRICS
    assert list(METHODS) == command.METHODS


def test_a_variant_is_told_and_then_runs_and_is_verified_and_inspected(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "dev.tsv").write_text("hello\tp1 p2\nparity\tp3\n", encoding="utf-8")
    result = invoke("quantize", "--w8", "--dev", "dev.tsv", "--metric", "per", "--max-loss", "1000", *ANY)
    assert result.exit_code == 0, result.output
    for expected in ("w8: ", "layers that cost most quality alone", "per on 2 sources", "times as fast as fp32"):
        assert expected in result.stdout
    plain = invoke("run", "hello", "parity")
    for variant in ("w8", "auto"):
        result = invoke("run", "hello", "parity", "--variant", variant, "--json")
        assert result.exit_code == 0, result.output
        assert len(result.stdout.splitlines()) == len(plain.stdout.splitlines()) == 2
    verified = invoke("verify")
    assert "w8 on onnxruntime-cpu" in verified.stdout
    assert "greedy, batched as alone" in verified.stdout
    inspected = invoke("inspect").stdout
    assert "in these numbers" in inspected
    row = next(line for line in inspected.splitlines() if line.startswith("w8"))
    assert "int8, blocks of 256" in row
    assert "per " in row
    with tfm_export.load("tfm_bundle", variant="w8") as model:
        assert model.generate("hello").texts


def test_json_is_the_whole_report(invoke: Invoke) -> None:
    result = invoke("quantize", "--fp16", "--json", *ANY)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["precision"] == "fp16"
    assert report["target"] == "tensorrt"
    assert report["generations"]
    assert report == json.loads(Path("tfm_bundle/reports/quantize_fp16.json").read_text(encoding="utf-8"))


def test_quality_that_is_not_there_ends_with_3_and_adds_nothing(invoke: Invoke) -> None:
    before = sorted(Path("tfm_bundle").rglob("*"))
    result = invoke("quantize", "--w4", "--min-agreement", "1", "--threads", "1", "--keep")
    assert result.exit_code == 3, result.output
    assert "are needed" in result.stderr
    assert "--min-agreement" in result.stderr
    assert sorted(Path("tfm_bundle").rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "say which precision, one of --fp16, --bf16, --w8, --w4, --int8, --fp8"),
        (["--w8", "--fp8"], 2, "found --w8 and --fp8"),
        (["--w8", "--metric", "bleu"], 2, "--metric has no effect without --dev"),
        (["--bf16", "--for", "cpu"], 1, "no kernels for bf16"),
        (["--w8", "--dev", "nowhere.tsv"], 2, "does not exist"),
        (["elsewhere", "--w8"], 1, "elsewhere is not a bundle"),
    ],
)
def test_what_cannot_be_done_is_told(invoke: Invoke, arguments: list[str], code: int, message: str) -> None:
    result = invoke("quantize", *arguments)
    assert result.exit_code == code
    assert message in result.stderr
