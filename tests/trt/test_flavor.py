"""The two libraries: which is taken, what it builds for, what it ignores, how it is set up."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tfm_export.errors import BackendUnavailable, BuildError
from tfm_export.runtime.gpu import cuda
from tfm_export.runtime.gpu.cuda import Device
from tfm_export.trt import flavor as flavor_module
from tfm_export.trt.flavor import Flavor, open_flavor, polygraphy
from tfm_export.trt.options import EngineOptions, compute_capability

CAPABILITIES = ("NONE", "CURRENT", "SM75", "SM80", "SM86", "SM89", "SM120", "SM121")


def library(name: str, version: str, *, layers: bool = True) -> ModuleType:
    """A module that looks like one of the two."""
    module = ModuleType(name)
    module.__version__ = version  # type: ignore[attr-defined]
    module.BuilderFlag = SimpleNamespace(TF32="TF32")  # type: ignore[attr-defined]
    module.ProfilingVerbosity = SimpleNamespace(DETAILED="DETAILED")  # type: ignore[attr-defined]
    module.MemoryPoolType = SimpleNamespace(WORKSPACE="WORKSPACE")  # type: ignore[attr-defined]
    if name == "tensorrt_rtx":
        members = {capability: f"<{capability}>" for capability in CAPABILITIES}
        module.ComputeCapability = SimpleNamespace(__members__=members)  # type: ignore[attr-defined]
    if layers:
        module.IKVCacheUpdateLayer = module.IAttentionInputLayer = object  # type: ignore[attr-defined]
    return module


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes libraries and a GPU seem to be there: `installed(tensorrt="11.4", rtx="1.7", gpu="9.0")`."""

    def install(*, gpu: str | None = None, layers: bool = True, **versions: str) -> None:
        for name, (module, _) in flavor_module.MODULES.items():
            there = library(module, versions[name], layers=layers) if name in versions else None
            monkeypatch.setitem(sys.modules, module, there)  # None: importing it fails

        def devices() -> list[Device]:
            if gpu is None:
                raise BackendUnavailable("there is no NVIDIA driver")
            return [Device(index=0, name="a GPU", compute_capability=gpu, memory_bytes=1)]

        monkeypatch.setattr(cuda, "devices", devices)

    return install


def rtx_flavor(gpu: str | None = None) -> Flavor:
    return Flavor(name="rtx", module=library("tensorrt_rtx", "1.7"), version="1.7", gpu=gpu)


def tensorrt_flavor(gpu: str = "9.0") -> Flavor:
    return Flavor(name="tensorrt", module=library("tensorrt", "11.4"), version="11.4", gpu=gpu)


def test_auto_takes_tensorrt_where_it_and_a_gpu_are_there(installed: Any) -> None:
    installed(tensorrt="11.4.0", rtx="1.7.1", gpu="9.0")
    flavor = open_flavor("auto")
    assert (flavor.name, flavor.version, flavor.gpu) == ("tensorrt", "11.4.0", "9.0")
    assert open_flavor("rtx").name == "rtx"


@pytest.mark.parametrize("there", [{"tensorrt": "11.4.0", "rtx": "1.7.1"}, {"rtx": "1.7.1", "gpu": "8.6"}])
def test_auto_takes_rtx_otherwise(installed: Any, there: dict[str, str]) -> None:
    installed(**there)
    assert open_flavor("auto").name == "rtx"


def test_where_nothing_is_there_both_are_told(installed: Any) -> None:
    installed()
    with pytest.raises(BackendUnavailable) as caught:
        open_flavor("auto")
    assert caught.value.problems == ["tensorrt is not installed", "tensorrt_rtx is not installed"]
    assert "tfm-export[rtx]" in str(caught.value)


def test_tensorrt_without_a_gpu_says_why_it_cannot_build(installed: Any) -> None:
    installed(tensorrt="10.16.1", rtx="1.7.1")
    with pytest.raises(
        BackendUnavailable, match=r"TensorRT 10\.16\.1 builds on the GPU .*: there is no NVIDIA driver"
    ) as c:
        open_flavor("tensorrt")
    assert "--flavor rtx" in str(c.value)


@pytest.mark.parametrize(("name", "version", "minimum"), [("tensorrt", "10.13.0", "10.15"), ("rtx", "1.3.0", "1.4")])
def test_a_release_without_the_layers_for_caches_is_refused(
    installed: Any, name: str, version: str, minimum: str
) -> None:
    installed(**{name: version}, gpu="8.9", layers=False)
    with pytest.raises(BackendUnavailable, match=f"expected .* {minimum} or newer, .* found {version}"):
        open_flavor(name)


def test_what_can_be_built_for() -> None:
    assert rtx_flavor().supported_capabilities() == ["7.5", "8.0", "8.6", "8.9", "12.0", "12.1"]
    assert tensorrt_flavor("9.0").supported_capabilities() == ["9.0"]


@pytest.mark.parametrize(
    ("variant", "gpu", "expected"),
    [
        ("fp16", None, ("8.0", "8.6", "8.9", "12.0")),
        ("fp16", "8.6", ("8.0", "8.6", "8.9", "12.0")),
        ("fp8", None, ("8.9", "12.0")),
        ("fp16", "12.1", ("12.1",)),  # which the engine for those four would not run on
        ("fp16", "7.5", ("7.5",)),
        ("fp16", "9.0", ("8.0", "8.6", "8.9", "12.0")),
    ],
)
def test_what_rtx_builds_for_unless_it_is_told(variant: str, gpu: str | None, expected: tuple[str, ...]) -> None:
    assert rtx_flavor(gpu).targets(EngineOptions(variant=variant)) == expected


def test_targets_are_put_in_order_once() -> None:
    options = EngineOptions(compute_capabilities=("12.0", "8.6", "12.0", "8.0"))
    assert rtx_flavor().targets(options) == ("8.0", "8.6", "12.0")


@pytest.mark.parametrize(
    ("variant", "compute", "targets", "expected"),
    [
        ("fp32", None, ("7.5",), ["fp32 needs compute capability 8.0 with TensorRT-RTX, found 7.5"]),
        ("bf16", None, ("7.5",), ["bf16 needs compute capability 8.0 with TensorRT-RTX, found 7.5"]),
        ("w4", None, ("7.5", "8.0"), ["w4 needs compute capability 8.0 with TensorRT-RTX, found 7.5"]),
        ("w8", "bf16", ("7.5",), ["bf16 needs compute capability 8.0 with TensorRT-RTX, found 7.5"]),
        (
            "fp8",
            "bf16",
            ("7.5", "8.6", "12.0"),
            [
                "fp8 needs compute capability 8.9 with TensorRT-RTX, found 7.5",
                "bf16 needs compute capability 8.0 with TensorRT-RTX, found 7.5",
                "fp8 needs compute capability 8.9 with TensorRT-RTX, found 8.6",
            ],
        ),
        (
            "fp16",
            None,
            ("9.0",),
            ["TensorRT-RTX 1.7 does not build for compute capability 9.0: data-centre GPUs need TensorRT itself"],
        ),
        ("fp16", None, ("6.1",), ["TensorRT-RTX 1.7 does not build for compute capability 6.1"]),
    ],
)
def test_precisions_that_a_gpu_does_not_run_are_all_named(
    variant: str, compute: Any, targets: tuple[str, ...], expected: list[str]
) -> None:
    with pytest.raises(BuildError) as caught:
        rtx_flavor().targets(EngineOptions(variant=variant, compute=compute, compute_capabilities=targets))
    assert caught.value.problems == expected


def test_the_hint_names_the_gpus_that_would_do() -> None:
    with pytest.raises(BuildError, match="Try: --compute-capability 89,120,121, or another precision"):
        rtx_flavor().targets(EngineOptions(variant="fp8", compute_capabilities=("8.0",)))


def test_tensorrt_builds_for_its_own_gpu_alone() -> None:
    assert tensorrt_flavor("9.0").targets(EngineOptions()) == ("9.0",)
    with pytest.raises(BuildError, match=r"which has compute capability 9\.0, not 8\.6"):
        tensorrt_flavor("9.0").targets(EngineOptions(compute_capabilities=("8.6",)))
    assert tensorrt_flavor("7.5").targets(EngineOptions(variant="fp32")) == ("7.5",)
    with pytest.raises(BuildError, match=r"bf16 needs compute capability 8\.0 with TensorRT, found 7\.5"):
        tensorrt_flavor("7.5").targets(EngineOptions(variant="bf16"))


def test_what_rtx_ignores_is_refused_and_tensorrt_takes_it() -> None:
    options = EngineOptions(builder_optimization_level=5, timing_cache=Path("timings"))
    with pytest.raises(BuildError) as caught:
        rtx_flavor().check_options(options)
    assert [text.partition(":")[0] for text in caught.value.problems] == [
        "TensorRT-RTX ignores --builder-optimization-level",
        "TensorRT-RTX ignores --timing-cache",
    ]
    tensorrt_flavor().check_options(options)
    rtx_flavor().check_options(EngineOptions(workspace_bytes=1))


class Config:
    """An IBuilderConfig that keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.matches = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("set_", "clear_")):
            return lambda *arguments, **named: self.calls.append((name, *arguments, *named.values()))
        raise AttributeError(name)

    def create_timing_cache(self, content: bytes) -> Cache:
        return Cache(content)

    def set_timing_cache(self, cache: Cache, ignore_mismatch: bool) -> bool:
        self.calls.append(("set_timing_cache", cache.content, ignore_mismatch))
        self.cache = cache
        return self.matches

    def get_timing_cache(self) -> Cache:
        return self.cache


class Cache:
    def __init__(self, content: bytes) -> None:
        self.content = content

    def combine(self, other: Cache, ignore_mismatch: bool) -> bool:
        assert ignore_mismatch
        self.content += b"+" + other.content
        return True

    def serialize(self) -> bytes:
        return self.content


def test_rtx_is_told_every_gpu() -> None:
    config = Config()
    rtx_flavor().configure(config, EngineOptions(workspace_bytes=7), ("8.6", "12.0"))
    assert config.num_compute_capabilities == 2
    assert config.calls == [
        ("clear_flag", "TF32"),
        ("set_memory_pool_limit", "WORKSPACE", 7),
        ("set_compute_capability", "<SM86>", 0),
        ("set_compute_capability", "<SM120>", 1),
    ]
    assert config.profiling_verbosity == "DETAILED"


def test_tensorrt_is_told_no_gpu_and_keeps_its_timings(tmp_path: Path) -> None:
    """What another build has saved meanwhile is not lost."""
    timings, config = tmp_path / "timings", Config()
    options = EngineOptions(builder_optimization_level=0, timing_cache=timings)
    flavor = tensorrt_flavor()
    flavor.configure(config, options, ("9.0",))
    assert config.builder_optimization_level == 0
    assert config.calls == [("clear_flag", "TF32"), ("set_timing_cache", b"", False)]
    assert not hasattr(config, "num_compute_capabilities")
    config.cache.content = b"mine"
    timings.write_bytes(b"theirs")
    flavor.keep_timings(config, options)
    assert timings.read_bytes() == b"mine+theirs"
    assert [p.name for p in tmp_path.iterdir()] == ["timings"]


def test_timings_of_another_gpu_are_refused(tmp_path: Path) -> None:
    (tmp_path / "timings").write_bytes(b"other")
    config = Config()
    config.matches = False
    with pytest.raises(BuildError, match="timings is the timing cache of another GPU or another TensorRT"):
        tensorrt_flavor().configure(config, EngineOptions(timing_cache=tmp_path / "timings"), ("9.0",))


def test_a_process_uses_polygraphy_with_one_library(rtx: Flavor) -> None:
    """It decides for one when it is loaded; with the other its objects would be of the wrong kind."""
    assert polygraphy(rtx).Profile
    with pytest.raises(BackendUnavailable, match="has loaded Polygraphy for the other TensorRT library"):
        polygraphy(tensorrt_flavor())
    assert polygraphy(rtx).Profile


@pytest.mark.parametrize(("text", "expected"), [("86", "8.6"), ("8.6", "8.6"), ("120", "12.0"), ("10.3", "10.3")])
def test_compute_capabilities_are_read_with_and_without_a_dot(text: str, expected: str) -> None:
    assert compute_capability(text) == expected


@pytest.mark.parametrize("text", ["", "8", "x", "8.6.1", "-86", "8,6", " 86", "sm86"])
def test_what_is_no_compute_capability_is_told(text: str) -> None:
    with pytest.raises(BuildError, match="a compute capability is a number such as 86 or"):
        compute_capability(text)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"variant": "fp4"}, "variant must be one of"),
        ({"variant": "fp16", "compute": "bf16"}, "compute is for quantised variants"),
        ({"variant": "w8", "compute": "fp32"}, "compute must be fp16 or bf16 with w8"),
        ({"flavor": "lite"}, "flavor must be one of auto, tensorrt, rtx"),
        ({"compute_capabilities": ("86",)}, 'a compute capability is a number such as "8.6"'),
        ({"max_batch_size": 0}, "max_batch_size must be at least 1, found 0"),
        ({"workspace_bytes": -1}, "workspace_bytes must be at least 1, found -1"),
        ({"capacities": (0, 8)}, "capacities must be at least 1"),
        ({"name": "a/b"}, "name must be letters"),
        ({"builder_optimization_level": 6}, "builder_optimization_level must be from 0 to 5"),
    ],
)
def test_options_that_mean_nothing_are_named(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(BuildError) as caught:
        EngineOptions(**options)
    assert expected in str(caught.value)


def test_all_options_that_mean_nothing_are_named_at_once() -> None:
    with pytest.raises(BuildError) as caught:
        EngineOptions(flavor="x", max_batch_size=0, capacities=(0,))  # type: ignore[arg-type]
    assert len(caught.value.problems) == 3
