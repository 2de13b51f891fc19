"""The option --adapter: code of the user's that makes a model of a checkpoint. It is run because they named it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

from tfm_export.errors import CheckpointError

if TYPE_CHECKING:
    from tfm_export.checkpoints import Adapter, Factory

FORM = "FILE.py:FUNCTION, or MODULE:FUNCTION"
# What the adapters of a folder have imported from it, by name: another folder's modules may be called the same.
_BESIDE: dict[Path, dict[str, ModuleType]] = {}


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
    factory: Factory | None = getattr(module, function, None)
    if factory is None or not callable(factory):
        raise CheckpointError(f"{place} has no function {function!r}", "name the one that makes the adapter")
    return _with_files_beside(Path(place).absolute().parent, factory) if place.endswith(".py") else factory


def _with_files_beside(folder: Path, factory: Factory) -> Factory:
    def make(checkpoint: Path) -> Adapter:
        with _files_beside(folder):
            return factory(checkpoint)

    return make


@contextmanager
def _files_beside(folder: Path) -> Iterator[None]:
    """Let code import the modules in its own folder, as Python does for a script, and none of another adapter's."""
    for other, modules in _BESIDE.items():
        for name, module in modules.items():
            if other != folder and sys.modules.get(name) is module:
                del sys.modules[name]
    sys.modules.update(_BESIDE.setdefault(folder, {}))
    path = [*sys.path]
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = path
        beside = {
            name: m for name, m in sys.modules.items() if folder in Path(getattr(m, "__file__", None) or "").parents
        }
        _BESIDE[folder] = {name: module for name, module in beside.items() if name != "__main__"}


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist", "check the path of the adapter")
    name = f"adapter file {path.stem}"  # no module can be called so: a file may have the name of one that is in use
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as Python does, so that its classes can be found by their module's name
    with _files_beside(path.absolute().parent):
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
