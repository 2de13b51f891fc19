"""The sizes and options of a Transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ACTIVATIONS = ("relu", "gelu")

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
        d_model: width of the residual stream.
        heads: attention heads; each has d_model / heads dimensions.
        d_ff: width of the feed-forward layers.
        encoder_layers: number of encoder layers.
        decoder_layers: number of decoder layers.
        dropout: probability of dropping an activation while training.
        activation: "relu" (the paper) or "gelu".
        norm_first: normalise the input of each sublayer (pre-norm) instead of its sum with the residual (the paper).
        final_norm: normalise the output of each stack once more; pre-norm models need it.
        layer_norm_epsilon: added to the variance.
        max_length: rows of the position table: the longest source and the longest target.
        share_embeddings: source and target use one embedding.
        tie_projection: the projection uses the weights of the target embedding.

    Raises:
        ValueError: naming every field that does not fit.
    """

    source_vocabulary_size: int
    target_vocabulary_size: int
    d_model: int = 512
    heads: int = 8
    d_ff: int = 2048
    encoder_layers: int = 6
    decoder_layers: int = 6
    dropout: float = 0.1
    activation: str = "relu"
    norm_first: bool = False
    final_norm: bool = False
    layer_norm_epsilon: float = 1e-5
    max_length: int = 512
    share_embeddings: bool = False
    tie_projection: bool = False

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be at least 1, found {getattr(self, name)}"
            for name in (
                "source_vocabulary_size",
                "target_vocabulary_size",
                "d_model",
                "heads",
                "d_ff",
                "encoder_layers",
                "decoder_layers",
                "max_length",
            )
            if getattr(self, name) < 1
        ]
        if self.heads >= 1 and self.d_model % self.heads:
            problems.append(f"d_model must be a multiple of heads, found {self.d_model} and {self.heads}")
        if self.d_model % 2:
            problems.append(f"d_model must be even for sinusoidal positions, found {self.d_model}")
        if not 0 <= self.dropout < 1:
            problems.append(f"dropout must be in [0, 1), found {self.dropout}")
        if self.activation not in ACTIVATIONS:
            problems.append(f"activation must be one of {', '.join(ACTIVATIONS)}, found {self.activation!r}")
        if self.layer_norm_epsilon <= 0:
            problems.append(f"layer_norm_epsilon must be positive, found {self.layer_norm_epsilon}")
        if self.share_embeddings and self.source_vocabulary_size != self.target_vocabulary_size:
            problems.append(
                "share_embeddings needs vocabularies of one size, found "
                f"{self.source_vocabulary_size} and {self.target_vocabulary_size}"
            )
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def head_size(self) -> int:
        """Dimensions of one attention head."""
        return self.d_model // self.heads

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
