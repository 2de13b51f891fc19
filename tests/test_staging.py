"""Parts that join a bundle: whole or not at all, two at once, and after a writer that was killed."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.test_bundle import MANIFEST, make_bundle
from tfm_export.bundle import Bundle, Manifest, write_text
from tfm_export.errors import BundleError
from tfm_export.staging import check_part, new_bundle, new_file, new_part


def with_variant(manifest: Manifest, name: str, facts: dict[str, Any]) -> Manifest:
    return replace(manifest, variants={**manifest.variants, name: facts})


def without_variant(manifest: Manifest, name: str) -> Manifest:
    return replace(manifest, variants={n: v for n, v in manifest.variants.items() if n != name})


def add_variant(path: Path, name: str, content: str, *, force: bool = False, pause: float = 0.0) -> Bundle:
    """Add onnx/<name> with one file."""
    bundle = Bundle.open(path)
    forget = lambda manifest: without_variant(manifest, name)  # noqa: E731
    with new_part(bundle, f"onnx/{name}", force=force, forget=forget) as part:
        write_text(part.path / "graph.onnx", content)
        write_text(part.path / "scratch", "not named, so not kept")
        time.sleep(pause)
        part.purposes["graph.onnx"] = "for the test"
        part.record = lambda manifest: with_variant(manifest, name, {"weights": content})
    return bundle


def tree(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make_bundle(tmp_path / "b")
    return tmp_path / "b"


def test_a_part_joins_with_its_files_and_its_facts(path: Path) -> None:
    before = tree(path)
    bundle = add_variant(path, "w8", "eight")
    assert tree(path) == sorted([*before, "onnx/w8/graph.onnx"])
    for found in (bundle, Bundle.open(path)):
        assert found.manifest.variants["w8"] == {"weights": "eight"}
        assert found.manifest.files["onnx/w8/graph.onnx"].purpose == "for the test"
    assert (path / "onnx/w8").stat().st_mode & 0o777 == 0o755


def test_a_part_that_is_there_is_replaced_under_force_alone(path: Path) -> None:
    add_variant(path, "w8", "old")
    with pytest.raises(BundleError, match="has onnx/w8 already") as caught:
        check_part(Bundle.open(path), "onnx/w8", force=False)
    assert "--force" in str(caught.value)
    with pytest.raises(BundleError, match="has onnx/w8 already"):
        add_variant(path, "w8", "new")
    add_variant(path, "w8", "new", force=True)
    assert (path / "onnx/w8/graph.onnx").read_text() == "new"
    assert Bundle.open(path).manifest.variants["w8"] == {"weights": "new"}
    assert [p.name for p in (path / "onnx").iterdir()] == ["w8"]


def test_a_failure_leaves_the_bundle_as_it_was(path: Path) -> None:
    add_variant(path, "w8", "old")
    before, manifest = tree(path), (path / "bundle.json").read_bytes()

    def fill_and_fail() -> None:
        with new_part(Bundle.open(path), "onnx/w4", force=False, forget=lambda manifest: manifest) as part:
            write_text(part.path / "graph.onnx", "new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fill_and_fail()
    assert (tree(path), (path / "bundle.json").read_bytes()) == (before, manifest)


def test_a_writer_that_dies_between_two_renames_leaves_a_bundle_that_opens(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest forgets the old part before its files go: at no moment does it name files that are not its own."""
    add_variant(path, "w8", "old")
    renames = 0

    def die(source: Path, target: Path) -> None:
        nonlocal renames
        renames += 1
        if renames == 2:  # the old files have moved away, the new ones have not come
            raise SystemExit
        os.replace(source, target)

    monkeypatch.setattr("os.rename", die)
    with pytest.raises(SystemExit):
        add_variant(path, "w8", "new", force=True)
    monkeypatch.undo()
    assert "w8" not in Bundle.open(path).manifest.variants
    add_variant(path, "w8", "newer")  # what lies there is nobody's
    assert (path / "onnx/w8/graph.onnx").read_text() == "newer"


def run(function: Any, *arguments: Any) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_parts_that_join_at_the_same_time_all_arrive(path: Path) -> None:
    names = ["w4", "w8", "int8", "fp16"]
    writers = [run(lambda name: add_variant(path, name, name, pause=0.05), name) for name in names]
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert sorted(Bundle.open(path).manifest.variants) == sorted(names)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_what_a_killed_writer_left_behind_goes_with_the_next_one(path: Path) -> None:
    writer = run(lambda: add_variant(path, "w8", "killed", pause=60))
    leftovers: list[Path] = []
    while not (leftovers := [*path.glob("onnx/.w8.new.*/graph.onnx")]):
        time.sleep(0.01)
    assert writer.pid
    other = run(lambda: add_variant(path, "w8", "meanwhile"))
    other.join()
    assert leftovers[0].is_file(), "what a living process writes is not a leftover"
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    add_variant(path, "w8", "next", force=True)
    assert [p.name for p in (path / "onnx").iterdir()] == ["w8"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_killed_export_leaves_nothing_for_long(tmp_path: Path) -> None:
    def export(pause: float) -> None:
        with new_bundle(tmp_path / "b", MANIFEST, force=False) as bundle:
            write_text(bundle.path / "golden.jsonl", "x")
            time.sleep(pause)

    writer = run(export, 60)
    while not [*tmp_path.glob(".b.new.*/golden.jsonl")]:
        time.sleep(0.01)
    assert writer.pid
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    export(0)
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def die_at_the_second_rename() -> None:
    """Kill this process once the old files have moved away, before the new ones come."""
    renames, rename = 0, os.rename

    def counted(source: Path, target: Path) -> None:
        nonlocal renames
        renames += 1
        if renames == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    os.rename = counted


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_what_a_killed_writer_had_moved_away_goes_with_the_next_one_of_any_part(path: Path) -> None:
    def replace_and_die() -> None:
        die_at_the_second_rename()
        add_variant(path, "w8", "new", force=True)

    add_variant(path, "w8", "old")
    writer = run(replace_and_die)
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    left = sorted(p.name.rpartition(".")[0] for p in (path / "onnx").iterdir())
    assert left == [".w8.new", ".w8.old"]
    assert "w8" not in Bundle.open(path).manifest.variants
    add_variant(path, "int8", "another")
    assert [p.name for p in (path / "onnx").iterdir()] == ["int8"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_bundle_that_a_killed_writer_had_moved_away_comes_back(tmp_path: Path) -> None:
    def export(content: str, *, force: bool, dies: bool = False) -> None:
        if dies:
            die_at_the_second_rename()
        with new_bundle(tmp_path / "b", MANIFEST, force=force) as bundle:
            write_text(bundle.path / "golden.jsonl", content)

    export("old", force=False)
    writer = run(lambda: export("new", force=True, dies=True))
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    assert not (tmp_path / "b").exists()
    with pytest.raises(BundleError, match="b exists"):
        export("newer", force=False)
    assert (tmp_path / "b" / "golden.jsonl").read_text() == "old"
    export("newer", force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["b"]
    assert (tmp_path / "b" / "golden.jsonl").read_text() == "newer"


def test_a_bundle_that_may_not_be_written_to_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(BundleError, match="cannot be written to"):
        check_part(Bundle(path, MANIFEST), "onnx/w8", force=False)


GRAPH = "onnx/w8/generate.onnx"


def add_file(path: Path, content: str, *, force: bool = False) -> Bundle:
    """Add onnx/w8/generate.onnx."""
    bundle = Bundle.open(path)
    with new_file(bundle, GRAPH, "one call", force=force) as file:
        file.write_text(content)
    return bundle


def test_a_file_joins_a_part_readable_by_all(path: Path) -> None:
    add_variant(path, "w8", "eight")
    before = tree(path)
    bundle = add_file(path, "a graph")
    assert tree(path) == sorted([*before, GRAPH])
    assert (path / GRAPH).stat().st_mode & 0o777 == 0o644
    for found in (bundle, Bundle.open(path)):
        assert found.manifest.files[GRAPH].purpose == "one call"


def test_a_file_is_replaced_only_with_force(path: Path) -> None:
    add_variant(path, "w8", "eight")
    add_file(path, "a graph")
    with pytest.raises(BundleError, match=r"(?s)has onnx/w8/generate.onnx already.*--force"):
        add_file(path, "another")
    assert (path / GRAPH).read_text() == "a graph"
    add_file(path, "another", force=True)
    assert (path / GRAPH).read_text() == "another"
    Bundle.open(path)


def test_a_file_that_fails_leaves_nothing(path: Path) -> None:
    add_variant(path, "w8", "eight")
    before = tree(path)

    def fill_and_fail() -> None:
        with new_file(Bundle.open(path), GRAPH, "one call", force=False) as file:
            file.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fill_and_fail()
    assert tree(path) == before
    assert GRAPH not in Bundle.open(path).manifest.files


@pytest.mark.parametrize("content", ["eight", "other weights"])
def test_a_file_does_not_join_a_part_that_was_replaced_meanwhile(path: Path, content: str) -> None:
    add_variant(path, "w8", "eight")

    def write_while_the_part_is_replaced() -> None:
        with new_file(Bundle.open(path), GRAPH, "one call", force=False) as file:
            file.write_text("of the old weights")
            add_variant(path, "w8", content, force=True)

    with pytest.raises(BundleError, match=r"(?s)onnx/w8 was replaced while generate.onnx.*once more"):
        write_while_the_part_is_replaced()
    assert GRAPH not in Bundle.open(path).manifest.files
    assert not (path / GRAPH).exists()


def test_a_file_goes_with_the_part_that_is_replaced(path: Path) -> None:
    add_variant(path, "w8", "eight")
    add_file(path, "a graph")
    add_variant(path, "w8", "other weights", force=True)
    assert GRAPH not in Bundle.open(path).manifest.files
    assert not (path / GRAPH).exists()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_what_a_killed_writer_left_of_a_file_goes_with_the_next_one(path: Path) -> None:
    add_variant(path, "w8", "eight")

    def write(content: str, pause: float) -> None:
        with new_file(Bundle.open(path), GRAPH, "one call", force=True) as file:
            file.write_text(content)
            time.sleep(pause)

    writer = run(write, "killed", 60)
    while not (leftovers := [p for p in path.glob("onnx/w8/.generate.onnx.new.*") if p.read_text()]):
        time.sleep(0.01)
    write("meanwhile", 0)
    assert leftovers[0].read_text() == "killed", "what a living process writes is not a leftover"
    assert writer.pid
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    write("next", 0)
    assert sorted(p.name for p in (path / "onnx/w8").iterdir()) == ["generate.onnx", "graph.onnx"]
    assert (path / GRAPH).read_text() == "next"
    Bundle.open(path)


@pytest.mark.parametrize(
    "problem",
    [
        FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/nowhere/calibration.txt"),
        PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/root/lines.txt"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/elsewhere/file"),  # full, but not the bundle's disk
        ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)),
        BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)),  # as a fork fails
        OSError("a library's own words"),
    ],
    ids=lambda problem: type(problem).__name__,
)
def test_errors_of_something_else_are_not_told_as_a_failed_write(path: Path, problem: OSError) -> None:
    before = tree(path)

    def fail() -> None:
        with new_part(Bundle.open(path), "onnx/w8", force=False, forget=lambda manifest: manifest):
            raise problem

    with pytest.raises(OSError, match=str(problem).replace("[", r"\[")) as raised:
        fail()
    assert raised.value is problem
    assert tree(path) == before


def test_a_full_disk_is_told_as_one_and_other_failed_writes_by_their_own_words(path: Path) -> None:
    def fail(problem: Callable[[Path], OSError]) -> str:
        def write() -> None:
            with new_part(Bundle.open(path), "onnx/w8", force=False, forget=lambda manifest: manifest) as part:
                raise problem(part.path)

        with pytest.raises(BundleError) as raised:
            write()
        return str(raised.value)

    full = fail(lambda _: OSError(errno.ENOSPC, "No space left on device"))
    assert "No space left on device" in full
    assert "MB free there" in full
    assert "Try: make room, or copy the bundle to another disk" in full
    refused = fail(lambda folder: PermissionError(errno.EACCES, "Permission denied", str(folder / "encoder.onnx")))
    assert "Permission denied" in refused
    assert "MB free" not in refused
    assert "Try: copy the bundle to another disk" in refused
