"""A model in another precision: the same numbers as a copy of all weights, without one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.conftest import build_tiny_model
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
