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


def adapter_with_helper(folder: Path, number: int) -> Path:
    folder.mkdir()
    (folder / "helper_beside.py").write_text(f"NUMBER = {number}\n")
    (folder / "late_beside.py").write_text(f"NUMBER = {10 * number}\n")
    (folder / "adapter.py").write_text(
        "from helper_beside import NUMBER\n\n\n"
        "def load(path):\n    import late_beside\n\n    return NUMBER, late_beside.NUMBER\n"
    )
    return folder / "adapter.py"


def test_an_adapter_imports_the_files_beside_it_and_no_other_adapters(tmp_path: Path) -> None:
    path = [*sys.path]
    one, two = (load_factory(f"{adapter_with_helper(tmp_path / str(n), n)}:load") for n in (1, 2))
    assert [make(Path("model.pt")) for make in (one, two, one)] == [(1, 10), (2, 20), (1, 10)]
    assert sys.path == path


def test_what_is_missing_beside_an_adapter_is_told_by_its_own_line(tmp_path: Path) -> None:
    (tmp_path / "adapter.py").write_text("import nothing_of_the_kind\n")
    path = [*sys.path]
    with pytest.raises(ModuleNotFoundError, match="nothing_of_the_kind") as caught:
        load_factory(f"{tmp_path / 'adapter.py'}:load")
    assert (caught.traceback[-1].path, caught.traceback[-1].lineno) == (tmp_path / "adapter.py", 0)
    assert sys.path == path
