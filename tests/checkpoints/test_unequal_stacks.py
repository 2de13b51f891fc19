"""Hugging Face models of odd sizes, the two stacks of different ones: from a folder to the tokens of a bundle."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.parity import assert_same_model
from tests.checkpoints.test_huggingface import MODELS, Theirs, build
from tfm_export import load
from tfm_export.checkpoints import read_checkpoint
from tfm_export.export import export_bundle

LONGEST, SOURCES = 20, 10
# Theirs, and ours of the same meaning.
DECODING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"num_beams": 1}, {"beam_size": 1}),
    "greedy, repetition punished": (
        {"num_beams": 1, "repetition_penalty": 1.4},
        {"beam_size": 1, "repetition_penalty": 1.4},
    ),
    "beam 4": ({"num_beams": 4}, {"beam_size": 4}),
    "beam 3, early, short": (
        {"num_beams": 3, "early_stopping": True, "length_penalty": 0.3},
        {"beam_size": 3, "early_stopping": True, "length_penalty": 0.3},
    ),
    "beam 5, no bigram twice": (
        {"num_beams": 5, "no_repeat_ngram_size": 2, "early_stopping": False},
        {"beam_size": 5, "no_repeat_ngram_size": 2, "early_stopping": False},
    ),
}
QUICK = (("bart", 0), ("m2m_100", 1))


def random_sizes(name: str, seed: int) -> dict[str, int]:
    """Odd numbers of heads of odd sizes; T5's stacks have but depths of their own."""
    chance = random.Random(f"{name} {seed}")
    layers = chance.sample(range(1, 5), 2)
    inner = chance.sample(range(9, 60), 2)
    if MODELS[name][0] in {"T5", "MT5"}:
        sizes = {"d_model": chance.randint(11, 50), "d_kv": chance.choice([3, 5, 9, 13]), "d_ff": inner[0]}
        heads = chance.choice([1, 2, 5, 7])
        return {**sizes, "num_heads": heads, "num_layers": layers[0], "num_decoder_layers": layers[1]}
    heads = chance.sample([1, 2, 3, 5, 6], 2)
    found = {"d_model": 30 * chance.choice([1, 2, 3])}
    for stack, count, width, depth in zip(("encoder", "decoder"), heads, inner, layers, strict=True):
        found |= {f"{stack}_attention_heads": count, f"{stack}_ffn_dim": width, f"{stack}_layers": depth}
    return found


CASES = [
    pytest.param(name, seed, marks=[] if (name, seed) in QUICK else pytest.mark.full)
    for name in MODELS
    for seed in range(3)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), CASES)
def test_bundles_give_what_transformers_gives(tmp_path: Path, name: str, seed: int) -> None:
    """The forward pass of what was read, then the tokens of the verified bundle under several settings."""
    model = build(name, seed, **random_sizes(name, seed))
    model.save_pretrained(tmp_path / "model")
    source = read_checkpoint(tmp_path / "model")
    assert_same_model(source.model, Theirs(model), pad=model.config.pad_token_id, source=23, target=17)
    export_bundle(tmp_path / "model", tmp_path / "bundle", max_source_length=30, max_target_length=LONGEST)
    chance, special = random.Random(seed), source.special_ids
    size = source.model.config.source_vocabulary_size
    sources = [[*(chance.randrange(3, size - 2) for _ in range(n)), special.eos] for n in range(1, SOURCES + 1)]
    seen = set()
    with load(tmp_path / "bundle") as ours:
        for theirs, settings in DECODING.values():
            wanted = [generated(model, ids, special.eos, **theirs) for ids in sources]
            options = {"max_decoding_length": LONGEST, "return_end_token": True, **settings}
            found = [answer.tokens for answer in ours.generate_ids(sources, **options)]
            assert found == wanted, settings
            seen |= {tuple(tokens) for tokens in wanted}
    assert len(seen) > 5, "these sources give nothing to tell models apart"


def generated(model: Any, ids: list[int], end: int, **options: Any) -> list[int]:
    """Theirs for one source, up to the end token."""
    # Their cache wants as many layers in the decoder as in the encoder.
    output = model.generate(torch.tensor([ids]), max_new_tokens=LONGEST, use_cache=False, **options)[0, 1:].tolist()
    return output[: output.index(end) + 1] if end in output else output
