"""What a benchmark measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tfm_export.errors import RequestError
from tfm_export.text_files import read_text

FORMAT_VERSION = 1
PERCENTILES = (50, 90, 99)


def split_draft(variant: str) -> tuple[str, str | None]:
    """A precision, and the one that guesses its tokens: of "fp32+w8", fp32 and w8."""
    variant, plus, draft = variant.partition("+")
    return variant, draft if plus else None


@dataclass(frozen=True, kw_only=True)
class Loading:
    """What it takes to begin.

    Attributes:
        variant: the precision, as "fp32+w8" with that of a draft model.
        backend: what runs it.
        provider: what ONNX Runtime really uses, or the engine's name.
        threads: an operator may use.
        load_seconds: from a started process to a loaded model, imports and hashes included.
        first_seconds: from a loaded model to the first token of its first request, nothing warmed up.
        loaded_megabytes: peak resident memory after loading, in units of 2^20 bytes.
    """

    variant: str
    backend: str
    provider: str
    threads: int
    load_seconds: float
    first_seconds: float
    loaded_megabytes: float


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One variant at one batch and beam size.

    Attributes:
        variant: the precision.
        batch: sentences decoded together.
        beam: hypotheses a sentence.
        first_seconds: to the first token, the encoder included; one a round.
        step_seconds: from a token to the next one, of all rounds.
        seconds: of a whole generation; one a round.
        tokens: of all sentences in a round's generation.
        peak_megabytes: of the process so far, in units of 2^20 bytes.
    """

    variant: str
    batch: int
    beam: int
    first_seconds: list[float]
    step_seconds: list[float]
    seconds: list[float]
    tokens: int
    peak_megabytes: float

    @property
    def key(self) -> tuple[str, int, int]:
        """What tells cells apart."""
        return self.variant, self.batch, self.beam

    @property
    def tokens_per_second(self) -> float:
        """The median round's."""
        return self.tokens / median(self.seconds)

    def step_percentiles(self) -> dict[int, float]:
        """Seconds from a token to the next, by percentile."""
        return {p: float(np.percentile(self.step_seconds, p)) for p in PERCENTILES}

    def facts(self) -> dict[str, Any]:
        """All figures, those that are computed too."""
        return {
            **asdict(self),
            "first_seconds_median": median(self.first_seconds),
            "tokens_per_second": self.tokens_per_second,
            **{f"step_seconds_p{p}": seconds for p, seconds in self.step_percentiles().items()},
        }


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """A whole benchmark.

    Attributes:
        machine: where it was taken, and with which versions.
        work: what was decoded.
        loadings: one a variant.
        cells: one a variant, batch and beam.
    """

    machine: dict[str, Any]
    work: dict[str, Any]
    loadings: list[Loading]
    cells: list[Cell]

    def to_json(self) -> str:
        """For programs, and to compare with later."""
        state = {
            "format_version": FORMAT_VERSION,
            "machine": self.machine,
            "work": self.work,
            "loadings": [asdict(loading) for loading in self.loadings],
            "cells": [cell.facts() for cell in self.cells],
        }
        return json.dumps(state, indent=1, ensure_ascii=False) + "\n"


def read_result(path: str | Path) -> BenchResult:
    """A result that `BenchResult.to_json` wrote.

    Raises:
        RequestError: it is not one.
    """
    try:
        state = json.loads(read_text(path))
        if state["format_version"] != FORMAT_VERSION:
            raise RequestError(
                f"{path} has format version {state['format_version']}, expected {FORMAT_VERSION}", "measure again"
            )
        return BenchResult(
            machine=state["machine"],
            work=state["work"],
            loadings=[Loading(**entry) for entry in state["loadings"]],
            cells=[Cell(**{name: entry[name] for name in Cell.__dataclass_fields__}) for entry in state["cells"]],
        )
    except OSError as problem:
        raise RequestError(f"{path} cannot be read: {problem.strerror}") from problem
    except (ValueError, LookupError, TypeError) as problem:
        raise RequestError(
            f"{path} is not a result of tfm-export bench: {problem}", "tfm-export bench --json > FILE writes one"
        ) from None


def in_order(cells: Sequence[Cell]) -> list[Cell]:
    """By beam, batch and then variant, as people compare them."""
    return sorted(cells, key=lambda cell: (cell.beam, cell.batch))
