"""The one table of graph inputs and outputs: names, dtypes, axes.

Exporter, runtimes, verification and engines all read it. Axes: batch (B sentences), query (Q target tokens of this
step), source (S), capacity (C cache slots); a number is a fixed size. Masks are bool, True means "may attend".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

OPSET = 24
IR_VERSION = 11
ENCODER = "encoder.onnx"
DECODER_STEP = "decoder_step.onnx"
DECODER_STEP_ATTENTION = "decoder_step_attention.onnx"
GENERATE = "generate.onnx"
WEIGHTS = "weights.bin"

Axis = str | int


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """The sizes of a model that its graphs show.

    Attributes:
        source_vocabulary_size: one more than the largest source id.
        target_vocabulary_size: V.
        decoder_layers: each has a self-attention cache and a cross-attention key and value.
        heads: H, of the decoder; the encoder may have others.
        head_size: D, of these heads.
        candidates: N, how many of the best tokens a step names.
    """

    source_vocabulary_size: int
    target_vocabulary_size: int
    decoder_layers: int
    heads: int
    head_size: int
    candidates: int

    def padded(self, float_type: str) -> Dimensions:
        """The sizes of an engine's graphs: TensorRT has 16-bit attention kernels for heads of 16, 24, 32, ... alone.

        Measured with TensorRT-RTX 1.7.1: heads of 12 or 20 do not compile, fused or not; of 4, 7 or 8 only decomposed.

        Args:
            float_type: what the engine computes in where nothing is quantised.
        """
        return replace(self, head_size=padded_head_size(self.head_size, float_type))


def padded_head_size(size: int, float_type: str) -> int:
    """What heads of a size become in an engine; padded once, they stay as they are."""
    return size if float_type == "float32" else max(16, -(-size // 8) * 8)


@dataclass(frozen=True)
class TensorSpec:
    """One graph input or output."""

    name: str
    dtype: str
    axes: tuple[Axis, ...]

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """With a size for every axis that has a name."""
        return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in self.axes)


def self_cache_names(dimensions: Dimensions) -> list[str]:
    """The decoder step's cache inputs, in order; the output of each is named with `_out` after it."""
    return [f"self_{part}_{i}" for i in range(dimensions.decoder_layers) for part in ("key", "value")]


def cross_names(dimensions: Dimensions) -> list[str]:
    """The encoder's outputs, which are inputs of the decoder step."""
    return [f"cross_{part}_{i}" for i in range(dimensions.decoder_layers) for part in ("key", "value")]


def cache_output_name(cache: str) -> str:
    """The decoder step's output that holds a cache after the step: the same buffer, updated in place."""
    return f"{cache}_out"


def encoder_inputs() -> list[TensorSpec]:
    """What encoder.onnx takes."""
    return [
        TensorSpec("source_ids", "int64", ("batch", "source")),
        TensorSpec("source_mask", "bool", ("batch", "source")),
    ]


def encoder_outputs(dimensions: Dimensions, float_type: str = "float32") -> list[TensorSpec]:
    """What encoder.onnx gives: the cross-attention key and value of every decoder layer."""
    axes: tuple[Axis, ...] = ("batch", dimensions.heads, "source", dimensions.head_size)
    return [TensorSpec(name, float_type, axes) for name in cross_names(dimensions)]


def decoder_step_inputs(dimensions: Dimensions, float_type: str = "float32") -> list[TensorSpec]:
    """What decoder_step.onnx takes."""
    cache: tuple[Axis, ...] = ("batch", dimensions.heads, "capacity", dimensions.head_size)
    return [
        TensorSpec("target_ids", "int64", ("batch", "query")),
        TensorSpec("positions", "int64", ("batch", "query")),
        TensorSpec("write_index", "int64", ("batch",)),
        TensorSpec("self_mask", "bool", ("batch", 1, "query", "capacity")),
        TensorSpec("source_mask", "bool", ("batch", "source")),
        *(TensorSpec(name, float_type, cache) for name in self_cache_names(dimensions)),
        *encoder_outputs(dimensions, float_type),
    ]


def decoder_step_outputs(
    dimensions: Dimensions, float_type: str = "float32", *, attention: bool = False
) -> list[TensorSpec]:
    """What decoder_step.onnx gives. Log-probabilities are float32 whatever the caches are.

    log_normaliser is what logits are above log-probabilities: options that change logits need it.

    Args:
        dimensions: the model's.
        float_type: of the caches.
        attention: of decoder_step_attention.onnx, which also gives the weights of one layer's cross-attention, the mean
            over its heads.
    """
    top: tuple[Axis, ...] = ("batch", "query", dimensions.candidates)
    cache: tuple[Axis, ...] = ("batch", dimensions.heads, "capacity", dimensions.head_size)
    return [
        TensorSpec("log_probs", "float32", ("batch", "query", dimensions.target_vocabulary_size)),
        TensorSpec("top_log_probs", "float32", top),
        TensorSpec("top_ids", "int64", top),
        TensorSpec("log_normaliser", "float32", ("batch", "query")),
        *(TensorSpec(cache_output_name(name), float_type, cache) for name in self_cache_names(dimensions)),
        *([TensorSpec("cross_attention", "float32", ("batch", "query", "source"))] if attention else []),
    ]


def generate_inputs() -> list[TensorSpec]:
    """What generate.onnx takes.

    Sources are filled up to S with any ids: source_lengths tells where they end. A row without a source, length 0,
    gives an empty target. max_length counts the end token; it is cut to what the model takes, and is at least 1.
    """
    return [
        TensorSpec("source_ids", "int64", ("batch", "source")),
        TensorSpec("source_lengths", "int64", ("batch",)),
        TensorSpec("max_length", "int64", ()),
    ]


def generate_outputs() -> list[TensorSpec]:
    """What generate.onnx gives: T tokens a row, T being the length of the longest target.

    ids has the padding id behind a row's end token. lengths counts a row's tokens, its end token included. scores is
    the sum of their log-probabilities.
    """
    return [
        TensorSpec("ids", "int64", ("batch", "target")),
        TensorSpec("lengths", "int64", ("batch",)),
        TensorSpec("scores", "float32", ("batch",)),
    ]
