"""Whether one generation may be another but for rounding: log-probabilities are moved a little, and decoded again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tfm_export.bundle import SpecialIds
from tfm_export.decoding import DecodeOptions, generate
from tfm_export.runtime.step_model import (
    Floats,
    Ids,
    Mask,
    Sentences,
    StepModel,
    StepOutput,
    WrappedModel,
    WrappedSentences,
)

TRIALS = 16


def tie_distance(
    model: StepModel,
    source: Sequence[int],
    options: DecodeOptions,
    special: SpecialIds,
    tokens: Sequence[int],
    *,
    most: float,
) -> float:
    """By how much log-probabilities must differ from each other for a search to give other tokens.

    A search with beams has many near choices on its way, and which of them decided is not to be seen at its end. So
    every log-probability of every step is moved up or down at random, by more in every trial.

    Args:
        model: what runs the steps.
        source: its ids.
        options: how to decode.
        special: the model's special ids.
        tokens: that the search is to give.
        most: the largest difference to try.

    Returns:
        How far two log-probabilities were moved apart where the search gave them; infinite if it never did.
    """
    for trial in range(TRIALS):
        distance = most * (trial + 1) / (TRIALS + 1)
        (result,) = generate(_MovedModel(model, distance / 2, trial), [source], options, special)
        if result.tokens == list(tokens):
            return distance
    return math.inf


class _MovedModel(WrappedModel):
    """Gives log-probabilities that are moved up or down at random.

    Args:
        model: whose.
        amount: by which each is moved.
        seed: of the signs.
    """

    def __init__(self, model: StepModel, amount: float, seed: int) -> None:
        super().__init__(model)
        self.capabilities = replace(model.capabilities, steps_greedily=False, steps_beams=False)
        self.amount, self.random = amount, np.random.default_rng(seed)

    def encode(self, source_ids: Ids, source_mask: Mask, *, capacity: int) -> Sentences:
        """Run the encoder."""
        return _MovedSentences(super().encode(source_ids, source_mask, capacity=capacity), self)

    def close(self) -> None:
        """The model is its owner's to close."""


class _MovedSentences(WrappedSentences):
    def __init__(self, sentences: Sentences, model: _MovedModel) -> None:
        super().__init__(sentences)
        self._model = model

    def step(
        self, target_ids: Ids, positions: Ids, write_index: Ids, self_mask: Mask, *, full: bool = False
    ) -> StepOutput:
        del full  # every one of them is moved
        output = self._sentences.step(target_ids, positions, write_index, self_mask, full=True)
        assert output.log_probs is not None, "a step was asked for its log_probs"
        signs = self._model.random.integers(0, 2, output.log_probs.shape) * 2 - 1
        log_probs: Floats = (output.log_probs + self._model.amount * signs).astype(np.float32)
        count = output.top_ids.shape[-1]
        ids = np.argsort(-log_probs, axis=-1, kind="stable")[..., :count]
        return replace(output, top_log_probs=np.take_along_axis(log_probs, ids, -1), top_ids=ids, log_probs=log_probs)
