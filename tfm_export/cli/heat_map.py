"""A picture of what each target token attends to in the source."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tfm_export.extras import require

FORMATS = (".png", ".svg", ".pdf")
CELL = 0.32  # inches
LARGEST = 40.0  # inches; more makes cells smaller


def draw_attention(
    path: Path, weights: NDArray[np.float32], source_tokens: Sequence[str], target_tokens: Sequence[str]
) -> None:
    """Draw the alignment of a sentence as a heat map, a column for each source token, a row for each target token.

    Args:
        path: the picture to write; its suffix, one of `FORMATS`, is its format.
        weights: float32 [target tokens, source tokens], from 0 to 1.
        source_tokens: names of the columns.
        target_tokens: names of the rows.

    Raises:
        BackendUnavailable: matplotlib is not installed.
    """
    require("matplotlib", extra="plot")
    import matplotlib as mpl
    from matplotlib.figure import Figure  # and not pyplot: no display, no global state

    rows, columns = weights.shape
    size = (min(CELL * columns, LARGEST) + 1.8, min(CELL * rows, LARGEST) + 1.2)
    with mpl.rc_context({"svg.fonttype": "none", "font.size": 10}):  # text in an SVG stays text, in any script
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(weights, cmap="Blues", vmin=0, vmax=1)
        axes.set_xticks(range(columns), [_visible(token) for token in source_tokens])
        axes.set_yticks(range(rows), [_visible(token) for token in target_tokens])
        axes.tick_params(top=True, bottom=False, labeltop=True, labelbottom=False, length=0)
        if max(map(len, source_tokens)) > 2:
            axes.tick_params(axis="x", rotation=90)
        axes.set_xlabel("source")
        axes.xaxis.set_label_position("top")
        axes.set_ylabel("target")
        axes.spines[:].set_visible(False)
        figure.colorbar(image, ax=axes, label="attention", fraction=0.05, pad=0.03).outline.set_visible(False)
        picture = io.BytesIO()
        figure.savefig(picture, format=path.suffix.removeprefix("."), dpi=160)
    path.write_bytes(picture.getvalue())


def _visible(token: str) -> str:
    return token.replace(" ", "␣").replace("$", r"\$") or "∅"
