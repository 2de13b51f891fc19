"""Several steps in one go: the same results in the same steps as one at a time, where nobody needs to look between."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tests.decoding.fake_model import SPECIAL, FakeModel, FakeSentences, long_table, random_table
from tfm_export.decoding import DecodeOptions, Hypothesis, Request, Result, generate
from tfm_export.decoding.result import Reason

SOURCES = [tuple(int(t) for t in np.random.default_rng(i).integers(4, 40, 1 + i % 7)) for i in range(20)]
Answer = tuple[list[Hypothesis], Reason, int, int]


def answers(results: list[Result]) -> list[Answer]:
    return [(r.hypotheses, r.reason, r.statistics.steps, r.statistics.cache_bytes) for r in results]


def decode(runs_ahead: bool, options: DecodeOptions, requests: list[Request], **model: Any) -> tuple[Any, FakeModel]:
    fake = FakeModel(long_table(), 7, model.pop("candidates", 7), 60, runs_ahead=runs_ahead, **model)
    return answers(generate(fake, requests, options, SPECIAL)), fake


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("refill_at", [0.25, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        DecodeOptions(max_batch_size=1),
        DecodeOptions(max_batch_size=6, return_scores=True),
        DecodeOptions(max_batch_size=6, max_decoding_length=9, end_token=[2, 4]),
        DecodeOptions(max_batch_size=6, start_tokens=[1, 5, 6], target_prefix=[4, 5]),
        DecodeOptions(max_batch_size=6, forced_bos=3, return_end_token=True),
    ],
    ids=["alone", "batches", "ends", "prefix", "forced"],
)
def test_the_same_results_in_the_same_steps(options: DecodeOptions, refill_at: float, packs: bool) -> None:
    requests = [Request(source=source) for source in SOURCES]
    single, model = decode(False, options, requests, refill_at=refill_at, packs=packs)
    found, ahead = decode(True, options, requests, refill_at=refill_at, packs=packs)
    assert found == single
    assert (ahead.steps, ahead.rows_stepped, ahead.full_steps) == (model.steps, model.rows_stepped, model.full_steps)
    # All but those that take in a prompt; of several tokens beside rows that decode, it takes several steps.
    assert sum(ahead.runs) == ahead.steps - ahead.encodes or (refill_at < 1 and sum(ahead.runs) > 0.8 * ahead.steps)
    assert max(ahead.runs) > 3


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("refill_at", [0.25, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        DecodeOptions(beam_size=2),
        DecodeOptions(beam_size=3, num_hypotheses=3, max_batch_size=6),
        DecodeOptions(beam_size=3, patience=2.0, length_penalty=0.0, max_batch_size=1),
        DecodeOptions(beam_size=3, max_decoding_length=9, max_batch_size=6, return_end_token=True),
        DecodeOptions(beam_size=2, compatibility="huggingface", num_hypotheses=2, max_batch_size=1),
        DecodeOptions(beam_size=2, target_prefix=[4, 5], max_batch_size=6),
    ],
    ids=["beams", "several", "patient", "lengths", "huggingface", "prefix"],
)
def test_the_same_beams_in_the_same_steps(options: DecodeOptions, refill_at: float, packs: bool) -> None:
    requests = [Request(source=source) for source in SOURCES]
    single, model = decode(False, options, requests, refill_at=refill_at, packs=packs)
    found, ahead = decode(False, options, requests, refill_at=refill_at, packs=packs, ranks_beams=True)
    assert found == single
    assert (ahead.steps, ahead.rows_stepped, ahead.full_steps) == (model.steps, model.rows_stepped, model.full_steps)
    assert max(ahead.runs) > 1


@pytest.mark.parametrize(
    "options",
    [
        DecodeOptions(beam_size=3, return_logits_vocab=True),
        DecodeOptions(beam_size=3, min_decoding_length=4),
        DecodeOptions(beam_size=3, return_attention=True),
        DecodeOptions(beam_size=2),  # with end tokens among them, more candidates than a step names
    ],
    ids=["distributions", "length", "attention", "wide"],
)
def test_beams_are_ranked_here_where_something_is_done_between_two_steps(options: DecodeOptions) -> None:
    requests = [Request(source=s) for s in SOURCES[:3]]
    _, model = decode(False, options, requests, gives_attention=True, ranks_beams=True, candidates=3)
    assert model.steps > 3
    assert model.runs == []


@pytest.mark.parametrize(
    "options",
    [
        DecodeOptions(beam_size=2),
        DecodeOptions(sampling_topk=3, seed=1),
        DecodeOptions(return_logits_vocab=True),
        DecodeOptions(min_decoding_length=4),
        DecodeOptions(repetition_penalty=1.3, score_change="after_softmax"),
        DecodeOptions(return_attention=True),
    ],
    ids=["beams", "samples", "distributions", "length", "penalty", "attention"],
)
def test_searches_that_choose_after_every_step_take_them_one_at_a_time(options: DecodeOptions) -> None:
    _, model = decode(True, options, [Request(source=s) for s in SOURCES[:3]], gives_attention=True)
    assert model.steps > 3
    assert model.runs == []


def test_tokens_are_told_as_they_come() -> None:
    told: list[int] = []
    listening = Request(source=SOURCES[5], on_tokens=lambda tokens: told.append(len(tokens)))
    _, model = decode(True, DecodeOptions(), [Request(source=SOURCES[4]), listening])
    assert model.runs == []
    assert set(told) == {1}
    assert len(told) > 3


@dataclass
class After:
    """A cancellation that is set after it was asked so many times, once or from then on."""

    times: int
    once: bool = False

    def is_set(self) -> bool:
        self.times -= 1
        return self.times == -1 if self.once else self.times < 0


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("times", [0, 1, 2, 7, 15, 16, 17, 30])
def test_a_request_that_is_given_up_ends_at_its_next_step(times: int, once: bool) -> None:
    """It is asked once before each step: one at a time or not, it takes as many."""
    source, options = SOURCES[6], DecodeOptions(max_decoding_length=50)
    for runs_ahead in (False, True):
        model = FakeModel(random_table(5, sharpness=0.0), 5, 5, 60, runs_ahead=runs_ahead)  # the padding, for ever
        flags = [After(times, once), After(times + 5, once)]
        requests = [Request(source=source, cancelled=flag) for flag in flags]
        one, two = generate(model, requests, options, SPECIAL)
        assert one.reason is two.reason is Reason.CANCELLED
        assert one.statistics.steps == len(one.hypotheses[0].tokens) == times
        # It was asked before the step that the other's end put off, and again.
        assert two.statistics.steps == len(two.hypotheses[0].tokens) == model.steps == times + 4


def test_a_cancellation_of_one_ends_the_run_of_all() -> None:
    set_after, other = threading.Event(), Request(source=SOURCES[6])
    model = FakeModel(random_table(5, sharpness=0.0), 5, 5, 60, runs_ahead=True)
    step = FakeSentences.step

    def setting(self: FakeSentences, *arrays: Any, **options: Any) -> Any:
        if model.steps == 6:
            set_after.set()
        return step(self, *arrays, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeSentences, "step", setting)
        options = DecodeOptions(max_decoding_length=20)
        one, two = generate(model, [replace(other, cancelled=set_after), other], options, SPECIAL)
    assert (one.reason, one.statistics.steps) == (Reason.CANCELLED, 7)
    assert (two.reason, two.statistics.steps) == (Reason.LENGTH, 20)
