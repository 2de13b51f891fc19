"""The example of a model of one's own, from its weights to text and to a variant."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tfm_export.cli import cli
from tfm_export.model import load
from tfm_export.quantize import speed

FOLDER = Path(__file__).parents[2] / "examples/custom_model"
ADAPTER = f"{FOLDER / 'adapter.py'}:load"
WORDS = ["stressed", "hello", "q", "abcdefghijkl", "drawer"]


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """train.py, and model.py through it; their names are free again afterwards."""
    from importlib import import_module

    before, path = {*sys.modules}, [*sys.path]
    sys.path.insert(0, str(FOLDER))
    yield import_module("train")
    sys.path[:] = path
    for name in {"train", "model", "adapter"} - before:
        sys.modules.pop(name, None)


def call(*arguments: Any) -> str:
    result = CliRunner().invoke(cli, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
def test_the_example_goes_all_the_way(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SECONDS", 0.0)  # how fast so small a model is, is not asked here
    model = example.train(12).eval()
    with torch.no_grad():  # so little training repeats one letter for ever
        for parameter in model.parameters():
            parameter.mul_(2.5 if parameter.dim() > 1 else 1)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    (tmp_path / "words.txt").write_text("\n".join(WORDS))
    bundle = tmp_path / "bundle"
    settings = ["--config", FOLDER / "settings.json", "--inputs", tmp_path / "words.txt"]
    call("onnx", tmp_path / "model.pt", "-o", bundle, "--adapter", ADAPTER, *settings)
    manifest = json.loads((bundle / "bundle.json").read_text())
    assert (manifest["dimensions"]["heads"], manifest["dimensions"]["head_size"]) == (2, 12)
    with load(bundle) as loaded:
        found = [result.text for result in loaded.generate(WORDS, max_decoding_length=20)]
    assert found == [spell(example, model, word) for word in WORDS]
    assert len({*found}) > 1
    assert "parity: passed" in call("verify", bundle, "--checkpoint", tmp_path / "model.pt", "--adapter", ADAPTER)
    call("quantize", bundle, "--w8", "--keep", "--min-agreement", "0")
    call("generate-graph", bundle, "--variant", "w8")
    manifest = json.loads((bundle / "bundle.json").read_text())
    assert {"onnx/w8/weights.bin", "onnx/w8/generate.onnx"} <= manifest["files"].keys()


def spell(example: ModuleType, model: Any, word: str) -> str:
    """What the model's own code generates, without a cache."""
    source = torch.tensor([[example.TOKENS.index(letter) for letter in word] + [example.EOS]])
    mask, target = torch.ones_like(source, dtype=torch.bool), [example.BOS]
    with torch.inference_mode():
        memory = model.encode(source, mask)
        while len(target) <= 20 and target[-1] != example.EOS:
            target.append(int(model.decode(torch.tensor([target]), memory, mask)[0, -1].argmax()))
    return "".join(example.TOKENS[i] for i in target[1:] if i > 2)
