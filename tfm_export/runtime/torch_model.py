"""The step model on PyTorch, written to be obviously right: for parity and verification, never for service.

Append-only caches and masks, as the graphs have them, on the weights of a `reference_model.Transformer`, in any float
type. With float64 it tells what rounding costs the others. Letters as in `step_model`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reference_model import Transformer
from reference_model.model import DecoderLayer
from tfm_export.bundle import Limits
from tfm_export.errors import RequestError
from tfm_export.graph import Dimensions, cross_names, self_cache_names
from tfm_export.runtime.checks import check_encode, check_finite, check_step_arrays, step_problems
from tfm_export.runtime.step_model import Capabilities, Floats, Ids, Mask, Sentences, StepModel, StepOutput


class TorchModel(StepModel):
    """A reference model as a `StepModel`."""

    def __init__(
        self,
        model: Transformer,
        *,
        candidates: int = 16,
        limits: Limits | None = None,
        attention_layer: int | None = None,
    ) -> None:
        """Take a model in evaluation mode.

        Args:
            model: in the float type to compute in; `model.double()` for float64.
            candidates: N, how many of the best tokens a step names; at most V.
            limits: the longest sequences; by default what the position table holds.
            attention_layer: the decoder layer, from 0, whose cross-attention weights steps give; None for none.
        """
        config = model.config
        self.model = model.eval()
        self.dimensions = Dimensions(
            source_vocabulary_size=config.source_vocabulary_size,
            target_vocabulary_size=config.target_vocabulary_size,
            decoder_layers=config.decoder_layers,
            heads=config.decoder.heads,
            head_size=config.decoder.head_size,
            candidates=min(candidates, config.target_vocabulary_size),
        )
        self.limits = limits or Limits(max_source_length=config.max_length, max_target_length=config.max_target_length)
        self.attention_layer = attention_layer
        self.capabilities = Capabilities(gives_attention=attention_layer is not None, packs=True)

    @torch.inference_mode()
    def encode(self, source_ids: Ids, source_mask: Mask, *, capacity: int) -> TorchSentences:
        """Run the encoder on a padded batch and set up its caches; see `StepModel.encode`."""
        check_encode(source_ids, source_mask, capacity, dimensions=self.dimensions, limits=self.limits)
        mask = torch.tensor(source_mask)
        memory = self.model.encode(torch.tensor(source_ids), mask)
        cross = [
            tensor.masked_fill(~mask[:, None, :, None], 0)
            for layer in self.decoder_layers
            for tensor in layer.cross_attention.keys_values(memory)
        ]
        rows, heads, _, head_size = cross[0].shape
        caches = [memory.new_zeros(rows, heads, capacity, head_size) for _ in cross]
        return TorchSentences(self, mask, cross, caches)

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        """The decoder's layers."""
        return list(self.model.decoder_layers)

    def close(self) -> None:
        """Nothing to free."""


class TorchSentences(Sentences):
    """A batch of sentences whose caches are PyTorch's tensors; see `Sentences`.

    Attributes:
        cross: key and value [B, H, S, D] of every decoder layer in turn.
        caches: key and value [B, H, C, D] of every decoder layer in turn.
    """

    def __init__(self, model: TorchModel, source_mask: Tensor, cross: list[Tensor], caches: list[Tensor]) -> None:
        self.model, self.source_mask, self.cross, self.caches = model, source_mask, cross, caches

    @property
    def size(self) -> int:
        """B: rows in use."""
        return self.source_mask.size(0)

    @property
    def capacity(self) -> int:
        """C: slots of each row."""
        return self.caches[0].size(2)

    @torch.inference_mode()
    def step(
        self, target_ids: Ids, positions: Ids, write_index: Ids, self_mask: Mask, *, full: bool = False
    ) -> StepOutput:
        """Write Q tokens into the cache and say what may follow each; see `Sentences.step`."""
        arrays = target_ids, positions, write_index, self_mask
        check_step_arrays(*arrays, size=self.size, capacity=self.capacity)
        if problems := step_problems(*arrays, dimensions=self.model.dimensions, limits=self.model.limits):
            raise RequestError(problems)
        logits, weights = self._run(*[torch.tensor(array) for array in arrays])
        log_probs = logits.log_softmax(-1)
        top, ids = log_probs.topk(self.model.dimensions.candidates)
        layer = self.model.attention_layer
        output = StepOutput(
            _numpy(top),
            ids.numpy(),
            _numpy(log_probs) if full else None,
            _numpy(logits.logsumexp(-1)) if full else None,
            None if layer is None else _numpy(weights[layer].mean(1)),
        )
        check_finite(output.top_log_probs[:, :, 0])
        return output

    def _run(
        self, target_ids: Tensor, positions: Tensor, write_index: Tensor, self_mask: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits [B, Q, V] and every layer's cross-attention weights [B, H, Q, S]."""
        model = self.model.model
        weights: list[Tensor] = []
        x, bias = model.embed_target(target_ids, positions), None
        if model.decoder_relative is not None:
            # The slots that a query sees are in the order of their positions.
            bias = model.decoder_relative(self_mask[:, 0].cumsum(-1) - 1 - positions[:, :, None])
        for i, layer in enumerate(self.model.decoder_layers):
            y = layer.self_attention_residual.before(x)
            keys_values = self.caches[2 * i : 2 * i + 2]
            for cache, new in zip(keys_values, layer.self_attention.keys_values(y), strict=True):
                for row, slot in enumerate(write_index.tolist()):
                    cache[row, :, slot : slot + new.size(2)] = new[row]
            y, _ = layer.self_attention.attend(y, keys_values[0], keys_values[1], self_mask, bias)
            x = layer.self_attention_residual.after(x, y)
            y = layer.cross_attention_residual.before(x)
            cross_mask = self.source_mask[:, None, None, :]
            y, w = layer.cross_attention.attend(y, self.cross[2 * i], self.cross[2 * i + 1], cross_mask)
            weights.append(w)
            x = layer.cross_attention_residual.after(x, y)
            y = layer.feed_forward(layer.feed_forward_residual.before(x))
            x = layer.feed_forward_residual.after(x, y)
        return model.project(x), weights

    @torch.inference_mode()
    def grow(self, capacity: int) -> None:
        """Give every row `capacity` slots, keeping what is written and zeroing the rest."""
        if capacity < self.capacity:
            raise RequestError(f"a cache of {self.capacity} slots cannot grow to {capacity}")
        self.caches = [_padded(cache, capacity) for cache in self.caches]

    @torch.inference_mode()
    def pack(self, slots: Ids, capacity: int) -> None:
        """Keep some slots of each row; see `Sentences.pack`."""
        places = torch.tensor(slots)[:, None, :, None]
        self.caches = [
            _padded(cache.gather(2, places.expand(-1, cache.size(1), -1, cache.size(3))), capacity)
            for cache in self.caches
        ]

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`."""
        for row in (source, target):
            if not 0 <= row < self.size:
                raise RequestError(f"a row must be from 0 to {self.size - 1}, found {row}")
        for tensor in (self.source_mask, *self.cross, *self.caches):
            tensor[target] = tensor[source]

    @torch.inference_mode()
    def shrink(self, size: int) -> None:
        """Keep the first `size` rows."""
        if not 0 <= size <= self.size:
            raise RequestError(f"a batch of {self.size} rows cannot shrink to {size}")
        self.source_mask = self.source_mask[:size]
        self.cross, self.caches = [x[:size] for x in self.cross], [x[:size] for x in self.caches]

    def read(self, name: str) -> Floats:
        """A copy of a cache or a cross-attention tensor; see `Sentences.read`."""
        tensors = [*self.caches, *self.cross]
        names = [*self_cache_names(self.model.dimensions), *cross_names(self.model.dimensions)]
        if name not in names:
            raise RequestError(f"no tensor {name!r}; there are {', '.join(names)}")
        array: Floats = _numpy(tensors[names.index(name)].clone())
        return array

    @torch.inference_mode()
    def append(self, other: Sentences) -> None:
        """Copy the rows of freshly encoded sentences of the same model behind this batch's rows."""
        if not isinstance(other, TorchSentences) or other.model is not self.model:
            raise RequestError("sentences can only join a batch of the same model")
        if any(cache[:, :, self.capacity :].any() for cache in other.caches):
            raise RequestError(f"the joining rows have written more slots than the {self.capacity} of this batch")
        source = max(self.source_mask.size(1), other.source_mask.size(1))
        masks = [_padded(x.source_mask[:, None, :, None], source)[:, 0, :, 0] for x in (self, other)]
        self.source_mask = torch.cat(masks)
        self.cross = _joined(self.cross, other.cross, source)
        self.caches = _joined(self.caches, other.caches, self.capacity)


def _joined(ours: list[Tensor], theirs: list[Tensor], length: int) -> list[Tensor]:
    """The rows of both, axis 2 made `length` long."""
    return [torch.cat([_padded(x, length), _padded(y, length)]) for x, y in zip(ours, theirs, strict=True)]


def _padded(tensor: Tensor, length: int) -> Tensor:
    """Axis 2 made `length` long: zeros behind it, or cut."""
    return torch.nn.functional.pad(tensor, (0, 0, 0, length - tensor.size(2)))


def _numpy(tensor: Tensor) -> Any:  # float64 models keep their digits, which are what they are for
    return tensor.numpy() if tensor.dtype == torch.float64 else tensor.float().numpy()
