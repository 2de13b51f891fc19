"""The Transformer of Vaswani et al., "Attention Is All You Need" (2017), read from top to bottom.

Letters in the shapes: B sentences, S source length, T target length, M d_model, H heads, D head size,
Q queries, K keys, V target vocabulary. M, H and D are those of the stack that is spoken of; the encoder's output, the
memory, has the encoder's M. Masks are bool and True means "may attend".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from reference_model.config import TransformerConfig


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: nn.Module | None = None,
    *,
    bias: Tensor | None = None,
    scaled: bool = True,
) -> tuple[Tensor, Tensor]:
    """softmax(Q K^T / sqrt(D)) V, equation 1 of the paper.

    Args:
        query: [B, H, Q, D].
        key: [B, H, K, D].
        value: [B, H, K, D].
        mask: bool, broadcastable to [B, H, Q, K], or None when every query sees every key.
        dropout: applied to the weights.
        bias: added to the scores, broadcastable to [B, H, Q, K].
        scaled: divide by sqrt(D), or do not.

    Returns:
        The attended values [B, H, Q, D] and the weights [B, H, Q, K].
    """
    scores = query @ key.transpose(-2, -1)
    if scaled:
        scores = scores / math.sqrt(query.size(-1))
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        # The lowest finite number, not -inf: a query that may see nothing gets equal weights instead of NaN.
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    attended = weights if dropout is None else dropout(weights)
    return attended @ value, weights


class MultiHeadAttention(nn.Module):
    """Several heads attend side by side, each on its own projection; section 3.2.2 of the paper.

    Args:
        config: the model's.
        memory_width: M of what keys and values are made of; None for d_model.
    """

    def __init__(self, config: TransformerConfig, memory_width: int | None = None) -> None:
        super().__init__()
        self.heads, self.head_size, self.scaled = config.heads, config.head_size, config.scale_attention
        width = config.heads * config.head_size
        self.W_q = nn.Linear(config.d_model, width)
        self.W_k = nn.Linear(memory_width or config.d_model, width)
        self.W_v = nn.Linear(memory_width or config.d_model, width)
        self.W_o = nn.Linear(width, config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def split_heads(self, x: Tensor) -> Tensor:
        """[B, T, H x D] -> [B, H, T, D]."""
        return x.view(x.size(0), x.size(1), self.heads, self.head_size).transpose(1, 2)

    def merge_heads(self, x: Tensor) -> Tensor:
        """[B, H, T, D] -> [B, T, H x D]."""
        return x.transpose(1, 2).reshape(x.size(0), x.size(2), self.heads * self.head_size)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The key and the value of every position of x [B, T, M], each [B, H, T, D]."""
        return self.split_heads(self.W_k(x)), self.split_heads(self.W_v(x))

    def attend(
        self, x: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend from x [B, Q, M] to a key and value [B, H, K, D]; the bias [B or 1, H, Q, K] is added to the scores.

        Returns:
            The projected result [B, Q, M] and the weights [B, H, Q, K].
        """
        query = self.split_heads(self.W_q(x))
        attended, weights = scaled_dot_product_attention(
            query, key, value, mask, self.dropout, bias=bias, scaled=self.scaled
        )
        return self.W_o(self.merge_heads(attended)), weights


def sinusoid_table(length: int, d_model: int) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/M)), PE(pos, 2i+1) = cos of the same; section 3.5. Returns [length, M]."""
    position = torch.arange(length, dtype=torch.float)[:, None]
    frequency = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float) * (-math.log(10000.0) / d_model))
    table = torch.zeros(length, d_model)
    table[:, 0::2] = torch.sin(position * frequency)
    table[:, 1::2] = torch.cos(position * frequency)
    return table


class PositionalEncoding(nn.Module):
    """Tells the model where a token stands, by adding a row of the position table to its embedding.

    Args:
        config: the model's.
        length: rows of the table.
    """

    table: Tensor | None

    def __init__(self, config: TransformerConfig, length: int) -> None:
        super().__init__()
        self.length = length
        if config.positions == "sinusoidal":
            self.register_buffer("table", sinusoid_table(length, config.d_model), persistent=False)
        elif config.positions == "learned":
            self.table = nn.Parameter(torch.empty(length, config.d_model))
        else:
            self.table = None
        self.norm = make_norm(config) if config.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, embedded: Tensor, positions: Tensor | None = None) -> Tensor:
        """[B, T, M] -> [B, T, M]; the positions [B, T] are 0..T-1 unless they are given."""
        if self.table is not None:
            length = embedded.size(1)
            if length > self.length:
                raise ValueError(
                    f"the position table has {self.length} rows (max_length), found a sequence of {length} tokens"
                )
            embedded = embedded + (self.table[:length] if positions is None else self.table[positions])
        out: Tensor = self.dropout(self.norm(embedded))
        return out


class RelativePositions(nn.Module):
    """Tells attention how far a key is from a query, by a bias of the score; Raffel et al. 2020 (T5), section 2.1.

    Near distances have a bucket each, the others share some by their logarithm.

    Args:
        config: the model's.
        both_ways: keys behind the query have buckets of their own (the encoder); otherwise they are never seen.
    """

    def __init__(self, config: TransformerConfig, *, both_ways: bool) -> None:
        super().__init__()
        self.both_ways, self.max_distance = both_ways, config.relative_max_distance
        self.bias = nn.Embedding(config.relative_buckets, config.heads)

    def buckets(self, distance: Tensor) -> Tensor:
        """Key position minus query position, int64 -> the bucket of each."""
        count, first = self.bias.num_embeddings, torch.zeros_like(distance)
        if self.both_ways:
            count //= 2
            first, distance = (distance > 0) * count, distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        near = count // 2
        ratio = torch.log(distance.clamp(min=1).float() / near) / math.log(self.max_distance / near)
        far = (near + (ratio * (count - near)).long()).clamp(max=count - 1)
        return first + torch.where(distance < near, distance, far)

    def forward(self, distance: Tensor) -> Tensor:
        """Key position minus query position [..., Q, K] -> the bias of every head [..., H, Q, K]."""
        bias: Tensor = self.bias(self.buckets(distance)).movedim(-1, -3)
        return bias

    def between(self, length: int) -> Tensor:
        """The bias [1, H, T, T] among positions 0..T-1."""
        position = torch.arange(length, device=self.bias.weight.device)
        bias: Tensor = self((position - position[:, None])[None])
        return bias


class UnbiasedNorm(nn.Module):
    """weight (x - mean) / (deviation + epsilon) + bias, the deviation over M - 1: the annotated Transformer's norm."""

    def __init__(self, d_model: int, epsilon: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(d_model)), nn.Parameter(torch.zeros(d_model))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """[..., M] -> [..., M]."""
        centred = x - x.mean(-1, keepdim=True)
        deviation = (centred.square().sum(-1, keepdim=True) / (x.size(-1) - 1)).sqrt()
        return self.weight * centred / (deviation + self.epsilon) + self.bias


def make_norm(config: TransformerConfig) -> nn.Module:
    """A normalisation over M of the kind that the configuration names."""
    kinds = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "unbiased": UnbiasedNorm}
    norm: nn.Module = kinds[config.norm](config.d_model, config.layer_norm_epsilon)
    return norm


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU as x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))); Hendrycks and Gimpel 2016."""
    return nn.functional.gelu(x, approximate="tanh")


class FeedForward(nn.Module):
    """activation(x W_1 + b_1) W_2 + b_2, section 3.3; gated, the activation is multiplied by x W_gate + b_gate."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.W_1 = nn.Linear(config.d_model, config.d_ff)
        self.W_gate = nn.Linear(config.d_model, config.d_ff) if config.gated_feed_forward else None
        self.W_2 = nn.Linear(config.d_ff, config.d_model)
        functions: dict[str, Callable[[Tensor], Tensor]] = {
            "relu": nn.functional.relu,
            "gelu": nn.functional.gelu,
            "gelu_tanh": gelu_tanh,
            "silu": nn.functional.silu,
        }
        self.activation = functions[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, M] -> [B, T, M]."""
        hidden = self.activation(self.W_1(x))
        if self.W_gate is not None:
            hidden = hidden * self.W_gate(x)
        y: Tensor = self.W_2(hidden)
        return y


class Residual(nn.Module):
    """A sublayer's residual connection, layer normalisation and dropout, in the paper's order or with the norm first.

    Post-norm: norm(x + sublayer(x)). Pre-norm: x + sublayer(norm(x)). A layer calls `before`, its sublayer, `after`.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.norm = make_norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def before(self, x: Tensor) -> Tensor:
        """The sublayer's input."""
        normalised: Tensor = self.norm(x) if self.norm_first else x
        return normalised

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        """The layer's stream x joined by the sublayer's output y."""
        joined: Tensor = x + self.dropout(y)
        return joined if self.norm_first else self.norm(joined)


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.self_attention, self.self_attention_residual = MultiHeadAttention(config), Residual(config)
        self.feed_forward, self.feed_forward_residual = FeedForward(config), Residual(config)

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [B, S, M], mask [B, 1, 1, S], bias [1, H, S, S] -> the next x, and the attention weights [B, H, S, S]."""
        y = self.self_attention_residual.before(x)
        y, weights = self.self_attention.attend(y, *self.self_attention.keys_values(y), mask, bias)
        x = self.self_attention_residual.after(x, y)
        y = self.feed_forward(self.feed_forward_residual.before(x))
        return self.feed_forward_residual.after(x, y), weights


class DecoderLayer(nn.Module):
    """Masked self-attention, cross-attention to the encoder's output, then feed-forward.

    Args:
        config: of the decoder.
        memory_width: M of the encoder's output.
    """

    def __init__(self, config: TransformerConfig, memory_width: int) -> None:
        super().__init__()
        self.self_attention, self.self_attention_residual = MultiHeadAttention(config), Residual(config)
        self.cross_attention, self.cross_attention_residual = MultiHeadAttention(config, memory_width), Residual(config)
        self.feed_forward, self.feed_forward_residual = FeedForward(config), Residual(config)

    def forward(
        self, x: Tensor, memory: Tensor, target_mask: Tensor, source_mask: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, M], memory [B, S, M], target_mask [B, 1, T, T], source_mask [B, 1, 1, S], bias [1, H, T, T].

        Returns:
            The next x, the self-attention weights [B, H, T, T] and the cross-attention weights [B, H, T, S].
        """
        y = self.self_attention_residual.before(x)
        y, self_weights = self.self_attention.attend(y, *self.self_attention.keys_values(y), target_mask, bias)
        x = self.self_attention_residual.after(x, y)
        y = self.cross_attention_residual.before(x)
        y, cross_weights = self.cross_attention.attend(y, *self.cross_attention.keys_values(memory), source_mask)
        x = self.cross_attention_residual.after(x, y)
        y = self.feed_forward(self.feed_forward_residual.before(x))
        return self.feed_forward_residual.after(x, y), self_weights, cross_weights


def padding_mask(ids: Tensor, pad_id: int) -> Tensor:
    """[B, T] -> bool [B, T]: True where a token is, False where padding is."""
    return ids != pad_id


def causal_mask(length: int, device: torch.device | None = None) -> Tensor:
    """bool [T, T]: position t may see positions 0..t."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


class Transformer(nn.Module):
    """Source ids and target ids in, scores of the next target token out; figure 1 of the paper."""

    encoder_layers: Sequence[EncoderLayer]
    decoder_layers: Sequence[DecoderLayer]

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config, decoder = config, config.decoder
        self.source_embedding = nn.Embedding(config.source_vocabulary_size, config.d_model)
        self.target_embedding = (
            self.source_embedding
            if config.share_embeddings
            else nn.Embedding(config.target_vocabulary_size, decoder.d_model)
        )
        self.source_positions = PositionalEncoding(config, config.max_length)
        self.target_positions = PositionalEncoding(decoder, config.max_target_length)
        relative = config.positions == "relative"
        self.encoder_relative = RelativePositions(config, both_ways=True) if relative else None
        self.decoder_relative = RelativePositions(decoder, both_ways=False) if relative else None
        self.encoder_layers = nn.ModuleList(  # type: ignore[assignment]
            EncoderLayer(config) for _ in range(config.encoder_layers)
        )
        self.decoder_layers = nn.ModuleList(  # type: ignore[assignment]
            DecoderLayer(decoder, config.d_model) for _ in range(config.decoder_layers)
        )
        self.encoder_norm = make_norm(config) if config.final_norm else nn.Identity()
        self.decoder_norm = make_norm(decoder) if config.final_norm else nn.Identity()
        self.projection = nn.Linear(decoder.d_model, config.target_vocabulary_size)
        self._initialise()
        if config.tie_projection:
            self.projection.weight = self.target_embedding.weight

    def _initialise(self) -> None:
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        # Embeddings are multiplied by sqrt(M): started at 1/sqrt(M), they enter the stack at the positions' scale.
        # A dict, not a set: a shared one is drawn once, and separate ones always in this order.
        for embedding in dict.fromkeys((self.source_embedding, self.target_embedding)):
            nn.init.normal_(embedding.weight, std=embedding.embedding_dim**-0.5)

    def embedding_scale(self, embedding: nn.Embedding) -> float:
        """What the rows of an embedding are multiplied by; section 3.4."""
        return math.sqrt(embedding.embedding_dim) if self.config.scale_embeddings else 1.0

    @property
    def output_scale(self) -> float:
        """What the decoder's output is multiplied by before the projection."""
        return self.projection.in_features**-0.5 if self.config.scale_projection else 1.0

    def embed_source(self, ids: Tensor) -> Tensor:
        """Source ids [B, S] -> scaled embeddings with their positions [B, S, M]; section 3.4."""
        scale = self.embedding_scale(self.source_embedding)
        embedded: Tensor = self.source_positions(self.source_embedding(ids) * scale)
        return embedded

    def embed_target(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """The same of target ids [B, T]; their positions [B, T] are 0..T-1 unless they are given."""
        scale = self.embedding_scale(self.target_embedding)
        embedded: Tensor = self.target_positions(self.target_embedding(ids) * scale, positions)
        return embedded

    def project(self, x: Tensor) -> Tensor:
        """The last decoder layer's output [B, T, M] -> logits [B, T, V]."""
        logits: Tensor = self.projection(self.decoder_norm(x) * self.output_scale)
        return logits

    def encode(self, source_ids: Tensor, source_mask: Tensor, attention: list[Tensor] | None = None) -> Tensor:
        """source_ids [B, S] int64, source_mask [B, S] bool -> memory [B, S, M].

        Args:
            source_ids: the source tokens.
            source_mask: False at padding.
            attention: a list to which the weights [B, H, S, S] of every layer are appended.
        """
        x = self.embed_source(source_ids)
        bias = None if self.encoder_relative is None else self.encoder_relative.between(x.size(1))
        for layer in self.encoder_layers:
            x, weights = layer(x, source_mask[:, None, None, :], bias)
            if attention is not None:
                attention.append(weights)
        memory: Tensor = self.encoder_norm(x)
        return memory

    def decode(
        self,
        target_ids: Tensor,
        memory: Tensor,
        source_mask: Tensor,
        target_mask: Tensor | None = None,
        self_attention: list[Tensor] | None = None,
        cross_attention: list[Tensor] | None = None,
    ) -> Tensor:
        """target_ids [B, T] int64, memory [B, S, M], source_mask [B, S] bool -> logits [B, T, V].

        Args:
            target_ids: the target so far, beginning with the start token.
            memory: what `encode` gave.
            source_mask: False at the source's padding.
            target_mask: False at the target's padding [B, T]; None when there is none. The causal mask is always on.
            self_attention: a list to which the weights [B, H, T, T] of every layer are appended.
            cross_attention: a list to which the weights [B, H, T, S] of every layer are appended.
        """
        mask = causal_mask(target_ids.size(1), target_ids.device)[None, None]
        if target_mask is not None:
            mask = mask & target_mask[:, None, None, :]
        x = self.embed_target(target_ids)
        bias = None if self.decoder_relative is None else self.decoder_relative.between(x.size(1))
        for layer in self.decoder_layers:
            x, self_weights, cross_weights = layer(x, memory, mask, source_mask[:, None, None, :], bias)
            if self_attention is not None:
                self_attention.append(self_weights)
            if cross_attention is not None:
                cross_attention.append(cross_weights)
        return self.project(x)

    def forward(
        self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor, target_mask: Tensor | None = None
    ) -> Tensor:
        """Teacher forcing: the logits [B, T, V] of the token that follows each target token."""
        return self.decode(target_ids, self.encode(source_ids, source_mask), source_mask, target_mask)
