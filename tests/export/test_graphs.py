"""The graphs' form: inputs and outputs of the table, standard operators, weights stored once, nothing of the trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.conftest import build_tiny_model
from tests.export.conftest import Exported
from tfm_export import graph
from tfm_export.export.variant import dimensions_of, encoder_model, write_fp32_variant

FILES = (graph.ENCODER, graph.DECODER_STEP)


@pytest.fixture(params=FILES)
def loaded(request: pytest.FixtureRequest, exported: Exported) -> onnx.ModelProto:
    """Each graph of each configuration."""
    return onnx.load(exported.folder / request.param)


def axes(value: onnx.ValueInfoProto) -> tuple[str | int, ...]:
    return tuple(d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim)


def constants(model: onnx.ModelProto) -> Iterator[tuple[str, np.ndarray]]:
    for tensor in model.graph.initializer:
        yield tensor.name, numpy_helper.to_array(tensor)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield node.name, numpy_helper.to_array(attribute.t)


def test_inputs_and_outputs_are_those_of_the_table(exported: Exported) -> None:
    sizes = exported.bundle.manifest.dimensions
    expected = {
        graph.ENCODER: (graph.encoder_inputs(), graph.encoder_outputs(sizes)),
        graph.DECODER_STEP: (graph.decoder_step_inputs(sizes), graph.decoder_step_outputs(sizes)),
    }
    for file, (inputs, outputs) in expected.items():
        model = onnx.load(exported.folder / file, load_external_data=False)
        for found, specs in ((model.graph.input, inputs), (model.graph.output, outputs)):
            types = [onnx.TensorProto.DataType.Name(v.type.tensor_type.elem_type) for v in found]
            names = {"INT64": "int64", "BOOL": "bool", "FLOAT": "float32"}
            assert [(v.name, names[t], axes(v)) for v, t in zip(found, types, strict=True)] == [
                (s.name, s.dtype, s.axes) for s in specs
            ]


def test_only_standard_operators_of_one_opset(loaded: onnx.ModelProto, exported: Exported) -> None:
    assert [(o.domain, o.version) for o in loaded.opset_import] == [("", graph.OPSET)]
    assert loaded.ir_version == graph.IR_VERSION
    assert {node.domain for node in loaded.graph.node} == {""}
    forbidden = {"If", "Loop", "Scan", "Dropout", "NonZero"}
    if exported.model.config.positions != "relative":  # whose biases join the mask, once a graph
        forbidden.add("Where")
    assert not forbidden & {node.op_type for node in loaded.graph.node}


def test_attention_is_the_operator_and_never_causal(exported: Exported) -> None:
    config = exported.model.config
    expected = {
        graph.ENCODER: Counter(Attention=config.encoder_layers),
        graph.DECODER_STEP: Counter(Attention=2 * config.decoder_layers, TensorScatter=2 * config.decoder_layers),
    }
    for file, counts in expected.items():
        nodes = onnx.load(exported.folder / file, load_external_data=False).graph.node
        found = Counter(n.op_type for n in nodes if n.op_type in {"Attention", "TensorScatter", "Softmax"})
        assert found == counts
        for node in nodes:
            if node.op_type == "Attention":
                assert "is_causal" not in {a.name for a in node.attribute}
                assert len(node.input) == 4
                assert len(node.output) == 1


def test_every_linear_layer_is_one_gemm_with_its_bias(exported: Exported) -> None:
    config = exported.model.config
    # Encoder: query, key, value, output, two of the feed-forward; and key and value for every decoder layer.
    # Decoder: the same and the cross-attention's query and output; and the projection.
    # A gate is one more of the feed-forward.
    gates = int(config.gated_feed_forward)
    expected = {
        graph.ENCODER: (6 + gates) * config.encoder_layers + 2 * config.decoder_layers,
        graph.DECODER_STEP: (8 + gates) * config.decoder_layers + 1,
    }
    for file, count in expected.items():
        nodes = onnx.load(exported.folder / file, load_external_data=False).graph.node
        assert [len(node.input) for node in nodes if node.op_type == "Gemm"] == [3] * count
        assert not any(node.op_type == "MatMul" for node in nodes)


def test_integers_fit_32_bits_and_constants_fp16(loaded: onnx.ModelProto) -> None:
    for name, value in constants(loaded):
        if value.dtype == np.int64:
            assert np.abs(value).max(initial=0) < 2**31, name
        if value.dtype == np.float32:
            assert np.abs(value).max(initial=0) <= 65504, name
        assert value.dtype != np.uint8, name


def test_nothing_tells_of_the_machine_or_the_trace(loaded: onnx.ModelProto) -> None:
    text = loaded.SerializeToString()
    assert str(Path.cwd()).encode() not in text
    assert b".py" not in text
    assert not any(node.metadata_props or node.doc_string for node in loaded.graph.node)


def test_weights_are_stored_once(exported: Exported) -> None:
    model = exported.model
    unique = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}
    assert (exported.folder / graph.WEIGHTS).stat().st_size <= 1.05 * sum(t.nbytes for t in unique.values())


def test_a_tied_table_is_one_piece_of_the_file(export_configuration) -> None:
    folder = export_configuration("tied").folder
    places = set()
    for file in FILES:
        model = onnx.load(folder / file, load_external_data=False)
        for tensor in model.graph.initializer:
            if list(tensor.dims) == [34, 60]:
                places.add(tuple(sorted((e.key, e.value) for e in tensor.external_data)))
    assert len(places) == 1


def test_small_tensors_stay_in_the_graph_and_large_ones_do_not(exported: Exported) -> None:
    model = onnx.load(exported.folder / graph.DECODER_STEP, load_external_data=False)
    for tensor in model.graph.initializer:
        size = int(np.prod(tensor.dims)) * (8 if tensor.data_type == onnx.TensorProto.INT64 else 4)
        assert (tensor.data_location == onnx.TensorProto.EXTERNAL) == (size >= 1024)


def test_every_user_can_read_the_files(exported: Exported) -> None:
    assert {p.stat().st_mode & 0o777 for p in exported.folder.iterdir()} == {0o644}


def test_two_exports_are_the_same_even_from_training_mode(tmp_path: Path) -> None:
    for name in ("a", "b"):
        model = build_tiny_model(seed=5, decoder_layers=1, encoder_layers=1)
        write_fp32_variant(model.train(name == "b"), tmp_path / name)
    for file in (*FILES, graph.WEIGHTS):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_small_vocabulary_limits_the_candidates() -> None:
    assert dimensions_of(build_tiny_model(target_vocabulary_size=5)).candidates == 5
    assert dimensions_of(build_tiny_model(target_vocabulary_size=59)).candidates == 16


@pytest.mark.parametrize("max_length", [1, 2, 6])
def test_a_position_table_may_be_shorter_than_the_traced_example(max_length: int) -> None:
    model = build_tiny_model(max_length=max_length, encoder_layers=1, decoder_layers=1)
    encoder = encoder_model(model, dimensions_of(model))  # which raises if an axis is not as in the table
    assert [value.name for value in encoder.graph.inputs] == ["source_ids", "source_mask"]
