"""A bundle that is replaced, deleted or written to while it is loaded, and after: what was loaded is what runs."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tfm_export
from tests import skips
from tests.conftest import build_tiny_model
from tests.emulation.onnx_cuda import emulated_provider
from tests.model.conftest import ROOT, WORDS
from tests.once import Once
from tfm_export import BundleError, RequestError
from tfm_export.bundle import MANIFEST, Bundle
from tfm_export.graph import DECODER_STEP, DECODER_STEP_ATTENTION, ENCODER, WEIGHTS
from tfm_export.model import Model
from tfm_export.pinned_folder import pinned_folder
from tfm_export.runtime import variant_files
from tfm_export.runtime.cpu import onnx_runtime

FP32 = "onnx/fp32"
load_module = importlib.import_module("tfm_export.model.load")  # whose name is also that of a function
Answers = list[tuple[list[int], Any]]


@pytest.fixture(scope="session")
def versions(tiny_bundle: Path, once: Once) -> Path:
    """Bundles of two models, `old` and `new`, that give attention. Do not change them: copy them."""

    def make(folder: Path) -> None:
        from tfm_export.export.variant import write_fp32_variant

        for seed, name in enumerate(["old", "new"]):
            shutil.copytree(tiny_bundle, folder / name)
            model = build_tiny_model(seed, norm_first=True, final_norm=True)
            shutil.rmtree(folder / name / FP32)
            write_fp32_variant(model, folder / name / FP32, attention_layer=1)
            bundle = Bundle.open(folder / "old", check_hashes=False, unchecked="onnx")
            bundle = Bundle(folder / name, bundle.manifest)
            bundle.add_files(dict.fromkeys((f"{FP32}/{file.name}" for file in (folder / name / FP32).iterdir()), "it"))
            bundle.save()

    return once("updates", make)


@pytest.fixture
def served(versions: Path, tmp_path: Path) -> Path:
    """A folder with `old`, `new`, and the link `current` to the old one."""
    folder = shutil.copytree(versions, tmp_path / "served")
    (folder / "current").symlink_to("old")
    return folder


def flip(folder: Path, link: str, target: str) -> None:
    """Let a link lead elsewhere, from one moment to the next."""
    (folder / "next").symlink_to(target)
    os.replace(folder / "next", folder / link)


def replace_by_rename(folder: Path) -> None:
    os.rename(folder / "old", folder / "older")
    os.rename(folder / "new", folder / "old")


def replace_and_delete(folder: Path) -> None:
    replace_by_rename(folder)
    shutil.rmtree(folder / "older")


def flip_link(folder: Path) -> None:
    flip(folder, "current", "new")


def delete(folder: Path) -> None:
    shutil.rmtree(folder / "old")


SWAPS = [replace_by_rename, replace_and_delete, flip_link, delete]


def answers(model: Model, *, attention: bool) -> Answers:
    found = [h for g in model.generate(WORDS, return_attention=attention) for h in g.hypotheses]
    return [(h.tokens, h.attention) for h in found]


def expected(bundle: Path, *, attention: bool) -> Answers:
    with tfm_export.load(bundle, threads=1) as model:
        return answers(model, attention=attention)


def assert_same(found: Answers, wanted: Answers) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    for (_, ours), (_, theirs) in zip(found, wanted, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or np.array_equal(ours, theirs)


def test_the_two_models_differ(versions: Path) -> None:
    old, new = (expected(versions / name, attention=True) for name in ("old", "new"))
    assert [tokens for tokens, _ in old] != [tokens for tokens, _ in new]


@pytest.mark.parametrize("swap", SWAPS, ids=lambda swap: swap.__name__)
@pytest.mark.parametrize("copy", [None, False], ids=["copied", "mapped"])
def test_attention_that_is_first_wanted_after_a_swap_is_the_loaded_models(
    served: Path, versions: Path, swap: Callable[[Path], None], copy: bool | None
) -> None:
    with tfm_export.load(served / "current", threads=1, copy=copy) as model:
        swap(served)
        assert_same(answers(model, attention=True), expected(versions / "old", attention=True))
        assert_same(answers(model, attention=False), expected(versions / "old", attention=False))


@pytest.mark.parametrize("swap", SWAPS, ids=lambda swap: swap.__name__)
def test_on_a_gpu_attention_is_the_loaded_models_too(
    served: Path, versions: Path, swap: Callable[[Path], None]
) -> None:
    with emulated_provider(), tfm_export.load(served / "current", device=0) as model:
        assert "GPU 0" in model.backend
        swap(served)
        found = answers(model, attention=True)
    assert_same(found, expected(versions / "old", attention=True))


def test_on_a_gpu_a_missing_graph_is_told_each_time(tiny_bundle: Path) -> None:
    with emulated_provider(), tfm_export.load(tiny_bundle, device=0) as model:
        for _ in range(2):
            with pytest.raises(RequestError, match=r"the bundle has no decoder_step_attention\.onnx"):
                model.generate("hello", return_attention=True)


@pytest.mark.parametrize("copy", [None, False], ids=["copied", "mapped"])
def test_a_relative_path_may_lead_elsewhere_after_loading(
    served: Path, versions: Path, monkeypatch: pytest.MonkeyPatch, copy: bool | None
) -> None:
    monkeypatch.chdir(served)
    with tfm_export.load("old", threads=1, copy=copy) as model:
        (served / "elsewhere").mkdir()
        monkeypatch.chdir(served / "elsewhere")
        assert_same(answers(model, attention=True), expected(versions / "old", attention=True))


@pytest.mark.parametrize("at", [ENCODER, DECODER_STEP])
@pytest.mark.parametrize("swap", SWAPS[:3], ids=lambda swap: swap.__name__)
def test_a_swap_between_two_graphs_mixes_nothing(
    served: Path, versions: Path, monkeypatch: pytest.MonkeyPatch, swap: Callable[[Path], None], at: str
) -> None:
    load_session, swapped = onnx_runtime.load_session, []

    def load_later(files: Any, name: str, *arguments: Any, **options: Any) -> Any:
        if name == at and not swapped:
            swapped.append(swap(served))
        return load_session(files, name, *arguments, **options)

    monkeypatch.setattr(onnx_runtime, "load_session", load_later)
    with tfm_export.load(served / "current", threads=1, copy=False) as model:
        assert swapped
        assert_same(answers(model, attention=True), expected(versions / "old", attention=True))


@pytest.mark.parametrize("swap", [replace_by_rename, flip_link], ids=lambda swap: swap.__name__)
def test_a_swap_between_the_manifest_and_the_graphs_mixes_nothing(
    served: Path, versions: Path, monkeypatch: pytest.MonkeyPatch, swap: Callable[[Path], None]
) -> None:
    load_tokenizer = load_module.load_tokenizer

    def swap_first(bundle: Bundle) -> Any:
        swap(served)
        return load_tokenizer(bundle)

    monkeypatch.setattr(load_module, "load_tokenizer", swap_first)
    with tfm_export.load(served / "current", threads=1) as model:
        monkeypatch.undo()
        assert_same(answers(model, attention=False), expected(versions / "old", attention=False))


def test_where_paths_cannot_be_held_a_swap_is_refused(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on systems without /proc."""
    load_tokenizer, is_dir = load_module.load_tokenizer, Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda self: not str(self).startswith("/proc/") and is_dir(self))
    tfm_export.load(served / "current", threads=1).close()

    def swap_first(bundle: Bundle) -> Any:
        replace_by_rename(served)
        return load_tokenizer(bundle)

    monkeypatch.setattr(load_module, "load_tokenizer", swap_first)
    with pytest.raises(BundleError, match=r"was replaced or written to after bundle\.json was read"):
        tfm_export.load(served / "current", threads=1)


def write_over(file: Path, other: Path) -> None:
    """Change a file in place, as an update never should."""
    with open(file, "r+b") as out:
        out.write(other.read_bytes())


def test_weights_that_are_written_to_in_place_change_no_answer(served: Path, versions: Path) -> None:
    with tfm_export.load(served / "old", threads=1) as model:
        write_over(served / "old" / FP32 / WEIGHTS, versions / "new" / FP32 / WEIGHTS)
        assert_same(answers(model, attention=False), expected(versions / "old", attention=False))
        with pytest.raises(BundleError, match=r"weights\.bin was written to after it had been loaded") as raised:
            model.generate("hello", return_attention=True)
        assert "write an update to a new folder" in str(raised.value)


def test_weights_that_were_only_touched_are_the_same(served: Path, versions: Path) -> None:
    with tfm_export.load(served / "old", threads=1) as model:
        os.utime(served / "old" / FP32 / WEIGHTS, ns=(1, 1))
        assert_same(answers(model, attention=True), expected(versions / "old", attention=True))


def test_a_graph_that_is_written_to_in_place_is_not_read_again(served: Path, versions: Path) -> None:
    graph = f"{FP32}/{DECODER_STEP_ATTENTION}"
    with tfm_export.load(served / "old", threads=1) as model:
        (served / "old" / graph).write_bytes(b"another graph")
        assert_same(answers(model, attention=True), expected(versions / "old", attention=True))


TRUNCATED = """
import os, sys, tfm_export
from tfm_export.graph import WEIGHTS
path, weights, copy = sys.argv[1], sys.argv[2], {"None": None, "True": True}[sys.argv[3]]
with tfm_export.load(path, threads=1, copy=copy) as model:
    before = model.generate("hello").hypotheses[0].tokens
    os.truncate(weights, 0)
    assert model.generate("hello").hypotheses[0].tokens == before
    try:
        model.generate("hello", return_attention=True)
    except tfm_export.BundleError as error:
        print(error.problems[0])
"""


@pytest.mark.parametrize(("copy", "limit"), [(None, None), (True, "0")], ids=["small", "asked_for"])
def test_truncated_weights_end_no_process(served: Path, copy: bool | None, limit: str | None) -> None:
    script = (
        TRUNCATED
        if limit is None
        else f"from tfm_export.runtime import variant_files as v\nv.COPIED_UP_TO = {limit}\n{TRUNCATED}"
    )
    weights = served / "old" / FP32 / WEIGHTS
    done = subprocess.run(
        [sys.executable, "-c", script, served / "old", weights, str(copy)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{weights} was written to after it had been loaded\n"


def test_small_weights_are_copied_and_large_ones_mapped(versions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mapped() -> bool:
        found = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        return any(str(versions) in line and line.endswith(WEIGHTS) for line in found)  # others may be mapped, too

    if not sys.platform.startswith("linux"):
        skips.skip("/proc, which tells what is mapped", *skips.ON_LINUX)
    for limit, copy, expects in (
        (64_000_000, None, False),
        (0, None, True),
        (0, True, False),
        (64_000_000, False, True),
    ):
        monkeypatch.setattr(variant_files, "COPIED_UP_TO", limit)
        with tfm_export.load(versions / "old", threads=1, copy=copy):
            assert mapped() is expects
        assert not mapped()


def test_no_descriptor_stays_open(versions: Path) -> None:
    def descriptors() -> list[str]:
        return [
            f for n in os.listdir("/proc/self/fd") if str(versions) in (f := os.path.realpath(f"/proc/self/fd/{n}"))
        ]

    with tfm_export.load(versions / "old", threads=1) as model:
        assert descriptors() == [str(versions / "old" / FP32 / WEIGHTS)]
        model.generate("hello", return_attention=True)
    assert descriptors() == []
    with pytest.raises(BundleError):
        tfm_export.load(versions / "old", threads=1, variant="w8")
    assert descriptors() == []


def test_a_bundle_without_the_graph_of_attention_says_so(tiny_bundle: Path) -> None:
    with (
        tfm_export.load(tiny_bundle, threads=1) as model,
        pytest.raises(RequestError, match=r"the bundle has no decoder_step_attention\.onnx"),
    ):
        model.generate("hello", return_attention=True)


def linked(bundle: Path, folder: Path, style: str) -> Path:
    """A bundle whose files are links, as caches and volumes have them."""
    files = [file.relative_to(bundle) for file in sorted(bundle.rglob("*")) if file.is_file()]
    view = folder / "view"
    view.mkdir(parents=True)
    if style == "kubernetes":  # links of the top level lead through ..data, which leads to a dated folder
        shutil.copytree(bundle, view / "..2026_12_01_06_00_00.1")
        (view / "..data").symlink_to("..2026_12_01_06_00_00.1")
        for name in {file.parts[0] for file in files}:
            (view / name).symlink_to(f"..data/{name}")
        return view
    for number, file in enumerate(files):
        blob = folder / "blobs" / (str(number) if style == "hub" else f"{number}/{file.name}")
        blob.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(bundle / file, blob)
        (view / file).parent.mkdir(parents=True, exist_ok=True)
        (view / file).symlink_to(os.path.relpath(blob, (view / file).parent) if style == "hub" else blob)
    return view


@pytest.mark.parametrize("copy", [None, False], ids=["copied", "mapped"])
@pytest.mark.parametrize("style", ["hub", "store", "kubernetes"])
def test_folders_of_links_load(versions: Path, tmp_path: Path, style: str, copy: bool | None) -> None:
    view = linked(versions / "old", tmp_path, style)
    Bundle.open(view)
    with tfm_export.load(view, threads=1, copy=copy) as model:
        assert_same(answers(model, attention=True), expected(versions / "old", attention=True))
    shutil.copy(versions / "new" / FP32 / WEIGHTS, (view / FP32 / WEIGHTS).resolve())
    with pytest.raises(BundleError, match=r"weights\.bin was altered"):
        tfm_export.load(view, threads=1)


@pytest.mark.parametrize("copy", [None, False], ids=["copied", "mapped"])
def test_a_volume_of_kubernetes_is_updated_while_it_is_loaded(
    versions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy: bool | None
) -> None:
    view, load_tokenizer = linked(versions / "old", tmp_path, "kubernetes"), load_module.load_tokenizer
    shutil.copytree(versions / "new", view / "..2026_12_02_06_00_00.2")

    def update_first(bundle: Bundle) -> Any:
        flip(view, "..data", "..2026_12_02_06_00_00.2")
        shutil.rmtree(view / "..2026_12_01_06_00_00.1" / "reports")
        return load_tokenizer(bundle)

    monkeypatch.setattr(load_module, "load_tokenizer", update_first)
    with tfm_export.load(view, threads=1, copy=copy) as model:
        monkeypatch.undo()
        shutil.rmtree(view / "..2026_12_01_06_00_00.1")  # as the kubelet does
        assert_same(answers(model, attention=True), expected(versions / "old", attention=True))
    assert_same(expected(view, attention=True), expected(versions / "new", attention=True))


def test_a_folder_that_is_not_there_is_its_own_path(tmp_path: Path) -> None:
    with pinned_folder(tmp_path / "nothing") as folder:
        assert folder == tmp_path / "nothing"
    (tmp_path / MANIFEST).write_text("{}")
    with pinned_folder(tmp_path) as folder:
        os.rename(tmp_path, tmp_path.with_name("moved"))
        assert (folder / MANIFEST).read_text() == "{}" or not Path("/proc/self/fd").exists()
    os.rename(tmp_path.with_name("moved"), tmp_path)
