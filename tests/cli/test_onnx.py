"""`tfm-export onnx` and `verify` as a user types them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from reference_model import save_checkpoint
from tests.cli.conftest import Invoke
from tests.conftest import build_tiny_checkpoint
from tfm_export.bundle import GOLDEN, Bundle
from tfm_export.cli import cli
from tfm_export.export import stage
from tfm_export.verify import ParityReport, TensorComparison, read_golden


@pytest.fixture
def quick_graphs(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny checkpoint's graphs are copied from its bundle instead of being traced again."""

    def copy(_: object, folder: Path, **__: object) -> None:
        shutil.copytree(tiny_bundle / "onnx" / "fp32", folder)

    monkeypatch.setattr(stage, "write_fp32_variant", copy)


@pytest.mark.usefixtures("quick_graphs")
def test_the_bundle_is_told_file_by_file_with_a_verdict(invoke: Invoke, tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("hello\nworld\n\nparity\n")
    result = invoke("onnx", tiny_checkpoint, "--inputs", "lines.txt")
    assert result.exit_code == 0, result.output
    bundle = Bundle.open(tmp_path / "tfm_bundle")
    for name, entry in bundle.manifest.files.items():
        assert name in result.stdout
        assert entry.purpose in result.stdout
    assert "3 of 3 real inputs token for token" in result.stdout
    assert "parity: passed" in result.stdout
    assert bundle.manifest.golden["synthetic"] is False
    report = json.loads((bundle.path / "reports" / "parity.json").read_text())
    assert report["passed"] is True
    assert (bundle.path / "reports" / "parity.html").is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lines.txt", "tfm_bundle"]


@pytest.mark.usefixtures("quick_graphs")
def test_without_inputs_the_golden_set_is_marked_synthetic(invoke: Invoke, tiny_checkpoint: Path) -> None:
    result = invoke("onnx", tiny_checkpoint, "-o", "b", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["golden"]["synthetic"] is True


def test_an_existing_output_is_refused_before_any_work(
    invoke: Invoke, tiny_checkpoint: Path, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (tiny_bundle / "bundle.json").read_bytes()
    monkeypatch.setattr(stage, "read_checkpoint", lambda *_: pytest.fail("the checkpoint was read"))
    result = invoke("onnx", tiny_checkpoint, "-o", tiny_bundle)
    assert result.exit_code == 1
    assert "exists" in result.stderr
    assert "--force" in result.stderr
    assert (tiny_bundle / "bundle.json").read_bytes() == before


def failing_report(*_: object, **__: object) -> ParityReport:
    bad = TensorComparison(name="cross_key_0", error=1.0, rounding=1e-6, limit=1e-4)
    return ParityReport(
        variant="fp32", backend="test", synthetic=True, graph=[bad], kernels=[], argmax_agreement=0.5, generations=[]
    )


@pytest.mark.usefixtures("quick_graphs")
@pytest.mark.parametrize("force", [False, True])
def test_failed_parity_exits_3_and_leaves_what_was_there(
    invoke: Invoke,
    tiny_checkpoint: Path,
    tiny_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    force: bool,
) -> None:
    monkeypatch.setattr(stage, "verify_variant", failing_report)
    if force:
        shutil.copytree(tiny_bundle, tmp_path / "b")
    result = invoke("onnx", tiny_checkpoint, "-o", "b", *["--force"] * force)
    assert result.exit_code == 3
    assert "cross_key_0" in result.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["b"] * force
    if force:
        Bundle.open(tmp_path / "b")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"", "no lines"),
        (b"hello\nw0rld\n", "input 2"),
        (b"x" * 200, "the longest source is"),
        (b"hello\n\xff\n", "lines.txt is not text in UTF-8"),
    ],
)
def test_inputs_that_do_not_fit_are_told(
    invoke: Invoke, tiny_checkpoint: Path, tmp_path: Path, lines: bytes, message: str
) -> None:
    (tmp_path / "lines.txt").write_bytes(lines)
    result = invoke("onnx", tiny_checkpoint, "--inputs", "lines.txt")
    assert result.exit_code == 1, result.output
    assert message in result.stderr
    assert not (tmp_path / "tfm_bundle").exists()


@pytest.fixture
def checkpoint_of_ids(tmp_path: Path) -> Path:
    """The tiny model without vocabularies."""
    checkpoint = replace(build_tiny_checkpoint(), source_vocabulary=None, target_vocabulary=None)
    save_checkpoint(checkpoint, tmp_path / "ids.pt")
    return tmp_path / "ids.pt"


def test_a_model_without_a_tokenizer_takes_lines_of_ids(
    invoke: Invoke, checkpoint_of_ids: Path, tmp_path: Path
) -> None:
    (tmp_path / "lines.txt").write_text("5 6 7 2\n\n 9 2 \n12 13 14 15 16 2\n")
    result = invoke("onnx", checkpoint_of_ids, "--inputs", "lines.txt", "-o", "b")
    assert result.exit_code == 0, result.output
    bundle = Bundle.open(tmp_path / "b")
    assert bundle.manifest.golden["synthetic"] is False
    golden = read_golden(bundle, GOLDEN)
    assert [g.source_ids for g in golden] == [[5, 6, 7, 2], [9, 2], [12, 13, 14, 15, 16, 2]]
    assert {g.text for g in golden} == {None}
    assert "3 of 3 real inputs token for token" in result.stdout
    result = invoke("quantize", "b", "--fp16", "--calibration", "lines.txt", "--keep", "--min-agreement", "0")
    assert result.exit_code == 0, result.output
    result = invoke("run", "b", "--ids", "5 6 7 2")
    assert result.exit_code == 0
    assert result.stdout.split()[:30] == [str(token) for token in golden[0].tokens if token != 2]


@pytest.mark.parametrize("line", ["five six", "5 -1", "5 31", "5 6.0", "५"])
def test_lines_that_are_no_ids_are_named(invoke: Invoke, checkpoint_of_ids: Path, tmp_path: Path, line: str) -> None:
    (tmp_path / "lines.txt").write_text(f"5 6\n{line}\n", encoding="utf-8")
    result = invoke("onnx", checkpoint_of_ids, "--inputs", "lines.txt")
    assert result.exit_code == 1
    assert "input 2: expected ids from 0 to 30, found" in result.stderr
    assert "ids, separated by spaces" in result.stderr
    assert not (tmp_path / "tfm_bundle").exists()


def test_limits_beyond_the_position_table_are_refused(invoke: Invoke, tiny_checkpoint: Path) -> None:
    result = invoke("onnx", tiny_checkpoint, "--max-source-length", 10_000, "--max-target-length", 10_001)
    assert result.exit_code == 1
    assert "10000" in result.stderr
    assert "10001" in result.stderr


@pytest.mark.usefixtures("quick_graphs")
def test_smaller_limits_are_kept(invoke: Invoke, tiny_checkpoint: Path, tmp_path: Path) -> None:
    result = invoke("onnx", tiny_checkpoint, "--max-source-length", 9, "--max-target-length", 7, "--no-verify")
    assert result.exit_code == 0, result.output
    assert "not verified" in result.stdout
    manifest = Bundle.open(tmp_path / "tfm_bundle").manifest
    assert (manifest.limits.max_source_length, manifest.limits.max_target_length) == (9, 7)
    assert manifest.generation.max_length <= 7
    assert not (tmp_path / "tfm_bundle" / "reports").exists()


def test_a_checkpoint_that_is_none_is_told(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    result = invoke("onnx", "notes.txt")
    assert result.exit_code == 1
    assert "notes.txt" in result.stderr
    assert "Traceback" not in result.output


def test_verify_passes_and_with_the_checkpoint_compares_tensors(
    invoke: Invoke, tiny_bundle: Path, tiny_checkpoint: Path
) -> None:
    result = invoke("verify", tiny_bundle)
    assert result.exit_code == 0, result.output
    assert "token for token" in result.stdout
    assert "both in float64" not in result.stdout
    result = invoke("verify", tiny_bundle, "--checkpoint", tiny_checkpoint)
    assert result.exit_code == 0, result.output
    assert "both in float64" in result.stdout


def test_verify_keeps_the_comparison_that_it_cannot_make_anew(
    invoke: Invoke, tiny_bundle: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_bundle, tmp_path / "b")
    report = tmp_path / "b" / "reports" / "parity.json"
    before = json.loads(report.read_text())["variants"][0]
    assert invoke("verify", tmp_path / "b").exit_code == 0
    after = json.loads(report.read_text())["variants"][0]
    assert after["graph"] == before["graph"] != []
    assert after["argmax_agreement"] == before["argmax_agreement"]
    report.write_text("not JSON")
    assert invoke("verify", tmp_path / "b").exit_code == 0
    assert json.loads(report.read_text())["variants"][0]["graph"] == []


def test_verify_finds_a_bundle_of_another_model(invoke: Invoke, tiny_bundle: Path, tmp_path: Path) -> None:
    """The weights are altered and the manifest made to vouch for them: only the generations can tell."""
    shutil.copytree(tiny_bundle, tmp_path / "b")
    weights = tmp_path / "b" / "onnx" / "fp32" / "weights.bin"
    content = bytearray(weights.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 40_000] = content[middle + 40_000 : middle + 80_000]
    weights.write_bytes(content)
    bundle = Bundle.open(tiny_bundle)
    bundle.path = tmp_path / "b"
    bundle.add_files({"onnx/fp32/weights.bin": "altered"})
    bundle.save()
    result = invoke("verify", tmp_path / "b")
    assert result.exit_code == 3, result.output
    assert "diverges at token" in result.stderr
    result = invoke("verify", tmp_path / "b", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["passed"] is False


def test_a_checkpoint_in_the_bundle_is_not_replaced_with_it(
    invoke: Invoke, tiny_checkpoint: Path, tiny_bundle: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_bundle, tmp_path / "b")
    shutil.copy(tiny_checkpoint, tmp_path / "b" / "model.pt")
    result = invoke("onnx", tmp_path / "b" / "model.pt", "-o", tmp_path / "b", "--force")
    assert result.exit_code == 1
    assert "model.pt lies in" in result.stderr
    assert (tmp_path / "b" / "model.pt").is_file()


def test_a_layer_without_attention_is_wrong_usage(invoke: Invoke, tiny_checkpoint: Path) -> None:
    result = invoke("onnx", tiny_checkpoint, "--attention-layer", "0")
    assert result.exit_code == 2
    assert "--attention-layer has no effect without --attention" in result.stderr


def test_what_a_file_does_not_say_is_said_by_options_and_kept(tmp_path: Path) -> None:
    import torch

    from tests.oracles.layouts import Tutorial

    checkpoint, bundle = tmp_path / "foreign.pt", tmp_path / "bundle"
    torch.save(Tutorial((11, 13), 12, (1, 1), 3, 8, 20).state_dict(), checkpoint)
    runner = CliRunner()
    refused = runner.invoke(cli, ["onnx", str(checkpoint), "-o", str(bundle)])
    assert refused.exit_code == 1
    assert "heads: how many attention heads" in refused.stderr
    assert "--heads N --pad ID --bos ID --eos ID" in refused.stderr
    assert not bundle.exists()
    options = ["--heads", "3", "--pad", "0", "--bos", "1", "--eos", "2"]
    done = runner.invoke(cli, ["onnx", str(checkpoint), "-o", str(bundle), *options])
    assert done.exit_code == 0, done.output
    assert "parity: passed" in done.stdout
    assert Bundle.open(bundle).manifest.model["settings"] == {"heads": 3, "pad": 0, "bos": 1, "eos": 2}
    verified = runner.invoke(cli, ["verify", str(bundle), "--checkpoint", str(checkpoint)])
    assert verified.exit_code == 0, verified.output
