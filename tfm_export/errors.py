"""Every exception that a user of tfm-export can meet.

A `TfmExportError` is the user's to mend: its message says what was expected, what was found and what to try, and the
command line prints it without a traceback. Any other exception is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tfm_export.quotation import printable, shorten

MOST_PROBLEMS = 200
MOST_CHARACTERS = 8_000  # of one: whoever writes a message quotes shortly, this only keeps a terminal usable


class TfmExportError(Exception):
    """Base of all errors below.

    Args:
        problems: what is wrong, one sentence or several; all that were found, not only the first.
        hint: what to try.

    Attributes:
        exit_code: what the command line exits with.
    """

    exit_code = 1

    def __init__(self, problems: str | Sequence[str], hint: str | None = None) -> None:
        found = [problems] if isinstance(problems, str) else list(problems)
        more = [f"and {len(found) - MOST_PROBLEMS:,} more"] if len(found) > MOST_PROBLEMS else []
        self.problems = [shorten(problem, MOST_CHARACTERS) for problem in found[:MOST_PROBLEMS]] + more
        self.hint = None if hint is None else printable(hint)
        lines = self.problems if len(self.problems) == 1 else [f"- {problem}" for problem in self.problems]
        super().__init__("\n".join([*lines, *([f"Try: {self.hint}"] if hint else [])]))


class CheckpointError(TfmExportError):
    """A checkpoint cannot be read, or does not describe a whole model."""


class ExportError(TfmExportError):
    """PyTorch's exporter failed, or its graph is not what it should be."""


class BuildError(TfmExportError):
    """A TensorRT engine cannot be built, or is not what was asked for."""


class BundleError(TfmExportError):
    """A bundle is missing, damaged, of a newer format, or in the way."""


class ParityError(TfmExportError):
    """What comes out is not what PyTorch says."""

    exit_code = 3


class RequestError(TfmExportError):
    """An input or an option that the model cannot serve."""


class ModelClosed(RequestError):
    """A model takes no requests any more, or was closed before this one was decoded."""


class Overloaded(TfmExportError):
    """So many requests wait for a model that it takes no more.

    Args:
        problem: what is wrong.
        retry_after: seconds after which there will probably be room.

    Attributes:
        retry_after: as above.
    """

    def __init__(self, problem: str, *, retry_after: float) -> None:
        super().__init__(problem, f"again in {retry_after:.1f} s, or a larger max_waiting")
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Overloaded, retry_after=self.retry_after), (self.problems[0],)


class BackendUnavailable(TfmExportError):
    """A library, a driver or a device that was asked for is not there."""


class NumericError(TfmExportError):
    """A model gave a number that is not finite."""
