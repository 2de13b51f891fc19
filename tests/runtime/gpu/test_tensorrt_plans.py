"""That TensorRT has what the runtime uses of it: the installed libraries, without a GPU as far as they get."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import gpu_problem
from tests.emulation import Machine, emulated_gpu
from tests.emulation import tensorrt as emulation
from tests.emulation.tensorrt import tensorrt_module
from tests.skips import WITHOUT_GPU, install, skip, skip_if
from tests.trt.record_api import API
from tfm_export.errors import BackendUnavailable
from tfm_export.runtime.gpu.tensorrt_plans import MODULES, Library

# The emulation has no name that the runtime does not use, and raises AttributeError for every other one.
CLASSES = {
    "Runtime": emulation.Runtime,
    "ICudaEngine": emulation.Engine,
    "IExecutionContext": emulation.Context,
    "ILogger": emulation.ILogger,
    "IRuntimeConfig": emulation.RuntimeConfig,
}
RTX_CLASSES = {"IRuntimeConfig": emulation.RtxRuntimeConfig, "IRuntimeCache": emulation.RuntimeCache}
ENUMS = {
    "DataType": emulation.DataType,
    "TensorIOMode": emulation.TensorIOMode,
    "ExecutionContextAllocationStrategy": emulation.ExecutionContextAllocationStrategy,
    "CudaGraphStrategy": emulation.CudaGraphStrategy,
}

RELEASES: dict[str, dict[str, list[str]]] = json.loads(API.read_text(encoding="utf-8"))


@pytest.fixture(params=MODULES)
def flavor(request: pytest.FixtureRequest) -> str:
    """Each library that is installed; `tensorrt` needs more than its bindings to be imported."""
    name: str = request.param
    try:
        importlib.import_module(MODULES[name][0])
    except ImportError as problem:
        skip(MODULES[name][0], install(MODULES[name][1]), found=str(problem))
    return name


@pytest.fixture
def library(flavor: str) -> ModuleType:
    return importlib.import_module(MODULES[flavor][0])


def classes(flavor: str) -> dict[str, type[Any]]:
    """The emulated classes of a library by the names of the real ones."""
    return {**CLASSES, **(RTX_CLASSES if flavor == "rtx" else {})}


def public_names(kind: type[Any]) -> list[str]:
    return [name for name in dir(kind) if not name.startswith("_")]


def test_every_name_that_is_used_exists(flavor: str, library: ModuleType) -> None:
    for name in (name for name in vars(tensorrt_module(Machine(), flavor)) if not name.startswith("__")):
        assert hasattr(library, name)
    for name, kind in classes(flavor).items():
        assert [member for member in public_names(kind) if not hasattr(getattr(library, name), member)] == []


@pytest.mark.parametrize("release", [name for name in RELEASES if "10.14" not in name])
def test_every_name_that_is_used_exists_in_releases_that_are_not_installed(release: str) -> None:
    """The runtime calls nothing that the emulation does not have, or the tests that run on it would say so."""
    recorded, flavor = RELEASES[release], release.partition(" ")[0]
    compared = 0
    for name, kind in classes(flavor).items():
        assert set(public_names(kind)) <= set(recorded[name]), f"{release}: {name}"
        compared += len(public_names(kind))
    enums = set(ENUMS) & set(vars(tensorrt_module(Machine(), flavor))) & recorded.keys()
    for name in enums:
        assert {member.name for member in ENUMS[name]} <= set(recorded[name]), f"{release}: {name}"
    assert compared >= 25
    assert len(enums) >= 3


def test_every_method_takes_the_same(flavor: str, library: ModuleType) -> None:
    compared = 0
    for name, kind in classes(flavor).items():
        for method in public_names(kind):
            code = getattr(getattr(kind, method), "__code__", None)
            if code is None or name == "ILogger":
                continue
            documented = getattr(getattr(library, name), method).__doc__ or ""
            # "set_input_shape(self: ..., name: str, shape: tuple) -> bool", perhaps several of them
            found = [
                re.findall(r"(?:^|, )(\w+): ", text)[1:]
                for text in re.findall(rf"\b{method}\((self.*?)\) ->", documented)
            ]
            assert list(code.co_varnames[1 : code.co_argcount]) in found, f"{name}.{method}"
            compared += 1
    assert compared >= 16


def test_every_member_is_the_same(flavor: str, library: ModuleType) -> None:
    for name in set(ENUMS) & set(vars(tensorrt_module(Machine(), flavor))):
        members = {member.name for member in ENUMS[name]}
        real = getattr(library, name)
        assert members <= set(real.__members__)
        assert {str(getattr(real, member)) for member in members} == {f"{name}.{member}" for member in members}
    assert {int(s) for s in emulation.Severity} == {int(getattr(library.ILogger, s.name)) for s in emulation.Severity}


@skip_if(gpu_problem() is None, "no NVIDIA GPU", WITHOUT_GPU)
@pytest.mark.parametrize("flavor", ["rtx"], indirect=True)  # TensorRT cannot build a plan without a GPU
def test_a_plan_cannot_be_loaded_without_a_gpu_and_it_says_why(flavor: str, tmp_path: Path) -> None:
    assert flavor == "rtx"
    import tensorrt_rtx as trt

    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    network.mark_output(network.add_identity(network.add_input("x", trt.float32, (2, 4))).get_output(0))
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    path = tmp_path / "identity.plan"
    path.write_bytes(builder.build_serialized_network(network, config))
    library = Library("rtx")
    assert library.version == trt.__version__
    with pytest.raises(BackendUnavailable, match=rf"TensorRT {library.version} could not load .*identity\.plan: ."):
        library.deserialize(path)


def test_a_library_says_what_it_logged_once() -> None:
    with emulated_gpu():
        library = Library("rtx")
    tell = library._log.log
    for number in range(6):
        tell(emulation.Severity.ERROR, f"error {number}\n")
    tell(emulation.Severity.WARNING, "a warning")
    assert str(library.failure("do it")).startswith(
        "TensorRT 1.7.1.1 could not do it: error 2; error 3; error 4; error 5\n"
    )
    assert str(library.failure("do it")).startswith("TensorRT 1.7.1.1 could not do it: it gave no reason")
