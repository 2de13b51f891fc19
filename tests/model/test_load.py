"""Loading: what is damaged, newer, closed or missing, and what is imported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tfm_export
import tfm_export.tokenizer
from tests.model.conftest import ROOT, rewrite_manifest
from tfm_export import BundleError, RequestError
from tfm_export.bundle import MANIFEST, Bundle


def test_a_closed_model_answers_nothing(tiny_bundle: Path) -> None:
    with tfm_export.load(tiny_bundle, threads=1) as model:
        model.warm_up()
    model.close()  # a second time does no harm
    requests = (
        lambda: model.generate("a"),
        lambda: model.generate_ids([[4]]),
        lambda: model.generate_iterable(["a"]),
        lambda: model.stream("a"),
        lambda: model.score_ids([[4]], [[5]]),
        model.warm_up,
    )
    for request in requests:
        with pytest.raises(RequestError, match="the model is closed"):
            request()


def test_a_model_whose_tokens_a_draft_guesses(tiny_variants: Path) -> None:
    texts = ["hello", "parity", "transformer", "a"]
    with (
        tfm_export.load(tiny_variants, threads=1) as plain,
        tfm_export.load(tiny_variants, draft="w8", threads=1) as model,
    ):
        assert model.backend == "fp32 with ONNX Runtime on the CPU, its tokens guessed by w8"
        for settings in ({}, {"beam_size": 1}, {"beam_size": 1, "max_batch_size": 1}, {"sampling_topk": 5, "seed": 1}):
            for ours, theirs in zip(model.generate(texts, **settings), plain.generate(texts, **settings), strict=True):
                assert [h.tokens for h in ours.hypotheses] == [h.tokens for h in theirs.hypotheses]
        ours, theirs = ([piece.text for piece in m.stream("hello", beam_size=1)] for m in (model, plain))
        assert ours == theirs
        model.warm_up()
    with pytest.raises(RequestError, match="the model is closed"):
        model.generate("a")


def test_the_files_of_a_draft_are_checked(tiny_variants: Path, tmp_path: Path) -> None:
    path = shutil.copytree(tiny_variants, tmp_path / "bundle")
    graph = path / "onnx" / "w8" / "decoder_step.onnx"
    content = bytearray(graph.read_bytes())
    content[len(content) // 2] ^= 1
    graph.write_bytes(content)
    tfm_export.load(path).close()
    with pytest.raises(BundleError, match=r"w8/decoder_step\.onnx was altered"):
        tfm_export.load(path, draft="w8")


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


def test_only_what_is_used_is_read_through(copied: Path) -> None:
    with open(copied / "golden.jsonl", "r+b") as file:
        file.write(b"#")
    with tfm_export.load(copied) as model:
        assert model.generate("hello").text
    with pytest.raises(BundleError, match=r"golden\.jsonl was altered"):
        Bundle.open(copied)
    (copied / "golden.jsonl").unlink()  # but all is to be there
    with pytest.raises(BundleError, match=r"golden\.jsonl is missing"):
        tfm_export.load(copied)


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
