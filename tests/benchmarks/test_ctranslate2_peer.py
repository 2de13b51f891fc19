"""CTranslate2 built from our weights says what the reference says: only then is it a peer, and an oracle."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reference_model import Transformer, search
from reference_model.checkpoint import Checkpoint, GenerationDefaults, SpecialIds
from reference_model.vocabulary import Vocabulary

pytest.importorskip(
    "ctranslate2", reason="needs ctranslate2: run `.venv/bin/pip install -e '.[bench]' -c constraints.txt`"
)

from benchmarks.peers.ctranslate2 import Peer, build, translate
from tests.benchmarks.random_models import (
    CONFIGURATIONS,
    LENGTH,
    SPECIAL,
    random_model,
    random_sources,
    reference_greedy,
)
from tests.numerics import log_prob_limit, score_limit


@pytest.mark.parametrize("fields", CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())
def test_greedy_gives_the_tokens_and_scores_of_the_reference(fields: dict[str, Any], tmp_path: Path) -> None:
    model, sources = random_model(**fields), random_sources()
    expected = reference_greedy(model, sources)
    with Peer(build(model, tmp_path), threads=1) as peer:
        found = peer.translate(sources, max_decoding_length=LENGTH, return_scores=True, length_penalty=0)
    assert [hypotheses[0].tokens for hypotheses in found] == [hypothesis.tokens for hypothesis in expected]
    limit = score_limit(2 * log_prob_limit(model, LENGTH), LENGTH)
    scores = [hypotheses[0].score for hypotheses in found]
    assert scores == pytest.approx([h.score for h in expected], rel=0, abs=limit)


def test_the_cases_above_vary() -> None:
    cases = [
        h for fields in CONFIGURATIONS.values() for h in reference_greedy(random_model(**fields), random_sources())
    ]
    assert {hypothesis.finished for hypothesis in cases} == {True, False}
    assert len({tuple(hypothesis.tokens) for hypothesis in cases}) > len(cases) / 2


def test_beam_gives_the_n_best_list_of_the_reference(tmp_path: Path) -> None:
    model, source = random_model(), random_sources()[1]
    expected = search.beam(model, torch.tensor(source), SPECIAL, LENGTH, beam_size=3)
    found = translate(
        build(model, tmp_path), [source], beam_size=3, num_hypotheses=3, max_decoding_length=LENGTH, return_scores=True
    )[0]
    assert [h.tokens for h in found] == [h.tokens for h in expected]
    limit = 2 * log_prob_limit(model, LENGTH)  # a score is their mean
    assert [h.score for h in found] == pytest.approx([h.normalised_score(1.0) for h in expected], rel=0, abs=limit)


@torch.inference_mode()
def eight_bits_explain(model: Transformer, source: list[int]) -> float:
    """How far the first token's log-probabilities are moved by 8 bits: weights by the row, inputs by the token."""

    def rounded(x: Tensor) -> Tensor:
        step = x.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        return (x / step).round() * step

    def log_probs(model: Transformer) -> Tensor:
        mask = torch.ones(1, len(source), dtype=torch.bool)
        return model(torch.tensor([source]), mask, torch.tensor([[SPECIAL.bos]])).log_softmax(-1)

    coarse = copy.deepcopy(model)
    for module in coarse.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _module, inputs: (rounded(inputs[0]),))
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.copy_(rounded(module.weight))
    return (log_probs(coarse) - log_probs(model)).abs().max().item()


def test_int8_stays_near(tmp_path: Path) -> None:
    model, sources = random_model(), random_sources()
    # The best token's log-probability: it changes little even where another token becomes the best.
    options: dict[str, Any] = {"max_decoding_length": 1, "return_scores": True, "length_penalty": 0}
    exact = translate(build(model, tmp_path / "float32"), sources, threads=1, **options)
    near = translate(build(model, tmp_path / "int8", "int8"), sources, threads=1, **options)
    assert (tmp_path / "int8" / "model.bin").stat().st_size < 0.5 * (tmp_path / "float32" / "model.bin").stat().st_size
    differences = [abs(a[0].score - b[0].score) for a, b in zip(exact, near, strict=True)]
    assert 0 < max(differences) <= 3 * max(eight_bits_explain(model, source) for source in sources)


def test_a_checkpoint_brings_its_vocabularies_and_special_ids(tmp_path: Path) -> None:
    names = ("</s>", "<go>", "<pad>", *"abcdefghijklmnopqrstuvwxyz0")
    special = SpecialIds(pad=2, bos=1, eos=0)
    checkpoint = Checkpoint(
        model=random_model(target_vocabulary_size=30),
        source_vocabulary=Vocabulary(names, "characters"),
        target_vocabulary=Vocabulary(tuple(name.upper() if len(name) == 1 else name for name in names), "words"),
        special_ids=special,
        generation=GenerationDefaults(max_length=LENGTH),
    )
    source = [5, 6, 7, 0]
    [expected] = search.greedy(
        checkpoint.model, torch.tensor([source]), torch.ones(1, 4, dtype=torch.bool), special, LENGTH
    )
    with Peer(build(checkpoint, tmp_path), threads=1) as peer:
        assert (peer.source_tokens[5], peer.target_tokens[5]) == ("c", "C")
        assert peer.translate([source], max_decoding_length=LENGTH)[0][0].tokens == expected.tokens
        forced = peer.translate([source], max_decoding_length=LENGTH, target_prefix=[[9, 8]])[0][0].tokens
    assert forced[:2] == [9, 8]


def test_special_tokens_with_two_names_are_refused(tmp_path: Path) -> None:
    source = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(27))]
    target = ["<pad>", "<s>", "<eos>", *(f"w{i}" for i in range(27))]
    with pytest.raises(ValueError, match="eos is '</s>' in the source and '<eos>' in the target"):
        build(random_model(target_vocabulary_size=30), tmp_path / "model", tokens=(source, target))
    assert not (tmp_path / "model").exists()
