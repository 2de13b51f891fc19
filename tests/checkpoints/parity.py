"""What a checkpoint was read as, held to the model that wrote it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from reference_model import Transformer
from tests.numerics import FLOAT32_EPSILON, FLOAT64_EPSILON, assert_close, exactly


def batch(
    sizes: tuple[int, int], *, source: int = 9, target: int = 7, pad: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Random ids of three sentences, the second and third with padding; with a padding id, nowhere but there."""
    lengths = torch.tensor([source, max(1, source // 2), 1])
    mask = torch.arange(source) < lengths[:, None]
    source_ids, target_ids = torch.randint(0, sizes[0], (3, source)), torch.randint(0, sizes[1], (3, target))
    if pad is not None:
        source_ids[source_ids == pad] = (pad + 1) % sizes[0]
        target_ids[target_ids == pad] = (pad + 1) % sizes[1]
        source_ids[~mask] = pad
    return source_ids, mask, target_ids


@torch.no_grad()
def assert_same_model(
    ours: Transformer,
    theirs: nn.Module,
    *,
    source: int = 9,
    target: int = 7,
    pad: int | None = None,
    constants_in_float32: bool = False,
) -> None:
    """The same logits, in float64 and in float32, but for what rounding explains.

    Args:
        ours: what was read.
        theirs: what wrote the checkpoint; has `logits`, see tests/oracles/layouts.py.
        source: the longest source.
        target: the targets' length.
        pad: the padding id of models that look for it among ids.
        constants_in_float32: a constant of theirs is rounded to float32 whatever they are cast to.
    """
    config = ours.config
    inputs = batch(
        (config.source_vocabulary_size, config.target_vocabulary_size), source=source, target=target, pad=pad
    )
    exact = exactly(lambda model: run(model, inputs), theirs)
    for model, logits in ((theirs, run(theirs, inputs)), (ours, ours(*inputs))):
        assert logits.dtype == torch.float32, model
        assert_close(logits, exact)
    epsilon = FLOAT32_EPSILON if constants_in_float32 else FLOAT64_EPSILON
    assert_close(copy.deepcopy(ours).double()(*inputs), exact, epsilon=epsilon)


@torch.no_grad()
def assert_computed(ours: Transformer, expected: dict[str, Tensor], name: str = "logits") -> None:
    """What another program computed in float32, on some machine, and what is computed here.

    Args:
        ours: what was read.
        expected: source_ids, lengths, target_ids, and what came of them.
        name: of the last, "logits" or "log_probs".
    """
    mask = torch.arange(expected["source_ids"].size(1)) < expected["lengths"][:, None]

    def compute(model: nn.Module) -> Tensor:
        logits: Tensor = model(expected["source_ids"], mask, expected["target_ids"])
        return logits.log_softmax(-1) if name == "log_probs" else logits

    exact = exactly(compute, ours)
    for numbers in (expected[name], compute(ours)):
        assert_close(numbers, exact)


def run(model: Any, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """A model's logits in evaluation mode."""
    logits: Tensor = model.eval().logits(*inputs)
    return logits
