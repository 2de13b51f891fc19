"""The loaded model: what it answers, what it refuses, and that threads do not disturb each other."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tfm_export
from tests.conftest import build_tiny_model
from tfm_export import BundleError, RequestError
from tfm_export.bundle import MANIFEST, Bundle
from tfm_export.decoding import DecodeOptions
from tfm_export.model import Model

ROOT = Path(__file__).parent.parent
WORDS = ["hello", "parity", "a", "don't", "transformer", "zz"]


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> Iterator[Model]:
    with tfm_export.load(tiny_bundle) as loaded:
        yield loaded


@pytest.fixture
def copied(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A bundle to damage."""
    return shutil.copytree(tiny_bundle, tmp_path / "bundle")


def rewrite_manifest(bundle: Path, **fields: Any) -> None:
    state = json.loads((bundle / MANIFEST).read_text())
    (bundle / MANIFEST).write_text(json.dumps({**state, **fields}))


def test_generations_are_those_of_the_reference_search(model: Model) -> None:
    import torch

    from reference_model import SpecialIds
    from reference_model.search import greedy

    reference = build_tiny_model(0, norm_first=True, final_norm=True)
    for word, generation in zip(WORDS, model.generate(WORDS), strict=True):
        ids = torch.tensor([model.encode_text(word).ids])
        expected = greedy(reference, ids, torch.ones_like(ids, dtype=torch.bool), SpecialIds(), 30)[0]
        assert generation.tokens == expected.tokens
        assert generation.hypotheses[0].log_probs == pytest.approx(expected.log_probs, abs=1e-4)
        assert generation.text == " ".join(f"p{i - 4}" for i in expected.tokens)


def test_one_text_gives_one_generation(model: Model) -> None:
    one, many = model.generate("hello"), model.generate(["hello"])
    assert (one.text, one.tokens) == (many[0].text, many[0].tokens)
    assert one.score == one.hypotheses[0].score
    assert not one.source_truncated
    assert one.statistics.steps >= len(one.tokens)
    assert model.generate([]) == []


def test_several_hypotheses_come_with_their_texts(model: Model) -> None:
    generation = model.generate("hello", beam_size=3, num_hypotheses=3)
    assert len(generation.texts) == len(set(generation.texts)) == 3
    assert generation.texts == [model.tokenizer.decode_target(h.tokens) for h in generation.hypotheses]


def test_ids_in_ids_out(model: Model) -> None:
    ids = [model.encode_text(word).ids for word in WORDS]
    assert ids[2] == [4, 2]
    results = model.generate_ids([np.array(ids[0]), *ids[1:]])
    assert [r.hypotheses[0].tokens for r in results] == [g.tokens for g in model.generate(WORDS)]


def test_the_bundles_defaults_hold_unless_a_request_says_otherwise(copied: Path) -> None:
    generation = {"max_length": 7, "beam_size": 3, "length_penalty": 0.5}
    rewrite_manifest(copied, generation=generation)
    with tfm_export.load(copied) as model:
        assert len(model.generate("hello").tokens) <= 7
        options = model.decode_options()
        assert (options.max_decoding_length, options.beam_size, options.length_penalty) == (7, 3, 0.5)
        assert model.decode_options(beam_size=2, max_decoding_length=9).beam_size == 2
        assert model.decode_options(sampling_topk=5).beam_size == 1  # beams and draws exclude each other
        assert model.decode_options(DecodeOptions()) == DecodeOptions()


def test_lengths_beyond_the_table_are_refused(model: Model) -> None:
    with pytest.raises(RequestError, match="max_decoding_length is 65; the model's targets have at most 64 tokens"):
        model.generate("hello", max_decoding_length=65)
    assert model.generate("hello", max_decoding_length=64).tokens


def test_options_come_in_one_way(model: Model) -> None:
    with pytest.raises(RequestError, match="options were given, and beam_size beside them"):
        model.generate("hello", options=DecodeOptions(), beam_size=2)
    with pytest.raises(RequestError, match="beam_size must be at least 1"):
        model.generate("hello", beam_size=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the text is empty"),
        ("  ", "the text is empty"),
        ("naïve 1", r"'naïve 1' has characters that the model does not know: ' ' '1' 'ï'"),
        (b"hello", "a text must be a str, found bytes"),
        ([5, 6], "a text must be a str, found int"),
    ],
)
def test_texts_that_cannot_be_served(model: Model, text: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        model.generate([text] if isinstance(text, bytes) else text)


def test_all_that_is_wrong_is_told_before_anything_runs(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.step_model, "encode", lambda *_, **__: pytest.fail("the encoder ran"))
    with pytest.raises(RequestError) as error:
        model.generate(["hello", "", "a1"])
    assert error.value.problems == [
        "text 1: the text is empty",
        "text 2: 'a1' has characters that the model does not know: '1'",
    ]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the source is empty"),
        ([4, 31], "ids must be from 0 to 30, found 31"),
        ([-1], "ids must be from 0 to 30, found -1"),
        ([4.0], "ids must be integers"),
        (["a"], "ids must be integers"),
        (4, "ids must be integers"),
    ],
)
def test_ids_that_cannot_be_served(model: Model, ids: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        model.generate_ids([ids])


def test_long_sources_are_refused_or_cut_and_it_is_told(model: Model) -> None:
    longest, longer = "a" * 63, "a" * 80
    assert not model.generate(longest).source_truncated
    with pytest.raises(RequestError, match="the source has 81 tokens; the model takes at most 64"):
        model.generate(longer)
    cut = model.generate(["b", longer], long_source="truncate")
    assert [g.source_truncated for g in cut] == [False, True]
    assert cut[1].tokens == model.generate(longest).tokens  # 63 letters and the end token, which is kept
    assert model.encode_text(longer, long_source="truncate").ids == [4] * 63 + [2]
    assert model.check_ids([4] * 80, long_source="truncate").ids == [4] * 64
    with pytest.raises(RequestError, match="long_source must be one of refuse, truncate, found 'cut'"):
        model.generate("a", long_source="cut")  # type: ignore[call-overload]


def test_sources_without_end_token_are_cut_at_the_end(model: Model) -> None:
    manifest = model.bundle.manifest
    special = replace(manifest.special_ids, source_ends_with_eos=False)
    bundle = Bundle(model.bundle.path, replace(manifest, special_ids=special))
    plain = Model(bundle, model.step_model, model.tokenizer)
    assert plain.check_ids([4] * 70 + [2], long_source="truncate").ids == [4] * 64


def test_eight_threads_get_what_one_gets(model: Model) -> None:
    expected = [model.generate(word, max_decoding_length=20) for word in WORDS]
    beams = model.generate(WORDS, beam_size=2, max_decoding_length=12)

    def work(number: int) -> bool:
        for turn in range(4):
            index = (number + turn) % len(WORDS)
            alone = model.generate(WORDS[index], max_decoding_length=20)
            same = alone.hypotheses == expected[index].hypotheses
            together = model.generate(WORDS, beam_size=2, max_decoding_length=12)
            if not same or [g.hypotheses for g in together] != [g.hypotheses for g in beams]:
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_a_closed_model_answers_nothing(tiny_bundle: Path) -> None:
    with tfm_export.load(tiny_bundle, threads=1) as model:
        model.warm_up()
    model.close()  # a second time does no harm
    for request in (lambda: model.generate("a"), lambda: model.generate_ids([[4]]), model.warm_up):
        with pytest.raises(RequestError, match="the model is closed"):
            request()


def test_a_bundle_without_tokenizer_takes_ids(copied: Path) -> None:
    files = json.loads((copied / MANIFEST).read_text())["files"]
    rewrite_manifest(copied, files={k: v for k, v in files.items() if not k.startswith("tokenizer/")})
    with tfm_export.load(copied) as model:
        assert model.tokenizer is None
        assert model.generate_ids([[4, 5, 2]])[0].hypotheses
        with pytest.raises(RequestError, match="has no tokenizer: it takes ids, not text"):
            model.generate("a")


def test_damaged_bundles_are_refused(copied: Path) -> None:
    graph = copied / "onnx" / "fp32" / "decoder_step.onnx"
    content = bytearray(graph.read_bytes())
    content[len(content) // 2] ^= 1
    graph.write_bytes(content)
    with pytest.raises(BundleError, match=r"decoder_step\.onnx was altered"):
        tfm_export.load(copied)
    graph.unlink()
    (copied / "onnx" / "fp32" / "encoder.onnx").write_bytes(b"")
    with pytest.raises(BundleError) as error:
        tfm_export.load(copied, check_hashes=False)
    assert len(error.value.problems) == 2
    assert "decoder_step.onnx is missing" in error.value.problems[0] + error.value.problems[1]


def test_newer_bundles_are_refused(copied: Path) -> None:
    rewrite_manifest(copied, format_version=99)
    with pytest.raises(BundleError, match="has format version 99; this tfm-export reads up to"):
        tfm_export.load(copied)


def test_a_folder_that_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is not a bundle"):
        tfm_export.load(tmp_path)
    with pytest.raises(BundleError, match="is not a bundle"):
        tfm_export.load(tmp_path / "nowhere")


def imported(script: str) -> set[str]:
    """The modules that a script leaves behind."""
    script += "\nimport sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(run.stdout.splitlines()[-1].split())


def test_the_package_itself_is_light() -> None:
    script = "import tfm_export; tfm_export.RequestError; assert 'load' in dir(tfm_export); tfm_export.__version__"
    assert not imported(script) & {"numpy", "torch", "onnx", "onnxruntime", "click", "tfm_export.model"}


def test_service_needs_neither_torch_nor_onnx(tiny_bundle: Path) -> None:
    script = f"import tfm_export; print(tfm_export.load({str(tiny_bundle)!r}).generate('hello').text)"
    modules = imported(script)
    assert "onnxruntime" in modules
    assert not modules & {"torch", "onnx", "onnxscript", "reference_model", "transformers", "tensorrt"}


def test_names_that_are_not_there() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = tfm_export.nonsense  # type: ignore[attr-defined]
