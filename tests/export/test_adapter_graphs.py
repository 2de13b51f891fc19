"""The graphs of adapters: held to PyTorch, with every linear layer as one Gemm with a bias."""

from __future__ import annotations

import copy
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from tests.checkpoints.test_adapter import IDS, Alibi, load
from tests.conftest import build_tiny_model
from tests.numerics import assert_close, exactly
from tfm_export import graph
from tfm_export.errors import ParityError
from tfm_export.export import export_bundle
from tfm_export.export.adapter_graphs import RowLinear, with_row_linears
from tfm_export.export.variant import write_fp32_variant
from tfm_export.passes.linears import linears


class Scaled(nn.Linear):
    """A linear layer that is no linear layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Wide(Alibi):
    """With a projection that shares the embedding's table, and a layer of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.projection.weight = self.embedding.weight
        self.linears[5] = Scaled(21, 21)


def test_linear_layers_are_replaced_in_a_copy_that_shares_all_else() -> None:
    adapter = Wide().eval()
    before = copy.deepcopy(adapter.state_dict())
    copied = with_row_linears(adapter)
    assert isinstance(copied.projection, RowLinear)
    assert copied.projection.weight is adapter.embedding.weight is copied.embedding.weight
    assert copied.slopes is adapter.slopes
    assert [type(layer) for layer in copied.linears] == [RowLinear] * 5 + [Scaled]
    assert type(adapter.projection) is nn.Linear
    assert all(torch.equal(weight, before[name]) for name, weight in adapter.state_dict().items())
    ids, mask = torch.randint(0, 7, (3, 5)), torch.ones(3, 5, dtype=torch.bool)
    exact = exactly(lambda model: model(ids, mask, ids), adapter)
    for model in (adapter, copied):
        assert_close(model(ids, mask, ids), exact)


class Forgets(Alibi):
    """Its step forgets how far keys are, which its own forward pass does not."""

    def decode(self, target_ids: torch.Tensor, memory: torch.Tensor, source_mask: torch.Tensor) -> torch.Tensor:
        honest = Alibi().eval().to(memory.dtype)
        honest.load_state_dict(self.state_dict())
        honest.slopes = honest.slopes * 40
        return honest.decode(target_ids, memory, source_mask)


def test_a_step_that_is_not_the_models_own_is_found(tmp_path: Path) -> None:
    torch.save(Alibi().state_dict(), tmp_path / "model.pt")

    def forgetful(path: Path) -> Forgets:
        adapter = Forgets()
        adapter.load_state_dict(torch.load(path, weights_only=True))
        return adapter

    with pytest.raises(ParityError):
        export_bundle(tmp_path / "model.pt", tmp_path / "bundle", settings=IDS, adapter=forgetful)
    assert not (tmp_path / "bundle").exists()
    bundle, report = export_bundle(tmp_path / "model.pt", tmp_path / "bundle", settings=IDS, adapter=load)
    assert report is not None
    assert report.passed
    names = [tensor.name for tensor in report.graph]
    assert {"log_probs", "self_key_0", "cross_value_0"} <= {*names}
    for file in (graph.ENCODER, graph.DECODER_STEP):
        gemms = [n for n in onnx.load(bundle.variant_path("fp32") / file).graph.node if n.op_type == "Gemm"]
        assert [len(node.input) for node in gemms] == [3] * (2 if file == graph.ENCODER else 5)


def test_layers_without_biases_get_them(tmp_path: Path) -> None:
    """The exporter drops biases of zeros; what makes variants needs them."""
    import onnx_ir as ir

    model = build_tiny_model(seed=3, encoder_layers=1, decoder_layers=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("W_q.bias", "W_1.bias")):
                parameter.zero_()
    write_fp32_variant(model, tmp_path / "fp32")
    found = linears(ir.load(tmp_path / "fp32" / graph.DECODER_STEP), "decoder_step")
    assert "decoder_step/layers.0.self_attention.query" in [layer.name for layer in found]
    assert all(len(layer.node.inputs) == 3 and layer.node.inputs[2] is not None for layer in found)
