"""What is asked of a plan once it is loaded, which takes a GPU: on a stand-in for the runtime, and on the way there."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trt.conftest import build
from tfm_export.bundle import Bundle
from tfm_export.engines import read_engine
from tfm_export.errors import BuildError
from tfm_export.graph import cache_output_name
from tfm_export.trt import builder as builder_module
from tfm_export.trt import stage
from tfm_export.trt.flavor import Flavor, polygraphy
from tfm_export.trt.inspection import can_inspect, inspect_plan
from tfm_export.trt.network_source import NetworkSource
from tfm_export.trt.options import EngineOptions
from tfm_export.trt.stage import draw_blueprint

TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int64": "INT64", "bool": "BOOL"}


class Engine:
    """An ICudaEngine as the graph's table wants it."""

    device_memory_size_v2 = 123

    def __init__(self, source: NetworkSource) -> None:
        self.kinds = {spec.name: f"DataType.{TYPES[spec.dtype]}" for spec in (*source.inputs, *source.outputs)}
        self.aliases = {cache_output_name(spec.name): spec.name for spec in source.inputs}
        self.num_optimization_profiles = len(source.profiles)

    @property
    def num_io_tensors(self) -> int:
        return len(self.kinds)

    def get_tensor_name(self, index: int) -> str:
        return list(self.kinds)[index]

    def get_tensor_dtype(self, name: str) -> str:
        return self.kinds[name]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.aliases.get(name)

    def create_engine_inspector(self) -> Any:
        return SimpleNamespace(get_engine_information=lambda kind: f'{{"Layers": ["{kind}"]}}')


def with_gpu(engine: Engine | None, loaded: list[bytes]) -> Flavor:
    """A flavour whose runtime loads that engine."""

    def deserialize(content: mmap.mmap) -> Engine | None:
        loaded.append(content[:])
        return engine

    module = SimpleNamespace(
        Logger=type("Logger", (), {"ERROR": 1, "__init__": lambda *_: None}),
        Runtime=lambda _: SimpleNamespace(deserialize_cuda_engine=deserialize),
        LayerInformationFormat=SimpleNamespace(JSON="json"),
    )
    return Flavor(name="tensorrt", module=module, version="11.4", gpu="8.9")  # type: ignore[arg-type]


@pytest.fixture
def step(rtx: Flavor, tiny_variants: Path) -> NetworkSource:
    assert rtx.gpu is None or rtx.name == "rtx"
    options = EngineOptions(flavor="rtx", max_beam_size=2, max_target_length=20)
    return draw_blueprint(Bundle.open(tiny_variants), options).sources[-1]


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "decoder_step_48.plan"
    path.write_bytes(b"a plan")
    return path


def test_an_engine_as_it_should_be_gives_its_layers(step: NetworkSource, plan: Path) -> None:
    loaded: list[bytes] = []
    inspection = inspect_plan(with_gpu(Engine(step), loaded), step, plan)
    assert loaded == [b"a plan"]
    assert inspection.layers == '{"Layers": ["json"]}'
    assert inspection.device_memory_bytes == 123


def copied_cache(engine: Engine) -> None:
    del engine.aliases["self_value_1_out"]


def float_cache(engine: Engine) -> None:
    engine.kinds["self_key_0"] = "DataType.FLOAT"


def lost_input(engine: Engine) -> None:
    del engine.kinds["source_mask"]


def lost_profile(engine: Engine) -> None:
    engine.num_optimization_profiles = 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (copied_cache, "self_value_1_out must be the memory of self_value_1"),
        (float_cache, "self_key_0 must be float16, found float32"),
        (lost_input, "it has the inputs and outputs"),
        (lost_profile, "it has 1 profiles, expected 2"),
    ],
)
def test_an_engine_that_is_otherwise_is_told(
    step: NetworkSource, plan: Path, change: Callable[[Engine], None], message: str
) -> None:
    engine = Engine(step)
    change(engine)
    with pytest.raises(BuildError, match=message):
        inspect_plan(with_gpu(engine, []), step, plan)


def test_a_plan_that_does_not_load_is_told(step: NetworkSource, plan: Path) -> None:
    with pytest.raises(BuildError, match=r"does not load decoder_step_48\.plan, which it has just built"):
        inspect_plan(with_gpu(None, []), step, plan)


def test_only_where_there_is_a_gpu_that_it_is_for() -> None:
    flavor = with_gpu(None, [])
    assert can_inspect(flavor, ("8.6", "8.9"))
    assert not can_inspect(flavor, ("8.6",))
    assert not can_inspect(replace(flavor, gpu=None), ("8.9",))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TensorRT-RTX, which ignores timing caches
def test_the_way_of_tensorrt_ends_in_an_engine_with_its_layers(
    bundle: Bundle, rtx: Flavor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The real builder of TensorRT-RTX in the place of TensorRT's, which has the same calls; a stand-in loads the plan.

    A timing cache and an optimisation level are set, no GPU is named, and plans are not judged by their size.
    """
    flavor = Flavor(name="tensorrt", module=rtx.module, version="11.4.0", gpu="8.9")
    monkeypatch.setattr(stage, "open_flavor", lambda _: flavor)
    monkeypatch.setattr(builder_module, "polygraphy", lambda _: polygraphy(rtx))
    monkeypatch.setattr(
        stage, "inspect_plan", lambda _, source, plan: inspect_plan(with_gpu(Engine(source), []), source, plan)
    )
    timings = tmp_path / "timings"
    record = build(bundle, variant="fp16", builder_optimization_level=1, timing_cache=timings)
    assert (record.name, record.flavor, record.compute_capabilities) == ("fp16-tensorrt-sm89", "tensorrt", ("8.9",))
    assert [proof["stored_bytes"] for proof in record.proofs.values()] == [None, None]
    assert timings.stat().st_size > 0
    folder = bundle.path / "engines" / record.name
    assert (folder / "encoder.layers.json").read_text() == '{"Layers": ["json"]}'
    assert read_engine(Bundle.open(bundle.path), record.name) == record
    assert "--compute-capability" not in record.rebuild_command()
