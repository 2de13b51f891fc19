"""An encoder-decoder Transformer that no table of layouts knows, with the code that its author would have.

Rotary positions, attention and feed-forward side by side in one residual, a norm on queries and keys, and four heads of
queries to two of keys and values. It knows nothing of caches or ONNX.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

WIDTH, HEADS, KEY_HEADS, HEAD_SIZE, INNER, LONGEST = 48, 4, 2, 12, 96, 64


class Rotary(nn.Module):
    """Turns each pair of dimensions by an angle that grows with the position (Su et al. 2021, RoFormer)."""

    def __init__(self) -> None:
        super().__init__()
        frequency = 10000.0 ** (-torch.arange(HEAD_SIZE // 2) / (HEAD_SIZE // 2))
        angle = torch.arange(LONGEST)[:, None] * frequency
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, H, T, D], positions [B, T] -> x, turned."""
        cos, sin = (nn.functional.embedding(positions, table)[:, None] for table in (self.cos, self.sin))
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, HEADS * HEAD_SIZE, bias=False)
        self.key = nn.Linear(WIDTH, KEY_HEADS * HEAD_SIZE, bias=False)
        self.value = nn.Linear(WIDTH, KEY_HEADS * HEAD_SIZE, bias=False)
        self.output = nn.Linear(HEADS * HEAD_SIZE, WIDTH, bias=False)
        self.query_norm, self.key_norm = nn.RMSNorm(HEAD_SIZE), nn.RMSNorm(HEAD_SIZE)

    def queries(self, x: Tensor) -> Tensor:
        """[B, T, M] -> [B, H, T, D]."""
        return self.query_norm(self.query(x).unflatten(-1, (HEADS, HEAD_SIZE)).transpose(1, 2))

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, M] -> the key and the value, [B, key heads, T, D]."""
        key, value = (f(x).unflatten(-1, (KEY_HEADS, HEAD_SIZE)).transpose(1, 2) for f in (self.key, self.value))
        return self.key_norm(key), value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Every key and value serves two heads of queries; mask [B, 1, T, K]. Gives [B, T, M]."""
        key, value = (x.repeat_interleave(HEADS // KEY_HEADS, dim=1) for x in (key, value))
        attended = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.output(attended.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """x + attention(norm(x)) [+ cross-attention(norm(x))] + feed-forward(norm(x))."""

    def __init__(self, *, cross: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.cross = Attention() if cross else None
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, INNER), nn.SiLU(), nn.Linear(INNER, WIDTH))


class Model(nn.Module):
    def __init__(self, vocabulary_size: int, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, WIDTH)
        self.rotary = Rotary()
        self.encoder = nn.ModuleList(Layer(cross=False) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(cross=True) for _ in range(layers))
        self.encoder_norm, self.decoder_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def encode(self, source_ids: Tensor, source_mask: Tensor) -> Tensor:
        """Ids [B, S], a mask [B, S] that is False at padding -> [B, S, M]."""
        batch, length = source_ids.shape
        x = self.embedding(source_ids)
        positions = torch.arange(length).expand(batch, length)
        mask = source_mask[:, None, None, :].expand(batch, 1, length, length)
        for layer in self.encoder:
            y = layer.norm(x)
            key, value = layer.attention.keys_values(y)
            query, key = self.rotary(layer.attention.queries(y), positions), self.rotary(key, positions)
            x = x + layer.attention.attend(query, key, value, mask) + layer.feed_forward(y)
        return self.encoder_norm(x)

    def decode(self, target_ids: Tensor, memory: Tensor, source_mask: Tensor) -> Tensor:
        """Ids [B, T], [B, S, M], [B, S] -> the scores [B, T, V] of what follows each: for training."""
        batch, length = target_ids.shape
        x = self.embedding(target_ids)
        positions = torch.arange(length).expand(batch, length)
        causal = torch.ones(length, length, dtype=torch.bool).tril().expand(batch, 1, length, length)
        cross_mask = source_mask[:, None, None, :].expand(batch, 1, length, memory.size(1))
        for layer in self.decoder:
            y = layer.norm(x)
            key, value = layer.attention.keys_values(y)
            query, key = self.rotary(layer.attention.queries(y), positions), self.rotary(key, positions)
            attended = layer.attention.attend(query, key, value, causal)
            crossed = layer.cross.attend(layer.cross.queries(y), *layer.cross.keys_values(memory), cross_mask)
            x = x + attended + crossed + layer.feed_forward(y)
        return self.decoder_norm(x) @ self.embedding.weight.T
