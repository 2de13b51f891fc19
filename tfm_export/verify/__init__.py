"""Parity: whether what comes out of a bundle is what PyTorch says.

Two levels: every log-probability and cached tensor, step by step, against PyTorch in float64 (needs the checkpoint),
and whole generations of the golden inputs, token for token (needs the bundle alone).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from tfm_export.bundle import GOLDEN, Bundle, write_text
from tfm_export.errors import BundleError
from tfm_export.graph import GENERATE
from tfm_export.precision import PRECISIONS
from tfm_export.verify.cpu import CPU, TWIN, cpu_model
from tfm_export.verify.generate_graph import compare_generate_graph
from tfm_export.verify.golden import BeamGolden, Golden, compare_generations, golden_text, read_golden
from tfm_export.verify.page import parity_page
from tfm_export.verify.report import Divergence, GenerationComparison, ParityReport, TensorComparison, reports_json

if TYPE_CHECKING:
    from reference_model import Transformer

__all__ = [
    "BeamGolden",
    "Divergence",
    "GenerationComparison",
    "Golden",
    "ParityReport",
    "TensorComparison",
    "compare_generate_graph",
    "compare_generations",
    "cpu_model",
    "golden_text",
    "read_golden",
    "reports_json",
    "verify_variant",
    "write_reports",
]

PARITY_JSON = "reports/parity.json"
PARITY_PAGE = "reports/parity.html"


def verify_variant(
    bundle: Bundle,
    variant: str = "fp32",
    *,
    reference: Transformer | None = None,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> ParityReport:
    """Judge one variant of a bundle.

    Args:
        bundle: an open bundle; its graphs are loaded anew, and checked against the graph table while loading.
        variant: its name.
        reference: the same weights in PyTorch; without it only generations are compared.
        threads: for the runtime.
        progress: told what begins.

    Raises:
        BundleError: the bundle has no such variant or no golden inputs, or its graphs are not of the expected form.
    """
    precision, manifest = PRECISIONS[variant], bundle.manifest
    if GOLDEN not in manifest.files:
        raise BundleError(f"{bundle.path} has no {GOLDEN} to verify against", "export the bundle again")
    tensors: list[TensorComparison] = []
    agreement = None
    with cpu_model(bundle, variant, threads=threads) as model:
        if reference is not None and precision.tolerance is not None:
            from tfm_export.verify.steps import compare_steps

            progress("comparing every tensor step by step")
            steps = compare_steps(model, reference, precision.tolerance)
            tensors, agreement = steps.tensors, steps.argmax_agreement
        golden = read_golden(bundle, GOLDEN)
        generations = compare_generations(model, golden, manifest.special_ids, manifest.golden, precision, progress)
    if f"onnx/{variant}/{GENERATE}" in manifest.files:
        generations += compare_generate_graph(bundle, variant, threads=threads, progress=progress)
    return ParityReport(
        variant=variant,
        backend=CPU if precision.float_type == "float32" else TWIN,
        synthetic=bool(manifest.golden["synthetic"]),
        tensors=tensors,
        argmax_agreement=agreement,
        generations=generations,
    )


def write_reports(bundle: Bundle, reports: Sequence[ParityReport]) -> None:
    """Put what was measured into the bundle's reports/, for programs and for people.

    The manifest does not name reports: a service runs without them, and one that is loading the bundle meanwhile must
    not find an altered file. Where tensors were not compared this time, the last comparison of them stays: the
    manifest's hashes tell that the graphs are still the same.
    """
    reports = [report if report.tensors else _with_last_tensors(report, bundle) for report in reports]
    (bundle.path / PARITY_JSON).parent.mkdir(exist_ok=True)
    write_text(bundle.path / PARITY_JSON, reports_json(reports))
    write_text(bundle.path / PARITY_PAGE, parity_page(reports, "Parity with PyTorch"))


def _with_last_tensors(report: ParityReport, bundle: Bundle) -> ParityReport:
    try:
        last = json.loads((bundle.path / PARITY_JSON).read_text(encoding="utf-8"))
        entry = next(entry for entry in last["variants"] if entry["variant"] == report.variant)
        names = [f.name for f in fields(TensorComparison)]
        tensors = [TensorComparison(**{name: tensor[name] for name in names}) for tensor in entry["tensors"]]
        return replace(report, tensors=tensors, argmax_agreement=entry["argmax_agreement"])
    except (OSError, ValueError, LookupError, TypeError, StopIteration):
        return report  # there is no last comparison that can be read
