"""Padded heads: the same numbers, in graphs whose caches and cross-attention keys and values are wider."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.export.conftest import Exported
from tests.numerics import Exact, exact_graph, near
from tests.passes.graph_runs import run, write_graphs
from tests.passes.typed_modules import Arrays
from tfm_export import graph
from tfm_export.errors import ExportError
from tfm_export.graph import Dimensions
from tfm_export.graph_files import read_graph
from tfm_export.passes.head_padding import pad_heads
from tfm_export.passes.retype import retype

B, Q, S, C = 3, 2, 5, 9


@pytest.mark.parametrize(
    ("size", "padded"),
    [(1, 16), (7, 16), (8, 16), (12, 16), (16, 16), (17, 24), (20, 24), (24, 24), (64, 64), (100, 104), (256, 256)],
)
def test_sizes_in_16_bits_are_multiples_of_8_from_16_on(exported: Exported, size: int, padded: int) -> None:
    sizes = replace(exported.bundle.manifest.dimensions, head_size=size)
    for float_type, expected in (("float16", padded), ("bfloat16", padded), ("float32", size)):
        assert sizes.padded(float_type) == replace(sizes, head_size=expected)


def random_inputs(sizes: Dimensions) -> dict[str, Arrays]:
    """Of both graphs, with full caches, padding, and rows that write at different slots."""
    rng = np.random.default_rng(3)
    source_mask = np.arange(S) < np.array([5, 2, 1])[:, None]
    self_mask = rng.random((B, 1, Q, C)) < 0.5
    self_mask[..., 0] = True
    keys = {
        spec.name: rng.standard_normal((B, sizes.heads, C if "self" in spec.name else S, sizes.head_size))
        for spec in graph.decoder_step_inputs(sizes)[5:]
    }
    step: Arrays = {
        "target_ids": rng.integers(0, sizes.target_vocabulary_size, (B, Q)),
        "positions": rng.integers(0, 5, (B, Q)),
        "write_index": np.array([2, 0, 7]),
        "self_mask": self_mask,
        "source_mask": source_mask,
        **{name: array.astype(np.float32) for name, array in keys.items()},
    }
    ids = rng.integers(0, sizes.source_vocabulary_size, (B, S))
    return {graph.ENCODER: {"source_ids": ids, "source_mask": source_mask}, graph.DECODER_STEP: step}


def assert_near_graph(name: str, found: np.ndarray, expected: np.ndarray, exact: Exact) -> None:
    """Outputs of two graphs that compute the same, maybe in another order."""
    if name == "top_ids":  # of tokens as good as each other, either
        assert found.shape == expected.shape
    else:
        assert np.abs(found - expected).max() <= 2 * exact.limit(), name


def test_the_numbers_are_the_same_and_the_padding_stays_zero(exported: Exported, tmp_path: Path) -> None:
    sizes = exported.bundle.manifest.dimensions
    size, padded = sizes.head_size, sizes.padded("float16").head_size
    wide = write_graphs(exported.folder, tmp_path / "wide", lambda model: pad_heads(model, "float16"))
    for file, inputs in random_inputs(sizes).items():
        expected = run(exported.folder / file, inputs)
        width = ((0, 0), (0, 0), (0, 0), (0, padded - size))
        widened = {n: np.pad(a, width) if a.ndim == 4 and a.dtype == np.float32 else a for n, a in inputs.items()}
        found = run(wide / file, widened)
        assert found.keys() == expected.keys()
        exact = exact_graph(exported.folder / file, inputs, [*found])
        for (name, array), truth in zip(found.items(), exact, strict=True):
            narrow = array
            if array.ndim == 4:
                assert array.shape[3] == padded
                assert not array[..., size:].any(), name
                narrow = array[..., :size]
            assert_near_graph(name, narrow, expected[name], truth)


def test_inputs_and_outputs_are_those_of_the_table_with_the_wider_heads(exported: Exported) -> None:
    sizes = exported.bundle.manifest.dimensions
    wide = sizes.padded("float16")
    tables = {
        graph.ENCODER: (graph.encoder_inputs(), graph.encoder_outputs(wide)),
        graph.DECODER_STEP: (graph.decoder_step_inputs(wide), graph.decoder_step_outputs(wide)),
    }
    for file, specs in tables.items():
        model = read_graph(exported.folder / file)
        pad_heads(model, "float16")
        for values, table in zip((model.graph.inputs, model.graph.outputs), specs, strict=True):
            found = [(v.name, [a if isinstance(a, int) else str(a.value) for a in v.shape or ()]) for v in values]
            assert found == [(spec.name, [*spec.axes]) for spec in table]


def test_the_scale_is_that_of_the_size_before(export_configuration: Callable[[str], Exported]) -> None:
    model = read_graph(export_configuration("tied").folder / graph.DECODER_STEP)
    pad_heads(model, "float16")
    scales = [n.attributes["scale"].as_float() for n in model.graph if n.op_type == "Attention"]
    assert scales == near([1 / math.sqrt(20)] * 6)


def test_no_step_pads_a_cache(export_configuration: Callable[[str], Exported]) -> None:
    """What is read at every step is padded where it is written: a key or value a layer, and every query."""
    model = read_graph(export_configuration("tied").folder / graph.DECODER_STEP)
    pad_heads(model, "float16")
    pads = [node for node in model.graph if node.op_type == "Pad"]
    assert len(pads) == 3 * (2 + 1 + 1)
    for node in pads:
        assert node.inputs[0] is not None
        assert node.inputs[0].producer() is not None
        (reader,) = {use.op_type for use in node.outputs[0].consumers()}
        assert reader in {"Attention", "TensorScatter"}


def test_graphs_in_16_bits_are_padded_alike(export_configuration: Callable[[str], Exported]) -> None:
    for file in (graph.ENCODER, graph.DECODER_STEP):
        model = read_graph(export_configuration("tied").folder / file)
        retype(model, "float16")
        pad_heads(model, "float16")
        for node in model.graph:
            if node.op_type == "Attention":
                types = {v.dtype for v in (*node.inputs[:3], *node.outputs) if v is not None}
                assert types == {ir.DataType.FLOAT16}


def test_keys_that_are_cast_before_they_are_read_are_padded_before(
    export_configuration: Callable[[str], Exported],
) -> None:
    """An attention whose numbers leave float16's range stays in float32, and reads its cache through a Cast."""
    model = read_graph(export_configuration("tied").folder / graph.DECODER_STEP)
    attention = next(node for node in model.graph if node.op_type == "Attention")
    small = {value.name or "": 1.0 for node in model.graph for value in node.outputs}
    retype(model, "float16", ranges={**small, attention.outputs[0].name or "": 1e6})
    key = attention.inputs[1]
    assert key is not None
    assert (node := key.producer()) is not None
    assert node.op_type == "Cast"
    pad_heads(model, "float16")
    cache = next(value for value in model.graph.inputs if value.name == "self_key_0")
    assert [value.shape[3] for value in (cache, key, node.inputs[0]) if value is not None and value.shape] == [24] * 3


def test_what_needs_no_padding_is_left_alone(export_configuration: Callable[[str], Exported]) -> None:
    model = read_graph(export_configuration("paper").folder / graph.DECODER_STEP)
    before = ir.serde.serialize_model(model).SerializeToString()
    pad_heads(model, "float16")
    assert ir.serde.serialize_model(model).SerializeToString() == before


def test_a_query_that_nothing_computes_is_told(export_configuration: Callable[[str], Exported]) -> None:
    model = read_graph(export_configuration("tied").folder / graph.DECODER_STEP)
    attention = next(node for node in model.graph if node.op_type == "Attention")
    key = next(value for value in model.graph.inputs if value.name == "cross_key_0")
    attention.replace_input_with(0, key)
    with pytest.raises(ExportError, match="cross_key_0: expected the graph to compute it"):
        pad_heads(model, "float16")
