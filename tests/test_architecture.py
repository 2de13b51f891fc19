"""The import rule: imports go down only, stages never meet but in the bundle, heavy libraries stay in their places."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# From the bottom up. A part may import those of the lines above it, and never one of its own line.
LAYERS = (
    ("errors",),
    ("extras", "graph", "precision"),
    ("bundle",),
    ("staging", "graph_files", "engines"),
    ("runtime", "passes"),
    ("decoding", "tokenizer"),
    ("model",),
    ("checkpoints",),
    ("verify",),
    ("export", "quantize", "generate_graph", "trt", "bench"),  # the stages
    ("cli",),
)
RANKS = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}

# A part that only these may import, whatever their rank.
ONLY_FOR = {"checkpoints": {"verify", "export", "cli"}}

# The parts, and single modules, that may import a library. `import tfm_export` needs none of them but numpy.
PYTORCH = {"export", "checkpoints", "verify", "runtime.torch_model"}
LIBRARIES = {
    "torch": PYTORCH,
    "reference_model": PYTORCH,
    "sympy": {"export"},
    "onnxscript": {"export"},
    "onnx_ir": {"export", "graph_files", "passes", "quantize", "trt"},
    "onnx": {"export", "graph_files", "passes", "quantize", "trt", "verify"},
    "onnxruntime": {"runtime", "quantize", "verify"},
    "ml_dtypes": {"passes"},
    "tensorrt": {"trt", "runtime"},
    "tensorrt_rtx": {"trt", "runtime"},
    "polygraphy": {"trt"},
    "cuda": {"trt", "runtime"},
    "safetensors": {"checkpoints"},
    "tokenizers": {"tokenizer"},
    "sentencepiece": {"tokenizer"},
    "subword_nmt": {"tokenizer"},
    "click": {"cli"},
    "matplotlib": {"cli"},
    "numpy": set(RANKS) - {"errors", "extras", "graph", "precision", "bundle", "staging", "engines"},
}
STANDARD = sys.stdlib_module_names


def imported_names(source: str) -> Iterator[str]:
    """The dotted name of everything a module imports, at its top or inside its functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, "relative imports are not used"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def breaches(module: str, source: str) -> list[str]:
    """What a module of tfm_export, such as "export.variant", imports against the rule."""
    part, found = module.partition(".")[0], []
    for name in imported_names(source):
        library, _, rest = name.partition(".")
        places = LIBRARIES.get(library, set())
        if library == "tfm_export":
            found += own_breaches(part, rest.partition(".")[0] or "model", name)  # tfm_export itself gives the model
        elif library not in STANDARD and not {part, module} & places:
            found.append(f"{module} imports {name}, which is for {', '.join(sorted(places)) or 'none'}")
    return found


def own_breaches(part: str, imported: str, name: str) -> list[str]:
    """The same for an import of another part of tfm_export."""
    if imported not in RANKS:
        return [f"{part} imports {name}, which has no place in LAYERS"]
    if imported == part:
        return []
    if part not in ONLY_FOR.get(imported, RANKS):
        return [f"{part} imports {name}, which is for {', '.join(sorted(ONLY_FOR[imported]))}"]
    if RANKS[imported] >= RANKS[part]:
        return [f"{part} imports {name}, which is not below it"]
    if part == "decoding" and imported == "runtime" and not name.startswith("tfm_export.runtime.step_model."):
        return [f"decoding imports {name}: of the runtime it may see the step_model seam alone"]
    return []


def module_of(path: Path) -> str:
    """The name of a module below tfm_export: "errors", "export", "export.variant"."""
    return ".".join(path.relative_to(ROOT / "tfm_export").with_suffix("").parts).removesuffix(".__init__")


FILES = sorted(p for p in (ROOT / "tfm_export").rglob("*.py") if p != ROOT / "tfm_export/__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_lies_below_it(path: Path) -> None:
    module = module_of(path)
    assert module.partition(".")[0] in RANKS, f"give {module} a place in LAYERS"
    assert breaches(module, path.read_text(encoding="utf-8")) == []


def test_the_package_itself_imports_the_model_and_what_lies_below() -> None:
    names = [n.split(".") for n in imported_names((ROOT / "tfm_export/__init__.py").read_text(encoding="utf-8"))]
    assert [".".join(n) for n in names if n[0] == "tfm_export" and RANKS[n[1]] > RANKS["model"]] == []
    assert [".".join(n) for n in names if n[0] not in STANDARD | {"tfm_export", "numpy"}] == []


@pytest.mark.parametrize("path", sorted((ROOT / "reference_model").glob("*.py")), ids=lambda path: path.name)
def test_the_reference_model_stands_alone(path: Path) -> None:
    libraries = {name.partition(".")[0] for name in imported_names(path.read_text(encoding="utf-8"))}
    assert libraries - STANDARD <= {"torch", "tqdm", "reference_model"}
    assert path.stem in {"train", "training", "evaluate"} or "tqdm" not in libraries


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        (
            "errors",
            "from tfm_export.bundle import Bundle",
            "errors imports tfm_export.bundle.Bundle, which is not below",
        ),
        (
            "export",
            "def f():\n    import tfm_export.quantize.passes",
            "export imports tfm_export.quantize.passes, which",
        ),
        (
            "decoding",
            "from tfm_export import tokenizer",
            "decoding imports tfm_export.tokenizer, which is not below it",
        ),
        ("runtime", "import torch", "runtime imports torch, which is for checkpoints, export, runtime"),
        ("model", "from tfm_export.checkpoints import load", "model imports tfm_export.checkpoints.load, which is for"),
        ("decoding", "from tfm_export.runtime.session import S", "decoding imports tfm_export.runtime.session.S: of"),
        ("cli", "import requests", "cli imports requests, which is for none"),
        ("bundle", "import numpy as np", "bundle imports numpy, which is for"),
        ("verify", "import tfm_export.utils", "verify imports tfm_export.utils, which has no place in LAYERS"),
    ],
)
def test_a_breach_of_the_rule_is_found(module: str, source: str, expected: str) -> None:
    (found,) = breaches(module, source)
    assert found.startswith(expected)


def test_imports_that_keep_the_rule_are_left_alone() -> None:
    source = (
        "import json\nimport numpy as np\nimport torch\nfrom tfm_export.bundle import Bundle\nimport tfm_export.verify"
    )
    assert breaches("export", source) == []
    assert breaches("runtime.torch_model", "import torch") == []
    assert breaches("decoding", "from tfm_export.runtime.step_model import StepModel\nimport numpy") == []
