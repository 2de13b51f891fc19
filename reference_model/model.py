"""The Transformer of Vaswani et al., "Attention Is All You Need" (2017), read from top to bottom.

Letters in the shapes: B sentences, S source length, T target length, M d_model, H heads, D head size,
Q queries, K keys, V target vocabulary. Masks are bool and True means "may attend".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from reference_model.config import TransformerConfig


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: nn.Module | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(Q K^T / sqrt(D)) V, equation 1 of the paper.

    Args:
        query: [B, H, Q, D].
        key: [B, H, K, D].
        value: [B, H, K, D].
        mask: bool, broadcastable to [B, H, Q, K], or None when every query sees every key.
        dropout: applied to the weights.

    Returns:
        The attended values [B, H, Q, D] and the weights [B, H, Q, K].
    """
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.size(-1))
    if mask is not None:
        # The lowest finite number, not -inf: a query that may see nothing gets equal weights instead of NaN.
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    attended = weights if dropout is None else dropout(weights)
    return attended @ value, weights


class MultiHeadAttention(nn.Module):
    """Several heads attend side by side, each on its own projection; section 3.2.2 of the paper."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads, self.head_size = config.heads, config.head_size
        self.W_q = nn.Linear(config.d_model, config.d_model)
        self.W_k = nn.Linear(config.d_model, config.d_model)
        self.W_v = nn.Linear(config.d_model, config.d_model)
        self.W_o = nn.Linear(config.d_model, config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def split_heads(self, x: Tensor) -> Tensor:
        """[B, T, M] -> [B, H, T, D]."""
        return x.view(x.size(0), x.size(1), self.heads, self.head_size).transpose(1, 2)

    def merge_heads(self, x: Tensor) -> Tensor:
        """[B, H, T, D] -> [B, T, M]."""
        return x.transpose(1, 2).reshape(x.size(0), x.size(2), self.heads * self.head_size)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The key and the value of every position of x [B, T, M], each [B, H, T, D]."""
        return self.split_heads(self.W_k(x)), self.split_heads(self.W_v(x))

    def attend(self, x: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Attend from x [B, Q, M] to a key and value [B, H, K, D].

        Returns:
            The projected result [B, Q, M] and the weights [B, H, Q, K].
        """
        query = self.split_heads(self.W_q(x))
        attended, weights = scaled_dot_product_attention(query, key, value, mask, self.dropout)
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
    """Tells the model where a token stands, by adding a row of the position table to its embedding."""

    table: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.register_buffer("table", sinusoid_table(config.max_length, config.d_model), persistent=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, embedded: Tensor) -> Tensor:
        """[B, T, M] -> [B, T, M]."""
        length, rows = embedded.size(1), self.table.size(0)
        if length > rows:
            raise ValueError(f"the position table has {rows} rows (max_length), found a sequence of {length} tokens")
        out: Tensor = self.dropout(embedded + self.table[:length])
        return out


class FeedForward(nn.Module):
    """activation(x W_1 + b_1) W_2 + b_2; section 3.3."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.W_1 = nn.Linear(config.d_model, config.d_ff)
        self.W_2 = nn.Linear(config.d_ff, config.d_model)
        functions: dict[str, Callable[[Tensor], Tensor]] = {"relu": nn.functional.relu, "gelu": nn.functional.gelu}
        self.activation = functions[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, M] -> [B, T, M]."""
        y: Tensor = self.W_2(self.activation(self.W_1(x)))
        return y


class Residual(nn.Module):
    """A sublayer's residual connection, layer normalisation and dropout, in the paper's order or with the norm first.

    Post-norm: norm(x + sublayer(x)). Pre-norm: x + sublayer(norm(x)). A layer calls `before`, its sublayer, `after`.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon)
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

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, S, M], mask [B, 1, 1, S] -> the next x, and the attention weights [B, H, S, S]."""
        y = self.self_attention_residual.before(x)
        y, weights = self.self_attention.attend(y, *self.self_attention.keys_values(y), mask)
        x = self.self_attention_residual.after(x, y)
        y = self.feed_forward(self.feed_forward_residual.before(x))
        return self.feed_forward_residual.after(x, y), weights


class DecoderLayer(nn.Module):
    """Masked self-attention, cross-attention to the encoder's output, then feed-forward."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.self_attention, self.self_attention_residual = MultiHeadAttention(config), Residual(config)
        self.cross_attention, self.cross_attention_residual = MultiHeadAttention(config), Residual(config)
        self.feed_forward, self.feed_forward_residual = FeedForward(config), Residual(config)

    def forward(
        self, x: Tensor, memory: Tensor, target_mask: Tensor, source_mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, M], memory [B, S, M], target_mask [B, 1, T, T], source_mask [B, 1, 1, S].

        Returns:
            The next x, the self-attention weights [B, H, T, T] and the cross-attention weights [B, H, T, S].
        """
        y = self.self_attention_residual.before(x)
        y, self_weights = self.self_attention.attend(y, *self.self_attention.keys_values(y), target_mask)
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
        self.config = config
        self.source_embedding = nn.Embedding(config.source_vocabulary_size, config.d_model)
        self.target_embedding = (
            self.source_embedding
            if config.share_embeddings
            else nn.Embedding(config.target_vocabulary_size, config.d_model)
        )
        self.positional_encoding = PositionalEncoding(config)
        self.encoder_layers = nn.ModuleList(  # type: ignore[assignment]
            EncoderLayer(config) for _ in range(config.encoder_layers)
        )
        self.decoder_layers = nn.ModuleList(  # type: ignore[assignment]
            DecoderLayer(config) for _ in range(config.decoder_layers)
        )
        self.encoder_norm = self._final_norm()
        self.decoder_norm = self._final_norm()
        self.projection = nn.Linear(config.d_model, config.target_vocabulary_size)
        self._initialise()
        if config.tie_projection:
            self.projection.weight = self.target_embedding.weight

    def _final_norm(self) -> nn.Module:
        config = self.config
        return nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon) if config.final_norm else nn.Identity()

    def _initialise(self) -> None:
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        # Embeddings are multiplied by sqrt(M): started at 1/sqrt(M), they enter the stack at the positions' scale.
        # A dict, not a set: a shared one is drawn once, and separate ones always in this order.
        for embedding in dict.fromkeys((self.source_embedding, self.target_embedding)):
            nn.init.normal_(embedding.weight, std=self.config.d_model**-0.5)

    def embed(self, embedding: nn.Embedding, ids: Tensor) -> Tensor:
        """Ids [B, T] -> embeddings scaled by sqrt(M), with positions [B, T, M]; section 3.4."""
        embedded: Tensor = self.positional_encoding(embedding(ids) * math.sqrt(self.config.d_model))
        return embedded

    def encode(self, source_ids: Tensor, source_mask: Tensor, attention: list[Tensor] | None = None) -> Tensor:
        """source_ids [B, S] int64, source_mask [B, S] bool -> memory [B, S, M].

        Args:
            source_ids: the source tokens.
            source_mask: False at padding.
            attention: a list to which the weights [B, H, S, S] of every layer are appended.
        """
        x = self.embed(self.source_embedding, source_ids)
        for layer in self.encoder_layers:
            x, weights = layer(x, source_mask[:, None, None, :])
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
        x = self.embed(self.target_embedding, target_ids)
        for layer in self.decoder_layers:
            x, self_weights, cross_weights = layer(x, memory, mask, source_mask[:, None, None, :])
            if self_attention is not None:
                self_attention.append(self_weights)
            if cross_attention is not None:
                cross_attention.append(cross_weights)
        logits: Tensor = self.projection(self.decoder_norm(x))
        return logits

    def forward(
        self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor, target_mask: Tensor | None = None
    ) -> Tensor:
        """Teacher forcing: the logits [B, T, V] of the token that follows each target token."""
        return self.decode(target_ids, self.encode(source_ids, source_mask), source_mask, target_mask)
