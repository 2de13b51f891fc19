"""Products of 8-bit numbers on processors that would cut off their sums."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from tests.processors.hide import NEEDED, PROCESSORS, build_library, problem
from tests.skips import skip
from tests.trt.variants import add_variant
from tfm_export.bundle import Bundle
from tfm_export.cli import cli
from tfm_export.cli.doctor import _way_rows
from tfm_export.errors import RequestError
from tfm_export.generate_graph import add_generate_graph
from tfm_export.runtime import onnx_sessions, probes
from tfm_export.runtime.backends import open_backend
from tfm_export.runtime.cpu import onnx_runtime, saturation
from tfm_export.runtime.cpu.onnx_runtime import OnnxModel
from tfm_export.runtime.cpu.processor import CpuFeatures, cpu_features
from tfm_export.runtime.cpu.saturation import generate_graph_problem, needs_wide_sums, saturation_note

ROOT = Path(__file__).parents[3]
ROUNDING = 1e-5  # other kernels add float32 in another order: 5e-7 was found
CUT_OFF = 1e-2  # log-probabilities of the calibrated g2p model change by up to 0.27
CLIPPED = 1.0  # many activations are the largest number that 8 bits hold

OLD = CpuFeatures(name="Old", machine="x86_64", instruction_sets=("avx2", "fma"))
NEW = replace(OLD, name="New", instruction_sets=("avx2", "fma", "vnni"))
ARM = CpuFeatures(name="Graviton", machine="aarch64", instruction_sets=("neon",))

Run = Callable[..., NDArray[np.float64]]


@pytest.fixture(scope="module")
def variants(g2p_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained example in int8 with weights of 8 bits, in w8 with the encoder of int8, and in w4.

    As a bundle of old: it does not record the range of weights.
    """
    path = shutil.copytree(g2p_bundle, tmp_path_factory.mktemp("saturation") / "tfm_bundle")
    bundle = Bundle.open(path)
    add_variant(bundle, "int8", threshold=CLIPPED)
    add_variant(bundle, "w8", int8_encoder=True, threshold=CLIPPED)
    add_variant(bundle, "w4")
    for name in ("int8", "w8"):
        add_generate_graph(bundle, name, verify=False)
    return path


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if found := problem():
        skip("a compiler and a processor whose cpuid can be hidden", "make test", "on such a machine", found=found)
    built = build_library(tmp_path_factory.mktemp("cpuid"))
    if found := problem(built):
        skip("a processor whose cpuid can be hidden", "make test", "on such a machine", found=found)
    return built


@pytest.fixture
def run(library: Path, tmp_path: Path) -> Run:
    """Run a variant in a process that finds another processor."""

    def run_(processor: str, bundle: Path, variant: str, *options: str) -> NDArray[np.float64]:
        if processor and (missing := NEEDED[processor] - set(cpu_features().instruction_sets)):
            skip(f"a processor with {', '.join(sorted(missing))}", "make test", "on such a machine")
        file = tmp_path / "found.npy"
        command = [sys.executable, "-m", "tests.processors.hide"]
        subprocess.run([*command, library, processor, bundle, variant, file, *options], cwd=ROOT, check=True)
        found: NDArray[np.float64] = np.load(file)
        return found

    return run_


@pytest.mark.slow
@pytest.mark.parametrize("processor", PROCESSORS)
def test_int8_gives_the_same_numbers_on_every_processor(variants: Path, run: Run, processor: str) -> None:
    """Left to itself, ONNX Runtime gives others where `CpuFeatures` says that sums are cut off, and only there."""
    here, there = run("", variants, "int8"), run(processor, variants, "int8")
    assert np.abs(here - there).max() < ROUNDING
    narrow = np.abs(here - run(processor, variants, "int8", "narrow")).max()
    saturates = replace(OLD, instruction_sets=PROCESSORS[processor][1]).saturates
    assert narrow > CUT_OFF if saturates else narrow < ROUNDING


@pytest.mark.slow
def test_weights_of_7_bits_need_nothing(g2p_bundle: Path, run: Run, tmp_path: Path) -> None:
    path = shutil.copytree(g2p_bundle, tmp_path / "tfm_bundle")
    add_variant(Bundle.open(path), "int8", reduced_range=True, threshold=CLIPPED)
    here = run("", path, "int8")
    assert np.abs(here - run("AVX2", path, "int8", "narrow")).max() < ROUNDING
    assert np.abs(here - run("AVX2", path, "int8")).max() < ROUNDING


@pytest.mark.slow
def test_the_encoder_of_int8_before_w8_is_exact_and_generate_onnx_is_for_int8(variants: Path, run: Run) -> None:
    """w8 and w4 round activations otherwise on AVX2 than here, by some hundredths; nothing saturates."""
    assert np.abs(run("", variants, "w8") - run("AVX2", variants, "w8")).max() < 0.1
    encoders = [run(processor, variants, "w8/encoder") for processor in ("", "AVX2")]
    assert np.abs(encoders[0] - encoders[1]).max() < ROUNDING
    np.testing.assert_allclose(run("", variants, "int8/generate"), run("AVX2", variants, "int8/generate"), atol=1e-4)


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saturation, "cpu_features", lambda: OLD)


@pytest.mark.parametrize(
    ("processor", "variant", "file", "wide"),
    [
        (OLD, "int8", "encoder", True),
        (OLD, "int8", "decoder_step", True),
        (OLD, "w8", "encoder", True),  # that of int8
        (OLD, "w8", "decoder_step", False),
        (OLD, "w4", "encoder", False),
        (OLD, "fp32", "decoder_step", False),
        (NEW, "int8", "encoder", False),
        (ARM, "int8", "encoder", False),
    ],
)
def test_sums_are_wide_where_the_graph_and_the_processor_need_it(
    variants: Path, monkeypatch: pytest.MonkeyPatch, processor: CpuFeatures, variant: str, file: str, wide: bool
) -> None:
    monkeypatch.setattr(saturation, "cpu_features", lambda: processor)
    assert needs_wide_sums((variants / f"onnx/{variant}/{file}.onnx").read_bytes()) is wide
    asked: list[bool] = []
    options = onnx_sessions.session_options

    def spy(threads: int, *, exact: bool, wide_sums: bool) -> object:
        found = options(threads, exact=exact, wide_sums=wide_sums)
        if wide_sums:
            assert found.get_session_config_entry("session.x64quantprecision") == "1"
        else:
            with pytest.raises(RuntimeError, match="x64quantprecision"):
                found.get_session_config_entry("session.x64quantprecision")
        asked.append(wide_sums)
        return found

    monkeypatch.setattr(onnx_runtime, "session_options", spy)
    OnnxModel(Bundle.open(variants, check_hashes=False), variant=variant, threads=1).close()
    assert asked[file == "decoder_step"] is wide


@pytest.mark.usefixtures("old")
def test_a_bundle_that_does_not_record_the_range_loads_and_says_what_is_assumed(
    variants: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = Bundle.open(variants, check_hashes=False)
    assert "reduced_range" not in bundle.manifest.variants["int8"]
    with caplog.at_level(logging.INFO, "tfm_export"):
        candidate, model = open_backend(bundle, variant="int8", device="cpu", threads=1)
    model.close()
    assert str(candidate) == "int8 with ONNX Runtime on the CPU"
    note = saturation_note(bundle, "int8")
    assert note is not None
    assert "does not say whether weights have 7 bits or 8, and 8 are assumed, and Old has neither VNNI nor AMX" in note
    assert f"tfm-export quantize {variants} --int8 --reduced-range --force" in note
    assert f"int8: {note}" in caplog.messages


@pytest.mark.usefixtures("old")
def test_a_draft_that_is_slow_is_told_too(variants: Path, caplog: pytest.LogCaptureFixture) -> None:
    bundle = Bundle.open(variants, check_hashes=False)
    with caplog.at_level(logging.INFO, "tfm_export"):
        _, model = open_backend(bundle, draft="int8", device="cpu", threads=1)
    model.close()
    assert f"int8: {saturation_note(bundle, 'int8')}" in caplog.messages


@pytest.mark.parametrize(
    ("variant", "facts", "processor", "found"),
    [
        ("int8", {"reduced_range": False}, OLD, "weights have 8 bits, and Old has"),
        ("int8", {"reduced_range": True}, OLD, None),
        ("int8", {"reduced_range": False}, NEW, None),
        ("int8", {"reduced_range": False}, ARM, None),
        ("w8", {"int8_encoder": True, "reduced_range": False}, OLD, "quantize b --w8 --int8-encoder --reduced-range"),
        ("w8", {"int8_encoder": True, "reduced_range": True}, OLD, None),
        ("w4", {"int8_encoder": False}, OLD, None),
        ("fp8", {}, OLD, None),
    ],
)
def test_the_note(
    tiny_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    facts: dict[str, bool],
    processor: CpuFeatures,
    found: str | None,
) -> None:
    monkeypatch.setattr(saturation, "cpu_features", lambda: processor)
    manifest = Bundle.open(tiny_bundle).manifest
    bundle = Bundle(Path("b"), replace(manifest, variants={"fp32": {}, variant: facts}))
    note = saturation_note(bundle, variant)
    assert (note is None) if found is None else (note is not None and found in note)
    assert (generate_graph_problem(bundle, variant) is None) is (found is None or variant == "int8")


@pytest.mark.usefixtures("old")
def test_doctor_and_inspect_and_verify_tell(variants: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    way = next(way for way in probes.bundle(str(variants))["ways"] if way["variant"] == "int8" and way["gpu"] is None)
    assert way["problem"] is None
    rows = _way_rows({"ways": [way], "taken": None})
    assert rows[0][1].startswith("yes; the bundle does not say whether weights have 7 bits or 8")

    path = shutil.copytree(tiny_bundle, tmp_path / "tfm_bundle")
    bundle = Bundle.open(path)
    add_variant(bundle, "int8")
    bundle.manifest.variants["int8"]["reduced_range"] = False
    bundle.save()
    inspected = CliRunner().invoke(cli, ["inspect", str(path)])
    assert "; range 8 bits" in inspected.stdout
    assert "note: int8: weights have 8 bits, and Old has neither" in inspected.stdout
    verified = CliRunner().invoke(cli, ["verify", str(path), "--json"])
    assert "note: int8: weights have 8 bits, and Old has neither" in verified.stderr


@pytest.mark.usefixtures("old")
def test_generate_onnx_of_both_kinds_is_refused_where_it_would_saturate(variants: Path) -> None:
    with pytest.raises(
        RequestError, match=r"generate\.onnx of w8 with an int8 encoder may need weights of 7 bits on Old"
    ):
        add_generate_graph(Bundle.open(variants), "w8", force=True)
