"""A picture of a benchmark: throughput and the time of a token against the batch; as HTML, with all figures below."""

from __future__ import annotations

import io
from html import escape
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from tfm_export.extras import require

if TYPE_CHECKING:
    from tfm_export.bench import BenchResult

FORMATS = (".png", ".svg", ".pdf", ".html")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem; color: #1c2530 }
h1 { font-size: 1.5rem } svg { width: 100%; height: auto } table { border-collapse: collapse; width: 100% }
td, th { text-align: right; padding: .25rem .6rem; font-variant-numeric: tabular-nums }
th { border-bottom: 2px solid #d5dbe3 } tr:nth-child(even) { background: #f4f6f9 }
"""


HEAD = ["beam", "batch", "variant", "first token ms", "ms a token p50", "p90", "p99", "tokens/s", "peak MB"]


def cell_rows(result: BenchResult) -> list[list[str]]:
    """The figures of every cell, for people, in the columns of `HEAD`."""
    return [
        [
            str(cell.beam),
            str(cell.batch),
            cell.variant,
            f"{median(cell.first_seconds) * 1e3:.1f}",
            *(f"{seconds * 1e3:.2f}" for seconds in cell.step_percentiles().values()),
            f"{cell.tokens_per_second:,.0f}",
            f"{cell.peak_megabytes:,.0f}",
        ]
        for cell in sorted(result.cells, key=lambda cell: (cell.beam, cell.batch))
    ]


def draw_speed(path: Path, result: BenchResult) -> None:
    """Draw a result.

    Args:
        path: the picture to write; its suffix, one of `FORMATS`, is its format. HTML is one file that loads nothing.
        result: what was measured.

    Raises:
        BackendUnavailable: matplotlib is not installed.
    """
    require("matplotlib", extra="plot")
    import matplotlib as mpl
    from matplotlib.figure import Figure  # and not pyplot: no display, no global state

    variants = list(dict.fromkeys(cell.variant for cell in result.cells))
    beams = sorted({cell.beam for cell in result.cells})
    colours = {variant: f"C{i}" for i, variant in enumerate(variants)}
    styles = {beam: ["-", "--", ":", "-."][i % 4] for i, beam in enumerate(beams)}
    with mpl.rc_context(
        {"svg.fonttype": "none", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        throughput, latency = figure.subplots(1, 2)
        for variant in variants:
            for beam in beams:
                cells = [c for c in result.cells if (c.variant, c.beam) == (variant, beam)]
                cells.sort(key=lambda cell: cell.batch)
                label = f"{variant}, beam {beam}" if beam > 1 else f"{variant}, greedy"
                line = {"color": colours[variant], "linestyle": styles[beam], "label": label}
                batches = [c.batch for c in cells]
                throughput.plot(batches, [c.tokens_per_second for c in cells], marker="o", **line)
                latency.plot(batches, [c.step_percentiles()[50] * 1e3 for c in cells], marker="o", **line)
                bounds = np.array([[c.step_percentiles()[p] * 1e3 for p in (50, 90)] for c in cells])
                latency.fill_between(batches, bounds[:, 0], bounds[:, 1], color=colours[variant], alpha=0.15)
        for axes, title, unit in (
            (throughput, "throughput", "tokens per second"),
            (latency, "time of a token (bands reach to the 90th percentile)", "milliseconds"),
        ):
            axes.set_title(title, fontsize=10)
            axes.set_xlabel("sentences in a batch")
            axes.set_ylabel(unit)
            axes.set_xscale("log", base=2)
            ticks = sorted({c.batch for c in result.cells})
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.set_ylim(bottom=0)
            axes.grid(visible=True, alpha=0.3)
        throughput.legend(frameon=False, fontsize=8)
        picture, kind = io.BytesIO(), path.suffix.removeprefix(".")
        figure.savefig(picture, format="svg" if kind == "html" else kind, dpi=150)
    drawn = picture.getvalue()
    path.write_bytes(_page(drawn.decode(), result).encode() if kind == "html" else drawn)


def _page(drawing: str, result: BenchResult) -> str:
    """The drawing and every cell's figures."""
    machine = result.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    title = f"{result.work.get('bundle', 'a bundle')} on {machine['cpu']}"
    table = "".join(
        f"<tr>{''.join(f'<{tag}>{escape(value)}</{tag}>' for value in row)}</tr>\n"
        for tag, row in [("th", HEAD), *(("td", row) for row in cell_rows(result))]
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n<p>{escape(versions)}; {machine['time']}</p>\n"
        f"{drawing[drawing.index('<svg') :]}\n<table>{table}</table></body></html>\n"
    )
