"""Folders of Hugging Face prove their reading: transformers' own `generate` against the bundle's."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner

from tests.decoding.fake_model import SPECIAL, FakeModel, random_table
from tests.once import Once
from tests.tokenizer.test_huggingface import byte_pairs
from tfm_export.bundle import Bundle
from tfm_export.checkpoints import bart, huggingface
from tfm_export.cli import cli
from tfm_export.decoding import DecodeOptions, generate
from tfm_export.errors import ParityError
from tfm_export.export import export_bundle
from tfm_export.tokenizer.huggingface import HuggingFaceTokenizer
from tfm_export.verify import transformers_folder
from tfm_export.verify.near_ties import tie_distance
from tfm_export.verify.transformers_folder import TransformersFolder
from tfm_export.verify.transformers_proof import TransformersProof, prove_with_transformers

VERSION = transformers.__version__
LINES = ["hello world", "the quick brown fox", "lazy dog, naïve", "abc", "jumps over the lazy dog"]
PIECES = {"pad": "<pad>", "eos": "</s>", "unk": "<unk>", "bos": "<s>"}
GENERATION = {"num_beams": 3, "max_length": 14, "no_repeat_ngram_size": 2, "length_penalty": 0.7}


def save(folder: Path) -> None:
    """A BART of random weights whose targets depend on their sources, with a tokenizer of its own."""
    tokenizer = byte_pairs()
    size = tokenizer.get_vocab_size() + 2
    torch.manual_seed(4)
    config = transformers.BartConfig(
        vocab_size=size, d_model=24, encoder_layers=2, decoder_layers=1, encoder_attention_heads=3,
        decoder_attention_heads=3, encoder_ffn_dim=20, decoder_ffn_dim=20, max_position_embeddings=40, pad_token_id=0,
        bos_token_id=3, eos_token_id=1, decoder_start_token_id=1, scale_embedding=True,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(24 if "encoder_attn" in name else 8)
        model.final_logits_bias.copy_(torch.randn_like(model.final_logits_bias) * 0.1)
    model.save_pretrained(folder)
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps({**ids, **GENERATION}))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{kind}_token": piece for kind, piece in PIECES.items()}
    )
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def made(once: Once) -> Path:
    """A folder, `hf`, and a `bundle` of it, whose golden inputs are texts."""

    def make(folder: Path) -> None:
        save(folder / "hf")
        export_bundle(folder / "hf", folder / "bundle", inputs=LINES)

    return once("transformers-proof", make)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of the folder, to change."""
    return shutil.copytree(made / "hf", tmp_path / "hf")


@pytest.fixture
def prove(made: Path) -> Callable[..., TransformersProof]:
    """Holds the bundle, with another manifest if need be, to a folder."""

    def run(folder: Path, **manifest: Any) -> TransformersProof:
        bundle = Bundle.open(made / "bundle")
        bundle.manifest = replace(bundle.manifest, **manifest)
        proof = prove_with_transformers(bundle, folder)
        assert proof is not None
        return proof

    return run


def rewrite(path: Path, **values: Any) -> None:
    """Change some of a file in JSON."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_texts_are_compared_and_the_bundle_tells_it(made: Path) -> None:
    report = json.loads((made / "bundle/reports/parity.json").read_text())["variants"][0]
    comparison = report["generations"][-1]
    assert comparison["name"] == f"transformers {VERSION}, text to text"
    assert (comparison["count"], comparison["identical"], comparison["passed"]) == (len(LINES), len(LINES), True)
    manifest = Bundle.open(made / "bundle").manifest
    assert manifest.tools["transformers"] == VERSION
    assert f"transformers {VERSION} gives the same for the folder on {len(LINES)} inputs" in report["reading"]
    assert manifest.model["reading"]["verdict"] == report["reading"]


def test_verify_tells_it_in_text_and_json(made: Path) -> None:
    arguments = ["verify", str(made / "bundle"), "--checkpoint", str(made / "hf")]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    assert f"transformers {VERSION}, text to text: 5 of 5 real inputs token for token" in result.stdout
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    names = [comparison["name"] for comparison in json.loads(result.stdout)["variants"][0]["generations"]]
    assert f"transformers {VERSION}, text to text" in names


def test_random_ids_are_compared_as_the_texts_that_they_are(made: Path, prove: Any, monkeypatch: Any) -> None:
    from tfm_export.verify import transformers_proof

    golden = transformers_proof.read_golden(Bundle.open(made / "bundle"), "golden.jsonl")
    random = [replace(one, text=None, source_ids=[3, 0, *range(70 + i, 78 + i), 1]) for i, one in enumerate(golden)]
    empty = replace(golden[0], text=None, source_ids=[0, 3, 1])
    monkeypatch.setattr(transformers_proof, "read_golden", lambda *_: [empty, *random])
    texts: list[str] = []
    encode = HuggingFaceTokenizer.encode_source
    monkeypatch.setattr(HuggingFaceTokenizer, "encode_source", lambda s, t: texts.append(t) or encode(s, t))
    proof = prove(made / "hf")
    assert proof.proven == len(random)
    assert len({*texts}) > len(random)


@pytest.mark.parametrize("wrong", [{"activation": "relu"}, {"scale_embeddings": False}])
def test_a_wrong_reading_is_refused(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    def misread(*arguments: Any) -> Any:
        found = bart.read(*arguments)
        for name, value in wrong.items():
            assert found.value(name) != value
            found.facts[name] = replace(found.facts[name], value=value)
        return found

    monkeypatch.setitem(huggingface.FAMILIES, "bart", misread)
    with pytest.raises(ParityError) as caught:
        export_bundle(made / "hf", tmp_path / "bundle", inputs=LINES)
    # The graphs do compute what was read.
    assert all(problem.startswith(f"transformers {VERSION}, text to text: input ") for problem in caught.value.problems)
    assert "diverges at token" in caught.value.problems[0]
    assert "does not read this folder as transformers does" in str(caught.value.hint)
    assert not (tmp_path / "bundle").exists()


def test_what_is_different_is_shown(folder: Path, prove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = HuggingFaceTokenizer.decode_target
    with monkeypatch.context() as patch:
        patch.setattr(HuggingFaceTokenizer, "decode_target", lambda *a: decode(*a) + "!")
        (first, *_) = prove(folder).comparison.divergences
    assert "the same tokens are" in first.in_words
    assert first.in_words.endswith("!' in the bundle")
    state = json.loads((folder / "tokenizer.json").read_text())
    state["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(state))
    (first, *_) = prove(folder).comparison.divergences
    assert "as a source it has" in first.in_words
    assert "at token 0 in transformers, 3 in the bundle" in first.in_words


@pytest.mark.parametrize(
    ("text", "note"), [("a , b", "clean_up_tokenization_spaces"), ("a <unk>", "unknown tokens, languages")]
)
def test_texts_may_differ_as_documented(
    made: Path, prove: Any, monkeypatch: pytest.MonkeyPatch, text: str, note: str
) -> None:
    """Their texts come without spaces before commas, and without unknown tokens; ours with both."""
    unknown = Bundle.open(made / "bundle").manifest.special_ids.unk
    assert unknown == 2
    theirs, ours = TransformersFolder.decode, HuggingFaceTokenizer.decode_target

    def decode_theirs(folder: TransformersFolder, tokens: list[int], *, clean: bool | None = None) -> str:
        if note.startswith("clean"):
            return text if clean is False else text.replace(" ,", ",")
        return theirs(folder, [token for token in tokens if token != unknown], clean=clean)

    def decode_ours(tokenizer: HuggingFaceTokenizer, tokens: list[int]) -> str:
        return text if note.startswith("clean") or unknown in tokens else ours(tokenizer, tokens)

    monkeypatch.setattr(TransformersFolder, "decode", decode_theirs)
    monkeypatch.setattr(HuggingFaceTokenizer, "decode_target", decode_ours)
    generate_theirs = TransformersFolder.generate
    if note.startswith("unknown"):
        from tfm_export.verify import transformers_proof

        monkeypatch.setattr(TransformersFolder, "generate", lambda s, ids: [unknown, *generate_theirs(s, ids)])

        def generate_ours(*arguments: Any) -> Any:
            results = generate(*arguments)
            return [
                replace(r, hypotheses=[replace(h, tokens=[unknown, *h.tokens]) for h in r.hypotheses]) for r in results
            ]

        monkeypatch.setattr(transformers_proof, "generate", generate_ours)
    proof = prove(made / "hf")
    assert proof.proven == len(LINES)
    assert sum(note in told for told in proof.notes) == 1


def test_where_transformers_is_missing_that_is_all_that_is_said(
    made: Path, prove: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_folder, "find_spec", lambda _: None)
    proof = prove(made / "hf")
    assert proof.comparison is None
    (note,) = proof.notes
    assert "not compared with transformers' own generate: transformers is not installed" in note
    assert "\n" not in note


def test_a_folder_that_transformers_cannot_run_is_told(
    folder: Path, prove: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "tokenizer.json").write_text("{}")
    (folder / "a.py").write_text("raise SystemExit('code of the folder was run')")
    proof = prove(folder)
    assert proof.comparison.name == f"transformers {VERSION}, ids to ids"
    assert proof.proven == len(LINES)
    assert any("texts were not compared with transformers, ids were" in note for note in proof.notes)

    def fail(*_: object, **__: object) -> None:
        raise TypeError("their own fault")

    monkeypatch.setattr(transformers.BartForConditionalGeneration, "generate", fail)
    proof = prove(folder)
    assert proof.comparison is None
    assert any(f"transformers {VERSION} fails on the folder: their own fault" in note for note in proof.notes)
    rewrite(folder / "config.json", model_type="no-such-model", auto_map={"AutoModelForSeq2SeqLM": "a.B"})
    proof = prove(folder)
    assert proof.comparison is None
    assert any(f"transformers {VERSION} cannot load the folder: " in note for note in proof.notes)


def test_a_tokenizer_that_was_given_is_not_the_folders(made: Path, prove: Any) -> None:
    manifest = Bundle.open(made / "bundle").manifest
    proof = prove(made / "hf", model={**manifest.model, "settings": {"source_tokens": ["a"], "target_tokens": ["a"]}})
    assert proof.comparison.name == f"transformers {VERSION}, ids to ids"
    assert any("the tokenizer is as given (source_tokens)" in note for note in proof.notes)


def test_weights_that_transformers_would_draw_are_no_model_to_compare_with(folder: Path, prove: Any) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.encoder.layers.0.fc1.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (note,) = prove(folder).notes
    assert "draws weights at random that it misses: model.encoder.layers.0.fc1.weight" in note


def test_settings_that_are_not_applied_are_left_out_of_both(made: Path, folder: Path, prove: Any) -> None:
    rewrite(folder / "generation_config.json", do_sample=True, top_k=9, max_time=1e-9, num_beam_groups=3, num_beams=7)
    manifest = Bundle.open(made / "bundle").manifest
    given = {"ignore_generation": ["num_beam_groups"], "beam_size": 3}
    drawn = {**manifest.generation.options, "sampling_topk": 9}
    proof = prove(
        folder,
        model={**manifest.model, "settings": given},
        generation=replace(manifest.generation, options=drawn),
    )
    assert proof.proven == len(LINES)
    for said in ("num_beam_groups 3", "max_time 1e-09", "do_sample false", "num_beams 3, as given"):
        assert any(said in note for note in proof.notes), said
    # Else the number of beams is the folder's.
    assert not prove(folder, generation=replace(manifest.generation, options=drawn)).proven


def test_longer_targets_than_the_bundle_promises_are_cut_in_both(made: Path, folder: Path, prove: Any) -> None:
    manifest = Bundle.open(made / "bundle").manifest
    limits = replace(manifest.limits, max_target_length=5)
    assert prove(folder, limits=limits, generation=replace(manifest.generation, max_length=5)).proven
    # A limit of the defaults that was read wrongly is not: nothing else ends these targets.
    assert not prove(folder, generation=replace(manifest.generation, max_length=5)).proven


def test_near_ties_are_counted_and_others_are_not(made: Path, prove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = TransformersFolder.generate
    monkeypatch.setattr(TransformersFolder, "generate", lambda s, ids: [*theirs(s, ids)[:-1], 77])
    golden = Bundle.open(made / "bundle").manifest.golden
    comparison = prove(made / "hf").comparison
    assert len(comparison.divergences) == len(LINES)
    assert not comparison.passed
    comparison = prove(made / "hf", golden={**golden, "tie_margin": 1e9}).comparison
    assert len(comparison.ties) == len(LINES)
    assert comparison.passed


def test_time_is_bounded(made: Path, prove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tfm_export.verify import transformers_proof

    monkeypatch.setattr(transformers_proof, "MOST_SECONDS", -1.0)
    proof = prove(made / "hf")
    assert proof.proven == 1
    assert any("on 1 of 5 inputs" in note for note in proof.notes)


def test_other_checkpoints_are_not_held_to_transformers(tiny_bundle: Path, tiny_checkpoint: Path) -> None:
    assert prove_with_transformers(Bundle.open(tiny_bundle), tiny_checkpoint) is None
    assert prove_with_transformers(Bundle.open(tiny_bundle), tiny_checkpoint.parent) is None


@pytest.mark.parametrize("beam_size", [1, 3])
def test_the_distance_of_a_tie_is_what_turns_one_search_into_another(beam_size: int) -> None:
    gap, base = 0.01, random_table(seed=2)

    def table(source: tuple[int, ...], path: tuple[int, ...]) -> Any:
        values = base(source, path).copy()
        if len(path) == 2:  # two first tokens that are nearly as likely
            values[[3, 4]] = values.max() + 5, values.max() + 5 - gap
        return values - math.log(sum(math.exp(v) for v in values))

    model, options = FakeModel(table), DecodeOptions(beam_size=beam_size, max_decoding_length=2)
    (found,) = generate(model, [(5,)], options, SPECIAL)
    other = [*found.tokens[:-1], 7 - found.tokens[-1]]
    assert {found.tokens[-1], other[-1]} == {3, 4}
    distance = tie_distance(model, (5,), options, SPECIAL, other, most=10 * gap)
    assert gap <= distance < 10 * gap
    assert tie_distance(model, (5,), options, SPECIAL, other, most=0.9 * gap) == math.inf
