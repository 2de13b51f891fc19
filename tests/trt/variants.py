"""Variants of a bundle without the proof of their quality: engines are built from any."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from tests.export.conftest import Exported
from tfm_export.bundle import Bundle
from tfm_export.graph_files import read_graph
from tfm_export.passes.recipe import Recipe
from tfm_export.precision import PRECISIONS
from tfm_export.quantize.variant import write_variant

THRESHOLD = 4.0


def add_variant(
    bundle: Bundle, name: str, *, int8_encoder: bool = False, reduced_range: bool = False, threshold: float = THRESHOLD
) -> None:
    """Make a variant with every activation clipped at the same number, and put it into the manifest."""
    folder = bundle.path / "onnx" / name
    folder.mkdir()
    values = {
        f"{path.stem}/{value.name}": threshold
        for path in bundle.variant_path("fp32").glob("*.onnx")
        for node in read_graph(path).graph
        for value in (*node.inputs, *node.outputs)
        if value is not None
    }
    recipe = Recipe(
        precision=name, thresholds=values, ranges=values, int8_encoder=int8_encoder, reduced_range=reduced_range
    )
    write_variant(bundle.variant_path("fp32"), folder, recipe)
    bundle.add_files({f"onnx/{name}/{file.name}": "for the test" for file in folder.iterdir()})
    facts = {"weights": PRECISIONS[name].weights, "compute": PRECISIONS[name].compute, "int8_encoder": int8_encoder}
    bundle.manifest = replace(bundle.manifest, variants={**bundle.manifest.variants, name: facts})
    bundle.save()


def bundle_of(exported: Exported, path: Path, *variants: str) -> Bundle:
    """A bundle of an exported configuration, with some variants."""
    shutil.copytree(exported.bundle.path / "onnx" / "fp32", path / "onnx" / "fp32")
    bundle = Bundle(path, exported.bundle.manifest)
    bundle.add_files({f"onnx/fp32/{file.name}": "for the test" for file in (path / "onnx" / "fp32").iterdir()})
    bundle.save()
    for name in variants:
        add_variant(bundle, name)
    return bundle
