"""Files are decoded alike by both: targets end where they should, and the tables hold the figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import files, worker
from benchmarks.contenders import SOURCES
from benchmarks.files import FILE, Work, measure, tables
from benchmarks.work import CHAIN, FIRST, end_by_chains, prepare
from tests.skips import import_or_skip


def entry(contender: str, seconds: list[float], **fields: Any) -> dict[str, Any]:
    same = {"file": "words", "precision": "float32", "options": {}, "sentences": 100, "tokens": 700, "as_peer": 90}
    return {
        **same,
        "contender": contender,
        "seconds": seconds,
        "word_error_rate": 25.5,
        "peak_megabytes": 99.6,
        **fields,
    }


def test_the_tables_hold_rates_ratios_and_agreement() -> None:
    results = {"files": [entry("tfm-export", [2.0, 1.0, 4.0]), entry("CTranslate2 MKL", [3.0], as_peer=100)]}
    first, second = tables(results).splitlines()[2:]
    assert first == "| 100 words | float32 | tfm-export | 50.0 | **1.50** | 700 | 90.0 % | 25.50 | 100 |"
    assert second == "| 100 words | float32 | CTranslate2 MKL | 33.3 |  | 700 | 100.0 % | 25.50 | 100 |"


@pytest.mark.slow
def test_both_decode_the_same_targets_of_the_lengths_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_or_skip("ctranslate2", "bench")
    monkeypatch.setattr(worker, "SECONDS_TO_CALM_DOWN", 0)
    monkeypatch.setattr(files, "OURS", {"float32": ("tfm-export",)})
    monkeypatch.setattr(files, "BATCHES", files.BATCHES[:2])
    monkeypatch.setattr(files, "TUNED_ON", 1)
    folder, vocabulary = tmp_path / "work", FIRST + 4 * CHAIN
    prepare(folder, lambda _: None, ending=end_by_chains, preset="small", vocabulary=vocabulary, variants=())
    lengths = [3, 9, 1, 20, 5, 14]
    prefixes = [[FIRST + CHAIN * (i % 4) + CHAIN - length] for i, length in enumerate(lengths)]
    sources = json.loads((folder / SOURCES).read_text())[: len(lengths)]
    (folder / FILE).write_text(json.dumps({"sources": sources, "prefixes": prefixes}))
    results = measure([Work(name="mixed", folder=folder, longest=40)], (2,), 1, 1)
    ours, theirs = results["files"]
    assert ours["tokens"] == theirs["tokens"] == sum(lengths)
    assert ours["as_peer"] == theirs["as_peer"] == len(lengths)
    assert len(ours["seconds"]) == 2
    assert theirs["contender"].startswith("CTranslate2")
    assert len(theirs["options"]["tried"]) == 3
    assert "| 6 mixed | float32 | tfm-export |" in tables(results)
