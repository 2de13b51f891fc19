"""The command line's reference, docs/cli.md, made from its own help.

python -m tfm_export.cli.reference docs/cli.md
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tfm_export.cli import COMMANDS, cli

WIDTH = 100
INTRODUCTION = """\
# Command line

Made from the commands' own help by `make docs`; a test fails when it is not up to date.
"""


def reference_text() -> str:
    """The whole of docs/cli.md."""
    group = click.Context(cli, info_name="tfm-export", terminal_width=WIDTH, **cli.context_settings)
    sections = [INTRODUCTION, _section("tfm-export", cli.get_help(group))]
    for name in COMMANDS:
        command = cli.get_command(group, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=group)
        sections.append(_section(f"tfm-export {name}", command.get_help(context)))
    return "\n".join(sections)


def _section(title: str, help_text: str) -> str:
    return f"## {title}\n\n```text\n{help_text}\n```\n"


def main() -> None:
    """Write the file that the command line names."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tfm_export.cli.reference FILE")
    Path(sys.argv[1]).write_text(reference_text(), encoding="utf-8")


if __name__ == "__main__":
    main()
