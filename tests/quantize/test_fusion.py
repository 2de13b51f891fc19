"""What ONNX Runtime makes of quantised graphs, and that layers which it leaves as they are do not go unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from reference_model.config import TransformerConfig
from tests.export.conftest import Exported, export_configuration, exported
from tests.passes.dequantized import write_variant
from tests.passes.test_embeddings import PASSES
from tfm_export import graph
from tfm_export.errors import BundleError, ExportError
from tfm_export.graph_files import WeightsFile, read_graph
from tfm_export.passes.linears import add_initializer, linears
from tfm_export.passes.weight_only import quantize_weights
from tfm_export.precision import PRECISIONS
from tfm_export.quantize.fusion import check_fused, fused_operators, optimized_graphs

__all__ = ["export_configuration", "exported"]


def layers_in(config: TransformerConfig) -> tuple[int, int]:
    """The linear layers of the encoder's graph, and of the decoder step's."""
    gate = int(config.gated_feed_forward)
    return (6 + gate) * config.encoder_layers + 2 * config.decoder_layers, (8 + gate) * config.decoder_layers + 1


def layers_of(folder: Path) -> list[str]:
    names = ("encoder", "decoder_step")
    return [layer.name for name in names for layer in linears(read_graph(folder / f"{name}.onnx"), name)]


@pytest.mark.parametrize("variant", PASSES)
def test_every_layer_becomes_the_fast_operator(exported: Exported, variant: str, tmp_path: Path) -> None:
    folder, config = write_variant(exported.folder, tmp_path / "variant", PASSES[variant]), exported.model.config
    counts = fused_operators(folder)
    encoder, step = layers_in(config)
    expected = {"encoder": encoder, "decoder_step": step, "decoder_step_attention": step}
    operator = PRECISIONS[variant].fused_operator
    assert operator is not None
    assert {name: count[operator] for name, count in counts.items()} == {name: expected[name] for name in counts}
    for count in counts.values():
        assert not {"Gemm", "FusedGemm", "MatMulInteger"} & count.keys()
        assert count["DequantizeLinear"] == 1  # of embedding rows
    check_fused(folder, dict.fromkeys(layers_of(exported.folder), variant))


def test_fp32_has_no_such_operators(exported: Exported) -> None:
    counts = fused_operators(exported.folder)
    assert not any(count[operator] for count in counts.values() for operator in ("MatMulNBits", "QGemm"))
    assert counts["decoder_step"]["TensorScatter"] == 2 * exported.model.config.decoder_layers


def spoil(model: ir.Model, name: str, layer: str) -> None:
    """Give a layer of a quantised graph blocks of 8, which MatMulNBits does not take; the numbers stay."""
    for node in model.graph:
        if node.op_type == "DequantizeLinear" and node.name == f"{layer}.weight_dequantize":
            scale = node.inputs[1]
            assert scale is not None
            assert scale.const_value is not None
            assert node.inputs[0] is not None
            assert node.inputs[0].shape is not None
            rows = int(node.inputs[0].shape.numpy()[0])
            finer = np.repeat(scale.const_value.numpy(), 128 // 8, axis=0)[: -(-rows // 8)]
            node.replace_input_with(1, add_initializer(model, f"{name}_{layer}_finer", finer))
            node.attributes["block_size"] = ir.AttrInt64("block_size", 8)


def test_layers_that_are_not_fused_are_named(export_configuration: Callable[[str], Exported], tmp_path: Path) -> None:
    source = export_configuration("paper").folder
    folder = write_variant(source, tmp_path / "variant", partial(quantize_weights, bits=8))
    spoiled = {"encoder": "layers.1.feed_forward.contract", "decoder_step": "layers.0.self_attention.key"}
    weights = WeightsFile(tmp_path / "spoiled" / graph.WEIGHTS)
    weights.path.parent.mkdir()
    for name, layer in spoiled.items():
        model = read_graph(folder / f"{name}.onnx")
        spoil(model, name, layer)
        weights.write(model, weights.path.parent / f"{name}.onnx")
    layers = layers_of(source)
    with pytest.raises(ExportError) as error:
        check_fused(weights.path.parent, dict.fromkeys(layers, "w8"))
    assert [problem.partition(" made ")[2] for problem in error.value.problems] == [
        "MatMulNBits of 15 of the 16 quantised layers of encoder; not of layers.1.feed_forward.contract",
        "MatMulNBits of 16 of the 17 quantised layers of decoder_step; not of layers.0.self_attention.key",
    ]
    kept = {f"{name}/{layer}" for name, layer in spoiled.items()}
    fused = dict.fromkeys([layer for layer in layers if layer not in kept], "w8")
    check_fused(weights.path.parent, fused)
    one = next(layer for layer in fused if layer.startswith("encoder/"))
    with pytest.raises(ExportError, match=f"QGemm of 0 of the 1 quantised layers of encoder; not of {one[8:]}"):
        check_fused(weights.path.parent, {**fused, one: "int8"})


def test_the_form_needs_no_options_of_a_session(exported: Exported, tmp_path: Path) -> None:
    folder = write_variant(exported.folder, tmp_path / "variant", PASSES["w8"])
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "optimised.onnx"), 3
    onnxruntime.InferenceSession(folder / graph.DECODER_STEP, options, providers=["CPUExecutionProvider"])
    found = [node.op_type for node in onnx.load(tmp_path / "optimised.onnx", load_external_data=False).graph.node]
    assert found.count("MatMulNBits") == layers_in(exported.model.config)[1]


def test_what_does_not_load_is_told(tmp_path: Path) -> None:
    (tmp_path / graph.ENCODER).write_bytes(b"no graph")
    with pytest.raises(BundleError, match=r"encoder\.onnx cannot be loaded by ONNX Runtime"):
        optimized_graphs(tmp_path)
