"""What an export was told is found again without the user's files, and beside the file of settings that names them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from tests.oracles.layouts import Tutorial
from tfm_export.bundle import Bundle
from tfm_export.checkpoints import read_checkpoint, read_settings, settings_of
from tfm_export.cli import cli
from tfm_export.errors import CheckpointError
from tfm_export.export import export_bundle

SETTINGS = {"heads": 3, "pad": 1, "bos": 0, "eos": 2, "unk": 3, "source_starts_with_bos": False}
DICTIONARIES = {
    "source_dictionary": "dict.source.txt",
    "target_dictionary": "../dict.target.txt",
    "dictionary_format": "fairseq",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a model of 16 and 24 rows, `conf/settings.json`, and dictionaries that are shorter."""
    torch.save(Tutorial((16, 24), 12, (1, 1), 3, 8, 20).state_dict(), tmp_path / "model.pt")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/dict.source.txt").write_text("".join(f"{letter} 1\n" for letter in "abcdefghij"))
    (tmp_path / "dict.target.txt").write_text("".join(f"{letter} 1\n" for letter in "klmnopqrstuvw"))
    (tmp_path / "conf/settings.json").write_text(json.dumps({**SETTINGS, **DICTIONARIES}))
    return tmp_path


def invoke(*arguments: object) -> str:
    done = CliRunner().invoke(cli, [*map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("relative", [True, False])
def test_files_that_settings_name_are_beside_them(
    project: Path, monkeypatch: pytest.MonkeyPatch, relative: bool
) -> None:
    (project / "elsewhere").mkdir()
    monkeypatch.chdir(project / "elsewhere")
    conf = Path("../conf") if relative else project / "conf"
    settings = read_settings(conf / "settings.json")
    assert settings["source_dictionary"] == str(conf / "dict.source.txt")
    assert settings["dictionary_format"] == "fairseq"
    assert read_checkpoint(project / "model.pt", settings).tokenizer
    absolute = {**SETTINGS, **DICTIONARIES, "source_dictionary": str(project / "conf/dict.source.txt")}
    (project / "conf/settings.json").write_text(json.dumps(absolute))
    assert read_settings(conf / "settings.json")["source_dictionary"] == str(project / "conf/dict.source.txt")


def test_what_is_not_there_is_told_with_the_place(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    (project / "conf/dict.source.txt").unlink()
    with pytest.raises(CheckpointError) as raised:
        read_checkpoint("model.pt", read_settings(Path("conf/settings.json")))
    assert f"{project}/conf/dict.source.txt cannot be read: No such file or directory" in str(raised.value)
    with pytest.raises(CheckpointError) as raised:  # from Python, they are relative to the current folder
        read_checkpoint("model.pt", {**SETTINGS, **DICTIONARIES})
    assert f"{project}/dict.source.txt cannot be read: No such file or directory" in str(raised.value)


@pytest.mark.slow
def test_verify_needs_the_checkpoint_alone(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    (project / "lines.txt").write_text("a b c\nj i h g\n")
    invoke("onnx", "model.pt", "--config", "conf/settings.json", "--inputs", "lines.txt", "-o", "bundle")
    (project / "elsewhere").mkdir()
    for name in ("bundle", "model.pt"):
        shutil.move(project / name, project / "elsewhere" / name)
    shutil.rmtree(project / "conf")
    (project / "dict.target.txt").unlink()
    monkeypatch.chdir(project / "elsewhere")
    assert "parity: passed" in invoke("verify", "bundle", "--checkpoint", "model.pt")
    (project / "elsewhere/pairs.tsv").write_text("a b c\tk\n")
    done = CliRunner().invoke(cli, ["verify", "bundle", "--checkpoint", "model.pt", "--expect", "pairs.tsv"])
    assert done.exit_code == 3, done.output  # no pair of this model; but it was read, and its tokens are known


def test_the_bundle_stands_in_for_dictionaries_and_subword_models(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project / "conf")
    (project / "conf/codes").write_text("#version: 0.2\na b\n")
    subwords = {"source_subwords": "codes", "target_subwords": "codes"}
    given = {**SETTINGS, **DICTIONARIES, **subwords}
    bundle, _ = export_bundle(project / "model.pt", project / "bundle", settings=given, verify=False)
    before = read_checkpoint(project / "model.pt", given)
    (project / "conf/codes").unlink()
    (project / "conf/dict.source.txt").unlink()
    (project / "dict.target.txt").unlink()
    told = settings_of(Bundle.open(bundle.path))
    assert told["source_subwords"] == str(project / "bundle/tokenizer/source.bpe")
    assert {*DICTIONARIES} & {*told} == set()
    after = read_checkpoint(project / "model.pt", told)
    assert after.tokenizer == before.tokenizer
    assert after.special_ids == before.special_ids


def test_settings_without_files_are_those_that_were_given(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    assert settings_of(bundle) == bundle.manifest.model["settings"]
