"""The option --adapter: code of the user's that makes a model of a checkpoint. It is run because they named it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

from tfm_export.errors import CheckpointError

if TYPE_CHECKING:
    from tfm_export.checkpoints import Factory

FORM = "FILE.py:FUNCTION, or MODULE:FUNCTION"


def adapter_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the option; `load_factory` takes its value."""
    return click.option(
        "--adapter",
        metavar="FILE.py:FUNCTION",
        help="For your own model: the function that makes an Adapter from the checkpoint's path. This code is run; "
        "see docs/checkpoints.md.",
    )(command)


def load_factory(name: str) -> Factory:
    """The function that a user named; the module that it is in is run.

    What goes wrong in their code keeps its own traceback.

    Raises:
        CheckpointError: there is no such file, module or function.
    """
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function.isidentifier():
        raise CheckpointError(f"expected an adapter as {FORM}; found {name!r}", "--adapter my_model.py:load")
    module = _load_file(Path(place)) if place.endswith(".py") else _import(place)
    factory = getattr(module, function, None)
    if not callable(factory):
        raise CheckpointError(f"{place} has no function {function!r}", "name the one that makes the adapter")
    found: Factory = factory
    return found


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist", "check the path of the adapter")
    name = f"adapter file {path.stem}"  # no module can be called so: a file may have the name of one that is in use
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as Python does, so that its classes can be found by their module's name
    spec.loader.exec_module(module)
    return module


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        if problem.name is None or not f"{name}.".startswith(f"{problem.name}."):
            raise  # something that their module needs
        raise CheckpointError(
            f"there is no module {name!r}", f"name its file, as in {FORM}, or add its folder to PYTHONPATH"
        ) from None
