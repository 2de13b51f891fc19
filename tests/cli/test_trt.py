"""`tfm-export trt` and what `inspect` shows of engines, as a user types them."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Invoke
from tests.trt.conftest import engine_bundle, rtx, unchanged
from tfm_export.bundle import Bundle
from tfm_export.cli import trt as trt_command
from tfm_export.engines import read_engine
from tfm_export.export import export_bundle
from tfm_export.precision import PRECISIONS
from tfm_export.trt import options as trt_options

__all__ = ["engine_bundle", "rtx"]
SMALL = ("--flavor", "rtx", "--no-verify", "--max-beam-size", "2", "--max-target-length", "20")


@pytest.fixture
def bundle(tiny_variants: Path, tmp_path: Path) -> Path:
    """A bundle with every variant where the commands look for it."""
    return shutil.copytree(tiny_variants, tmp_path / "tfm_bundle")


def test_the_help_says_what_the_library_does() -> None:
    """Defaults are written down there so that the help loads nothing."""
    assert trt_command.DEFAULT_VARIANT == trt_options.DEFAULT_VARIANT
    assert trt_command.DEFAULT_BATCH == trt_options.DEFAULT_BATCH
    flags = {option for parameter in trt_command.command.params for option in parameter.opts}
    assert {f"--{variant}" for variant in PRECISIONS} <= flags


@pytest.mark.usefixtures("rtx")
def test_an_engine_is_built_and_what_was_proven_is_told(invoke: Invoke, bundle: Path) -> None:
    result = invoke("trt", "--w8", *SMALL, "--compute-capability", "86,12.0")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    record = read_engine(Bundle.open(bundle), "w8-rtx")
    assert lines[0] == f"tfm_bundle/engines/w8-rtx: TensorRT-RTX {record.flavor_version}, compute capability 8.6, 12.0"
    assert any(re.match(r"encoder 9 float16 x int8 2 float16, fused 0\.1 MB 0\.1 MB [\d.]+ MB", text) for text in lines)
    assert any(text.startswith("decoder_step_48 13 float16 x int8 4 float16, fused 4 ") for text in lines)
    assert "✓ the plans hold as many bytes of weights as the graphs" in lines
    assert "note: the graphs that were compiled were not decoded with" in lines
    assert "note: no GPU here has run it" in lines
    assert "building decoder_step_48.plan" in result.stderr


@pytest.mark.usefixtures("rtx")
def test_the_variant_is_made_first_where_it_is_missing(invoke: Invoke, tiny_bundle: Path, tmp_path: Path) -> None:
    """As somebody types it after `tfm-export onnx`: nothing but the precision."""
    shutil.copytree(tiny_bundle, tmp_path / "tfm_bundle")
    result = invoke("trt", "--fp16", "--json")
    assert result.exit_code == 0, result.output
    assert "the bundle lacks the variant fp16, so it is made first" in result.stderr
    state = json.loads(result.stdout)
    opened = Bundle.open(tmp_path / "tfm_bundle")
    assert json.loads(read_engine(opened, "fp16-rtx").to_json()) == state
    assert opened.manifest.variants.keys() == {"fp32", "fp16"}
    assert opened.manifest.variants["fp16"]["target"] == "tensorrt"
    assert set(state["agreement"].values()) == {1.0}
    assert state["max_beam_size"] == 4


@pytest.mark.usefixtures("rtx")
def test_a_bundle_without_real_inputs_gets_its_engine_and_is_told_what_was_not_judged(
    invoke: Invoke, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """As the first page of the documents types it: onnx, then trt --fp16."""
    export_bundle(tiny_checkpoint, tmp_path / "tfm_bundle", verify=False)
    result = invoke("trt", "--fp16", *SMALL, "--capacity", "16", "--compute-capability", "86")
    assert result.exit_code == 0, result.output
    assert "NOT JUDGED: the golden inputs are random ids" in result.stderr
    assert {"fp32", "fp16"} == set(Bundle.open("tfm_bundle").manifest.variants)


@pytest.mark.usefixtures("rtx")
@pytest.mark.parametrize("variant", ["fp16", "int8"])
def test_a_dry_run_says_what_would_be_built_and_changes_nothing(
    invoke: Invoke, tiny_bundle: Path, tmp_path: Path, variant: str
) -> None:
    path = shutil.copytree(tiny_bundle, tmp_path / "tfm_bundle")
    with unchanged(Bundle.open(path)):
        text = invoke("trt", f"--{variant}", *SMALL, "--dry-run", "--capacity", "16")
        state = json.loads(invoke("trt", f"--{variant}", *SMALL, "--dry-run", "--capacity", "16", "--json").stdout)
    assert text.exit_code == 0, text.output
    lines = [" ".join(line.split()) for line in text.stdout.splitlines()]
    assert lines[0].startswith(f"engines/{variant}-rtx: TensorRT-RTX")
    assert lines[1] == f"{variant}, computing in fp16; the variant is made first"
    assert "decoder_step_16 prompt 1-32 (8) 1-64 (6) 1-16 (8) 16" in lines
    assert "decoder_step_48 step 1-32 (8) 1-64 (6) 1-2 (1) 48" in lines
    cache = 2 * 2 * 4 * 16 * 2 * 48  # keys and values of 2 layers, 4 heads of 16, 2 bytes, 48 slots
    assert f"caches of a sentence, 48 slots {cache / 1e3:.1f} kB" in lines
    assert f"of that, each of 2 beams {cache / 2e3:.1f} kB" in lines
    assert state["memory"]["cache_a_sentence"] == {"16": cache // 3, "48": cache}
    assert state["memory"]["weights"].keys() == {"encoder", "decoder_step_16", "decoder_step_48"}
    assert state["profiles"]["decoder_step_16"]["step"]["target_ids"] == [[1, 1], [8, 1], [32, 2]]


@pytest.mark.usefixtures("rtx")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--fp16", "--bf16"], 2, "one precision at a time: --fp16 and --bf16"),
        (["--capacity", "64,x"], 2, "'64,x' is not a list of numbers such as 64,256"),
        (["--compute", "fp32"], 2, "'fp32' is not one of"),
        (["--max-batch-size", "0"], 2, "0 is not in the range x>=1"),
        (["--fp16", "--compute", "bf16"], 1, "compute is for quantised variants"),
        (["--fp8", "--compute-capability", "86"], 1, "fp8 needs compute capability 8.9 with TensorRT-RTX, found 8.6"),
        (["--w4", "--compute-capability", "75"], 1, "w4 needs compute capability 8.0"),
        (["--fp16", "--compute-capability", "90"], 1, "data-centre GPUs need TensorRT itself"),
        (["--fp16", "--compute-capability", "Ada"], 1, "a compute capability is a number such as 86 or 8.6"),
        (["--fp16", "--timing-cache", "t"], 1, "TensorRT-RTX ignores --timing-cache"),
        (["--fp16", "--builder-optimization-level", "1"], 1, "TensorRT-RTX ignores --builder-optimization-level"),
        (["--fp16", "--capacity", "1"], 1, "capacities must be from"),
        (["--fp16", "--name", "a/b"], 1, "name must be letters"),
    ],
)
def test_what_cannot_be_had_is_refused_in_a_sentence(
    invoke: Invoke, bundle: Path, arguments: list[str], code: int, message: str
) -> None:
    with unchanged(Bundle.open(bundle)):
        result = invoke("trt", "--flavor", "rtx", *arguments)
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_no_bundle_is_told_before_anything_is_loaded(invoke: Invoke) -> None:
    result = invoke("trt", "nowhere")
    assert result.exit_code == 1
    assert "nowhere is not a bundle" in result.stderr


def test_a_library_that_is_missing_is_told_with_its_extra(
    invoke: Invoke, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.setitem(sys.modules, module, None)
    result = invoke("trt", "--fp16")
    assert result.exit_code == 1
    assert "tensorrt is not installed" in result.stderr
    assert "tensorrt_rtx is not installed" in result.stderr
    assert "pip install 'tfm-export[rtx]'" in result.stderr
    assert Bundle.open(bundle).manifest.engines == {}


@pytest.mark.usefixtures("rtx")
@pytest.mark.full
def test_a_terminal_sees_the_phase_on_one_line(bundle: Path) -> None:
    """The line is drawn over, and ends with the time that the build took."""
    reader, writer = pty.openpty()
    command = [sys.executable, "-m", "tfm_export.cli", "trt", bundle, "--fp16", *SMALL]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=writer, stdout=subprocess.DEVNULL) as process:
        os.close(writer)
        text = b""
        while True:
            try:
                chunk = os.read(reader, 4096)
            except OSError:  # the other end is closed
                break
            if not chunk:
                break
            text += chunk
    os.close(reader)
    assert process.returncode == 0, text.decode()
    lines = text.decode().split("\r\n")
    (built,) = [line for line in lines if "decoder_step_48.plan" in line and "building" in line]
    drawn = built.split("\r")
    assert any(re.search(r"building decoder_step_48\.plan \.\.\. \w.*, \d+\.\d s$", text.rstrip()) for text in drawn)
    assert re.search(r"^building decoder_step_48\.plan \.\.\. \d+\.\d s$", drawn[-1].rstrip())


def test_inspect_shows_engines_and_says_which_are_stale(invoke: Invoke, engine_bundle: Path, tmp_path: Path) -> None:
    path = shutil.copytree(engine_bundle, tmp_path / "tfm_bundle")
    lines = [" ".join(line.split()) for line in invoke("inspect").stdout.splitlines()]
    record = read_engine(Bundle.open(path), "fp16-rtx")
    (line,) = [text for text in lines if text.startswith("fp16-rtx ")]
    expected = f"fp16-rtx TensorRT-RTX {record.flavor_version} 8.0, 8.6, 8.9, 12.0 fp16 fused 4 x 3 12, 20 16, 64"
    assert re.fullmatch(re.escape(expected) + r" [\d.]+ MB [\d.]+ MB", line)
    assert not any(text.startswith("note: engine") for text in lines)

    opened = Bundle.open(path)
    graph = path / "onnx" / "fp16" / "encoder.onnx"
    graph.write_bytes(graph.read_bytes() + b"\x00")
    opened.add_files({"onnx/fp16/encoder.onnx": "another"})
    opened.save()
    result = invoke("inspect")
    assert result.exit_code == 0
    assert "note: engine fp16-rtx: onnx_hashes: onnx/fp16/encoder.onnx has changed since it was built" in result.stdout
    assert "tfm-export trt tfm_bundle --fp16 --flavor rtx" in result.stdout


def test_a_damaged_engine_is_refused_with_the_command_that_builds_it_again(
    invoke: Invoke, engine_bundle: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(engine_bundle, tmp_path / "tfm_bundle")
    (path / "engines" / "fp16-rtx" / "encoder.plan").write_bytes(b"half of it")
    (path / "engines" / "fp16-rtx" / "engine.json").unlink()
    result = invoke("inspect")
    assert result.exit_code == 1
    assert "encoder.plan should have" in result.output
    assert "engine.json is missing" in result.output
    (command,) = re.findall(r"tfm-export (trt .* --force), or copy the bundle", result.output)
    assert invoke(*command.split(), "--no-verify").exit_code == 0
    assert invoke("inspect").exit_code == 0
    record = read_engine(Bundle.open(path), "fp16-rtx")
    assert record.facts().keys() == read_engine(Bundle.open(engine_bundle), "fp16-rtx").facts().keys()
    assert (record.max_batch_size, record.max_beam_size, record.capacities) == (4, 3, (16, 64))


def test_a_part_that_is_not_an_engine_is_exported_again(invoke: Invoke, engine_bundle: Path, tmp_path: Path) -> None:
    path = shutil.copytree(engine_bundle, tmp_path / "tfm_bundle")
    (path / "engines" / "fp16-rtx" / "encoder.plan").unlink()
    (path / "golden.jsonl").unlink()
    result = invoke("inspect")
    assert result.exit_code == 1
    assert "Try: export the bundle again, or copy" in result.output
