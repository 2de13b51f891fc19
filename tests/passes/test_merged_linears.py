"""Merged linear layers: the very same numbers from fewer products."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import onnxruntime
import pytest

from tests.export.conftest import Exported
from tests.numerics import exact_graph
from tests.passes.graph_runs import write_graphs
from tests.passes.test_head_padding import assert_near_graph, random_inputs
from tests.passes.typed_modules import Arrays
from tfm_export import graph
from tfm_export.graph_files import read_graph
from tfm_export.passes.embeddings import quantize_embeddings
from tfm_export.passes.linears import linears
from tfm_export.passes.merged_linears import merge_block_linears
from tfm_export.passes.static_quantization import quantize_static
from tfm_export.passes.weight_only import Bits, quantize_weights


def run_as_written(path: Path, feeds: Arrays) -> Arrays:
    """Every output of a graph, of which ONNX Runtime has changed nothing: its own fusions round otherwise."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options)
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def quantized(model: ir.Model, bits: Bits) -> None:
    quantize_weights(model, model.graph.name or "", bits=bits, block=32)


def products(model: ir.Model) -> int:
    return sum(node.op_type in {"Gemm", "MatMul"} for node in model.graph)


@pytest.mark.parametrize("bits", [8, 4])
def test_merged_products_give_the_same_numbers(exported: Exported, tmp_path: Path, bits: Bits) -> None:
    def convert(model: ir.Model) -> None:
        quantized(model, bits)
        merge_block_linears(model)

    apart = write_graphs(exported.folder, tmp_path / "apart", lambda model: quantized(model, bits))
    merged = write_graphs(exported.folder, tmp_path / "merged", convert)
    for file, inputs in random_inputs(exported.bundle.manifest.dimensions).items():
        expected, found = (run_as_written(folder / file, inputs) for folder in (apart, merged))
        # Rounded weights are as large as the others, so that these round as much.
        exact = exact_graph(exported.folder / file, inputs, [*found])
        for (name, array), truth in zip(found.items(), exact, strict=True):
            assert_near_graph(name, array, expected[name], truth)


def test_what_reads_the_same_input_is_one_product(export_configuration: Callable[[str], Exported]) -> None:
    layers = export_configuration("tied").model.config
    model = read_graph(export_configuration("tied").folder / graph.ENCODER)
    quantized(model, 8)
    before = products(model)
    gone = merge_block_linears(model)
    # Query, key and value of every encoder layer; and the keys and values of all decoder layers.
    assert gone == 2 * layers.encoder_layers + 2 * layers.decoder_layers - 1
    assert products(model) == before - gone
    splits = [node for node in model.graph if node.op_type == "Split"]
    assert sorted(len(node.outputs) for node in splits) == [3, 2 * layers.decoder_layers]


def test_constants_are_as_many_bytes_as_before(export_configuration: Callable[[str], Exported]) -> None:
    model = read_graph(export_configuration("tied").folder / graph.DECODER_STEP)
    quantized(model, 4)

    def stored() -> int:
        values = model.graph.initializers.values()
        return sum(v.const_value.nbytes for v in values if v.const_value is not None and v.name[-6:] != "_sizes")

    before = stored()
    assert merge_block_linears(model) > 0
    assert stored() == before


def test_a_second_time_there_is_nothing_to_do(export_configuration: Callable[[str], Exported]) -> None:
    model = read_graph(export_configuration("paper").folder / graph.ENCODER)
    quantized(model, 8)
    assert merge_block_linears(model) > 0
    assert merge_block_linears(model) == 0


def test_layers_of_other_numbers_are_left_alone(export_configuration: Callable[[str], Exported]) -> None:
    """Floats, and 8 bits with a scale a column, which TensorRT merges without a loss."""
    folder = export_configuration("paper").folder
    model = read_graph(folder / graph.ENCODER)
    assert merge_block_linears(model) == 0
    thresholds = {f"encoder/{layer.input.name}": 4.0 for layer in linears(model, "encoder")}
    quantize_static(model, "encoder", thresholds, numbers="int8")
    assert merge_block_linears(model) == 0


def test_a_table_that_the_projection_shares_is_not_taken_apart(
    export_configuration: Callable[[str], Exported],
) -> None:
    model = read_graph(export_configuration("tied").folder / graph.DECODER_STEP)
    quantized(model, 8)
    quantize_embeddings(model, "decoder_step")
    rows = [name for name in model.graph.initializers if name.endswith("_rows")]
    assert rows
    merge_block_linears(model)
    assert all(name in model.graph.initializers for name in rows)


def test_layers_with_other_blocks_stay_apart(export_configuration: Callable[[str], Exported]) -> None:
    model = read_graph(export_configuration("paper").folder / graph.ENCODER)
    quantized(model, 8)
    node = next(n for n in model.graph if n.op_type == "DequantizeLinear" and "cross.0.key" in (n.name or ""))
    node.attributes["block_size"] = ir.AttrInt64("block_size", 64)
    before = products(model)
    # Of the four cross-attention layers one has other blocks, so three are merged.
    assert merge_block_linears(model) == 2 * 2 + 2
    assert products(model) == before - 6
