"""`tfm-export quantize`: a precision variant joins a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import click

from tfm_export.bundle import Bundle
from tfm_export.cli.options import bundle_argument, force_option, json_option, threads_option
from tfm_export.cli.progress import Stopwatch
from tfm_export.cli.reports import print_check, print_generations, size_text, table
from tfm_export.extras import require, require_onnxruntime
from tfm_export.precision import PRECISIONS
from tfm_export.text_files import read_texts

if TYPE_CHECKING:
    from tfm_export.quantize import QuantizeReport

VARIANTS = [name for name in PRECISIONS if name != "fp32"]
MOST_COSTS = 8  # lines of the table of layers

# What the library also knows, said here so that help texts load nothing; a test holds the two together.
METRICS = ["exact", "wer", "per", "bleu", "chrf"]
METHODS = ["max", "percentile", "entropy"]


def precision_options(command: Any) -> Any:
    """`--fp16`, `--w8` and so on: `precisions: tuple[str, ...]`, all that were given."""
    for name in reversed(VARIANTS):
        p = PRECISIONS[name]
        text = f"Weights {p.weights}; compute {p.compute}."
        command = click.option(f"--{name}", "precisions", flag_value=name, multiple=True, help=text)(command)
    return command


@click.command("quantize")
@bundle_argument
@precision_options
@click.option(
    "--for",
    "target",
    type=click.Choice(["cpu", "tensorrt"]),
    help="What will run the variant: this machine's CPU, where it must be faster than fp32, or TensorRT.  "
    "[default: cpu for w8, w4 and int8, tensorrt for fp16, bf16 and fp8]",
)
@click.option(
    "--calibration",
    type=click.File("rb"),
    help="Real source texts, one per line, to calibrate on; lines of ids if the bundle has no tokenizer.  "
    "[default: the bundle's golden inputs]",
)
@click.option(
    "--int8-encoder",
    is_flag=True,
    help="For w8 and w4: make an encoder that computes in int8. It is faster for long sources; it is calibrated like "
    "int8.",
)
@click.option(
    "--method",
    type=click.Choice(METHODS),
    help="For int8, fp8 and --int8-encoder: how the clipping of activations is chosen.  [default: percentile for int8, "
    "max for fp8]",
)
@click.option(
    "--dev",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Lines of source<TAB>reference to compute the metric on; a source on several lines has several references.",
)
@click.option(
    "--metric",
    type=click.Choice(METRICS),
    help="How targets are compared with the references of --dev: equal to one, word or phone errors, BLEU, chrF.  "
    "[default: exact]",
)
@click.option("--max-loss", type=float, help="Points the metric may lose.  [default: the precision's, see docs]")
@click.option(
    "--min-agreement",
    type=click.FloatRange(0, 1),
    help="Share of generations that must be equal to those of fp32.  [default: the precision's, see docs]",
)
@click.option(
    "--skip",
    multiple=True,
    metavar="PATTERN",
    help="Layers to keep in fp32, such as decoder_step/projection or '*/layers.0.*'; can be repeated.",
)
@click.option("--no-embeddings", is_flag=True, help="Keep the embedding tables in fp32.")
@click.option(
    "--reduced-range/--full-range",
    default=None,
    help="For int8 and --int8-encoder: 7-bit weights, for CPUs without VNNI, or 8-bit weights.  [default: what this "
    "CPU needs]",
)
@click.option("--keep", is_flag=True, help="Add the variant even if it is not faster than fp32 here.")
@force_option
@threads_option
@json_option
def command(
    bundle: Path,
    precisions: tuple[str, ...],
    target: Literal["cpu", "tensorrt"] | None,
    calibration: BinaryIO | None,
    int8_encoder: bool,
    method: str | None,
    dev: Path | None,
    metric: str | None,
    max_loss: float | None,
    min_agreement: float | None,
    skip: tuple[str, ...],
    no_embeddings: bool,
    reduced_range: bool | None,
    keep: bool,
    force: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Add a precision variant to BUNDLE (./tfm_bundle), made from its fp32 graphs; PyTorch is not needed.

    The variant is added only if enough of its generations are equal to those of fp32, if the metric of --dev loses no
    more than --max-loss, and, for a CPU, if it is faster than fp32 on this machine. Layers that cost too much quality
    are found by measurement and kept in fp32.

    \b
    Example:
      tfm-export quantize tfm_bundle --w8
      tfm-export quantize tfm_bundle --w4 --int8-encoder
      tfm-export quantize tfm_bundle --int8 --calibration lines.txt --dev dev.tsv --metric bleu

    Ends with exit code 3, and adds nothing, if the quality is not good enough.
    """
    if len(set(precisions)) != 1:
        found = f", found {' and '.join(f'--{name}' for name in precisions)}" if precisions else ""
        raise click.UsageError(f"say which precision, one of {', '.join(f'--{name}' for name in VARIANTS)}{found}")
    precision = precisions[0]
    if dev is None and (unused := [f"--{n}" for n, v in (("metric", metric), ("max-loss", max_loss)) if v is not None]):
        raise click.UsageError(f"{', '.join(unused)} has no effect without --dev")
    opened = Bundle.open(bundle)
    for module in ("onnx", "onnx_ir"):
        require(module, extra="quantize")
    if metric in ("bleu", "chrf"):
        require("sacrebleu", extra="quantize")
    require_onnxruntime()
    from tfm_export.quantize import QuantizeOptions, quantize_bundle, read_development

    options = QuantizeOptions(
        target=target,
        calibration=None if calibration is None else [t for t in read_texts(calibration) if t.strip()],
        method=method,
        development=None if dev is None else read_development(dev),
        metric=metric or "exact",
        keep=keep,
        min_agreement=min_agreement,
        max_loss=max_loss,
        skip=skip,
        embeddings=not no_embeddings,
        reduced_range=reduced_range,
        int8_encoder=int8_encoder,
        threads=threads,
    )
    with Stopwatch() as stopwatch:
        report = quantize_bundle(opened, precision, options, force=force, progress=stopwatch.begin)
    if as_json:
        click.echo(report.to_json(), nl=False)
    else:
        print_report(report)


def print_report(report: QuantizeReport) -> None:
    """What was measured, for people."""
    name = report.precision + (" with the encoder of int8" if report.int8_encoder else "")
    click.echo(
        f"\n{name}: {len(report.quantized)} of {report.layers} layers, {size_text(report.bytes)} "
        f"({report.bytes / report.fp32_bytes:.0%} of fp32's {size_text(report.fp32_bytes)})"
    )
    print_generations(report.generations, "inputs")
    if (m := report.metric) is not None:
        print_check(
            m.passed,
            f"{m.name} on {m.sources:,} sources: {m.variant:.2f}, fp32 {m.fp32:.2f} "
            f"({abs(m.loss):.2f} points {'worse' if m.loss > 0 else 'better'}, {m.limit:.2f} worse is accepted)",
        )
    for speed in report.speeds:
        times = f"{speed.variant:.2f} ms a step, fp32 {speed.fp32:.2f}"
        print_check(speed.ratio > 1, f"{speed.name}: {speed.ratio:.2f} times as fast as fp32 ({times})")
    if report.kept:
        click.echo()
        click.echo(table([["kept in fp32", "why"], *([name, why] for name, why in report.kept.items())]))
    if report.costs:
        rows = [[name, f"{cost:.2e}"] for name, cost in [*report.costs.items()][:MOST_COSTS]]
        click.echo()
        click.echo(table([["layers that cost most quality alone", "nats a token"], *rows], right=[1]))
    for note in report.notes:
        click.echo(f"note: {note}")
