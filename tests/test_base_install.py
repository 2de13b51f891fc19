"""The base install has numpy and click alone: what must work there does, and what cannot says which extra it lacks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.once import Once
from tfm_export.cli import COMMANDS

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "onnx", "onnxruntime", "onnxscript", "onnx_ir", "tensorrt", "tensorrt_rtx", "polygraphy"}

# All modules but these import with the base install.
NEED_AN_EXTRA = (
    "tfm_export.bench",
    "tfm_export.export",
    "tfm_export.graph_files",
    "tfm_export.passes",
    "tfm_export.quantize",
    "tfm_export.trt",
    "tfm_export.checkpoints",
    "tfm_export.generate_graph",
    "tfm_export.verify",
    "tfm_export.runtime.gpu.cuda_provider",
    "tfm_export.runtime.gpu.onnx_cuda",
    "tfm_export.runtime.cpu.onnx_runtime",
    "tfm_export.runtime.onnx_sessions",
    "tfm_export.runtime.torch_model",
)

IMPORT_ALL = """
import importlib, json, sys
problems = {}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except BaseException as problem:
        problems[name] = [type(problem).__name__, str(problem)]
print(json.dumps(problems))
"""


def run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    return subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd, env=environment, check=False)


@pytest.fixture(scope="session")
def base(once: Once) -> Path:
    """The bin folder of a virtual environment with the base install, built from a copy of the sources."""
    return once("base_install", install_base) / "venv/bin"


def install_base(folder: Path) -> None:
    source = folder / "source"
    for package in ("tfm_export", "reference_model"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    venv.create(folder / "venv", with_pip=False)
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    built = run(*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, source)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    target = ("--python", folder / "venv/bin/python")
    installed = run(*pip, *target, "install", "--no-compile", "--constraint", ROOT / "constraints.txt", wheel)
    assert installed.returncode == 0, installed.stderr


def all_modules() -> list[str]:
    paths = sorted((ROOT / "tfm_export").rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return [name for name in names if not name.endswith("__main__")]


@pytest.mark.slow
def test_the_base_install_is_numpy_and_click(base: Path) -> None:
    script = "from importlib import metadata; print(*(d.metadata['Name'] for d in metadata.distributions()))"
    assert set(run(base / "python", "-c", script, cwd=base).stdout.split()) == {"numpy", "click", "tfm-export"}


@pytest.mark.slow
def test_the_base_install_imports_every_module_that_needs_no_extra(base: Path) -> None:
    done = run(base / "python", "-c", IMPORT_ALL, json.dumps(all_modules()), cwd=base)
    problems = json.loads(done.stdout)
    assert {name: why for name, why in problems.items() if not name.startswith(NEED_AN_EXTRA)} == {}
    # Those that need an extra lack a library of an extra, not something else.
    assert {kind for kind, _ in problems.values()} <= {"ModuleNotFoundError", "BackendUnavailable"}
    assert [why for _, why in problems.values() if not HEAVY & set(re.findall(r"\w+", why))] == []


@pytest.mark.slow
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_help_works_with_the_base_install(base: Path, command: str) -> None:
    done = run(base / "tfm-export", *command.split(), "--help", cwd=base)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: tfm-export {command}".rstrip())


@pytest.mark.slow
def test_the_base_install_carries_the_type_information_and_the_version(base: Path) -> None:
    script = "import tfm_export, pathlib; print((pathlib.Path(tfm_export.__file__).parent / 'py.typed').exists())"
    assert run(base / "python", "-c", script, cwd=base).stdout == "True\n"
    assert run(base / "tfm-export", "--version", cwd=base).stdout == "tfm-export, version 0.1.0\n"


@pytest.mark.slow
def test_inspect_needs_no_extra(base: Path, tiny_bundle: Path) -> None:
    done = run(base / "tfm-export", "inspect", tiny_bundle, cwd=base)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "library", "extra"),
    [("onnx", "torch", "export"), ("verify", "onnxruntime", "cpu"), ("run", "onnxruntime", "cpu")],
)
def test_a_command_that_lacks_an_extra_says_which(
    base: Path, tiny_bundle: Path, tiny_checkpoint: Path, tmp_path: Path, command: str, library: str, extra: str
) -> None:
    arguments = [tiny_checkpoint] if command == "onnx" else [tiny_bundle]
    done = run(base / "tfm-export", command, *arguments, *(["hello"] if command == "run" else []), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"Error: {library} is not installed\nTry: pip install 'tfm-export[{extra}]'\n"


@pytest.mark.parametrize(
    "script",
    [
        "import tfm_export; tfm_export.load",
        "from tfm_export.cli import cli; cli(['--help'], standalone_mode=False)",
        *(f"from tfm_export.cli import cli; cli(['{name}', '--help'], standalone_mode=False)" for name in COMMANDS),
    ],
)
def test_importing_and_asking_for_help_load_no_heavy_library(script: str) -> None:
    done = run(sys.executable, "-c", f"{script}\nimport sys; print('\\n' + ' '.join(sys.modules))")
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()[-1].split()) & HEAVY == set()


def test_decoding_a_bundle_loads_neither_torch_nor_onnx(tiny_bundle: Path) -> None:
    script = (
        "import sys, tfm_export\n"
        "with tfm_export.load(sys.argv[1], threads=1) as model: model.generate('hello')\n"
        "print(' '.join(sys.modules))"
    )
    done = run(sys.executable, "-c", script, tiny_bundle)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) & (HEAVY | {"click"}) == {"onnxruntime"}
