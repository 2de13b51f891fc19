"""Checkpoints of models that people write themselves: each layout read back gives its model's own logits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from tests.checkpoints.parity import assert_same_model
from tests.oracles.layouts import Annotated, TorchSeq2Seq, Tutorial
from tfm_export.checkpoints import SourceModel, inspect_checkpoint, read_checkpoint
from tfm_export.cli import cli
from tfm_export.errors import CheckpointError

# What PyTorch says of an odd number of heads.
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")

IDS = {"pad": 0, "bos": 1, "eos": 2}
SOURCES = {"source_starts_with_bos": False, "source_ends_with_eos": True}
TORCH = {**IDS, **SOURCES, "heads": 3, "norm_first": False, "activation": "relu", "scale_embeddings": True}


@pytest.fixture(autouse=True)
def _plain_attention() -> Iterator[None]:
    """Without PyTorch's fused encoder layers, which cut padding off."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def save(model: nn.Module, path: Path, **beside: Any) -> Path:
    """A state dict as training scripts leave it: biases and norms that are not trivial."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    torch.save({"model_state_dict": model.state_dict(), **beside} if beside else model.state_dict(), path)
    return path


def read(path: Path, settings: dict[str, Any]) -> SourceModel:
    return read_checkpoint(path, settings)


STACKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "PyTorch's defaults": ({}, {}),
    "pre-norm, gelu, unequal depths": (
        {"norm_first": True, "activation": "gelu", "num_encoder_layers": 1, "num_decoder_layers": 3},
        {"norm_first": True, "activation": "gelu"},
    ),
    "no biases": ({"bias": False}, {}),
    "no final norms": ({"final_norm": False, "norm_first": True}, {"norm_first": True}),
    "learned positions": ({"learned": True}, {}),
    "unscaled": ({"scaled": False}, {"scale_embeddings": False}),
    "no table in the file": ({"buffer": False}, {"positions": "sinusoidal", "max_length": 64}),
    "another epsilon": ({"layer_norm_eps": 0.1}, {"layer_norm_epsilon": 0.1}),
    "narrow": ({"dim_feedforward": 5}, {}),
}


@pytest.mark.parametrize("case", STACKS)
def test_models_on_pytorchs_transformer(tmp_path: Path, case: str) -> None:
    options, settings = STACKS[case]
    defaults = {"num_encoder_layers": 2, "num_decoder_layers": 1, "dim_feedforward": 31, "dropout": 0.1}
    model = TorchSeq2Seq((11, 13), 42, 3, **{**defaults, **options})
    source = read(save(model, tmp_path / "model.pt"), {**TORCH, **settings})
    assert_same_model(source.model, model)
    assert (source.model.config.max_length, source.model.config.max_target_length) == (64, 64)
    assert source.special_ids.source_ends_with_eos


def test_pytorchs_stacks_of_unequal_sizes(tmp_path: Path) -> None:
    model = TorchSeq2Seq((11, 13), 30, 5, num_encoder_layers=2, num_decoder_layers=1, dim_feedforward=31)
    layer = nn.TransformerDecoderLayer(30, 3, 17, batch_first=True)
    model.transformer.decoder = nn.TransformerDecoder(layer, 2, nn.LayerNorm(30))
    path = save(model, tmp_path / "model.pt")
    source = read(path, {**TORCH, "heads": 5, "decoder_heads": 3})
    assert_same_model(source.model, model)
    assert (source.model.config.d_ff, source.model.config.decoder.d_ff) == (31, 17)
    with pytest.raises(CheckpointError, match="decoder_d_ff is 17 by the shapes, and 31 in the settings"):
        read(path, {**TORCH, "heads": 5, "decoder_heads": 3, "decoder_d_ff": 31})


@pytest.mark.parametrize("sizes", [(7, 59), (59, 7), (13, 13)])
def test_embeddings_are_told_apart_by_names(tmp_path: Path, sizes: tuple[int, int]) -> None:
    model = TorchSeq2Seq(sizes, 12, 3, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=8)
    assert_same_model(read(save(model, tmp_path / "model.pt"), TORCH).model, model)


def renamed(model: nn.Module, names: dict[str, str]) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {
        next((new + k.removeprefix(old) for old, new in names.items() if k.startswith(old)), k): v
        for k, v in state.items()
    }


def test_names_that_mean_nothing_are_asked_for_unless_shapes_tell(tmp_path: Path) -> None:
    names = {"src_emb": "a", "tgt_emb": "b", "generator": "c"}
    stacks = {"num_encoder_layers": 1, "num_decoder_layers": 1, "dim_feedforward": 8}
    unequal, equal = (TorchSeq2Seq(sizes, 12, 3, **stacks) for sizes in ((11, 13), (13, 13)))
    torch.save(renamed(unequal, names), tmp_path / "unequal.pt")
    source = read(tmp_path / "unequal.pt", TORCH)
    assert_same_model(source.model, unequal)
    assert {"a.weight is the source embedding", "b.weight is the target embedding", "c.weight is the projection"} <= {
        *source.notes
    }

    torch.save(renamed(equal, names), tmp_path / "equal.pt")
    with pytest.raises(CheckpointError, match=r"keys: .*source_embedding, target_embedding of a.weight, b.weight"):
        read(tmp_path / "equal.pt", TORCH)
    for keys in (
        {"a.weight": "source_embedding", "b.weight": "target_embedding"},
        {"a.weight": "source_embedding.weight", "b.weight": "target_embedding.weight", "c.weight": "projection"},
    ):
        assert_same_model(read(tmp_path / "equal.pt", {**TORCH, "keys": keys}).model, equal)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"z.weight": "source_embedding"}, r"keys: the file has no z\.weight"),
        ({"src_emb.weight": "source_embeding"}, "given as source_embeding; expected one of source_embedding"),
        ({"src_emb.weight": "projection", "generator.weight": "projection"}, "projection is both"),
    ],
)
def test_keys_that_do_not_fit_are_refused(tmp_path: Path, keys: dict[str, str], problem: str) -> None:
    model = TorchSeq2Seq((11, 13), 12, 3, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=8)
    with pytest.raises(CheckpointError, match=problem):
        read(save(model, tmp_path / "model.pt"), {**TORCH, "keys": keys})


def test_tied_tables_are_found_by_comparing_them(tmp_path: Path) -> None:
    model = TorchSeq2Seq((13, 13), 12, 3, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=8)
    model.tgt_emb.weight = model.generator.weight = model.src_emb.weight
    source = read(save(model, tmp_path / "model.pt"), TORCH)
    assert source.model.projection.weight is source.model.source_embedding.weight
    assert_same_model(source.model, model)


def test_the_tutorials_transformer(tmp_path: Path) -> None:
    model = Tutorial((11, 13), 42, (1, 2), 6, 31, 20)
    source = read(save(model, tmp_path / "model.pt", epoch=3), {**IDS, "heads": 6})
    assert_same_model(source.model, model, source=20, target=20)
    assert source.special_ids.source_starts_with_bos
    assert source.special_ids.source_ends_with_eos


def test_the_annotated_transformer(tmp_path: Path) -> None:
    model = Annotated((11, 13), 24, (2, 1), 2, 31, 30)
    source = read(save(model, tmp_path / "model.pt"), {**IDS, **SOURCES, "heads": 2})
    assert source.model.config.norm == "unbiased"
    assert source.model.config.positions == "sinusoidal"
    assert_same_model(source.model, model, source=30, target=30)


def test_annotated_transformers_may_share_everything(tmp_path: Path) -> None:
    model = Annotated((13, 13), 24, (1, 1), 2, 31, 30)
    model.src_embed[0].lut.weight = model.tgt_embed[0].lut.weight = model.generator.proj.weight
    source = read(save(model, tmp_path / "model.pt"), {**IDS, **SOURCES, "heads": 2})
    assert source.model.projection.weight is source.model.source_embedding.weight
    assert_same_model(source.model, model)


LAYOUTS = {
    "torch": lambda: TorchSeq2Seq((11, 13), 12, 3, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=8),
    "tutorial": lambda: Tutorial((11, 13), 12, (1, 1), 3, 8, 64),
    "annotated": lambda: Annotated((11, 13), 12, (1, 1), 3, 8, 64),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_weight_more_or_less_is_told_with_all_others(tmp_path: Path, layout: str) -> None:
    model = LAYOUTS[layout]()
    state = torch.load(save(model, tmp_path / "model.pt"), weights_only=True)
    norms = [name for name in state if "norm" in name and name.endswith(("weight", "a_2"))]
    lost, wrong = norms[0], norms[1]
    del state[lost]
    state[wrong] = state[wrong][:-1].clone()
    state["stray.weight"] = torch.zeros(3)
    torch.save(state, tmp_path / "broken.pt")
    with pytest.raises(CheckpointError) as caught:
        read(
            tmp_path / "broken.pt",
            TORCH if layout == "torch" else {**IDS, **({} if layout == "tutorial" else SOURCES), "heads": 3},
        )
    text = str(caught.value)
    assert f"missing: {lost}" in text
    assert "expected shape [12], found [11]" in text
    assert "unexpected: stray.weight [3]" in text
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_missing_is_asked_for_at_once_and_by_name(tmp_path: Path, layout: str) -> None:
    path = save(LAYOUTS[layout](), tmp_path / "model.pt")
    wanted = {"heads", *IDS}
    if layout != "tutorial":
        wanted |= SOURCES.keys()
    if layout == "torch":
        wanted |= {"norm_first", "activation", "scale_embeddings"}
    found = inspect_checkpoint(path)
    assert not isinstance(found, SourceModel)
    assert found.missing.keys() == wanted
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    assert all(f"{name}: " in str(caught.value) for name in wanted)
    assert "--heads N" in str(caught.value.hint)


def test_settings_that_contradict_the_shapes_are_refused(tmp_path: Path) -> None:
    path = save(LAYOUTS["tutorial"](), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="d_ff is 8 by the shapes, and 9 in the settings"):
        read(path, {**IDS, "heads": 3, "d_ff": 9})
    with pytest.raises(CheckpointError, match="d_model must be a multiple of heads, found 12 and 5"):
        read(path, {**IDS, "heads": 5})
    with pytest.raises(CheckpointError, match="eos id 13 is outside the target vocabulary of 13"):
        read(path, {**IDS, "heads": 3, "eos": 13})


def test_a_setting_takes_the_place_of_what_a_layout_usually_means(tmp_path: Path) -> None:
    source = read(save(LAYOUTS["tutorial"](), tmp_path / "model.pt"), {**IDS, "heads": 3, "activation": "gelu"})
    assert source.model.config.activation == "gelu"
    assert "activation is 'gelu' as given; the layout says 'relu'" in source.notes


def test_useless_weights_may_be_left_out_by_name(tmp_path: Path) -> None:
    model = LAYOUTS["tutorial"]()
    torch.save(
        {**model.state_dict(), "criterion.weight": torch.ones(13), "criterion.count": torch.ones(1)}, tmp_path / "m.pt"
    )
    with pytest.raises(CheckpointError, match=r"unexpected: criterion\.weight"):
        read(tmp_path / "m.pt", {**IDS, "heads": 3})
    source = read(tmp_path / "m.pt", {**IDS, "heads": 3, "ignore": ["criterion.*"]})
    assert "not used, as the settings say: criterion.weight, criterion.count" in source.notes


def test_what_is_not_the_models_is_named_with_the_switch_that_leaves_it_out(tmp_path: Path) -> None:
    beside = {
        "criterion.weight": "'criterion.*'",
        "metrics.bleu.total": "'*total'",
        "decoder.position_ids": "'*position_ids'",
        "encoder.norm.num_batches_tracked": "'*num_batches_tracked'",
        "causal_mask": "'*causal_mask'",
    }
    state = {**LAYOUTS["tutorial"]().state_dict(), **dict.fromkeys(beside, torch.ones(1))}
    torch.save({**state, "decoder.layers.0.extra.weight": torch.ones(1)}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path / "m.pt", {**IDS, "heads": 3})
    for name, pattern in beside.items():
        assert f"unexpected: {name} [1] (if the model does not use it: --ignore-weights {pattern})" in str(caught.value)
    # A layer may well have a part that is not supported: it is not to be waved away.
    assert "unexpected: decoder.layers.0.extra.weight [1]\n" in str(caught.value)


def test_what_is_ignored_hides_no_common_prefix(tmp_path: Path) -> None:
    state = {f"model.{name}": weight for name, weight in LAYOUTS["torch"]().state_dict().items()}
    torch.save({**state, "criterion.weight": torch.ones(13)}, tmp_path / "m.pt")
    torch.save({"net.a": torch.ones(1), "net.b": torch.ones(1), "criterion.weight": torch.ones(1)}, tmp_path / "n.pt")
    with pytest.raises(CheckpointError, match=r"such as criterion\.\*, --ignore-weights leaves them out"):
        read(tmp_path / "n.pt", {})
    (tmp_path / "settings.json").write_text(json.dumps({**TORCH, "ignore": ["no.such"]}))
    arguments = ["--config", str(tmp_path / "settings.json"), "--ignore-weights", "criterion.*", "--json"]
    shown = json.loads(CliRunner().invoke(cli, ["inspect", str(tmp_path / "m.pt"), *arguments]).stdout)
    assert "not used, as the settings say: criterion.weight" in shown["notes"]
    assert "stripped from names: 'model.'" in shown["notes"]
    assert shown["problems"] == []


def test_tokens_in_the_settings_become_the_tokenizer(tmp_path: Path) -> None:
    path = save(LAYOUTS["tutorial"](), tmp_path / "model.pt")
    tokens = {"source_tokens": [*"abcdefghijk"], "target_tokens": [*"abcdefghijklm"], "source_split": "characters"}
    assert [*read(path, {**IDS, "heads": 3, **tokens}).tokenizer] == ["tokenizer.json"]
    with pytest.raises(CheckpointError) as caught:
        read(path, {**IDS, "heads": 3, "source_tokens": ["a", "a"]})
    text = str(caught.value)
    assert "target_tokens is missing" in text
    assert "source_tokens has 2 tokens, the embedding 11 rows" in text
    assert "found a several times" in text
