"""What users say of a model: checked by name and type, all at once; the command line has what is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest

from reference_model.config import ACTIVATIONS, POSITIONS
from tfm_export.checkpoints import read_settings
from tfm_export.checkpoints.settings import ASKED, SETTINGS, check_settings
from tfm_export.cli import checkpoint_options, onnx
from tfm_export.errors import CheckpointError


def test_all_that_does_not_fit_is_named() -> None:
    given = {
        "heads": "8",
        "norm_first": 1,
        "activation": "swish",
        "layer_norm_epsilon": True,
        "head": 3,
        "keys": {"a": 1},
        "ignore": "a",
        "pad": None,
    }
    with pytest.raises(CheckpointError) as caught:
        check_settings(given, "here")
    assert caught.value.problems == [
        "here: heads must be an integer, found '8'",
        "here: norm_first must be true or false, found 1",
        "here: activation must be one of relu, gelu, gelu_tanh, silu, found 'swish'",
        "here: layer_norm_epsilon must be a number, found True",
        "here: there is no setting 'head'; did you mean 'heads'?",
        "here: keys must be an object with strings as values, found 1 in it",
        "here: ignore must be a list of strings, found 'a'",
    ]


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff", '{"heads": 8', "[" * 100_000])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "settings.json").write_bytes(text.encode("latin1"))
    with pytest.raises(CheckpointError, match=r"settings\.json"):
        read_settings(tmp_path / "settings.json")


def test_a_file_of_settings_is_read(tmp_path: Path) -> None:
    values: dict[str, Any] = {"heads": 8, "layer_norm_epsilon": 1, "keys": {"a": "projection"}}
    (tmp_path / "settings.json").write_text(json.dumps(values))
    assert read_settings(tmp_path / "settings.json") == values


def test_the_command_line_has_an_option_for_all_that_is_asked_for() -> None:
    options = {option.name: option for option in onnx.command.params if isinstance(option, click.Option)}
    for name, setting in ASKED.items():
        flags = "/".join((*options[name].opts, *options[name].secondary_opts))
        assert flags == str(setting.option).split(" ", maxsplit=1)[0]
    assert {*ASKED} <= {*SETTINGS}
    assert (checkpoint_options.ACTIVATIONS, checkpoint_options.POSITIONS) == (ACTIVATIONS, POSITIONS)
