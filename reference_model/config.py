"""The sizes and options of a Transformer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
POSITIONS = ("sinusoidal", "learned", "relative", "none")
NORMS = ("layer", "rms", "unbiased")
SIZES = (
    "source_vocabulary_size",
    "target_vocabulary_size",
    "d_model",
    "heads",
    "d_ff",
    "encoder_layers",
    "decoder_layers",
    "max_length",
)
DECODER_SIZES = ("decoder_d_model", "decoder_heads", "decoder_d_head", "decoder_d_ff")

PRESETS: dict[str, dict[str, Any]] = {
    "base": {"d_model": 512, "heads": 8, "d_ff": 2048, "encoder_layers": 6, "decoder_layers": 6, "dropout": 0.1},
    "small": {"d_model": 256, "heads": 4, "d_ff": 1024, "encoder_layers": 3, "decoder_layers": 3, "dropout": 0.1},
    "tiny": {"d_model": 64, "heads": 4, "d_ff": 128, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.1},
}


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Everything that decides the shapes and the arithmetic of a `Transformer`.

    Attributes:
        source_vocabulary_size: rows of the source embedding.
        target_vocabulary_size: rows of the target embedding and outputs of the projection.
        d_model: width of the residual stream of both stacks, as the sizes that follow are of both.
        heads: attention heads.
        d_head: dimensions of one attention head; 0 stands for d_model / heads.
        d_ff: width of the feed-forward layers.
        decoder_d_model: the decoder's d_model; 0 stands for the encoder's, and so it does for the next three.
        decoder_heads: the decoder's heads, in self-attention and cross-attention.
        decoder_d_head: the decoder's d_head.
        decoder_d_ff: the decoder's d_ff.
        encoder_layers: number of encoder layers.
        decoder_layers: number of decoder layers.
        dropout: probability of dropping an activation while training.
        activation: "relu" (the paper), "gelu", "gelu_tanh" (its approximation by a tanh) or "silu".
        gated_feed_forward: multiply the activation by a second projection (Shazeer 2020, "GLU Variants").
        norm_first: normalise the input of each sublayer (pre-norm) instead of its sum with the residual (the paper).
        final_norm: normalise the output of each stack once more; pre-norm models need it.
        norm: "layer" (the paper), "rms" (divide by the root mean square, no mean, no bias) or "unbiased" (the
            annotated Transformer's: the deviation divides by M - 1, and the epsilon is added to it).
        layer_norm_epsilon: added to the variance, to the mean square, or to the deviation.
        positions: "sinusoidal" (the paper), "learned" (tables among the weights), "relative" (T5: a bias of the
            self-attentions' scores) or "none".
        relative_buckets: of relative positions: how many distances are told apart.
        relative_max_distance: of relative positions: from here on all distances are one.
        max_length: the longest source: rows of its position table, where there is one. Without a table the model takes
            longer ones too.
        longest_target: the same of targets; 0 stands for max_length.
        embedding_norm: normalise the embeddings, positions included.
        scale_embeddings: multiply embeddings by sqrt(d_model) (the paper).
        scale_attention: divide attention's scores by sqrt(head_size) (the paper).
        scale_projection: divide the decoder's output by sqrt(d_model) before it is projected.
        share_embeddings: source and target use one embedding.
        tie_projection: the projection uses the weights of the target embedding.

    Raises:
        ValueError: naming every field that does not fit.
    """

    source_vocabulary_size: int
    target_vocabulary_size: int
    d_model: int = 512
    heads: int = 8
    d_head: int = 0
    d_ff: int = 2048
    decoder_d_model: int = 0
    decoder_heads: int = 0
    decoder_d_head: int = 0
    decoder_d_ff: int = 0
    encoder_layers: int = 6
    decoder_layers: int = 6
    dropout: float = 0.1
    activation: str = "relu"
    gated_feed_forward: bool = False
    norm_first: bool = False
    final_norm: bool = False
    norm: str = "layer"
    layer_norm_epsilon: float = 1e-5
    positions: str = "sinusoidal"
    relative_buckets: int = 32
    relative_max_distance: int = 128
    max_length: int = 512
    longest_target: int = 0
    embedding_norm: bool = False
    scale_embeddings: bool = True
    scale_attention: bool = True
    scale_projection: bool = False
    share_embeddings: bool = False
    tie_projection: bool = False

    def __post_init__(self) -> None:
        if problems := [*self._size_problems(), *self._option_problems()]:
            raise ValueError("; ".join(problems))

    def _size_problems(self) -> Iterator[str]:
        least = dict.fromkeys(SIZES, 1) | dict.fromkeys(("d_head", "longest_target", *DECODER_SIZES), 0)
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                yield f"{name} must be at least {minimum}, found {getattr(self, name)}"
        yield from self._width_problems("", self.d_model, self.heads, self.d_head)
        if any(getattr(self, name) for name in DECODER_SIZES):
            decoder = self._decoder_sizes()
            yield from self._width_problems("the decoder's ", decoder["d_model"], decoder["heads"], decoder["d_head"])
        if self.positions == "relative":
            yield from self._relative_problems()
        if self.share_embeddings and self.source_vocabulary_size != self.target_vocabulary_size:
            yield (
                "share_embeddings needs vocabularies of one size, found "
                f"{self.source_vocabulary_size} and {self.target_vocabulary_size}"
            )
        if self.share_embeddings and self.decoder_d_model not in {0, self.d_model}:
            yield f"share_embeddings needs stacks of one d_model, found {self.d_model} and {self.decoder_d_model}"

    def _width_problems(self, whose: str, d_model: int, heads: int, d_head: int) -> Iterator[str]:
        if heads >= 1 and not d_head and d_model % heads:
            yield f"{whose}d_model must be a multiple of heads, found {d_model} and {heads}"
        if self.positions == "sinusoidal" and d_model % 2:
            yield f"{whose}d_model must be even for sinusoidal positions, found {d_model}"

    def _relative_problems(self) -> Iterator[str]:
        buckets, distance = self.relative_buckets, self.relative_max_distance
        if buckets < 4 or buckets % 2:
            yield f"relative_buckets must be even and at least 4, found {buckets}"
        elif distance <= buckets // 2:
            yield f"relative_max_distance must be more than relative_buckets / 2, found {distance} and {buckets}"

    def _option_problems(self) -> Iterator[str]:
        if not 0 <= self.dropout < 1:
            yield f"dropout must be in [0, 1), found {self.dropout}"
        if self.layer_norm_epsilon <= 0:
            yield f"layer_norm_epsilon must be positive, found {self.layer_norm_epsilon}"
        for name, choices in {"activation": ACTIVATIONS, "positions": POSITIONS, "norm": NORMS}.items():
            if getattr(self, name) not in choices:
                yield f"{name} must be one of {', '.join(choices)}, found {getattr(self, name)!r}"

    @property
    def head_size(self) -> int:
        """Dimensions of one attention head."""
        return self.d_head or self.d_model // self.heads

    @property
    def decoder(self) -> TransformerConfig:
        """The configuration with the decoder's sizes in the place of the encoder's."""
        return replace(self, **{**self._decoder_sizes(), **dict.fromkeys(DECODER_SIZES, 0)})

    def _decoder_sizes(self) -> dict[str, Any]:
        names = {name.removeprefix("decoder_"): name for name in DECODER_SIZES}
        return {name: getattr(self, own) or getattr(self, name) for name, own in names.items()}

    @property
    def endless(self) -> bool:
        """Whether there is no table of positions that could end; the longest sequences are a convention then."""
        return self.positions in {"relative", "none"}

    @property
    def max_target_length(self) -> int:
        """The longest target."""
        return self.longest_target or self.max_length

    @classmethod
    def preset(cls, name: str, **fields: Any) -> TransformerConfig:
        """One of the sizes of `PRESETS`: "base" (the paper's), "small" or "tiny".

        Args:
            name: the preset.
            **fields: the vocabulary sizes, and any field to set differently.
        """
        if name not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}, found {name!r}")
        return cls(**{**PRESETS[name], **fields})
