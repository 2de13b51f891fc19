"""Whether the wheel and the sdist hold what they should, and the wheel works by itself: make package.

The wheel is installed in an empty environment with the extra cpu, and decodes the shipped model there, outside of the
checkout. What comes out must be what PyTorch gave when this environment exported the bundle.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from email import message_from_string
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("tfm_export", "reference_model")
WORDS = ("kubernetes", "graphene", "knight")
LOADED = """
import importlib.util, json, sys
import tfm_export

assert tfm_export.__file__.startswith(sys.prefix), tfm_export.__file__
assert not [name for name in ("torch", "onnx", "pytest") if importlib.util.find_spec(name)]
with tfm_export.load(sys.argv[1]) as model:
    for generation in model.generate(sys.argv[2:]):
        print(json.dumps({"tokens": generation.hypotheses[0].tokens}))
"""


def main() -> None:
    """Check what lies in dist/."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stem = f"tfm_export-{project['version']}"
    wheel, sdist = ROOT / "dist" / f"{stem}-py3-none-any.whl", ROOT / "dist" / f"{stem}.tar.gz"
    expect("dist", {wheel.name, sdist.name}, {path.name for path in (ROOT / "dist").iterdir()})
    check_wheel(wheel, stem, project)
    check_sdist(sdist, stem)
    with tempfile.TemporaryDirectory() as folder:
        check_run(wheel, Path(folder))
    print(f"✓ {wheel.name} and {sdist.name} are whole, and the wheel gives PyTorch's tokens by itself")


def expect(what: str, wanted: set[str], found: set[str]) -> None:
    """Make sure that two sets of names are the same."""
    if wanted != found:
        missing, stray = sorted(wanted - found) or "nothing", sorted(found - wanted) or "nothing"
        sys.exit(f"{what}: missing: {missing}; there, but should not be: {stray}")


def modules() -> set[str]:
    """What a user imports: the files of the packages in this checkout, and that they have types."""
    files = {path for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    return {path.relative_to(ROOT).as_posix() for path in files} | {f"{name}/py.typed" for name in PACKAGES}


def check_wheel(wheel: Path, stem: str, project: dict[str, object]) -> None:
    """Its files, and what its metadata say of it."""
    info = f"{stem}.dist-info"
    own = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt")}
    with zipfile.ZipFile(wheel) as archive:
        expect(wheel.name, modules() | own | {f"{info}/licenses/LICENSE"}, set(archive.namelist()))
        metadata = message_from_string(archive.read(f"{info}/METADATA").decode())
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    for field in ("name", "version", "requires-python"):
        expect(field, {str(project[field])}, {str(metadata[field])})
    expect("extras", set(project["optional-dependencies"]), set(metadata.get_all("provides-extra")))
    needed = {line for line in metadata.get_all("requires-dist") if "extra ==" not in line}
    expect("dependencies", set(project["dependencies"]), needed)
    expect("scripts", {"[console_scripts]", "tfm-export = tfm_export.cli:main"}, set(scripts.split("\n")) - {""})


def check_sdist(sdist: Path, stem: str) -> None:
    """Its files: what the wheel is built from."""
    own = {"pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "setup.cfg"}
    with tarfile.open(sdist) as archive:
        found = {member.name.removeprefix(f"{stem}/") for member in archive if member.isfile()}
    expect(sdist.name, modules() | own, {name for name in found if not name.startswith("tfm_export.egg-info/")})


def check_run(wheel: Path, folder: Path) -> None:
    """Decode a bundle from the command line and from Python, with nothing but the wheel and its extra cpu."""
    (folder / "words.txt").write_text("\n".join(WORDS), encoding="utf-8")
    export = [sys.executable, "-m", "tfm_export.cli", "onnx", ROOT / "examples/g2p/g2p.pt"]
    run([*export, "--inputs", folder / "words.txt", "-o", folder / "bundle"], ROOT)
    golden = [json.loads(line) for line in (folder / "bundle/golden.jsonl").read_text(encoding="utf-8").splitlines()]
    wanted = [entry["tokens"][:-1] for entry in golden]  # without the end token

    venv.create(folder / "venv", with_pip=False)
    programs = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", programs / "python"]
    run([*pip, "install", "--constraint", ROOT / "constraints.txt", f"{wheel}[cpu]"], folder)
    for command in ([programs / "tfm-export", "run", "--json"], [programs / "python", "-c", LOADED]):
        lines = run([*command, folder / "bundle", *WORDS], folder).splitlines()
        found = [json.loads(line)["tokens"] for line in lines]
        if found != wanted:
            sys.exit(f"{command[0]}: PyTorch gave {wanted}, the wheel gives {found}")


def run(command: list[str | Path], folder: Path) -> str:
    """What a command prints, where nothing of the checkout is on Python's path unless the folder puts it there."""
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
