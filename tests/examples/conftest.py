"""The trained example's bundle with generate.onnx, and what Python makes of words."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

import tfm_export
from tests.once import Once

WORDS = Path(__file__).parents[2] / "examples/g2p/words.txt"


@dataclass(frozen=True)
class Example:
    """A bundle with generate.onnx, and what Python makes of words.

    Attributes:
        bundle: its folder.
        phones: of each word.
    """

    bundle: Path
    phones: dict[str, str]


@pytest.fixture(scope="session")
def g2p(g2p_bundle: Path, once: Once) -> Example:
    """The trained example's bundle with generate.onnx. Do not change it."""

    def make(folder: Path) -> None:
        from tfm_export.bundle import Bundle
        from tfm_export.generate_graph import add_generate_graph

        add_generate_graph(Bundle.open(shutil.copytree(g2p_bundle, folder / "tfm_bundle")), verify=False)

    path = once("g2p_generate", make) / "tfm_bundle"
    words = WORDS.read_text(encoding="utf-8").split()[:50]
    with tfm_export.load(path, device="cpu") as model:
        return Example(path, {word: g.text for word, g in zip(words, model.generate(words), strict=True)})
