"""A picture of a benchmark: throughput against batch, and the time of a token against how many came before it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tfm_export.extras import require

if TYPE_CHECKING:
    from tfm_export.bench import BenchResult

FORMATS = (".png", ".svg", ".pdf")


def draw_speed(path: Path, result: BenchResult) -> None:
    """Draw a result.

    Args:
        path: the picture to write; its suffix, one of `FORMATS`, is its format.
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
        picture = io.BytesIO()
        figure.savefig(picture, format=path.suffix.removeprefix("."), dpi=150)
    path.write_bytes(picture.getvalue())
