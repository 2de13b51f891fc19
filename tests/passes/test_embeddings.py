"""Embedding tables as integers: alone, beside quantised weights, tied to the projection; and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
import pytest

from tests.export.conftest import Exported
from tests.numerics import assert_close, exact_arrays
from tests.passes.dequantized import constants, dequantized_model, spread, write_variant
from tests.passes.test_weight_only import SOURCE, TARGET, VARIANTS
from tests.runtime.drive import whole_target
from tfm_export.errors import ExportError
from tfm_export.graph_files import read_graph
from tfm_export.passes.embeddings import dequantize_embeddings, quantize_embeddings
from tfm_export.passes.linears import linears
from tfm_export.passes.static_quantization import quantize_static
from tfm_export.passes.weight_only import quantize_weights
from tfm_export.quantize.fusion import optimized_graphs
from tfm_export.runtime.cpu.onnx_runtime import OnnxModel
from tfm_export.runtime.torch_model import TorchModel

Bits = Literal[4, 8]
Pass = Callable[[ir.Model, str], Any]


def weights_and_embeddings(model: ir.Model, name: str, *, bits: Bits) -> list[str]:
    quantize_weights(model, name, bits=bits)
    return quantize_embeddings(model, name)


def static_and_embeddings(model: ir.Model, name: str) -> list[str]:
    thresholds = {f"{name}/{layer.input.name}": 6.0 for layer in linears(model, name)}
    quantize_static(model, name, thresholds, numbers="int8")
    return quantize_embeddings(model, name)


PASSES: dict[str, Pass] = {
    "w8": partial(weights_and_embeddings, bits=8),
    "w4": partial(weights_and_embeddings, bits=4),
    "int8": static_and_embeddings,
}


def log_probs(exported: Exported, folder: Path, variant: str, *, exact: bool = False) -> np.ndarray:
    model = OnnxModel(exported.bundle, variant=variant, threads=1, folder=folder, exact=exact)
    return whole_target(model, SOURCE, TARGET)


@pytest.mark.parametrize("bits", [8, 4])
def test_tables_give_what_pytorch_gives_with_their_numbers(exported: Exported, bits: Bits, tmp_path: Path) -> None:
    folder = write_variant(exported.folder, tmp_path / "variant", PASSES[VARIANTS[bits]])
    model = TorchModel(dequantized_model(exported.model, folder).double())
    (exact,) = exact_arrays(lambda: [whole_target(model, SOURCE, TARGET)])
    found = log_probs(exported, folder, VARIANTS[bits], exact=True)
    assert_close(found, exact)


def test_a_row_is_its_integers_times_its_scales(exported: Exported, tmp_path: Path) -> None:
    folder = write_variant(exported.folder, tmp_path / "variant", quantize_embeddings)
    table = constants(exported.folder / "encoder.onnx")["embedding.weight"]
    found = constants(folder / "encoder.onnx")
    assert "embedding.weight" not in found
    rows, scale = found["embedding.weight_rows"], found["embedding.weight_rows_scale"]
    assert (rows.shape, scale.shape) == (table.shape, (len(table), 1))  # no more than 128 numbers a row here
    np.testing.assert_allclose(scale[:, 0], np.abs(table).max(axis=1) / 127, rtol=1 / 128)
    assert np.abs(spread(rows.T, scale.T, 128).T - table).max() <= scale.max() / 2 * (1 + 1e-6)


def test_long_rows_have_a_scale_a_block() -> None:
    table = np.random.default_rng(0).standard_normal((5, 320)).astype(np.float32)
    model = lookup(table)
    assert quantize_embeddings(model, "encoder") == ["encoder/embedding"]
    (dequantize,) = (node for node in model.graph if node.op_type == "DequantizeLinear")
    assert dequantize.attributes["block_size"].as_int() == 64
    found = {name: v.const_value.numpy() for name, v in model.graph.initializers.items() if v.const_value is not None}
    assert found["embedding.weight_rows_scale"].shape == (5, 5)
    rows = np.repeat(found["embedding.weight_rows_scale"], 64, axis=1) * found["embedding.weight_rows"]
    assert np.abs(rows - table).max() < 0.02
    assert dequantize_embeddings(model, "encoder") == ["encoder/embedding"]
    restored = model.graph.initializers["embedding.weight"].const_value
    assert restored is not None
    np.testing.assert_array_equal(restored.numpy(), rows)


@pytest.mark.parametrize("variant", PASSES)
def test_onnx_runtime_dequantises_rows_not_tables(exported: Exported, variant: str, tmp_path: Path) -> None:
    folder = write_variant(exported.folder, tmp_path / "variant", PASSES[variant])
    for graph in optimized_graphs(folder).values():
        floats = {t.name: list(t.dims) for t in graph.initializer if t.data_type == ir.DataType.FLOAT.value}
        assert not [name for name in floats if name.startswith("embedding.weight") and not name.endswith("_rows_scale")]
        (dequantize,) = (node for node in graph.node if node.op_type == "DequantizeLinear")
        (rows,) = (node for node in graph.node if dequantize.input[0] in node.output)
        assert rows.op_type == "Gather"


@pytest.mark.parametrize("variant", PASSES)
def test_a_tied_table_is_stored_once(
    export_configuration: Callable[[str], Exported], variant: str, tmp_path: Path
) -> None:
    exported = export_configuration("tied")
    folder = write_variant(exported.folder, tmp_path / "variant", PASSES[variant])
    rows, columns = exported.model.config.target_vocabulary_size, exported.model.config.d_model
    tables = []
    for name in ("encoder", "decoder_step"):
        values = read_graph(folder / f"{name}.onnx").graph.initializers.values()
        tensors = [value.const_value for value in values if value.const_value is not None]
        tables += [t for t in tensors if sorted(t.shape.numpy()) == sorted((rows, columns))]
    assert {t.dtype for t in tables} == {ir.DataType.INT8, *([ir.DataType.INT4] if variant == "w4" else [])}
    places = {t.offset for t in tables if isinstance(t, ir.ExternalTensor)}
    # As rows for both graphs and the projection; 4-bit numbers of the projection are its own, and short enough here
    # to be in the graph itself.
    assert len(places) == 1
    assert len(tables) == (3 if variant == "w4" else 2)


@pytest.mark.parametrize("variant", PASSES)
def test_dequantised_tables_give_the_very_same_numbers(exported: Exported, variant: str, tmp_path: Path) -> None:
    folder = write_variant(exported.folder, tmp_path / "variant", PASSES[variant])
    back = write_variant(folder, tmp_path / "back", dequantize_embeddings)
    for name in ("encoder", "decoder_step"):
        found = constants(back / f"{name}.onnx")
        assert not [constant for constant in found if "_rows" in constant]
        assert not [node for node in read_graph(back / f"{name}.onnx").graph if node.name.endswith("rows_transpose")]
    np.testing.assert_array_equal(log_probs(exported, back, variant), log_probs(exported, folder, variant))


def test_weights_of_a_restored_graph_are_those_without_the_pass(exported: Exported) -> None:
    for name in ("encoder", "decoder_step"):
        plain, back = (read_graph(exported.folder / f"{name}.onnx") for _ in range(2))
        quantize_weights(plain, name, bits=8)
        weights_and_embeddings(back, name, bits=8)
        assert dequantize_embeddings(back, name) == [f"{name}/embedding"]
        assert dequantize_embeddings(back, name) == []
        expected, found = (
            {
                n: v.const_value.numpy()
                for n, v in model.graph.initializers.items()
                if v.const_value is not None and "weight_" in n
            }
            for model in (plain, back)
        )
        assert expected.keys() == found.keys()
        for constant, array in expected.items():
            np.testing.assert_array_equal(found[constant], array)


def test_a_table_that_a_float_projection_needs_stays(export_configuration: Callable[[str], Exported]) -> None:
    model = read_graph(export_configuration("tied").folder / "decoder_step.onnx")
    quantize_weights(model, "decoder_step", bits=8, skip={"decoder_step/projection"})
    before = ir.serde.serialize_model(model)
    assert quantize_embeddings(model, "decoder_step") == []
    assert ir.serde.serialize_model(model) == before


def lookup(table: np.ndarray, ids: str = "source_ids") -> ir.Model:
    """A graph that looks ids up in a table."""
    value = ir.Value(
        name="embedding.weight",
        shape=ir.Shape(table.shape),
        type=ir.TensorType(ir.DataType.FLOAT),
        const_value=ir.Tensor(table),
    )
    source = ir.Value(name=ids, shape=ir.Shape(["batch", "source"]), type=ir.TensorType(ir.DataType.INT64))
    node = ir.node("Gather", [value, source], {"axis": 0}, name="embedding")
    output = node.outputs[0]
    output.name, output.dtype, output.shape = "x", ir.DataType.FLOAT, ir.Shape(["batch", "source", table.shape[1]])
    body = ir.Graph([source], [output], nodes=[node], initializers=[value], opset_imports={"": 24}, name="lookup")
    return ir.Model(body, ir_version=11)


def test_what_is_no_float_table_is_refused() -> None:
    table = np.ones((3, 4), np.float32)
    model = lookup(table)
    quantize_embeddings(model, "encoder")
    with pytest.raises(ExportError, match="expected an embedding table in float32 in encoder, found INT8"):
        quantize_embeddings(model, "encoder")
    with pytest.raises(ExportError, match="encoder looks up no token ids in a table"):
        quantize_embeddings(lookup(table, ids="positions"), "encoder")
    table[1, 2] = np.inf
    with pytest.raises(ExportError, match=r"the table embedding\.weight of encoder has numbers that are not finite"):
        quantize_embeddings(lookup(table), "encoder")
