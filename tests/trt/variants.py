"""Variants of a bundle without the proof of their quality: engines are built from any."""

from __future__ import annotations

from dataclasses import replace

from tfm_export.bundle import Bundle
from tfm_export.graph_files import read_graph
from tfm_export.precision import PRECISIONS
from tfm_export.quantize.variant import Recipe, write_variant

THRESHOLD = 4.0


def add_variant(bundle: Bundle, name: str) -> None:
    """Make a variant with every activation clipped at the same number, and put it into the manifest."""
    folder = bundle.path / "onnx" / name
    folder.mkdir()
    values = {
        f"{graph}/{value.name}": THRESHOLD
        for graph in ("encoder", "decoder_step")
        for node in read_graph(bundle.path / "onnx" / "fp32" / f"{graph}.onnx").graph
        for value in (*node.inputs, *node.outputs)
        if value is not None
    }
    write_variant(bundle.variant_path("fp32"), folder, Recipe(precision=name, thresholds=values, ranges=values))
    bundle.add_files({f"onnx/{name}/{file.name}": "for the test" for file in folder.iterdir()})
    facts = {"weights": PRECISIONS[name].weights, "compute": PRECISIONS[name].compute}
    bundle.manifest = replace(bundle.manifest, variants={**bundle.manifest.variants, name: facts})
    bundle.save()
