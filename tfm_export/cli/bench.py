"""`tfm-export bench`: how fast a bundle decodes on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from tfm_export.bundle import Bundle, write_text
from tfm_export.cli.bench_plot import FORMATS, HEAD, cell_rows, draw_speed
from tfm_export.cli.files import refuse_to_replace
from tfm_export.cli.options import bundle_argument, force_option, json_option, threads_option
from tfm_export.cli.progress import Stopwatch
from tfm_export.cli.reports import table
from tfm_export.errors import RequestError
from tfm_export.extras import require, require_onnxruntime
from tfm_export.text_files import read_texts

if TYPE_CHECKING:
    from tfm_export.bench import BenchResult, CellVerdict

COLOURS = {"faster": "green", "slower": "red", "same": None}


@click.command("bench")
@bundle_argument
@click.option(
    "--variant",
    "variants",
    multiple=True,
    help="A precision, or a precision with a draft, such as fp32+w8; can be repeated.  [default: all]",
)
@click.option(
    "--batch",
    "batches",
    type=click.IntRange(min=1),
    multiple=True,
    default=(1, 8, 32),
    show_default=True,
    help="Sentences per batch; can be repeated.",
)
@click.option(
    "--beam",
    "beams",
    type=click.IntRange(min=1),
    multiple=True,
    default=(1, 4),
    show_default=True,
    help="Beams per sentence; can be repeated.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    help="Decode exactly this many tokens per sentence.  [default: until each sentence ends]",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=2),
    default=9,
    show_default=True,
    help="Rounds that are counted, after the warm-up.",
)
@click.option(
    "--inputs",
    type=click.File("rb"),
    help="Source texts to decode, one per line.  [default: the golden inputs]",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the result to this file, as JSON."
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw tokens per second and time per token, as .png, .svg, .pdf or .html. Needs the extra plot.",
)
@click.option(
    "--compare",
    "earlier",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="An earlier result: report what became faster or slower, taking noise into account.",
)
@force_option
@threads_option
@json_option
def command(
    bundle: Path,
    variants: tuple[str, ...],
    batches: tuple[int, ...],
    beams: tuple[int, ...],
    tokens: int | None,
    rounds: int,
    inputs: BinaryIO | None,
    output: Path | None,
    plot: Path | None,
    earlier: Path | None,
    force: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Measure BUNDLE (./tfm_bundle) on this machine: every variant, batch and beam size.

    Each variant runs in a separate process. Every round goes through all variants; the first round is a warm-up and is
    not counted. Close all other programs that use the CPU.

    \b
    Example:
      tfm-export bench tfm_bundle -o before.json
      tfm-export bench tfm_bundle --compare before.json --plot speed.png
      tfm-export bench tfm_bundle --variant fp32 --variant fp32+w8 --batch 1 --beam 1
    """
    if plot is not None and plot.suffix not in FORMATS:
        raise click.UsageError(f"--plot draws {', '.join(FORMATS)}, found {plot.name}")
    refuse_to_replace(output, plot, force=force)
    _check_folders(output, plot)
    if plot is not None:
        require("matplotlib", extra="plot")
    require_onnxruntime()
    from tfm_export.bench import BenchOptions, bench_bundle, compare, read_result

    before = None if earlier is None else read_result(earlier)
    opened = Bundle.open(bundle)
    options = BenchOptions(
        variants=variants or None,
        batches=batches,
        beams=beams,
        tokens=tokens,
        rounds=rounds,
        threads=threads,
        sources=None if inputs is None else _sources(opened, read_texts(inputs)),
    )
    with Stopwatch() as stopwatch:
        result = bench_bundle(opened, options, stopwatch.begin)
    if output is not None:
        write_text(output, result.to_json())
    if plot is not None:
        draw_speed(plot, result)
    verdicts = None if before is None else compare(before, result)
    if as_json:
        state = json.loads(result.to_json())
        if verdicts is not None:
            state["comparison"] = [{**asdict(verdict), "ratio": verdict.ratio} for verdict in verdicts]
        click.echo(json.dumps(state, indent=1, ensure_ascii=False))
        return
    print_result(result)
    if before is not None and verdicts is not None:
        for name in ("cpu", "cpus"):
            if (old := before.machine.get(name)) != (new := result.machine[name]):
                click.echo(f"\nnote: the earlier result was taken on another machine: {name} {old}, now {new}")
        print_comparison(verdicts)


def _check_folders(*paths: Path | None) -> None:
    """Refuse what could not be written, before minutes go into it."""
    folders = {path.parent for path in paths if path is not None}
    problems = [
        f"{folder} {'is not a folder' if not folder.is_dir() else 'cannot be written to'}"
        for folder in sorted(folders)
        if not (folder.is_dir() and os.access(folder, os.W_OK))
    ]
    if problems:
        raise RequestError(problems, "another file with -o or --plot")


def _sources(bundle: Bundle, texts: Sequence[str]) -> list[list[int]]:
    from tfm_export.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(bundle)
    if tokenizer is None:
        raise RequestError(f"{bundle.path} has no tokenizer: it takes ids, not text", "leave --inputs out")
    sources = [tokenizer.encode_source(text) for text in texts if text.strip()]
    if not sources:
        raise RequestError("the file of inputs has no lines", "real source texts, one a line")
    return sources


def print_result(result: BenchResult) -> None:
    """Two tables: what it takes to begin, and what decoding costs."""
    machine, work = result.machine, result.work
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    click.echo(f"\n{machine['cpu']}, {machine['cpus']} CPUs ({', '.join(machine['flags'])}); {versions}")
    exact = "until each sentence ends" if work["tokens"] is None else f"exactly {work['tokens']} tokens a sentence"
    click.echo(f"{work['rounds']} rounds after {work['warm_up_rounds']} to warm up; {exact}\n")
    head = ["variant", "runs on", "threads", "load s", "first token after loading ms", "memory loaded MB"]
    rows = [
        [
            entry.variant,
            f"{entry.backend}, {entry.provider}",
            str(entry.threads),
            f"{entry.load_seconds:.2f}",
            f"{entry.first_seconds * 1e3:.1f}",
            f"{entry.loaded_megabytes:,.0f}",
        ]
        for entry in result.loadings
    ]
    click.echo(table([head, *rows], right=[2, 3, 4, 5]))
    click.echo()
    click.echo(table([HEAD, *cell_rows(result)], right=[0, 1, 3, 4, 5, 6, 7, 8]))


def print_comparison(verdicts: Sequence[CellVerdict]) -> None:
    """Print how each cell compares with the earlier run of it."""
    click.echo()
    if not verdicts:
        click.echo("the earlier result has no cell that decoded the same amount: nothing to compare")
        return
    rows = [
        [str(v.beam), str(v.batch), v.variant, f"{v.before * 1e3:.1f}", f"{v.after * 1e3:.1f}", f"{v.ratio:.2f} x"]
        for v in verdicts
    ]
    head = ["beam", "batch", "variant", "before ms", "now ms", "speed", "verdict"]
    lines = table([head, *([*row, v.verdict] for row, v in zip(rows, verdicts, strict=True))], right=[0, 1, 3, 4, 5])
    first, rule, *body = lines.split("\n")
    click.echo(f"{first}\n{rule}")
    for line, verdict in zip(body, verdicts, strict=True):
        click.secho(line, fg=COLOURS[verdict.verdict])
