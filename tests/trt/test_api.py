"""Every name of TensorRT's API that trt/ uses exists: in the installed library, and in releases of both flavours.

`api.json` holds the names that the bindings of those releases have; `record_api.py` wrote it.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trt import record_api
from tfm_export.trt import flavor as flavor_module
from tfm_export.trt.flavor import MINIMUM, Flavor

ROOT = Path(__file__).parents[2] / "tfm_export" / "trt"
RELEASES: dict[str, dict[str, list[str]]] = json.loads(record_api.API.read_text(encoding="utf-8"))

# What the variables of this package hold.
VARIABLES = {
    "builder": ("Builder",),
    "config": ("IBuilderConfig",),
    "network": ("INetworkDefinition",),
    "parser": ("OnnxParser",),
    "layer": ("ILayer", "IAttentionInputLayer"),
    "attention": ("IAttention",),
    "operand": ("ITensor",),
    "tensor": ("ITensor",),
    "cache": ("ITimingCache",),
    "runtime": ("Runtime",),
    "engine": ("ICudaEngine",),
    "inspector": ("EngineInspector",),
}
FILES = ("builder", "flavor", "inspection", "monitor", "proof", "refusals")
RTX_ONLY = {
    ("ComputeCapability", ""),
    ("IBuilderConfig", "num_compute_capabilities"),
    ("IBuilderConfig", "set_compute_capability"),
}


def used_names() -> set[tuple[str, str]]:
    """Class and member, or class and nothing, of everything that is used."""
    return {pair for file in FILES for pair in names_in((ROOT / f"{file}.py").read_text(encoding="utf-8"))}


def names_in(source: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value
            if is_module(owner):
                yield node.attr, ""
            elif isinstance(owner, ast.Attribute) and is_module(owner.value):
                yield owner.attr, node.attr
            elif (variable := variable_of(owner)) in VARIABLES:
                yield "|".join(VARIABLES[variable]), node.attr
        elif isinstance(node, ast.ClassDef) and node.name == "Monitor":
            yield from (("IProgressMonitor", f.name) for f in node.body if isinstance(f, ast.FunctionDef))


def variable_of(node: ast.expr) -> str:
    """`x` of x, of self._x, and of layer.x, which only an attention layer has."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in {"self", "layer"}:
        return node.attr.removeprefix("_")
    return node.id if isinstance(node, ast.Name) else ""


def is_module(node: ast.expr) -> bool:
    """The variable `trt`, or the attribute `_trt`."""
    return (isinstance(node, ast.Name) and node.id == "trt") or (
        isinstance(node, ast.Attribute) and node.attr == "_trt"
    )


def missing(used: set[tuple[str, str]], members: dict[str, list[str]]) -> set[tuple[str, str]]:
    def there(kinds: str, name: str) -> bool:
        found = [members[kind] for kind in kinds.split("|") if kind in members]
        return bool(found) and (not name or any(name in names for names in found))

    return {(kinds, name) for kinds, name in used if not there(kinds, name) and not name.startswith("__")}


def test_the_walk_finds_what_is_used() -> None:
    used = used_names()
    assert len(used) > 55
    expected = {
        ("OnnxParser", "parse_from_file"),
        ("OnnxParser", "supports_operator"),
        ("LayerType", "KV_CACHE_UPDATE"),
        ("IAttention", "decomposable"),
        ("IAttentionInputLayer", ""),
        ("IBuilderConfig", "progress_monitor"),
        ("IBuilderConfig", "set_compute_capability"),
        ("IProgressMonitor", "step_complete"),
        ("ICudaEngine", "get_aliased_input_tensor"),
        ("ITimingCache", "combine"),
        ("MemoryPoolType", "WORKSPACE"),
    }
    assert expected <= used


def test_the_installed_library_has_every_name(rtx: Flavor) -> None:
    trt: Any = rtx.module
    members = {name: dir(getattr(trt, name)) for name in dir(trt) if isinstance(getattr(trt, name), type)}
    assert missing(used_names(), members) == set()


def recorded(release: str) -> dict[str, list[str]]:
    """Of this package's names those that were recorded; the rest is not known of a release."""
    return RELEASES[release]


@pytest.mark.parametrize("release", [name for name in RELEASES if name.startswith("rtx")])
def test_releases_of_rtx_have_every_name(release: str) -> None:
    assert missing(used_names(), recorded(release)) == set()


@pytest.mark.parametrize("release", [n for n in RELEASES if n.startswith("tensorrt") and "10.14" not in n])
def test_releases_of_tensorrt_have_every_name_but_those_of_rtx(release: str) -> None:
    assert missing(used_names(), recorded(release)) == RTX_ONLY


def test_the_releases_that_are_refused_lack_what_is_looked_for() -> None:
    """10.14 has no layer that updates caches, and the least release that is taken has."""
    assert "IKVCacheUpdateLayer" not in RELEASES["tensorrt 10.14.1.48.post1"]
    assert ("LayerType", "KV_CACHE_UPDATE") in missing(used_names(), RELEASES["tensorrt 10.14.1.48.post1"])
    least = {name: min(r.split()[1] for r in RELEASES if r.startswith(name) and "10.14" not in r) for name in MINIMUM}
    assert {name: version.startswith(MINIMUM[name]) for name, version in least.items()} == dict.fromkeys(MINIMUM, True)


def test_names_that_only_rtx_has_are_used_for_rtx_alone() -> None:
    """`Flavor.configure` and `supported_capabilities` ask which flavour it is before they use them."""
    lines = Path(flavor_module.__file__).read_text(encoding="utf-8").splitlines()
    users = [
        number for number, line in enumerate(lines) if "compute_capability(" in line or "ComputeCapability" in line
    ]
    asked = [number for number, line in enumerate(lines) if 'self.name == "' in line]
    assert all(any(0 <= user - number <= 6 for number in asked) for user in users if "def " not in lines[user])


def test_a_name_that_does_not_exist_is_found() -> None:
    source = "network.no_such_method()\ntrt.LayerType.NO_SUCH_LAYER\nself._builder.build_engine_in_a_second()"
    found = missing(set(names_in(source)), RELEASES["tensorrt 11.4.0.106"])
    assert found == {
        ("INetworkDefinition", "no_such_method"),
        ("LayerType", "NO_SUCH_LAYER"),
        ("Builder", "build_engine_in_a_second"),
    }
