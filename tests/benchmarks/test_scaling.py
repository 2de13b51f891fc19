"""Lines fitted to times that are known, tables of times that are known, and a whole measurement of a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import scaling, worker
from benchmarks.pictures import draw_scaling
from benchmarks.scaling import fit, tables

NAMES = ("tfm-export", "CTranslate2 oneDNN int8")


@pytest.mark.parametrize("steps", [511, 63, 20])
def test_a_line_is_found_again(steps: int) -> None:
    past = np.arange(1, steps + 1)
    found = fit(0.002 + 3e-6 * past)
    assert found == pytest.approx({"slope": 3e-6, "start": 0.002, "r2": 1.0})


def test_what_grows_otherwise_is_no_line() -> None:
    past = np.arange(1, 512)
    assert fit(0.002 + 1e-8 * past**2)["r2"] < 0.95
    rng = np.random.default_rng(0)
    assert fit(0.002 + 1e-4 * rng.standard_normal(511))["r2"] < 0.3
    assert fit(0.002 + 3e-6 * past + 1e-4 * rng.standard_normal(511))["r2"] > 0.95


def test_the_tables_hold_the_figures() -> None:
    seconds = (0.002 + 3e-6 * np.arange(1, 512)).tolist()
    results: dict[str, Any] = {
        "contenders": ["tfm-export"],
        "steps": [{"contender": "tfm-export", "batch": 1, "seconds": seconds, **fit(seconds)}],
        "throughput": [{"contender": "tfm-export", "batch": 8, "seconds": [0.5, 0.25, 1.0], "tokens": 256}],
    }
    text = tables(results)
    assert "| 1 | tfm-export | 2.03 | 3.51 | 300.0 | 1.000 |" in text
    assert "| tfm-export | 512 |" in text


@pytest.mark.slow
def test_a_tiny_model_is_measured_and_drawn(tiny_work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "SECONDS_TO_CALM_DOWN", 0)
    results = scaling.measure(tiny_work, NAMES, 1, 40, (1, 3), 1)
    assert [(one["contender"], one["batch"]) for one in results["steps"]] == [(n, b) for b in (1, 8) for n in NAMES]
    assert all(len(one["seconds"]) == 39 and min(one["seconds"]) > 0 for one in results["steps"])
    assert [one["tokens"] for one in results["throughput"]] == [32, 32, 96, 96]
    draw_scaling(tmp_path / "s.png", results)
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    assert len(tables(results).splitlines()) > 3
