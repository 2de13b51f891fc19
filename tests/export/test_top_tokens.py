"""The best tokens in two rounds: those of ONNX's own TopK, ties included."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

from tests.once import Once
from tfm_export.export.top_tokens import chunk_size, top_tokens
from tfm_export.export.tracing import export_module
from tfm_export.graph import OPSET, TensorSpec
from tfm_export.graph_files import write_graph

COUNT = 16
OUTPUTS = (("values", "float32"), ("ids", "int64"))


class TopTokens(nn.Module):
    def forward(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return top_tokens(scores, COUNT)


@pytest.fixture(scope="module")
def sessions(once: Once) -> dict[int, onnxruntime.InferenceSession]:
    """Two rounds as they are exported, by the size of the vocabulary."""
    found = {}
    for vocabulary in (32_000, 2_145):
        path = once(f"top_tokens_{vocabulary}", partial(write_top_tokens, vocabulary)) / "top.onnx"
        assert [node.op_type for node in onnx.load(path).graph.node].count("TopK") == 3
        found[vocabulary] = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return found


def write_top_tokens(vocabulary: int, folder: Path) -> None:
    axes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("query")},)
    outputs = [TensorSpec(name, kind, ("batch", "query", COUNT)) for name, kind in OUTPUTS]
    inputs = [TensorSpec("scores", "float32", ("batch", "query", vocabulary))]
    write_graph(
        export_module(TopTokens(), (torch.zeros(2, 3, vocabulary),), axes, inputs, outputs, largest={}),
        folder / "top.onnx",
        weights_inside=True,
    )


@pytest.mark.parametrize("vocabulary", [32_000, 2_145])
@pytest.mark.parametrize("kind", ["distinct", "few values", "all equal", "best at the ends", "minus infinity"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 2)])
def test_the_best_and_their_order_are_those_of_one_topk(
    sessions: dict[int, onnxruntime.InferenceSession], vocabulary: int, kind: str, shape: tuple[int, int]
) -> None:
    scores = np.random.default_rng(vocabulary).standard_normal((*shape, vocabulary)).astype(np.float32)
    if kind == "few values":
        scores = scores.round()
    elif kind == "all equal":
        scores[:] = -3
    elif kind == "best at the ends":
        scores[:, :, -9:] = scores[:, :, :9] = np.arange(9, dtype=np.float32) + 9
    elif kind == "minus infinity":
        scores[:, :, 5:] = -np.inf
    values, ids = (
        helper.make_tensor_value_info(name, kind_, [*shape, COUNT])
        for name, kind_ in (("values", TensorProto.FLOAT), ("ids", TensorProto.INT64))
    )
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, scores.shape)
    k = helper.make_tensor("k", TensorProto.INT64, [1], [COUNT])
    graph = helper.make_graph([helper.make_node("TopK", ["x", "k"], ["values", "ids"])], "g", [x], [values, ids], [k])
    opset = [helper.make_opsetid("", OPSET)]
    one = onnxruntime.InferenceSession(
        helper.make_model(graph, opset_imports=opset, ir_version=11).SerializeToString(),
        providers=["CPUExecutionProvider"],
    )
    session = sessions[vocabulary]
    found = session.run(None, {"scores": scores})
    for expected, result in zip(one.run(None, {"x": scores}), found, strict=True):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(("vocabulary", "size"), [(32_000, 40), (64_001, 41), (2_145, 11), (59, None), (7, None)])
def test_chunks_divide_the_vocabulary(vocabulary: int, size: int | None) -> None:
    assert chunk_size(vocabulary, COUNT) == size
    if size:
        assert vocabulary % size == 0


def test_a_prime_vocabulary_is_searched_at_once() -> None:
    scores = torch.randn(2, 3, 32_003, generator=torch.Generator().manual_seed(0))
    for found, expected in zip(top_tokens(scores, COUNT), scores.topk(COUNT, -1), strict=True):
        assert torch.equal(found, expected)
