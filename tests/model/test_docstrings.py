"""What the public API's docstrings show is what the trained example says."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tfm_export
from tfm_export import decoding, model
from tfm_export.errors import TfmExportError
from tfm_export.model import Model

# What a reader would look up; errors, enumerations and names of types need no example, nor does what ends a thing.
NEEDS_NONE = {"Constraint", "Reason", "Result", "SettledToken", "Statistics", "Piece", "LongSource", "LONG_SOURCE"}
METHODS = ["generate", "generate_async", "generate_iterable", "stream", "score", "encode_text", "check_ids", "call"]
METHODS += ["generate_ids", "generate_ids_iterable", "stream_ids", "score_ids", "decode_options"]


def public() -> Iterator[tuple[str, Any]]:
    for package in (tfm_export, model, decoding):
        for name in package.__all__:
            thing = getattr(package, name)
            is_error = inspect.isclass(thing) and issubclass(thing, TfmExportError)
            if not (is_error or name in NEEDS_NONE or name.startswith("__")):
                yield name, thing
    yield from ((f"Model.{name}", getattr(Model, name)) for name in METHODS)


PUBLIC = dict(public())


@pytest.fixture(scope="module")
def trained(g2p_bundle: Path) -> Iterator[Model]:
    with tfm_export.load(g2p_bundle) as loaded:
        yield loaded


@pytest.mark.parametrize("name", PUBLIC)
def test_its_example_runs(name: str, trained: Model, g2p_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(g2p_bundle.parent)  # where it is tfm_bundle
    known, text = {"model": trained, "tfm_export": tfm_export}, inspect.getdoc(PUBLIC[name]) or ""
    example = doctest.DocTestParser().get_doctest(text, known, name, "", 0)
    assert example.examples, f"{name} has no example"
    told: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=told.append)
    assert not told, "".join(told)
