"""`tfm-export verify`: whether a bundle gives what PyTorch gives."""

from __future__ import annotations

from pathlib import Path

import click

from tfm_export.bundle import Bundle
from tfm_export.cli.checkpoint_adapter import adapter_option, load_factory
from tfm_export.cli.options import bundle_argument, json_option, threads_option
from tfm_export.cli.progress import Stopwatch
from tfm_export.cli.reports import print_verdict
from tfm_export.errors import ParityError
from tfm_export.extras import require, require_onnxruntime
from tfm_export.graph import GENERATE
from tfm_export.runtime.cpu.saturation import generate_graph_problem, saturation_note


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
@adapter_option
@threads_option
@json_option
def command(
    bundle: Path,
    checkpoint: Path | None,
    gpu: int | None,
    adapter: str | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Compare a bundle with PyTorch: its golden inputs token for token, alone and batched.

    \b
    Example:
      tfm-export verify tfm_bundle --checkpoint checkpoint.pt
      tfm-export verify tfm_bundle --gpu 0

    Ends with exit code 3 if the results of the bundle differ from PyTorch's.
    """
    if adapter is not None and checkpoint is None:
        raise click.UsageError("--adapter has no effect without --checkpoint")
    opened = Bundle.open(bundle)
    require_onnxruntime()
    reference, has_decode = None, None
    if checkpoint is not None:
        require("torch", extra="export")
        from tfm_export.checkpoints import Adapter, read_adapter, read_checkpoint

        # What its file does not say is what was said when it was exported.
        settings = opened.manifest.model.get("settings")
        if adapter is None:
            reference = read_checkpoint(checkpoint, settings).model
        else:
            reference = read_adapter(checkpoint, load_factory(adapter), settings).model
            has_decode = isinstance(reference, Adapter) and reference.has_decode
    from tfm_export.verify import (
        PARITY,
        PARITY_GPU,
        adapter_hint,
        reports_json,
        verify_gpu,
        verify_variant,
        write_reports,
    )

    left_out: list[str] = []
    with Stopwatch() as stopwatch:
        if gpu is not None:
            reports, left_out = verify_gpu(opened, gpu, reference=reference, progress=stopwatch.begin)
        else:
            reports = [
                verify_variant(opened, name, reference=reference, threads=threads, progress=stopwatch.begin)
                for name in opened.manifest.variants
            ]
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
    problems = [
        f"{report.variant if gpu is None else report.backend}: {problem}"
        for report in reports
        for problem in report.problems()
    ]
    if problems:
        failed = next(report for report in reports if not report.passed)
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
