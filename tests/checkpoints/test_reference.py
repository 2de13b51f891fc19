"""Reading checkpoints: whole ones become models, all others are refused with the reason, and none is executed."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reference_model import load_checkpoint, save_checkpoint
from tfm_export.checkpoints import read_checkpoint
from tfm_export.errors import CheckpointError


@pytest.fixture
def altered(tiny_checkpoint: Path, tmp_path: Path) -> Callable[[Callable[[dict[str, Any]], None]], Path]:
    """A function that writes the tiny checkpoint's state after a change."""

    def write(change: Callable[[dict[str, Any]], None]) -> Path:
        state = torch.load(tiny_checkpoint, weights_only=True)
        change(state)
        torch.save(state, tmp_path / "altered.pt")
        return tmp_path / "altered.pt"

    return write


def test_a_checkpoint_becomes_its_model(tiny_checkpoint: Path) -> None:
    source, expected = read_checkpoint(tiny_checkpoint), load_checkpoint(tiny_checkpoint)
    for name, weight in expected.model.state_dict().items():
        assert torch.equal(source.model.state_dict()[name], weight)
    assert not source.model.training
    assert source.special_ids.eos == expected.special_ids.eos
    assert source.generation.max_length == expected.generation.max_length
    assert list(source.tokenizer) == ["tokenizer.json"]
    assert source.notes == []


def test_half_weights_are_cast_and_that_is_said(tiny_checkpoint: Path, tmp_path: Path) -> None:
    save_checkpoint(load_checkpoint(tiny_checkpoint), tmp_path / "half.pt", half=True)
    source = read_checkpoint(tmp_path / "half.pt")
    assert {w.dtype for w in source.model.state_dict().values()} == {torch.float32}
    assert source.notes == ["weights stored as float16 are computed with in float32"]


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.marker}",))


@pytest.mark.parametrize("container", ["torch", "pickle"])
def test_a_malicious_file_is_refused_and_not_executed(tmp_path: Path, container: str) -> None:
    path, marker = tmp_path / "evil.pt", tmp_path / "executed"
    if container == "torch":
        torch.save({"format": "reference_model", "weights": Malicious(marker)}, path)
    else:
        path.write_bytes(pickle.dumps(Malicious(marker)))
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    assert "system" in str(caught.value)
    assert not marker.exists()


def test_a_whole_pickled_module_is_refused_with_a_way_out(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 3), tmp_path / "module.pt")
    with pytest.raises(CheckpointError, match=r"Linear(.|\n)*state_dict"):
        read_checkpoint(tmp_path / "module.pt")


@pytest.mark.parametrize("kept", [0, 1, 100, 0.3, 0.9, 0.999])
def test_truncated_files_are_refused(tiny_checkpoint: Path, tmp_path: Path, kept: float) -> None:
    content = tiny_checkpoint.read_bytes()
    size = kept if isinstance(kept, int) else int(len(content) * kept)
    (tmp_path / "cut.pt").write_bytes(content[:size])
    with pytest.raises(CheckpointError, match=r"cut\.pt"):
        read_checkpoint(tmp_path / "cut.pt")


@pytest.mark.parametrize("content", [b"hello\n", b"\x80\x04.", b"PK\x03\x04garbage", b'{"json": 1}', os.urandom(5000)])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(CheckpointError, match="other"):
        read_checkpoint(tmp_path / "other")


def test_missing_files_and_folders_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_checkpoint(tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match="is a folder"):
        read_checkpoint(tmp_path)


def test_a_bare_state_dict_is_told_what_is_expected(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / "bare.pt")
    with pytest.raises(CheckpointError, match="known format"):
        read_checkpoint(tmp_path / "bare.pt")


def test_every_problem_of_the_weights_is_named(altered: Callable[..., Path]) -> None:
    def change(state: dict[str, Any]) -> None:
        weights = state["weights"]
        del weights["projection.bias"]
        weights["stray"] = torch.zeros(3)
        weights["projection.weight"] = weights["projection.weight"][:, :-1].clone()
        weights["source_embedding.weight"][0, 0] = float("nan")
        weights["target_embedding.weight"][1, 2:4] = float("inf")

    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(altered(change))
    text = str(caught.value)
    assert len(caught.value.problems) == 5
    assert "nothing in the file is projection.bias [" in text
    assert "stray [3] is no part of this configuration" in text
    assert "projection.weight: expected shape" in text
    assert "source_embedding.weight: 1 of" in text
    assert "target_embedding.weight: 2 of" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["config"].update(heads=5), "multiple of heads"),
        (lambda s: s["config"].update(surprise=1), "config has no 'surprise'"),
        (lambda s: s.pop("config"), "it has no config"),
        (lambda s: s.update(weights={"a": 1}), "weights must be tensors by name"),
        (lambda s: s.update(weights={1: torch.ones(1)}), "weights must be tensors by name"),
        (lambda s: s.update(weights=[1, 2]), "weights must be of type dict, found list"),
        (lambda s: s.update(format_version=99), "format_version"),
        (lambda s: s["special_ids"].update(eos=10_000), "eos id 10000 is outside"),
        (lambda s: s["special_ids"].pop("bos") and s["special_ids"].update(bos=-1), "bos id -1"),
        (lambda s: s["vocabularies"][0]["tokens"].pop(), "source_tokens has"),
        (lambda s: s["vocabularies"].__setitem__(1, None), "one side only"),
        (lambda s: s["vocabularies"].pop(), "vocabularies must be two, found 1"),
        (lambda s: s["vocabularies"].__setitem__(1, [1]), "target vocabulary must be a dictionary, found"),
        (lambda s: s["vocabularies"][1].update(split="lines"), "target_split must be one of characters, words"),
        (lambda s: s["vocabularies"][1].update(lowercase=1), "lowercase must be true or false, found 1"),
        (lambda s: s["vocabularies"][0]["tokens"].__setitem__(5, s["vocabularies"][0]["tokens"][6]), "several times"),
        (lambda s: s["generation"].pop("max_length"), "generation max_length must be an integer, found None"),
        (lambda s: s["generation"].update(max_length=1000), "max_length 1000"),
        (lambda s: s["generation"].update(beam_size=0), "beam_size must be at least 1"),
        (lambda s: s["generation"].update(length_penalty=float("nan")), "length_penalty must be"),
        (lambda s: s.update(training=[]), "training must be of type dict, found list"),
        (lambda s: s.update(training={"loss": torch.ones(1)}), "training must hold what JSON can"),
        (lambda s: s.update(training={"name": "\ud800"}), "training must hold what JSON can"),
        (
            lambda s: s["vocabularies"][1]["tokens"].__setitem__(5, 5),
            "target_tokens must be a list of strings, found 5",
        ),
        (
            lambda s: s["vocabularies"][0]["tokens"].__setitem__(5, "\ud800"),
            "source_tokens must be a list of strings, found",
        ),
    ],
)
def test_what_does_not_fit_is_refused(altered: Callable[..., Path], change: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(altered(change))


@pytest.mark.parametrize("part", ["config", "special_ids", "generation"])
@pytest.mark.parametrize("value", [None, "1", [], torch.tensor(1), b"x"], ids=repr)
def test_values_of_another_type_are_all_named(altered: Callable[..., Path], part: str, value: Any) -> None:
    names = list(torch.load(altered(lambda _: None), weights_only=True)[part])

    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(altered(lambda state: state[part].update(dict.fromkeys(names, value))))
    accepted = {"activation", "norm", "positions"} if isinstance(value, str) else set()
    for name in {*names} - accepted:
        assert f"{part} {name} must be" in str(caught.value)


@pytest.mark.parametrize("value", ["", 0, 1.0])
def test_switches_are_true_or_false(altered: Callable[..., Path], value: Any) -> None:
    with pytest.raises(CheckpointError, match="config norm_first must be true or false"):
        read_checkpoint(altered(lambda state: state["config"].update(norm_first=value)))


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int64": torch.Tensor.long,
    "complex64": lambda w: w.to(torch.complex64),
    "float8_e4m3fn": lambda w: w.to(torch.float8_e4m3fn),
    "qint8": lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8),
    "float32 sparse_coo": torch.Tensor.to_sparse,
    "float32 sparse_csr": torch.Tensor.to_sparse_csr,
    "float32 without data": lambda w: w.to("meta"),
    "not finite numbers in float32": lambda w: w.double() * 1e300,
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's, of forms that it will drop
@pytest.mark.parametrize("form", FORMS)
def test_weights_must_be_dense_floats(altered: Callable[..., Path], form: str) -> None:
    name = "projection.weight"

    with pytest.raises(CheckpointError, match=form) as caught:
        read_checkpoint(altered(lambda state: state["weights"].update({name: FORMS[form](state["weights"][name])})))
    assert name in str(caught.value)


@pytest.mark.parametrize(
    "bomb",
    [
        {"source_vocabulary_size": 10**12},
        {"d_model": 2**20, "heads": 1},
        {"d_ff": 10**13},
        {"d_ff": 2**62},
        {"d_ff": 2**80},
        {"d_model": 2**40, "heads": 1},
        {"d_model": 2**2000, "heads": 1},
        {"encoder_layers": 10**9},
        {"max_length": 10**12},
    ],
)
def test_a_configuration_beyond_the_file_is_refused_before_it_is_allocated(
    altered: Callable[..., Path], bomb: dict[str, int]
) -> None:
    with pytest.raises(CheckpointError):
        read_checkpoint(altered(lambda state: state["config"].update(bomb)))


def test_the_file_is_left_alone(tiny_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_checkpoint, tmp_path / "copy.pt")
    source = read_checkpoint(tmp_path / "copy.pt")
    with torch.no_grad():
        source.model.projection.weight.zero_()
    assert (tmp_path / "copy.pt").read_bytes() == tiny_checkpoint.read_bytes()
