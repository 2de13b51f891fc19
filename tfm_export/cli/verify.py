"""`tfm-export verify`: whether a bundle gives what PyTorch gives."""

from __future__ import annotations

from pathlib import Path

import click

from tfm_export.bundle import Bundle
from tfm_export.cli.options import bundle_argument, json_option, threads_option
from tfm_export.cli.progress import Stopwatch
from tfm_export.cli.reports import print_verdict
from tfm_export.errors import ParityError
from tfm_export.extras import require, require_onnxruntime


@click.command("verify")
@bundle_argument
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="The checkpoint the bundle was made from: compares every tensor step by step too. Needs torch.",
)
@threads_option
@json_option
def command(bundle: Path, checkpoint: Path | None, threads: int | None, as_json: bool) -> None:
    """Compare a bundle with PyTorch: its golden inputs token for token, alone and batched.

    \b
    Example:
      tfm-export verify tfm_bundle --checkpoint checkpoint.pt

    Ends with exit code 3 if the bundle does not give what PyTorch gives.
    """
    opened = Bundle.open(bundle)
    require_onnxruntime()
    reference = None
    if checkpoint is not None:
        require("torch", extra="export")
        from tfm_export.checkpoints import read_checkpoint

        # What its file does not say is what was said when it was exported.
        reference = read_checkpoint(checkpoint, opened.manifest.model.get("settings")).model
    from tfm_export.verify import reports_json, verify_variant, write_reports

    with Stopwatch() as stopwatch:
        reports = [
            verify_variant(opened, name, reference=reference, threads=threads, progress=stopwatch.begin)
            for name in opened.manifest.variants
        ]
    try:
        write_reports(opened, reports)
    except OSError as problem:  # a bundle that a service reads may well be read-only
        click.echo(f"note: the report was not written into the bundle: {problem}", err=True)
    if as_json:
        click.echo(reports_json(reports), nl=False)
    else:
        for report in reports:
            print_verdict(report)
    problems = [f"{report.variant}: {problem}" for report in reports for problem in report.problems()]
    if problems:
        raise ParityError(problems, "export the bundle again from this checkpoint")
