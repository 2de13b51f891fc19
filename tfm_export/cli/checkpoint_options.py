"""The options that tell what a checkpoint's file does not, for every command that reads checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
POSITIONS = ("sinusoidal", "learned", "relative", "none")

# Each is named as the setting in checkpoints/settings.py that it gives; ignore_weights gives ignore.
OPTIONS = (
    click.option(
        "--config",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="A JSON file with settings that the checkpoint does not contain; the options below override it.",
    ),
    click.option("--heads", type=click.IntRange(min=1), help="Number of attention heads."),
    click.option(
        "--norm-first/--norm-last",
        default=None,
        help="Whether a sublayer's input is normalised (pre-norm), or its sum (post-norm).",
    ),
    click.option("--activation", type=click.Choice(ACTIVATIONS), help="The feed-forward's activation."),
    click.option("--positions", type=click.Choice(POSITIONS), help="How the model encodes positions."),
    click.option(
        "--scale-embeddings/--no-scale-embeddings",
        default=None,
        help="Whether embeddings are multiplied by sqrt(d_model).",
    ),
    click.option("--max-length", type=click.IntRange(min=1), help="Number of rows of the position table."),
    click.option("--layer-norm-epsilon", type=float, help="The epsilon that layer norms add to the variance."),
    click.option(
        "--pad",
        type=click.IntRange(min=0),
        help="The id that pads short targets and sources. Special ids are for both sides; for a source vocabulary with "
        "other ids, add --source-pad, --source-bos, --source-eos and --source-unk.",
    ),
    click.option("--bos", type=click.IntRange(min=0), help="The id that the decoder starts from."),
    click.option("--eos", type=click.IntRange(min=0), help="The id that ends a target."),
    click.option("--unk", type=click.IntRange(min=0), help="The id of unknown tokens."),
    click.option("--source-pad", type=click.IntRange(min=0), help="The id that pads short sources.  [default: --pad]"),
    click.option("--source-bos", type=click.IntRange(min=0), help="The id that sources begin with.  [default: --bos]"),
    click.option("--source-eos", type=click.IntRange(min=0), help="The id that sources end with.  [default: --eos]"),
    click.option(
        "--source-unk", type=click.IntRange(min=0), help="The id of unknown tokens in sources.  [default: --unk]"
    ),
    click.option(
        "--source-starts-with-bos/--source-starts-without-bos", default=None, help="Whether sources begin with bos."
    ),
    click.option(
        "--source-ends-with-eos/--source-ends-without-eos", default=None, help="Whether sources end with eos."
    ),
    click.option(
        "--ignore-generation",
        metavar="KEY",
        multiple=True,
        callback=lambda _context, _option, keys: [*keys] or None,
        help="A key of generation_config.json to leave out, such as guidance_scale; can be repeated.",
    ),
    click.option("--weights", metavar="PLACE", help='The place of the weights in the file, such as "ema".'),
    click.option(
        "--ignore-weights",
        metavar="PATTERN",
        multiple=True,
        callback=lambda _context, _parameter, patterns: [*patterns] or None,
        help="Weights of the file that the model does not use, by name; * stands for any characters, as in "
        '"criterion.*". May be given several times; the notes of the bundle name what was left out.',
    ),
)


def checkpoint_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command all of them; `given_settings` takes what it gets."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def given_settings(config: Path | None, options: dict[str, Any]) -> dict[str, Any]:
    """The settings of the file, if there is one, and of the options that were given, which go before.

    Weights and keys to ignore are those of both.

    Raises:
        CheckpointError: the file is none of settings.
    """
    given = {name: value for name, value in options.items() if value is not None}
    ignored = {"ignore": given.pop("ignore_weights", []), "ignore_generation": given.pop("ignore_generation", [])}
    settings: dict[str, Any] = {}
    if config is not None:
        from tfm_export.checkpoints import read_settings

        settings = read_settings(config)
    given |= {name: [*settings.get(name, []), *names] for name, names in ignored.items() if names}
    return {**settings, **given}
