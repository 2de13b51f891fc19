"""Adapters as people write them, all the way: export, mistakes that are found, variants, engines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor

from tests.export.idioms import ATTENTIONS, IDS, LINES, POSITIONS, Idiom
from tests.trt.conftest import build, rtx
from tfm_export import graph
from tfm_export.bundle import Bundle
from tfm_export.errors import ParityError
from tfm_export.export import export_bundle
from tfm_export.graph_files import read_graph
from tfm_export.passes.retype import WHOLE_NUMBERS
from tfm_export.quantize.options import QuantizeOptions
from tfm_export.quantize.stage import quantize_bundle
from tfm_export.trt.flavor import Flavor
from tfm_export.verify import ParityReport, cpu_model

__all__ = ["rtx"]

CASES = [*((name, "learned") for name in ATTENTIONS), *(("sdpa_bool", name) for name in POSITIONS if name != "learned")]
QUICK = {("where_infinity", "learned"), ("times_a_billion", "learned"), ("sdpa_bool", "rotary_in_float32")}
JUDGED = QuantizeOptions(keep=True, min_agreement=0.0, target="tensorrt")  # numbers are compared here, and no speed


def export(folder: Path, adapter: Idiom) -> tuple[Bundle, ParityReport]:
    torch.save(adapter.state_dict(), folder / "model.pt")
    bundle, report = export_bundle(
        folder / "model.pt",
        folder / "bundle",
        settings=IDS,
        adapter=lambda _: adapter,
        inputs=LINES[:6],
        max_target_length=12,
    )
    assert report is not None
    return bundle, report


@dataclass
class Numbers:
    """What a variant gives for sentences with a lot of padding: cross-attention keys, and log-probabilities."""

    cross: np.ndarray
    log_probs: np.ndarray


def numbers(bundle: Bundle, variant: str) -> Numbers:
    ids, mask = np.full((3, 20), 5), np.arange(20) < np.array([[1], [7], [20]])
    with cpu_model(bundle, variant) as model:
        sentences = model.encode(ids, mask, capacity=8)
        sees = np.zeros((3, 1, 2, 8), np.bool_)
        sees[:, :, 0, 1] = sees[:, :, 1, 1:3] = True  # a slot is no position: the first one is empty
        step = sentences.step(np.full((3, 2), 4), np.tile(np.arange(2), (3, 1)), np.ones(3, np.int64), sees, full=True)
        assert step.log_probs is not None
        return Numbers(np.where(mask[:, None, :, None], sentences.read("cross_key_0"), 0), step.log_probs.copy())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "positions"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.full) for case in CASES],
)
def test_every_idiom_becomes_every_kind_of_variant(tmp_path: Path, attention: str, positions: str) -> None:
    bundle, report = export(tmp_path, Idiom(attention, positions))
    assert report.passed
    exact = numbers(bundle, "fp32")
    for precision in ("fp16", "bf16", "int8", "w8"):
        made = quantize_bundle(Bundle.open(bundle.path), precision, JUDGED)
        found = numbers(Bundle.open(bundle.path), precision)
        for name in ("cross", "log_probs"):
            x, y = getattr(found, name), getattr(exact, name)
            assert np.isfinite(x).all(), (precision, name)
            # 8 bits of precision lose a few hundredths at most here; a mask that does not mask, or a wrong angle, loses
            # as much as there is.
            assert np.abs(x - y).max() < 0.1 * np.abs(y).max(), (precision, name)
        if precision == "fp16":
            kept = " ".join(f"{value}: {reason}" for value, reason in made.kept.items())
            assert ("reaches 1e+09, and float16 ends at 65504" in kept) == (
                attention in {"times_a_billion", "sdpa_billion"}
            )
            assert (f"decoder_step/{WHOLE_NUMBERS}" in made.kept) == (
                attention.startswith(("times", "where", "sdpa_inf", "sdpa_bil"))
                or positions in {"sinusoids", "rotary", "rotary_in_float32"}
            )
    infinities = [
        value.const_value.numpy()
        for value in read_graph(bundle.path / "onnx/fp16" / graph.DECODER_STEP).graph.initializers.values()
        if value.const_value is not None and value.dtype in {ir.DataType.FLOAT, ir.DataType.FLOAT16}
    ]
    assert any(np.isneginf(x).any() for x in infinities) == ("infinity" in attention or attention == "zeros_filled")


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["where_infinity", pytest.param("times_a_billion", marks=pytest.mark.full)])
def test_engines_are_built_of_idioms(rtx: Flavor, tmp_path: Path, attention: str) -> None:
    assert rtx.name == "rtx"
    bundle, _ = export(tmp_path, Idiom(attention, "sinusoids"))
    quantize_bundle(Bundle.open(bundle.path), "fp16", JUDGED)
    for variant in ("fp32", "fp16"):
        sizes = {"max_batch_size": 2, "max_source_length": 12, "max_target_length": 12, "capacities": (16,)}
        record = build(Bundle.open(bundle.path), variant=variant, **sizes)
        assert record.proofs.keys() == {"encoder", "decoder_step_16", "decoder_step_32"}


RIGHT = ("sinusoid_buffer", "rotary", "rotary_in_float32")


@pytest.mark.parametrize(
    ("attention", "positions"), [*(("sdpa_bool", name) for name in RIGHT), ("times_a_billion", "sinusoid_buffer")]
)
def test_tables_and_float32_inside_are_no_false_alarm_and_hide_no_mistake(
    tmp_path: Path, attention: str, positions: str
) -> None:
    """Whole numbers, as of masks, are the same in float32: they make no graph less exact."""
    _, report = export(tmp_path, Idiom(attention, positions))
    assert report.passed
    kernels = {c.name: c.rounding for c in report.kernels}
    shares = [c.rounding / kernels[c.name] for c in report.graph]
    # Only where the code rounds to float32 itself may its graph be as far off as kernels.
    assert (max(shares) == 1) == (positions == "rotary_in_float32"), shares


@pytest.mark.parametrize("positions", RIGHT)
@pytest.mark.parametrize("wrong", ["position", "order", "padding", "projection"])
def test_a_wrong_step_is_refused_and_the_hint_says_what_to_compare(tmp_path: Path, positions: str, wrong: str) -> None:
    with pytest.raises(ParityError) as caught:
        export(tmp_path, Idiom("masked_fill_infinity", positions, wrong))
    assert not (tmp_path / "bundle").exists()
    text = str(caught.value)
    assert "log_probs: the graph is not the model" in text
    assert "adapter.decode_with_cache(target_ids, memory, source_mask)[0]" in text
    assert "report this" not in text


class Counting(Idiom):
    """Its memory depends on how often it was called."""

    calls = 0

    def encode(self, source_ids: Tensor, source_mask: Tensor) -> Tensor:
        self.calls += 1
        return super().encode(source_ids, source_mask) * self.calls


class TakesSlotsForPositions(Idiom):
    def decode_step(self, target_ids: Tensor, positions: Tensor, self_mask: Tensor, *others: Any) -> Tensor:
        empty = 1 - self_mask[:, 0, :, 0].long()  # slots before the first one
        return super().decode_step(target_ids, (positions + empty).clamp(max=23), self_mask, *others)


@pytest.mark.parametrize(("adapter", "first"), [(Counting, "cross_key_0"), (TakesSlotsForPositions, "self_key_0")])
def test_the_hint_names_the_tensor_that_differs_first(tmp_path: Path, adapter: type[Idiom], first: str) -> None:
    with pytest.raises(ParityError, match=rf"Try: {first} is the first that differs: look at ") as caught:
        export(tmp_path, adapter())
    assert any(p.startswith(f"{first}: the graph is not the model") and p.endswith(")") for p in caught.value.problems)
