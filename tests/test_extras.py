"""Libraries of an extra that are missing, broken, too old or there twice."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from tfm_export.errors import BackendUnavailable
from tfm_export.extras import require, require_onnxruntime


def test_a_library_that_is_there_is_returned() -> None:
    assert require("numpy", extra="export") is np
    assert require_onnxruntime() is onnxruntime


def test_a_missing_library_names_the_extra() -> None:
    with pytest.raises(BackendUnavailable) as raised:
        require("there_is_no_such_library.part", extra="trt")
    assert str(raised.value) == "there_is_no_such_library is not installed\nTry: pip install 'tfm-export[trt]'"


def test_a_library_that_lacks_another_or_cannot_be_loaded_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_a_library.py").write_text("import another_library_that_is_missing")
    (tmp_path / "unloadable_library.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendUnavailable, match=r"half_a_library cannot be loaded: No module named 'another_library"):
        require("half_a_library", extra="trt")
    with pytest.raises(BackendUnavailable, match=r"unloadable_library cannot be loaded: libcudart\.so\.12"):
        require("unloadable_library", extra="trt")


def test_two_onnxruntimes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.30.1"}
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    with pytest.raises(BackendUnavailable) as raised:
        require_onnxruntime()
    assert "onnxruntime 1.32.0 and onnxruntime-gpu 1.30.1 are both installed" in str(raised.value)
    assert "pip uninstall onnxruntime onnxruntime-gpu" in str(raised.value)


@pytest.mark.parametrize(("version", "new_enough"), [("1.24.9", False), ("1.25.0", True), ("2.0.0rc1", True)])
def test_an_onnxruntime_without_tensor_scatter_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, new_enough: bool
) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", version)
    if new_enough:
        assert require_onnxruntime() is onnxruntime
    else:
        with pytest.raises(BackendUnavailable, match=r"expected onnxruntime 1\.25 or newer, found 1\.24\.9"):
            require_onnxruntime()
