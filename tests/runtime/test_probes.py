"""The looks at a machine: a driver that is faked, packages that are nothing but their metadata."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.emulation import Machine, emulated_gpu
from tests.emulation.onnx_cuda import Provider, emulated_provider
from tests.runtime.conftest import Backends
from tfm_export.runtime import probes
from tfm_export.runtime.gpu import cuda


def install(folder: Path, **versions: str) -> None:
    """Put the metadata of packages into a folder."""
    for name, version in versions.items():
        metadata = folder / f"{name}-{version}.dist-info/METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ({}, []),
        ({"onnxruntime_gpu": "1.31.1"}, ["onnxruntime and onnxruntime-gpu write the same files"]),
        ({"tensorrt": "11.1.0", "tensorrt_cu13": "11.1.0", "tensorrt_cu13_libs": "11.1.0"}, []),
        ({"tensorrt_cu12": "10.13.0", "tensorrt_cu13": "10.13.0"}, ["tensorrt is installed for CUDA 12 and 13"]),
        ({"tensorrt_cu12_libs": "10.13.0", "tensorrt_cu12": "10.14.0"}, ["the parts of tensorrt are of different"]),
        (
            {"tensorrt_rtx_cu12_libs": "1.7.1.116", "onnxruntime_gpu": "1.31.1"},
            ["onnxruntime and onnxruntime-gpu write", "tensorrt_rtx is installed for CUDA 12 and 13"],
        ),
        ({"tensorrt_llm_cu12": "1.0", "nvidia_cublas_cu12": "12.8"}, []),
    ],
)
def test_packages_that_clash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: dict[str, str], expected: list[str]
) -> None:
    install(tmp_path, **{"onnxruntime": "1.32.0", "tensorrt_rtx_cu13": "1.7.1.116", **there})
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = probes.packages()["clashes"]
    assert len(found) == len(expected)
    for clash, begin in zip(found, expected, strict=True):
        assert clash.startswith(begin)
        assert "pip " in clash


def test_the_packages_of_every_extra_and_those_that_are_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, onnxruntime="1.9.0", numpy="2.4.6", onnx="1.23.0rc1", torch="2.13.0+cu130")
    path = tmp_path / "tfm_export-0.1.0.dist-info"
    path.mkdir()
    requirements = ["numpy>=1.26", 'onnxruntime>=1.25; extra == "cpu"', 'onnx>=1.23; extra == "export"']
    requirements += ['onnx>=1.25; extra == "quantize"', 'torch>=2.13; extra == "export"', 'pytest>=9; extra == "dev"']
    requirements += ['onnxruntime-gpu[cuda,cudnn]>=1.27; extra == "gpu"', 'types-tqdm; extra == "train"']
    lines = "".join(f"Requires-Dist: {requirement}\n" for requirement in requirements)
    text = f"Metadata-Version: 2.1\nName: tfm-export\nVersion: 0.1.0\n{lines}"
    (path / "METADATA").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = {package["name"]: package for package in probes.packages()["packages"]}
    assert list(found) == ["numpy", "onnxruntime", "onnx", "torch", "onnxruntime-gpu", "types-tqdm"]
    assert (found["onnx"]["extras"], found["onnx"]["needed"]) == (["export", "quantize"], "1.25")
    assert found["onnxruntime"]["problem"].startswith("onnxruntime 1.9.0 is older than 1.25")
    assert found["onnx"]["problem"].startswith("onnx 1.23.0rc1 is older than 1.25")
    assert {name for name, package in found.items() if package["problem"]} == {"onnxruntime", "onnx"}
    assert found["onnxruntime-gpu"] == {
        "name": "onnxruntime-gpu",
        "extras": ["gpu"],
        "version": None,
        "needed": "1.27",
        "problem": None,
    }


def driver(*, error: int = 0, gpus: int = 1) -> SimpleNamespace:
    """libcuda.so.1 with a GPU, whose handle is 40."""

    def put(value: int | bytes) -> Callable[..., int]:
        def call(place: Any, *_: Any) -> int:
            getattr(place, "_obj", place).value = value  # a reference, or a string buffer
            return 0

        return call

    def attribute(number: Any, which: int, device: ctypes.c_int) -> None:
        assert device.value == 40
        number._obj.value = {75: 9, 76: 0}[which]

    return SimpleNamespace(
        cuInit=lambda _: error,
        cuDriverGetVersion=put(13010),
        cuDeviceGetCount=put(gpus),
        cuDeviceGet=put(40),
        cuDeviceGetName=put(b"NVIDIA H200"),
        cuDeviceTotalMem_v2=put(150_000_000_000),
        cuDeviceGetAttribute=attribute,
    )


def test_the_driver_tells_of_its_gpus_without_any_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "driver_release", lambda: "580.65.06")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver())
    gpu = {"index": 0, "name": "NVIDIA H200", "compute_capability": "9.0", "memory_bytes": 150_000_000_000}
    assert probes.gpus() == {"driver": "580.65.06", "cuda": "13.1", "devices": [gpu]}


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (driver(error=999), "the NVIDIA driver finds no GPU that works (error 999)"),
        (driver(gpus=0), "the NVIDIA driver finds no GPU"),
    ],
)
def test_a_driver_without_a_gpu(monkeypatch: pytest.MonkeyPatch, broken: SimpleNamespace, problem: str) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: broken)
    found = probes.gpus()
    assert (found["devices"], found["problem"], found["cuda"]) == ([], problem, "13.1")


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert probes.gpus()["problem"].startswith("there is no NVIDIA driver: ")


def test_gpus_and_the_provider_that_can_be_used() -> None:
    with emulated_provider(Machine(gpus=3)):
        assert probes.run("cuda_python") == {"version": "13.0", "devices": 3}
        assert probes.run("onnxruntime")["cuda"] == {}
    with emulated_provider(provider=Provider(version="1.25.1")):
        assert "expected onnxruntime-gpu 1.27" in probes.run("onnxruntime")["cuda"]["problem"]
    with emulated_gpu(Machine(gpus=0)):
        found = probes.run("cuda_python")
        assert (found["version"], "no GPU" in found["problem"]) == ("13.0", True)


def test_what_of_a_bundle_runs(backends: Backends) -> None:
    backends.with_engine.save()
    with emulated_gpu(Machine(gpus=1)):
        found = probes.run("bundle", str(backends.with_engine.path))
    assert found["taken"] == "the TensorRT engine emulated (fp32) on GPU 0"
    assert [(way["gpu"], way["engine"], way["problem"] is None) for way in found["ways"]] == [
        (0, "emulated", True),
        (0, None, False),
        (None, None, True),
    ]
    json.dumps(found)
    nothing = probes.run("bundle", "/nowhere")
    assert nothing["problem"] == "/nowhere is not a bundle: it has no bundle.json"


def test_whatever_a_probe_raises_is_its_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> dict[str, Any]:
        raise KeyError("what")

    monkeypatch.setitem(probes.PROBES, "gpus", broken)
    assert probes.run("gpus") == {"problem": "KeyError: 'what'"}


def test_the_answer_is_all_that_goes_to_standard_output(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("", encoding="utf-8")
    script = (
        "import sys; from tfm_export.runtime import probes\n"
        "def loud():\n    import os; os.write(1, b'hello'); print('hello'); return {'found': 1}\n"
        "probes.PROBES['gpus'] = loud; sys.argv = ['probes', 'gpus']; probes.main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"found": 1}
    assert "hello" in done.stderr


def test_this_machine() -> None:
    found = probes.run("machine")
    assert found["usable_cpus"] <= found["cpus"]
    assert found["tfm_export"]
    assert asdict(probes.cpu_features())["name"] == found["processor"]
