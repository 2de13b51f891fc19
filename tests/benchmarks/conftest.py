"""What several tests of the benchmarks share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.once import Once
from tests.skips import import_or_skip


@pytest.fixture(scope="session")
def tiny_work(once: Once) -> Path:
    """The work of the benchmarks with a tiny model in float32. Do not change it."""
    import_or_skip("ctranslate2", "bench")

    def make(folder: Path) -> None:
        from benchmarks.work import prepare

        prepare(folder, lambda _: None, preset="tiny", vocabulary=100, variants=())

    return once("tiny_work", make)
