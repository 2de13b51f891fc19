"""Attention, for those who ask for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tfm_export
import tfm_export.tokenizer
from tests.conftest import build_tiny_model
from tests.numerics import near
from tfm_export import RequestError
from tfm_export.bundle import Bundle
from tfm_export.model import Model, TextRequest
from tfm_export.runtime.step_model import WrappedModel
from tfm_export.runtime.torch_model import TorchModel


class Attending(WrappedModel):
    """The tiny model of PyTorch, which makes one that gives attention, and counts how often."""

    def __init__(self, limits: Any) -> None:
        self.reference = build_tiny_model(0, norm_first=True, final_norm=True)
        super().__init__(TorchModel(self.reference, limits=limits))
        self.capabilities = replace(self.capabilities, offers_attention=True)
        self.attending = TorchModel(self.reference, limits=limits, attention_layer=1)
        self.made = 0

    def with_attention(self) -> Any:
        self.made += 1
        return self.attending


@pytest.fixture
def attending(model: Model) -> Model:
    """A model that gives attention, and has an unknown token."""
    manifest = model.bundle.manifest
    bundle = Bundle(model.bundle.path, replace(manifest, special_ids=replace(manifest.special_ids, unk=3)))
    return Model(bundle, Attending(manifest.limits), tfm_export.tokenizer.load_tokenizer(bundle))


def test_attention_is_loaded_when_it_is_wanted_and_once(attending: Model) -> None:
    assert attending.generate("hello").hypotheses[0].attention is None
    assert attending.step_model.made == 0
    for _ in range(2):
        best = attending.generate(["a", "hello"], return_attention=True)[1].hypotheses[0]
        assert best.attention.shape == (len(best.tokens), 6)
        assert best.attention.sum(1) == near(np.ones(len(best.tokens)))
    assert attending.generate("hello", beam_size=2, coverage_penalty=0.2).hypotheses
    assert attending.step_model.made == 1


def test_unknown_tokens_are_replaced_by_what_they_attend_to(attending: Model) -> None:
    request = TextRequest(text="Naïve", target_prefix=[3, 5, 3])
    plain = attending.generate(request, return_attention=True)
    weights = plain.hypotheses[0].attention[:, :5]  # the end token is no word
    expected = plain.text.split()
    assert [expected[0], expected[2]] == ["<unk>", "<unk>"]
    expected[0], expected[2] = ("Naïve"[i] for i in weights[[0, 2]].argmax(1))
    replaced = attending.generate(request, replace_unknowns=True)
    assert replaced.text.split() == expected
    assert replaced.tokens == plain.tokens


def test_a_bundle_without_the_graph_for_attention_says_how_to_get_it(model: Model) -> None:
    with pytest.raises(
        RequestError, match=r"decoder_step_attention\.onnx.*\nTry: tfm-export onnx CHECKPOINT --attention"
    ):
        model.generate("hello", return_attention=True)
