"""`tfm-export inspect`: what a bundle holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tfm_export.bundle import Bundle
from tfm_export.cli import cli


def inspect(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["inspect", *map(str, arguments)])


def test_people_see_every_part(tiny_bundle: Path) -> None:
    result = inspect(tiny_bundle)
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    manifest = Bundle.open(tiny_bundle).manifest
    for expected in (
        f"{tiny_bundle} (format version 1), every file as its manifest says",
        "source vocabulary 31",
        "target vocabulary 34",
        "decoder layers 2",
        "heads 4 of size 16",
        "configuration: d ff 128",
        "longest source 64 tokens",
        "pad 0 '<pad>' 0 '<pad>'",
        "bos 1 '<s>', not added 1 '<s>'",
        "eos 2 '</s>', added 2 '</s>'",
        "unk none none",
        "beam size 1",
        "synthetic no",
        f"torch {manifest.tools['torch']}",
    ):
        assert expected in lines, result.stdout
    for name, entry in manifest.files.items():
        assert any(line.startswith(f"{name} {entry.purpose}") for line in lines)
    assert any(line.startswith("fp32 ") for line in lines)


def test_json_is_the_manifest(tiny_bundle: Path) -> None:
    state = json.loads(inspect(tiny_bundle, "--json").stdout)
    assert state.pop("path") == str(tiny_bundle)
    assert state == json.loads((tiny_bundle / "bundle.json").read_text())


def test_a_damaged_bundle_is_told(tiny_bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    (copy / "golden.jsonl").unlink()
    with (copy / "onnx" / "fp32" / "encoder.onnx").open("ab") as file:
        file.write(b"more")
    result = inspect(copy)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "golden.jsonl is missing" in result.stderr
    assert "encoder.onnx should have" in result.stderr


def test_no_bundle(tmp_path: Path) -> None:
    result = inspect(tmp_path)
    assert result.exit_code == 1
    assert f"{tmp_path} is not a bundle" in result.stderr


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A checkpoint of the tutorial's layout, with what training leaves around it."""
    import torch

    from tests.oracles.layouts import Tutorial

    model = Tutorial((11, 13), 12, (1, 1), 3, 8, 20)
    state = {f"module.{name}": weight.half() for name, weight in model.state_dict().items()}
    torch.save({"model_state_dict": state, "config": {"n_heads": 3}, "epoch": 4}, tmp_path / "best.pt")
    return tmp_path / "best.pt"


def test_a_checkpoint_tells_what_it_is_and_what_is_missing(foreign: Path) -> None:
    result = inspect(foreign)
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    for expected in (
        f"{foreign}: a tutorial Transformer (fc_q, fc_k, fc_v, fc_o)",
        "d model 12 the shapes",
        "norm first False the layout",
        "note: the weights were taken from 'model_state_dict' in the file",
        "note: stripped from names: 'module.'",
        "note: beside the weights the file says: config.n_heads=3, epoch=4",
        "note: weights stored as float16 are computed with in float32",
        "--heads N heads: how many attention heads (d_model is 12)",
        "--eos ID eos: the id that ends a target",
    ):
        assert expected in lines, result.stdout
    assert "nothing is missing" not in result.stdout


def test_a_checkpoint_with_all_that_was_missing(foreign: Path) -> None:
    result = inspect(foreign, "--heads", 3, "--pad", 0, "--bos", 1, "--eos", 2)
    assert result.exit_code == 0
    assert "nothing is missing" in result.stdout
    assert "heads" in result.stdout
    state = json.loads(inspect(foreign, "--heads", 3, "--json").stdout)
    assert state["found"]["heads"] == {"value": 3, "origin": "as given"}
    assert state["missing"].keys() == {"pad", "bos", "eos"}
    assert state["problems"] == []


def test_a_checkpoint_that_does_not_fit_shows_all_the_same(foreign: Path) -> None:
    result = inspect(foreign, "--heads", 5, "--pad", 0, "--bos", 1, "--eos", 99)
    assert result.exit_code == 1
    assert "d model" in result.stdout
    assert "d_model must be a multiple of heads, found 12 and 5" in result.stderr


def test_a_checkpoint_of_our_own_says_everything(tiny_checkpoint: Path) -> None:
    result = inspect(tiny_checkpoint)
    assert result.exit_code == 0
    assert "a checkpoint of reference_model" in result.stdout
    assert "nothing is missing" in result.stdout
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    for expected in ("norm first True its config", "eos 2 its special_ids", "unk None the format"):
        assert expected in lines, result.stdout
    refused = inspect(tiny_checkpoint, "--heads", 3)
    assert refused.exit_code == 1
    assert "d model" in refused.stdout
    assert "leave out heads, which would have no effect" in refused.stderr


def test_decoding_defaults_that_do_not_fit_are_shown(foreign: Path, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"heads": 3, "pad": 0, "bos": 1, "eos": 2, "beam_size": 0}')
    result = inspect(foreign, "--config", tmp_path / "settings.json")
    assert result.exit_code == 1
    assert "beam_size must be at least 1" in result.stderr


def test_a_file_of_settings_gives_way_to_options(foreign: Path, tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"heads": 5, "pad": 0, "bos": 1, "eos": 2}')
    given = ("--config", tmp_path / "settings.json")
    assert "multiple of heads" in inspect(foreign, *given).stderr
    assert inspect(foreign, *given, "--heads", 3).exit_code == 0
    (tmp_path / "settings.json").write_text('{"haeds": 5}')
    assert "there is no setting 'haeds'; did you mean 'heads'?" in inspect(foreign, *given).stderr


def test_options_for_checkpoints_have_no_place_at_bundles(tiny_bundle: Path) -> None:
    result = inspect(tiny_bundle, "--heads", 3, "--norm-first")
    assert result.exit_code == 2
    assert "--heads, --norm-first: for checkpoints" in result.stderr


def test_a_model_of_ones_own_is_shown_by_its_adapter(tmp_path: Path) -> None:
    import torch

    from tests.checkpoints.test_adapter import Alibi

    path, adapter = tmp_path / "model.pt", ("--adapter", "tests.checkpoints.test_adapter:load")
    torch.save({"model": Alibi().state_dict()}, path)
    assert "write an adapter" in inspect(path).stderr
    result = inspect(path, *adapter, "--pad", 0, "--bos", 1, "--eos", 2)
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert f"{path}: a model of your own, by tests.checkpoints.test_adapter:load" in lines
    assert "head size 7 its configuration" in lines
    assert lines[-1] == "nothing is missing: tfm-export onnx takes it as it is"
    assert "heads has no effect on an adapter" in inspect(path, *adapter, "--heads", 3).stderr
