"""The two graphs as PyTorch modules over the weights of a `reference_model.Transformer`.

They compute what the Transformer computes, in the form that runtimes like: the query, key and value projections of a
self-attention are one matrix product, the cross-attention keys and values of all decoder layers another, and attention
is the ONNX operator `Attention` on [B, H, T, D]. Inputs and outputs are those of `tfm_export.graph`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.onnx import ops

from reference_model import Transformer
from reference_model.model import DecoderLayer, EncoderLayer, MultiHeadAttention
from tfm_export.graph import OPSET


class MatrixProduct(nn.Module):
    """x W + b with W stored as [in, out], so that the graph holds a plain MatMul and no transposed copy.

    Args:
        linears: layers over the same input, computed as one; their outputs lie side by side.
    """

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat([linear.weight.detach() for linear in linears]).t().contiguous())
        self.bias = nn.Parameter(torch.cat([linear.bias.detach() for linear in linears]))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return x @ self.weight + self.bias


class TiedProjection(nn.Module):
    """The output projection that shares the target embedding's table [V, M]: a Gemm reads it as it lies."""

    def __init__(self, projection: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = projection.weight, projection.bias

    def forward(self, x: Tensor) -> Tensor:
        """[B, Q, M] -> [B, Q, V]."""
        rows = nn.functional.linear(x.reshape(-1, x.size(2)), self.weight, self.bias)
        return rows.view(x.size(0), x.size(1), -1)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """The operator `Attention`: [B, H, Q, D] and [B, H, K, D] under a bool mask [B, 1, Q, K] -> [B, H, Q, D]."""
    attended: Tensor = ops.symbolic(
        "Attention", (query, key, value, mask), dtype=query.dtype, shape=query.shape, version=OPSET
    )
    return attended


def attend_with_weights(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """`attend` in primitive operators, which also gives the weights [B, H, Q, K] that the operator keeps to itself."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
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


class SelfAttention(nn.Module):
    """The projections of a self-attention, fused."""

    def __init__(self, attention: MultiHeadAttention) -> None:
        super().__init__()
        self.split_heads, self.merge_heads = attention.split_heads, attention.merge_heads
        self.qkv = MatrixProduct(attention.W_q, attention.W_k, attention.W_v)
        self.output = MatrixProduct(attention.W_o)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, M] -> query, key and value, each [B, H, T, D]."""
        query, key, value = (self.split_heads(part) for part in self.qkv(x).chunk(3, -1))
        return query, key, value


class FeedForward(nn.Module):
    """activation(x W_1 + b_1) W_2 + b_2."""

    def __init__(self, layer: EncoderLayer | DecoderLayer) -> None:
        super().__init__()
        self.expand, self.contract = MatrixProduct(layer.feed_forward.W_1), MatrixProduct(layer.feed_forward.W_2)
        self.activation = layer.feed_forward.activation

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, M] -> [B, T, M]."""
        y: Tensor = self.contract(self.activation(self.expand(x)))
        return y


class EncoderGraphLayer(nn.Module):
    """An encoder layer with fused projections."""

    def __init__(self, layer: EncoderLayer) -> None:
        super().__init__()
        self.self_attention, self.feed_forward = SelfAttention(layer.self_attention), FeedForward(layer)
        self.self_attention_residual = layer.self_attention_residual
        self.feed_forward_residual = layer.feed_forward_residual

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x [B, S, M], mask [B, 1, S, S] -> x."""
        attention = self.self_attention
        query, key, value = attention.project(self.self_attention_residual.before(x))
        y = attention.output(attention.merge_heads(attend(query, key, value, mask)))
        x = self.self_attention_residual.after(x, y)
        y = self.feed_forward(self.feed_forward_residual.before(x))
        return self.feed_forward_residual.after(x, y)


class EncoderGraph(nn.Module):
    """encoder.onnx."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.embedding, self.norm = model.source_embedding, model.encoder_norm
        self.scale, self.table = math.sqrt(model.config.d_model), model.positional_encoding.table
        self.layers = nn.ModuleList(EncoderGraphLayer(layer) for layer in model.encoder_layers)
        attentions = [layer.cross_attention for layer in model.decoder_layers]
        self.split_heads = attentions[0].split_heads
        self.cross = MatrixProduct(*(linear for a in attentions for linear in (a.W_k, a.W_v)))

    def forward(self, source_ids: Tensor, source_mask: Tensor) -> list[Tensor]:
        """source_ids [B, S], source_mask [B, S] -> the key and value [B, H, S, D] of every decoder layer in turn."""
        batch, length = source_ids.shape
        x = self.embedding(source_ids) * self.scale + self.table[:length]
        # ONNX Runtime's CPU Attention does not broadcast the query axis of a mask.
        mask = source_mask[:, None, None, :].expand(batch, 1, length, length)
        for layer in self.layers:
            x = layer(x, mask)
        parts = self.cross(self.norm(x)).split(x.size(2), -1)
        return [self.split_heads(part) for part in parts]


class DecoderGraphLayer(nn.Module):
    """A decoder layer over a cache."""

    def __init__(self, layer: DecoderLayer) -> None:
        super().__init__()
        self.self_attention, self.feed_forward = SelfAttention(layer.self_attention), FeedForward(layer)
        self.cross_query = MatrixProduct(layer.cross_attention.W_q)
        self.cross_output = MatrixProduct(layer.cross_attention.W_o)
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
        """x [B, Q, M], masks [B, 1, Q, C] and [B, 1, Q, S], cache [B, H, C, D], cross [B, H, S, D].

        Args:
            x: the decoder's stream.
            write_index: see `scatter`.
            self_mask: the slots each query sees.
            cross_mask: the source tokens each query sees.
            cache: the self-attention key and value.
            cross: the cross-attention key and value.
            cross_weights: a list to append the cross-attention's weights [B, H, Q, S] to; None for the fast operator.

        Returns:
            x [B, Q, M] and the updated self-attention key and value.
        """
        attention = self.self_attention
        query, new_key, new_value = attention.project(self.self_attention_residual.before(x))
        key, value = scatter(cache[0], new_key, write_index), scatter(cache[1], new_value, write_index)
        y = attention.output(attention.merge_heads(attend(query, key, value, self_mask)))
        x = self.self_attention_residual.after(x, y)
        query = attention.split_heads(self.cross_query(self.cross_attention_residual.before(x)))
        if cross_weights is None:
            attended = attend(query, *cross, cross_mask)
        else:
            attended, weights = attend_with_weights(query, *cross, cross_mask)
            cross_weights.append(weights)
        y = self.cross_output(attention.merge_heads(attended))
        x = self.cross_attention_residual.after(x, y)
        y = self.feed_forward(self.feed_forward_residual.before(x))
        return self.feed_forward_residual.after(x, y), key, value


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
        self.embedding, self.norm, self.candidates = model.target_embedding, model.decoder_norm, candidates
        self.scale, self.table = math.sqrt(model.config.d_model), model.positional_encoding.table
        self.layers = nn.ModuleList(DecoderGraphLayer(layer) for layer in model.decoder_layers)
        tied = model.config.tie_projection
        self.projection = TiedProjection(model.projection) if tied else MatrixProduct(model.projection)

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
        x = self.embedding(target_ids) * self.scale + nn.functional.embedding(positions, self.table)
        cross_mask = source_mask[:, None, None, :].expand(batch, 1, queries, source_mask.size(1))
        updated: list[Tensor] = []
        weights: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            cache, keys_values = (self_caches[2 * i], self_caches[2 * i + 1]), (cross[2 * i], cross[2 * i + 1])
            wanted = weights if i == self.attention_layer else None
            x, key, value = layer(x, write_index, self_mask, cross_mask, cache, keys_values, wanted)
            updated += [key, value]
        log_probs = self.projection(self.norm(x)).log_softmax(-1)
        top_log_probs, top_ids = log_probs.topk(self.candidates, -1)
        return (log_probs, top_log_probs, top_ids, *updated, *(w.mean(1) for w in weights))
