"""`tfm-export inspect`: what a bundle holds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

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
        "padding 0",
        "end 2, also at the end of sources",
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
