"""The graphs as PyTorch modules in any float type: what 16-bit graphs are held to, computed by other kernels."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from reference_model import Transformer
from tfm_export import graph
from tfm_export.export import graphs
from tfm_export.export.graphs import DecoderStepGraph, EncoderGraph
from tfm_export.export.variant import dimensions_of

Arrays = dict[str, NDArray[np.generic]]


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scaled: bool = True) -> Tensor:
    """The operator `Attention` by PyTorch."""
    if mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    scale = None if scaled else 1.0
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def scatter(cache: Tensor, new: Tensor, write_index: Tensor) -> Tensor:
    """The operator `TensorScatter` by PyTorch."""
    updated = cache.clone()
    for row, slot in enumerate(write_index.tolist()):
        updated[row, :, slot : slot + new.size(2)] = new[row]
    return updated


@contextmanager
def eager_operators() -> Iterator[None]:
    """Have the modules compute what they otherwise only write into a graph."""
    saved = graphs.attend, graphs.scatter
    graphs.attend, graphs.scatter = attend, scatter
    try:
        yield
    finally:
        graphs.attend, graphs.scatter = saved


class Float32Norm(nn.Module):
    """A norm of rows in float32 between numbers of another type."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = copy.deepcopy(norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.float()).to(x.dtype)


class Float32Logits(nn.Module):
    """A projection whose results are widened: the log-softmax is in float32."""

    def __init__(self, projection: nn.Module) -> None:
        super().__init__()
        self.projection = projection

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(x).float()


def in_type(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A module in float64; or in a 16-bit type, with layer norms and the log-softmax in float32."""
    module = copy.deepcopy(module)
    norms = {name: m for name, m in module.named_modules() if isinstance(m, nn.LayerNorm | nn.RMSNorm)}
    wrapped = {name: Float32Norm(norm) for name, norm in norms.items()} if dtype != torch.float64 else {}
    module = module.to(dtype)
    if module.embedding.positions is not None and module.embedding.positions.dtype != dtype:  # a constant
        module.embedding.positions = module.embedding.positions.to(dtype)
    for name, norm in wrapped.items():
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, norm)
    if isinstance(module, DecoderStepGraph) and dtype != torch.float64:
        module.projection = Float32Logits(module.projection)
    return module.eval()


@dataclass(frozen=True)
class Case:
    """Two steps of a padded batch whose rows write at slots of their own: a prefix, then one token each."""

    source_ids: NDArray[np.int64]
    source_mask: NDArray[np.bool_]
    steps: tuple[Arrays, ...]
    capacity: int

    @classmethod
    def random(cls, model: Transformer, *, batch: int = 3, source: int = 11, prefix: int = 4, seed: int = 0) -> Case:
        rng, sizes = np.random.default_rng(seed), dimensions_of(model)
        capacity = prefix + batch + 2
        slots, first = np.arange(capacity), np.arange(batch)
        steps = []
        for start, queries in ((0, prefix), (prefix, 1)):
            positions = np.tile(np.arange(start, start + queries), (batch, 1))
            last = (first[:, None] + positions)[:, :, None]
            steps.append(
                {
                    "target_ids": rng.integers(0, sizes.target_vocabulary_size, (batch, queries)),
                    "positions": positions,
                    "write_index": first + start,
                    "self_mask": ((slots >= first[:, None, None]) & (slots <= last))[:, None],
                }
            )
        source_mask = np.arange(source) < np.maximum(source - 4 * np.arange(batch), 1)[:, None]
        source_ids = rng.integers(0, sizes.source_vocabulary_size, (batch, source))
        return cls(source_ids, source_mask, tuple(steps), capacity)


def run_modules(model: Transformer, case: Case, dtype: torch.dtype, attention_layer: int | None = None) -> Arrays:
    """What the modules give in a type: cross-attention keys and values, and every output of both steps, as float64."""
    sizes = dimensions_of(model)
    encoder = in_type(EncoderGraph(model), dtype)
    decoder_step = in_type(DecoderStepGraph(model, sizes.candidates, attention_layer), dtype)
    names = [spec.name for spec in graph.decoder_step_outputs(sizes, attention=attention_layer is not None)]
    with eager_operators(), torch.inference_mode():
        mask = torch.from_numpy(case.source_mask)
        cross = encoder(torch.from_numpy(case.source_ids), mask)
        found = dict(zip(graph.cross_names(sizes), cross, strict=True))
        shape = (len(case.source_ids), sizes.heads, case.capacity, sizes.head_size)
        caches = [torch.zeros(shape, dtype=dtype) for _ in cross]
        for number, step in enumerate(case.steps):
            inputs = [torch.from_numpy(step[name]) for name in ("target_ids", "positions", "write_index", "self_mask")]
            outputs = dict(zip(names, decoder_step(*inputs, mask, caches, cross), strict=True))
            caches = [outputs[graph.cache_output_name(name)] for name in graph.self_cache_names(sizes)]
            found |= {f"{name}, step {number}": value for name, value in outputs.items()}
    return {name: value.double().numpy() for name, value in found.items()}


def visible(name: str, values: NDArray[np.generic], case: Case) -> NDArray[np.generic]:
    """A tensor without what nobody reads: keys and values of padding."""
    if name.startswith(("cross_key", "cross_value")):
        return np.moveaxis(values, 2, 1)[case.source_mask]
    return values
