"""One model of random weights, exported once, on every backend."""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from reference_model import Transformer
from tests.conftest import build_tiny_model
from tests.emulation import emulated_gpu
from tests.emulation.engines import add_engine
from tests.emulation.onnx_cuda import emulated_provider
from tests.once import Once
from tfm_export.bundle import Bundle, GenerationDefaults, Limits, Manifest, SpecialIds
from tfm_export.export.variant import dimensions_of, write_fp32_variant
from tfm_export.runtime.backends import attending_on_cpu
from tfm_export.runtime.cpu.onnx_runtime import OnnxModel
from tfm_export.runtime.gpu.onnx_cuda import OnnxCudaModel
from tfm_export.runtime.gpu.tensorrt_model import TensorRTModel
from tfm_export.runtime.speculative import SpeculativeModel
from tfm_export.runtime.step_model import StepModel
from tfm_export.runtime.torch_model import TorchModel

LIMITS = Limits(max_source_length=40, max_target_length=50)
ATTENTION_LAYER = 1


@dataclass(frozen=True)
class Backends:
    """The same weights on every backend; `exact` computes in float64, and those of GPUs run on an emulated one."""

    bundle: Bundle
    onnx: OnnxModel
    torch: TorchModel
    exact: TorchModel
    tensorrt: TensorRTModel
    onnx_cuda: OnnxCudaModel
    speculative: SpeculativeModel
    with_engine: Bundle


def in_float64(model: Transformer, limits: Limits) -> TorchModel:
    return TorchModel(copy.deepcopy(model).double(), limits=limits)


@pytest.fixture(scope="session")
def backends(once: Once) -> Backends:
    model = build_tiny_model(seed=3, norm_first=True, final_norm=True, decoder_layers=3, encoder_layers=1)
    manifest = Manifest(
        dimensions=dimensions_of(model),
        limits=LIMITS,
        special_ids=SpecialIds(pad=0, bos=1, eos=2, source_ends_with_eos=True),
        generation=GenerationDefaults(max_length=LIMITS.max_target_length),
        variants={"fp32": {}},
    )

    def make(folder: Path) -> None:
        write_fp32_variant(model, folder / "onnx" / "fp32", attention_layer=ATTENTION_LAYER)

    def add(folder: Path) -> None:
        shutil.copytree(bundle.path, folder, dirs_exist_ok=True)
        add_engine(Bundle(folder, manifest))

    bundle = Bundle(once("runtime", make), manifest)
    with_engine = Bundle.open(once("runtime_with_engine", add), check_hashes=False)
    exact = in_float64(model, LIMITS)
    with emulated_gpu():
        engine = TensorRTModel(with_engine, "emulated")
    with emulated_provider():
        onnx_cuda = OnnxCudaModel(bundle, attending=partial(attending_on_cpu, bundle, "fp32"))
    onnx = OnnxModel(bundle, threads=1)
    return Backends(
        bundle=bundle,
        onnx=onnx,
        torch=TorchModel(model, limits=LIMITS),
        exact=exact,
        tensorrt=engine,
        onnx_cuda=onnx_cuda,
        speculative=SpeculativeModel(onnx, onnx, {2}),
        with_engine=with_engine,
    )


@pytest.fixture(params=["onnx", "torch", "tensorrt", "onnx_cuda", "speculative"])
def step_model(request: pytest.FixtureRequest, backends: Backends) -> StepModel:
    """Each backend in turn."""
    model: StepModel = getattr(backends, request.param)
    return model
