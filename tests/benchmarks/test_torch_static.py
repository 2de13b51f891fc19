"""PyTorch with caches of a fixed size gives the tokens of the reference, which has none."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from benchmarks.peers.torch_static import StaticGreedy
from reference_model.model import Transformer
from tests.benchmarks.random_models import (
    CONFIGURATIONS,
    LENGTH,
    SPECIAL,
    random_model,
    random_sources,
    reference_greedy,
)
from tests.skips import skip_if


def endless(model: Transformer) -> Transformer:
    with torch.no_grad():
        model.projection.bias[SPECIAL.eos] = -1e4
    return model


@pytest.mark.parametrize("fields", CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())
def test_the_tokens_of_the_reference_twice(fields: dict[str, Any]) -> None:
    model, sources = endless(random_model(**fields)), random_sources()
    expected = [hypothesis.tokens for hypothesis in reference_greedy(model, sources)]
    static = StaticGreedy(model, len(sources), max(map(len, sources)), LENGTH, SPECIAL)
    assert static.generate(sources) == expected
    assert static.generate(sources[::-1]) == expected[::-1]  # nothing is left of the batch before


@pytest.mark.full
@skip_if(shutil.which("g++") is None, "a C++ compiler, for torch.compile on a CPU", "apt-get install g++")
@pytest.mark.filterwarnings("ignore")
def test_compiled_gives_the_same() -> None:
    model, sources = endless(random_model()), random_sources()
    shape = (len(sources), max(map(len, sources)), LENGTH, SPECIAL)
    assert StaticGreedy(model, *shape, "compiled").generate(sources) == StaticGreedy(model, *shape).generate(sources)
