"""`tfm-export verify --gpu`, on an emulated one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.emulation import Machine, emulated_gpu
from tests.emulation.engines import add_engine
from tests.emulation.onnx_cuda import Provider, emulated_provider
from tfm_export.bundle import Bundle
from tfm_export.cli import cli


def verify(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["verify", *map(str, arguments)])


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Bundle:
    """A bundle with an engine that runs on the emulated GPU, and one that does not."""
    bundle = Bundle.open(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    add_engine(bundle, "mine", max_batch_size=32, capacities=(64, 160))
    add_engine(bundle, "other", max_batch_size=32, compute_capabilities=("12.0",))
    return bundle


def test_all_that_runs_there_is_judged_and_the_rest_is_named(bundle: Bundle) -> None:
    with emulated_provider():
        result = verify(bundle.path, "--gpu", "1", "--json")
    assert result.exit_code == 0, result.output
    reports = json.loads(result.stdout)["variants"]
    ways = ["the TensorRT engine mine (fp32) on GPU 1", "fp32 with ONNX Runtime on GPU 1"]
    assert [(report["variant"], report["backend"]) for report in reports] == [("fp32", way) for way in ways]
    assert all(len(report["generations"]) == 6 for report in reports)
    assert "note: not judged: the TensorRT engine other (fp32) on GPU 1: " in result.stderr
    assert json.loads((bundle.path / "reports/parity_gpu.json").read_text())["variants"] == reports
    assert (bundle.path / "reports/parity_gpu.html").is_file()
    assert json.loads((bundle.path / "reports/parity.json").read_text())["variants"] != reports


@pytest.mark.slow
def test_tensors_are_compared_too(bundle: Bundle, tiny_checkpoint: Path) -> None:
    with emulated_provider(provider=Provider(version="1.26.0")):
        result = verify(bundle.path, "--gpu", "0", "--checkpoint", tiny_checkpoint)
    assert result.exit_code == 0, result.output
    assert "the graphs, both in float64: " in result.stdout
    assert "what runs them, against the graphs in float64: " in result.stdout
    assert "1.27 or newer" in result.stderr


def test_another_models_generations_fail(bundle: Bundle) -> None:
    golden = bundle.path / "golden.jsonl"
    lines = [json.loads(line) for line in golden.read_text().splitlines()]
    for line in lines:
        line["tokens"][0] = 7 if line["tokens"][0] != 7 else 8
    golden.write_text("".join(json.dumps(line) + "\n" for line in lines))
    bundle.add_files({"golden.jsonl": "changed"})
    bundle.save()
    with emulated_gpu():
        result = verify(bundle.path, "--gpu", "0")
    assert result.exit_code == 3
    assert "the TensorRT engine mine (fp32) on GPU 0: " in result.stderr


def test_where_nothing_runs_the_reasons_are_told(bundle: Bundle) -> None:
    with emulated_gpu(Machine(gpus=0)):
        result = verify(bundle.path, "--gpu", "0")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("found no GPU") == 3
    assert "tfm-export doctor" in result.stderr
