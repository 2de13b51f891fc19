"""A variant's files, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.export.conftest import Exported, export_configuration
from tfm_export.quantize.variant import Recipe, layer_names, write_variant

__all__ = ["export_configuration"]


def test_a_table_that_its_projection_keeps_is_told(
    export_configuration: Callable[[str], Exported], tmp_path: Path
) -> None:
    folder = export_configuration("tied").folder
    made = write_variant(folder, tmp_path, Recipe(precision="w8", skip=frozenset({"decoder_step/projection"})))
    assert made.kept["decoder_step/projection"] == "chosen"
    assert "the projection" in made.kept["decoder_step/embedding"]
    assert sorted([*made.kept, *made.quantized]) == sorted(layer_names(folder))
