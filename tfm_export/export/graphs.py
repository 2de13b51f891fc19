"""The graphs as PyTorch modules over the weights of a `reference_model.Transformer`.

They compute what the Transformer computes, in the form that runtimes like. Tokens are rows of a matrix [R, M], R = B*T,
so that every linear layer is one `Gemm` with its bias inside, and attention is the ONNX operator `Attention` on
[B, H, T, D]. Inputs and outputs are those of `tfm_export.graph`. Measured: docs/decisions/0003-graph-form.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.onnx import ops

from reference_model import Transformer
from reference_model.model import DecoderLayer, EncoderLayer, MultiHeadAttention, PositionalEncoding, RelativePositions
from tfm_export.export.top_tokens import top_tokens
from tfm_export.graph import OPSET

# What hides a key in a mask that holds biases too: half of float16's lowest number, so that a score can be added.
HIDDEN = -32768.0


class Affine(nn.Module):
    """x W + b with W stored as [in, out]: the graph holds one Gemm and no transposed copy."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().t().contiguous())
        self.bias = nn.Parameter(linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """[R, in] -> [R, out]."""
        return torch.addmm(self.bias, x, self.weight)


class TiedProjection(nn.Module):
    """The output projection that shares the target embedding's table [V, M]: a Gemm reads it as it lies."""

    def __init__(self, projection: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = projection.weight, projection.bias

    def forward(self, x: Tensor) -> Tensor:
        """[R, M] -> [R, V]."""
        return nn.functional.linear(x, self.weight, self.bias)


class Embed(nn.Module):
    """Ids to rows: scaled embeddings with their positions, and normalised where the model does that."""

    def __init__(self, embedding: nn.Embedding, scale: float, positions: PositionalEncoding) -> None:
        super().__init__()
        self.weight, self.scale = embedding.weight, scale
        self.positions, self.norm = positions.table, positions.norm

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Ids [B, T] -> [R, M]; the positions [B, T] are 0..T-1 unless they are given."""
        x: Tensor = nn.functional.embedding(ids, self.weight)
        if self.scale != 1:
            x = x * self.scale
        if (table := self.positions) is not None:
            x = x + (table[: ids.size(1)] if positions is None else nn.functional.embedding(positions, table))
        normalised: Tensor = self.norm(x.reshape(-1, x.size(2)))
        return normalised


class RelativeMask(nn.Module):
    """A mask that holds the biases of relative positions: float, as the operator `Attention` adds it to the scores.

    The buckets are those of PyTorch: the graph looks a distance up in a table of biases and computes no logarithm.
    """

    def __init__(self, relative: RelativePositions) -> None:
        super().__init__()
        self.nearest, self.farthest = -relative.max_distance, relative.max_distance if relative.both_ways else 0
        distances = torch.arange(self.nearest, self.farthest + 1)
        self.bias = nn.Parameter(relative.bias(relative.buckets(distances)).detach())  # [distances, H]

    def forward(self, mask: Tensor, distance: Tensor) -> Tensor:
        """Bool mask [B, 1, Q, K], key position minus query position [B or 1, Q, K] -> float mask [B, H, Q, K]."""
        places = distance.clamp(self.nearest, self.farthest) - self.nearest
        bias = nn.functional.embedding(places, self.bias).permute(0, 3, 1, 2)
        return torch.where(mask, bias, HIDDEN)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scaled: bool = True) -> Tensor:
    """The operator `Attention`: [B, H, Q, D] and [B, H, K, D] under a mask [B, 1 or H, Q, K] -> [B, H, Q, D]."""
    attended: Tensor = ops.symbolic(
        "Attention",
        (query, key, value, mask),
        attrs={} if scaled else {"scale": 1.0},
        dtype=query.dtype,
        shape=query.shape,
        version=OPSET,
    )
    return attended


def attend_with_weights(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scaled: bool
) -> tuple[Tensor, Tensor]:
    """`attend` in primitive operators, which also gives the weights [B, H, Q, K] that the operator keeps to itself."""
    scores = query @ key.transpose(-2, -1)
    if scaled:
        scores = scores / math.sqrt(query.size(-1))
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)
    return weights @ value, weights


def scatter(cache: Tensor, new: Tensor, write_index: Tensor) -> Tensor:
    """The operator `TensorScatter`: write `new` [B, H, Q, D] into `cache` [B, H, C, D] from slot write_index [B] on."""
    updated: Tensor = ops.symbolic(
        "TensorScatter",
        (cache, new, write_index),
        attrs={"axis": -2, "mode": "linear"},
        dtype=cache.dtype,
        shape=cache.shape,
        version=OPSET,
    )
    return updated


class GraphAttention(nn.Module):
    """The projections of an attention. `keys_values` is left out where the encoder has done that part."""

    def __init__(self, attention: MultiHeadAttention, *, keys_values: bool = True) -> None:
        super().__init__()
        self.heads, self.head_size, self.scaled = attention.heads, attention.head_size, attention.scaled
        self.query, self.output = Affine(attention.W_q), Affine(attention.W_o)
        if keys_values:
            self.key, self.value = Affine(attention.W_k), Affine(attention.W_v)

    def split_heads(self, x: Tensor, batch: int) -> Tensor:
        """[R, H x D] -> [B, H, T, D]."""
        return x.view(batch, -1, self.heads, self.head_size).transpose(1, 2)

    def merge_heads(self, x: Tensor) -> Tensor:
        """[B, H, T, D] -> [R, H x D]."""
        return x.transpose(1, 2).reshape(-1, self.heads * self.head_size)


class GraphFeedForward(nn.Module):
    """activation(x W_1 + b_1) W_2 + b_2; gated, the activation is multiplied by x W_gate + b_gate."""

    def __init__(self, layer: EncoderLayer | DecoderLayer) -> None:
        super().__init__()
        self.expand, self.contract = Affine(layer.feed_forward.W_1), Affine(layer.feed_forward.W_2)
        gate = layer.feed_forward.W_gate
        self.gate = None if gate is None else Affine(gate)
        self.activation = layer.feed_forward.activation

    def forward(self, x: Tensor) -> Tensor:
        """[R, M] -> [R, M]."""
        hidden = self.activation(self.expand(x))
        if self.gate is not None:
            hidden = hidden * self.gate(x)
        y: Tensor = self.contract(hidden)
        return y


class EncoderGraphLayer(nn.Module):
    """An encoder layer over rows."""

    def __init__(self, layer: EncoderLayer) -> None:
        super().__init__()
        self.self_attention, self.feed_forward = GraphAttention(layer.self_attention), GraphFeedForward(layer)
        self.self_attention_residual = layer.self_attention_residual
        self.feed_forward_residual = layer.feed_forward_residual

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x [R, M], mask [B, 1 or H, S, S] -> x."""
        attention, batch = self.self_attention, mask.size(0)
        y = self.self_attention_residual.before(x)
        projections = (attention.query, attention.key, attention.value)
        query, key, value = (attention.split_heads(project(y), batch) for project in projections)
        y = attention.output(attention.merge_heads(attend(query, key, value, mask, scaled=attention.scaled)))
        x = self.self_attention_residual.after(x, y)
        y = self.feed_forward(self.feed_forward_residual.before(x))
        return self.feed_forward_residual.after(x, y)


class EncoderGraph(nn.Module):
    """encoder.onnx."""

    cross: Sequence[GraphAttention]

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        scale = model.embedding_scale(model.source_embedding)
        self.embedding = Embed(model.source_embedding, scale, model.source_positions)
        self.relative = None if model.encoder_relative is None else RelativeMask(model.encoder_relative)
        self.norm = model.encoder_norm
        self.layers = nn.ModuleList(EncoderGraphLayer(layer) for layer in model.encoder_layers)
        attentions = (GraphAttention(layer.cross_attention) for layer in model.decoder_layers)
        self.cross = nn.ModuleList(attentions)  # type: ignore[assignment]

    def forward(self, source_ids: Tensor, source_mask: Tensor) -> list[Tensor]:
        """source_ids [B, S], source_mask [B, S] -> the key and value [B, H, S, D] of every decoder layer in turn."""
        batch, length = source_ids.shape
        x = self.embedding(source_ids)
        # ONNX Runtime's CPU Attention does not broadcast the query axis of a mask.
        mask = source_mask[:, None, None, :].expand(batch, 1, length, length)
        if self.relative is not None:
            position = torch.arange(length)
            mask = self.relative(mask, (position - position[:, None])[None])
        for layer in self.layers:
            x = layer(x, mask)
        memory = self.norm(x)
        return [a.split_heads(project(memory), batch) for a in self.cross for project in (a.key, a.value)]


class DecoderGraphLayer(nn.Module):
    """A decoder layer over rows and a cache."""

    def __init__(self, layer: DecoderLayer) -> None:
        super().__init__()
        self.self_attention, self.feed_forward = GraphAttention(layer.self_attention), GraphFeedForward(layer)
        self.cross_attention = GraphAttention(layer.cross_attention, keys_values=False)
        self.self_attention_residual = layer.self_attention_residual
        self.cross_attention_residual = layer.cross_attention_residual
        self.feed_forward_residual = layer.feed_forward_residual

    def forward(
        self,
        x: Tensor,
        write_index: Tensor,
        self_mask: Tensor,
        cross_mask: Tensor,
        cache: tuple[Tensor, Tensor],
        cross: tuple[Tensor, Tensor],
        cross_weights: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [R, M], masks [B, 1 or H, Q, C] and [B, 1, Q, S], cache [B, H, C, D], cross [B, H, S, D].

        Args:
            x: the decoder's stream.
            write_index: int64 [B], each sentence's first slot to write to.
            self_mask: the slots each query sees.
            cross_mask: the source tokens each query sees.
            cache: the self-attention key and value.
            cross: the cross-attention key and value.
            cross_weights: a list to append the cross-attention's weights [B, H, Q, S] to; None for the fast operator.

        Returns:
            x [R, M] and the updated self-attention key and value.
        """
        attention, batch = self.self_attention, self_mask.size(0)
        y = self.self_attention_residual.before(x)
        query, new_key, new_value = (
            attention.split_heads(project(y), batch) for project in (attention.query, attention.key, attention.value)
        )
        key, value = scatter(cache[0], new_key, write_index), scatter(cache[1], new_value, write_index)
        y = attention.output(attention.merge_heads(attend(query, key, value, self_mask, scaled=attention.scaled)))
        x = self.self_attention_residual.after(x, y)
        attention = self.cross_attention
        query = attention.split_heads(attention.query(self.cross_attention_residual.before(x)), batch)
        if cross_weights is None:
            attended = attend(query, *cross, cross_mask, scaled=attention.scaled)
        else:
            attended, weights = attend_with_weights(query, *cross, cross_mask, scaled=attention.scaled)
            cross_weights.append(weights)
        x = self.cross_attention_residual.after(x, attention.output(attention.merge_heads(attended)))
        y = self.feed_forward(self.feed_forward_residual.before(x))
        return self.feed_forward_residual.after(x, y), key, value


def next_tokens(logits: Tensor, candidates: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits [B, Q, V] -> log_probs [B, Q, V], top_log_probs and top_ids [B, Q, N], log_normaliser [B, Q]."""
    log_probs = logits.log_softmax(-1)
    top_log_probs, top_ids = top_tokens(log_probs, candidates)
    # Every token's logit is above its log-probability by the same amount: the first one's tells it.
    log_normaliser = (logits[:, :, :1] - log_probs[:, :, :1]).squeeze(2)
    return log_probs, top_log_probs, top_ids, log_normaliser


class DecoderStepGraph(nn.Module):
    """decoder_step.onnx, or decoder_step_attention.onnx.

    Args:
        model: the weights.
        candidates: N, how many of the best tokens a step names.
        attention_layer: the layer whose cross-attention weights are an output too; None for none.
    """

    def __init__(self, model: Transformer, candidates: int, attention_layer: int | None = None) -> None:
        super().__init__()
        self.attention_layer = attention_layer
        scale = model.embedding_scale(model.target_embedding)
        self.embedding = Embed(model.target_embedding, scale, model.target_positions)
        self.relative = None if model.decoder_relative is None else RelativeMask(model.decoder_relative)
        self.norm, self.output_scale, self.candidates = model.decoder_norm, model.output_scale, candidates
        self.layers = nn.ModuleList(DecoderGraphLayer(layer) for layer in model.decoder_layers)
        tied = model.config.tie_projection
        self.projection = TiedProjection(model.projection) if tied else Affine(model.projection)

    def forward(
        self,
        target_ids: Tensor,
        positions: Tensor,
        write_index: Tensor,
        self_mask: Tensor,
        source_mask: Tensor,
        self_caches: Sequence[Tensor],
        cross: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """See `tfm_export.graph.decoder_step_inputs` and `decoder_step_outputs`; keys and values alternate."""
        batch, queries = target_ids.shape
        x = self.embedding(target_ids, positions)
        if self.relative is not None:
            # Slot j is not position j, but the slots that a query sees are in the order of their positions.
            key_positions = self_mask[:, 0].long().cumsum(-1) - 1
            self_mask = self.relative(self_mask, key_positions - positions[:, :, None])
        cross_mask = source_mask[:, None, None, :].expand(batch, 1, queries, source_mask.size(1))
        updated: list[Tensor] = []
        weights: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            cache, keys_values = (self_caches[2 * i], self_caches[2 * i + 1]), (cross[2 * i], cross[2 * i + 1])
            wanted = weights if i == self.attention_layer else None
            x, key, value = layer(x, write_index, self_mask, cross_mask, cache, keys_values, wanted)
            updated += [key, value]
        x = self.norm(x)
        if self.output_scale != 1:
            x = x * self.output_scale
        logits = self.projection(x).view(batch, queries, -1)
        return (*next_tokens(logits, self.candidates), *updated, *(w.mean(1) for w in weights))
