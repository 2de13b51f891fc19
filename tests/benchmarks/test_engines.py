"""The benchmark of engines on the tiny model: every figure of its table."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from benchmarks import engines
from tests.skips import install, skip_if
from tfm_export.bundle import Bundle


@skip_if(importlib.util.find_spec("tensorrt_rtx") is None, "tensorrt_rtx", install("rtx"))
def test_a_precision_that_the_bundle_lacks_is_built_and_shown(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "SIZES", {"max_batch_size": 2, "max_beam_size": 2, "max_target_length": 20})
    results = engines.measure(Bundle.open(tiny_bundle), ["w4"])
    assert [entry["plan"] for entry in results["plans"]] == ["encoder", "decoder_step_48"]
    assert all(entry["build_seconds"] > 0 for entry in results["plans"])
    assert json.loads(json.dumps(results)) == results
    _, _, *rows = engines.table(results).splitlines()
    assert rows[0].startswith("| w4 | encoder | 9 float16 x int4 | 0.1 MB | 0.1 MB |")
    assert Bundle.open(tiny_bundle).manifest.engines == {}


def test_the_page_shows_the_results_that_are_kept() -> None:
    results = json.loads(engines.RESULTS.read_text(encoding="utf-8"))
    page = Path(__file__).parents[2] / "docs" / "tensorrt.md"
    assert engines.table(results) in page.read_text(encoding="utf-8")
