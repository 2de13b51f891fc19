"""The parity report as a page for people: one file of HTML, nothing loaded from anywhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from html import escape

from tfm_export.verify.report import Divergence, GenerationComparison, ParityReport, TensorComparison

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #1c2530 }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2rem; border-bottom: 1px solid #d5dbe3 }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .25rem .6rem }
tr:nth-child(even) { background: #f4f6f9 } th { border-bottom: 2px solid #d5dbe3 }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
.passed { color: #14713b } .failed { color: #b3261e; font-weight: bold } .bar { background: #e3e8ef; width: 8rem }
.bar div { background: #4c78a8; height: .6rem } .bar div.over { background: #b3261e } caption { text-align: left }
"""


def parity_page(reports: Sequence[ParityReport], title: str) -> str:
    """A page that shows the verdict on every variant, and what it rests on.

    Args:
        reports: one a variant.
        title: of the page.
    """
    passed = bool(reports) and all(report.passed for report in reports)
    body = "".join(_section(report) for report in reports)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{escape(title)}: {_verdict(passed)}</h1>\n{body}</body></html>\n"
    )


def _section(report: ParityReport) -> str:
    kind = "random ids" if report.synthetic else "real inputs"
    agreement = "" if report.argmax_agreement is None else f"; best token as PyTorch's: {report.argmax_agreement:.2%}"
    parts = [
        f"<h2>{escape(report.variant)} on {escape(report.backend)}: {_verdict(report.passed)}</h2>\n",
        f"<p>Golden inputs: {kind}{agreement}.</p>\n",
        _generations(report.generations),
        *(_divergences(comparison) for comparison in report.generations),
    ]
    kinds = (
        (report.graph, "The graphs in float64: largest difference from PyTorch in float64"),
        (report.kernels, f"{report.backend}: largest difference from the graphs in float64"),
    )
    parts += [_tensors(tensors, caption) for tensors, caption in kinds if tensors]
    if report.expected is not None:
        problems = "".join(f"<br>{escape(problem)}" for problem in report.expected.problems())
        parts.append(f"<p>{_verdict(report.expected.passed)}: {escape(report.expected.text())}{problems}</p>\n")
    notes = [*report.notes, *([f"reading: {report.reading}"] if report.reading else [])]
    parts += [f"<p>{escape(note)}</p>\n" for note in notes]
    return "".join(parts)


def _generations(comparisons: Iterable[GenerationComparison]) -> str:
    rows = [
        [c.name, str(c.count), str(c.identical), str(len(c.ties)), str(len(c.divergences)), _verdict(c.passed)]
        for c in comparisons
    ]
    head = ["generations", "inputs", "token for token", "ties", "divergences", ""]
    return _table("Whole generations, held to PyTorch's", head, rows, numbers={1, 2, 3, 4}, markup={5})


def _divergences(comparison: GenerationComparison) -> str:
    kinds = ((comparison.divergences, "divergence"), (comparison.ties, "tie"))
    rows = [_divergence_row(d, kind) for found, kind in kinds for d in found]
    if not rows:
        return ""
    head = ["input", "text", "token", "expected", "found", "margin", "kind"]
    caption = f"{comparison.name}: first tokens that differ (a margin below {comparison.tie_margin:.1e} is a tie)"
    return _table(caption, head, rows, numbers={0, 2, 3, 4, 5})


def _divergence_row(d: Divergence, kind: str) -> list[str]:
    tokens = ["end" if token is None else str(token) for token in (d.expected, d.found)]
    return [str(d.index), " ".join(filter(None, (d.text, d.detail))), str(d.step), *tokens, f"{d.margin:.1e}", kind]


def _tensors(tensors: Iterable[TensorComparison], caption: str) -> str:
    rows = [
        [t.name, f"{t.error:.1e}", f"{t.rounding:.1e}", f"{t.limit:.1e}", _bar(t.share), _verdict(t.passed)]
        for t in tensors
    ]
    head = ["tensor", "error", "rounding explains", "limit", "error / limit", ""]
    return _table(caption, head, rows, numbers={1, 2, 3}, markup={4, 5})


def _bar(share: float) -> str:
    width = 100.0 if not math.isfinite(share) else min(share, 1.0) * 100
    over = ' class="over"' if not share <= 1 else ""
    return f'<div class="bar"><div{over} style="width: {width:.0f}%"></div></div>'


def _verdict(passed: bool) -> str:
    return f'<span class="{"passed" if passed else "failed"}">{"passed" if passed else "FAILED"}</span>'


def _table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: AbstractSet[int],
    markup: AbstractSet[int] = frozenset(),
) -> str:
    """A table; cells are text but in the columns of `markup`, which are HTML already."""
    aligned = [' class="number"' if i in numbers else "" for i in range(len(head))]
    cells = "".join(f"<th{a}>{escape(name)}</th>" for a, name in zip(aligned, head, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{aligned[i]}>{c if i in markup else escape(c)}</td>" for i, c in enumerate(row))
        + "</tr>\n"
        for row in rows
    )
    return f"<table><caption>{escape(caption)}</caption>\n<tr>{cells}</tr>\n{body}</table>\n"
