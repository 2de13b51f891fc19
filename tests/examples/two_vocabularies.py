"""A model on torch.nn.Transformer whose two vocabularies have different special ids, and its own greedy decoding."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SOURCE = ("<pad>", "<unk>", "<s>", "</s>", *"abcdefghij")
TARGET = ("<blank>", "<go>", "<stop>", *"nopqrstuvwxyz-")
SETTINGS: dict[str, Any] = {
    "heads": 4,
    "norm_first": True,
    "activation": "gelu",
    "scale_embeddings": False,
    "positions": "learned",
    "source_starts_with_bos": True,
    "source_ends_with_eos": True,
    "source_tokens": [*SOURCE],
    "target_tokens": [*TARGET],
    "target_split": "characters",
    "keys": {
        "read.weight": "source_embedding",
        "write.weight": "target_embedding",
        "where_in.weight": "source_positions",
        "where_out.weight": "target_positions",
    },
}
LONGEST_SOURCE, LONGEST_TARGET = 24, 16


class TwoVocabularies(nn.Module):
    """Random weights whose targets depend on every token of the source, and end at different lengths."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.read, self.write = nn.Embedding(len(SOURCE), dim), nn.Embedding(len(TARGET), dim)
        self.where_in, self.where_out = nn.Embedding(LONGEST_SOURCE, dim), nn.Embedding(LONGEST_TARGET, dim)
        self.core = nn.Transformer(dim, 4, 1, 2, 48, 0.0, "gelu", batch_first=True, norm_first=True)
        self.head = nn.Linear(dim, len(TARGET))
        with torch.no_grad():
            self.head.weight.mul_(8)
            self.head.bias[2] += 4  # targets end
            self.head.bias[:2] -= 50  # no step gives padding or the start token

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """[1, S] and [1, T] ids -> logits [1, T, V]."""
        read = self.read(source) + self.where_in.weight[: source.size(1)]
        write = self.write(target) + self.where_out.weight[: target.size(1)]
        causal = torch.full((target.size(1),) * 2, -torch.inf).triu(1)
        return self.head(self.core(read, write, tgt_mask=causal))


@functools.cache
@torch.inference_mode()
def greedy(model: TwoVocabularies, source: tuple[int, ...], bos: int = 1, eos: int = 2) -> list[int]:
    """The likeliest token at every step, from nothing but the model's forward pass; the end token is left out."""
    target = [bos]
    while len(target) <= LONGEST_TARGET:
        token = int(model(torch.tensor([source]), torch.tensor([target]))[0, -1].argmax())
        if token == eos:
            break
        target.append(token)
    return target[1:]


def make_model(seed: int = 0) -> TwoVocabularies:
    """The model in evaluation mode."""
    with (
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(action="ignore"),
    ):  # of a fast path that is not taken
        torch.manual_seed(seed)
        return TwoVocabularies().eval()


def save(model: TwoVocabularies, path: Path) -> Path:
    """Write its weights."""
    torch.save(model.state_dict(), path)
    return path
