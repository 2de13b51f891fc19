"""The option --expect: the user's own pairs, which the model must give, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, BinaryIO

import click

from tfm_export.text_files import read_texts

if TYPE_CHECKING:
    from tfm_export.verify import Expectations

expect_option = click.option(
    "--expect",
    type=click.File("rb"),
    help="Your own pairs, made by your own code, which the model must give: a source, a tab and its output on each "
    "line, or JSON lines (see docs/checkpoints.md).",
)
"""`expect: BinaryIO | None`; `read_expectations` takes it."""


def read_expectations(file: BinaryIO | None) -> Expectations | None:
    """The pairs of a file; None if there is no file.

    Raises:
        RequestError: it is not text in UTF-8, or naming the lines that are no pairs.
    """
    if file is None:
        return None
    from tfm_export.verify import parse_expectations

    return parse_expectations(read_texts(file), file.name)
