"""Bundles to build engines from, and the real builder: tests that need it are skipped where it is not installed."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.export.conftest import export_configuration
from tests.once import Once
from tests.skips import install, skip
from tfm_export.bundle import Bundle
from tfm_export.engines import EngineRecord
from tfm_export.trt.flavor import Flavor, open_flavor
from tfm_export.trt.options import EngineOptions
from tfm_export.trt.stage import build_engine

__all__ = ["export_configuration"]


@dataclass
class Told:
    """A `BuildObserver` that keeps what it is told."""

    begun: list[str] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    on_phase: Callable[[str], None] = lambda _: None

    def begin(self, what: str) -> None:
        self.begun.append(what)

    def advance(self, phase: str) -> None:
        self.phases.append(phase)
        self.on_phase(phase)

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="session")
def rtx() -> Flavor:
    """TensorRT-RTX, which builds without a GPU."""
    if importlib.util.find_spec("tensorrt_rtx") is None:
        skip("tensorrt_rtx", install("rtx"))
    return open_flavor("rtx")


@pytest.fixture
def bundle(tiny_variants: Path, tmp_path: Path) -> Bundle:
    """A copy of it for one test."""
    return Bundle.open(shutil.copytree(tiny_variants, tmp_path / "tfm_bundle"))


@pytest.fixture(scope="session")
def engine_bundle(rtx: Flavor, tiny_variants: Path, once: Once) -> Path:
    """The bundle of every variant with an engine of fp16, verified. Do not change it: copy it."""
    assert rtx.name == "rtx"

    def make(folder: Path) -> None:
        path = shutil.copytree(tiny_variants, folder / "tfm_bundle")
        sizes = {"max_batch_size": 4, "max_source_length": 12, "max_beam_size": 3}
        build(Bundle.open(path), variant="fp16", capacities=(16,), verify=True, **sizes)

    return once("engine_bundle", make) / "tfm_bundle"


def build(bundle: Bundle, told: Told | None = None, *, force: bool = False, **options: Any) -> EngineRecord:
    """Build an engine, small and without decoding with its graphs unless the test says otherwise."""
    settings = {"flavor": "rtx", "verify": False, "max_beam_size": 2, "max_target_length": 20, **options}
    return build_engine(bundle, EngineOptions(**settings), told, force=force)


@contextmanager
def unchanged(bundle: Bundle) -> Iterator[None]:
    """Whatever the block does, the bundle's folder holds the same files afterwards."""

    def contents() -> dict[str, bytes]:
        return {str(p.relative_to(bundle.path)): p.read_bytes() for p in bundle.path.rglob("*") if p.is_file()}

    before = contents()
    yield
    after = contents()
    assert after.keys() == before.keys()
    assert after == before
    Bundle.open(bundle.path)
