"""Models of other families: relative positions as a bias in attention's mask, root mean squares, gates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.export.conftest import CONFIGURATIONS, FULL_CONFIGURATIONS, Exported
from tests.runtime.drive import whole_target
from tests.trt.conftest import build, unchanged
from tests.trt.test_ranges import compiled
from tests.trt.variants import bundle_of
from tfm_export.errors import BuildError
from tfm_export.precision import PRECISIONS
from tfm_export.runtime.cpu.onnx_runtime import OnnxModel
from tfm_export.trt.network_source import derive_sources
from tfm_export.trt.options import EngineOptions
from tfm_export.trt.stage import resolve_limits

SOURCE, TARGET = [4, 3, 4, 3, 2], [1, 4, 3, 3, 4]
QUICK = {("relative", "fp16"), ("learned", "int8"), ("learned", "w4")}
QUICK_NUMBERS = {("tied", "fp16"), ("relative", "fp16"), ("learned", "w8")}
ODD = {"relative", "learned"}  # models of 45 and 33: an odd number of 4-bit weights


@pytest.mark.usefixtures("rtx")
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        pytest.param(name, variant, marks=[] if (name, variant) in QUICK else pytest.mark.full)
        for name in (*CONFIGURATIONS, *FULL_CONFIGURATIONS)
        for variant in PRECISIONS
    ],
)
def test_every_configuration_in_every_precision(
    export_configuration: Callable[[str], Exported], tmp_path: Path, name: str, variant: str
) -> None:
    """Layers and caches are counted by the build itself; attention with a bias in its mask is fused as any other."""
    exported = export_configuration(name)
    dimensions = exported.bundle.manifest.dimensions
    bundle = bundle_of(exported, tmp_path / "b", *({variant} - {"fp32"}))
    if variant == "w4" and name in ODD:
        with unchanged(bundle), pytest.raises(BuildError, match="TensorRT takes even numbers of them"):
            build(bundle, variant=variant)
        return
    record = build(bundle, variant=variant)
    fused = variant != "fp32" and dimensions.heads > 1  # RTX has no kernel for one head
    assert record.attention == ("fused" if fused else "decomposed")
    assert record.head_size_padded == dimensions.padded(record.float_type).head_size
    step = record.proofs["decoder_step_48"]
    assert sum(step["attention"].values()) == step["caches"] == 2 * dimensions.decoder_layers


@pytest.mark.full
@pytest.mark.usefixtures("rtx")
def test_an_odd_number_of_4_bit_weights_does_not_compile(
    export_configuration: Callable[[str], Exported], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundle_of(export_configuration("learned"), tmp_path / "b", "w4")
    monkeypatch.setattr("tfm_export.trt.refusals._4_BITS", set())
    with unchanged(bundle), pytest.raises(BuildError, match="odd tensor volume is not supported"):
        build(bundle, variant="w4")


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        pytest.param(name, variant, marks=[] if (name, variant) in QUICK_NUMBERS else pytest.mark.full)
        for name in (*CONFIGURATIONS, *FULL_CONFIGURATIONS)
        for variant in ("fp16", "w8")
    ],
)
def test_the_graphs_that_are_compiled_give_the_models_numbers(
    export_configuration: Callable[[str], Exported], tmp_path: Path, name: str, variant: str
) -> None:
    exported = export_configuration(name)
    bundle = bundle_of(exported, tmp_path / "b", variant)
    limits = resolve_limits(bundle, EngineOptions(variant=variant, max_beam_size=2))
    sources = derive_sources(bundle, variant, "fp16", limits, [48])
    with compiled(bundle, sources, tmp_path / "engine") as model:
        found = whole_target(model, SOURCE, TARGET)
    stored = OnnxModel(bundle, variant="fp32" if variant == "fp16" else variant, threads=1, exact=variant != "fp16")
    # Measured over all configurations: up to 0.077, what rounding to 16 bits costs models as sharp as these.
    assert np.abs(found - whole_target(stored, SOURCE, TARGET)).max() < 0.15
    stored.close()
