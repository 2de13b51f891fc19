"""PyTorch eager with a growing cache gives the tokens of the reference, which has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.peers import torch_eager
from reference_model import search
from tests.benchmarks.random_models import (
    CONFIGURATIONS,
    LENGTH,
    SPECIAL,
    random_model,
    random_sources,
    reference_greedy,
)


@pytest.mark.parametrize("fields", CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())
def test_greedy_gives_the_tokens_of_the_reference(fields: dict[str, Any]) -> None:
    model, sources = random_model(**fields), random_sources()
    expected = [hypothesis.tokens for hypothesis in reference_greedy(model, sources)]
    assert torch_eager.greedy(model, sources, SPECIAL, LENGTH) == expected


@pytest.mark.parametrize("fields", CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())
def test_beam_gives_the_tokens_of_the_reference(fields: dict[str, Any]) -> None:
    model, sources = random_model(**fields), random_sources()
    expected = [search.beam(model, torch.tensor(s), SPECIAL, LENGTH, beam_size=3)[0].tokens for s in sources]
    assert torch_eager.beam(model, sources, SPECIAL, LENGTH, beam_size=3) == expected
