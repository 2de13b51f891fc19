"""What several tests of the benchmarks share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work of the benchmarks with a tiny model in float32. Do not change it."""
    pytest.importorskip("ctranslate2")
    from benchmarks.work import prepare

    folder = tmp_path_factory.mktemp("benchmarks") / "work"
    prepare(folder, lambda _: None, preset="tiny", vocabulary=100, variants=())
    return folder
