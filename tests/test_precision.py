"""The table of precisions: what one row says twice agrees, and what else is written of precisions follows it."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from tfm_export.errors import RequestError
from tfm_export.passes.retype import TYPES
from tfm_export.precision import FLOATS, FLOATS_16_BIT, PRECISIONS
from tfm_export.quantize.options import METHODS, QuantizeOptions


def test_the_precisions_that_engines_compute_in_are_those_that_quantise_nothing() -> None:
    assert [*FLOATS] == [name for name, precision in PRECISIONS.items() if not precision.quantized]
    assert [PRECISIONS[name].weights for name in FLOATS] == ["float32", "float16", "bfloat16"]
    assert FLOATS_16_BIT == ("fp16", "bf16")
    assert TYPES == {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_row_agrees_with_itself(name: str) -> None:
    precision = PRECISIONS[name]
    assert precision.name == name
    assert precision.item_bytes == {"float32": 4, "float16": 2, "bfloat16": 2}[precision.float_type]
    # For people, the type comes first: "int8, blocks of 256", "float8 E4M3".
    assert precision.weights.replace("float8", "fp8").startswith(precision.weight_type)
    assert precision.compute.replace("float8", "fp8").startswith(
        precision.weight_type if precision.quantizes_activations else precision.float_type
    )
    assert precision.calibration in {None, *METHODS}


def test_options_are_for_the_precisions_whose_passes_take_them() -> None:
    for options, expected in (
        (QuantizeOptions(skip=["*"]), {"w8", "w4", "int8", "fp8"}),
        (QuantizeOptions(embeddings=False), {"w8", "w4", "int8", "fp8"}),
        (QuantizeOptions(method="max"), {"int8", "fp8"}),
        (QuantizeOptions(reduced_range=True), {"int8"}),
        (QuantizeOptions(int8_encoder=True), {"w8", "w4"}),
    ):
        taken = set()
        for name in PRECISIONS:
            try:
                options.check_effects(name)
            except RequestError:
                continue
            taken.add(name)
        assert taken == expected
