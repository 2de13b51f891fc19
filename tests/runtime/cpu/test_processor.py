"""The processor, told by a fake /proc/cpuinfo and by numpy."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import pytest

from tests.skips import ON_LINUX, skip_if
from tfm_export.runtime.cpu import processor
from tfm_export.runtime.cpu.processor import CpuFeatures, cpu_features

INTEL = """processor\t: {number}
model name\t: Intel(R) Xeon(R) Processor: a strange name
flags\t\t: fpu sse2 avx2 fma avx512f {more}
bugs\t\t: spectre_v1
"""
ARM = """processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd evtstrm asimddp sve i8mm bf16
CPU implementer\t: 0x41
"""


def features(root: Path, text: str, machine: str, monkeypatch: pytest.MonkeyPatch) -> CpuFeatures:
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text(text)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    return cpu_features(root)


@pytest.mark.parametrize(
    ("more", "machine", "expected", "saturates"),
    [
        ("", "x86_64", (), True),
        ("avx512_vnni", "x86_64", ("vnni",), False),
        ("avx_vnni", "AMD64", ("vnni",), False),
        ("avx512_bf16 amx_tile amx_int8", "x86_64", ("bf16", "amx"), False),
        ("amx_tile", "x86_64", (), True),
    ],
)
def test_an_x86_processor(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: str,
    machine: str,
    expected: tuple[str, ...],
    saturates: bool,
) -> None:
    text = "\n".join(INTEL.format(number=number, more=more) for number in range(2))
    found = features(tmp_path, text, machine, monkeypatch)
    assert found.name == "Intel(R) Xeon(R) Processor: a strange name"
    assert found.instruction_sets == ("avx2", "fma", "avx512", *expected)
    assert found.saturates is saturates


def test_an_arm_processor_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = features(tmp_path, ARM, "aarch64", monkeypatch)
    assert (found.name, found.machine) == ("aarch64", "aarch64")
    assert found.instruction_sets == ("bf16", "neon", "dotprod", "i8mm", "sve")
    assert not found.saturates


def test_what_only_some_processors_have_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = INTEL.format(number=0, more="avx512_vnni") + "\n" + INTEL.format(number=1, more="")
    assert "vnni" not in features(tmp_path, text, "x86_64", monkeypatch).instruction_sets


@pytest.mark.parametrize("text", ["", "nonsense\n\n:\n", "processor: 0\nflags:\n"])
def test_a_processor_that_does_not_tell_is_taken_for_a_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    found = features(tmp_path, text, "x86_64", monkeypatch)
    assert (found.name, found.instruction_sets, found.saturates) == ("x86_64", (), True)


def test_without_proc_numpy_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "AMD64")
    monkeypatch.setattr(processor, "_numpy_features", lambda: {"AVX2", "FMA3", "AVX512F", "AVX512VNNI", "SSE"})
    assert cpu_features(tmp_path).instruction_sets == ("avx2", "fma", "avx512", "vnni")
    monkeypatch.setattr(processor, "_numpy_features", set)
    assert cpu_features(tmp_path).saturates


@skip_if(not Path("/proc/cpuinfo").exists(), "/proc/cpuinfo", *ON_LINUX)
def test_numpy_and_proc_agree_on_this_machine(tmp_path: Path) -> None:
    by_proc, by_numpy = set(cpu_features().instruction_sets), set(cpu_features(tmp_path).instruction_sets)
    assert by_numpy, f"numpy {np.__version__} keeps its features elsewhere"
    assert by_numpy <= by_proc
    assert by_proc - by_numpy <= {"vnni", "amx", "i8mm", "bf16"}  # numpy has no names for AMX, AVX-VNNI and ARM's
