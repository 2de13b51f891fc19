"""Adapters as people write them: the usual ways to mask attention, and to compute positions inside the graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tfm_export.checkpoints import Adapter, AdapterConfig, attend
from tfm_export.checkpoints.adapter import Cache

V, HEADS, D = 19, 2, 16
WIDTH = HEADS * D
LONGEST = 24
IDS = {"pad": 0, "bos": 1, "eos": 2}
# Sources, as lines of ids.
LINES = [" ".join(str(3 + (7 * i + 5 * j + i * j) % 16) for j in range(2 + i % 20)) for i in range(24)]

# From scores [B, H, Q, K] and a mask [B, 1, Q, K] that is True where a query may look, to what softmax takes.
Masking = Callable[[Tensor, Tensor], Tensor]


def masked_fill_infinity(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~mask, float("-inf"))


def where_infinity(scores: Tensor, mask: Tensor) -> Tensor:
    return scores + torch.where(mask, 0.0, float("-inf"))


def zeros_filled(scores: Tensor, mask: Tensor) -> Tensor:
    return scores + torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(~mask, float("-inf"))


def times_a_billion(scores: Tensor, mask: Tensor) -> Tensor:
    return scores + (1 - mask.float()) * -1e9


def times_the_least(scores: Tensor, mask: Tensor) -> Tensor:
    """As transformers did for years."""
    return scores + (1.0 - mask.to(scores.dtype)) * torch.finfo(torch.float32).min


def filled_with_a_billion(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask == 0, -1e9)


def times_ten_thousand(scores: Tensor, mask: Tensor) -> Tensor:
    return scores - 1e4 * (~mask).to(scores.dtype)


def by_hand(masking: Masking) -> Callable[..., Tensor]:
    """Attention of products and a softmax."""

    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        scores = query @ key.transpose(-1, -2) / math.sqrt(D)
        return masking(scores, mask).softmax(-1) @ value

    return attention


def sdpa_infinity(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return attend(query, key, value, torch.where(mask, 0.0, float("-inf")).to(query.dtype))


def sdpa_billion(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return attend(query, key, value, (1.0 - mask.to(query.dtype)) * -1e9)


ATTENTIONS: dict[str, Callable[..., Tensor]] = {
    **{
        masking.__name__: by_hand(masking)
        for masking in (
            masked_fill_infinity,
            where_infinity,
            zeros_filled,
            times_a_billion,
            times_the_least,
            filled_with_a_billion,
            times_ten_thousand,
        )
    },
    "sdpa_infinity": sdpa_infinity,
    "sdpa_billion": sdpa_billion,
    "sdpa_bool": attend,
}


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(LONGEST, WIDTH)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.table(positions)


class Sinusoids(nn.Module):
    """Computed in the graph, of positions as floats of the model's type."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        frequency = torch.exp(torch.arange(0, WIDTH, 2).to(x.dtype) * (-math.log(10000.0) / WIDTH))
        angle = positions[..., None].to(x.dtype) * frequency
        return x + torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)


class SinusoidBuffer(nn.Module):
    """A table that is no parameter, computed in float32 when the model is made."""

    def __init__(self) -> None:
        super().__init__()
        angle = torch.arange(LONGEST)[:, None] * 10000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
        self.register_buffer("table", torch.stack([angle.sin(), angle.cos()], -1).flatten(-2), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.table[positions]


class NoPositions(nn.Module):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:  # noqa: ARG002
        return x


def no_turn(x: Tensor, positions: Tensor) -> Tensor:  # noqa: ARG001
    return x


def rotary(x: Tensor, positions: Tensor) -> Tensor:
    """In the graph and in the type of the model, so in float64 when it is cast; x [B, H, T, D], positions [B, T]."""
    frequency = 10000.0 ** (-torch.arange(0, D, 2).to(x.dtype) / D)
    return _turned(x, positions[:, None, :, None].to(x.dtype) * frequency)


def rotary_in_float32(x: Tensor, positions: Tensor) -> Tensor:
    """As many have it: in float32, whatever the type of the model."""
    frequency = 10000.0 ** (-torch.arange(0, D, 2).float() / D)
    return _turned(x, positions[:, None, :, None].float() * frequency)


def _turned(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


POSITIONS: dict[str, tuple[type[nn.Module], Callable[[Tensor, Tensor], Tensor]]] = {
    "learned": (Learned, no_turn),
    "sinusoids": (Sinusoids, no_turn),
    "sinusoid_buffer": (SinusoidBuffer, no_turn),
    "rotary": (NoPositions, rotary),
    "rotary_in_float32": (NoPositions, rotary_in_float32),
}


class Idiom(Adapter):
    """One encoder layer and one decoder layer.

    Args:
        attention: of ATTENTIONS.
        positions: of POSITIONS.
        wrong: a mistake of `decode_step` that `decode` has not: "position" is one too low, "order" of the cache's keys,
            "padding" seen by cross-attention, "projection".
    """

    def __init__(self, attention: str = "sdpa_bool", positions: str = "learned", wrong: str | None = None) -> None:
        super().__init__(
            AdapterConfig(
                source_vocabulary_size=V,
                target_vocabulary_size=V,
                decoder_layers=1,
                heads=HEADS,
                head_size=D,
                max_length=LONGEST,
                max_target_length=LONGEST,
            )
        )
        self.attention, self.wrong = ATTENTIONS[attention], wrong
        places, self.turn = POSITIONS[positions]
        self.source_positions, self.target_positions = places(), places()
        self.embedding = nn.Embedding(V, WIDTH)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.projection = nn.Linear(WIDTH, V)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():  # sharp enough for every source to have a target of its own
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(std=1.5 * WIDTH**-0.5, generator=generator)
            self.projection.weight.add_(self.embedding.weight.roll(3, 0))

    def heads(self, x: Tensor, layer: int) -> Tensor:
        return self.linears[layer](x).unflatten(-1, (HEADS, D)).transpose(1, 2)

    def encode(self, source_ids: Tensor, source_mask: Tensor) -> Tensor:
        batch, length = source_ids.shape
        positions = torch.arange(length).expand(batch, length)
        x = self.source_positions(self.embedding(source_ids), positions)
        y = self.norms[0](x)
        query, key = (self.turn(self.heads(y, i), positions) for i in (0, 1))
        mask = source_mask[:, None, None, :].expand(batch, 1, length, length)
        x = x + self._merged(self.attention(query, key, self.heads(y, 2), mask), 3)
        return self.norms[1](x) * source_mask[..., None].to(x.dtype)

    def cross_keys_values(self, memory: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(self.heads(memory, 4), self.heads(memory, 5))]

    def _merged(self, x: Tensor, layer: int) -> Tensor:
        return self.linears[layer](x.transpose(1, 2).flatten(2))

    def decode_step(
        self, target_ids: Tensor, positions: Tensor, self_mask: Tensor, source_mask: Tensor, cache: Cache, cross: Any
    ) -> Tensor:
        if self.wrong == "position":
            positions = (positions - 1).clamp(min=0)
        if self.wrong == "padding":
            source_mask = torch.ones_like(source_mask)
        x = self.target_positions(self.embedding(target_ids), positions)
        y = self.norms[2](x)
        key, value = cache.update(0, self.turn(self.heads(y, 6), positions), self.heads(y, 7))
        if self.wrong == "order":
            key = key.flip(2)
        query = self.turn(self.heads(y, 8), positions)
        x = x + self._merged(self.attention(query, key, value, self_mask), 9)
        query = self.heads(self.norms[3](x), 10)
        x = x + self._merged(self.attention(query, *cross[0], source_mask), 11)
        return self.projection(x) * (1.01 if self.wrong == "projection" else 1)

    def decode(self, target_ids: Tensor, memory: Tensor, source_mask: Tensor) -> Tensor:
        wrong, self.wrong = self.wrong, None
        try:
            return super().decode(target_ids, memory, source_mask)
        finally:
            self.wrong = wrong
