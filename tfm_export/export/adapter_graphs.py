"""The graphs of an adapter: what the user's own modules compute, with the inputs and outputs of `tfm_export.graph`.

The modules stay as they are, but for their linear layers, which become one `Gemm` each, as in our own graphs: these are
what variants are made of.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tfm_export.checkpoints.adapter import Adapter
from tfm_export.errors import ExportError
from tfm_export.export.graphs import next_tokens, scatter


class RowLinear(nn.Module):
    """x W + b over the rows of x: one Gemm. W is stored as [in, out], or read as it lies if it is a table's too.

    Args:
        linear: the layer.
        shared: whether another module has its weight.
    """

    def __init__(self, linear: nn.Linear, *, shared: bool) -> None:
        super().__init__()
        self.shared = shared
        weight = linear.weight.detach()
        self.weight = linear.weight if shared else nn.Parameter(weight.t().contiguous())
        bias: Tensor | None = linear.bias
        self.bias = nn.Parameter(weight.new_zeros(linear.out_features) if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        rows = x.reshape(-1, x.size(-1))
        if self.shared:
            y = nn.functional.linear(rows, self.weight, self.bias)
        else:
            y = torch.addmm(self.bias, rows, self.weight)
        return y.view(*x.shape[:-1], y.size(-1))


def with_row_linears(adapter: Adapter) -> Adapter:
    """A copy of an adapter whose linear layers are `RowLinear`; all other weights are the adapter's own."""
    weights = [*adapter.parameters(), *adapter.buffers()]
    copied = copy.deepcopy(adapter, {id(weight): weight for weight in weights})
    owners: dict[int, set[int]] = {}
    for module in copied.modules():
        for weight in module.parameters(recurse=False):
            owners.setdefault(id(weight), set()).add(id(module))
    done: dict[int, RowLinear] = {}
    for module in [*copied.modules()]:
        for name, child in [*module.named_children()]:
            if type(child) is nn.Linear:  # a subclass may compute something else
                if id(child) not in done:
                    done[id(child)] = RowLinear(child, shared=len(owners[id(child.weight)]) > 1)
                setattr(module, name, done[id(child)])
    return copied


class GraphCache:
    """The cache of an adapter's graph: it writes a step's keys and values into slots, and gives all of them.

    Attributes:
        updated: the whole keys and values after the step; None where a layer was not written.

    Args:
        caches: key and value [B, H, C, D] of every layer in turn.
        write_index: [B].
    """

    def __init__(self, caches: Sequence[Tensor], write_index: Tensor) -> None:
        self.caches, self.write_index = caches, write_index
        self.updated: list[Tensor | None] = [None] * len(caches)

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write a step's key and value [B, H, Q, D]; the whole ones."""
        keys, values = (
            scatter(self.caches[2 * layer + part], new, self.write_index) for part, new in enumerate((key, value))
        )
        self.updated[2 * layer : 2 * layer + 2] = keys, values
        return keys, values


class AdapterEncoderGraph(nn.Module):
    """encoder.onnx of an adapter."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__()
        self.model = with_row_linears(adapter)

    def forward(self, source_ids: Tensor, source_mask: Tensor) -> list[Tensor]:
        """source_ids [B, S], source_mask [B, S] -> the key and value [B, H, S, D] of every decoder layer in turn."""
        memory = self.model.encode(source_ids, source_mask)
        return [tensor for pair in self.model.cross_keys_values(memory) for tensor in pair]


class AdapterStepGraph(nn.Module):
    """decoder_step.onnx of an adapter.

    Args:
        adapter: the model.
        candidates: N, how many of the best tokens a step names.
    """

    def __init__(self, adapter: Adapter, candidates: int) -> None:
        super().__init__()
        self.model, self.candidates = with_row_linears(adapter), candidates

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
        cross_mask = source_mask[:, None, None, :].expand(batch, 1, queries, source_mask.size(1))
        cache = GraphCache(self_caches, write_index)
        pairs: Any = [*zip(cross[::2], cross[1::2], strict=True)]
        logits = self.model.decode_step(target_ids, positions, self_mask, cross_mask, cache, pairs)
        updated = [tensor for tensor in cache.updated if tensor is not None]
        if len(updated) < len(cache.updated):
            raise ExportError("decode_step did not write every layer of the cache", "call cache.update for each")
        return *next_tokens(logits, self.candidates), *updated
