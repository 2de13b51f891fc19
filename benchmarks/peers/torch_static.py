"""PyTorch at its fastest: greedy search with caches of a fixed size, which can be compiled or captured as a graph.

The same weights and modules as the reference model. A step reads its tokens and its position from buffers and writes
the next ones into them, so that it is the same work at the same addresses every time: what `torch.compile` and CUDA
graphs want. Letters in the shapes as in reference_model/model.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from reference_model.checkpoint import SpecialIds
from reference_model.model import MultiHeadAttention, Transformer

Mode = Literal["eager", "compiled", "graph"]
WARM_UP = 3


class StaticGreedy:
    """Greedy search for batches of one shape.

    Args:
        model: in the float type to compute in, on its device.
        batch: B.
        source: S.
        length: tokens of every target; none ends before.
        special: the model's special ids.
        mode: how a step is run: "eager", "compiled" by `torch.compile`, or as a CUDA "graph".
    """

    def __init__(
        self, model: Transformer, batch: int, source: int, length: int, special: SpecialIds, mode: Mode = "eager"
    ) -> None:
        parameter = next(model.parameters())
        decoder, layers = model.config.decoder, model.config.decoder_layers
        self._model, self._special, self._length = model, special, length

        def zeros(slots: int) -> list[Tensor]:
            shape = (batch, decoder.heads, slots, decoder.head_size)
            return [torch.zeros(shape, dtype=parameter.dtype, device=parameter.device) for _ in range(2 * layers)]

        self._caches, self._cross = zeros(length), zeros(source)
        device = parameter.device
        self._source_mask = torch.zeros(batch, 1, 1, source, dtype=torch.bool, device=device)
        self._tokens = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self._position = torch.zeros(1, dtype=torch.long, device=device)
        self._chosen = torch.zeros(batch, length, dtype=torch.long, device=device)
        self._slots = torch.arange(length, device=device)
        self._layers: list[Any] = list(model.decoder_layers)
        self._run: Callable[[], object] = self._step
        if mode == "compiled":
            self._run = torch.compile(self._step)
        elif mode == "graph":
            self._run = self._captured()

    @torch.inference_mode()
    def generate(self, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        """The tokens of every source, all of the length that was set."""
        device, width = self._tokens.device, self._source_mask.shape[-1]
        ids = torch.tensor([[*source, *[self._special.pad] * (width - len(source))] for source in sources])
        mask = torch.arange(width) < torch.tensor([[len(source)] for source in sources])
        ids, mask = ids.to(device), mask.to(device)
        memory = self._model.encode(ids, mask)
        for i, layer in enumerate(self._layers):
            for buffer, tensor in zip(
                self._cross[2 * i : 2 * i + 2], layer.cross_attention.keys_values(memory), strict=True
            ):
                buffer.copy_(tensor)
        self._source_mask.copy_(mask[:, None, None, :])
        self._tokens.fill_(self._special.bos)
        self._position.zero_()
        for _ in range(self._length):
            self._run()
        tokens: list[list[int]] = self._chosen.tolist()
        return tokens

    @torch.inference_mode()
    def _step(self) -> None:
        model, position = self._model, self._position
        table = model.target_positions.table
        assert table is not None, "the paper's model has sinusoids"
        x = model.target_embedding(self._tokens) * model.embedding_scale(model.target_embedding) + table[position]
        seen = (self._slots <= position)[None, None, None, :]
        for i, layer in enumerate(self._layers):
            y = layer.self_attention_residual.before(x)
            own = self._caches[2 * i : 2 * i + 2]
            for cache, new in zip(own, layer.self_attention.keys_values(y), strict=True):
                cache.index_copy_(2, position, new)
            x = layer.self_attention_residual.after(x, _attend(layer.self_attention, y, own, seen))
            y = layer.cross_attention_residual.before(x)
            y = _attend(layer.cross_attention, y, self._cross[2 * i : 2 * i + 2], self._source_mask)
            x = layer.cross_attention_residual.after(x, y)
            y = layer.feed_forward(layer.feed_forward_residual.before(x))
            x = layer.feed_forward_residual.after(x, y)
        best = model.projection(model.decoder_norm(x[:, 0])).argmax(-1, keepdim=True)
        self._chosen.index_copy_(1, position, best)
        self._tokens.copy_(best)
        position.add_(1)

    def _captured(self) -> Callable[[], object]:
        """The step as a CUDA graph, after the runs on another stream that PyTorch wants before it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._position.zero_()
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self._position.zero_()
        with torch.inference_mode(), torch.cuda.graph(graph):
            self._step()
        replay: Callable[[], object] = graph.replay
        return replay


def _attend(attention: MultiHeadAttention, x: Tensor, keys_values: Sequence[Tensor], mask: Tensor) -> Tensor:
    key, value = keys_values
    attended = scaled_dot_product_attention(attention.split_heads(attention.W_q(x)), key, value, attn_mask=mask)
    projected: Tensor = attention.W_o(attention.merge_heads(attended))
    return projected
