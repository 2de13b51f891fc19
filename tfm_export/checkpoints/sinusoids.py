"""Tables of sinusoids in the layouts of other projects, each computed as that project does it."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def by_half(length: int, width: int) -> Tensor:
    """The paper's frequencies, all sines before all cosines, in float64 first: Marian's, Pegasus's. [length, width]."""
    angle = np.arange(length)[:, None] / np.power(10000, 2 * (np.arange(width) // 2) / width)
    table = np.concatenate([np.sin(angle[:, 0::2]), np.cos(angle[:, 1::2])], 1)
    return torch.from_numpy(table).float()


def by_half_of_tensor2tensor(length: int, width: int) -> Tensor:
    """Frequencies down to exactly 1/10000, all sines before all cosines, in float32: fairseq's, M2M-100's."""
    half = width // 2
    frequency = torch.exp(torch.arange(half, dtype=torch.int64).float() * -(math.log(10000) / max(half - 1, 1)))
    angle = torch.arange(length, dtype=torch.int64).float()[:, None] * frequency
    table = torch.cat([angle.sin(), angle.cos()], 1)
    return torch.cat([table, torch.zeros(length, width - 2 * half)], 1)
