"""The bundle's folder: nothing half-written is seen, nothing of the user's is lost, nothing altered is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tfm_export.bundle import Bundle, GenerationDefaults, Limits, Manifest, SourceIds, SpecialIds, write_text
from tfm_export.errors import BundleError
from tfm_export.graph import Dimensions
from tfm_export.staging import check_target, new_bundle

MANIFEST = Manifest(
    dimensions=Dimensions(
        source_vocabulary_size=7,
        target_vocabulary_size=9,
        decoder_layers=2,
        heads=3,
        head_size=4,
        candidates=9,
    ),
    limits=Limits(max_source_length=12, max_target_length=15),
    special_ids=SpecialIds(pad=0, bos=1, eos=2, source_ends_with_eos=True),
    generation=GenerationDefaults(max_length=10),
)


def make_bundle(path: Path, content: str = "ä content") -> Bundle:
    with new_bundle(path, MANIFEST, force=False) as bundle:
        write_text(bundle.path / "golden.jsonl", content)
        bundle.add_files({"golden.jsonl": "for the test"})
    return Bundle.open(path)


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_manifest_survives_a_round_trip(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "b")
    assert bundle.manifest == Bundle.open(tmp_path / "b").manifest
    assert bundle.manifest.dimensions == MANIFEST.dimensions
    assert bundle.manifest.files["golden.jsonl"].bytes == len("ä content".encode())


def test_a_bundle_is_readable_by_other_users(tmp_path: Path) -> None:
    make_bundle(tmp_path / "b")
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o755
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "b").iterdir()} == {0o644}


def fill_and_fail(path: Path, *, force: bool) -> None:
    with new_bundle(path, MANIFEST, force=force) as bundle:
        write_text(bundle.path / "golden.jsonl", "new")
        raise RuntimeError


def test_a_failure_while_filling_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        fill_and_fail(tmp_path / "b", force=False)
    assert leftovers(tmp_path) == []


def test_a_failure_under_force_leaves_the_old_bundle(tmp_path: Path) -> None:
    make_bundle(tmp_path / "b", "old")
    with pytest.raises(RuntimeError):
        fill_and_fail(tmp_path / "b", force=True)
    assert leftovers(tmp_path) == ["b"]
    assert (tmp_path / "b" / "golden.jsonl").read_text() == "old"


def test_force_replaces_the_whole_bundle(tmp_path: Path) -> None:
    make_bundle(tmp_path / "b", "old")
    (tmp_path / "b" / "stray").write_text("of the old one")
    with new_bundle(tmp_path / "b", MANIFEST, force=True) as bundle:
        write_text(bundle.path / "golden.jsonl", "new")
        bundle.add_files({"golden.jsonl": "for the test"})
    assert leftovers(tmp_path) == ["b"]
    assert leftovers(tmp_path / "b") == ["bundle.json", "golden.jsonl"]
    assert (tmp_path / "b" / "golden.jsonl").read_text() == "new"


def test_an_existing_bundle_is_refused_without_force(tmp_path: Path) -> None:
    make_bundle(tmp_path / "b")
    with pytest.raises(BundleError, match="exists") as caught:
        check_target(tmp_path / "b", force=False)
    assert "--force" in str(caught.value)


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_not_a_bundle_is_never_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "precious"
    if kind == "file":
        path.write_text("thesis")
    else:
        path.mkdir()
        (path / "thesis.tex").write_text("thesis")
    with pytest.raises(BundleError, match="not a bundle"):
        check_target(path, force=True)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("path", ["file/b", "file/deep/b", "x" * 300, "x" * 300 + "/b"])
def test_a_place_where_no_folder_can_be_is_told(tmp_path: Path, path: str, force: bool) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BundleError, match=r"is not a folder|File name too long"):
        check_target(tmp_path / path, force=force)


def test_a_device_is_never_replaced() -> None:
    with pytest.raises(BundleError, match="/dev/null exists and is not a bundle"):
        check_target(Path("/dev/null"), force=True)


def test_force_does_not_take_away_what_the_bundle_is_made_from(tmp_path: Path) -> None:
    make_bundle(tmp_path / "b")
    (tmp_path / "b" / "model.pt").write_text("weeks of training")
    (tmp_path / "link").symlink_to(tmp_path / "b")
    for path in (tmp_path / "b", tmp_path / "link"):
        with pytest.raises(BundleError, match=r"model\.pt lies in .*, and would be replaced with it"):
            check_target(path, force=True, inputs=[tmp_path / "elsewhere", tmp_path / "b" / "model.pt"])
    check_target(tmp_path / "b", force=True, inputs=[tmp_path / "b.pt"])


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_to_a_bundle_stays_a_link(tmp_path: Path, exists: bool) -> None:
    if exists:
        make_bundle(tmp_path / "versions" / "1", "old")
    (tmp_path / "current").symlink_to(tmp_path / "versions" / "1")
    with new_bundle(tmp_path / "current", MANIFEST, force=True) as bundle:
        (bundle.path / "golden.jsonl").write_text("new")
    assert (tmp_path / "current").is_symlink()
    assert (tmp_path / "versions" / "1" / "golden.jsonl").read_text() == "new"
    assert leftovers(tmp_path / "versions") == ["1"]


def test_a_second_writer_that_was_faster_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="exists"), new_bundle(tmp_path / "b", MANIFEST, force=False):
        make_bundle(tmp_path / "b", "the faster one's")
    assert (tmp_path / "b" / "golden.jsonl").read_text() == "the faster one's"
    assert leftovers(tmp_path) == ["b"]


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    """The limit on a file's size stands for the disk's: the system refuses the same write in the same way."""
    code = f"""
import resource, sys
from dataclasses import replace
from pathlib import Path
from tests.test_bundle import MANIFEST, new_bundle, write_text
from tfm_export.errors import BundleError
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    with new_bundle(Path({str(tmp_path / "b")!r}), MANIFEST, force=False) as bundle:
        (bundle.path / "weights").write_bytes(b"x" * 5000)
except BundleError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "could not be written" in result.stdout
    assert "MB free" in result.stdout
    assert leftovers(tmp_path) == []


def test_missing_and_altered_files_are_all_named(tmp_path: Path) -> None:
    with new_bundle(tmp_path / "b", MANIFEST, force=False) as bundle:
        for name in ("missing", "longer", "flipped", "whole"):
            write_text(bundle.path / name, "0123456789")
        bundle.add_files(dict.fromkeys(("missing", "longer", "flipped", "whole"), "for the test"))
    (tmp_path / "b" / "missing").unlink()
    (tmp_path / "b" / "longer").write_text("0123456789a")
    (tmp_path / "b" / "flipped").write_text("0123456780")
    with pytest.raises(BundleError) as caught:
        Bundle.open(tmp_path / "b")
    assert len(caught.value.problems) == 3
    for name in ("missing", "longer", "flipped"):
        assert name in str(caught.value)
    assert "whole" not in str(caught.value)
    with pytest.raises(BundleError) as caught:
        Bundle.open(tmp_path / "b", check_hashes=False)
    assert "flipped" not in str(caught.value)


def altered_manifest(path: Path, **changes: object) -> None:
    state = json.loads((path / "bundle.json").read_text())
    (path / "bundle.json").write_text(json.dumps({**state, **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "format version 2.*reads up to 1"),
        ({"format_version": None}, "no format_version"),
        ({"limits": {"max_source_length": 3}}, "fields of a manifest"),
        ({"surprise": 1}, "fields of a manifest"),
        ({"files": {"x": {"sha256": "0"}}}, "fields of a manifest"),
    ],
)
def test_a_manifest_that_cannot_be_understood_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    make_bundle(tmp_path / "b")
    altered_manifest(tmp_path / "b", **changes)
    with pytest.raises(BundleError, match=message):
        Bundle.open(tmp_path / "b")


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[]", b'"text"'])
def test_a_manifest_that_is_not_one_is_refused(tmp_path: Path, content: bytes) -> None:
    make_bundle(tmp_path / "b")
    (tmp_path / "b" / "bundle.json").write_bytes(content)
    with pytest.raises(BundleError):
        Bundle.open(tmp_path / "b")


def test_what_this_user_may_not_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_bundle(tmp_path / "b")
    with monkeypatch.context() as another_user:
        another_user.setattr(os, "access", lambda path, _: Path(path).name != "golden.jsonl")
        with pytest.raises(BundleError, match=r"golden\.jsonl cannot be read by this user"):
            Bundle.open(tmp_path / "b")
    (tmp_path / "b" / "bundle.json").unlink()
    (tmp_path / "b" / "bundle.json").mkdir()
    with pytest.raises(BundleError, match=r"bundle\.json cannot be read: Is a directory"):
        Bundle.open(tmp_path / "b")


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "onnx/../../outside"])
def test_files_outside_the_bundle_are_refused(tmp_path: Path, name: str) -> None:
    bundle = make_bundle(tmp_path / "b")
    (tmp_path / "outside").write_text("secret")
    state = json.loads(bundle.manifest.to_json())
    altered_manifest(tmp_path / "b", files={name: state["files"]["golden.jsonl"]})
    with pytest.raises(BundleError, match="outside the bundle"):
        Bundle.open(tmp_path / "b")


@pytest.mark.parametrize("path", ["nothing", "file", "file/below"])
def test_what_is_no_bundle_is_told(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BundleError, match="not a bundle"):
        Bundle.open(tmp_path / path)


def test_a_variant_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no variant 'w8'"):
        make_bundle(tmp_path / "b").variant_path("w8")


def test_special_ids_of_sources_are_written_where_they_differ(tmp_path: Path) -> None:
    ids = {"pad": 0, "bos": 1, "eos": 2, "unk": None}
    own = SourceIds(pad=0, bos=2, eos=3, unk=1)
    special = SpecialIds(pad=0, bos=1, eos=2, source_starts_with_bos=True, source_ends_with_eos=True, source=own)
    text = replace(MANIFEST, special_ids=special).to_json()
    assert json.loads(text)["special_ids"]["source"] == {"pad": 0, "bos": 2, "eos": 3, "unk": 1}
    read = Manifest.from_json(text, tmp_path)
    assert read.special_ids == special
    assert read.special_ids.wrap_source([7]) == [2, 7, 3]
    same = SpecialIds(**ids, source_ends_with_eos=True, source=SourceIds(**ids))  # type: ignore[arg-type]
    assert same == SpecialIds(pad=0, bos=1, eos=2, source_ends_with_eos=True)
    assert "source" not in json.loads(replace(MANIFEST, special_ids=same).to_json())["special_ids"]
    assert same.wrap_source([7]) == [7, 2]
    wrong = text.replace('"eos": 3', '"eos": null')
    with pytest.raises(BundleError, match="sources need their eos, and have none"):
        Manifest.from_json(wrong, tmp_path)


@pytest.mark.parametrize("name", ["z" * 100_000, "a\0b"])
def test_a_name_that_no_disk_can_have_is_missing(tiny_bundle: Path, tmp_path: Path, name: str) -> None:
    state = json.loads((tiny_bundle / "bundle.json").read_text())
    state["files"] = {name: {"sha256": "", "bytes": 1, "purpose": "a test's"}}
    (tmp_path / "bundle.json").write_text(json.dumps(state))
    with pytest.raises(BundleError, match=r"is missing \(a test's\)") as caught:
        Bundle.open(tmp_path)
    assert len(str(caught.value)) < 500
