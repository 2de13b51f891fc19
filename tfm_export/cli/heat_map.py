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

    cell = min(CELL, LARGEST / max(weights.shape))
    height, width = (cell * tokens for tokens in weights.shape)
    with mpl.rc_context({"svg.fonttype": "none", "font.size": 10}):  # text in an SVG stays text, in any script
        figure = Figure(figsize=(width, height))
        axes = figure.add_axes((0, 0, 1, 1))  # labels lie outside; the tight box below takes them in
        image = axes.imshow(weights, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(source_tokens)), [_visible(token) for token in source_tokens])
        axes.set_yticks(range(len(target_tokens)), [_visible(token) for token in target_tokens])
        axes.tick_params(top=True, bottom=False, labeltop=True, labelbottom=False, length=0)
        for label, token in zip(axes.get_xticklabels(), source_tokens, strict=True):
            label.set_rotation(90 if len(token) > 2 else 0)
        axes.set_xlabel("source", labelpad=8)
        axes.xaxis.set_label_position("top")
        axes.set_ylabel("target", labelpad=8)
        axes.spines[:].set_visible(False)
        bar_height = max(height, 1.0)  # inches
        bar = figure.add_axes((1 + 0.2 / width, 1 - bar_height / height, 0.15 / width, bar_height / height))
        figure.colorbar(image, cax=bar, label="attention", ticks=(0, 0.5, 1))
        bar.spines[:].set_visible(False)
        picture = io.BytesIO()
        figure.savefig(picture, format=path.suffix.removeprefix("."), dpi=160, bbox_inches="tight", pad_inches=0.1)
    path.write_bytes(picture.getvalue())


def _visible(token: str) -> str:
    return token.replace(" ", "␣").replace("$", r"\$") or "∅"
