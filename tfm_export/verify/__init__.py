"""Parity: whether what comes out of a bundle is what PyTorch says.

Three verdicts: the graphs, step by step in float64, against PyTorch in float64 (needs the checkpoint); every
log-probability and cached tensor of what runs them, against the graphs in float64 (needs the package onnx); and whole
generations of the golden inputs, token for token (needs the bundle alone).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tfm_export.bundle import GOLDEN, Bundle, write_text
from tfm_export.errors import BackendUnavailable, BundleError
from tfm_export.graph import GENERATE
from tfm_export.precision import PRECISIONS
from tfm_export.progress import Progress
from tfm_export.runtime.backends import survey
from tfm_export.runtime.cpu.saturation import generate_graph_problem
from tfm_export.runtime.step_model import StepModel
from tfm_export.text_files import read_text
from tfm_export.tokenizer import load_tokenizer
from tfm_export.verify.cpu import CPU, TWIN, cpu_model
from tfm_export.verify.expectation_file import Expectations, parse_expectations
from tfm_export.verify.expectations import ExpectedComparison, ReadModel, compare_expectations
from tfm_export.verify.generate_graph import compare_generate_graph
from tfm_export.verify.golden import (
    BeamGolden,
    Golden,
    compare_generations,
    golden_text,
    read_golden,
    tie_margin,
)
from tfm_export.verify.page import parity_page
from tfm_export.verify.reading import ReadingProof, explain_pairs
from tfm_export.verify.report import (
    Divergence,
    GenerationComparison,
    ParityReport,
    TensorComparison,
    adapter_hint,
    reports_json,
)

if TYPE_CHECKING:
    from tfm_export.checkpoints import SourceModel
    from tfm_export.verify.reference import Reference
    from tfm_export.verify.steps import StepsComparison

__all__ = [
    "BeamGolden",
    "Divergence",
    "Expectations",
    "ExpectedComparison",
    "GenerationComparison",
    "Golden",
    "ParityReport",
    "ReadingProof",
    "TensorComparison",
    "adapter_hint",
    "add_transformers",
    "compare_generate_graph",
    "compare_generations",
    "cpu_model",
    "explain_pairs",
    "golden_text",
    "parse_expectations",
    "read_golden",
    "reports_json",
    "verify_gpu",
    "verify_model",
    "verify_variant",
    "write_reports",
]

REPORTS = "reports"
PARITY, PARITY_GPU = "parity", "parity_gpu"


def verify_variant(
    bundle: Bundle,
    variant: str = "fp32",
    *,
    reference: Reference | None = None,
    expectations: Expectations | None = None,
    threads: int | None = None,
    progress: Progress = lambda _: None,
) -> ParityReport:
    """Judge one variant of a bundle.

    Args:
        bundle: an open bundle; its graphs are loaded anew, and checked against the graph table while loading.
        variant: its name.
        reference: the same weights in PyTorch; without it only generations are compared.
        expectations: the user's own pairs.
        threads: for the runtime.
        progress: told what begins.

    Raises:
        BundleError: the bundle has no such variant or no golden inputs, or its graphs are not of the expected form.
    """
    precision, manifest = PRECISIONS[variant], bundle.manifest
    backend = CPU if precision.float_type == "float32" else TWIN
    with cpu_model(bundle, variant, threads=threads) as model:
        report = verify_model(
            bundle, model, variant, backend, reference=reference, expectations=expectations, progress=progress
        )
    if f"onnx/{variant}/{GENERATE}" in manifest.files and generate_graph_problem(bundle, variant) is None:
        graph = compare_generate_graph(bundle, variant, threads=threads, progress=progress)
        report = replace(report, generations=[*report.generations, *graph])
    return report


def verify_model(
    bundle: Bundle,
    model: StepModel,
    variant: str,
    backend: str,
    *,
    reference: Reference | None = None,
    expectations: Expectations | None = None,
    progress: Progress = lambda _: None,
) -> ParityReport:
    """Judge a loaded model of a variant, on whatever backend.

    Args:
        bundle: the open bundle that it is from.
        model: what decodes.
        variant: by whose standards it is judged.
        backend: what the report calls it.
        reference: the same weights in PyTorch; without it only generations are compared.
        expectations: the user's own pairs.
        progress: told what begins.

    Raises:
        BundleError: the bundle has no golden inputs.
    """
    precision, manifest = PRECISIONS[variant], bundle.manifest
    if GOLDEN not in manifest.files:
        raise BundleError(f"{bundle.path} has no {GOLDEN} to verify against", "export the bundle again")
    golden, notes = read_golden(bundle, GOLDEN), list[str]()
    steps = None
    if precision.judged_by_number and all(find_spec(name) for name in ("onnx", "onnx_ir")):
        steps = _steps(bundle, model, variant, reference, golden, progress)
    elif precision.judged_by_number:
        notes.append("single numbers were not compared, which takes the package onnx: tfm-export[quantize] has it")
    if manifest.golden["synthetic"] and precision.agreement < 1:
        precision = replace(precision, agreement=0.0)  # what rounding makes of random ids tells nothing of quality
    expected = None if expectations is None else _expected(bundle, model, variant, expectations, progress)
    return ParityReport(
        variant=variant,
        backend=backend,
        synthetic=bool(manifest.golden["synthetic"]),
        graph=[] if steps is None else steps.graph,
        kernels=[] if steps is None else steps.kernels,
        argmax_agreement=None if steps is None else steps.argmax_agreement,
        notes=notes,
        generations=compare_generations(model, golden, manifest.special_ids, manifest.golden, precision, progress),
        expected=expected,
        reading=ReadingProof.of(manifest).shown_by(expected).text(),
    )


def _expected(
    bundle: Bundle, model: StepModel, variant: str, expectations: Expectations, progress: Progress
) -> ExpectedComparison:
    """Decode the user's own pairs; a precision that rounds is held to its share of them, and to no log-probability."""
    precision, manifest = PRECISIONS[variant], bundle.manifest
    progress(f"decoding the {len(expectations.pairs)} pairs of {expectations.name}")
    return compare_expectations(
        ReadModel(
            model=model,
            tokenizer=load_tokenizer(bundle),
            special=manifest.special_ids,
            defaults=manifest.generation.options,
        ),
        expectations,
        limit=tie_margin(manifest.golden) / 2,
        log_probs=precision.judged_by_number,
        needed=precision.agreement,
    )


def add_transformers(
    bundle: Bundle, reports: Sequence[ParityReport], source: SourceModel | None, *, progress: Progress = lambda _: None
) -> list[ParityReport]:
    """Put into the report on fp32 what transformers says, where a bundle was made of a folder of theirs.

    Args:
        bundle: an open bundle; if all passes, its manifest, in memory, tells that.
        reports: on its variants.
        source: the checkpoint, as it was read; None if it is not there.
        progress: told what begins.
    """
    if source is None:
        return [*reports]
    from tfm_export.checkpoints import Adapter
    from tfm_export.verify.transformers_proof import prove_with_transformers

    proof = (
        None if isinstance(source.model, Adapter) else prove_with_transformers(bundle, source.path, progress=progress)
    )
    if proof is None:
        return [*reports]
    joined = [proof.joined(report) if report.variant == "fp32" else report for report in reports]
    if not proof.proven:
        return joined
    reading = replace(ReadingProof.of(bundle.manifest), transformers=proof.version, inputs=proof.proven)
    told = {**asdict(reading), "verdict": reading.text()}
    tools = {**bundle.manifest.tools, "transformers": proof.version}
    bundle.manifest = replace(bundle.manifest, model={**bundle.manifest.model, "reading": told}, tools=tools)
    return [replace(report, reading=reading.shown_by(report.expected).text()) for report in joined]


def _steps(
    bundle: Bundle,
    model: StepModel,
    variant: str,
    reference: Reference | None,
    golden: Sequence[Golden],
    progress: Progress,
) -> StepsComparison:
    from tfm_export.verify.steps import compare_steps, teacher_forcing

    manifest = bundle.manifest
    exact = None
    if reference is not None:
        from tfm_export.verify.reference import float64_reference

        exact = float64_reference(reference, bundle.variant_path(variant))
    return compare_steps(
        bundle.variant_path(variant),
        manifest.dimensions,
        teacher_forcing(manifest.dimensions, manifest.limits, golden, manifest.special_ids.bos),
        model=model,
        reference=exact,
        progress=progress,
    )


def verify_gpu(
    bundle: Bundle,
    gpu: int,
    *,
    reference: Reference | None = None,
    expectations: Expectations | None = None,
    progress: Progress = lambda _: None,
) -> tuple[list[ParityReport], list[str]]:
    """Judge every engine and variant of a bundle that runs on a GPU.

    Args:
        bundle: an open bundle.
        gpu: the number of the GPU.
        reference: the same weights in PyTorch; without it only generations are compared.
        expectations: the user's own pairs.
        progress: told what begins.

    Returns:
        The reports, and why others do not run there.

    Raises:
        BackendUnavailable: nothing runs there.
        BundleError: the bundle has no golden inputs.
    """
    reports, left_out = [], []
    for way, problem in survey(bundle, gpus=[gpu], cpu=False):
        if problem is not None:
            left_out.append(f"{way}: {' '.join(problem.problems)}")
            continue
        progress(f"loading {way}")
        model = way.open(bundle)
        try:
            reports.append(
                verify_model(
                    bundle,
                    model,
                    way.variant,
                    str(way),
                    reference=reference,
                    expectations=expectations,
                    progress=progress,
                )
            )
        finally:
            model.close()
    if not reports:
        raise BackendUnavailable(left_out, "tfm-export doctor BUNDLE")
    return reports, left_out


def write_reports(bundle: Bundle, reports: Sequence[ParityReport], *, name: str = PARITY) -> None:
    """Put what was measured into the bundle's reports/, for programs and for people.

    The manifest does not name reports: a service runs without them, and one that is loading the bundle meanwhile must
    not find an altered file. Where the graphs were not compared with PyTorch this time, the last comparison stays:
    the manifest's hashes tell that the graphs are still the same.

    Args:
        bundle: the bundle.
        reports: one for each variant, or for each way to run one.
        name: of the files.
    """
    folder = bundle.path / REPORTS
    folder.mkdir(exist_ok=True)
    data, page = folder / f"{name}.json", folder / f"{name}.html"
    if name == PARITY:  # an engine of the same name may be another one
        reports = [report if report.graph else _with_last_graph(report, data) for report in reports]
    write_text(data, reports_json(reports))
    write_text(page, parity_page(reports, "Parity with PyTorch"))


def _with_last_graph(report: ParityReport, path: Path) -> ParityReport:
    try:
        last = json.loads(read_text(path))
        kind = (report.variant, report.backend)
        entry = next(entry for entry in last["variants"] if (entry["variant"], entry["backend"]) == kind)
        names = [f.name for f in fields(TensorComparison)]
        tensors = [
            TensorComparison(**{name: tensor[name] for name in names if name in tensor}) for tensor in entry["graph"]
        ]
        return replace(report, graph=tensors)
    except (OSError, ValueError, LookupError, TypeError, StopIteration):
        return report  # there is no last comparison that can be read
