"""Graphs that the parser would misread: each is told before it is asked, and the parser does misread them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.export.conftest import Exported
from tests.trt.conftest import build
from tfm_export import graph
from tfm_export.bundle import Bundle
from tfm_export.errors import BuildError
from tfm_export.graph_files import read_graph
from tfm_export.passes.linears import add_initializer
from tfm_export.trt import network_source
from tfm_export.trt.flavor import Flavor
from tfm_export.trt.refusals import check_graph, check_warnings


@pytest.fixture
def step(export_configuration: Callable[[str], Exported]) -> ir.Model:
    """A decoder step with a fixed capacity."""
    model = read_graph(export_configuration("paper").folder / graph.DECODER_STEP)
    return network_source._with_capacity(model, 16)


def attention_of(model: ir.Model) -> ir.Node:
    return next(node for node in model.graph if node.op_type == "Attention")


def problems(model: ir.Model) -> Sequence[str]:
    with pytest.raises(BuildError) as caught:
        check_graph("decoder_step", model)
    return caught.value.problems


def test_a_graph_as_it_is_exported_is_accepted(step: ir.Model) -> None:
    check_graph("decoder_step", step)


def add_lengths(model: ir.Model) -> None:
    """The input of Attention that the parser of TensorRT-RTX 1.7.1 ignores."""
    node = attention_of(model)
    lengths = add_initializer(model, "lengths", np.array([1, 1], np.int64))
    node.resize_inputs(7)
    node.replace_input_with(6, lengths)


def test_an_input_that_the_parser_ignores_is_refused(step: ir.Model) -> None:
    add_lengths(step)
    (problem,) = problems(step)
    assert "must have a query, a key, a value and a mask alone, found nonpad_kv_seqlen too" in problem


def test_past_keys_and_a_missing_mask_are_refused(step: ir.Model) -> None:
    first, second = [node for node in step.graph if node.op_type == "Attention"][:2]
    first.resize_inputs(5)
    first.replace_input_with(4, first.inputs[1])
    second.resize_inputs(3)
    found = problems(step)
    assert "found past_key too" in found[0]
    assert "found 3 inputs" in found[1]


def test_attributes_that_are_not_known_are_refused(step: ir.Model) -> None:
    attention_of(step).attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
    assert "has is_causal, which is not known to be read" in problems(step)[0]


def test_an_attribute_that_says_what_is_so_anyway_is_accepted(step: ir.Model) -> None:
    attention_of(step).attributes["is_causal"] = ir.AttrInt64("is_causal", 0)
    check_graph("decoder_step", step)


def test_caches_of_a_free_capacity_are_refused(export_configuration: Callable[[str], Exported]) -> None:
    model = read_graph(export_configuration("paper").folder / graph.DECODER_STEP)
    assert "must write to a cache of 4 axes with a fixed capacity" in problems(model)[0]


def test_a_scatter_along_another_axis_is_refused(step: ir.Model) -> None:
    scatter = next(node for node in step.graph if node.op_type == "TensorScatter")
    scatter.attributes["axis"] = ir.AttrInt64("axis", 1)
    scatter.attributes["mode"] = ir.AttrString("mode", "circular")
    found = problems(step)
    assert "must have axis -2, found 1" in found[0]
    assert "must have mode linear, found circular" in found[1]


def test_an_input_that_nothing_reads_is_refused(step: ir.Model) -> None:
    value = ir.Value(name="spare", shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.FLOAT))
    step.graph.inputs.append(value)
    assert problems(step) == ["decoder_step: the input spare is read by nothing, and the parser would drop it"]


def test_operators_of_another_domain_are_refused(step: ir.Model) -> None:
    attention_of(step).domain = "com.microsoft"
    assert "is of the domain com.microsoft, which the parser does not know" in problems(step)[0]


def test_warnings_that_something_is_left_out_are_errors() -> None:
    check_warnings("encoder", ["Make sure input source_ids has Int64 binding."])
    with pytest.raises(BuildError, match="encoder: TensorRT leaves something out: Unused Input: lengths"):
        check_warnings("encoder", ["Make sure input source_ids has Int64 binding.", "Unused Input: lengths"])


@pytest.mark.usefixtures("rtx")
def test_the_parser_does_ignore_it_and_the_network_tells(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first line of defence gone, the second holds. If the parser learns to read it, this test says so."""
    derive = network_source._derive

    def with_lengths(bundle: Bundle, file: str, *arguments: Any) -> tuple[ir.Model, dict[str, str]]:
        model, kept = derive(bundle, file, *arguments)
        if file == graph.ENCODER:
            lengths = ir.Value(name="lengths", shape=ir.Shape(["batch"]), type=ir.TensorType(ir.DataType.INT64))
            model.graph.inputs.append(lengths)
            attention_of(model).resize_inputs(7)
            attention_of(model).replace_input_with(6, lengths)
        return model, kept

    monkeypatch.setattr(network_source, "_derive", with_lengths)
    monkeypatch.setattr(network_source, "check_graph", lambda *_: None)
    with pytest.raises(BuildError, match="encoder: TensorRT's parser ignores the input lengths"):
        build(bundle, variant="fp16")


@pytest.mark.usefixtures("rtx")
def test_a_file_that_is_no_onnx_is_told_with_what_the_parser_says(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def junk(_: object, folder: Path) -> None:
        (folder / "encoder.onnx").write_bytes(b"not a graph")

    monkeypatch.setattr("tfm_export.trt.stage.write_sources", junk)
    with pytest.raises(BuildError, match=r"TensorRT-RTX .* could not parse encoder\.onnx"):
        build(bundle, variant="fp16")


def test_the_real_library_knows_the_operators(rtx: Flavor) -> None:
    trt = rtx.module
    logger = trt.Logger(trt.Logger.ERROR)
    network = trt.Builder(logger).create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    assert all(parser.supports_operator(name) for name in ("Attention", "TensorScatter"))
    assert not parser.supports_operator("NoSuchOperator")
