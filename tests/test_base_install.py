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

from tests import skips
from tests.once import Once
from tfm_export.cli import COMMANDS

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "onnx", "onnxruntime", "onnxscript", "onnx_ir", "tensorrt", "tensorrt_rtx", "polygraphy"} | {
    "starlette",
    "uvicorn",
    "prometheus_client",
}

# All modules but these import with the base install.
NEED_AN_EXTRA = (
    "tfm_export.bench",
    "tfm_export.export",
    "tfm_export.graph_files",
    "tfm_export.passes",
    "tfm_export.quantize",
    "tfm_export.serve",
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


WITHOUT = """
import json, sys
from click.testing import CliRunner

hidden, commands = map(json.loads, sys.argv[1:])


class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Hidden())
from tfm_export.cli import cli

results = [CliRunner().invoke(cli, command) for command in commands]
print(json.dumps([[r.exit_code, r.stderr, r.stdout, repr(r.exception)] for r in results]))
"""
OTHER_EXTRAS = [
    *("torch", "onnx", "onnxscript", "onnx_ir", "safetensors", "ml_dtypes", "sacrebleu", "tokenizers"),
    *("sentencepiece", "subword_nmt", "tensorrt", "tensorrt_rtx", "polygraphy", "cuda", "matplotlib", "psutil"),
    *("starlette", "uvicorn", "httptools", "uvloop", "prometheus_client"),
]


def run_without(hidden: list[str], commands: list[list[str]]) -> list[tuple[int, str, str, str]]:
    """Exit codes, errors, outputs and exceptions of commands where some libraries are not installed."""
    done = run(sys.executable, "-c", WITHOUT, json.dumps(hidden), json.dumps(commands), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [tuple(result) for result in json.loads(done.stdout)]


def test_with_the_extra_cpu_alone_every_command_works_or_says_what_it_lacks(
    tiny_bundle: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    bundle, checkpoint, pairs = str(tiny_bundle), str(tiny_checkpoint), str(tmp_path / "pairs.tsv")
    Path(pairs).write_text("hello\tp1\n")
    lacks = {
        ("onnx", checkpoint): ("torch", "export"),
        ("quantize", bundle, "--w8"): ("onnx", "quantize"),
        ("generate-graph", bundle): ("onnx", "quantize"),
        ("trt", bundle): ("onnx", "rtx"),
        ("verify", bundle): ("onnx", "quantize"),
        ("verify", bundle, "--expect", pairs): ("onnx", "quantize"),
        ("verify", bundle, "--checkpoint", checkpoint): ("onnx", "export"),
        ("run", bundle, "hello", "--attention", str(tmp_path / "a.png")): ("matplotlib", "plot"),
        ("bench", bundle, "--plot", str(tmp_path / "speed.png")): ("matplotlib", "plot"),
        ("inspect", checkpoint): ("torch", "export"),
        ("serve", bundle): ("starlette", "serve"),
    }
    works = [["run", bundle, "hello"], ["inspect", bundle], ["doctor"], ["doctor", bundle], ["completion", "bash"]]
    results = run_without(OTHER_EXTRAS, [*map(list, lacks), *works])
    for (command, (library, extra)), (code, error, output, problem) in zip(lacks.items(), results, strict=False):
        told = f"Error: {library} is not installed\nTry: pip install 'tfm-export[{extra}]'\n"
        assert (command, code, error, output) == (command, 1, told, ""), problem
    for command, (code, _, output, problem) in zip(works, results[len(lacks) :], strict=True):
        assert (command, code) == (command, 0), problem
        assert output
    assert {*COMMANDS} == {command[0] for command in [*lacks, *works]}


def test_a_part_of_an_extra_that_is_missing_is_told(tiny_bundle: Path, tiny_checkpoint: Path) -> None:
    bundle, checkpoint = str(tiny_bundle), str(tiny_checkpoint)
    commands = [["onnx", checkpoint], ["verify", bundle, "--checkpoint", checkpoint], ["inspect", checkpoint]]
    for _, error, _, problem in run_without(["safetensors"], commands):
        assert error == "Error: safetensors is not installed\nTry: pip install 'tfm-export[export]'\n", problem


WATCHED = """
import os, sys
from pathlib import Path
import tfm_export

with tfm_export.load(sys.argv[1], threads=1) as model:
    model.generate("hello", beam_size=1)
    links = [Path("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    descriptors = [os.readlink(link) for link in links if link.is_symlink()]  # that of the listing itself is gone
    print([name for name in descriptors if name.startswith("socket:")], os.environ["ORT_DISABLE_TELEMETRY"])
"""


@skips.skip_if(not sys.platform.startswith("linux"), "/proc, which tells what a process has open", *skips.ON_LINUX)
@pytest.mark.parametrize("chosen", [None, "0"], ids=["by_default", "if_it_is_chosen"])
def test_loading_and_decoding_write_nothing_and_open_no_socket(
    tiny_bundle: Path, tmp_path: Path, chosen: str | None
) -> None:
    """ONNX Runtime's telemetry starts with its import, unless it is told before."""
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    temporary.mkdir()
    places = {"HOME": str(home), "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ORT_", "XDG_"))}
    environment = {**kept, **places, **({} if chosen is None else {"ORT_DISABLE_TELEMETRY": chosen})}
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, tiny_bundle],
        capture_output=True,
        text=True,
        env=environment,
        cwd=home,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"[] {chosen or '1'}\n"
    if chosen is None:
        assert [*tmp_path.rglob("*")] == [home, temporary]
    # Whether it writes where a user has switched it on is its own affair: on some machines it does, on others not.


def test_the_package_runs_as_a_module() -> None:
    done = run(sys.executable, "-m", "tfm_export", "--help", cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: tfm-export ")
