"""Real models: the append-only search against the reference's, which runs the whole decoder at every step."""

from __future__ import annotations

import pytest
import torch

from reference_model import search
from tests.benchmarks.random_models import CONFIGURATIONS, LENGTH, SPECIAL, random_model, random_sources
from tests.numerics import log_prob_limit, score_limit
from tfm_export.bundle import SpecialIds
from tfm_export.decoding import DecodeOptions, generate, score
from tfm_export.runtime.torch_model import TorchModel

OURS = SpecialIds(pad=SPECIAL.pad, bos=SPECIAL.bos, eos=SPECIAL.eos, source_ends_with_eos=True)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize(("beam_size", "length_penalty"), [(1, 1.0), (2, 1.0), (4, 1.0), (4, 0.5)])
def test_same_tokens_and_log_probs_as_the_reference(configuration: str, beam_size: int, length_penalty: float) -> None:
    model, sources = random_model(**CONFIGURATIONS[configuration]), random_sources()
    options = DecodeOptions(
        beam_size=beam_size,
        num_hypotheses=beam_size,
        length_penalty=length_penalty,
        max_decoding_length=LENGTH,
        max_batch_size=3,
    )
    results, limit = generate(TorchModel(model), sources, options, OURS), 2 * log_prob_limit(model, LENGTH)
    for source, result in zip(sources, results, strict=True):
        ids = torch.tensor(source)
        if beam_size == 1:
            expected = search.greedy(model, ids[None], torch.ones(1, len(source), dtype=torch.bool), SPECIAL, LENGTH)
        else:
            expected = search.beam(model, ids, SPECIAL, LENGTH, beam_size, length_penalty)
        assert [h.tokens for h in result.hypotheses] == [h.tokens for h in expected]
        for ours, theirs in zip(result.hypotheses, expected, strict=True):
            tokens = len(theirs.log_probs)
            assert ours.log_probs == pytest.approx(theirs.log_probs, rel=0, abs=limit)
            score = theirs.normalised_score(length_penalty)
            assert ours.score == pytest.approx(score, rel=0, abs=score_limit(limit, tokens, tokens**length_penalty))


def test_scores_are_what_the_search_said() -> None:
    model, sources = random_model(), random_sources()
    options = DecodeOptions(beam_size=3, max_decoding_length=LENGTH, return_end_token=True)
    best = [result.hypotheses[0] for result in generate(TorchModel(model), sources, options, OURS)]
    found = score(TorchModel(model), sources, [h.tokens for h in best], OURS, max_batch_size=3, add_end_token=False)
    for hypothesis, scores in zip(best, found, strict=True):
        assert scores == pytest.approx(hypothesis.log_probs, rel=0, abs=2 * log_prob_limit(model, LENGTH))
