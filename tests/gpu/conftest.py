"""The example model with an engine for this GPU in every precision, built when a test asks for it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from tests.once import Once, shared_folder
from tests.skips import ANOTHER_GPU, install, skip
from tfm_export.bundle import Bundle
from tfm_export.errors import BackendUnavailable
from tfm_export.runtime.backends import BackendChoice
from tfm_export.runtime.gpu import cuda
from tfm_export.runtime.step_model import StepModel

ROOT = Path(__file__).parents[2]
G2P = ROOT / "examples/g2p"
WORDS = 80
MODULES = {"tensorrt": "tensorrt", "rtx": "tensorrt_rtx"}
EXTRAS = {"tensorrt": "trt", "rtx": "rtx"}
MAX_BATCH = 32
# Backend and variant of everything that is tried.
SERVED = [
    *[("onnxruntime", variant) for variant in ("fp32", "fp16", "bf16")],
    *[(flavor, variant) for flavor in MODULES for variant in ("fp32", "fp16", "bf16", "w8", "int8", "fp8")],
]


BEGIN = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin nothing new once the time that gpu-check has for tests is over."""
    seconds = float(os.environ.get("TFM_EXPORT_GPU_SECONDS", "inf"))
    if item.get_closest_marker("gpu") and time.monotonic() - BEGIN > seconds:
        skip("more time", ".venv/bin/pytest -m gpu", found="no time left")


@dataclass(frozen=True)
class Served:
    """A backend on the GPU, ready to decode."""

    model: StepModel
    bundle: Bundle
    variant: str
    name: str


@pytest.fixture(scope="module", autouse=True)
def _alone_on_the_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One module at a time uses the GPU, whose free memory is measured, and adds to the bundle below."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    with FileLock(shared_folder(request.config, tmp_path_factory) / "gpu.lock"):
        yield


@pytest.fixture(scope="session")
def g2p(once: Once) -> Path:
    """The example model's bundle, with real golden inputs. Engines and variants are added to it."""

    def make(folder: Path) -> None:
        from tfm_export.export import export_bundle

        words = (G2P / "words.txt").read_text(encoding="utf-8").split()[:WORDS]
        export_bundle(G2P / "g2p.pt", folder / "tfm_bundle", inputs=words, verify=False)

    return once("gpu_g2p", make) / "tfm_bundle"


def tfm_export(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command, as a user would; both TensorRT libraries in one process would get into each other's way."""
    command = [sys.executable, "-m", "tfm_export.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def add_variant(g2p: Path) -> Callable[[str], None]:
    """Adds a precision to the bundle, of whatever quality: here it is held to PyTorch on the GPU."""

    def add(variant: str) -> None:
        if variant in Bundle.open(g2p, check_hashes=False).manifest.variants:
            return
        options = ("--for", "tensorrt", "--min-agreement", 0, "--no-embeddings")
        done = tfm_export("quantize", g2p, f"--{variant}", *options)
        assert done.returncode == 0, done.stderr

    return add


@pytest.fixture(scope="session")
def add_engine(g2p: Path, add_variant: Callable[[str], None]) -> Callable[[str, str], str]:
    """Builds an engine for this GPU; skips, with the reason, where that is refused."""

    def add(flavor: str, variant: str) -> str:
        name = f"{flavor}_{variant}"
        if name in Bundle.open(g2p, check_hashes=False).manifest.engines:
            return name
        try:
            importlib.import_module(MODULES[flavor])
        except ImportError as problem:
            skip(MODULES[flavor], install(EXTRAS[flavor]), found=str(problem))
        capability = cuda.devices()[0].compute_capability
        arguments = ["trt", g2p, f"--{variant}", "--flavor", flavor, "--name", name, "--max-batch-size", MAX_BATCH]
        if flavor == "rtx":
            arguments += ["--compute-capability", capability]
        refused = tfm_export(*arguments, "--dry-run")
        if refused.returncode:
            skip(*ANOTHER_GPU, found=" ".join(refused.stderr.split()))
        add_variant(variant)
        done = tfm_export(*arguments)
        assert done.returncode == 0, done.stderr
        return name

    return add


@pytest.fixture(scope="module", params=SERVED, ids="-".join)
def served(
    request: pytest.FixtureRequest,
    g2p: Path,
    add_variant: Callable[[str], None],
    add_engine: Callable[[str, str], str],
) -> Iterator[Served]:
    """Every backend and precision in turn."""
    backend, variant = request.param
    if backend == "onnxruntime":
        choice = BackendChoice(variant=variant, gpu=0)
        try:
            choice.check(Bundle.open(g2p, check_hashes=False))
        except BackendUnavailable as problem:
            skip(*ANOTHER_GPU, found=" ".join(problem.problems))
        add_variant(variant)
    else:
        choice = BackendChoice(variant=variant, gpu=0, engine=add_engine(backend, variant))
    bundle = Bundle.open(g2p, check_hashes=False)
    model = choice.open(bundle)
    yield Served(model, bundle, variant, str(choice))
    model.close()
