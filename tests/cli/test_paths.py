"""Paths that are not UTF-8: what Linux and its users have nothing against is read, written and printed as it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tfm_export
from tests import skips
from tfm_export.bundle import MANIFEST
from tfm_export.json_text import write_json
from tfm_export.pinned_folder import utf8_path

ROOT = Path(__file__).parents[2]
NAME = b"caf\xe9 \xff"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / os.fsdecode(NAME)
    try:
        path.mkdir()
    except OSError as problem:
        skips.skip("a disk whose names may be any bytes", "make test", "on such a disk", found=str(problem))
    return path


def run(*arguments: str | Path) -> tuple[int, bytes, bytes]:
    command = [sys.executable, "-m", "tfm_export", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("copy", [None, False], ids=["copied", "mapped"])
def test_a_bundle_loads(tiny_bundle: Path, folder: Path, copy: bool | None) -> None:
    path = shutil.copytree(tiny_bundle, folder / "b")
    with tfm_export.load(path, threads=1, copy=copy) as model, tfm_export.load(tiny_bundle, threads=1) as other:
        assert model.generate("hello").text == other.generate("hello").text


def test_run_and_inspect_print_them(tiny_bundle: Path, folder: Path) -> None:
    path = shutil.copytree(tiny_bundle, folder / "b")
    assert run("run", path, "hello") == run("run", tiny_bundle, "hello")
    code, out, error = run("inspect", path)
    assert (code, error) == (0, b"")
    assert out.startswith(os.fsencode(path) + b" (format version")
    code, out, error = run("inspect", path, "--json")
    assert (code, error) == (0, b"")
    assert json.loads(out)["path"] == str(path)  # which is UTF-8, or it could not be read
    code, out, _ = run("doctor", path, "--json")
    assert os.fsencode(path) in os.fsencode(json.dumps(json.loads(out), ensure_ascii=False))
    code, out, error = run("run", "--bundle", folder / "none", "hello")
    assert (code, out) == (1, b"")
    assert b"/caf\\udce9 \\udcff/none is not a bundle" in error
    (path / "golden.jsonl").unlink()
    code, out, error = run("inspect", path)
    assert (code, out) == (1, b"")
    assert error.startswith(b"Error: golden.jsonl is missing")


@pytest.mark.slow
def test_a_checkpoint_is_exported_and_verified(tiny_checkpoint: Path, folder: Path) -> None:
    checkpoint = Path(shutil.copy(tiny_checkpoint, folder / "tiny.pt"))
    (folder / "lines.txt").write_text("hello\nparity\n")
    code, _, error = run("onnx", checkpoint, "-o", folder / "b", "--inputs", folder / "lines.txt")
    assert code == 0, error
    assert (folder / "b" / MANIFEST).is_file()
    code, out, error = run("verify", folder / "b", "--checkpoint", checkpoint)
    assert code == 0, error
    assert b"parity: passed" in out
    code, out, error = run("verify", folder / "b", "--json")
    assert code == 0, error
    assert json.loads(out)


@pytest.mark.slow
def test_bench_measures_and_compares(tiny_bundle: Path, folder: Path) -> None:
    path = shutil.copytree(tiny_bundle, folder / "b")
    few = ("--batch", "1", "--beam", "1", "--rounds", "2", "--tokens", "2")
    code, _, error = run("bench", path, *few, "-o", folder / "r.json")
    assert code == 0, error
    code, out, error = run("bench", path, *few, "--compare", folder / "r.json", "--json")
    assert code == 0, error
    assert "comparison" in json.loads(out)


def test_json_spells_what_utf8_cannot() -> None:
    value = {"path": os.fsdecode(NAME), "text": "é\U0001f600"}
    text = write_json(value, indent=1)
    assert text.encode()
    assert "é\U0001f600" in text
    assert json.loads(text) == value


def test_a_library_gets_a_name_that_it_takes(folder: Path) -> None:
    (folder / "file").write_text("content")
    with utf8_path(folder / "file") as path:
        assert str(path).encode()
        assert path.read_text() == "content"
    with utf8_path(Path("plain/file")) as path:  # even where there is none
        assert path == Path("plain/file")
