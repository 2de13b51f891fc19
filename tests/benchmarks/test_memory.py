"""Memory and the first token: figures of known sizes, and a whole measurement of a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import memory, worker
from benchmarks.memory import PARTS, grown, measure, tables


def test_growth_counts_from_the_end_of_the_warm_up() -> None:
    sizes = [50.0] * 9 + [100.0, *[104.0] * 90]
    assert grown({"megabytes": sizes, "share": 1}) == (100.0, 104.0, pytest.approx(4.0))
    assert grown({"megabytes": [100.0, 110.0], "share": 10}) == (100.0, 110.0, pytest.approx(10.0))


@pytest.mark.slow
def test_a_tiny_model_is_measured(tiny_work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "SECONDS_TO_CALM_DOWN", 0)
    monkeypatch.setattr(memory, "STARTS", 1)
    monkeypatch.setattr(memory, "CTRANSLATE2_BY_TYPE", {"float32": ("CTranslate2 MKL",)})
    monkeypatch.setattr(memory, "OURS", {"float32": ("tfm-export",)})
    monkeypatch.setattr(memory, "GROWING", ("tfm-export",))
    results = measure(tiny_work, 1, 20, ((1, 1),))
    ours, theirs = results["peaks"]
    # A process with numpy and ONNX Runtime; PyTorch alone would be 200 MB more.
    assert 20 < ours["megabytes"] < 250
    assert 20 < theirs["megabytes"] < 250
    assert [one["contender"] for one in results["growth"]] == ["tfm-export", "CTranslate2 MKL"]
    assert all(len(one["megabytes"]) == 100 // memory.EVERY for one in results["growth"])
    for start in results["starts"]:
        assert all(start[part][0] > 0 for part in PARTS)
        assert start["total"][0] == pytest.approx(sum(start[part][0] for part in PARTS[:-1]), abs=0.01)
    assert "tfm-export" in tables(results)
