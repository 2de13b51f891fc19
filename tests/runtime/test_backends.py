"""Which backend is chosen: what a request leaves, what runs here, in an order that depends on nothing else."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tfm_export
from tests.emulation import Machine, emulated_gpu
from tests.emulation.engines import add_engine
from tests.emulation.onnx_cuda import Provider, emulated_provider
from tests.runtime.conftest import Backends
from tfm_export import extras
from tfm_export.bundle import Bundle
from tfm_export.errors import BackendUnavailable, BundleError, RequestError
from tfm_export.runtime import backends as module
from tfm_export.runtime.backends import BackendChoice, backend_choices, open_backend, survey
from tfm_export.runtime.cpu.onnx_runtime import OnnxModel
from tfm_export.runtime.gpu.onnx_cuda import OnnxCudaModel
from tfm_export.runtime.gpu.tensorrt_model import TensorRTModel

CPU = BackendChoice(variant="fp32")
GPU = BackendChoice(variant="fp32", gpu=0)


@contextmanager
def gpu_machine(gpus: int = 2, provider: Provider | None = None) -> Iterator[Machine]:
    """A machine with GPUs, on which the package of ONNX Runtime for them is installed."""
    provider = provider or Provider()
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(module, "_has_cuda_provider", lambda: "CUDAExecutionProvider" in provider.providers)
        yield stack.enter_context(emulated_provider(Machine(gpus=gpus), provider))


@pytest.fixture
def plain(backends: Backends) -> Bundle:
    """A bundle without engines."""
    return backends.bundle


@pytest.fixture
def engines(backends: Backends, tmp_path: Path) -> Bundle:
    """A bundle with engines, of which "late" is of a variant that is further from fp32 than the other's."""
    bundle = Bundle(shutil.copytree(backends.bundle.path, tmp_path / "bundle"), backends.bundle.manifest)
    bundle.manifest = replace(bundle.manifest, variants={"fp32": {}, "fp16": {}, "int8": {}})
    add_engine(bundle, "late", variant="int8", float_type="float16")
    add_engine(bundle, "early", variant="fp16", float_type="float16")
    return bundle


def test_a_machine_without_a_gpu_takes_the_cpu(plain: Bundle, engines: Bundle) -> None:
    assert backend_choices(plain) == [CPU]
    chosen, model = open_backend(plain)
    assert (chosen, type(model)) == (CPU, OnnxModel)
    assert str(chosen) == "fp32 with ONNX Runtime on the CPU"
    chosen, model = open_backend(engines)
    assert (chosen, type(model)) == (CPU, OnnxModel)


def test_with_a_gpu_an_engine_comes_first_then_the_provider_then_the_cpu(plain: Bundle, engines: Bundle) -> None:
    with gpu_machine():
        assert [str(choice) for choice in backend_choices(engines)] == [
            "the TensorRT engine early (fp16) on GPU 0",
            "the TensorRT engine early (fp16) on GPU 1",
            "the TensorRT engine late (int8) on GPU 0",
            "the TensorRT engine late (int8) on GPU 1",
            "fp32 with ONNX Runtime on GPU 0",
            "fp32 with ONNX Runtime on the CPU",
        ]
        assert backend_choices(plain) == [GPU, CPU]
        chosen, model = open_backend(engines)
        assert (chosen.engine, chosen.gpu, type(model)) == ("early", 0, TensorRTModel)
        model.close()
        chosen, model = open_backend(plain)
        assert (chosen, type(model)) == (GPU, OnnxCudaModel)
        model.close()


ASKED: dict[str, tuple[dict[str, Any], list[BackendChoice]]] = {
    "the CPU": ({"device": "cpu"}, [CPU]),
    "a GPU": (
        {"device": 1},
        [
            BackendChoice(variant="fp16", gpu=1, engine="early"),
            BackendChoice(variant="int8", gpu=1, engine="late"),
            BackendChoice(variant="fp32", gpu=1),
        ],
    ),
    "a GPU by its name": ({"device": "cuda:1", "backend": "onnxruntime"}, [BackendChoice(variant="fp32", gpu=1)]),
    "a GPU by its number": ({"device": "1", "backend": "onnxruntime"}, [BackendChoice(variant="fp32", gpu=1)]),
    "the first GPU": ({"device": "cuda", "backend": "onnxruntime"}, [GPU]),
    "ONNX Runtime": ({"backend": "onnxruntime"}, [GPU, CPU]),
    "ONNX Runtime on the CPU": ({"backend": "onnxruntime", "device": "cpu"}, [CPU]),
    "an engine": (
        {"backend": "tensorrt", "device": 0},
        [BackendChoice(variant="fp16", gpu=0, engine="early"), BackendChoice(variant="int8", gpu=0, engine="late")],
    ),
    "a variant": (
        {"variant": "int8", "device": 0},
        [BackendChoice(variant="int8", gpu=0, engine="late"), BackendChoice(variant="int8", gpu=0)],
    ),
    "fp32, of which there is no engine": ({"variant": "fp32"}, [GPU, CPU]),
    "the fastest": (
        {"variant": "auto", "device": 0},
        [
            BackendChoice(variant="fp16", gpu=0, engine="early"),
            BackendChoice(variant="int8", gpu=0, engine="late"),
            BackendChoice(variant="fp16", gpu=0),
        ],
    ),
    "the fastest on the CPU": ({"variant": "auto", "device": "cpu"}, [CPU]),
}


@pytest.mark.parametrize("what", ASKED)
def test_a_request_leaves_some(engines: Bundle, what: str) -> None:
    request, expected = ASKED[what]
    with gpu_machine():
        assert backend_choices(engines, **request) == expected


def test_auto_is_the_fastest_variant_by_the_speeds_that_the_bundle_records(engines: Bundle) -> None:
    variants = {"fp32": {}, "int8": {"speed": 2.5}, "w8": {"speed": 1.5}}
    engines.manifest = replace(engines.manifest, variants=variants)
    assert backend_choices(engines, variant="auto", device="cpu") == [BackendChoice(variant="int8")]
    assert backend_choices(engines, variant="auto", device=0)[-1] == GPU  # the provider has no kernels for these


def test_a_draft_leaves_onnx_runtime_on_the_cpu(engines: Bundle) -> None:
    variants = {"fp32": {}, "int8": {"speed": 2.5}, "w8": {"speed": 1.5}, "bf16": {}}
    engines.manifest = replace(engines.manifest, variants=variants)
    with gpu_machine():
        for request in ({}, {"device": "cpu"}, {"backend": "onnxruntime"}, {"variant": "fp32"}):
            (way,) = backend_choices(engines, draft="w8", **request)
            assert way == BackendChoice(variant="fp32", draft="w8")
            assert str(way) == "fp32 with ONNX Runtime on the CPU, its tokens guessed by w8"
        assert backend_choices(engines, draft="w8", variant="auto") == [BackendChoice(variant="int8", draft="w8")]
        for request in ({"device": 0}, {"backend": "tensorrt"}):
            with pytest.raises(RequestError, match="guesses tokens for ONNX Runtime on the CPU only"):
                backend_choices(engines, draft="w8", **request)
    with pytest.raises(RequestError, match="the draft of int8 must be another variant") as error:
        backend_choices(engines, variant="int8", draft="int8")
    assert error.value.hint == "one of fp32, w8"
    with pytest.raises(BackendUnavailable, match="CPU provider cannot run bf16") as error:
        open_backend(engines, draft="bf16")
    assert error.value.hint == "another variant: fp32, int8, w8"
    with pytest.raises(BundleError, match="has no variant 'w4'"):
        backend_choices(engines, draft="w4")


def test_a_draft_needs_another_variant(plain: Bundle) -> None:
    with pytest.raises(RequestError, match="must be another variant") as error:
        open_backend(plain, draft="fp32")
    assert error.value.hint == "tfm-export quantize makes one"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"backend": "torch"}, "backend must be one of auto, onnxruntime, tensorrt, found 'torch'"),
        ({"device": -1}, "device must be None"),
        ({"device": True}, "device must be None"),
        ({"device": "cuda:x"}, "found 'cuda:x'"),
        ({"device": "cuda:"}, "found 'cuda:'"),
        ({"device": "gpu"}, "found 'gpu'"),
        ({"device": "9" * 5000}, "device must be None"),
        ({"device": "²"}, "device must be None"),
        ({"device": 1.5}, "found 1.5"),
        ({"backend": "tensorrt", "device": "cpu"}, "TensorRT engines run on GPUs only"),
    ],
)
def test_a_request_that_means_nothing(plain: Bundle, request_: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        backend_choices(plain, **request_)


def test_a_variant_that_the_bundle_lacks(plain: Bundle) -> None:
    with pytest.raises(BundleError, match="has no variant 'w8'; it has fp32"):
        open_backend(plain, variant="w8")


def test_an_engine_that_the_bundle_lacks(plain: Bundle, engines: Bundle) -> None:
    with pytest.raises(BackendUnavailable, match="has no TensorRT engine; it has none") as error:
        open_backend(plain, backend="tensorrt")
    assert error.value.hint == f"tfm-export trt {plain.path} --fp16 makes one"
    with pytest.raises(BackendUnavailable, match=r"no TensorRT engine of fp32; it has early \(fp16\), late \(int8\)"):
        open_backend(engines, backend="tensorrt", variant="fp32")


def test_what_was_asked_for_and_is_not_there_is_an_error_that_says_why(engines: Bundle) -> None:
    with pytest.raises(BackendUnavailable, match=r"^the NVIDIA driver found no GPU\n"), emulated_gpu(Machine(gpus=0)):
        open_backend(engines, device=0)
    too_old = r"the NVIDIA driver is for CUDA 12\.8, cuda-python for CUDA 13\.0"
    with pytest.raises(BackendUnavailable, match=too_old), emulated_gpu(driver=12080):
        open_backend(engines, backend="tensorrt", variant="fp16")
    with pytest.raises(BackendUnavailable) as error, gpu_machine(provider=Provider(version="1.25.0")):
        open_backend(engines, device=0, variant="fp32")
    assert error.value.problems == [
        "expected onnxruntime-gpu 1.27 or newer, found 1.25.0: its CUDA provider lacks operators that the graphs have"
    ]
    with pytest.raises(BackendUnavailable) as error, gpu_machine(provider=Provider(works=False)):
        open_backend(engines, device=5)
    assert error.value.problems[0].startswith("there is no GPU 5; there are 0 (Emulated GPU 0), 1")
    with pytest.raises(BackendUnavailable, match="there is no GPU 7"), gpu_machine():
        open_backend(engines, device=7, backend="onnxruntime")


def test_engines_for_others_are_passed_over_with_a_warning(
    backends: Backends, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = Bundle(shutil.copytree(backends.bundle.path, tmp_path / "bundle"), backends.bundle.manifest)
    add_engine(bundle, "for_another_gpu", compute_capabilities=("12.0",))
    add_engine(bundle, "of_another_version", flavor_version="10.0.0")
    add_engine(bundle, "stale")
    record = bundle.path / "engines/stale/engine.json"
    record.write_text(record.read_text().replace('"onnx/fp32/encoder.onnx": "', '"onnx/fp32/encoder.onnx": "0'))
    with gpu_machine(gpus=1):
        chosen, model = open_backend(bundle)
        model.close()
    assert chosen == GPU
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.partition(" is not used: ")[0].split()[3] for text in warnings] == [
        "for_another_gpu",
        "of_another_version",
        "stale",
    ]
    assert "8.9" in warnings[0]
    assert "10.0.0" in warnings[1]
    with gpu_machine(gpus=1), pytest.raises(BackendUnavailable) as error:
        open_backend(bundle, backend="tensorrt")
    assert len(error.value.problems) == 3


def test_a_gpu_that_cannot_be_used_is_a_warning_and_none_at_all_is_not(
    plain: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with gpu_machine(provider=Provider(works=False)):
        assert open_backend(plain)[0] == CPU
    assert ("WARNING", "fp32 with ONNX Runtime on GPU 0 is not used: ") in [
        (record.levelname, record.getMessage()[:45]) for record in caplog.records
    ]
    caplog.clear()
    with gpu_machine(gpus=0):
        assert open_backend(plain)[0] == CPU
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert caplog.messages[-1] == "fp32 with ONNX Runtime on the CPU is used"


def test_a_damaged_graph_is_an_error_whatever_else_there_is(plain: Bundle, tmp_path: Path) -> None:
    bundle = Bundle(shutil.copytree(plain.path, tmp_path / "bundle"), plain.manifest)
    (bundle.variant_path("fp32") / "encoder.onnx").write_bytes(b"nothing")
    with gpu_machine(), pytest.raises(BundleError, match="cannot be loaded"):
        open_backend(bundle)


def test_what_the_cpu_has_no_kernels_for(plain: Bundle) -> None:
    bundle = Bundle(plain.path, replace(plain.manifest, variants={"fp32": {}, "bf16": {}}))
    with pytest.raises(BackendUnavailable, match="ONNX Runtime's CPU provider cannot run bf16") as error:
        open_backend(bundle, variant="bf16", device="cpu")
    assert "another variant: fp32" in str(error.value)


def test_the_survey_has_every_way_and_why_it_is_none(engines: Bundle) -> None:
    with gpu_machine(gpus=1, provider=Provider(version="1.26.0")):
        found = {str(way): problem for way, problem in survey(engines)}
    assert len(found) == 2 + 3 + 3
    assert found["the TensorRT engine late (int8) on GPU 0"] is None
    assert found["fp16 with ONNX Runtime on the CPU"] is None
    assert "1.27 or newer, found 1.26.0" in str(found["fp32 with ONNX Runtime on GPU 0"])
    without = {str(way): problem for way, problem in survey(engines)}
    assert "no NVIDIA driver" in str(without["the TensorRT engine late (int8) on GPU 0"])


def test_the_survey_survives_what_breaks_in_an_unheard_of_way(plain: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("what")

    monkeypatch.setattr(BackendChoice, "check", broken)
    monkeypatch.setattr(module.cuda, "devices", broken)
    assert {str(problem) for _, problem in survey(plain)} == {"KeyError: 'what'"}


def test_load_passes_the_request_on(plain: Bundle, engines: Bundle) -> None:
    plain.save()
    engines.save()
    with gpu_machine():
        with tfm_export.load(engines.path, variant="int8", check_hashes=False) as model:
            assert model.backend == "the TensorRT engine late (int8) on GPU 0"
            results = model.generate_ids([[4, 5, 2]], max_decoding_length=5)[0].hypotheses[0].tokens
        with tfm_export.load(plain.path, device="cuda:1") as model:
            assert model.backend == "fp32 with ONNX Runtime on GPU 1"
            assert model.generate_ids([[4, 5, 2]], max_decoding_length=5)[0].statistics.steps
        with tfm_export.load(plain.path, backend="onnxruntime", device="cpu", threads=1) as model:
            assert model.backend == "fp32 with ONNX Runtime on the CPU"
            assert model.generate_ids([[4, 5, 2]], max_decoding_length=5)[0].hypotheses[0].tokens == results


def test_a_cpu_is_taken_without_a_look_at_cuda(plain: Bundle) -> None:
    plain.save()
    script = (
        "import sys, tfm_export\n"
        "tfm_export.load(sys.argv[1], threads=1).close()\n"
        "print([name for name in sys.modules if name.startswith(('cuda', 'tensorrt'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, plain.path],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == "[]\n"


def test_without_any_onnx_runtime_that_is_the_only_complaint(plain: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise BackendUnavailable("onnxruntime is not installed", "pip install 'tfm-export[cpu]'")

    for place in (module, extras):
        monkeypatch.setattr(place, "require_onnxruntime", missing)
    with pytest.raises(BackendUnavailable) as error:
        open_backend(plain)
    assert str(error.value) == "onnxruntime is not installed\nTry: pip install 'tfm-export[cpu]'"
