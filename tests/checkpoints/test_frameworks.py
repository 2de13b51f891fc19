"""Checkpoints of translation frameworks: fairseq's, OpenNMT-py's, Eole's, Marian's."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ctranslate2.converters
import numpy as np
import pytest
import torch
from ctranslate2 import Translator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from reference_model import Transformer
from tests.checkpoints.parity import assert_computed, assert_same_model
from tests.checkpoints.test_huggingface import Theirs, build
from tests.numerics import assert_close, exactly, near
from tfm_export.bundle import SourceIds
from tfm_export.checkpoints import SourceModel, read_checkpoint
from tfm_export.checkpoints.pickles import load_pickle
from tfm_export.decoding import DecodeOptions, generate
from tfm_export.errors import CheckpointError
from tfm_export.runtime.torch_model import TorchModel

FIXTURES = Path(__file__).parent / "fixtures"


def check_usual_ids_and_tokens(source: SourceModel) -> None:
    """Those of OpenNMT-py and Eole where nothing else is said."""
    special = source.special_ids
    assert (special.pad, special.bos, special.eos, special.unk) == (1, 2, 3, 0)
    assert not special.source_ends_with_eos
    assert [*source.tokenizer] == ["tokenizer.json"]


@pytest.mark.parametrize("name", ["relu", "gated", "rms", "flash"])
@torch.inference_mode()
def test_opennmt_checkpoints_give_what_opennmt_computed(name: str) -> None:
    path = FIXTURES / f"opennmt_{name}.pt"
    source = read_checkpoint(path)
    with torch.serialization.safe_globals([Namespace]):
        expected = torch.load(path, weights_only=True)["expected"]
    assert_computed(source.model, expected)
    check_usual_ids_and_tokens(source)


@torch.inference_mode()
def test_checkpoints_of_opennmt_2_give_what_opennmt_computed() -> None:
    path = FIXTURES / "opennmt2.pt"
    source = read_checkpoint(path)
    expected = load_pickle(path)["expected"]
    assert_computed(source.model, expected, "log_probs")
    check_usual_ids_and_tokens(source)
    assert not [note for note in source.notes if note.startswith("'generator' has weights")]
    sides = json.loads(source.tokenizer["tokenizer.json"])
    assert sides["source"]["tokens"] == ["<unk>", "<blank>", *"abcdefg"]
    # The ids of the target's start and end token are those of words of the source.
    assert source.special_ids.source == SourceIds(pad=1, bos=None, eos=None, unk=0)
    assert sides["target"]["tokens"] == ["<unk>", "<blank>", "<s>", "</s>", *"hijklmnop"]


@torch.inference_mode()
def test_opennmt_checkpoints_score_as_ctranslate2_does(tmp_path: Path) -> None:
    state = load_pickle(FIXTURES / "opennmt_relu.pt")
    depths = {"enc_layers": 1, "dec_layers": 2, "encoder_type": "transformer", "decoder_type": "transformer"}
    torch.save({**state, "opt": Namespace(**{**state["opt"], **depths})}, tmp_path / "model.pt")
    with torch.serialization.safe_globals([Namespace]):
        converter = ctranslate2.converters.OpenNMTPyConverter(str(tmp_path / "model.pt"))
        translator = Translator(converter.convert(str(tmp_path / "ct2")))
    source = read_checkpoint(tmp_path / "model.pt")
    tokens = {side: state["vocab"][side] for side in ("src", "tgt")}
    sources, targets = [["a", "b", "c", "g"], ["d"], ["e", "e", "f"]], [["h", "p"], ["i", "j", "k"], ["o"]]
    results = translator.score_batch(sources, targets)
    special = source.special_ids
    for words, target, theirs in zip(sources, targets, results, strict=True):
        ids = torch.tensor([[tokens["src"].index(word) for word in words]])
        wanted = [*(tokens["tgt"].index(word) for word in target), special.eos]
        target_ids = torch.tensor([[special.bos, *wanted[:-1]]])
        assert_close(theirs.log_probs, exactly(log_probs_of(ids, target_ids, wanted), source.model))


def log_probs_of(source_ids: Tensor, target_ids: Tensor, wanted: list[int]) -> Callable[[nn.Module], Tensor]:
    """What a model gives for the tokens of a target [T]."""

    def compute(model: nn.Module) -> Tensor:
        logits: Tensor = model(source_ids, torch.ones_like(source_ids, dtype=torch.bool), target_ids)
        return logits.log_softmax(-1)[0].gather(1, torch.tensor(wanted)[:, None])[:, 0]

    return compute


@pytest.mark.parametrize("name", ["sinusoids", "gated", "learned", "unequal"])
@torch.inference_mode()
def test_folders_of_eole_give_what_eole_computed(name: str) -> None:
    folder = FIXTURES / f"eole_{name}"
    source, expected = read_checkpoint(folder), load_file(folder / "expected.safetensors")
    assert_computed(source.model, expected)
    check_usual_ids_and_tokens(source)
    assert source.model.config.norm == ("rms" if name == "gated" else "layer")
    assert source.model.config.tie_projection == (name == "gated")
    if name == "unequal":
        sizes = [
            (stack.heads, stack.head_size, stack.d_ff) for stack in (source.model.config, source.model.config.decoder)
        ]
        assert sizes == [(4, 3, 7), (2, 5, 11)]


@pytest.mark.parametrize(
    ("part", "options", "problem"),
    [
        (None, {"parallel_residual": True}, "parallel_residual is True, which is not supported"),
        (None, {"heads": 3}, "d_model must be a multiple of heads, found 8 and 3"),
        ("decoder", {"heads": 3}, "the decoder's d_model must be a multiple of heads, found 8 and 3"),
        ("decoder", {"heads_kv": 1}, "heads_kv is 1 in the decoder"),
        ("encoder", {"mlp_activation_fn": "quick_gelu"}, "mlp_activation_fn 'quick_gelu' is not known"),
        ("encoder", {"layer_norm": "gemma-rms"}, "layer_norm 'gemma-rms' is not known"),
        ("embeddings", {"position_encoding_type": "Rotary"}, "position_encoding_type is 'Rotary', which is not"),
        ("embeddings", {"normalize": True}, "normalize is True"),
    ],
)
def test_options_of_eole_that_do_not_fit_are_refused(
    tmp_path: Path, part: str | None, options: dict[str, Any], problem: str
) -> None:
    shutil.copytree(FIXTURES / "eole_learned", tmp_path / "model")
    path = tmp_path / "model/config.json"
    config = json.loads(path.read_text())
    for stack in ("encoder", "decoder"):  # what is said of both stands in both too
        config["model"][stack].update(options if part is None else {})
    (config["model"] if part is None else config["model"][part]).update(options)
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=problem):
        read_checkpoint(tmp_path / "model")


def test_shards_and_missing_vocabularies_of_eole(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "eole_sinusoids", tmp_path / "model")
    weights = load_file(tmp_path / "model/model.00.safetensors")
    names = [*weights]
    first = [name for name in names if "encoder" in name or name.endswith("0.self_attn.linear_query.weight")]
    save_file({name: weights[name] for name in first}, tmp_path / "model/model.00.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: decoder\.transformer_layers"):
        read_checkpoint(tmp_path / "model")
    others = {name: weights[name] for name in names if name not in first}
    save_file(others, tmp_path / "model/model.01.safetensors")
    assert read_checkpoint(tmp_path / "model").model.config.decoder_layers == 2
    save_file({names[0]: weights[names[0]]}, tmp_path / "model/model.02.safetensors")
    with pytest.raises(CheckpointError, match="stands in several shards"):
        read_checkpoint(tmp_path / "model")
    (tmp_path / "model/model.02.safetensors").unlink()
    (tmp_path / "model/vocab.json").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)pad: .*bos: .*eos: "):
        read_checkpoint(tmp_path / "model")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_relative_positions": 20}, "max_relative_positions is 20: relative positions of Shaw et al."),
        ({"max_relative_positions": -1}, "max_relative_positions is -1: rotary positions, which turn queries and keys"),
        ({"max_relative_positions": -2}, "max_relative_positions is -2: ALiBi"),
        ({"self_attn_type": "average"}, "self_attn_type is 'average', which is not supported; known are scaled-dot, "),
        ({"copy_attn": True}, "copy_attn is True"),
        ({"pos_ffn_activation_fn": "mish"}, "pos_ffn_activation_fn 'mish' is not known"),
        ({"heads": 3}, "d_model must be a multiple of heads, found 8 and 3"),
    ],
)
def test_opennmt_options_that_do_not_fit_are_refused(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    with torch.serialization.safe_globals([Namespace]):
        state = torch.load(FIXTURES / "opennmt_rms.pt", weights_only=True)
    vars(state["opt"]).update(options)
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=problem):
        read_checkpoint(tmp_path / "model.pt")


@pytest.mark.parametrize("name", ["sinusoids", "learned", "unequal"])
@torch.inference_mode()
def test_fairseq_checkpoints_give_what_fairseq_computed_and_generated(name: str) -> None:
    path = FIXTURES / f"fairseq_{name}.pt"
    source = read_checkpoint(path)
    with torch.serialization.safe_globals([Namespace]):
        expected = torch.load(path, weights_only=True)["expected"]
    assert_computed(source.model, expected)
    model = TorchModel(source.model)
    sources = [row[:n].tolist() for row, n in zip(expected["source_ids"], expected["lengths"], strict=True)]
    options = DecodeOptions(max_decoding_length=15, return_end_token=True, **source.generation.options)
    results = generate(model, sources, options, source.special_ids)
    # They force an end token on the 16th place.
    assert [result.hypotheses[0].tokens for result in results] == [tokens[:15] for tokens in expected["generated"]]
    options = replace(options, beam_size=4)
    results = generate(model, sources, options, source.special_ids)
    # Their scores are lower by the padding's share, which they take away without sharing it out.
    assert [result.hypotheses[0].tokens for result in results] == [beams[0][0] for beams in expected["beams"]]


def as_fairseq(model: Any, arguments: dict[str, Any], *, new: bool = False) -> dict[str, Any]:
    """A model of transformers in fairseq's layout, from which transformers' own conversions start."""
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        short = name.removeprefix("model.")
        if short == "lm_head.weight":
            state["decoder.output_projection.weight"] = tensor
        elif short not in {"final_logits_bias", "shared.weight"}:
            state[short] = tensor
    for stack in ("encoder", "decoder"):
        if f"{stack}.embed_positions.weight" not in state:
            state[f"{stack}.embed_positions._float_tensor"] = torch.zeros(1)
    state["encoder.version"] = torch.tensor([3.0])
    values = Namespace(**arguments)
    beside = {"args": None, "cfg": {"model": values}} if new else {"args": values, "cfg": None}
    return {**beside, "model": state, "optimizer_history": [], "extra_state": {"epoch": 3}, "last_optimizer_state": {}}


FAIRSEQ = {
    # M2M-100 is fairseq's Transformer with its sinusoids, pre-norm; BART is the same with learned positions, post-norm.
    "m2m_100": {"max_source_positions": 40, "max_target_positions": 30, "activation_fn": "relu"},
    "bart": {"activation_fn": "gelu", "no_scale_embedding": True},
    "mbart": {"activation_fn": "gelu"},
}


@pytest.mark.parametrize("new", [False, True], ids=["args", "cfg"])
@pytest.mark.parametrize("name", FAIRSEQ)
def test_fairseq_checkpoints(tmp_path: Path, name: str, *, new: bool) -> None:
    model = build(name)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.zero_()
    arguments = {"encoder_attention_heads": 3, "decoder_attention_heads": 3, **FAIRSEQ[name]}
    torch.save(as_fairseq(model, arguments, new=new), tmp_path / "checkpoint_best.pt")
    source = read_checkpoint(tmp_path / "checkpoint_best.pt")
    assert_same_model(source.model, Theirs(model), pad=1, source=20, target=17)
    assert source.model.config.share_embeddings
    if name == "m2m_100":
        assert (source.model.config.max_length, source.model.config.max_target_length) == (40, 30)
    assert (source.special_ids.bos, source.special_ids.eos) == (2, 2)
    assert source.generation.options["suppress_sequences"] == [[1]]


def test_fairseq_checkpoints_without_arguments_are_asked_for_them(tmp_path: Path) -> None:
    model = build("m2m_100")
    torch.save({"model": as_fairseq(model, {})["model"]}, tmp_path / "bare.pt")
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(tmp_path / "bare.pt")
    assert all(name in str(caught.value) for name in ("heads:", "activation:", "scale_embeddings:"))
    source = read_checkpoint(
        tmp_path / "bare.pt",
        {"heads": 3, "activation": "relu", "scale_embeddings": True, "max_length": 50, "longest_target": 45},
    )
    assert_same_model(source.model, Theirs(model), pad=1)
    assert source.model.config.max_target_length == 45


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"activation_fn": "tanh"}, "activation_fn 'tanh' is not known"),
        ({"decoder_attention_heads": 7}, "the decoder's d_model must be a multiple of heads, found 24 and 7"),
        ({"adaptive_softmax_cutoff": "10,20"}, "adaptive_softmax_cutoff is '10,20', which is not supported"),
    ],
)
def test_fairseq_arguments_that_do_not_fit_are_refused(tmp_path: Path, arguments: dict[str, Any], problem: str) -> None:
    given = {"encoder_attention_heads": 3, "decoder_attention_heads": 3, **arguments}
    torch.save(as_fairseq(build("m2m_100"), given), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=problem):
        read_checkpoint(tmp_path / "model.pt")


def test_fairseq_embeddings_of_another_width_are_refused(tmp_path: Path) -> None:
    state = as_fairseq(build("m2m_100"), {"encoder_attention_heads": 3, "decoder_attention_heads": 3})
    state["model"]["decoder.project_in_dim.weight"] = torch.ones(24, 9)
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"decoder_input_dim .* is not decoder_embed_dim \(project_in_dim\)"):
        read_checkpoint(tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        (
            {"_name": "translation_multi_simple_epoch", "encoder_langtok": "src", "decoder_langtok": True},
            "its task is translation_multi_simple_epoch, encoder_langtok 'src', decoder_langtok True: tokens for",
        ),
        ({"_name": "multilingual_translation"}, "its task is multilingual_translation: tokens for languages"),
        ({"_name": "translation_from_pretrained_bart"}, "its task is translation_from_pretrained_bart: tokens"),
        ({"_name": "translation_multi_simple_epoch", "encoder_langtok": None, "decoder_langtok": False}, None),
        ({"_name": "translation"}, None),
    ],
)
@pytest.mark.parametrize("new", [False, True], ids=["args", "cfg"])
def test_fairseq_tasks_with_tokens_for_languages_are_refused(
    tmp_path: Path, task: dict[str, Any], problem: str | None, *, new: bool
) -> None:
    arguments = {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
    old = {("task" if name == "_name" else name): value for name, value in task.items()}
    state = as_fairseq(build("m2m_100"), arguments if new else {**arguments, **old}, new=new)
    if new:
        state["cfg"]["task"] = Namespace(**task)
    torch.save(state, tmp_path / "model.pt")
    if problem is None:
        assert read_checkpoint(tmp_path / "model.pt").special_ids.bos == 2
    else:
        with pytest.raises(CheckpointError, match=f"(?s){problem}.*convert it to a folder of transformers"):
            read_checkpoint(tmp_path / "model.pt")


MARIAN_OPTIONS = {
    "type": "transformer",
    "transformer-heads": 2,
    "transformer-ffn-activation": "swish",
    "transformer-decoder-autoreg": "self-attention",
    "transformer-no-projection": "false",
    "transformer-guided-alignment-layer": "last",
    "enc-depth": 1,
    "dec-depth": 2,
}
POST = {"transformer-preprocess": '""', "transformer-postprocess": "dan", "transformer-postprocess-emb": "d"}
PRE = {
    "transformer-preprocess": "n",
    "transformer-postprocess": "da",
    "transformer-postprocess-top": "n",
    "transformer-postprocess-emb": "d",
}
V, WIDTH, INNER, DECODER_INNER = 13, 8, 10, 7


def marian_arrays(*, pre_norm: bool, separate: bool, learned: bool = False, **options: Any) -> dict[str, np.ndarray]:
    """Random weights under Marian's names, as its source gives them."""
    rng = np.random.default_rng(4)
    shapes = dict(marian_shapes(pre_norm=pre_norm, separate=separate, learned=learned))
    arrays = {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    lines = {**MARIAN_OPTIONS, **(PRE if pre_norm else POST), **options}
    text = "dim-vocabs:\n  - 13\n  - 13\n" + "".join(f"{name}: {value}\n" for name, value in lines.items()) + "\0"
    arrays["special:model.yml"] = np.frombuffer(text.encode(), np.int8)
    return arrays


def marian_shapes(*, pre_norm: bool, separate: bool, learned: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name and shape of every weight."""
    suffix = "_pre" if pre_norm else ""
    for name in ("encoder_Wemb", "decoder_Wemb") if separate else ("Wemb",):
        yield name, (V, WIDTH)
    if learned:
        yield "Wpos", (30, WIDTH)
    layers = [("encoder_l1", ("self",)), ("decoder_l1", ("self", "context")), ("decoder_l2", ("self", "context"))]
    for layer, attentions in layers:
        linears = {f"{layer}_{attention}_{{}}{part}": (WIDTH, WIDTH) for attention in attentions for part in "qkvo"}
        inner = INNER if layer.startswith("encoder") else DECODER_INNER
        linears |= {f"{layer}_ffn_{{}}1": (WIDTH, inner), f"{layer}_ffn_{{}}2": (inner, WIDTH)}
        for name, shape in linears.items():
            yield name.format("W"), shape
            yield name.format("b"), (1, shape[1])
        for norm in (*(f"{attention}_Wo" for attention in attentions), "ffn_ffn"):
            yield f"{layer}_{norm}_ln_scale{suffix}", (1, WIDTH)
            yield f"{layer}_{norm}_ln_bias{suffix}", (1, WIDTH)
    for stack in ("encoder", "decoder") if pre_norm else ():
        yield f"{stack}_top_ln_scale", (1, WIDTH)
        yield f"{stack}_top_ln_bias", (1, WIDTH)
    yield "decoder_ff_logit_out_b", (1, V)
    if separate:
        yield "decoder_ff_logit_out_Wt", (V, WIDTH)


@pytest.fixture
def marian_scores(tmp_path: Path) -> Callable[[Path, list[list[int]], list[list[int]]], list[list[float]]]:
    """CTranslate2's log-probability of every token of targets, by its own conversion of the same file."""

    def scores(path: Path, sources: list[list[int]], targets: list[list[int]]) -> list[list[float]]:
        tokens = ["</s>", "<unk>", *(f"t{i}" for i in range(2, V))]
        (tmp_path / "vocab.yml").write_text("".join(f'"{token}": {i}\n' for i, token in enumerate(tokens)))
        converter = ctranslate2.converters.MarianConverter(str(path), [str(tmp_path / "vocab.yml")] * 2)
        translator = Translator(converter.convert(str(tmp_path / "ct2"), force=True))
        names = [[[tokens[i] for i in ids] for ids in side] for side in (sources, targets)]
        return [result.log_probs for result in translator.score_batch(*names)]

    return scores


@pytest.mark.parametrize("pre_norm", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("separate", [False, True], ids=["tied", "separate"])
@torch.inference_mode()
def test_marian_checkpoints_score_as_ctranslate2_does(
    tmp_path: Path, marian_scores: Callable[..., list[list[float]]], *, pre_norm: bool, separate: bool
) -> None:
    """With learned positions: for sinusoids CTranslate2 takes the paper's frequencies, which are not Marian's."""
    path = tmp_path / "model.npz"
    np.savez(path, **marian_arrays(pre_norm=pre_norm, separate=separate, learned=True))
    source = read_checkpoint(path)
    sources, targets = [[2, 3, 4, 5], [7], [8, 12, 9]], [[5, 6], [3, 4, 2], [11]]
    expected = marian_scores(path, sources, targets)
    start = V
    assert source.special_ids.bos == start
    for source_ids, target, theirs in zip(sources, targets, expected, strict=True):
        ids = torch.tensor([[*source_ids, 0]])
        target_ids = torch.tensor([[start, *target]])
        model = as_ctranslate2_has_it(source.model)
        assert_close(theirs, exactly(log_probs_of(ids, target_ids, [*target, 0]), model))
        logits = model(ids, torch.ones_like(ids, dtype=torch.bool), target_ids)
        assert logits.log_softmax(-1)[..., start].max() < -1000


def as_ctranslate2_has_it(model: Transformer) -> Transformer:
    """It scales embeddings whatever the positions are, and adds 1e-5 to variances; Marian does not, and adds 1e-6."""
    model.config = replace(model.config, scale_embeddings=True)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-5
    return model


def test_marians_sinusoids_are_those_of_its_source(tmp_path: Path) -> None:
    np.savez(tmp_path / "model.npz", **marian_arrays(pre_norm=False, separate=False))
    source = read_checkpoint(tmp_path / "model.npz", {"max_length": 20})
    table = source.model.state_dict()["source_positions.table"]
    assert source.model.config.scale_embeddings
    for position in (0, 1, 7, 19):
        for i in range(4):
            angle = position * np.exp(-i * np.log(10000.0) / 3)
            # The angle is a float32 too: what it is off, its sine is off.
            assert table[position, i].item() == near(np.sin(angle), made_of=[1, angle])
            assert table[position, 4 + i].item() == near(np.cos(angle), made_of=[1, angle])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"type": "s2s"}, "type must be transformer, found s2s"),
        ({"transformer-decoder-autoreg": "rnn"}, "transformer-decoder-autoreg must be self-attention, found rnn"),
        ({"transformer-ffn-activation": "gelu"}, "transformer-ffn-activation gelu is not known"),
        ({"transformer-heads": 3}, "multiple of heads"),
    ],
)
def test_marian_options_that_do_not_fit_are_refused(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    np.savez(tmp_path / "model.npz", **marian_arrays(pre_norm=False, separate=False, **options))
    with pytest.raises(CheckpointError, match=problem):
        read_checkpoint(tmp_path / "model.npz")
