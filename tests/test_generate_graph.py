"""The stage that gives a bundle generate.onnx: proven, whole or not at all, with nothing lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import tfm_export
from tfm_export import generate_graph as stage
from tfm_export.bundle import Bundle
from tfm_export.decoding import DecodeOptions, generate
from tfm_export.errors import BundleError, ParityError, RequestError
from tfm_export.generate_graph import add_generate_graph
from tfm_export.passes.generate_graph import build_generate_graph
from tfm_export.runtime.cpu.onnx_runtime import OnnxModel
from tfm_export.verify import read_golden, verify_variant

FILE = "onnx/fp32/generate.onnx"


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Bundle:
    """A copy of the tiny bundle."""
    shutil.copytree(tiny_bundle, tmp_path / "tfm_bundle")
    return Bundle.open(tmp_path / "tfm_bundle")


def tree(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def call(path: Path, texts: list[str], bundle: Path) -> list[list[int]]:
    """What a user of another language does."""
    with tfm_export.load(bundle, device="cpu") as model:
        sources = [model.encode_text(text).ids for text in texts]
    ids = np.zeros((len(sources), max(map(len, sources))), np.int64)
    for row, source in zip(ids, sources, strict=True):
        row[: len(source)] = source
    session = onnxruntime.InferenceSession(path)
    lengths = np.array([len(source) for source in sources])
    feeds = {"source_ids": ids, "source_lengths": lengths, "max_length": np.array(30)}
    found, lengths, _ = session.run(None, feeds)
    return [row[:length].tolist() for row, length in zip(found, lengths, strict=True)]


def check_against_the_runtime(bundle: Path) -> None:
    texts = ["hello", "parity", "a", "don't", "incomprehensibilities"]
    with tfm_export.load(bundle, device="cpu") as model:
        expected = [g.hypotheses[0].tokens for g in model.generate(texts, return_end_token=True)]
    assert call(bundle / FILE, texts, bundle) == expected
    assert [call(bundle / FILE, [text], bundle)[0] for text in texts] == expected


def test_it_is_verified_recorded_and_decodes_as_the_runtime_does(bundle: Bundle) -> None:
    before = tree(bundle.path)
    report = add_generate_graph(bundle, threads=1)
    assert report is not None
    assert report.passed
    names = ["generate.onnx, alone", "generate.onnx, batched", "generate.onnx, padded"]
    assert [(c.name, c.identical, c.count) for c in report.generations] == [(name, 5, 5) for name in names]
    reopened = Bundle.open(bundle.path)
    assert reopened.manifest == bundle.manifest
    assert bundle.manifest.files[FILE].purpose == "the whole greedy decode in one call, weights inside"
    after = tree(bundle.path)
    assert after.keys() - before.keys() == {FILE, "reports/generate_fp32.json"}
    assert {name for name in before if before[name] != after[name]} == {"bundle.json"}
    assert json.loads(after["reports/generate_fp32.json"])["passed"] is True
    check_against_the_runtime(bundle.path)


def test_a_large_one_refers_to_the_weights_of_the_others(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "MOST_BYTES_INSIDE", 100_000)
    add_generate_graph(bundle, threads=1)
    assert bundle.manifest.files[FILE].purpose == "the whole greedy decode in one call, beside weights.bin"
    assert bundle.manifest.files[FILE].bytes < 100_000
    assert sorted(p.name for p in (bundle.path / "onnx/fp32").iterdir()) == [
        "decoder_step.onnx",
        "encoder.onnx",
        "generate.onnx",
        "weights.bin",
    ]
    check_against_the_runtime(bundle.path)


def test_verifying_the_bundle_covers_it(bundle: Bundle) -> None:
    add_generate_graph(bundle, threads=1)
    report = verify_variant(bundle, threads=1)
    assert [c.name for c in report.generations if c.name.startswith("generate.onnx")] == [
        "generate.onnx, alone",
        "generate.onnx, batched",
        "generate.onnx, padded",
    ]
    assert report.passed


def ends_early(encoder: ir.Model, decoder_step: ir.Model, special: object, **limits: int) -> ir.Model:
    return build_generate_graph(encoder, decoder_step, replace(special, eos=7), **limits)


def sees_padding_alone(encoder: ir.Model, decoder_step: ir.Model, special: object, **limits: int) -> ir.Model:
    model = build_generate_graph(encoder, decoder_step, special, **limits)
    (mask,) = [node for node in model.graph if node.op_type == "Less"]
    mask.op_type = "GreaterOrEqual"
    return model


def stays_at_the_first_position(encoder: ir.Model, decoder_step: ir.Model, special: object, **limits: int) -> ir.Model:
    model = build_generate_graph(encoder, decoder_step, special, **limits)
    (loop,) = [node for node in model.graph if node.op_type == "Loop"]
    (positions,) = [node for node in loop.attributes["body"].as_graph() if node.name == "step/positions"]
    zero = ir.val("zero", const_value=ir.tensor(np.array(0), name="zero"))
    model.graph.register_initializer(zero)
    positions.replace_input_with(0, zero)
    return model


@pytest.mark.parametrize("wrong", [ends_early, sees_padding_alone, stays_at_the_first_position])
def test_a_wrong_graph_is_found_and_leaves_the_bundle_as_it_was(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., ir.Model]
) -> None:
    before = tree(bundle.path)
    monkeypatch.setattr(stage, "build_generate_graph", wrong)
    with pytest.raises(ParityError, match=r"generate\.onnx, alone: input 0 .* diverges at token"):
        add_generate_graph(bundle, threads=1)
    assert tree(bundle.path) == before


@pytest.fixture
def rounded(bundle: Bundle) -> Bundle:
    """The bundle with a variant w8 whose generations are not PyTorch's."""
    folder = bundle.path / "onnx/w8"
    shutil.copytree(bundle.path / "onnx/fp32", folder)
    step = onnx.load(folder / "decoder_step.onnx", load_external_data=False)
    (bias,) = [tensor for tensor in step.graph.initializer if tensor.name == "projection.bias"]
    bias.CopyFrom(onnx.numpy_helper.from_array(np.roll(onnx.numpy_helper.to_array(bias), 5), bias.name))
    onnx.save(step, folder / "decoder_step.onnx")
    bundle.manifest = replace(bundle.manifest, variants={**bundle.manifest.variants, "w8": {}})
    bundle.add_files({f"onnx/w8/{file.name}": "a test's" for file in folder.iterdir()})
    bundle.save()
    return bundle


def test_a_precision_that_rounds_is_held_to_its_own_graphs(rounded: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    special = rounded.manifest.special_ids
    golden = read_golden(rounded, "golden.jsonl")
    options = DecodeOptions(max_decoding_length=30, return_end_token=True)
    model = OnnxModel(rounded, variant="w8", threads=1)
    own = generate(model, [g.source_ids for g in golden], options, special)
    assert [r.hypotheses[0].tokens for r in own] != [g.tokens for g in golden]
    report = add_generate_graph(rounded, "w8", threads=1)
    assert report is not None
    assert report.generations[0].name == "generate.onnx as decoder_step.onnx, alone"
    assert {(c.identical, c.count, c.needed) for c in report.generations} == {(5, 5, 0.8)}

    monkeypatch.setattr(stage, "build_generate_graph", ends_early)
    with pytest.raises(ParityError, match=r"generate\.onnx as decoder_step\.onnx, alone: .* agree, 80% are needed"):
        add_generate_graph(rounded, "w8", threads=1, force=True)


def test_a_file_of_another_form_is_told(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "build_generate_graph", lambda encoder, *_, **__: encoder)
    with pytest.raises(BundleError, match="input source_lengths is missing"):
        add_generate_graph(bundle, threads=1)


def test_it_is_replaced_only_with_force(bundle: Bundle) -> None:
    add_generate_graph(bundle, verify=False)
    before = tree(bundle.path)
    with pytest.raises(BundleError, match=r"(?s)has onnx/fp32/generate.onnx already.*--force"):
        add_generate_graph(bundle)
    assert tree(bundle.path) == before
    add_generate_graph(bundle, verify=False, force=True)
    assert tree(bundle.path) == before


def test_without_verification_golden_inputs_are_not_needed(bundle: Bundle) -> None:
    files = {name: entry for name, entry in bundle.manifest.files.items() if name != "golden.jsonl"}
    bundle.manifest = replace(bundle.manifest, files=files)
    bundle.save()
    with pytest.raises(BundleError, match=r"has no golden.jsonl"):
        add_generate_graph(bundle)
    assert add_generate_graph(bundle, verify=False) is None
    check_against_the_runtime(bundle.path)


def test_a_variant_that_is_not_there_or_cannot_be_verified_is_refused(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match="has no variant 'w8'; it has fp32"):
        add_generate_graph(bundle, "w8")
    bundle.manifest = replace(bundle.manifest, variants={**bundle.manifest.variants, "bf16": {}})
    with pytest.raises(RequestError, match="has no kernels for bf16"):
        add_generate_graph(bundle, "bf16")


def test_a_graph_that_is_none_is_told(bundle: Bundle) -> None:
    (bundle.path / "onnx/fp32/encoder.onnx").write_bytes(b"no graph")
    with pytest.raises(BundleError, match=r"encoder\.onnx is not an ONNX model"):
        add_generate_graph(bundle)


def test_defaults_that_it_would_ignore_are_refused_unless_they_are_named(bundle: Bundle) -> None:
    """A forced first token and suppressed ones change the tokens; rules for beams do not."""
    state = json.loads((bundle.path / "bundle.json").read_text())
    options = {"compatibility": "huggingface", "early_stopping": True, "no_repeat_ngram_size": 0, "end_token": [2]}
    state["generation"]["options"] = options
    (bundle.path / "bundle.json").write_text(json.dumps(state))
    assert stage.left_out(Bundle.open(bundle.path)) == {}
    state["generation"]["options"] = {**options, "forced_bos": 7, "suppress_sequences": [[5]], "end_token": [2, 4]}
    (bundle.path / "bundle.json").write_text(json.dumps(state))
    changed, before = Bundle.open(bundle.path), tree(bundle.path)
    with pytest.raises(RequestError) as raised:
        add_generate_graph(changed, without=["forced_bos"], threads=1)
    assert "knows nothing of the bundle's default suppress_sequences, [[5]]" in str(raised.value)
    assert "--generate-without end_token --generate-without suppress_sequences" in str(raised.value)
    assert tree(bundle.path) == before
    with pytest.raises(RequestError, match="has no default 'seed' that could be left out"):
        add_generate_graph(changed, without=["forced_bos", "suppress_sequences", "end_token", "seed"], threads=1)
    report = add_generate_graph(changed, without=["forced_bos", "suppress_sequences", "end_token"], threads=1)
    assert report is not None
    assert report.notes[0] == "generate.onnx leaves out the bundle's default end_token"
    purpose = changed.manifest.files[FILE].purpose
    assert purpose.endswith("without the bundle's end_token, forced_bos, suppress_sequences")
