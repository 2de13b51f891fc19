"""How much memory an engine takes on a GPU, worked out from its graphs and its limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import onnx_ir as ir

from tfm_export.graph import Dimensions
from tfm_export.precision import PRECISIONS
from tfm_export.trt.network_source import NetworkSource
from tfm_export.trt.profiles import EngineLimits, Sizes, propagate

# These give another view of their input, or write into it.
_IN_PLACE = {"Reshape", "Squeeze", "Unsqueeze", "Identity", "TensorScatter"}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the GPU.

    Attributes:
        weights: of each plan. Every capacity has the decoder's weights to itself.
        cache_a_sentence: self-attention keys and values of a sentence with all its beams, by capacity.
        cache_a_beam: a beam's part of that, at the largest capacity.
        cross_a_sentence: cross-attention keys and values of the longest source.
        activations: of each plan, at its largest shapes: what lives at the same time when nothing is fused, so a bound.
        max_batch_size: sentences.
    """

    weights: dict[str, int]
    cache_a_sentence: dict[int, int]
    cache_a_beam: int
    cross_a_sentence: int
    activations: dict[str, int]
    max_batch_size: int

    @property
    def full_batch(self) -> int:
        """Everything, when the largest batch decodes the longest sentences with all beams."""
        sentence = max(self.cache_a_sentence.values()) + self.cross_a_sentence
        return sum(self.weights.values()) + max(self.activations.values()) + self.max_batch_size * sentence

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "full_batch": self.full_batch}


def estimate_memory(
    sources: Sequence[NetworkSource],
    dimensions: Dimensions,
    compute: str,
    limits: EngineLimits,
    capacities: Sequence[int],
) -> Memory:
    """Work out what an engine will take.

    Args:
        sources: its graphs.
        dimensions: the model's, with the head size of the engine.
        compute: what caches are in: "fp32", "fp16" or "bf16".
        limits: the largest sizes.
        capacities: slots a sentence.
    """
    item_bytes = PRECISIONS[compute].item_bytes
    slot = 2 * dimensions.decoder_layers * dimensions.heads * dimensions.head_size * item_bytes
    caches = {capacity: slot * capacity for capacity in capacities}
    return Memory(
        weights={source.plan: source.weight_bytes for source in sources},
        cache_a_sentence=caches,
        cache_a_beam=max(caches.values()) // limits.max_beam_size,
        cross_a_sentence=slot * limits.max_source_length,
        activations={source.plan: _activations(source) for source in sources},
        max_batch_size=limits.max_batch_size,
    )


def _activations(source: NetworkSource) -> int:
    return max(most_alive(source.model, profile.sizes(-1)) for profile in source.profiles)


def most_alive(model: ir.Model, sizes: Sizes) -> int:
    """The most bytes of computed values that exist at the same time, node after node; outputs stay to the end.

    Args:
        model: a graph.
        sizes: of its axes.
    """
    shapes = propagate(model, sizes)
    waiting = {value: len(value.uses()) for node in model.graph for value in node.outputs}
    alive = most = 0
    for node in model.graph:
        alive += sum(_bytes(value, shapes) for value in node.outputs)
        most = max(most, alive)
        for value in node.inputs:
            if value in waiting:
                waiting[value] -= 1
                if not waiting[value] and not value.is_graph_output():
                    alive -= _bytes(value, shapes)
    return most


def _bytes(value: ir.Value, shapes: dict[str, tuple[tuple[int, ...], int]]) -> int:
    """What a computed value takes; nothing if it is the memory of another."""
    producer = value.producer()
    if producer is None or producer.op_type in _IN_PLACE or value.name not in shapes:
        return 0
    shape, size = shapes[value.name]
    for axis in shape:
        size *= axis
    return size
