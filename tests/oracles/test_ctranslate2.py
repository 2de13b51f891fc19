"""CTranslate2's decoding against ours, on the same weights: the same tokens, and scores within 1e-4."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.peers.ctranslate2 import Hypothesis as PeerHypothesis
from benchmarks.peers.ctranslate2 import Peer, build
from reference_model import load_checkpoint
from reference_model.checkpoint import SpecialIds as ReferenceSpecialIds
from tests.benchmarks.random_models import random_model
from tests.numerics import attention_limit, log_prob_limit, score_limit
from tfm_export.bundle import Limits, SpecialIds
from tfm_export.decoding import DecodeOptions, Hypothesis, Request, generate
from tfm_export.runtime.torch_model import TorchModel

G2P = Path(__file__).parents[2] / "examples/g2p/g2p.pt"
LONGEST = 16
SHORT = {"max_decoding_length": 6}  # too few for what each attends to to sum up to 1 everywhere

# Our options, and CTranslate2's where their names or defaults differ.
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, at least 5 tokens": {"min_decoding_length": 5},
    "greedy, repetition penalty": {"repetition_penalty": 1.5},
    "greedy, no bigram twice": {"no_repeat_ngram_size": 2},
    "beam 2": {"beam_size": 2},
    "beam 4": {"beam_size": 4},
    "beam 8": {"beam_size": 8},
    "beam 4, no length penalty": {"beam_size": 4, "length_penalty": 0.0},
    "beam 4, length penalty 0.6": {"beam_size": 4, "length_penalty": 0.6},
    "beam 4, length penalty 2": {"beam_size": 4, "length_penalty": 2.0},
    "beam 4, no bigram twice": {"beam_size": 4, "no_repeat_ngram_size": 2},
    "beam 4, no token twice": {"beam_size": 4, "no_repeat_ngram_size": 1},
    "beam 4, repetition penalty": {"beam_size": 4, "repetition_penalty": 1.3},
    "beam 4, 4 to 9 tokens": {"beam_size": 4, "min_decoding_length": 4, "max_decoding_length": 9},
    "beam 4, patience 2": {"beam_size": 4, "patience": 2.0, "num_hypotheses": 6},
    "beam 5, 5 best": {"beam_size": 5, "num_hypotheses": 5},
    "beam 5, 3 best, no length penalty": {"beam_size": 5, "num_hypotheses": 3, "length_penalty": 0.0},
    "beam 4, suppressed": {"beam_size": 4, "suppress_sequences": [[5], [7, 8], [9, 10, 11]]},
    "beam 3, two ends": {"beam_size": 3, "end_token": [2, 9], "return_end_token": True},
    "alternatives": {"num_hypotheses": 4, "return_alternatives": True},
    "greedy, covered": {"coverage_penalty": 0.4, **SHORT},
    "beam 4, covered": {"beam_size": 4, "coverage_penalty": 1.5, **SHORT},
    "beam 5, 5 best covered, no length penalty": {
        "beam_size": 5,
        "num_hypotheses": 5,
        "length_penalty": 0.0,
        "coverage_penalty": 0.4,
        **SHORT,
    },
    "alternatives, covered": {"num_hypotheses": 4, "return_alternatives": True, "coverage_penalty": 0.4, **SHORT},
}
PREFIXED = {"greedy": {}, "beam 4": {"beam_size": 4}, "beam 8, 4 best": {"beam_size": 8, "num_hypotheses": 4}}


@pytest.fixture(scope="module", params=["post-norm", "pre-norm", "g2p"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TorchModel, Peer]]:
    """The same weights in both."""
    if request.param == "g2p":
        model = load_checkpoint(G2P).model
    else:
        model = random_model(**({"norm_first": True, "final_norm": True} if request.param == "pre-norm" else {}))
    folder = build(model, tmp_path_factory.mktemp("peer"), special=ReferenceSpecialIds())
    with torch.inference_mode(), Peer(folder, threads=2) as peer:
        limits = Limits(max_source_length=40, max_target_length=40)
        yield TorchModel(model, limits=limits, attention_layer=model.config.decoder_layers - 1), peer


@pytest.fixture(scope="module", params=[24, pytest.param(200, marks=pytest.mark.full)])
def sources(request: pytest.FixtureRequest, pair: tuple[TorchModel, Peer]) -> list[list[int]]:
    generator, size = np.random.default_rng(3), pair[0].dimensions.source_vocabulary_size
    return [[*generator.integers(4, size, generator.integers(1, 12)).tolist(), 2] for _ in range(request.param)]


def close(model: TorchModel, options: dict[str, Any], ours: Hypothesis, theirs: PeerHypothesis) -> bool:
    """Two searches in float32; a repetition penalty multiplies what log-probabilities are off."""
    tokens = len(ours.tokens) + 1
    divisor = tokens ** options.get("length_penalty", 1.0)
    limit = score_limit(2 * log_prob_limit(model.model, LONGEST), tokens, divisor)
    limit *= max(1.0, options.get("repetition_penalty", 1.0))
    if (ours.attention is None) is not (theirs.attention is None):
        return False
    if ours.attention is not None and theirs.attention is not None:
        weights = np.array(theirs.attention).reshape(ours.attention.shape)
        assert model.attention_layer is not None
        weight = 2 * attention_limit(model.model, model.attention_layer, LONGEST)
        if not np.allclose(ours.attention, weights, atol=weight, rtol=0):
            return False
        # The coverage adds up the logarithms of what the source's tokens were attended to in all.
        shares = np.maximum(ours.attention.sum(0), weight)
        limit += options.get("coverage_penalty", 0.0) * float((len(ours.attention) * weight / shares).sum())
    return abs(ours.score - theirs.score) <= limit


def compare(
    pair: tuple[TorchModel, Peer], sources: list[list[int]], prefixes: list[list[int]] | None, options: dict[str, Any]
) -> None:
    model, peer = pair
    # CTranslate2's greedy search has the weights for a coverage penalty only if it returns them, and in its beam search
    # the padding of a batch counts as covered in part: one by one, nothing is padded.
    covered = "coverage_penalty" in options
    options = {"max_decoding_length": LONGEST, "return_attention": covered, **options}
    batch = 1 if covered else 32
    theirs = peer.translate(sources, target_prefix=prefixes, return_scores=True, max_batch_size=batch, **options)
    requests = [
        Request(source=s, target_prefix=p) for s, p in zip(sources, prefixes or [()] * len(sources), strict=True)
    ]
    special = SpecialIds(pad=0, bos=1, eos=2, source_ends_with_eos=True)
    ours = generate(model, requests, DecodeOptions(compatibility="ctranslate2", max_batch_size=100, **options), special)
    different = []
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        same = [h.tokens for h in a.hypotheses] == [h.tokens for h in b]
        if not same or not all(close(model, options, *both) for both in zip(a.hypotheses, b, strict=True)):
            different.append((i, prefixes and prefixes[i], a.hypotheses, b))
    assert not different, f"{len(different)} of {len(sources)} differ, the first: {different[0]}"


@pytest.mark.parametrize("case", CASES)
def test_same_tokens_and_scores(pair: tuple[TorchModel, Peer], sources: list[list[int]], case: str) -> None:
    compare(pair, sources, None, CASES[case])


@pytest.mark.parametrize("case", PREFIXED)
def test_same_tokens_and_scores_after_a_prefix(
    pair: tuple[TorchModel, Peer], sources: list[list[int]], case: str
) -> None:
    generator, size = np.random.default_rng(5), pair[0].dimensions.target_vocabulary_size
    prefixes = [generator.integers(4, size, generator.integers(1, 5)).tolist() for _ in sources]
    compare(pair, sources, prefixes, PREFIXED[case])
