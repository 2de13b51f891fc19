"""The model of model.py for tfm-export: the same arithmetic, one step at a time."""

from __future__ import annotations

from pathlib import Path

from model import HEAD_SIZE, KEY_HEADS, LONGEST, Model  # the file beside this one
from torch import Tensor

from tfm_export.export import Adapter, AdapterConfig, Cache, read_weights


class CustomAdapter(Adapter):
    def __init__(self, model: Model) -> None:
        size = model.embedding.num_embeddings
        super().__init__(
            AdapterConfig(
                source_vocabulary_size=size,
                target_vocabulary_size=size,
                decoder_layers=len(model.decoder),
                heads=KEY_HEADS,  # of what is cached
                head_size=HEAD_SIZE,
                max_length=LONGEST,
                max_target_length=LONGEST,
            )
        )
        self.model = model

    def encode(self, source_ids: Tensor, source_mask: Tensor) -> Tensor:
        return self.model.encode(source_ids, source_mask)

    def cross_keys_values(self, memory: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [layer.cross.keys_values(memory) for layer in self.model.decoder]

    def decode_step(
        self,
        target_ids: Tensor,
        positions: Tensor,
        self_mask: Tensor,
        source_mask: Tensor,
        cache: Cache,
        cross: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        x, rotate = self.model.embedding(target_ids), self.model.rotary
        for i, layer in enumerate(self.model.decoder):
            y = layer.norm(x)
            key, value = layer.attention.keys_values(y)
            # Keys are turned before they are cached: each stays at its own position for good.
            key, value = cache.update(i, rotate(key, positions), value)
            attended = layer.attention.attend(rotate(layer.attention.queries(y), positions), key, value, self_mask)
            crossed = layer.cross.attend(layer.cross.queries(y), *cross[i], source_mask)
            x = x + attended + crossed + layer.feed_forward(y)
        return self.model.decoder_norm(x) @ self.model.embedding.weight.T

    def decode(self, target_ids: Tensor, memory: Tensor, source_mask: Tensor) -> Tensor:
        return self.model.decode(target_ids, memory, source_mask)  # the author's own code: what all is held to


def load(checkpoint: Path) -> CustomAdapter:
    """The adapter of a checkpoint that train.py wrote."""
    weights = read_weights(checkpoint)  # executes nothing of the file
    layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("decoder."))
    model = Model(len(weights["embedding.weight"]), layers)
    model.load_state_dict(weights)
    return CustomAdapter(model)
