"""`tfm-export completion`: print the script that completes tfm-export's commands and options in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands and options in SHELL.

    \b
    Example:
      tfm-export completion bash >> ~/.bashrc
      tfm-export completion zsh >> ~/.zshrc
      tfm-export completion fish > ~/.config/fish/completions/tfm-export.fish
    """
    completion_class = get_completion_class(shell)
    assert completion_class is not None, "click has a completion for every shell of SHELLS"
    click.echo(completion_class(ctx.find_root().command, {}, "tfm-export", "_TFM_EXPORT_COMPLETE").source())
