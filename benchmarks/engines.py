"""Engines of the base model in every precision: how long TensorRT-RTX takes to build them, and how large they are.

    python -m benchmarks.engines            # build, write benchmarks/results/engines.json, print the table
    python -m benchmarks.engines --reuse    # with the bundle that another benchmark has left
    python -m benchmarks.engines --table    # the table of the results that are there

Quantised graphs are of the form and size that they would have; what numbers they hold makes no difference here.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.contenders import BUNDLE
from benchmarks.generation import WORK, say
from benchmarks.work import prepare
from tfm_export.bundle import Bundle
from tfm_export.precision import PRECISIONS
from tfm_export.trt.builder import Builder
from tfm_export.trt.monitor import Silent
from tfm_export.trt.network_source import write_sources
from tfm_export.trt.options import EngineOptions
from tfm_export.trt.proof import prove
from tfm_export.trt.stage import draw_blueprint

RESULTS = Path(__file__).parent / "results" / "engines.json"
SIZES = {"max_batch_size": 32, "max_beam_size": 4, "max_source_length": 128, "max_target_length": 128}


def measure(bundle: Bundle, precisions: list[str]) -> dict[str, Any]:
    """Build an engine of each precision.

    Args:
        bundle: of the base model in float32.
        precisions: names.
    """
    entries = []
    for name in precisions:
        say(f"building an engine of {name}")
        options = EngineOptions(variant=name, flavor="rtx", **SIZES)
        start = time.perf_counter()
        blueprint = draw_blueprint(bundle, options, sketch=True, force=True)
        derived = time.perf_counter() - start
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write_sources(blueprint.sources, folder)
            builder = Builder(blueprint.flavor, options, blueprint.targets, Silent())
            for source in blueprint.sources:
                plan = folder / f"{source.plan}.plan"
                start = time.perf_counter()
                built = builder.build(source, folder, plan)
                seconds = time.perf_counter() - start
                asked, network = source.precision, built.network
                found = prove(source, asked, blueprint.compute, network, plan, fused=built.fused, readable=True)
                entries.append(
                    {"precision": name, "build_seconds": seconds, "derive_seconds": derived, **found.facts()}
                )
    return {**machine.describe(), "library": blueprint.flavor.label, "sizes": SIZES, "plans": entries}


def table(results: dict[str, Any]) -> str:
    """The results as a table in Markdown."""
    head = ["", "plan", "products", "weights", "weights in the plan", "plan", "built in"]
    rows = [
        [
            entry["precision"],
            entry["plan"],
            ", ".join(f"{count} {kind}" for kind, count in entry["products"].items()),
            *(f"{entry[size] / 1e6:,.1f} MB" for size in ("weight_bytes", "stored_bytes", "plan_bytes")),
            f"{entry['build_seconds']:.1f} s",
        ]
        for entry in results["plans"]
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the table of the results file and stop")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the results file")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--reuse", action="store_true", help=f"use the bundle that is in {WORK} already")
    arguments = parser.parse_args()
    if not arguments.table:
        if not arguments.reuse:
            prepare(WORK, say)
        results = measure(Bundle.open(WORK / BUNDLE, check_hashes=False), arguments.precisions)
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(json.loads(arguments.output.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
