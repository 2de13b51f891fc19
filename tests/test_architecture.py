"""The import rule: imports go down only, stages never meet but in the bundle, heavy libraries stay in their places."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.glossary import DOCUMENT, entries, public_classes, written

ROOT = Path(__file__).parent.parent

# From the bottom up. A part may import those of the lines above it, and never one of its own line.
LAYERS = (
    ("quotation",),
    ("errors",),
    ("text_files",),
    ("extras", "field_types", "graph", "json_text", "pinned_folder", "precision", "progress"),
    ("bundle",),
    ("staging", "graph_files", "engines"),
    ("runtime", "passes"),
    ("decoding", "tokenizer"),
    ("model",),
    ("checkpoints", "serve"),
    ("verify",),
    ("export", "quantize", "generate_graph", "trt", "bench"),  # the stages
    ("cli",),
    ("__main__",),
)
RANKS = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}

# A part that only these may import, whatever their rank.
ONLY_FOR = {"checkpoints": {"verify", "export", "cli"}}

# The rooms of the runtime, which do not know each other, and what knows them all; they share what else is in it.
ROOMS, ABOVE_ROOMS = {"cpu", "gpu"}, {"backends", "probes"}

# The parts, rooms and single modules that may import a library. `import tfm_export` needs none of them but numpy.
PYTORCH = {"export", "checkpoints", "verify", "runtime.torch_model"}
GPU = {"trt", "runtime.gpu"}
LIBRARIES = {
    "torch": PYTORCH,
    "reference_model": PYTORCH,
    "sympy": {"export"},
    "onnxscript": {"export"},
    "onnx_ir": {"export", "graph_files", "passes", "quantize", "trt"},
    "onnx": {"export", "graph_files", "passes", "quantize", "trt", "verify"},
    "onnxruntime": {"runtime", "quantize", "verify"},
    "ml_dtypes": {"passes"},
    "tensorrt": GPU,
    "tensorrt_rtx": GPU,
    "polygraphy": {"trt"},
    "cuda": GPU,
    "safetensors": {"checkpoints"},
    "transformers": {"verify.transformers_folder"},
    "tokenizers": {"tokenizer"},
    "sentencepiece": {"tokenizer"},
    "subword_nmt": {"tokenizer"},
    "click": {"cli"},
    "prometheus_client": {"serve"},
    "starlette": {"serve"},
    "uvicorn": {"serve"},
    "matplotlib": {"cli"},
    "numpy": set(RANKS)
    - {
        "quotation",
        "errors",
        "text_files",
        "json_text",
        "field_types",
        "extras",
        "graph",
        "precision",
        "progress",
        "bundle",
        "staging",
        "engines",
    },
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
    part, found = module.partition(".")[0], [*room_breaches(module, source)]
    for name in imported_names(source):
        library, _, rest = name.partition(".")
        places = LIBRARIES.get(library, set())
        if library == "tfm_export":
            found += own_breaches(part, rest.partition(".")[0] or "model", name)  # tfm_export itself gives the model
        elif library not in STANDARD and not {part, module, module.rpartition(".")[0]} & places:
            found.append(f"{module} imports {name}, which is for {', '.join(sorted(places)) or 'none'}")
    return found


def room_breaches(module: str, source: str) -> Iterator[str]:
    """What a module of the runtime imports from a room that it should not know, or from above the rooms."""
    here = module.split(".")
    if here[0] == "runtime" and len(here) > 1 and here[1] not in ABOVE_ROOMS:
        for name in imported_names(source):
            there = name.removeprefix("tfm_export.runtime.").split(".")[0]
            if name.startswith("tfm_export.runtime.") and there in (ROOMS | ABOVE_ROOMS) - {here[1]}:
                yield f"{module} imports {name}, which is for {', '.join(sorted(ABOVE_ROOMS))}"


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
        (
            "runtime.cpu.memory",
            "from tfm_export.runtime.gpu import cuda",
            "runtime.cpu.memory imports tfm_export.runtime.gpu.cuda, which is for backends, probes",
        ),
        (
            "runtime.gpu.memory",
            "from tfm_export.runtime.cpu.memory import Pool",
            "runtime.gpu.memory imports tfm_export.runtime.cpu.memory.Pool, which is for backends",
        ),
        (
            "runtime.checks",
            "from tfm_export.runtime.gpu import cuda",
            "runtime.checks imports tfm_export.runtime.gpu.cuda, which is for backends",
        ),
        ("runtime.gpu.memory", "import tfm_export.runtime.backends", "runtime.gpu.memory imports tfm_export.runtime.b"),
        ("runtime.cpu.memory", "import tensorrt", "runtime.cpu.memory imports tensorrt, which is for runtime.gpu, trt"),
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
    assert breaches("runtime.gpu.memory", "import cuda\nfrom tfm_export.runtime.gpu.cuda import Gpu") == []
    assert breaches("runtime.backends", "from tfm_export.runtime.gpu import cuda\nimport tfm_export.runtime.cpu") == []
    assert breaches("decoding", "from tfm_export.runtime.step_model import StepModel\nimport numpy") == []


def test_no_two_public_classes_share_a_name() -> None:
    names = [name for name, _ in public_classes()]
    assert {name for name in names if names.count(name) > 1} == set()


def test_the_glossary_has_every_public_class_and_no_other() -> None:
    """`python -m tests.glossary` mends the table of rooms; lines of the list above it are mended by hand."""
    document = DOCUMENT.read_text(encoding="utf-8")
    found, expected = entries(document), public_classes()
    assert sorted({*expected} - {*found}) == [], "lacking: python -m tests.glossary"
    assert sorted({*found} - {*expected}) == [], "not there: take its line out, or name its new place"
    assert len(found) == len({*found}), "a class stands there twice"
    assert document == written(document), "python -m tests.glossary"
    nouns = [line.removeprefix("- ").strip("`").casefold() for line in document.splitlines() if line.startswith("- ")]
    assert nouns == sorted(nouns), "the list is alphabetical"
