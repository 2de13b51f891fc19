"""decoder_step_attention.onnx: the weights are PyTorch's, and everything else is what decoder_step.onnx gives."""

from __future__ import annotations

import numpy as np
import onnxruntime
import torch

from reference_model import Transformer
from tests.numerics import assert_close, exact_graph, exactly, near
from tfm_export import graph


def test_the_weights_are_pytorchs_and_the_rest_is_the_fast_graphs(export_configuration) -> None:
    exported = export_configuration("paper")
    sizes, rng = exported.bundle.manifest.dimensions, np.random.default_rng(0)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # caches that are not bound are copied, which it warns of
    sessions = {
        name: onnxruntime.InferenceSession(exported.folder / name, options)
        for name in (graph.ENCODER, graph.DECODER_STEP, graph.DECODER_STEP_ATTENTION)
    }
    found = [value.name for value in sessions[graph.DECODER_STEP_ATTENTION].get_outputs()]
    assert found == [spec.name for spec in graph.decoder_step_outputs(sizes, attention=True)]

    source_ids = rng.integers(3, sizes.source_vocabulary_size, (3, 9))
    source_mask = np.arange(9) < np.array([[9], [4], [1]])
    target_ids = rng.integers(3, sizes.target_vocabulary_size, (3, 5))
    source = {"source_ids": source_ids, "source_mask": source_mask}
    cross = dict(zip(graph.cross_names(sizes), sessions[graph.ENCODER].run(None, source), strict=True))
    cache = np.zeros((3, sizes.heads, 5, sizes.head_size), np.float32)
    feeds = {
        "target_ids": target_ids,
        "positions": np.tile(np.arange(5), (3, 1)),
        "write_index": np.zeros(3, np.int64),
        "self_mask": np.tile(np.tri(5, dtype=bool), (3, 1, 1, 1)),
        "source_mask": source_mask,
        **dict.fromkeys(graph.self_cache_names(sizes), cache),
        **cross,
    }
    *slow, weights = sessions[graph.DECODER_STEP_ATTENTION].run(None, feeds)
    fast = sessions[graph.DECODER_STEP].run(None, feeds)
    expected = exact_graph(exported.folder / graph.DECODER_STEP, feeds, found[:-1])
    for name, a, b, exact in zip(found[:-1], slow, fast, expected, strict=True):
        if name == "top_ids":
            np.testing.assert_array_equal(a, b)
        else:
            assert_close(a, exact)
            assert_close(b, exact)

    def pytorchs(model: Transformer) -> torch.Tensor:
        weights: list[torch.Tensor] = []
        mask = torch.from_numpy(source_mask)
        memory = model.encode(torch.from_numpy(source_ids), mask)
        model.decode(torch.from_numpy(target_ids), memory, mask, cross_attention=weights)
        return weights[1].mean(1)

    assert_close(weights, exactly(pytorchs, exported.model))
    assert (weights[~np.broadcast_to(source_mask[:, None], weights.shape)] == 0).all()
    assert weights.sum(-1) == near(np.ones((3, 5)))
