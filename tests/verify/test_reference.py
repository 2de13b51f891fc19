"""What bundles are held to: a model in another precision without a copy of it, and its search."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from reference_model.checkpoint import SpecialIds as ReferenceSpecialIds
from reference_model.search import beam
from tests.conftest import build_tiny_model
from tests.numerics import exact_arrays, log_prob_limit
from tfm_export.bundle import Limits, SpecialIds
from tfm_export.decoding import DecodeOptions, generate
from tfm_export.export.golden import synthetic_sources
from tfm_export.precision import FLOAT64_EPSILON
from tfm_export.runtime.torch_model import TorchModel
from tfm_export.verify.reference import ReferenceRun, in_precision, run_reference

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
    double = copy.deepcopy(model).double()
    expected = run_reference(double, ids, mask, ids)
    names = ("log_probs", *expected.keys_values)
    limits = {
        name: measured.limit(FLOAT64_EPSILON)
        for name, measured in zip(
            names, exact_arrays(lambda: arrays(run_reference(double, ids, mask, ids))), strict=True
        )
    }
    for _ in range(2):  # a pass leaves nothing behind
        found = run_reference(exact, ids, mask, ids)
        for name, x, y in zip(names, arrays(found), arrays(expected), strict=True):
            assert abs(x - y).max() <= limits[name], name
    ours = dict(model.named_parameters())
    assert all(weight is ours[name] for name, weight in exact.named_parameters()), "no weight was copied"
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def arrays(run: ReferenceRun) -> list[np.ndarray]:
    return [run.log_probs, *run.keys_values.values()]


def test_a_beam_that_is_cut_gives_what_the_decoder_gives() -> None:
    """The last step is the fourth end of one hypothesis, and where three others are cut: all of them count."""
    sizes = {"source_vocabulary_size": 59, "target_vocabulary_size": 59, "d_model": 60, "heads": 5, "d_ff": 31}
    model = build_tiny_model(seed=1, max_length=40, encoder_layers=1, decoder_layers=3, **sizes)
    special = SpecialIds(pad=0, bos=1, eos=2, source_ends_with_eos=True)
    sources = [ids for _, ids in synthetic_sources(model, special, Limits(max_source_length=40, max_target_length=40))]
    options = DecodeOptions(beam_size=4, max_decoding_length=20)
    limit = 2 * log_prob_limit(model)  # two searches in float32; a score is the mean of log-probabilities
    ours = generate(TorchModel(model), sources, options, special)
    for source, result in zip(sources, ours, strict=True):
        expected = beam(model, torch.tensor(source), ReferenceSpecialIds(), 20, 4)[0]
        assert result.hypotheses[0].tokens == expected.tokens
        assert result.hypotheses[0].score == pytest.approx(expected.normalised_score(1.0), rel=0, abs=limit)
