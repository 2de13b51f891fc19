"""Pictures of results."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

WINDOW = 9  # neighbouring steps; a curve shows their medians


def draw_scaling(path: Path, results: dict[str, Any]) -> None:
    """Draw what `benchmarks.scaling` measured: a panel for each batch of the steps, one for throughput.

    Args:
        path: of the PNG.
        results: of the file.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    colours = {name: f"C{i}" for i, name in enumerate(results["contenders"])}
    batches = list(dict.fromkeys(one["batch"] for one in results["steps"]))
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(4 * (len(batches) + 1), 3.4), layout="constrained")
        *panels, throughput = figure.subplots(1, len(batches) + 1)
        for axes, batch in zip(panels, batches, strict=True):
            for one in (one for one in results["steps"] if one["batch"] == batch):
                ms = np.array(one["seconds"]) * 1e3
                past = np.arange(1, len(ms) + 1)
                window = min(WINDOW, len(ms))
                smooth = np.median(np.lib.stride_tricks.sliding_window_view(ms, window), axis=1)
                colour = colours[one["contender"]]
                axes.plot(past[: len(smooth)] + window // 2, smooth, color=colour, linewidth=1.2)
                line = (one["start"] + one["slope"] * past) * 1e3
                axes.plot(past, line, color=colour, linewidth=0.8, linestyle="--")
            axes.set_title(f"a step, {batch} sentence{'s' * (batch > 1)}, greedy", fontsize=9)
            axes.set_xlabel("tokens before it (dashed: straight line)")
            axes.set_ylabel("milliseconds")
        for name in results["contenders"]:
            cells = [one for one in results["throughput"] if one["contender"] == name]
            rates = [one["tokens"] / np.median(one["seconds"]) for one in cells]
            throughput.plot([one["batch"] for one in cells], rates, marker="o", color=colours[name], label=name)
        sizes = sorted({one["batch"] for one in results["throughput"]})
        throughput.set_xscale("log", base=2)
        throughput.set_xticks(sizes, [str(size) for size in sizes])
        throughput.set_xlabel("sentences in a batch")
        throughput.set_ylabel("tokens per second")
        throughput.set_title("whole generations of 32 tokens, greedy", fontsize=9)
        throughput.legend(frameon=False, fontsize=8)
        for axes in (*panels, throughput):
            axes.set_ylim(bottom=0)
            axes.grid(visible=True, alpha=0.3)
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=80, metadata={"Software": None})
    path.write_bytes(picture.getvalue())
