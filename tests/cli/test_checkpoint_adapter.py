"""The file that --adapter names is run under a name of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tfm_export.cli.checkpoint_adapter import load_factory


@pytest.mark.parametrize("name", ["json", "click", "types", "my adapter"])
def test_a_file_takes_the_place_of_no_module(tmp_path: Path, name: str) -> None:
    before = {module: sys.modules.get(module) for module in ("json", "click", "types")}
    (tmp_path / f"{name}.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n\n\n"
        "@dataclass\nclass Found:\n    path: str\n\n\n"  # which looks its module up by name
        "def load(path):\n    return Found(path)\n"
    )
    factory = load_factory(f"{tmp_path / name}.py:load")
    assert vars(factory(Path("model.pt"))) == {"path": Path("model.pt")}
    assert {module: sys.modules.get(module) for module in before} == before
