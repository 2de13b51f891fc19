"""Results: figures worked out by hand, files that are none, and verdicts that noise does not move."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tfm_export.bench import BenchResult, Cell, Loading, compare, read_result
from tfm_export.errors import RequestError


def cell(seconds: list[float], *, variant: str = "fp32", batch: int = 1, tokens: int = 10) -> Cell:
    return Cell(
        variant=variant,
        batch=batch,
        beam=1,
        first_seconds=[0.2, 0.1, 0.4],
        step_seconds=[0.01 * i for i in range(1, 101)],
        seconds=seconds,
        tokens=tokens,
        peak_megabytes=100.0,
    )


def result(*cells: Cell) -> BenchResult:
    loading = Loading(
        variant="fp32",
        backend="OnnxModel",
        provider="CPUExecutionProvider",
        threads=2,
        load_seconds=0.5,
        first_seconds=0.1,
        loaded_megabytes=90.0,
    )
    return BenchResult(machine={"cpu": "x"}, work={"rounds": 3}, loadings=[loading], cells=list(cells))


def test_figures_are_computed_from_the_times() -> None:
    one = cell([2.0, 1.0, 4.0])
    assert one.tokens_per_second == 5.0
    assert one.step_percentiles() == pytest.approx({50: 0.505, 90: 0.901, 99: 0.9901})
    assert one.facts()["first_seconds_median"] == 0.2


def test_a_result_survives_a_file(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(result(cell([1.0, 2.0])).to_json(), encoding="utf-8")
    assert read_result(tmp_path / "r.json") == result(cell([1.0, 2.0]))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format_version": 1, "cells": [{}]}'])
def test_a_file_that_is_no_result_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "r.json").write_text(content, encoding="utf-8")
    with pytest.raises(RequestError, match="is not a result of tfm-export bench"):
        read_result(tmp_path / "r.json")
    (tmp_path / "r.json").write_text(json.dumps({"format_version": 99}), encoding="utf-8")
    with pytest.raises(RequestError, match="has format version 99, expected 1"):
        read_result(tmp_path / "r.json")


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([1.0, 1.01, 0.99, 1.0], [1.5, 1.51, 1.49, 1.5], "slower"),
        ([1.5, 1.51, 1.49, 1.5], [1.0, 1.01, 0.99, 1.0], "faster"),
        ([1.0, 1.01, 0.99, 1.0], [1.03, 1.03, 1.03, 1.03], "same"),  # apart, but by less than two runs differ anyway
        ([1.0, 2.0, 1.0, 2.0, 1.5], [1.9, 1.2, 2.2, 1.4, 1.8], "same"),  # medians differ, the runs overlap
        ([1.0, 1.0, 1.0, 9.0], [1.0, 1.0, 1.0, 1.0], "same"),  # an outlier decides nothing
    ],
)
def test_a_verdict_needs_more_than_noise(before: list[float], after: list[float], verdict: str) -> None:
    (found,) = compare(result(cell(before)), result(cell(after)))
    assert found.verdict == verdict


def test_only_cells_that_did_the_same_work_are_compared() -> None:
    before = result(cell([1.0]), cell([1.0], batch=8), cell([1.0], variant="w8"))
    after = result(cell([1.0], tokens=11), cell([2.0], batch=8), cell([1.0], variant="w4"))
    assert [(v.batch, v.ratio) for v in compare(before, after)] == [(8, 0.5)]
