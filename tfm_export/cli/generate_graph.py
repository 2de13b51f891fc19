"""`tfm-export generate-graph`: a bundle's whole greedy decode in one graph."""

from __future__ import annotations

from pathlib import Path

import click

from tfm_export.bundle import Bundle
from tfm_export.cli.options import bundle_argument, force_option, generate_without_option, json_option, threads_option
from tfm_export.cli.progress import Stopwatch
from tfm_export.cli.reports import print_generations, size_text
from tfm_export.extras import require, require_onnxruntime
from tfm_export.graph import GENERATE


@click.command("generate-graph")
@bundle_argument
@click.option(
    "--variant", default="fp32", show_default=True, help="The precision, one of those that inspect lists, or auto."
)
@generate_without_option
@force_option
@threads_option
@json_option
def command(
    bundle: Path, variant: str, generate_without: tuple[str, ...], force: bool, threads: int | None, as_json: bool
) -> None:
    """Write generate.onnx into BUNDLE (./tfm_bundle): a graph of the whole greedy decoding, from ids to ids.

    With it, C++, Java, JavaScript or Rust decode greedily in one call of ONNX Runtime; see docs/any_language.md.

    \b
    Example:
      tfm-export generate-graph tfm_bundle --variant w8

    Ends with exit code 3, and writes nothing, if the results of the graph differ from PyTorch's, or, for a lower
    precision, from those of the variant's own two graphs.
    """
    opened = Bundle.open(bundle)
    variant = opened.fastest_variant() if variant == "auto" else variant
    name = f"onnx/{variant}/{GENERATE}"
    for module in ("onnx", "onnx_ir"):
        require(module, extra="quantize")
    require_onnxruntime()
    from tfm_export.generate_graph import add_generate_graph
    from tfm_export.verify import reports_json

    with Stopwatch() as stopwatch:
        report = add_generate_graph(
            opened, variant, without=generate_without, threads=threads, force=force, progress=stopwatch.begin
        )
    assert report is not None
    if as_json:
        click.echo(reports_json([report]), nl=False)
        return
    entry = opened.manifest.files[name]
    click.echo(f"{bundle / name}: {entry.purpose}, {size_text(entry.bytes)}")
    for note in report.notes:
        click.echo(f"note: {note}")
    print_generations(report.generations, "synthetic inputs" if report.synthetic else "real inputs")
