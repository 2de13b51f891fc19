"""`tfm-export onnx`: a checkpoint becomes a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import click

from tfm_export.bundle import DEFAULT_PATH
from tfm_export.cli.checkpoint_adapter import adapter_option, load_factory
from tfm_export.cli.checkpoint_options import checkpoint_options, given_settings
from tfm_export.cli.expect import expect_option, read_expectations
from tfm_export.cli.options import force_option, generate_without_option, json_option
from tfm_export.cli.progress import Stopwatch
from tfm_export.cli.reports import print_files, print_reading, print_verdict
from tfm_export.extras import require, require_onnxruntime
from tfm_export.text_files import read_texts


@click.command("onnx")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=DEFAULT_PATH,
    show_default=True,
    help="The bundle to write.",
)
@click.option(
    "--inputs",
    type=click.File("rb"),
    help="Real source texts, one per line, to verify with and to store as golden inputs; by default these are random "
    "ids. For a model without a tokenizer: ids separated by spaces, one source per line.",
)
@expect_option
@click.option("--max-source-length", type=click.IntRange(min=1), help="Longest source in tokens, end token included.")
@click.option("--max-target-length", type=click.IntRange(min=1), help="Longest target in tokens, end token included.")
@click.option(
    "--attention", is_flag=True, help="Also write the graph that returns attention weights (run --attention)."
)
@click.option(
    "--attention-layer",
    type=int,
    help="The decoder layer whose cross-attention --attention returns; -1 is the last.  [default: -1]",
)
@click.option(
    "--generate",
    is_flag=True,
    help="Also write generate.onnx: the whole greedy decoding in one call, for any language (see generate-graph).",
)
@generate_without_option
@click.option("--no-verify", is_flag=True, help="Do not compare with PyTorch.")
@checkpoint_options
@adapter_option
@force_option
@json_option
def command(
    checkpoint: Path,
    output: Path,
    inputs: BinaryIO | None,
    expect: BinaryIO | None,
    max_source_length: int | None,
    max_target_length: int | None,
    attention: bool,
    attention_layer: int | None,
    generate: bool,
    generate_without: tuple[str, ...],
    no_verify: bool,
    force: bool,
    as_json: bool,
    config: Path | None,
    adapter: str | None,
    **options: Any,
) -> None:
    """Export CHECKPOINT to a bundle: an encoder graph and a decoder-step graph with a cache, verified against PyTorch.

    CHECKPOINT is a file of weights, or a folder with config.json. If it lacks settings, the error names the options
    that give them; see docs/checkpoints.md.

    \b
    Example:
      tfm-export onnx checkpoint.pt --expect pairs.tsv -o tfm_bundle
      tfm-export onnx checkpoint.pt --inputs lines.txt -o tfm_bundle

    Ends with exit code 3, and writes no bundle, if the results of the graphs differ from PyTorch's, or if the pairs of
    --expect do not come out as expected; the error then names settings with which they do.
    """
    if attention_layer is not None and not attention:
        raise click.UsageError("--attention-layer has no effect without --attention")
    for module in ("torch", "onnx", "onnxscript", "safetensors"):
        require(module, extra="export")
    require_onnxruntime()
    from tfm_export.export import export_bundle

    with Stopwatch() as stopwatch:
        bundle, report = export_bundle(
            checkpoint,
            output,
            settings=given_settings(config, options),
            adapter=None if adapter is None else load_factory(adapter),
            inputs=None if inputs is None else read_texts(inputs),
            expectations=read_expectations(expect),
            made_from=[Path(file.name) for file in (inputs, expect) if file is not None],
            max_source_length=max_source_length,
            max_target_length=max_target_length,
            attention_layer=(-1 if attention_layer is None else attention_layer) if attention else None,
            verify=not no_verify,
            force=force,
            progress=stopwatch.begin,
        )
        generated = None
        if generate:
            from tfm_export.generate_graph import add_generate_graph

            generated = add_generate_graph(
                bundle, without=generate_without, verify=not no_verify, progress=stopwatch.begin
            )
    if as_json:
        click.echo(bundle.manifest.to_json(), nl=False)
        return
    print_files(bundle)
    for note in bundle.manifest.model["notes"]:
        click.echo(f"note: {note}")
    if report is None:
        click.echo(f"{output}: written, not verified")
    else:
        print_verdict(report)
        print_reading(report)
    if generated is not None:
        print_verdict(generated)
