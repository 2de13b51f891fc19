"""The two verdicts on single numbers: right graphs and kernels pass with room to spare, and broken ones do not."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch import nn

from tests.checkpoints.test_adapter import Alibi
from tests.export.conftest import Exported
from tests.verify.mutants import MUTANTS
from tfm_export.bundle import Limits
from tfm_export.checkpoints import Adapter
from tfm_export.cli.checkpoint_adapter import load_factory
from tfm_export.export.variant import write_fp32_variant
from tfm_export.graph import DECODER_STEP, ENCODER, WEIGHTS, Dimensions
from tfm_export.graph_files import WeightsFile, read_graph
from tfm_export.precision import FLOAT32_EPSILON, TIMES_ROUNDING
from tfm_export.runtime.cpu.onnx_runtime import OnnxModel
from tfm_export.verify import float64
from tfm_export.verify.float64 import Float64Graph, Float64Model, Float64Sentences, Moves
from tfm_export.verify.reference import Reference, float64_reference
from tfm_export.verify.steps import (
    RANDOM_CASES,
    SteppedModel,
    StepsComparison,
    TeacherForcing,
    compare_steps,
    teacher_forcing,
)

CUSTOM_MODEL = Path(__file__).parents[2] / "examples/custom_model"
Array = NDArray[Any]


def few_cases(sizes: Dimensions, limits: Limits) -> Iterator[tuple[str, TeacherForcing]]:
    """With padding, several tokens at once, and single ones."""
    for case in RANDOM_CASES[:1]:
        source, target = min(case["source"], limits.max_source_length), min(case["target"], limits.max_target_length)
        yield "random ids", TeacherForcing.random(sizes, **{**case, "source": source, "target": target})


def compare(
    exported: Exported,
    *,
    folder: Path | None = None,
    model: SteppedModel | None = None,
    reference: Reference | None = None,
    everything: bool = False,
) -> StepsComparison:
    sizes, limits = exported.bundle.manifest.dimensions, exported.bundle.manifest.limits
    return compare_steps(
        folder or exported.folder,
        sizes,
        teacher_forcing(sizes, limits, [], 1) if everything else few_cases(sizes, limits),
        model=model,
        reference=None if reference is None else float64_reference(reference),
    )


# Graphs.


def assert_right(comparison: StepsComparison, layers: int, most: float = 1 / 3) -> None:
    assert len(comparison.graph) == 4 * layers + 2
    for tensor in comparison.graph:
        assert tensor.share <= most, tensor
        assert tensor.limit == TIMES_ROUNDING * tensor.rounding


def test_graphs_are_pytorch_in_float64(exported: Exported) -> None:
    comparison = compare(exported, reference=exported.model, everything=True)
    assert_right(comparison, exported.model.config.decoder_layers)


@pytest.fixture
def custom_model() -> Iterator[Adapter]:
    """The example's, untrained."""
    before, path = {*sys.modules}, [*sys.path]
    load_factory(f"{CUSTOM_MODEL / 'adapter.py'}:load")
    sys.path.insert(0, str(CUSTOM_MODEL))
    from importlib import import_module

    adapter = import_module("adapter").CustomAdapter(import_module("model").Model(29))
    yield adapter.eval()
    sys.path[:] = path
    for name in {"model", "adapter"} - before:
        sys.modules.pop(name, None)


def judge_adapter(adapter: Adapter, folder: Path) -> StepsComparison:
    sizes = write_fp32_variant(adapter, folder)
    config = adapter.config
    limits = Limits(max_source_length=config.max_length, max_target_length=config.max_target_length)
    cases = teacher_forcing(sizes, limits, [], 1)
    return compare_steps(folder, sizes, cases, reference=float64_reference(adapter))


def test_graphs_of_an_adapter_are_pytorch_in_float64(tmp_path: Path) -> None:
    assert_right(judge_adapter(Alibi().eval(), tmp_path / "fp32"), 1)


def test_graphs_of_the_example_are_pytorch_in_float64(custom_model: Adapter, tmp_path: Path) -> None:
    # Its norms' epsilon is that of the float type, 1.2e-7 in the graph and 2.2e-16 in PyTorch's float64.
    assert_right(judge_adapter(custom_model, tmp_path / "fp32"), 2, most=1.0)


CASES = [(name, configuration) for name, (_, _, some) in MUTANTS.items() for configuration in some]


@pytest.mark.parametrize(("mutant", "configuration"), CASES)
def test_a_graph_that_is_broken_in_one_place_fails(
    export_configuration: Callable[[str], Exported],
    tmp_path: Path,
    mutant: str,
    configuration: str,
    record_property: Callable[[str, object], None],
) -> None:
    exported = export_configuration(configuration)
    change, file, _ = MUTANTS[mutant]
    broken = tmp_path / "broken"
    broken.mkdir()
    weights = WeightsFile(broken / WEIGHTS)
    for name in (ENCODER, DECODER_STEP):
        model = read_graph(exported.folder / name)
        if name == file:
            change(model)
        weights.write(model, broken / name)
    comparison = compare(exported, folder=broken, reference=exported.model)
    worst = max(comparison.graph, key=lambda tensor: tensor.share)
    record_property("share", f"{worst.share:.3g}")
    assert not worst.passed, worst
    assert next(tensor for tensor in comparison.graph if tensor.name == "log_probs").share > 1


# Kernels.


@pytest.mark.parametrize("threads", [1, 2])
def test_onnx_runtime_computes_the_graphs(
    exported: Exported, threads: int, record_property: Callable[[str, object], None]
) -> None:
    model = OnnxModel(exported.bundle, threads=threads)
    comparison = compare(exported, model=model, everything=True)
    worst = max(comparison.kernels, key=lambda tensor: tensor.share)
    record_property("share", f"{worst.share:.3g}")
    assert len(comparison.kernels) == 4 * exported.model.config.decoder_layers + 2
    assert 0 < worst.share <= 1 / 3, worst
    assert comparison.graph == []


def test_constants_are_what_they_were_before_they_were_rounded() -> None:
    """Roots of model widths and head sizes, some of which have six digits that round to the same float32."""
    for whole in range(1, 5000):
        for number in (whole**0.5, whole**-0.5, -(whole**0.5)):
            assert float64.meant_by(float(np.float32(number))) == pytest.approx(number, rel=1e-15)
    for number in (1e-5, 1e-6, 0.3, 1e9, 0.044715):
        assert float64.meant_by(float(np.float32(number))) == number


def bits_kept(array: Any, bits: int) -> Any:
    """Floats rounded to some bits behind the first one."""
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
        return array
    fraction, exponent = np.frexp(array)
    return np.ldexp(np.rint(np.ldexp(fraction, bits + 1)), exponent - bits - 1)


class RoundedProducts(Float64Graph):
    """Products whose factors are rounded on the way in, as faster kernels do it."""

    bits = 10

    def _run(self, node: Any, inputs: list[Any], values: dict[str, Any]) -> tuple[Any, ...]:
        if node.op_type in {"Gemm", "MatMul", "Attention"}:
            inputs = [bits_kept(x, self.bits) for x in inputs]
        return super()._run(node, inputs, values)


class BFloat16Cross(Float64Model):
    """Cross-attention keys and values that were stored in 16 bits on their way to the decoder."""

    def encode(self, *arrays: Any, capacity: int) -> Float64Sentences:
        sentences = super().encode(*arrays, capacity=capacity)
        sentences._cross = {name: bits_kept(array, 7) for name, array in sentences._cross.items()}
        return sentences


class ScaledLogProbs(Float64Model):
    """Log-probabilities that are a thousandth too large."""

    def encode(self, *arrays: Any, capacity: int) -> Float64Sentences:
        sentences = super().encode(*arrays, capacity=capacity)
        run = sentences._decoder_step.run

        class Scaled:
            def run(self, feeds: dict[str, Array]) -> dict[str, Array]:
                found = run(feeds)
                return {n: x * 1.001 if n.endswith("log_probs") else x for n, x in found.items()}

        sentences._decoder_step = Scaled()  # type: ignore[assignment]
        return sentences


@pytest.mark.parametrize(
    "kernel", ["TF32 or float16 products", "bfloat16 products", "bfloat16 cross-attention", "log_probs"]
)
def test_kernels_that_round_to_less_fail(
    exported: Exported,
    kernel: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    kinds = {"bfloat16 cross-attention": BFloat16Cross, "log_probs": ScaledLogProbs}
    manifest = exported.bundle.manifest
    bits = {"TF32 or float16 products": 10, "bfloat16 products": 7}.get(kernel)
    with monkeypatch.context() as patch:
        if bits is not None:
            monkeypatch.setattr(RoundedProducts, "bits", bits)
            patch.setattr(float64, "Float64Graph", RoundedProducts)
        model = kinds.get(kernel, Float64Model).read(exported.folder, manifest.dimensions)
    comparison = compare(exported, model=model)
    worst = max(comparison.kernels, key=lambda tensor: tensor.share)
    record_property("share", f"{worst.share:.3g}")
    assert not worst.passed, worst
    shares = {tensor.name: tensor.share for tensor in comparison.kernels}
    seen = "cross_" if kernel == "bfloat16 cross-attention" else "log_probs"
    assert max(share for name, share in shares.items() if name.startswith(seen)) > 1


def test_the_graphs_in_float64_are_off_by_nothing_from_themselves(
    export_configuration: Callable[[str], Exported],
) -> None:
    exported = export_configuration("paper")
    manifest = exported.bundle.manifest
    model = Float64Model.read(exported.folder, manifest.dimensions)
    comparison = compare(exported, model=model)
    assert {tensor.error for tensor in comparison.kernels} == {0.0}
    assert comparison.argmax_agreement == 1
    assert min(tensor.rounding for tensor in comparison.kernels) > 0
    assert comparison.rounding == {tensor.name: tensor.rounding for tensor in comparison.kernels}


def test_a_table_of_sinusoids_may_be_another_processors(export_configuration: Callable[[str], Exported]) -> None:
    """It is computed anew, in float32, wherever a checkpoint is read; a table that is shifted is no rounding."""
    exported = export_configuration("paper")
    sizes, folder = exported.bundle.manifest.dimensions, exported.folder
    model = copy.deepcopy(exported.model)

    def passed(where: Path | None) -> bool:
        cases = few_cases(sizes, exported.bundle.manifest.limits)
        found = compare_steps(folder, sizes, cases, reference=float64_reference(model, where))
        return all(tensor.passed for tensor in found.graph)

    tables = {part: getattr(model, part).table for part in ("source_positions", "target_positions")}
    for part, table in tables.items():
        getattr(model, part).table = torch.nextafter(table, torch.full_like(table, 2.0))
    assert not passed(None)
    assert passed(folder)
    for part, table in tables.items():
        getattr(model, part).table = table.roll(1, 0)
    assert not passed(folder)


# Operators.


def one_operator(path: Path, operator: str, arrays: dict[str, Array], **attributes: Any) -> Path:
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name, x in arrays.items()]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    node = helper.make_node(operator, [*arrays], ["y"], **attributes)
    model = helper.make_model(
        helper.make_graph([node], "one", inputs, outputs), opset_imports=[helper.make_opsetid("", 24)], ir_version=11
    )
    onnx.save(model, path)
    return path


RANDOM = torch.Generator().manual_seed(0)
X, WEIGHT, BIAS = (torch.randn(size, generator=RANDOM, dtype=torch.double) for size in ((3, 5, 8), (8,), (8,)))
OPERATORS: dict[str, tuple[dict[str, Any], tuple[torch.Tensor, ...], Callable[..., torch.Tensor]]] = {
    "Erf": ({}, (X,), torch.erf),
    "Gelu": ({}, (X,), nn.functional.gelu),
    "Gelu, tanh": ({"approximate": "tanh"}, (X,), lambda x: nn.functional.gelu(x, approximate="tanh")),
    "LogSoftmax": ({}, (X * 300,), lambda x: x.log_softmax(-1)),
    "LayerNormalization": (
        {"epsilon": 0.25},
        (X, WEIGHT, BIAS),
        lambda x, w, b: nn.functional.layer_norm(x, (8,), w, b, 0.25),
    ),
    "RMSNormalization": ({"epsilon": 0.25}, (X, WEIGHT), lambda x, w: nn.functional.rms_norm(x, (8,), w, 0.25)),
}


def test_what_a_graph_stores_is_not_moved(tmp_path: Path) -> None:
    """The square of a negative number, whose exponent is a constant: with another one it is no number."""
    node = helper.make_node("Pow", ["x", "two"], ["y"])
    value = (
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [None]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [None]),
    )
    two = helper.make_tensor("two", TensorProto.FLOAT, [], [2.0])
    proto = helper.make_graph([node], "one", [value[0]], [value[1]], [two])
    onnx.save(
        helper.make_model(proto, opset_imports=[helper.make_opsetid("", 24)], ir_version=11), tmp_path / "one.onnx"
    )
    graph = Float64Graph.read(tmp_path / "one.onnx").moved(Moves(results=FLOAT32_EPSILON))
    found = graph.run({"x": np.array([-3.0, 5.0], np.float32)})["y"]
    assert found != pytest.approx([9, 25], rel=1e-9)
    assert found == pytest.approx([9, 25], rel=4 * FLOAT32_EPSILON)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_in_float64_are_pytorchs(tmp_path: Path, name: str) -> None:
    attributes, tensors, function = OPERATORS[name]
    arrays = {f"x{i}": tensor.numpy() for i, tensor in enumerate(tensors)}
    path = one_operator(tmp_path / "one.onnx", name.partition(",")[0], arrays, **attributes)
    expected = function(*tensors).numpy()
    exact, moved = (
        Float64Graph.read(path).moved(moves).run(arrays)["y"] for moves in (Moves(), Moves(results=FLOAT32_EPSILON))
    )
    explained = np.abs(moved - exact).max()
    assert explained > 0
    # The epsilon of a norm is a float32 in the graph; here it has few digits.
    assert np.abs(exact - expected).max() <= TIMES_ROUNDING * explained * 2.0**-29
