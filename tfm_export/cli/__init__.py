"""The command line: one file per command; each parses, calls one function of the library and prints.

A command's module is imported when the command is used or its help is shown, so it may import only what the base
install has; heavy libraries come in when the command runs.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
from typing import Any

import click

from tfm_export.errors import RequestError, TfmExportError

# Each is the `command` of the module of its name, and what the list of commands says of it.
COMMANDS = {
    "onnx": "Export a checkpoint to a bundle, verified against PyTorch.",
    "quantize": "Add a precision variant to a bundle, if its quality is proven.",
    "generate-graph": "Put a bundle's whole greedy decoding into one graph, for any language.",
    "trt": "Build a TensorRT engine from a bundle; TensorRT-RTX needs no GPU for it.",
    "verify": "Compare a bundle with PyTorch.",
    "run": "Decode texts.",
    "serve": "Serve bundles over HTTP: the Open Inference Protocol v2, and Triton's generate.",
    "bench": "Measure how fast a bundle decodes on this machine.",
    "inspect": "Show the contents of a bundle, or the settings of a checkpoint.",
    "doctor": "Show what this machine has, and which parts of a bundle run here.",
    "completion": "Print the script that completes commands in a shell.",
}

INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended
TERMINATED = 143  # what a shell reports for a program that SIGTERM ended


class CommandGroup(click.Group):
    """Imports a command's module when the command is asked for, and turns our errors into messages."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        """The commands in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command of that name, if there is one."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"tfm_export.cli.{cmd_name.replace('-', '_')}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; errors that are not a `TfmExportError` keep their traceback."""
        try:
            return super().invoke(ctx)
        except TfmExportError as error:
            print_error(error)
            ctx.exit(error.exit_code)
        except OSError as problem:
            if problem.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            print_error(RequestError(f"the output could not be written: {problem.strerror}", "make room on the disk"))
            ctx.exit(RequestError.exit_code)
        except (MemoryError, RuntimeError) as problem:
            if isinstance(problem, RuntimeError) and "can't allocate memory" not in str(problem):  # PyTorch's words
                raise
            print_error(
                RequestError(
                    "this takes more memory than the process can get",
                    "end other programs, allow it more (ulimit -v, the limit of its container), or smaller batches",
                )
            )
            ctx.exit(RequestError.exit_code)
        except KeyboardInterrupt:
            click.echo(err=True)  # end the line that the terminal's ^C stands on
            ctx.exit(INTERRUPTED)


def print_error(error: TfmExportError) -> None:
    """Print an error's message to standard error, the word "Error" in red on a terminal."""
    colour = False if os.environ.get("NO_COLOR") else None  # None: if it is a terminal
    click.echo(f"{click.style('Error:', fg='red', bold=True)} {error}", err=True, color=colour)


@click.group("tfm-export", cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tfm-export", prog_name="tfm-export")
def cli() -> None:
    """Take a trained encoder-decoder Transformer from PyTorch into production.

    \b
    Example:
      tfm-export onnx checkpoint.pt --inputs lines.txt
      tfm-export run tfm_bundle "some text"

    Exit codes: 0 success, 1 an error that you can fix, 2 wrong usage, 3 the results differ too much from PyTorch's,
    4 the budget of run is over.
    """


def main() -> None:
    """The entry point of the `tfm-export` script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None where it is closed
            # As files are, whatever the locale says; names of files may be any bytes, and are printed as they are.
            stream.reconfigure(encoding="utf-8", errors="surrogateescape")
    signal.signal(signal.SIGTERM, _terminate)
    cli(prog_name="tfm-export")


def _terminate(_signal: int, _frame: object) -> None:
    """End as an exception does, so that nothing half-written stays behind."""
    sys.exit(TERMINATED)
