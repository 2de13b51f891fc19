"""Folders of Hugging Face: models of random weights against transformers' own forward pass and `generate`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.checkpoints.parity import assert_same_model
from tfm_export import load
from tfm_export.bundle import Limits
from tfm_export.checkpoints import SourceModel, read_checkpoint
from tfm_export.decoding import DecodeOptions, generate
from tfm_export.errors import CheckpointError, ExportError
from tfm_export.export import export_bundle
from tfm_export.runtime.torch_model import TorchModel

V, PAD, LONGEST = 59, 1, 20
SIZES = {
    "d_model": 24,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
    "max_position_embeddings": 40,
}
IDS = {"pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
BART = {**SIZES, **IDS, "vocab_size": V}
# Their MarianMT and Pegasus start from the padding id.
MARIAN = {**BART, "pad_token_id": 58, "decoder_start_token_id": 58, "eos_token_id": 0, "scale_embedding": True}
T5 = {
    "vocab_size": V,
    "d_model": 24,
    "d_kv": 7,
    "d_ff": 20,
    "num_layers": 1,
    "num_decoder_layers": 2,
    "num_heads": 3,
    "decoder_start_token_id": 0,
}

# Each with its class's name, its configuration, and what its generation_config.json has.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bart": (
        "Bart",
        BART,
        {"num_beams": 4, "length_penalty": 2.0, "min_length": 5, "no_repeat_ngram_size": 3, "early_stopping": True,
         "forced_bos_token_id": 0, "forced_eos_token_id": 2},
    ),
    "plbart": ("PLBart", BART, {"num_beams": 2}),
    "mbart": ("MBart", {**BART, "scale_embedding": True}, {"num_beams": 3, "forced_bos_token_id": 40}),
    "marian": ("Marian", {**MARIAN, "activation_function": "swish"}, {"num_beams": 4, "bad_words_ids": [[58]]}),
    "marian, two vocabularies": (
        "Marian",
        {**MARIAN, "decoder_vocab_size": 31, "decoder_start_token_id": 30, "pad_token_id": 30,
         "share_encoder_decoder_embeddings": False},
        {"num_beams": 2},
    ),
    "m2m_100": ("M2M100", BART, {"num_beams": 5, "forced_bos_token_id": 33, "max_length": 12}),
    "pegasus": (
        "Pegasus", {**BART, "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1}, {"num_beams": 2}
    ),
    "blenderbot": ("Blenderbot", BART, {"num_beams": 2, "min_new_tokens": 3}),
    "t5": ("T5", T5, {"num_beams": 2}),
    "t5 1.1": ("T5", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, {}),
    "t5, silu": ("T5", {**T5, "feed_forward_proj": "gated-silu", "relative_attention_num_buckets": 8,
                        "relative_attention_max_distance": 10}, {"repetition_penalty": 1.3}),
    "mt5": ("MT5", T5, {"num_beams": 3, "early_stopping": "never"}),
}  # fmt: skip


class Theirs(nn.Module):
    """A model of transformers as tests/checkpoints/parity.py wants it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def logits(self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
        """[B, T, V]."""
        output = self.model(input_ids=source_ids, attention_mask=source_mask.long(), decoder_input_ids=target_ids)
        logits: Tensor = output.logits
        return logits


def build(name: str, seed: int = 7, **sizes: Any) -> Any:
    """A model whose biases and norms are not trivial, and whose targets are more than one token ever again."""
    kind, config, generation = MODELS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**config, **sizes})
    ending = {"Marian": "MTModel"}.get(kind, "ForConditionalGeneration")
    model = getattr(transformers, f"{kind}{ending}")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "embed_positions" in key and kind in {"Marian", "Pegasus"}:
                continue  # sinusoids
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif kind in {"T5", "MT5"}:
                parameter.mul_(3 if "EncDec" in key else 1)
            else:
                parameter.mul_(8 if "embed" in key or "shared" in key else 6)  # theirs begin at 0.02
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.copy_(torch.randn_like(model.final_logits_bias))
    # Tied random weights repeat one token ever again, unless they must not.
    for key, value in {"no_repeat_ngram_size": 1, **generation}.items():
        setattr(model.generation_config, key, value)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """A function that builds a model and saves its folder, once."""
    done: dict[str, tuple[Any, Path]] = {}

    def save(name: str) -> tuple[Any, Path]:
        if name not in done:
            model, folder = build(name), tmp_path_factory.mktemp("saved")
            model.save_pretrained(folder)
            done[name] = model, folder
        return done[name]

    return save


@pytest.mark.parametrize("name", MODELS)
def test_the_forward_pass_is_theirs(saved: Callable[[str], tuple[Any, Path]], name: str) -> None:
    model, folder = saved(name)
    source = read_checkpoint(folder)
    assert_same_model(source.model, Theirs(model), pad=model.config.pad_token_id, source=30, target=21)


def theirs_and_ours(model: Any, source: SourceModel, **options: Any) -> tuple[list[list[int]], list[list[int]]]:
    """What both generate for sources of several lengths, one by one, up to the end token."""
    generator = torch.Generator().manual_seed(5)
    size, special = source.model.config.source_vocabulary_size, source.special_ids
    sources = [
        [*(int(i) for i in torch.randint(3, size - 2, (n,), generator=generator)), special.eos] for n in range(1, 13)
    ]
    theirs = []
    for ids in sources:
        # Their cache wants as many layers in the decoder as in the encoder.
        output = model.generate(torch.tensor([ids]), max_new_tokens=LONGEST, use_cache=False, **options)[0, 1:].tolist()
        theirs.append(output[: output.index(special.eos) + 1] if special.eos in output else output)
    generation = source.generation
    decode = DecodeOptions(
        **{
            "beam_size": generation.beam_size,
            "length_penalty": generation.length_penalty,
            "max_decoding_length": LONGEST,
            "return_end_token": True,
            **generation.options,
            **({"beam_size": options["num_beams"]} if options else {}),
        }
    )
    limits = Limits(max_source_length=40, max_target_length=40)
    results = generate(TorchModel(source.model, limits=limits), sources, decode, special)
    return theirs, [result.hypotheses[0].tokens for result in results]


QUICK = ("bart", "marian", "m2m_100", "mt5")  # every kind of positions and of norms once


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in MODELS])
def test_generations_are_theirs_token_for_token(saved: Callable[[str], tuple[Any, Path]], name: str) -> None:
    model, folder = saved(name)
    theirs, ours = theirs_and_ours(model, read_checkpoint(folder))
    assert ours == theirs
    assert len({tuple(tokens) for tokens in theirs}) > 3, "these sources give nothing to tell models apart"


def test_shards_and_pickles_are_read_too(saved: Callable[[str], tuple[Any, Path]], tmp_path: Path) -> None:
    model, folder = saved("marian")
    model.save_pretrained(tmp_path / "shards", max_shard_size="5KB")
    assert len([*(tmp_path / "shards").glob("*.safetensors")]) > 2
    assert_same_model(read_checkpoint(tmp_path / "shards").model, Theirs(model), pad=58)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    for name in ("config.json", "generation_config.json"):
        (pickled / name).write_bytes((folder / name).read_bytes())
    torch.save(model.half().state_dict(), pickled / "pytorch_model.bin")
    source = read_checkpoint(pickled)
    assert "weights stored as float16 are computed with in float32" in source.notes
    assert_same_model(source.model, Theirs(model.float()), pad=58)


OWN_TABLES = {
    "both embeddings": ("encoder.embed_tokens", "decoder.embed_tokens"),
    "the projection": ("lm_head",),
    "one embedding and the projection": ("decoder.embed_tokens", "lm_head"),
}


@pytest.mark.parametrize("tables", OWN_TABLES)
@pytest.mark.parametrize("name", ["t5", "mt5", "bart"])
def test_tables_that_differ_although_the_configuration_ties_them(
    saved: Callable[[str], tuple[Any, Path]], tmp_path: Path, name: str, tables: str
) -> None:
    """Read as transformers reads them, whose weights they are."""
    model, folder = saved(name)
    folder = changed(folder, tmp_path / "changed")
    weights = load_file(folder / "model.safetensors")
    shared = next(key for key in weights if key.endswith("shared.weight"))
    for table in OWN_TABLES[tables]:
        prefix = "" if table == "lm_head" else shared.removesuffix("shared.weight")
        weights[f"{prefix}{table}.weight"] = torch.randn_like(weights[shared])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    theirs = type(model).from_pretrained(folder).eval()
    source = read_checkpoint(folder)
    assert_same_model(source.model, Theirs(theirs), pad=model.config.pad_token_id)
    assert not source.model.config.tie_projection
    notes = [note for note in source.notes if "differs from" in note]
    assert len(notes) == 1
    assert 'say "tie_projection": true' in notes[0]
    if tables == "the projection":
        source = read_checkpoint(folder, {"tie_projection": True})
        assert_same_model(source.model, Theirs(model), pad=model.config.pad_token_id)
        assert "not used, tie_projection is given: lm_head.weight" in source.notes


def changed(folder: Path, target: Path, **config: Any) -> Path:
    """A copy of a folder with some of its config.json changed; None takes an entry out."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    for name in ("config.json", "generation_config.json"):
        values = {**json.loads((folder / name).read_text()), **config}
        (target / name).write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return target


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "bert"}, "model_type 'bert'; known are bart"),
        ({"model_type": "umt5"}, r"(?s)model_type 'umt5'; known are bart, .*t5, mt5.*write an adapter for it"),
        ({"model_type": "blenderbot-small"}, "model_type 'blenderbot-small'; known are bart"),
        ({"decoder_start_token_id": None, "bos_token_id": None}, r"bos: .*no decoder_start_token_id"),
        ({"encoder_attention_heads": None, "decoder_attention_heads": None}, "heads: .*does not say"),
        ({"encoder_attention_heads": 5}, "d_model must be a multiple of heads, found 24 and 5"),
        ({"decoder_attention_heads": 5}, "the decoder's d_model must be a multiple of heads, found 24 and 5"),
        ({"decoder_attention_heads": None}, "decoder_heads: .*config.json does not say; d_model is 24"),
        ({"activation_function": "quick_gelu"}, "activation 'quick_gelu' is not known"),
        ({"eos_token_id": 59}, "eos id 59 is outside the target vocabulary of 59"),
        ({"eos_token_id": []}, r"config.json has eos_token_id \[\], expected a whole number, or a list of some"),
        (
            {"suppress_tokens": 5, "max_length": "9"},
            r"(?s)suppress_tokens 5, expected a list.*max_length '9', expected",
        ),
        ({"encoder_attention_heads": [3]}, r"encoder_attention_heads \[3\], expected a whole number"),
        ({"num_beams": 0}, "beam_size must be at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(
    saved: Callable[[str], tuple[Any, Path]], tmp_path: Path, config: dict[str, Any], problem: str
) -> None:
    with pytest.raises(CheckpointError, match=problem):
        read_checkpoint(changed(saved("bart")[1], tmp_path / "changed", **config))


def speech_and_images() -> dict[str, Any]:
    """Tiny models whose encoders take no tokens."""
    small = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}  # fmt: skip
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    whisper = transformers.WhisperConfig(**small, **ids, vocab_size=9, begin_suppress_tokens=None)
    speech = transformers.Speech2TextConfig(**small, **ids, vocab_size=9)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    vit = transformers.ViTConfig(**sizes, image_size=8, patch_size=4)
    text = transformers.BertConfig(**sizes, vocab_size=9, is_decoder=True, add_cross_attention=True)
    both = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vit, text)
    return {
        "speech, Whisper": transformers.WhisperForConditionalGeneration(whisper),
        "speech, Speech2Text": transformers.Speech2TextForConditionalGeneration(speech),
        "images, a pair": transformers.VisionEncoderDecoderModel(both),
    }


@pytest.mark.parametrize("name", ["speech, Whisper", "speech, Speech2Text", "images, a pair"])
def test_models_of_speech_and_images_are_told_by_name(tmp_path: Path, name: str) -> None:
    speech_and_images()[name].save_pretrained(tmp_path / "model")
    kind = name.partition(",")[0]
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(tmp_path / "model")
    (problem,) = caught.value.problems
    assert problem.endswith(f": it takes or makes {kind}, which is not supported")
    assert "sources and targets must be tokens" in str(caught.value)


def test_a_missing_start_token_may_be_given(saved: Callable[[str], tuple[Any, Path]], tmp_path: Path) -> None:
    model, folder = saved("bart")
    folder = changed(folder, tmp_path / "changed", decoder_start_token_id=None)
    source = read_checkpoint(folder, {"bos": 2})
    theirs, ours = theirs_and_ours(model, source)
    assert ours == theirs


@pytest.mark.slow
def test_t5_takes_sequences_beyond_the_length_that_it_was_trained_with(
    saved: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    model, folder = saved("t5 1.1")
    for longer in ({"max_source_length": 2**20 + 1}, {"max_target_length": 2**20 + 1}):
        with pytest.raises(ExportError, match="must be from 1 to 1048576, the longest that the model takes"):
            export_bundle(folder, tmp_path / "bundle", **longer)
    assert_same_model(read_checkpoint(folder).model, Theirs(model), pad=0, source=600, target=530)
    bundle, report = export_bundle(folder, tmp_path / "bundle", max_source_length=700, max_target_length=550)
    assert bundle.manifest.limits == Limits(max_source_length=700, max_target_length=550)
    assert report is not None
    assert report.passed
    ids = [3 + (i * i) % 50 for i in range(690)] + [1]
    output = model.generate(torch.tensor([ids]), max_new_tokens=9, use_cache=False)[0, 1:].tolist()
    with load(tmp_path / "bundle") as ours:
        (answer,) = ours.generate_ids([ids], max_decoding_length=9, return_end_token=True)
        assert answer.tokens == output
        forced = {"max_decoding_length": 550, "min_decoding_length": 550, "no_repeat_ngram_size": 0}
        (answer,) = ours.generate_ids([ids], **forced)
    assert len(answer.tokens) == 550


def test_other_folders_are_told_what_is_expected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"is a folder; expected one with config\.json and weights"):
        read_checkpoint(tmp_path)


def test_a_least_length_beyond_the_longest_ends_there(saved: Callable[[str], tuple[Any, Path]], tmp_path: Path) -> None:
    for number, given in enumerate(({"min_length": 9, "max_new_tokens": 3}, {"min_new_tokens": 9, "max_length": 4})):
        source = read_checkpoint(changed(saved("t5")[1], tmp_path / str(number), **given))
        assert (source.generation.options["min_decoding_length"], source.generation.max_length) == (3, 3)


def test_a_start_token_without_a_position_is_refused(saved: Callable[[str], tuple[Any, Path]], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"decoder_start_token_id is the padding id {PAD}"):
        read_checkpoint(changed(saved("m2m_100")[1], tmp_path / "changed", decoder_start_token_id=PAD))
