"""What a checkpoint was read as, held to the model that wrote it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from reference_model import Transformer

# Between two float64 runs of the same arithmetic in another order: measured 5.3e-15 at most, of logits up to 15.
FLOAT64 = 1e-12
FLOOR, TIMES = 1e-4, 2.0


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
    float64: float = FLOAT64,
    pad: int | None = None,
) -> None:
    """The same logits: in float64 to its last digits, in float32 within the yardstick.

    Args:
        ours: what was read.
        theirs: what wrote the checkpoint; has `logits`, see tests/oracles/layouts.py.
        source: the longest source.
        target: the targets' length.
        float64: how far two runs in float64 may be apart.
        pad: the padding id of models that look for it among ids.
    """
    config = ours.config
    inputs = batch(
        (config.source_vocabulary_size, config.target_vocabulary_size), source=source, target=target, pad=pad
    )
    exact = run(copy.deepcopy(theirs).double(), inputs)
    own_error = (run(theirs, inputs) - exact).abs().max()
    assert (ours(*inputs).double() - exact).abs().max() <= max(TIMES * own_error, FLOOR)
    assert (copy.deepcopy(ours).double()(*inputs) - exact).abs().max() <= float64


def run(model: Any, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """A model's logits in evaluation mode, as float64."""
    logits: Tensor = model.eval().logits(*inputs)
    return logits.double()
