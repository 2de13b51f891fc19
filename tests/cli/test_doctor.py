"""`tfm-export doctor`: tells what there is, whatever is broken."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.skips import ON_LINUX, skip_if
from tfm_export.cli import cli, doctor

NOTHING = {name: {"problem": "nothing known"} for name in (*doctor.PROBES, "bundle")}


def run_doctor(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["doctor", *map(str, arguments)], catch_exceptions=False)


def test_json_has_everything(tiny_bundle: Path) -> None:
    result = run_doctor(tiny_bundle, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert set(found) == {*doctor.PROBES, "bundle"}
    assert found["machine"]["usable_cpus"] >= 1
    assert found["machine"]["python"] == ".".join(map(str, sys.version_info[:3]))
    packages = {package["name"]: package for package in found["packages"]["packages"]}
    assert packages["onnxruntime"]["extras"] == ["cpu"]
    assert packages["numpy"]["extras"] == []
    assert "pytest" not in packages
    assert "CPUExecutionProvider" in found["onnxruntime"]["providers"]
    (on_cpu,) = [way for way in found["bundle"]["ways"] if way["gpu"] is None]
    assert (on_cpu["variant"], on_cpu["problem"]) == ("fp32", None)
    assert found["bundle"]["path"] == str(tiny_bundle)
    assert found["bundle"]["taken"]


def test_people_see_tables(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(tiny_bundle, tmp_path / "tfm_bundle")
    monkeypatch.chdir(tmp_path)
    result = run_doctor()
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert any(line.startswith("fp32 with ONNX Runtime on the CPU yes") for line in lines), result.stdout
    assert any(line.startswith("onnxruntime ") and line.endswith(" cpu") for line in lines), result.stdout
    assert "✗" not in result.stdout


BROKEN = {
    "onnxruntime.py": "raise ImportError('libsomething.so.7: cannot open shared object file')",
    "tensorrt.py": f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})",
    "tensorrt_rtx.py": "import sys; print('{not JSON'); sys.exit(3)",
    "cuda/__init__.py": "raise ValueError('a cuda that is none')",
}


@skip_if(sys.platform == "win32", "signals of POSIX", *ON_LINUX)
def test_no_broken_library_takes_it_down(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, code in BROKEN.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = run_doctor(tiny_bundle, "--json")
    found = json.loads(result.stdout)
    assert "onnxruntime cannot be loaded: libsomething.so.7" in found["onnxruntime"]["problem"]
    assert "was ended by SIGSEGV" in found["tensorrt"]["problem"]
    assert "ended with exit code 3" in found["tensorrt_rtx"]["problem"]
    assert found["cuda_python"]["problem"] == "ValueError: a cuda that is none"
    assert "libsomething" in found["bundle"]["ways"][-1]["problem"]
    assert (result.exit_code, found["bundle"]["taken"]) == (1, None)
    assert found["machine"]["usable_cpus"] >= 1
    assert doctor.complaints(found) == [f"nothing of {tiny_bundle} runs here"]


def test_a_library_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tensorrt.py").write_text("import time; time.sleep(100)", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "PROBES", ("tensorrt",))
    monkeypatch.setattr(doctor, "SECONDS", 0.5)
    assert doctor.examine(None) == {"tensorrt": {"problem": "no answer within 0 seconds"}}


def test_without_an_interpreter_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    found = doctor.examine(None)
    assert all("Python cannot be started" in probe["problem"] for probe in found.values())
    doctor.print_findings(found, None)


def test_whatever_is_unknown_is_printed_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.print_findings(NOTHING, Path("bundle"))
    assert capsys.readouterr().out.count("nothing known") >= len(doctor.PROBES)


def test_a_folder_named_like_a_library_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "onnxruntime").mkdir()
    (tmp_path / "onnxruntime/__init__.py").write_text("raise RuntimeError", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "PROBES", ("onnxruntime",))
    assert "version" in doctor.examine(None)["onnxruntime"]


@pytest.mark.parametrize("damage", ["missing", "altered"])
def test_a_bundle_that_cannot_be_read(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str
) -> None:
    monkeypatch.setattr(doctor, "PROBES", ("packages",))
    path = tmp_path / "bundle"
    if damage == "altered":
        shutil.copytree(tiny_bundle, path)
        os.truncate(path / "onnx/fp32/encoder.onnx", 10)
    result = run_doctor(path, "--json")
    assert result.exit_code == 1
    assert ("is not a bundle" if damage == "missing" else "encoder.onnx should have") in result.stdout


def test_a_gpu_is_shown_with_its_driver(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = {"index": 0, "name": "NVIDIA L4", "compute_capability": "8.9", "memory_bytes": 24_000_000_000}
    found = {**NOTHING, "gpus": {"driver": "580.65.06", "cuda": "13.0", "devices": [gpu]}}
    found["tensorrt_rtx"] = {"version": "1.7.1"}
    doctor.print_findings(found, None)
    printed = capsys.readouterr().out
    assert "0       NVIDIA L4, compute capability 8.9, 24,000.0 MB" in printed
    assert "driver  580.65.06, for CUDA up to 13.0" in printed
    assert "TensorRT-RTX          1.7.1\n" in printed


def test_clashes_are_complaints(capsys: pytest.CaptureFixture[str]) -> None:
    found = {**NOTHING, "packages": {"packages": [], "clashes": ["two of them"]}, "bundle": {}}
    assert doctor.complaints(found) == ["two of them"]
    doctor.print_findings(found, None)
    assert "✗ two of them" in capsys.readouterr().out
