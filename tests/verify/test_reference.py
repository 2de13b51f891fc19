"""What bundles are held to: a model in another precision without a copy of it, and its search."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from reference_model.checkpoint import SpecialIds as ReferenceSpecialIds
from reference_model.search import beam
from tests.conftest import build_tiny_model
from tfm_export.bundle import Limits, SpecialIds
from tfm_export.decoding import DecodeOptions, generate
from tfm_export.export.golden import synthetic_sources
from tfm_export.runtime.torch_model import TorchModel
from tfm_export.verify.reference import in_precision, run_reference

CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"positions": "learned", "embedding_norm": True, "tie_projection": True},
    {"positions": "relative", "norm": "rms", "gated_feed_forward": True},
    {"norm": "unbiased", "norm_first": True, "final_norm": True},
]


@pytest.mark.parametrize("fields", CONFIGURATIONS)
def test_float64_is_that_of_a_model_whose_weights_are_float64(fields: dict[str, Any]) -> None:
    model = build_tiny_model(seed=2, **fields)
    before = copy.deepcopy(model.state_dict())
    ids, mask = torch.randint(0, 30, (3, 9)), torch.arange(9) < torch.tensor([[9], [4], [1]])
    exact = in_precision(model, torch.float64)
    expected = run_reference(copy.deepcopy(model).double(), ids, mask, ids)
    for _ in range(2):  # a pass leaves nothing behind
        found = run_reference(exact, ids, mask, ids)
        assert abs(found.log_probs - expected.log_probs).max() < 1e-12
        assert all(abs(x - expected.keys_values[name]).max() < 1e-12 for name, x in found.keys_values.items())
    ours = dict(model.named_parameters())
    assert all(weight is ours[name] for name, weight in exact.named_parameters()), "no weight was copied"
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_beam_that_is_cut_gives_what_the_decoder_gives() -> None:
    """The last step is the fourth end of one hypothesis, and where three others are cut: all of them count."""
    sizes = {"source_vocabulary_size": 59, "target_vocabulary_size": 59, "d_model": 60, "heads": 5, "d_ff": 31}
    model = build_tiny_model(seed=1, max_length=40, encoder_layers=1, decoder_layers=3, **sizes)
    special = SpecialIds(pad=0, bos=1, eos=2, source_ends_with_eos=True)
    sources = [ids for _, ids in synthetic_sources(model, special, Limits(max_source_length=40, max_target_length=40))]
    options = DecodeOptions(beam_size=4, max_decoding_length=20)
    ours = generate(TorchModel(model), sources, options, special)
    for source, result in zip(sources, ours, strict=True):
        expected = beam(model, torch.tensor(source), ReferenceSpecialIds(), 20, 4)[0]
        assert result.hypotheses[0].tokens == expected.tokens
        assert result.hypotheses[0].score == pytest.approx(expected.normalised_score(1.0), abs=1e-4)
