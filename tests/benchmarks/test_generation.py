"""The benchmark measures what it says: all contenders do the same work, and the tables hold the numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import generation, worker
from benchmarks.contenders import CONTENDERS, TARGET_LENGTH
from benchmarks.limits import step_floor
from benchmarks.report import tables
from benchmarks.work import decoder_step_work, prepare
from reference_model.config import TransformerConfig
from reference_model.model import Transformer
from tfm_export.errors import BundleError

LIMITS = {"read_bytes_per_second": 20e9, "flops": 200e9}


def results(*cells: tuple[str, int, list[float]]) -> dict[str, Any]:
    contenders = dict.fromkeys(name for name, _, _ in cells)
    return {
        "machine": {
            "cpu": "a CPU",
            "flags": ["avx2"],
            "system": "Linux",
            "python": "3.11",
            "commit": "0123456789abcdef",
            "versions": {"onnxruntime": "1.32.0"},
            "uncommitted_changes": False,
            "time": "2026-01-01",
        },
        "work": {"model": "base", "source_tokens": 32, "target_tokens": 32},
        "threads": 2,
        "rounds": 3,
        "contenders": {name: {"load_seconds": 1.25, "peak_megabytes": 400.0} for name in contenders},
        "cells": [
            {
                "contender": name,
                "batch": batch,
                "beam": 1,
                "seconds": seconds,
                "peak_megabytes": 500.0,
                "sentences_as_first_contender": batch,
            }
            for name, batch, seconds in cells
        ],
        "python_share": [{"python_share": share} for share in (0.04, 0.05, 0.5)],
        "limits": LIMITS,
    }


def test_the_tables_hold_medians_rates_ratios_and_the_floor() -> None:
    text = tables(results(("tfm-export", 8, [0.32, 0.16, 0.64]), ("torch eager", 8, [0.8, 0.8, 0.8])))
    rows = [[value.strip() for value in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert ["8", "1", "tfm-export", "10.00 [6.00 to 18.00]", "800", "8 of 8"] in rows
    assert ["8", "1", "torch eager", "25.00 [25.00 to 25.00]", "320", "8 of 8"] in rows
    assert ["8", "1", "tfm-export", "2.50"] in rows
    assert ["tfm-export", "1.2", "400", "500"] in rows
    floor = f"{decoder_step_work()['weight_bytes'] / 20e9 * 1e3:.2f}"
    assert ["8", "1", "floor: a step's weights and products", floor, "", ""] in rows
    assert "spends 5.0% of its time" in text


def test_a_step_is_bound_by_reading_alone_and_by_multiplying_with_many() -> None:
    work = decoder_step_work()
    assert step_floor(LIMITS, 1) == work["weight_bytes"] / 20e9
    assert step_floor(LIMITS, 100) == 100 * work["flops"] / 200e9


def test_the_work_of_a_step_is_that_of_the_model() -> None:
    model = Transformer(TransformerConfig.preset("base", source_vocabulary_size=8, target_vocabulary_size=32_000))
    # A step multiplies with all matrices of the decoder but those that make cross-attention's keys and values.
    used = [
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2
        and re.match(r"decoder_layers|projection", name)
        and not re.search(r"cross_attention\.W_[kv]", name)
    ]
    assert decoder_step_work() == {"weight_bytes": 4 * sum(used), "flops": 2 * sum(used)}


@pytest.mark.slow
def test_all_contenders_generate_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path / "work", lambda _: None, preset="tiny", vocabulary=100)
    monkeypatch.setattr(generation, "_limits", lambda _: LIMITS)
    monkeypatch.setattr(worker, "SECONDS_TO_CALM_DOWN", 0)
    monkeypatch.setattr(generation, "SHARE_REPEATS", 1)
    measured = generation.measure(tmp_path / "work", list(CONTENDERS), [3, 1], [1], rounds=1, threads=1)
    assert [(c["contender"], c["batch"]) for c in measured["cells"]] == [(n, b) for b in (1, 3) for n in CONTENDERS]
    float32 = [cell for cell in measured["cells"] if not re.search(r"int8|w[48]", cell["contender"])]
    assert len(float32) == 8
    assert all(cell["sentences_as_first_contender"] == cell["batch"] for cell in float32)
    assert all(len(cell["seconds"]) == 1 and cell["seconds"][0] > 0 for cell in measured["cells"])
    assert measured["machine"]["versions"]["ctranslate2"]
    [share] = measured["python_share"]
    assert 0 < share["session_run"] < share["steps"]
    assert f"{TARGET_LENGTH} target tokens" in tables(measured)


def test_a_contender_that_dies_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="the process that measures torch eager ended with status 1"):
        worker.Worker("torch eager", tmp_path, 1)
