"""Models of the user's own: an adapter says how they encode and how they take a step, and the exporter does the rest.

Letters in the shapes: B sentences, S source length, T target length, Q target tokens of a step, C cache slots, H heads,
D head size, M width of the memory, V target vocabulary. Masks are bool and True means "may attend".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tfm_export.errors import CheckpointError
from tfm_export.quotation import quote

KeysValues = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The sizes that a model shows.

    Attributes:
        source_vocabulary_size: one more than the largest source id.
        target_vocabulary_size: V.
        decoder_layers: each has a cache.
        heads: H, of keys and values; fewer than of queries where these share them.
        head_size: D.
        max_length: the longest source that the model takes, end token included.
        max_target_length: the longest target that it gives, end token included.

    Raises:
        ValueError: naming every field that is not a positive integer.
    """

    source_vocabulary_size: int
    target_vocabulary_size: int
    decoder_layers: int
    heads: int
    head_size: int
    max_length: int
    max_target_length: int

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        wrong = [
            f"{name} must be a positive integer, found {quote(n)}" for name, n in values.items() if not _positive(n)
        ]
        if wrong:
            raise ValueError("; ".join(wrong))


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class Cache(Protocol):
    """The keys and values of the target tokens so far, of every decoder layer."""

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write those of this step's tokens, once for every layer.

        Args:
            layer: from 0.
            key: [B, H, Q, D].
            value: [B, H, Q, D].

        Returns:
            The layer's whole key and value, [B, H, C, D]: what self_mask of `Adapter.decode_step` speaks of.
        """
        ...


class TargetCache:
    """The cache of whole targets [B, T] in PyTorch: slot t holds token t.

    Attributes:
        layers: what was written, by layer.
    """

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `Cache.update`."""
        if layer in self.layers:
            raise CheckpointError(f"the adapter wrote layer {layer} of the cache twice in one step")
        self.layers[layer] = key, value
        return key, value


class Adapter(nn.Module):
    """A model of the user's own, for the exporter: subclass it, hold the model, and say how it computes.

    Its parts are traced by `torch.export`: sizes come from the tensors' shapes, and nothing depends on their numbers.
    They compute in the type of the model's weights, which verification makes float64 too.

    Args:
        config: the sizes.
    """

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        self.config = config

    @property
    def has_decode(self) -> bool:
        """Whether it has a `decode` of its own."""
        return type(self).decode is not Adapter.decode

    def encode(self, source_ids: Tensor, source_mask: Tensor) -> Tensor:
        """Run the encoder.

        Args:
            source_ids: int64 [B, S].
            source_mask: bool [B, S], False at padding, whose ids may be any.

        Returns:
            The memory [B, S, M].
        """
        raise NotImplementedError

    def cross_keys_values(self, memory: Tensor) -> KeysValues:
        """The key and value [B, H, S, D] of every decoder layer's cross-attention, from the memory [B, S, M]."""
        raise NotImplementedError

    def decode_step(
        self,
        target_ids: Tensor,
        positions: Tensor,
        self_mask: Tensor,
        source_mask: Tensor,
        cache: Cache,
        cross: KeysValues,
    ) -> Tensor:
        """Take Q more target tokens.

        Args:
            target_ids: int64 [B, Q].
            positions: int64 [B, Q], from 0.
            self_mask: bool [B, 1, Q, C], the cache's slots that each token sees, its own too. A slot's number is not
                its token's position, which `slot_positions` gives.
            source_mask: bool [B, 1, Q, S].
            cache: takes this step's keys and values, and gives all of them.
            cross: what `cross_keys_values` gave.

        Returns:
            The logits [B, Q, V] of the token that follows each.
        """
        raise NotImplementedError

    def decode(self, target_ids: Tensor, memory: Tensor, source_mask: Tensor) -> Tensor:
        """The logits [B, T, V] of whole targets [B, T], from the memory [B, S, M] and source_mask [B, S].

        All that is exported is held to it. As it stands it is one `decode_step` of T tokens; with the model's own
        forward pass in its place, what is wrong in `cross_keys_values` and `decode_step` is found.
        """
        return self.decode_with_cache(target_ids, memory, source_mask)[0]

    def decode_with_cache(
        self, target_ids: Tensor, memory: Tensor, source_mask: Tensor
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """One `decode_step` of whole targets: the logits [B, T, V], and every layer's key and value [B, H, T, D].

        Raises:
            CheckpointError: a layer's were not written once.
        """
        batch, length = target_ids.shape
        positions = torch.arange(length).expand(batch, length)
        self_mask = torch.ones(length, length, dtype=torch.bool).tril().expand(batch, 1, length, length)
        cross_mask = source_mask[:, None, None, :].expand(batch, 1, length, source_mask.size(1))
        cache = TargetCache()
        cross = self.cross_keys_values(memory)
        logits = self.decode_step(target_ids, positions, self_mask, cross_mask, cache, cross)
        if sorted(cache.layers) != [*range(self.config.decoder_layers)]:
            found = ", ".join(map(str, sorted(cache.layers))) or "none"
            raise CheckpointError(
                f"decode_step must write layers 0 to {self.config.decoder_layers - 1} of the cache, it wrote {found}",
                "call cache.update once for every decoder layer",
            )
        return logits, [cache.layers[i] for i in range(self.config.decoder_layers)]

    def forward(self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
        """Teacher forcing: the logits [B, T, V] of the token that follows each target token."""
        return self.decode(target_ids, self.encode(source_ids, source_mask), source_mask)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float | None = None) -> Tensor:
    """softmax(scale x query key^T + mask) value, which becomes one operator of the graph.

    Args:
        query: [B, H, Q, D].
        key: [B, H, K, D].
        value: [B, H, K, D].
        mask: bool, or float to be added to the scores; [B, 1 or H, 1 or Q, K].
        scale: 1 / sqrt(D) by default.

    Returns:
        [B, H, Q, D].
    """
    # ONNX Runtime's CPU Attention does not broadcast the query axis of a mask.
    mask = mask.expand(mask.size(0), mask.size(1), query.size(2), mask.size(3))
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def slot_positions(self_mask: Tensor) -> Tensor:
    """The position of the token in each slot, int64 [B, Q, C], from self_mask [B, 1, Q, C]; right where that is True.

    The slots that a token sees are in the order of their positions, whatever lies between them.
    """
    return self_mask[:, 0].long().cumsum(-1) - 1
