"""docs/gpu.md: what it says of `load`, the extras and the oldest ONNX Runtime is so, and its snippet runs."""

from __future__ import annotations

import inspect
import re
import shutil
import tomllib
from pathlib import Path
from typing import get_args

import pytest

import tfm_export
from tfm_export.precision import FLOATS
from tfm_export.runtime.backends import Backend, backend_choices
from tfm_export.runtime.gpu.cuda_provider import OLDEST
from tfm_export.runtime.gpu.device_model import MOST_WORKERS

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
PROSE = " ".join(TEXT.split())


def test_the_snippet_runs(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(tiny_bundle, tmp_path / "tfm_bundle")
    monkeypatch.chdir(tmp_path)
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    exec(compile(snippet, "docs/gpu.md", "exec"), {})  # noqa: S102 (what a reader would run)


def test_the_arguments_of_load_and_of_the_choice_are_told() -> None:
    named = set(re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE))
    assert named == set(inspect.signature(backend_choices).parameters) - {"bundle"}
    assert named <= set(inspect.signature(tfm_export.load).parameters)
    assert all(f'`"{backend}"`' in TEXT for backend in get_args(Backend))


def test_the_numbers_are_those_of_the_code() -> None:
    oldest = ".".join(map(str, OLDEST))
    assert f"`onnxruntime-gpu` {oldest} or newer" in PROSE
    assert f"It takes the variants {', '.join(FLOATS[:-1])} and {FLOATS[-1]}" in PROSE
    assert f"Up to {MOST_WORKERS} threads run at the same time" in PROSE
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(re.findall(r"tfm-export\[(\w+)\]", TEXT)) <= extras.keys()
    assert any(
        requirement.startswith("onnxruntime-gpu[") and requirement.endswith(f">={oldest}")
        for requirement in extras["gpu"]
    )


def test_it_says_first_what_it_does_not_know() -> None:
    assert TEXT.split("\n\n")[1].startswith("**Nothing on this page has run on a GPU yet.**")
