"""The option --expect: the user's own pairs, which the model must give, too."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

import click

from tfm_export.cli.files import read_texts

if TYPE_CHECKING:
    from tfm_export.verify import Expectations

expect_option = click.option(
    "--expect",
    type=click.File(encoding="utf-8"),
    help="Your own pairs, made by your own code, which the model must give: a source, a tab and its output on each "
    "line, or JSON lines (see docs/checkpoints.md).",
)
"""`expect: IO[str] | None`; `read_expectations` takes it."""


def read_expectations(file: IO[str] | None) -> Expectations | None:
    """The pairs of a file; None if there is no file.

    Raises:
        RequestError: it is not text in UTF-8, or naming the lines that are no pairs.
    """
    if file is None:
        return None
    from tfm_export.verify import parse_expectations

    return parse_expectations(read_texts(file), file.name)
