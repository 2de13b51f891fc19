"""A variant's files, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.export.conftest import Exported, export_configuration
from tfm_export.graph_files import read_graph
from tfm_export.passes.recipe import Recipe, layer_names
from tfm_export.quantize.variant import graph_names, write_variant

__all__ = ["export_configuration"]

Content = tuple[list[tuple[str, list[str | None], list[str | None]]], dict[str, tuple[str, bytes]]]


def content(path: Path) -> Content:
    """The operators of a graph with their inputs and outputs, and its constants."""
    model = read_graph(path)
    nodes = [
        (n.op_type, [None if v is None else v.name for v in n.inputs], [v.name for v in n.outputs]) for n in model.graph
    ]
    constants = {name: v.const_value for name, v in model.graph.initializers.items() if v.const_value is not None}
    return nodes, {name: (str(c.dtype), c.tobytes()) for name, c in constants.items()}


def test_a_table_that_its_projection_keeps_is_told(
    export_configuration: Callable[[str], Exported], tmp_path: Path
) -> None:
    folder = export_configuration("tied").folder
    made = write_variant(folder, tmp_path, Recipe(precision="w8", skip=frozenset({"decoder_step/projection"})))
    assert made.kept["decoder_step/projection"] == "chosen"
    assert "the projection" in made.kept["decoder_step/embedding"]
    assert sorted([*made.kept, *made.quantized]) == sorted(layer_names(folder))


@pytest.mark.parametrize("precision", ["w8", "w4"])
def test_an_encoder_of_int8_is_the_one_of_the_variant_int8_and_the_steps_stay_as_they_are(
    export_configuration: Callable[[str], Exported], tmp_path: Path, precision: str
) -> None:
    folder = export_configuration("paper").folder
    assert "decoder_step_attention" in graph_names(folder)
    values = {
        f"{name}/{value.name}": 3.0
        for name in graph_names(folder)
        for node in read_graph(folder / f"{name}.onnx").graph
        for value in node.inputs
        if value is not None
    }
    recipes = {
        "mixed": Recipe(precision=precision, thresholds=values, int8_encoder=True),
        "int8": Recipe(precision="int8", thresholds=values),
        precision: Recipe(precision=precision),
    }
    made = {}
    for name, recipe in recipes.items():
        (tmp_path / name).mkdir()
        made[name] = write_variant(folder, tmp_path / name, recipe)
    for name in graph_names(folder):
        twin = "int8" if name == "encoder" else precision
        other = precision if name == "encoder" else "int8"
        found = content(tmp_path / "mixed" / f"{name}.onnx")
        assert found == content(tmp_path / twin / f"{name}.onnx")
        assert found != content(tmp_path / other / f"{name}.onnx")
    assert made["mixed"].quantized == made[precision].quantized
