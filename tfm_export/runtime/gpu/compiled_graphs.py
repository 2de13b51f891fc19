"""What workers run: an encoder and decoder steps, compiled for a GPU, whoever has compiled them.

Letters as in `step_model`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tfm_export.bundle import Limits
from tfm_export.graph import Dimensions
from tfm_export.runtime.gpu.cuda import CudaStream, DeviceBuffer, Gpu
from tfm_export.runtime.gpu.device_memory import RowShape, bucket

ANY = sys.maxsize  # target tokens, or slots: as many as there may be
FEWEST_SLOTS = 16  # of caches whose graph takes any number
SLOTS_TOGETHER = 8  # the fused attention of ONNX Runtime's CUDA provider wants a multiple of this


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The largest shapes that a context with this profile takes.

    Attributes:
        index: its number in the compiled graph.
        batch: rows.
        source: source tokens.
        query: target tokens; 0 in an encoder.
    """

    index: int
    batch: int
    source: int
    query: int


class GraphContext(Protocol):
    """A compiled graph with memory bound to its inputs and outputs. Not to be used by two threads at once."""

    def bind(self, key: object, sizes: Mapping[str, int], addresses: Mapping[str, int]) -> None:
        """Set shapes and addresses, unless they are set already.

        Args:
            key: tells these shapes and addresses from all others.
            sizes: of the axes that have names in the graph's table.
            addresses: of every input and output.

        Raises:
            BackendUnavailable: one of them is not taken.
        """
        ...

    def enqueue(self, stream: CudaStream) -> None:
        """Put its work on the stream, or do it behind what is on the stream.

        Raises:
            BackendUnavailable: it cannot be run.
            OutOfDeviceMemory: what it computes does not fit.
        """
        ...

    def close(self) -> None:
        """Free it; its work must have been waited for."""
        ...


class CompiledGraph(Protocol):
    """An encoder or a decoder step, compiled for a GPU. Safe to use from several threads.

    Attributes:
        profiles: by the number of target tokens they take, the fewest first.
        workspace_bytes: what its contexts need for themselves.
        capture_problem: why its steps are not to be captured as CUDA graphs; None where they are.
    """

    profiles: list[Profile]
    workspace_bytes: int
    capture_problem: str | None

    def context(self, profile: Profile, stream: CudaStream, workspace: DeviceBuffer) -> GraphContext:
        """A new context.

        Args:
            profile: one of the graph's.
            stream: what it will run on.
            workspace: memory that all contexts on this stream may share.

        Raises:
            BackendUnavailable: it cannot be made.
        """
        ...

    def save_cache(self) -> None:
        """Keep what was compiled while it ran, for the next process."""
        ...

    def close(self) -> None:
        """Free it, once its contexts are closed."""
        ...


@dataclass(frozen=True, kw_only=True)
class DeviceGraphs:
    """The graphs of a model, loaded on a GPU; all workers share them.

    Attributes:
        gpu: where.
        encoder: the encoder.
        steps: the decoder step by the slots C that it was compiled for, the fewest first; `ANY` if it takes any number.
        step_queries: the most target tokens of a step whose arrays always lie in one place, so that it can be captured;
            more come in prompts and in scoring, seldom as many again.
        dimensions: the sizes that the graphs show.
        limits: the longest sequences.
        rows: what rows of caches and cross-attention keys and values are made of.
        float_type: their dtype.
    """

    gpu: Gpu
    encoder: CompiledGraph
    steps: Mapping[int, CompiledGraph]
    step_queries: int
    dimensions: Dimensions
    limits: Limits
    rows: RowShape
    float_type: str

    @property
    def every(self) -> list[CompiledGraph]:
        """All of them."""
        return [self.encoder, *self.steps.values()]

    @property
    def max_batch_size(self) -> int:
        """The most sentences at once."""
        return min(profile.batch for graph in self.every for profile in graph.profiles)

    @property
    def max_source_length(self) -> int:
        """The longest source."""
        return min(profile.source for graph in self.every for profile in graph.profiles)

    def step(self, capacity: int) -> CompiledGraph:
        """The decoder step for so many slots, as `capacity` gives them."""
        return self.steps.get(capacity) or self.steps[ANY]

    def capacity(self, wanted: int) -> int:
        """The slots of a batch that needs so many; fewer where no graph has as many."""
        if ANY not in self.steps:
            return next((capacity for capacity in self.steps if capacity >= wanted), max(self.steps))
        return -(-bucket(max(wanted, FEWEST_SLOTS), ANY) // SLOTS_TOGETHER) * SLOTS_TOGETHER

    def close(self) -> None:
        """Free them, once no worker has them."""
        for graph in self.every:
            graph.close()
