"""The stage that gives a variant generate.onnx: its whole greedy decode in one graph, for any language."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

from tfm_export import graph
from tfm_export.bundle import GOLDEN, Bundle, write_text
from tfm_export.decoding import DecodeOptions
from tfm_export.errors import BundleError, ParityError, RequestError
from tfm_export.graph_files import read_graph, weight_bytes, write_graph
from tfm_export.passes.generate_graph import build_generate_graph
from tfm_export.precision import PRECISIONS
from tfm_export.progress import Progress
from tfm_export.quotation import quote
from tfm_export.runtime.cpu.saturation import generate_graph_problem
from tfm_export.staging import check_file, new_file
from tfm_export.verify import ParityReport, compare_generate_graph, reports_json

# Defaults that say how beams are ranked and when they end, or that have an effect only beside others.
OF_BEAMS = {
    "compatibility",
    "stop_rule",
    "early_stopping",
    "patience",
    "length_formula",
    "num_hypotheses",
    "score_change",
    "renormalize_logits",
    "start_token_repeats",
    "end_after_prefix",
    "return_scores",
    "max_batch_size",
    "batch_type",
}

# A file with everything in it is the simplest to ship; a large one is not worth having twice.
MOST_BYTES_INSIDE = 100_000_000


def add_generate_graph(
    bundle: Bundle,
    variant: str = "fp32",
    *,
    without: Collection[str] = (),
    verify: bool = True,
    threads: int | None = None,
    force: bool = False,
    progress: Progress = lambda _: None,
) -> ParityReport | None:
    """Write generate.onnx beside the two graphs it is made of, once it gives what it should for the golden inputs.

    See `verify.compare_generate_graph`. A file of up to 100 MB holds its weights; a larger one refers to the variant's
    weights.bin. What was measured is also written to reports/generate_<variant>.json.

    Args:
        bundle: an open bundle; its manifest is the new one afterwards.
        variant: the precision.
        without: those of the bundle's decoding defaults that the graph may leave out, by name; see `left_out`.
        verify: compare it with PyTorch before it is put in place.
        threads: threads to verify with; None for the CPUs this process may use.
        force: replace the file that is there.
        progress: told what begins.

    Returns:
        What was measured, if it was.

    Raises:
        BundleError: the bundle has no such variant, has the file already, lacks golden inputs or cannot be written to.
        ParityError: the graph does not give what it should; the bundle is as it was.
        RequestError: the variant cannot be verified on a CPU, or the bundle has defaults that the graph would ignore.
    """
    name = f"onnx/{variant}/{graph.GENERATE}"
    folder = bundle.variant_path(variant)
    check_generate_graph(bundle, variant, without=without, verify=verify, force=force)
    progress(f"putting {variant}'s decode into one graph")
    manifest = bundle.manifest
    model = build_generate_graph(
        read_graph(folder / graph.ENCODER),
        read_graph(folder / graph.DECODER_STEP),
        manifest.special_ids,
        max_target_length=manifest.limits.max_target_length,
    )
    inside = weight_bytes(model) <= MOST_BYTES_INSIDE
    purpose = f"the whole greedy decode in one call, {'weights inside' if inside else f'beside {graph.WEIGHTS}'}"
    if ignored := left_out(bundle):
        purpose += f", without the bundle's {', '.join(ignored)}"
    report = None
    with new_file(bundle, name, purpose, force=force) as path:
        write_graph(model, path, weights_inside=inside)
        if verify:
            report = _verify(bundle, variant, path, threads, progress)
            report.notes.extend(f"generate.onnx leaves out the bundle's default {name}" for name in ignored)
    if report is not None:
        (bundle.path / "reports").mkdir(exist_ok=True)
        write_text(bundle.path / "reports" / f"generate_{variant}.json", reports_json([report]))
    return report


def left_out(bundle: Bundle) -> dict[str, Any]:
    """The bundle's decoding defaults that change a greedy search, and that the graph does not know."""
    options = bundle.manifest.generation.options
    neutral = {field.name: field.default for field in fields(DecodeOptions)} | {
        "end_token": bundle.manifest.special_ids.eos
    }
    return {
        name: value
        for name, value in options.items()
        if name not in OF_BEAMS and value != neutral.get(name) and value not in ([], [neutral.get(name)])
    }


def check_generate_graph(
    bundle: Bundle, variant: str, *, without: Collection[str] = (), verify: bool = True, force: bool = False
) -> None:
    """Make sure that `add_generate_graph` can do its work; called before any is done."""
    bundle.variant_path(variant)
    ignored = left_out(bundle)
    if missing := [name for name in ignored if name not in without]:
        raise RequestError(
            [
                f"generate.onnx decodes greedily, and knows nothing of the bundle's default {name}, "
                f"{quote(ignored[name])}: its targets would be others than those of the bundle"
                for name in missing
            ],
            " ".join(f"--generate-without {name}" for name in missing) + ", if it is to be left out",
        )
    if unknown := [name for name in without if name not in ignored]:
        raise RequestError(f"the bundle has no default {', '.join(map(quote, unknown))} that could be left out")
    if verify and not PRECISIONS[variant].runs_on_cpu:
        raise RequestError(f"ONNX Runtime's CPU provider has no kernels for {variant}", "another variant")
    if verify and (problem := generate_graph_problem(bundle, variant)):
        raise RequestError(problem, "a processor with VNNI or AMX, or another variant")
    if verify and GOLDEN not in bundle.manifest.files:
        raise BundleError(f"{bundle.path} has no {GOLDEN} to verify against", "export the bundle again")
    check_file(bundle, f"onnx/{variant}/{graph.GENERATE}", force=force)


def _verify(bundle: Bundle, variant: str, path: Path, threads: int | None, progress: Progress) -> ParityReport:
    report = ParityReport(
        variant=variant,
        backend=f"onnxruntime-cpu, {graph.GENERATE}",
        synthetic=bool(bundle.manifest.golden["synthetic"]),
        graph=[],
        kernels=[],
        argmax_agreement=None,
        generations=compare_generate_graph(bundle, variant, path=path, threads=threads, progress=progress),
    )
    if not report.passed:
        raise ParityError(report.problems(), "report this with the checkpoint's configuration")
    return report
