"""Teach the model to spell words backwards, in a few minutes on two cores, and save its weights.

python train.py model.pt
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from model import Model

PAD, BOS, EOS = 0, 1, 2
TOKENS = ["<pad>", "<s>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
LONGEST = 12


def make_batch(size: int) -> tuple[Tensor, Tensor]:
    """Random words and the same backwards, each with its end token, padded: [B, S] both."""
    lengths = torch.randint(1, LONGEST + 1, (size, 1))
    letters, place = torch.randint(4, len(TOKENS), (size, LONGEST + 1)), torch.arange(LONGEST + 1)
    source = torch.where(place < lengths, letters, torch.where(place == lengths, EOS, PAD))
    backwards = letters.gather(1, (lengths - 1 - place).clamp(min=0))
    target = torch.where(place < lengths, backwards, torch.where(place == lengths, EOS, PAD))
    return source, target


def train(steps: int) -> Model:
    """A model after so many batches."""
    torch.manual_seed(0)
    model = Model(len(TOKENS))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps)
    for step in range(steps):
        source, target = make_batch(128)
        start = torch.full((len(target), 1), BOS)
        mask = source != PAD
        logits = model.decode(torch.cat([start, target[:, :-1]], 1), model.encode(source, mask), mask)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    return model


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python train.py FILE")
    torch.save(train(1000).state_dict(), sys.argv[1])
