"""Variants exported once a session, each of another configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from reference_model import Transformer
from tests.conftest import build_tiny_model
from tests.once import Once
from tfm_export.bundle import Bundle, GenerationDefaults, Limits, Manifest, SpecialIds
from tfm_export.export.variant import dimensions_of, write_fp32_variant

CONFIGURATIONS = {
    # Post-norm as in the paper, everything separate.
    "paper": {},
    # Pre-norm, one table for everything, unequal depths, three heads of 20, a feed-forward narrower than the model.
    "tied": {
        "norm_first": True,
        "final_norm": True,
        "activation": "gelu",
        "share_embeddings": True,
        "tie_projection": True,
        "d_model": 60,
        "heads": 3,
        "d_ff": 48,
        "encoder_layers": 1,
        "decoder_layers": 3,
    },
    # T5's: relative positions, root mean square, gated feed-forward, heads that are no part of d_model.
    "relative": {
        "norm_first": True,
        "final_norm": True,
        "norm": "rms",
        "layer_norm_epsilon": 1e-6,
        "activation": "gelu_tanh",
        "gated_feed_forward": True,
        "positions": "relative",
        "relative_buckets": 8,
        "relative_max_distance": 10,
        "share_embeddings": True,
        "tie_projection": True,
        "scale_embeddings": False,
        "scale_attention": False,
        "scale_projection": True,
        "d_model": 45,
        "heads": 3,
        "d_head": 7,
        "d_ff": 30,
        "encoder_layers": 1,
    },
    # BART's: learned positions, another number for each side; normalised embeddings.
    "learned": {
        "positions": "learned",
        "max_length": 40,
        "longest_target": 30,
        "embedding_norm": True,
        "scale_embeddings": False,
        "activation": "gelu",
        "d_model": 33,
        "heads": 3,
        "encoder_layers": 1,
        "decoder_layers": 1,
    },
    # fairseq's, of two stacks that have no size in common: heads of 12 and of 7.
    "unequal": {
        "d_model": 36,
        "heads": 3,
        "d_ff": 40,
        "decoder_d_model": 28,
        "decoder_heads": 4,
        "decoder_d_head": 7,
        "decoder_d_ff": 50,
        "encoder_layers": 1,
        "tie_projection": True,
    },
}
FULL_CONFIGURATIONS = {
    "relative positions, unequal heads": {
        "positions": "relative",
        "d_model": 60,
        "heads": 3,
        "d_ff": 48,
        "decoder_heads": 5,
        "decoder_d_head": 14,
        "decoder_d_ff": 34,
    },
    "one head": {"heads": 1, "decoder_layers": 1},
    "heads of 7": {"d_model": 42, "heads": 6, "d_ff": 31},
    "heads of 12, vocabularies of 7 and 5": {
        "d_model": 60,
        "heads": 5,
        "source_vocabulary_size": 7,
        "target_vocabulary_size": 5,
        "encoder_layers": 3,
        "decoder_layers": 1,
    },
    "pre-norm without final norms": {"norm_first": True},
    "post-norm with final norms": {"final_norm": True, "tie_projection": True},
    "the annotated Transformer's norm": {
        "norm": "unbiased",
        "norm_first": True,
        "final_norm": True,
        "layer_norm_epsilon": 1e-6,
    },
    "relative positions, post-norm, heads of 12": {
        "positions": "relative",
        "d_model": 60,
        "heads": 5,
        "activation": "silu",
        "gated_feed_forward": True,
    },
    "no positions at all": {"positions": "none", "d_head": 20, "norm": "rms"},
    "a vocabulary of 64,001": {"target_vocabulary_size": 64_001},
}


@dataclass(frozen=True)
class Exported:
    """A model and a bundle with its graphs, without tokenizer and golden inputs."""

    model: Transformer
    bundle: Bundle

    @property
    def folder(self) -> Path:
        """Of the graphs."""
        return self.bundle.variant_path("fp32")


@pytest.fixture(scope="session")
def export_configuration(once: Once) -> Callable[[str], Exported]:
    """Exports a configuration by name, once."""

    @cache
    def export(name: str) -> Exported:
        model = build_tiny_model(seed=5, **{**CONFIGURATIONS, **FULL_CONFIGURATIONS}[name])

        def make(folder: Path) -> None:
            write_fp32_variant(model, folder / "onnx" / "fp32", attention_layer=1 if name == "paper" else None)

        config = model.config
        manifest = Manifest(
            dimensions=dimensions_of(model),
            limits=Limits(max_source_length=config.max_length, max_target_length=config.max_target_length),
            special_ids=SpecialIds(pad=0, bos=1, eos=2, source_ends_with_eos=True),
            generation=GenerationDefaults(max_length=config.max_target_length),
            variants={"fp32": {}},
        )
        return Exported(model, Bundle(once(f"exported {name}", make), manifest))

    return export


@pytest.fixture(params=[*CONFIGURATIONS, *(pytest.param(name, marks=pytest.mark.full) for name in FULL_CONFIGURATIONS)])
def exported(request: pytest.FixtureRequest, export_configuration: Callable[[str], Exported]) -> Exported:
    """Every configuration in turn."""
    return export_configuration(request.param)
