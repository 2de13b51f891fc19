"""Models of the user's own: what an adapter makes is checked before it is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tfm_export.checkpoints import Adapter, AdapterConfig, attend, read_adapter, read_weights, slot_positions
from tfm_export.checkpoints.adapter import Cache
from tfm_export.errors import CheckpointError

V, HEADS, D = 7, 3, 7
IDS = {"pad": 0, "bos": 1, "eos": 2}


class Alibi(Adapter):
    """One layer of attention whose scores fall with the distance (Press et al. 2021)."""

    def __init__(self, **sizes: Any) -> None:
        sizes = {"decoder_layers": 1, "heads": HEADS, "head_size": D, "max_length": 12, "max_target_length": 9, **sizes}
        super().__init__(AdapterConfig(source_vocabulary_size=V, target_vocabulary_size=V, **sizes))
        self.embedding = nn.Embedding(V, HEADS * D)
        self.linears = nn.ModuleList(nn.Linear(HEADS * D, HEADS * D, bias=False) for _ in range(6))
        self.projection = nn.Linear(HEADS * D, V)
        for layer in self.linears:  # sharp enough for every source to have a target of its own
            nn.init.normal_(layer.weight, std=0.5)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, HEADS + 1))

    def heads(self, x: Tensor, layer: int) -> Tensor:
        return self.linears[layer](x).unflatten(-1, (HEADS, D)).transpose(1, 2)

    def encode(self, source_ids: Tensor, source_mask: Tensor) -> Tensor:  # noqa: ARG002 (it attends to nothing)
        return self.embedding(source_ids)

    def cross_keys_values(self, memory: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(self.heads(memory, 0), self.heads(memory, 1))]

    def decode_step(
        self, target_ids: Tensor, positions: Tensor, self_mask: Tensor, source_mask: Tensor, cache: Cache, cross: Any
    ) -> Tensor:
        x = self.embedding(target_ids)
        key, value = cache.update(0, self.heads(x, 2), self.heads(x, 3))
        distance = (slot_positions(self_mask) - positions[:, :, None])[:, None] * self.slopes[:, None, None]
        bias = torch.where(self_mask, distance, -65504.0)
        x = x + attend(self.heads(x, 4), key, value, bias).transpose(1, 2).flatten(2)
        x = x + attend(self.heads(x, 5), *cross[0], source_mask).transpose(1, 2).flatten(2)
        return self.projection(x)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.save({"model": Alibi().state_dict()}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def load(path: Path) -> Alibi:
    adapter = Alibi()
    adapter.load_state_dict(read_weights(path))
    return adapter


def test_an_adapter_becomes_a_model(checkpoint: Path) -> None:
    source = read_adapter(checkpoint, load, {**IDS, "source_ends_with_eos": True, "beam_size": 2})
    assert isinstance(source.model, Alibi)
    assert not source.model.training
    assert (source.special_ids.bos, source.special_ids.source_ends_with_eos) == (1, True)
    assert (source.generation.beam_size, source.generation.max_length) == (2, 9)
    assert source.tokenizer == {}
    assert source.notes == ["the adapter has no decode of its own: the graphs were held to its decode_step in PyTorch"]


def test_half_weights_are_computed_with_in_float32(checkpoint: Path) -> None:
    source = read_adapter(checkpoint, lambda path: load(path).half(), IDS)
    assert {p.dtype for p in source.model.parameters()} == {torch.float32}
    assert "weights stored as float16 are computed with in float32" in source.notes


def test_all_that_is_missing_or_without_effect_is_said_at_once(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_adapter(checkpoint, load, {"bos": 7, "heads": 3, "activation": "relu"})
    text = str(caught.value)
    assert all(
        part in text
        for part in (
            "heads has no effect on an adapter",
            "activation has no effect",
            "pad is missing",
            "eos is missing",
            "bos id 7 is outside the target vocabulary of 7",
            "--pad ID --eos ID",
        )
    )


class Forgetful(Alibi):
    def decode_step(self, target_ids: Tensor, *_others: Any) -> Tensor:
        return self.projection(self.embedding(target_ids))


class Twice(Alibi):
    def decode_step(self, target_ids: Tensor, positions: Tensor, self_mask: Tensor, *others: Any) -> Tensor:
        cache = others[1]
        cache.update(0, self.heads(self.embedding(target_ids), 2), self.heads(self.embedding(target_ids), 3))
        return super().decode_step(target_ids, positions, self_mask, *others)


class Narrow(Alibi):
    def cross_keys_values(self, memory: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(key[:, :2], value) for key, value in super().cross_keys_values(memory)]

    def decode_step(self, *arguments: Any) -> Tensor:
        cross = super().cross_keys_values(self.embedding(torch.zeros(2, 5, dtype=torch.long)))
        return super().decode_step(*arguments[:-1], cross)[..., :-1]


class Infinite(Alibi):
    def __init__(self) -> None:
        super().__init__()
        self.projection.bias.data[3] = torch.inf


@pytest.mark.parametrize(
    ("factory", "problems"),
    [
        (lambda _: 3, ["gave int; expected a tfm_export.export.Adapter"]),
        (lambda _: Forgetful(), ["must write layers 0 to 0 of the cache, it wrote none"]),
        (lambda _: Twice(), ["wrote layer 0 of the cache twice"]),
        (lambda _: Alibi(decoder_layers=2), ["must give 2 pairs, one a decoder layer; found 1"]),
        (
            lambda _: Narrow(),
            [
                "cross_keys_values: layer 0 has a key of shape torch.float32 [2, 2, 5, 7]; expected [B, H, length, D]",
                "decode_step must give float32 logits [B, Q, V], [2, 3, 7]; found torch.float32 [2, 3, 6]",
            ],
        ),
        (lambda _: Infinite(), ["projection.bias has numbers that are not finite"]),
    ],
)
def test_what_an_adapter_gets_wrong_is_found(checkpoint: Path, factory: Any, problems: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_adapter(checkpoint, factory, IDS)
    assert all(problem in str(caught.value) for problem in problems), caught.value


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"decoder_layers must be a positive integer, found 0; heads must .* True"):
        Alibi(decoder_layers=0, heads=True)


def test_a_file_that_wants_code_run_is_refused(tmp_path: Path) -> None:
    torch.save(Alibi(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="loading it could run code: refused"):
        read_adapter(tmp_path / "model.pt", load, IDS)


def test_slots_are_told_their_positions() -> None:
    mask = torch.tensor([[1, 0, 1, 1, 0]], dtype=torch.bool)[:, None, None]
    assert slot_positions(mask)[0, 0][mask[0, 0, 0]].tolist() == [0, 1, 2]
