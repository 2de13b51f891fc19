"""Checkpoint files: whole or not there, complete, small when asked, and never executed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reference_model import (
    Checkpoint,
    GenerationDefaults,
    SpecialIds,
    Transformer,
    Vocabulary,
    load_checkpoint,
    save_checkpoint,
)
from reference_model.checkpoint import write_atomically


@pytest.fixture
def checkpoint(tiny_model: Callable[..., Transformer]) -> Checkpoint:
    model = tiny_model(norm_first=True, final_norm=True, activation="gelu", decoder_layers=1)
    return Checkpoint(
        model=model,
        source_vocabulary=Vocabulary(tuple("abcdefghijklmnopqrstuvwxyz12345"), "characters", lowercase=True),
        target_vocabulary=Vocabulary(tuple(f"p{i}" for i in range(34)), "words"),
        special_ids=SpecialIds(pad=3, bos=4, eos=5, source_ends_with_eos=False),
        generation=GenerationDefaults(max_length=9, beam_size=4, length_penalty=0.6),
        training={"command": "none", "history": [{"dev_loss": 0.5}]},
    )


def test_everything_comes_back(checkpoint: Checkpoint, tmp_path: Path) -> None:
    save_checkpoint(checkpoint, tmp_path / "new folder" / "model.pt")
    found = load_checkpoint(tmp_path / "new folder" / "model.pt")
    for part in ("source_vocabulary", "target_vocabulary", "special_ids", "generation", "training"):
        assert getattr(found, part) == getattr(checkpoint, part)
    assert found.model.config == checkpoint.model.config
    assert not found.model.training
    expected = checkpoint.model.state_dict()
    assert list(found.model.state_dict()) == list(expected)
    assert all(torch.equal(weight, expected[name]) for name, weight in found.model.state_dict().items())


def test_a_model_of_ids_needs_no_vocabularies(checkpoint: Checkpoint, tmp_path: Path) -> None:
    bare = Checkpoint(
        model=checkpoint.model,
        source_vocabulary=None,
        target_vocabulary=None,
        special_ids=SpecialIds(),
        generation=GenerationDefaults(max_length=5),
    )
    save_checkpoint(bare, tmp_path / "model.pt")
    found = load_checkpoint(tmp_path / "model.pt")
    assert (found.source_vocabulary, found.target_vocabulary, found.training) == (None, None, {})


def test_half_the_size_and_computed_in_fp32(checkpoint: Checkpoint, tmp_path: Path) -> None:
    save_checkpoint(checkpoint, tmp_path / "full.pt")
    save_checkpoint(checkpoint, tmp_path / "half.pt", half=True)
    parameters = sum(p.numel() for p in checkpoint.model.parameters())
    saved = (tmp_path / "full.pt").stat().st_size - (tmp_path / "half.pt").stat().st_size
    assert saved == pytest.approx(2 * parameters, rel=0.05)
    expected = checkpoint.model.state_dict()
    for name, weight in load_checkpoint(tmp_path / "half.pt").model.state_dict().items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, expected[name].half().float())
    assert expected["projection.weight"].dtype == torch.float32  # the model that was saved is as it was


@pytest.mark.parametrize("half", [False, True])
def test_shared_weights_are_stored_once_and_stay_shared(
    tiny_model: Callable[..., Transformer], tmp_path: Path, *, half: bool
) -> None:
    model = tiny_model(share_embeddings=True, tie_projection=True)
    bare = Checkpoint(
        model=model,
        source_vocabulary=None,
        target_vocabulary=None,
        special_ids=SpecialIds(),
        generation=GenerationDefaults(max_length=5),
    )
    save_checkpoint(bare, tmp_path / "model.pt", half=half)
    weights = torch.load(tmp_path / "model.pt", weights_only=True)["weights"]
    shared = ("source_embedding.weight", "target_embedding.weight", "projection.weight")
    assert len({weights[name].data_ptr() for name in shared}) == 1
    loaded = load_checkpoint(tmp_path / "model.pt").model
    assert loaded.projection.weight is loaded.source_embedding.weight


@pytest.mark.parametrize("failure", [OSError("No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    path = tmp_path / "model.pt"
    save_checkpoint(checkpoint, path)
    before = path.read_bytes()

    def fail(_: Any, file: Any) -> None:
        file.write(b"half of it")
        raise failure

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(type(failure)):
        save_checkpoint(checkpoint, path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model.pt"]


def test_other_users_can_read_the_file(tmp_path: Path) -> None:
    write_atomically({"a": 1}, tmp_path / "state")
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o644


class Malicious:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.marker),))


def test_a_malicious_file_is_refused_and_not_executed(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    torch.save({"format": "reference_model", "training": Malicious(marker)}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="could execute code"):
        load_checkpoint(tmp_path / "evil.pt")
    assert not marker.exists()
    torch.load(tmp_path / "evil.pt", weights_only=False)  # the file does what the test says it does
    assert marker.exists()


@pytest.fixture
def altered(checkpoint: Checkpoint, tmp_path: Path) -> Callable[[Callable[[dict[str, Any]], object]], Path]:
    """A function that writes the checkpoint after a change of its state."""

    def write(change: Callable[[dict[str, Any]], object]) -> Path:
        save_checkpoint(checkpoint, tmp_path / "model.pt")
        state = torch.load(tmp_path / "model.pt", weights_only=True)
        change(state)
        torch.save(state, tmp_path / "model.pt")
        return tmp_path / "model.pt"

    return write


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(format="other"), "format 'reference_model', found 'other'"),
        (lambda s: s.pop("format"), "format 'reference_model', found None"),
        (lambda s: s.update(format_version=2), "format_version 1 or older, found 2"),
        (lambda s: [s.pop(k) for k in ("vocabularies", "generation")], "lacks vocabularies, generation"),
        (lambda s: s["config"].update(heads=5), "multiple of heads"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(
    altered: Callable[..., Path], change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_checkpoint(altered(change))


def test_all_missing_and_unexpected_weights_are_named(altered: Callable[..., Path]) -> None:
    def change(state: dict[str, Any]) -> None:
        del state["weights"]["projection.bias"], state["weights"]["decoder_norm.weight"]
        state["weights"]["stray"] = torch.zeros(1)

    with pytest.raises(RuntimeError) as caught:
        load_checkpoint(altered(change))
    for name in ("projection.bias", "decoder_norm.weight", "stray"):
        assert name in str(caught.value)


def test_another_file_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="found None"):
        load_checkpoint(tmp_path / "list.pt")
    save_checkpoint(checkpoint, tmp_path / "cut.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[:-1000])
    (tmp_path / "text.pt").write_text("hello", encoding="utf-8")
    (tmp_path / "empty.pt").touch()
    for name in ("cut.pt", "text.pt", "empty.pt"):
        with pytest.raises(ValueError, match="damaged"):
            load_checkpoint(tmp_path / name)
