"""The proof finds what is not as it should be: wrong types, caches that are copied, weights in other numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.trt.conftest import build, unchanged
from tfm_export.bundle import Bundle
from tfm_export.errors import BuildError
from tfm_export.passes.linears import add_initializer
from tfm_export.precision import PRECISIONS, Compute
from tfm_export.trt import proof as proof_module
from tfm_export.trt.flavor import Flavor
from tfm_export.trt.network_source import NetworkSource
from tfm_export.trt.options import EngineOptions
from tfm_export.trt.proof import Network, asked_product, expected_network, prove
from tfm_export.trt.stage import draw_blueprint


@pytest.fixture
def step(rtx: Flavor, tiny_variants: Path) -> Callable[[str], NetworkSource]:
    """The decoder step that would be compiled, by variant."""
    assert rtx.name == "rtx"

    def source(variant: str) -> NetworkSource:
        options = EngineOptions(variant=variant, flavor="rtx", max_beam_size=2, max_target_length=20)
        return draw_blueprint(Bundle.open(tiny_variants), options).sources[-1]

    return source


def plan_of(path: Path, weights: int, *, text: int = 200_000) -> Path:
    """A file with so many bytes of weights, and of kernels in text."""
    rng = np.random.default_rng(0)
    path.write_bytes(b"for (int i = 0; i < n; ++i) { y[i] = x[i]; }\n" * (text // 45) + rng.bytes(weights))
    return path


def problems(source: NetworkSource, variant: str, network: Network, plan: Path, compute: Compute = "fp16") -> str:
    with pytest.raises(BuildError) as caught:
        prove(source, variant, compute, network, plan, fused=True, readable=True)
    return str(caught.value)


def test_what_is_asked_for() -> None:
    assert {variant: asked_product(variant, "fp32" if variant == "fp32" else "bf16") for variant in PRECISIONS} == {
        "fp32": "float32 x float32",
        "fp16": "bfloat16 x bfloat16",
        "bf16": "bfloat16 x bfloat16",
        "w8": "bfloat16 x int8",
        "w4": "bfloat16 x int4",
        "int8": "int8 x int8",
        "fp8": "fp8 x fp8",
    }


def test_a_plan_that_is_as_it_should_be_passes(step: Callable[[str], NetworkSource], tmp_path: Path) -> None:
    source = step("int8")
    plan = plan_of(tmp_path / "plan", source.weight_bytes + 50_000)
    proof = prove(source, "int8", "fp16", expected_network(source.model), plan, fused=True, readable=True)
    assert proof.products == {"int8 x int8": 17}
    assert proof.caches == 4
    assert proof.stored_bytes == pytest.approx(source.weight_bytes + 50_000, abs=200)


@pytest.mark.parametrize("variant", ["fp16", "w8", "w4", "int8", "fp8"])
def test_a_network_of_float32_is_found(step: Callable[[str], NetworkSource], tmp_path: Path, variant: str) -> None:
    """What a tool that sets the flags of weak typing would build."""
    source = step(variant)
    expected = expected_network(source.model)
    network = replace(expected, products=Counter({"float32 x float32": sum(expected.products.values())}))
    text = problems(source, variant, network, plan_of(tmp_path / "plan", source.weight_bytes))
    assert "TensorRT's network " in text
    assert "float32 x float32" in text


def test_a_graph_that_was_never_quantised_is_found(step: Callable[[str], NetworkSource], tmp_path: Path) -> None:
    """Graph and network agree, and neither is what was asked for."""
    source = step("fp16")
    plan = plan_of(tmp_path / "plan", source.weight_bytes)
    text = problems(source, "int8", expected_network(source.model), plan)
    assert "0 of 17 products are int8 x int8; there are 17 float16 x float16" in text


def test_weights_that_are_not_dequantised_count_as_floats(step: Callable[[str], NetworkSource]) -> None:
    """A product whose weight is a float beside activations that are quantised is no product of 8 bits."""
    source = step("int8")
    node = next(n for n in source.model.graph if n.op_type == "Gemm")
    weight = add_initializer(source.model, "plain", np.zeros((64, 64), np.float16))
    node.replace_input_with(1, weight)
    assert expected_network(source.model).products == {"int8 x int8": 16, "int8 x float16": 1}


def test_attention_in_another_type_is_found(step: Callable[[str], NetworkSource], tmp_path: Path) -> None:
    source = step("fp16")
    network = replace(expected_network(source.model), attention=Counter({"float32": 4}))
    text = problems(source, "fp16", network, plan_of(tmp_path / "plan", source.weight_bytes))
    assert "the graph has attention in 4 float16, TensorRT's network 4 float32" in text
    assert "0 of 4" not in text


def test_a_cache_that_is_copied_is_found(step: Callable[[str], NetworkSource], tmp_path: Path) -> None:
    source = step("fp16")
    network = replace(expected_network(source.model), caches=frozenset({"self_key_0", "self_value_0", "self_key_1"}))
    text = problems(source, "fp16", network, plan_of(tmp_path / "plan", source.weight_bytes))
    assert "not updated in place: self_value_1" in text


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_weights_in_numbers_of_another_size_are_found(
    step: Callable[[str], NetworkSource], tmp_path: Path, factor: float
) -> None:
    """On a model that is large enough: 16 MB of weights."""
    source = step("fp16")
    add_initializer(source.model, "wide_table", np.zeros((8_000_000,), np.float16))
    plan = plan_of(tmp_path / "plan", int(factor * source.weight_bytes))
    text = problems(source, "fp16", expected_network(source.model), plan)
    assert f"its weights take {factor * source.weight_bytes / 1e6:,.2f} MB, and the graph's" in text


def test_more_kernels_are_not_more_weights(step: Callable[[str], NetworkSource], tmp_path: Path) -> None:
    source = step("fp16")
    plan = plan_of(tmp_path / "plan", source.weight_bytes, text=9_000_000)
    prove(source, "fp16", "fp16", expected_network(source.model), plan, fused=True, readable=True)


def test_a_plan_that_cannot_be_read_is_not_judged_by_its_size(
    step: Callable[[str], NetworkSource], tmp_path: Path
) -> None:
    """TensorRT's own plans hold compiled kernels."""
    source = step("fp16")
    plan = plan_of(tmp_path / "plan", 9 * source.weight_bytes)
    proof = prove(source, "fp16", "fp16", expected_network(source.model), plan, fused=True, readable=False)
    assert proof.stored_bytes is None


def test_all_that_is_wrong_is_told_at_once(step: Callable[[str], NetworkSource], tmp_path: Path) -> None:
    source = step("fp16")
    network = Network(products=Counter(), attention=Counter(), caches=frozenset())
    text = problems(source, "fp16", network, plan_of(tmp_path / "plan", 9_000_000))
    for expected in ("TensorRT's network none", "not updated in place: self_key_0", "its weights take"):
        assert expected in text


def test_text_is_told_from_weights(tmp_path: Path) -> None:
    path = plan_of(tmp_path / "plan", 100_000, text=450_000)
    assert proof_module._text_bytes(path) == pytest.approx(450_000, abs=200)
    path.write_bytes(np.random.default_rng(0).standard_normal(50_000).astype(np.float16).tobytes())
    assert proof_module._text_bytes(path) == 0
    path.write_bytes(np.random.default_rng(0).integers(-127, 128, 100_000).astype(np.int8).tobytes())
    assert proof_module._text_bytes(path) == 0


def test_a_pass_that_forgets_the_types_is_found_by_a_real_build(
    bundle: Bundle, rtx: Flavor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs of fp32 under the name of fp16: it builds, and is not what was asked for."""
    assert rtx.name == "rtx"

    def never(bundle: Bundle, file: str, *_: object) -> tuple[ir.Model, dict[str, str]]:
        return ir.load(bundle.variant_path("fp32") / file), {}

    monkeypatch.setattr("tfm_export.trt.network_source._derive", never)
    monkeypatch.setattr("tfm_export.trt.network_source.check_profiles", lambda *_: None)
    with unchanged(bundle), pytest.raises(BuildError, match="encoder is not what was asked for: 0 of"):
        build(bundle, variant="fp16")
