"""Hugging Face's decoding against ours, on the same weights: the same tokens, and scores within 1e-4."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip(
    "transformers", reason="needs transformers: run `.venv/bin/pip install -e '.[dev]' -c constraints.txt`"
)

from reference_model import SpecialIds as ReferenceSpecialIds
from reference_model import load_checkpoint
from tests.benchmarks.random_models import random_model
from tests.numerics import log_prob_limit, score_limit
from tests.oracles.huggingface import Generated, Oracle
from tfm_export.bundle import Limits, SpecialIds
from tfm_export.decoding import DecodeOptions, Hypothesis, Request, generate
from tfm_export.runtime.torch_model import TorchModel

G2P = Path(__file__).parents[2] / "examples/g2p/g2p.pt"
LONGEST = 14

# In our names; `theirs` turns them into Hugging Face's.
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, 4 to 9 tokens": {"min_decoding_length": 4, "max_decoding_length": 9},
    "greedy, repetition penalty": {"repetition_penalty": 1.5},
    "greedy, repetition reward": {"repetition_penalty": 0.7},
    "greedy, no bigram twice": {"no_repeat_ngram_size": 2},
    "beam 2": {"beam_size": 2},
    "beam 4": {"beam_size": 4},
    "beam 8": {"beam_size": 8},
    "beam 4, early stopping": {"beam_size": 4, "early_stopping": True},
    "beam 4, never early": {"beam_size": 4, "early_stopping": "never"},
    "beam 4, no length penalty": {"beam_size": 4, "length_penalty": 0.0},
    "beam 4, length penalty 0.6": {"beam_size": 4, "length_penalty": 0.6},
    "beam 4, length penalty 2": {"beam_size": 4, "length_penalty": 2.0},
    "beam 4, length penalty -1": {"beam_size": 4, "length_penalty": -1.0},
    "beam 4, length penalty 2, never early": {"beam_size": 4, "length_penalty": 2.0, "early_stopping": "never"},
    "beam 4, no bigram twice": {"beam_size": 4, "no_repeat_ngram_size": 2},
    "beam 4, no token twice": {"beam_size": 4, "no_repeat_ngram_size": 1},
    "beam 4, repetition penalty": {"beam_size": 4, "repetition_penalty": 1.3},
    "beam 4, 4 to 9 tokens": {"beam_size": 4, "min_decoding_length": 4, "max_decoding_length": 9},
    "beam 4, all at once": {
        "beam_size": 4,
        "length_penalty": 0.6,
        "no_repeat_ngram_size": 3,
        "repetition_penalty": 1.2,
        "min_decoding_length": 3,
        "early_stopping": True,
        "num_hypotheses": 2,
    },
    "beam 5, 5 best": {"beam_size": 5, "num_hypotheses": 5},
    "beam 5, 3 best, early stopping": {"beam_size": 5, "num_hypotheses": 3, "early_stopping": True},
    "beam 5, 5 best, no length penalty": {"beam_size": 5, "num_hypotheses": 5, "length_penalty": 0.0},
}
SCORES: dict[str, dict[str, Any]] = {
    "no first token": {"begin_suppress_tokens": [4, 5, 6, 7, 8, 9, 10, 11, 12]},
    "no bigram of the source": {"encoder_no_repeat_ngram_size": 2},
    "no token of the source": {"encoder_no_repeat_ngram_size": 1, "min_decoding_length": 1},
    "tokens of the source": {"encoder_repetition_penalty": 1.7},
    "not tokens of the source": {"encoder_repetition_penalty": 0.6, "repetition_penalty": 1.2},
    "earlier ends": {"exponential_decay_length_penalty": (2, 1.15)},
    "later ends": {"exponential_decay_length_penalty": (1, 0.5)},
    "biases": {
        "sequence_bias": [[[5], -2.5], [[6], 1.5], [[2], -1.0], [[6, 7], 4.0], [[7, 7], -3.0], [[8, 6, 7], 2.0]]
    },
    "normalised again": {"sequence_bias": [[[6], 1.5]], "repetition_penalty": 1.3, "renormalize_logits": True},
    "all of them": {
        "begin_suppress_tokens": [4, 5, 6],
        "encoder_no_repeat_ngram_size": 3,
        "encoder_repetition_penalty": 1.2,
        "exponential_decay_length_penalty": (3, 1.1),
        "sequence_bias": [[[9], 0.7], [[9, 10], -1.5]],
        "no_repeat_ngram_size": 3,
        "repetition_penalty": 1.1,
        "suppress_sequences": [[11], [12, 13]],
        "renormalize_logits": True,
    },
}
CASES |= {f"greedy, {name}": options for name, options in SCORES.items()}
CASES |= {f"beam 4, {name}": {"beam_size": 4, **options} for name, options in SCORES.items()}
PREFIXED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, repetition penalty": {"repetition_penalty": 1.5},
    "beam 4": {"beam_size": 4},
    "beam 4, no bigram twice": {"beam_size": 4, "no_repeat_ngram_size": 2},
    "beam 4, at least 6 tokens": {"beam_size": 4, "min_decoding_length": 6},
    "beam 8, 4 best, length penalty 2": {"beam_size": 8, "num_hypotheses": 4, "length_penalty": 2.0},
    "greedy, all of them": SCORES["all of them"],
    "beam 4, all of them": {"beam_size": 4, **SCORES["all of them"]},
}
NAMES = {
    "beam_size": "num_beams",
    "num_hypotheses": "num_return_sequences",
    "suppress_sequences": "bad_words_ids",
}
START = 1  # their lengths count the start token


def theirs(options: dict[str, Any]) -> dict[str, Any]:
    """Options in Hugging Face's names."""
    found = {NAMES.get(name, name): value for name, value in options.items()}
    found["max_length"] = found.pop("max_decoding_length") + START
    if "min_decoding_length" in found:
        found["min_length"] = found.pop("min_decoding_length") + START
    return found


@pytest.fixture(scope="module", params=["post-norm", "pre-norm", "g2p"])
def pair(request: pytest.FixtureRequest) -> tuple[TorchModel, Oracle]:
    """The same weights in both."""
    if request.param == "g2p":
        model = load_checkpoint(G2P).model
    else:
        model = random_model(**({"norm_first": True, "final_norm": True} if request.param == "pre-norm" else {}))
    limits = Limits(max_source_length=40, max_target_length=40)
    return TorchModel(model, limits=limits), Oracle(model, ReferenceSpecialIds())


@pytest.fixture(scope="module", params=[12, pytest.param(200, marks=pytest.mark.full)])
def sources(request: pytest.FixtureRequest, pair: tuple[TorchModel, Oracle]) -> list[list[int]]:
    generator, size = np.random.default_rng(3), pair[0].dimensions.source_vocabulary_size
    return [[*generator.integers(4, size, generator.integers(1, 12)).tolist(), 2] for _ in range(request.param)]


def agrees(model: TorchModel, options: dict[str, Any], ours: Hypothesis, other: Generated, prefix: list[int]) -> bool:
    """Two searches in float32; penalties multiply or divide what logits are off."""
    tokens = len(ours.tokens) + START
    penalties = [options.get(name, 1.0) for name in ("repetition_penalty", "encoder_repetition_penalty")]
    start, factor = options.get("exponential_decay_length_penalty", (0, 1.0))
    factors = [max(p, 1 / p) for p in penalties] + [max(factor, 1.0) ** (LONGEST - start)]
    limit = 2 * log_prob_limit(model.model, LONGEST) * math.prod(factors)
    if ours.tokens != [*prefix, *other.tokens]:
        return False
    if other.score is not None:
        limit = score_limit(limit, tokens, tokens ** options.get("length_penalty", 1.0))
        return abs(ours.score - other.score) <= limit
    assert ours.log_probs is not None
    assert other.log_probs is not None
    return bool(np.allclose(ours.log_probs[len(prefix) :], other.log_probs, rtol=0, atol=limit))


def compare(
    pair: tuple[TorchModel, Oracle], sources: list[list[int]], prefixes: list[list[int]], options: dict[str, Any]
) -> None:
    model, oracle = pair
    options = {"max_decoding_length": LONGEST, **options}
    with torch.inference_mode():
        if any(name.startswith("encoder_") for name in options):  # theirs reads the padding of a batch, too
            alone = [
                oracle.generate([s], prefixes=[p], **theirs(options)) for s, p in zip(sources, prefixes, strict=True)
            ]
            expected = [sequences for (sequences,) in alone]
        else:
            expected = oracle.generate(sources, prefixes=prefixes, **theirs(options))
    requests = [Request(source=s, target_prefix=p) for s, p in zip(sources, prefixes, strict=True)]
    ours = DecodeOptions(compatibility="huggingface", return_end_token=True, max_batch_size=50, **options)
    found = generate(model, requests, ours, SpecialIds(pad=0, bos=1, eos=2, source_ends_with_eos=True))
    different = []
    for result, sequences, prefix in zip(found, expected, prefixes, strict=True):
        assert len(sequences) == options.get("num_hypotheses", 1)
        if len(result.hypotheses) != len(sequences) or not all(
            agrees(model, options, h, s, prefix) for h, s in zip(result.hypotheses, sequences, strict=True)
        ):
            different.append((prefix, result.hypotheses, sequences))
    assert not different, f"{len(different)} of {len(sources)} differ, the first: {different[0]}"


@pytest.mark.parametrize("case", CASES)
def test_same_tokens_and_scores(pair: tuple[TorchModel, Oracle], sources: list[list[int]], case: str) -> None:
    compare(pair, sources, [[] for _ in sources], CASES[case])


@pytest.mark.parametrize("case", PREFIXED)
def test_same_tokens_and_scores_after_a_prefix(
    pair: tuple[TorchModel, Oracle], sources: list[list[int]], case: str
) -> None:
    generator, size = np.random.default_rng(5), pair[0].dimensions.target_vocabulary_size
    prefixes = [generator.integers(4, size, generator.integers(1, 5)).tolist() for _ in sources]
    compare(pair, sources, prefixes, PREFIXED[case])
