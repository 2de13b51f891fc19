"""`tfm-export verify`: whether a bundle gives what PyTorch gives."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from tfm_export.bundle import Bundle
from tfm_export.cli.checkpoint_adapter import adapter_option, load_factory
from tfm_export.cli.expect import expect_option, read_expectations
from tfm_export.cli.options import bundle_argument, json_option, threads_option
from tfm_export.cli.progress import Stopwatch
from tfm_export.cli.reports import print_reading, print_verdict
from tfm_export.errors import ParityError
from tfm_export.extras import require, require_onnxruntime
from tfm_export.graph import GENERATE
from tfm_export.runtime.cpu.saturation import generate_graph_problem, saturation_note

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tfm_export.checkpoints import SourceModel
    from tfm_export.verify import ParityReport


@click.command("verify")
@bundle_argument
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="The checkpoint that the bundle was made from: also compare every tensor, step by step. Needs torch.",
)
@click.option(
    "--gpu",
    type=click.IntRange(min=0),
    help="The number of a GPU: verify the engines and ONNX graphs that run on it, instead of the graphs on the CPU.",
)
@expect_option
@adapter_option
@threads_option
@json_option
def command(
    bundle: Path,
    checkpoint: Path | None,
    gpu: int | None,
    expect: BinaryIO | None,
    adapter: str | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Compare a bundle with PyTorch: its golden inputs token for token, alone and batched.

    \b
    Example:
      tfm-export verify tfm_bundle --checkpoint checkpoint.pt
      tfm-export verify tfm_bundle --expect pairs.tsv
      tfm-export verify tfm_bundle --gpu 0

    Ends with exit code 3 if the results of the bundle differ from PyTorch's, or if the pairs of --expect do not come
    out as expected; with --checkpoint, the error then names settings with which they do.
    """
    if adapter is not None and checkpoint is None:
        raise click.UsageError("--adapter has no effect without --checkpoint")
    opened = Bundle.open(bundle)
    _require(with_torch=checkpoint is not None)
    expectations = read_expectations(expect)
    source = None if checkpoint is None else _read(checkpoint, adapter, opened)
    reference = None if source is None else source.model
    from tfm_export.verify import (
        PARITY,
        PARITY_GPU,
        add_transformers,
        explain_pairs,
        reports_json,
        verify_gpu,
        verify_variant,
        write_reports,
    )

    left_out, wrong = list[str](), None
    with Stopwatch() as stopwatch:
        if gpu is not None:
            reports, left_out = verify_gpu(
                opened, gpu, reference=reference, expectations=expectations, progress=stopwatch.begin
            )
        else:
            reports = [
                verify_variant(
                    opened,
                    name,
                    reference=reference,
                    expectations=expectations,
                    threads=threads,
                    progress=stopwatch.begin,
                )
                for name in opened.manifest.variants
            ]
            reports = add_transformers(opened, reports, source, progress=stopwatch.begin)
        if source is not None and expectations is not None:
            wrong = explain_pairs(opened, source, reports, expectations, progress=stopwatch.begin)
    for note in [*(_notes(opened) if gpu is None else []), *(f"not judged: {reason}" for reason in left_out)]:
        click.echo(f"note: {note}", err=True)
    try:
        write_reports(opened, reports, name=PARITY if gpu is None else PARITY_GPU)
    except OSError as problem:  # a bundle that a service reads may well be read-only
        click.echo(f"note: the report was not written into the bundle: {problem}", err=True)
    if as_json:
        click.echo(reports_json(reports), nl=False)
    else:
        for report in reports:
            print_verdict(report)
        if reports:
            print_reading(reports[0])
    if wrong is not None:
        raise wrong
    _verdict(reports, source, gpu=gpu is not None)


def _require(*, with_torch: bool) -> None:
    """Make sure that what compares is installed."""
    require_onnxruntime()
    for module in ("onnx", "onnx_ir", *(("torch", "safetensors") if with_torch else ())):
        require(module, extra="export" if with_torch else "quantize")


def _read(checkpoint: Path, adapter: str | None, bundle: Bundle) -> SourceModel:
    """The checkpoint as it was read when it was exported: what its file does not say was said then."""
    from tfm_export.checkpoints import read_adapter, read_checkpoint, settings_of

    settings = settings_of(bundle)
    if adapter is None:
        return read_checkpoint(checkpoint, settings)
    return read_adapter(checkpoint, load_factory(adapter), settings)


def _verdict(reports: Sequence[ParityReport], source: SourceModel | None, *, gpu: bool) -> None:
    """Fail where a report has.

    Raises:
        ParityError: naming every failure.
    """
    problems = [
        f"{report.backend if gpu else report.variant}: {problem}" for report in reports for problem in report.problems()
    ]
    if problems:
        from tfm_export.verify import adapter_hint

        failed = next(report for report in reports if not report.passed)
        has_decode = None if source is None else getattr(source.model, "has_decode", None)
        hint = failed.hint if has_decode is None else adapter_hint(failed, has_decode=has_decode)
        raise ParityError(problems, hint)


def _notes(bundle: Bundle) -> list[str]:
    """What this processor makes of variants that multiply in 8 bits."""
    notes = []
    for name in bundle.manifest.variants:
        if note := saturation_note(bundle, name):
            notes.append(f"{name}: {note}")
        if f"onnx/{name}/{GENERATE}" in bundle.manifest.files and (problem := generate_graph_problem(bundle, name)):
            notes.append(f"not judged: {problem}")
    return notes
