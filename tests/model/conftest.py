"""A loaded model, and a bundle to damage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tfm_export
import tfm_export.tokenizer
from tfm_export.bundle import MANIFEST
from tfm_export.model import Model

ROOT = Path(__file__).parents[2]
WORDS = ["hello", "parity", "a", "don't", "transformer", "zz"]


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> Iterator[Model]:
    with tfm_export.load(tiny_bundle) as loaded:
        yield loaded


@pytest.fixture
def copied(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A bundle to damage."""
    return shutil.copytree(tiny_bundle, tmp_path / "bundle")


def rewrite_manifest(bundle: Path, **fields: Any) -> None:
    state = json.loads((bundle / MANIFEST).read_text())
    (bundle / MANIFEST).write_text(json.dumps({**state, **fields}))
