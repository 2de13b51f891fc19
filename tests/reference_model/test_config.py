"""Configurations: the presets, and refusals that name everything that is wrong."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from reference_model import TransformerConfig
from reference_model.config import PRESETS

SIZES = {"source_vocabulary_size": 10, "target_vocabulary_size": 12}


def test_base_is_the_papers() -> None:
    config = TransformerConfig.preset("base", **SIZES)
    assert (config.d_model, config.heads, config.d_ff) == (512, 8, 2048)
    assert (config.encoder_layers, config.decoder_layers, config.dropout) == (6, 6, 0.1)
    assert config.head_size == 64
    assert not config.norm_first
    assert config.activation == "relu"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_can_be_varied(name: str) -> None:
    config = TransformerConfig.preset(name, **SIZES, decoder_layers=1, activation="gelu")
    assert (config.decoder_layers, config.activation) == (1, "gelu")
    assert config.encoder_layers == PRESETS[name]["encoder_layers"]


def test_an_unknown_preset_is_told_the_known_ones() -> None:
    with pytest.raises(ValueError, match="base, small, tiny, found 'large'"):
        TransformerConfig.preset("large", **SIZES)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"d_model": 0}, "d_model must be at least 1, found 0"),
        ({"encoder_layers": 0}, "encoder_layers must be at least 1"),
        ({"max_length": -1}, "max_length must be at least 1, found -1"),
        ({"d_model": 512, "heads": 7}, "multiple of heads, found 512 and 7"),
        ({"d_model": 9, "heads": 3}, "must be even"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), found 1.0"),
        ({"dropout": -0.1}, "dropout must be"),
        ({"activation": "swish"}, "relu, gelu, gelu_tanh, silu, found 'swish'"),
        ({"positions": "rotary"}, "sinusoidal, learned, relative, none, found 'rotary'"),
        ({"norm": "batch"}, "norm must be one of layer, rms, unbiased, found 'batch'"),
        ({"d_head": -1}, "d_head must be at least 0, found -1"),
        ({"longest_target": -1}, "longest_target must be at least 0, found -1"),
        ({"positions": "relative", "relative_buckets": 7}, "relative_buckets must be even and at least 4, found 7"),
        ({"positions": "relative", "relative_max_distance": 16}, "more than relative_buckets / 2, found 16 and 32"),
        ({"layer_norm_epsilon": 0.0}, "layer_norm_epsilon must be positive"),
        ({"share_embeddings": True}, "vocabularies of one size, found 10 and 12"),
        ({"share_embeddings": True, "decoder_d_model": 64}, "stacks of one d_model, found 512 and 64"),
        ({"decoder_heads": -1}, "decoder_heads must be at least 0, found -1"),
        ({"decoder_heads": 7}, "the decoder's d_model must be a multiple of heads, found 512 and 7"),
        ({"decoder_d_model": 36}, "the decoder's d_model must be a multiple of heads, found 36 and 8"),
        ({"decoder_d_model": 9, "decoder_heads": 3}, "the decoder's d_model must be even"),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        TransformerConfig(**SIZES, **fields)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        TransformerConfig(**SIZES, d_ff=0, heads=0, dropout=2.0, activation="tanh", share_embeddings=True)
    for part in ("d_ff", "heads", "dropout", "activation", "share_embeddings"):
        assert part in str(caught.value)


def test_a_configuration_does_not_change() -> None:
    config = TransformerConfig(**SIZES)
    with pytest.raises(FrozenInstanceError):
        config.d_model = 4  # type: ignore[misc]


def test_heads_and_the_longest_target_may_be_of_their_own() -> None:
    config = TransformerConfig(
        source_vocabulary_size=5, target_vocabulary_size=5, d_model=15, heads=2, d_head=7, positions="none"
    )
    assert (config.head_size, config.max_target_length) == (7, 512)
    assert replace(config, longest_target=9).max_target_length == 9


def test_the_decoders_sizes_are_the_encoders_unless_they_are_given() -> None:
    config = TransformerConfig(**SIZES, d_model=12, heads=3, d_ff=5)
    assert config.decoder == config
    config = replace(config, decoder_heads=2)
    assert (config.head_size, config.decoder.d_model, config.decoder.heads, config.decoder.head_size) == (4, 12, 2, 6)
    config = replace(config, d_head=9, decoder_d_model=10, decoder_d_ff=7)
    assert (config.decoder.d_model, config.decoder.head_size, config.decoder.d_ff, config.d_ff) == (10, 9, 7, 5)
    assert replace(config, decoder_d_head=1).decoder.head_size == 1
