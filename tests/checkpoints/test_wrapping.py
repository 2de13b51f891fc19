"""What training leaves around weights: found, stripped and said; never guessed."""

from __future__ import annotations

import argparse
import collections
import pathlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.checkpoints.parity import assert_same_model
from tests.oracles.layouts import Tutorial
from tfm_export.checkpoints import read_checkpoint
from tfm_export.checkpoints.files import read_contents
from tfm_export.checkpoints.wrapping import find_weights
from tfm_export.errors import CheckpointError

SETTINGS = {"heads": 3, "pad": 0, "bos": 1, "eos": 2}


@pytest.fixture
def model() -> nn.Module:
    """A tiny model of the tutorial's layout."""
    return Tutorial((11, 13), 12, (1, 1), 3, 8, 20)


def prefixed(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in state.items()}


ADAM = {"state": {0: {"exp_avg": torch.ones(3)}, 1: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 1e-3}]}
NAMED_ADAM = {"state": {"encoder.weight": {"exp_avg": torch.ones(3)}}}
WRAPPINGS: dict[str, Any] = {
    "bare": lambda s: s,
    "an ordered dictionary": collections.OrderedDict,
    "DistributedDataParallel": lambda s: prefixed(s, "module."),
    "torch.compile": lambda s: prefixed(s, "_orig_mod."),
    "compiled, then distributed": lambda s: prefixed(s, "module._orig_mod."),
    "distributed, then compiled": lambda s: prefixed(s, "_orig_mod.module."),
    "a part compiled": lambda s: {k.replace("encoder.layers", "encoder._orig_mod.layers"): v for k, v in s.items()},
    "Lightning": lambda s: {
        "epoch": 3,
        "pytorch-lightning_version": "2.1",
        "state_dict": prefixed(s, "model."),
        "optimizer_states": [ADAM],
        "hyper_parameters": {"n_heads": 3},
    },
    "Lightning, compiled": lambda s: {"state_dict": prefixed(s, "model._orig_mod."), "loops": {}},
    "epoch and optimizer": lambda s: {
        "epoch": 3,
        "model_state_dict": s,
        "optimizer_state_dict": ADAM,
        "metrics": {"l": 1},
    },
    "a named optimizer": lambda s: {"model": s, "optim": NAMED_ADAM},
    "model and ema": lambda s: {"model": s, "ema": {k: v + 1 for k, v in s.items()}},
    "DeepSpeed": lambda s: {"module": s, "optimizer": ADAM, "ds_version": "0.14"},
    "an averaged model": lambda s: {"n_averaged": torch.tensor(3), **prefixed(s, "module.")},
    "somewhere": lambda s: {"checkpoint": {"best": s}},
    "parameters": lambda s: {k: nn.Parameter(v) for k, v in s.items()},
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_weights_are_found_in_what_training_leaves(tmp_path: Path, model: nn.Module, wrapping: str) -> None:
    torch.save(WRAPPINGS[wrapping](model.state_dict()), tmp_path / "model.pt")
    assert_same_model(read_checkpoint(tmp_path / "model.pt", SETTINGS).model, model)


def test_what_was_done_is_said(model: nn.Module) -> None:
    state = model.state_dict()
    wrapped = {"epoch": 3, "model": prefixed(state, "module._orig_mod."), "ema": state, "optimizer": ADAM}
    found = find_weights(wrapped)
    assert found.tensors.keys() == state.keys()
    assert found.notes == [
        "the weights were taken from 'model' in the file",
        "'ema' has weights too: not used (weights: ema takes them)",
        "not used: epoch, optimizer",
        "stripped from names: '_orig_mod.'",
        "stripped from names: 'module.'",
    ]
    assert find_weights(wrapped, "ema").tensors.keys() == state.keys()


def test_a_part_that_is_called_module_keeps_its_name() -> None:
    state = {"module.a.weight": torch.ones(1), "embedding.weight": torch.ones(1)}
    assert find_weights(state).tensors.keys() == state.keys()


def test_weights_in_several_unusual_places_are_asked_for(tmp_path: Path, model: nn.Module) -> None:
    state = model.state_dict()
    torch.save({"teacher": state, "student": state}, tmp_path / "two.pt")
    with pytest.raises(CheckpointError, match=r"two\.pt: the file has weights in several places: teacher, student"):
        read_checkpoint(tmp_path / "two.pt", SETTINGS)
    assert_same_model(read_checkpoint(tmp_path / "two.pt", {**SETTINGS, "weights": "student"}).model, model)
    with pytest.raises(CheckpointError, match="no weights in 'tutor'; there are: 'teacher', 'student'"):
        read_checkpoint(tmp_path / "two.pt", {**SETTINGS, "weights": "tutor"})


def test_names_with_and_without_a_wrapper_are_refused() -> None:
    with pytest.raises(CheckpointError, match="both with and without _orig_mod"):
        find_weights({"a": torch.ones(1), "_orig_mod.a": torch.ones(1)})


@pytest.mark.parametrize("state", [{"epoch": 3}, [1, 2], torch.ones(3), {1: torch.ones(3)}, {"optimizer": NAMED_ADAM}])
def test_files_without_weights_are_refused(tmp_path: Path, state: Any) -> None:
    torch.save(state, tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match="holds no tensors by name"):
        read_checkpoint(tmp_path / "none.pt")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_are_computed_with_in_float32(tmp_path: Path, model: nn.Module, dtype: torch.dtype) -> None:
    torch.save(model.to(dtype).state_dict(), tmp_path / "model.pt")
    source = read_checkpoint(tmp_path / "model.pt", SETTINGS)
    assert {weight.dtype for weight in source.model.state_dict().values()} == {torch.float32}
    assert source.notes == [f"weights stored as {str(dtype)[6:]} are computed with in float32"]
    assert_same_model(source.model, model.float())


def test_safetensors_and_shards(tmp_path: Path, model: nn.Module) -> None:
    state = model.state_dict()
    save_file(state, tmp_path / "whole")
    assert_same_model(read_checkpoint(tmp_path / "whole", SETTINGS).model, model)
    names = list(state)
    save_file({name: state[name] for name in names[:9]}, tmp_path / "a.safetensors")
    torch.save({name: state[name] for name in names[9:]}, tmp_path / "b.bin")
    places = {name: "a.safetensors" if i < 9 else "b.bin" for i, name in enumerate(names)}
    index = tmp_path / "model.index.json"

    def write(weight_map: Any) -> None:
        import json

        index.write_text(json.dumps({"weight_map": weight_map}))

    write(places)
    assert_same_model(read_checkpoint(index, SETTINGS).model, model)
    write({**places, "lost.weight": "b.bin"})
    with pytest.raises(CheckpointError, match=r"lost\.weight is in the index and in no shard"):
        read_checkpoint(index, SETTINGS)
    write({**places, names[0]: "../secret"})
    with pytest.raises(CheckpointError, match=r"names \.\./secret, which is not beside it"):
        read_checkpoint(index, SETTINGS)
    write({**places, names[0]: "c.bin"})
    with pytest.raises(CheckpointError, match=r"c\.bin does not exist"):
        read_checkpoint(index, SETTINGS)


def test_arrays_of_numpy(tmp_path: Path, model: nn.Module) -> None:
    arrays = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    np.savez(tmp_path / "model.npz", **arrays)
    assert_same_model(read_checkpoint(tmp_path / "model.npz", SETTINGS).model, model)
    np.savez_compressed(tmp_path / "bomb.npz", a=np.zeros(10_000_000, np.float32))
    with pytest.raises(CheckpointError, match="unpacks to"):
        read_checkpoint(tmp_path / "bomb.npz")
    np.savez(tmp_path / "objects.npz", a=np.array([{}], dtype=object))
    with pytest.raises(CheckpointError, match=r"objects\.npz is not an archive of plain numpy arrays"):
        read_checkpoint(tmp_path / "objects.npz")


class AttributeDict(dict):  # type: ignore[type-arg]
    """Stands for Lightning's in the pickle."""


AttributeDict.__module__, AttributeDict.__qualname__ = "pytorch_lightning.utilities.parsing", "AttributeDict"


class DictConfig:
    """Stands for OmegaConf's in the pickle: the same state as its own."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._content, self._metadata, self._parent = content, None, None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


class AnyNode(DictConfig):
    """The same for a leaf."""

    def __init__(self, value: Any) -> None:
        self._val = value


DictConfig.__module__, DictConfig.__qualname__ = "omegaconf.dictconfig", "DictConfig"
AnyNode.__module__, AnyNode.__qualname__ = "omegaconf.nodes", "AnyNode"


def test_settings_in_harmless_classes_are_read_as_plain_values(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys
    from types import ModuleType

    for stand_in in (AttributeDict, DictConfig, AnyNode):  # for the pickler, which checks that it can be found
        for i, _ in enumerate(parts := stand_in.__module__.split(".")):
            name = ".".join(parts[: i + 1])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setattr(sys.modules[stand_in.__module__], stand_in.__qualname__, stand_in, raising=False)
    state = {
        "model": model.state_dict(),
        "args": argparse.Namespace(heads=3, inner=argparse.Namespace(lr=0.1)),
        "loss": np.float64(1.5),
        "step": np.int64(7),
        "folder": pathlib.PurePosixPath("a/b"),
        "counts": collections.defaultdict(int, {"a": 1}),
        "hyper_parameters": AttributeDict(layers=2),
        "cfg": DictConfig({"model": DictConfig({"heads": AnyNode(3)})}),
    }
    torch.save(state, tmp_path / "model.pt")
    monkeypatch.undo()
    found = read_contents(tmp_path / "model.pt").state
    assert {name: value for name, value in found.items() if name != "model"} == {
        "args": {"heads": 3, "inner": {"lr": 0.1}},
        "loss": 1.5,
        "step": 7,
        "folder": "a/b",
        "counts": {"a": 1},
        "hyper_parameters": {"layers": 2},
        "cfg": {"model": {"heads": 3}},
    }
    source = read_checkpoint(tmp_path / "model.pt", SETTINGS)
    assert_same_model(source.model, model)
    assert any("args.heads=3" in note and "loss=1.5" in note for note in source.notes)


def test_tensors_that_would_grow_beyond_the_file_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1).expand(10**12)}, tmp_path / "expanded.pt")
    with pytest.raises(CheckpointError, match="would grow beyond its file"):
        read_checkpoint(tmp_path / "expanded.pt")
    shared = torch.zeros(100_000)
    torch.save({f"a{i}": shared for i in range(1000)}, tmp_path / "shared.pt")
    with pytest.raises(CheckpointError, match="more than 8 times its own size"):
        read_checkpoint(tmp_path / "shared.pt")


def test_containers_that_hold_each_other_ever_again_are_no_matter(tmp_path: Path, model: nn.Module) -> None:
    doubled: list[Any] = [1]
    for _ in range(60):
        doubled = [doubled, doubled]
    circle: list[Any] = []
    circle.append(circle)
    torch.save({"model": model.state_dict(), "doubled": doubled, "circle": circle}, tmp_path / "model.pt")
    assert_same_model(read_checkpoint(tmp_path / "model.pt", SETTINGS).model, model)


def test_compressed_archives_are_refused(tmp_path: Path, model: nn.Module) -> None:
    import zipfile

    torch.save({**model.state_dict(), "zeros": torch.zeros(10**6)}, tmp_path / "model.pt")
    unpacked, packed = tmp_path / "model.pt", tmp_path / "packed.pt"
    with zipfile.ZipFile(unpacked) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.namelist():
            target.writestr(entry, source.read(entry))
    with pytest.raises(CheckpointError, match=r"packed\.pt is a compressed archive"):
        read_checkpoint(tmp_path / "packed.pt")
