"""Models as people write them, in the layouts that checkpoints come in: their names, their masks, their arithmetic.

Each has `logits(source_ids, source_mask, target_ids)`: [B, S] int64, [B, S] bool with True at tokens, [B, T] int64 ->
[B, T, V].
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn


def sinusoids(length: int, width: int) -> Tensor:
    """The paper's table, in the line that everybody copies."""
    position = torch.arange(0, length).unsqueeze(1)
    frequency = torch.exp(torch.arange(0, width, 2) * -(math.log(10000.0) / width))
    table = torch.zeros(length, width)
    table[:, 0::2] = torch.sin(position * frequency)
    table[:, 1::2] = torch.cos(position * frequency)
    return table


class TorchSeq2Seq(nn.Module):
    """Embeddings and a projection around torch.nn.Transformer, as in PyTorch's own tutorial on translation."""

    def __init__(
        self,
        sizes: tuple[int, int],
        width: int,
        heads: int,
        *,
        length: int = 64,
        learned: bool = False,
        buffer: bool = True,
        scaled: bool = True,
        bias: bool = True,
        final_norm: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self.src_emb, self.tgt_emb = nn.Embedding(sizes[0], width), nn.Embedding(sizes[1], width)
        if learned:
            self.pos_emb = nn.Embedding(length, width)
        else:
            self.register_buffer("pe", sinusoids(length, width)[None], persistent=buffer)
        self.transformer = nn.Transformer(width, heads, batch_first=True, bias=bias, **options)
        if not final_norm:
            self.transformer.encoder.norm = self.transformer.decoder.norm = None
        self.generator = nn.Linear(width, sizes[1])
        self.scale, self.learned = math.sqrt(width) if scaled else 1.0, learned

    def embed(self, embedding: nn.Embedding, ids: Tensor) -> Tensor:
        table = self.pos_emb.weight if self.learned else self.pe[0]
        return embedding(ids) * self.scale + table[: ids.size(1)]

    def logits(self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
        causal = torch.ones(target_ids.size(1), target_ids.size(1), dtype=torch.bool).triu(1)
        hidden = self.transformer(
            self.embed(self.src_emb, source_ids),
            self.embed(self.tgt_emb, target_ids),
            tgt_mask=causal,
            src_key_padding_mask=~source_mask,
            memory_key_padding_mask=~source_mask,
        )
        return self.generator(hidden)


class TutorialAttention(nn.Module):
    """fc_q, fc_k, fc_v, fc_o; what is masked gets -1e10."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.fc_q, self.fc_k, self.fc_v, self.fc_o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
        batch, width = query.size(0), query.size(2)
        parts = (self.fc_q(query), self.fc_k(key), self.fc_v(key))
        q, k, v = (x.view(batch, -1, self.heads, width // self.heads).permute(0, 2, 1, 3) for x in parts)
        energy = torch.matmul(q, k.permute(0, 1, 3, 2)) / math.sqrt(width // self.heads)
        attention = torch.softmax(energy.masked_fill(mask == 0, -1e10), dim=-1)
        return self.fc_o(torch.matmul(attention, v).permute(0, 2, 1, 3).reshape(batch, -1, width))


class TutorialFeedForward(nn.Module):
    """fc_1, relu, fc_2."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc_1, self.fc_2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc_2(torch.relu(self.fc_1(x)))


class TutorialLayer(nn.Module):
    """An encoder layer, or a decoder layer."""

    def __init__(self, width: int, heads: int, inner: int, *, decoder: bool) -> None:
        super().__init__()
        self.self_attn_layer_norm, self.ff_layer_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attention = TutorialAttention(width, heads)
        if decoder:
            self.enc_attn_layer_norm = nn.LayerNorm(width)
            self.encoder_attention = TutorialAttention(width, heads)
        self.positionwise_feedforward = TutorialFeedForward(width, inner)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None, memory_mask: Any = None) -> Tensor:
        x = self.self_attn_layer_norm(x + self.self_attention(x, x, mask))
        if memory is not None:
            x = self.enc_attn_layer_norm(x + self.encoder_attention(x, memory, memory_mask))
        return self.ff_layer_norm(x + self.positionwise_feedforward(x))


class TutorialStack(nn.Module):
    """tok_embedding, pos_embedding, layers."""

    def __init__(
        self, size: int, width: int, layers: int, heads: int, inner: int, length: int, *, decoder: bool
    ) -> None:
        super().__init__()
        self.tok_embedding, self.pos_embedding = nn.Embedding(size, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(TutorialLayer(width, heads, inner, decoder=decoder) for _ in range(layers))
        if decoder:
            self.fc_out = nn.Linear(width, size)

    def forward(self, ids: Tensor, *masks: Any) -> Tensor:
        scale = math.sqrt(self.tok_embedding.embedding_dim)
        x = self.tok_embedding(ids) * scale + self.pos_embedding(torch.arange(ids.size(1)))
        for layer in self.layers:
            x = layer(x, *masks)
        return x


class Tutorial(nn.Module):
    """The tutorial's Seq2Seq."""

    def __init__(
        self, sizes: tuple[int, int], width: int, layers: tuple[int, int], heads: int, inner: int, length: int
    ) -> None:
        super().__init__()
        self.encoder = TutorialStack(sizes[0], width, layers[0], heads, inner, length, decoder=False)
        self.decoder = TutorialStack(sizes[1], width, layers[1], heads, inner, length, decoder=True)

    def logits(self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
        source_mask = source_mask[:, None, None]
        causal = torch.ones(target_ids.size(1), target_ids.size(1), dtype=torch.bool).tril()
        memory = self.encoder(source_ids, source_mask)
        return self.decoder.fc_out(self.decoder(target_ids, causal, memory, source_mask))


class AnnotatedNorm(nn.Module):
    """a_2 (x - mean) / (std + eps) + b_2."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(torch.randn(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.a_2 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) + self.b_2


class AnnotatedAttention(nn.Module):
    """linears.0 to linears.3."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.d_k, self.h = width // heads, heads
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
        batch = query.size(0)
        q, k, v = (
            linear(x).view(batch, -1, self.h, self.d_k).transpose(1, 2)
            for linear, x in zip(self.linears[:3], (query, key, key), strict=True)
        )
        scores = (torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)).masked_fill(mask == 0, -1e9)
        x = torch.matmul(scores.softmax(dim=-1), v).transpose(1, 2).reshape(batch, -1, self.h * self.d_k)
        return self.linears[-1](x)


class Named(nn.Module):
    """A module with parts of given names."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class AnnotatedLayer(nn.Module):
    """self_attn, src_attn, feed_forward and the sublayers' norms."""

    def __init__(self, width: int, heads: int, inner: int, *, decoder: bool) -> None:
        super().__init__()
        self.self_attn = AnnotatedAttention(width, heads)
        if decoder:
            self.src_attn = AnnotatedAttention(width, heads)
        self.feed_forward = Named(w_1=nn.Linear(width, inner), w_2=nn.Linear(inner, width))
        self.sublayer = nn.ModuleList(Named(norm=AnnotatedNorm(width)) for _ in range(2 + decoder))

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None, memory_mask: Any = None) -> Tensor:
        norms = iter(part.norm for part in self.sublayer)
        y = next(norms)(x)
        x = x + self.self_attn(y, y, mask)
        if memory is not None:
            x = x + self.src_attn(next(norms)(x), memory, memory_mask)
        return x + self.feed_forward.w_2(torch.relu(self.feed_forward.w_1(next(norms)(x))))


class AnnotatedStack(nn.Module):
    """layers and a norm."""

    def __init__(self, width: int, layers: int, heads: int, inner: int, *, decoder: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AnnotatedLayer(width, heads, inner, decoder=decoder) for _ in range(layers))
        self.norm = AnnotatedNorm(width)

    def forward(self, x: Tensor, *masks: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, *masks)
        return self.norm(x)


class PositionBuffer(nn.Module):
    """pe [1, length, width]."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.register_buffer("pe", sinusoids(length, width).unsqueeze(0))


class Annotated(nn.Module):
    """EncoderDecoder."""

    def __init__(
        self, sizes: tuple[int, int], width: int, layers: tuple[int, int], heads: int, inner: int, length: int
    ) -> None:
        super().__init__()
        self.encoder = AnnotatedStack(width, layers[0], heads, inner, decoder=False)
        self.decoder = AnnotatedStack(width, layers[1], heads, inner, decoder=True)
        position = PositionBuffer(width, length)
        self.src_embed, self.tgt_embed = (
            nn.Sequential(Named(lut=nn.Embedding(size, width)), copy.deepcopy(position)) for size in sizes
        )
        self.generator = Named(proj=nn.Linear(width, sizes[1]))

    def embed(self, parts: nn.Module, ids: Tensor) -> Tensor:
        table = parts[0].lut
        return table(ids) * math.sqrt(table.embedding_dim) + parts[1].pe[:, : ids.size(1)]

    def logits(self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
        source_mask = source_mask[:, None, None]
        causal = torch.ones(target_ids.size(1), target_ids.size(1), dtype=torch.bool).tril()
        memory = self.encoder(self.embed(self.src_embed, source_ids), source_mask)
        return self.generator.proj(self.decoder(self.embed(self.tgt_embed, target_ids), causal, memory, source_mask))
