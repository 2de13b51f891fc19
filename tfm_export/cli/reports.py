"""Tables and verdicts that several commands print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from tfm_export.bundle import Bundle
from tfm_export.precision import PRECISIONS

if TYPE_CHECKING:
    from tfm_export.verify import GenerationComparison, ParityReport, TensorComparison

WIDEST_RULE = 60  # the rule below a table's head; one long cell in the last column must not draw it across the screen


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Rows as aligned columns.

    Args:
        rows: the first one is the head.
        right: columns to align to the right.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rules = [("-" * min(width, WIDEST_RULE)).ljust(width) for width in widths]
    lines = [
        "  ".join(
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in [lines[0], "  ".join(rules), *lines[1:]])


def size_text(size: int) -> str:
    """A number of bytes for people."""
    return f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{size / 1e3:,.1f} kB"


def print_files(bundle: Bundle) -> None:
    """File -> purpose -> size."""
    files = [(name, entry.purpose, entry.bytes) for name, entry in sorted(bundle.manifest.files.items())]
    reports = sorted((bundle.path / "reports").glob("*"))
    files += [(f"reports/{path.name}", "what was measured", path.stat().st_size) for path in reports]
    rows = [[name, purpose, size_text(size)] for name, purpose, size in files]
    total = size_text(sum(size for _, _, size in files))
    click.echo(table([["file", "purpose", "size"], *rows, ["", "total", total]], right=[2]))


def print_verdict(report: ParityReport) -> None:
    """What was compared, how far it was, and whether that is good enough."""
    click.echo(f"\n{report.variant} on {report.backend}, compared with PyTorch:")
    _print_tensors("the graphs, both in float64", report.graph)
    _print_tensors("what runs them, against the graphs in float64", report.kernels)
    if report.argmax_agreement is not None:
        click.echo(f"    best token as in float64 in {report.argmax_agreement:.2%} of the steps")
    kind = "synthetic inputs" if report.synthetic else "real inputs"
    print_generations(report.generations, kind)
    if report.expected is not None:
        print_check(report.expected.passed, report.expected.text())
    if report.synthetic:
        click.echo(
            f"note: golden inputs are random ids; --inputs FILE gives real ones, which say more{_unjudged(report)}"
        )
    for note in report.notes:
        click.echo(f"note: {note}")
    click.secho("parity: passed" if report.passed else "parity: FAILED", fg="green" if report.passed else "red")


def print_reading(report: ParityReport) -> None:
    """What says that the checkpoint was read as the user's model is, and what does not."""
    click.echo(f"reading: {report.reading}")


def _print_tensors(what: str, tensors: Sequence[TensorComparison]) -> None:
    """The tensor that is closest to its limit stands for all."""
    if tensors:
        worst = max(tensors, key=lambda tensor: tensor.share)
        text = f"the worst is {worst.name}, off by {worst.error:.1e} (limit {worst.limit:.1e})"
        print_check(all(tensor.passed for tensor in tensors), f"{what}: {len(tensors)} tensors, {text}")


def _unjudged(report: ParityReport) -> str:
    """What random ids cannot tell of a variant whose numbers are rounded."""
    return "" if PRECISIONS[report.variant].agreement == 1 else ": agreement with PyTorch was counted, and not judged"


def print_generations(comparisons: Iterable[GenerationComparison], kind: str) -> None:
    """A line for each way of decoding.

    Args:
        comparisons: what was compared.
        kind: of the inputs, for people.
    """
    for comparison in comparisons:
        print_check(comparison.passed, f"{comparison.name}: {_generation_text(comparison, kind)}")


def _generation_text(comparison: GenerationComparison, kind: str) -> str:
    text = f"{comparison.identical} of {comparison.count} {kind} token for token"
    if comparison.needed < 1:
        text += f" ({comparison.agreement:.1%}, {comparison.needed:.0%} needed)"
    if comparison.ties:
        largest = max(tie.margin for tie in comparison.ties)
        text += f", {len(comparison.ties)} ties (margin at most {largest:.1e})"
    if comparison.divergences and comparison.needed == 1:
        first = comparison.divergences[0]
        where = (
            f": {first.detail}"
            if first.detail
            else (f" at token {first.step}, expected {first.expected}, found {first.found}, margin {first.margin:.1e}")
        )
        text += f", {len(comparison.divergences)} diverge: first input {first.index}{where}"
    return text


def print_check(passed: bool, text: str) -> None:
    """A line with a mark before it."""
    mark = click.style("✓", fg="green") if passed else click.style("✗", fg="red")
    click.echo(f"{mark} {text}")
