"""What the stage builds is what the engine runtime expects: names, sizes, profiles.

Real plans cannot be run without a GPU. Here emulated ones take their places, with the shapes that they were built for.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.emulation import Machine, emulated_gpu
from tests.emulation.engines import write_plans
from tests.export.conftest import Exported
from tests.trt.conftest import build
from tests.trt.test_stage import bundle_of
from tfm_export.bundle import Bundle
from tfm_export.decoding import DecodeOptions, generate
from tfm_export.engines import read_engine
from tfm_export.runtime.gpu.tensorrt_model import TensorRTModel
from tfm_export.runtime.torch_model import TorchModel
from tfm_export.trt.flavor import Flavor


def load_emulated(bundle: Bundle, name: str, machine: Machine) -> TensorRTModel:
    """An engine of a bundle on the emulated GPU."""
    record = read_engine(bundle, name)
    write_plans(bundle, record)
    with emulated_gpu(machine):
        sys.modules["tensorrt_rtx"].__version__ = record.flavor_version
        return TensorRTModel(bundle, name)


def test_an_engine_decodes_as_pytorch_does(engine_bundle: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    from reference_model import load_checkpoint

    bundle, machine = Bundle.open(shutil.copytree(engine_bundle, tmp_path / "bundle")), Machine()
    model = load_emulated(bundle, "fp16-rtx", machine)
    assert (model.max_batch_size, model.limits.max_source_length) == (4, 12)
    exact = TorchModel(load_checkpoint(tiny_checkpoint).model, limits=model.limits)
    sources = [[5, 9, 7, 2], [8, 2], [4, 6, 11, 12, 13, 14, 2], [20, 2], [17, 18, 2]]
    for beam in (1, 3):
        options = DecodeOptions(beam_size=beam, max_batch_size=4, max_decoding_length=18)
        found, expected = (generate(m, sources, options, bundle.manifest.special_ids) for m in (model, exact))
        assert [r.hypotheses[0].tokens for r in found] == [r.hypotheses[0].tokens for r in expected]
    model.close()
    assert machine.leaks() == machine.violations == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tied", {"variant": "fp16"}),  # heads of 20, padded to 24
        ("heads of 7", {"variant": "bf16", "capacities": (9,)}),
        ("heads of 12, vocabularies of 7 and 5", {"variant": "fp32", "max_batch_size": 3}),
        ("one head", {"variant": "fp16", "max_beam_size": 1, "max_batch_size": 1}),
        ("paper", {"variant": "fp32", "max_beam_size": 8, "max_target_length": 5}),  # more beams than tokens
    ],
)
def test_engines_of_any_form_decode(
    rtx: Flavor, export_configuration: Callable[[str], Exported], tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    assert rtx.name == "rtx"
    exported, machine = export_configuration(name), Machine()
    bundle = bundle_of(exported, tmp_path / "b", *({options["variant"]} - {"fp32"}))
    record = build(bundle, name="any", **options)
    model = load_emulated(bundle, "any", machine)
    exact = TorchModel(exported.model, limits=model.limits, candidates=model.dimensions.candidates)
    size = model.dimensions.source_vocabulary_size
    sources = [[3 + i % (size - 3), 2] * (1 + i % 3) for i in range(7)]
    for beam in {1, min(record.max_beam_size, model.dimensions.target_vocabulary_size)}:
        decode = DecodeOptions(
            beam_size=beam, max_batch_size=record.max_batch_size, max_decoding_length=model.limits.max_target_length
        )
        found, expected = (generate(m, sources, decode, bundle.manifest.special_ids) for m in (model, exact))
        differ = sum(a.hypotheses[0].tokens != b.hypotheses[0].tokens for a, b in zip(found, expected, strict=True))
        assert differ <= (0 if record.compute == "fp32" else 2)  # random weights, rounded caches: ties
    model.close()
    assert machine.leaks() == machine.violations == []
