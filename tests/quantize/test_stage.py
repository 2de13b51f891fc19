"""The quantise stage: gates that let good variants in and keep bad ones out, on the trained example and on tiny models.

Agreement means nothing on random weights: where tiny models are used, it is not asked for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from reference_model import Transformer, load_checkpoint, save_checkpoint
from tests.once import Once
from tfm_export.bundle import GOLDEN, Bundle
from tfm_export.errors import BundleError, ParityError, RequestError
from tfm_export.export import export_bundle
from tfm_export.graph_files import RANGES, read_graph, read_ranges
from tfm_export.precision import PRECISIONS
from tfm_export.quantize import Development, QuantizeOptions, QuantizeReport, quantize_bundle, speed, stage
from tfm_export.quantize.calibration import CalibrationSample, observe
from tfm_export.runtime.cpu.onnx_runtime import OnnxModel
from tfm_export.runtime.cpu.processor import CpuFeatures
from tfm_export.verify import read_golden, verify_variant

ROOT = Path(__file__).parents[2]
WORDS = (ROOT / "examples/g2p/words.txt").read_text(encoding="utf-8").split()
ANY = QuantizeOptions(min_agreement=0, keep=True, threads=1)  # whatever comes out of random weights
VARIANTS = [name for name in PRECISIONS if name != "fp32"]

Export = Callable[[str], Bundle]


def spread_feed_forwards(model: Transformer) -> None:
    """Give each feed-forward one activation of around 1e5, as T5's have, without changing what the model computes."""
    with torch.no_grad():
        for layer in (*model.encoder_layers, *model.decoder_layers):
            up, down = layer.feed_forward.W_1, layer.feed_forward.W_2
            unit = int(up.weight.abs().sum(1).argmax())
            up.weight[unit] *= 1e5
            up.bias[unit] *= 1e5
            down.weight[:, unit] *= 1e-5


def spread_everything(model: Transformer) -> None:
    """Give what linear layers read a few channels that are 3,000 times the others; the function stays the same."""
    spread_feed_forwards(model)
    with torch.no_grad():
        for layer in (*model.encoder_layers, *model.decoder_layers):
            attentions = [layer.self_attention, *([layer.cross_attention] if hasattr(layer, "cross_attention") else [])]
            for attention in attentions:
                attention.W_v.weight[:3] *= 3e3
                attention.W_v.bias[:3] *= 3e3
                attention.W_o.weight[:, :3] /= 3e3
            attention = layer.self_attention
            norms = [
                (layer.self_attention_residual, [attention.W_q, attention.W_k, attention.W_v]),
                (layer.feed_forward_residual, [layer.feed_forward.W_1]),
            ]
            for residual, readers in norms:
                residual.norm.weight[:3] *= 3e3
                residual.norm.bias[:3] *= 3e3
                for reader in readers:
                    reader.weight[:, :3] /= 3e3


CHANGES: dict[str, Callable[[Transformer], None]] = {
    "as trained": lambda _: None,
    "outliers in feed-forwards": spread_feed_forwards,
    "outliers everywhere": spread_everything,
}


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """One generation is timed instead of seconds of them: how fast a tiny model is, is not what these tests ask."""
    monkeypatch.setattr(speed, "SECONDS", 0.0)


@pytest.fixture(scope="session")
def g2p_export(once: Once) -> Export:
    """Exports the trained example, or it with its weights changed, with 20 real words as golden inputs, once."""

    def export(change: str) -> Bundle:
        def make(folder: Path) -> None:
            checkpoint = load_checkpoint(ROOT / "examples/g2p/g2p.pt")
            CHANGES[change](checkpoint.model)
            save_checkpoint(checkpoint, folder / "g2p.pt")
            export_bundle(folder / "g2p.pt", folder / "b", inputs=WORDS[:20], verify=False)

        return Bundle.open(once(f"g2p {change}", make) / "b")

    return export


def copied(bundle: Bundle | Path, folder: Path) -> Bundle:
    path = bundle if isinstance(bundle, Path) else bundle.path
    return Bundle.open(shutil.copytree(path, folder / "bundle"))


@pytest.mark.parametrize("precision", VARIANTS)
def test_every_precision_joins_a_bundle_and_is_verified_there(
    tiny_bundle: Path, tmp_path: Path, precision: str
) -> None:
    bundle = copied(tiny_bundle, tmp_path)
    report = quantize_bundle(bundle, precision, ANY)
    opened = Bundle.open(bundle.path)
    facts = opened.manifest.variants[precision]
    assert facts["weights"] == PRECISIONS[precision].weights
    assert facts["agreement"] == report.agreement
    assert facts["target"] == PRECISIONS[precision].target
    assert ("speed" in facts) == (facts["target"] == "cpu")
    assert facts["bytes"] == sum(f.stat().st_size for f in (bundle.path / "onnx" / precision).iterdir())
    assert facts["bytes"] < report.fp32_bytes
    written = json.loads((bundle.path / "reports" / f"quantize_{precision}.json").read_text(encoding="utf-8"))
    assert written["quantized"] == report.quantized
    generations = verify_variant(opened, precision, threads=1).generations
    assert [c.agreement for c in generations] == [c.agreement for c in report.generations]
    if PRECISIONS[precision].runs_on_cpu:
        model = OnnxModel(opened, variant=precision, threads=1)
        assert model.encode(np.array([[5, 2]]), np.ones((1, 2), np.bool_), capacity=4).size == 1
        model.close()


@pytest.mark.parametrize("precision", ["w8", pytest.param("int8", marks=pytest.mark.full)])
def test_how_large_values_get_is_written_down_for_engines(tiny_bundle: Path, tmp_path: Path, precision: str) -> None:
    """Of every value that the fp32 graphs compute, with and without padding."""
    bundle = copied(tiny_bundle, tmp_path)
    quantize_bundle(bundle, precision, ANY)
    assert f"onnx/{precision}/{RANGES}" in Bundle.open(bundle.path).manifest.files
    ranges = read_ranges(bundle.variant_path(precision) / RANGES)
    for name in ("encoder", "decoder_step"):
        values = [v for node in read_graph(bundle.variant_path("fp32") / f"{name}.onnx").graph for v in node.outputs]
        assert {f"{name}/{v.name}" for v in values if v.dtype == ir.DataType.FLOAT} <= ranges.keys()
    golden = read_golden(bundle, GOLDEN)
    samples = [CalibrationSample(g.source_ids, [bundle.manifest.special_ids.bos, *g.tokens[:-1]]) for g in golden]
    for name, observed in observe(bundle, samples, threads=1).items():
        # Beam search's hypotheses and the padded sources come on top. Rounded to four digits.
        assert ranges[name] >= observed.largest * (1 - 1e-3), name


@pytest.mark.parametrize("precision", ["w8", "w4", "int8"])
def test_the_same_variant_comes_out_each_time(tiny_bundle: Path, tmp_path: Path, precision: str) -> None:
    bundle = copied(tiny_bundle, tmp_path)
    hashes = []
    for _ in range(2):
        quantize_bundle(bundle, precision, ANY, force=True)
        files = Bundle.open(bundle.path).manifest.files
        hashes.append({name: e.sha256 for name, e in files.items() if name.startswith(f"onnx/{precision}/")})
    assert len(hashes[0]) == 4
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("precision", ["w8", "w4"])
def test_an_encoder_of_int8_is_calibrated_like_one_and_told(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    bundle = copied(tiny_bundle, tmp_path)
    old = CpuFeatures(name="old", machine="x86_64", instruction_sets=("avx2",))
    monkeypatch.setattr(stage, "cpu_features", lambda: old)
    report = quantize_bundle(bundle, precision, replace(ANY, int8_encoder=True))
    assert any("7 bits" in note for note in report.notes)
    assert report.calibrated_on > 0
    assert (report.fused["encoder"]["QGemm"], report.fused["encoder"].get("MatMulNBits")) == (16, None)
    assert (report.fused["decoder_step"]["MatMulNBits"], report.fused["decoder_step"].get("QGemm")) == (17, None)
    opened = Bundle.open(bundle.path)
    facts = opened.manifest.variants[precision]
    assert facts["compute"] == "float32; encoder int8"
    assert facts["weights"] == f"{PRECISIONS[precision].weights}; encoder int8"
    assert (facts["int8_encoder"], facts["reduced_range"], facts["calibration"]) == (True, True, "percentile")
    generations = verify_variant(opened, precision, threads=1).generations
    assert [c.agreement for c in generations] == [c.agreement for c in report.generations]


def test_a_variant_that_is_there_is_replaced_under_force_alone(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = copied(tiny_bundle, tmp_path)
    quantize_bundle(bundle, "w8", ANY)
    with pytest.raises(BundleError, match="has onnx/w8 already"):
        quantize_bundle(bundle, "w8", ANY)


def test_layers_are_kept_by_name_and_by_pattern(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = copied(tiny_bundle, tmp_path)
    options = replace(ANY, skip=["decoder_step/projection", "*/layers.0.feed_forward.*"], embeddings=False)
    report = quantize_bundle(bundle, "w8", options)
    assert "decoder_step/projection" in report.kept
    assert {"encoder/embedding", "decoder_step/embedding", "encoder/layers.0.feed_forward.expand"} <= report.kept.keys()
    assert not report.kept.keys() & set(report.quantized)
    assert len(report.kept) + len(report.quantized) == report.layers
    assert "reduced_range" not in Bundle.open(bundle.path).manifest.variants["w8"]  # no products of 8 bits by 8
    names = {i.name for i in read_graph(bundle.path / "onnx/w8/decoder_step.onnx").graph.initializers.values()}
    assert "projection.weight" in names
    with pytest.raises(RequestError, match=r"no layer is called 'nonsense'(.|\n)*encoder/embedding"):
        quantize_bundle(bundle, "w8", replace(ANY, skip=["nonsense"]), force=True)


@pytest.mark.parametrize(
    ("precision", "options", "message"),
    [
        ("w8", {"skip": ["*"]}, r"all \d+ layers are to be kept in fp32: nothing would be w8"),
        ("w8", {"skip": ["nonsense"]}, "no layer is called 'nonsense'"),
        ("fp16", {"skip": ["*"], "embeddings": False}, r"--skip has no effect on fp16(.|\n)*--no-embeddings has no"),
        ("w4", {"method": "max", "reduced_range": True}, r"--method has no effect on w4(.|\n)*--reduced-range has no"),
        ("w8", {"int8_encoder": True, "skip": ["encoder/*"]}, "all layers of encoder are .* nothing would be int8"),
        ("w4", {"int8_encoder": True, "skip": ["dec*"]}, "all layers of decoder_step are .* nothing would be w4"),
        ("int8", {"int8_encoder": True}, "--int8-encoder has no effect on int8: it is for w8, w4"),
        ("w8", {"development": Development(["a", "a" * 500], [["b"]] * 2)}, "development text 2 has 5"),
    ],
)
def test_what_cannot_come_out_well_is_refused_before_anything_is_decoded(
    tiny_bundle: Path, precision: str, options: dict[str, object], message: str
) -> None:
    told: list[str] = []
    with pytest.raises(RequestError, match=message):
        quantize_bundle(Bundle.open(tiny_bundle), precision, replace(ANY, **options), progress=told.append)
    assert told == []


@pytest.mark.parametrize("max_loss", [-0.1, float("nan")])
def test_a_loss_that_is_none_is_refused(max_loss: float) -> None:
    with pytest.raises(RequestError, match="max_loss must be 0 or more"):
        QuantizeOptions(max_loss=max_loss)


def test_random_ids_are_refused_with_what_gives_real_ones(tiny_checkpoint: Path, tmp_path: Path) -> None:
    bundle, _ = export_bundle(tiny_checkpoint, tmp_path / "b", verify=False)
    for precision in ("w8", "int8"):
        with pytest.raises(RequestError, match="random ids") as caught:
            quantize_bundle(bundle, precision, replace(ANY, unproven=True))
        assert "--calibration FILE" in str(caught.value)
        assert "--inputs FILE" in str(caught.value)
    with pytest.raises(RequestError, match="random ids"):
        quantize_bundle(bundle, "fp16", ANY)
    unjudged = quantize_bundle(bundle, "fp16", replace(ANY, unproven=True))
    assert unjudged.generations == []
    assert any("NOT JUDGED" in note for note in unjudged.notes)
    texts = [f"{a}{b}" for a in "abcdefgh" for b in "klmnopqr"]
    judged = quantize_bundle(bundle, "w8", replace(ANY, calibration=texts))
    assert {c.count for c in judged.generations} == {32}
    with pytest.raises(RequestError, match="there are no calibration texts"):
        quantize_bundle(bundle, "int8", replace(ANY, calibration=[]))
    with pytest.raises(RequestError, match="calibration text 2"):
        quantize_bundle(bundle, "int8", replace(ANY, calibration=["a", "a" * 500, "b"]))


@pytest.mark.parametrize(("asked", "limit"), [(None, 50.0), (0.0, 0.0), (0.3, 0.3)])
def test_the_loss_that_is_asked_for_holds_and_a_small_file_widens_only_the_precisions_own(
    tiny_bundle: Path, tmp_path: Path, asked: float | None, limit: float
) -> None:
    development = Development(["a", "hello", "parity", "tea"], [["never this"]] * 4)
    report = quantize_bundle(copied(tiny_bundle, tmp_path), "w8", replace(ANY, development=development, max_loss=asked))
    assert report.metric is not None
    assert report.metric.limit == limit


def test_a_cpu_without_vnni_gets_weights_of_7_bits(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = copied(tiny_bundle, tmp_path)

    def largest_weight() -> int:
        graph = read_graph(bundle.path / "onnx/int8/decoder_step.onnx").graph
        weights = [
            v.const_value.numpy()
            for v in graph.initializers.values()
            if v.const_value is not None and v.const_value.dtype.name == "INT8" and "embedding" not in (v.name or "")
        ]
        return max(int(np.abs(w.astype(np.int16)).max()) for w in weights if w.ndim == 2)

    old = CpuFeatures(name="old", machine="x86_64", instruction_sets=("avx2",))
    for features, largest in ((old, 64), (replace(old, instruction_sets=("avx2", "avx512", "vnni")), 127)):
        monkeypatch.setattr(stage, "cpu_features", lambda features=features: features)
        report = quantize_bundle(bundle, "int8", ANY, force=True)
        assert largest_weight() == largest
        assert any("7 bits" in note for note in report.notes) == (largest == 64)
        assert Bundle.open(bundle.path).manifest.variants["int8"]["reduced_range"] is (largest == 64)
    quantize_bundle(bundle, "int8", replace(ANY, reduced_range=True), force=True)
    assert largest_weight() == 64


def test_a_variant_that_is_no_faster_is_refused_unless_it_is_wanted(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = copied(tiny_bundle, tmp_path)
    monkeypatch.setattr(stage, "overall", lambda _: 0.9)
    with pytest.raises(RequestError, match="w8 is not faster than fp32 on this machine") as caught:
        quantize_bundle(bundle, "w8", replace(ANY, keep=False))
    assert "--keep" in str(caught.value)
    assert [*Bundle.open(bundle.path).manifest.variants] == ["fp32"]
    assert [p.name for p in (bundle.path / "onnx").iterdir()] == ["fp32"]
    with pytest.raises(RequestError, match="no kernels for bf16"):
        quantize_bundle(bundle, "bf16", replace(ANY, target="cpu"))


@pytest.mark.parametrize(("speed", "auto"), [(1.5, "w8"), (0.7, "fp32")])
def test_auto_takes_the_fastest_that_was_faster(tiny_bundle: Path, tmp_path: Path, speed: float, auto: str) -> None:
    bundle = copied(tiny_bundle, tmp_path)
    variants = {"fp32": {}, "int8": {"speed": 0.9}, "w8": {"speed": speed}, "fp16": {}}
    assert Bundle(bundle.path, replace(bundle.manifest, variants=variants)).fastest_variant() == auto


# On the trained example.


def quantize(bundle: Bundle, folder: Path, precision: str, **options: object) -> QuantizeReport:
    return quantize_bundle(copied(bundle, folder), precision, QuantizeOptions(keep=True, **options))


def test_a_trained_model_keeps_its_words_in_8_bits(g2p_export: Export, tmp_path: Path) -> None:
    development = Development(WORDS[40:60], [["never this"]] * 20)
    report = quantize(g2p_export("as trained"), tmp_path, "w8", development=development)
    assert report.agreement is not None
    assert report.agreement >= 0.95
    assert report.metric is not None
    assert (report.metric.fp32, report.metric.variant) == (0, 0)
    assert report.kept == {}
    assert len(report.costs) == report.layers
    costs = [*report.costs.values()]
    assert costs == sorted(costs, reverse=True)
    assert 0 < costs[0] < 1e-3  # measured: 3.5e-6 nats a token
    assert report.bytes < 0.3 * report.fp32_bytes


@pytest.mark.full
def test_a_metric_that_falls_refuses_a_variant(
    g2p_export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """References are what fp32 gives, and the variant is wrecked: thresholds that clip everything."""
    bundle = g2p_export("as trained")
    monkeypatch.setattr(stage, "thresholds", lambda observations, _: dict.fromkeys(observations, 1e-3))
    monkeypatch.setattr(stage, "LARGEST_SHARE_KEPT", 0.02)
    with pytest.raises(ParityError, match=r"exact: 0\.00 became|inputs agree") as caught:
        quantize(bundle, tmp_path, "int8")
    assert "layers kept in fp32" in str(caught.value)
    assert "nats a token" in str(caught.value)
    assert [*Bundle.open(tmp_path / "bundle").manifest.variants] == ["fp32"]


def test_a_trained_model_keeps_its_words_with_an_encoder_of_int8(g2p_export: Export, tmp_path: Path) -> None:
    report = quantize(g2p_export("as trained"), tmp_path, "w8", int8_encoder=True)
    assert report.agreement is not None
    assert report.agreement >= 0.95
    assert report.kept == {}


@pytest.mark.full
@pytest.mark.parametrize(
    ("precision", "options", "layers"),
    [("int8", {}, ("encoder/", "decoder_step/")), ("w8", {"int8_encoder": True}, ("encoder/",))],
)
def test_outliers_in_feed_forwards_are_found_and_those_layers_kept(
    g2p_export: Export, tmp_path: Path, precision: str, options: dict[str, bool], layers: tuple[str, ...]
) -> None:
    bundle = g2p_export("outliers in feed-forwards")
    report = quantize(bundle, tmp_path, precision, method="max", **options)
    assert report.agreement is not None
    assert report.agreement >= PRECISIONS[precision].agreement
    assert report.kept, "int8 with one scale for 1e5 and 1 cannot be right"
    assert all(name.endswith("feed_forward.contract") for name in report.kept), report.kept
    assert all(name.startswith(layers) for name in report.kept), report.kept
    worst = [name for name in report.costs if name.endswith("feed_forward.contract")]
    assert [*report.costs][: len(report.kept)] == worst[: len(report.kept)]


def test_outliers_stay_in_fp32_in_a_16_bit_variant(g2p_export: Export, tmp_path: Path) -> None:
    report = quantize(g2p_export("outliers in feed-forwards"), tmp_path, "fp16")
    assert report.agreement is not None
    assert report.agreement >= PRECISIONS["fp16"].agreement
    assert report.kept, "1e5 is outside float16"
    reasons = " ".join(report.kept.values())
    assert "65504" in reasons.replace(",", "").replace(" ", "") or "range" in reasons


@pytest.mark.full
def test_outliers_everywhere_are_refused_in_8_bits(g2p_export: Export, tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="layers kept in fp32"):
        quantize(g2p_export("outliers everywhere"), tmp_path, "int8", method="max")
    assert [*Bundle.open(tmp_path / "bundle").manifest.variants] == ["fp32"]


def test_random_golden_inputs_judge_no_rounded_variant(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = copied(tiny_bundle, tmp_path)
    quantize_bundle(bundle, "w4", ANY)
    manifest = Bundle.open(bundle.path).manifest
    for synthetic in (False, True):
        golden = {**manifest.golden, "synthetic": synthetic}
        report = verify_variant(Bundle(bundle.path, replace(manifest, golden=golden)), "w4", threads=1)
        assert min(comparison.agreement for comparison in report.generations) < PRECISIONS["w4"].agreement
        assert report.passed is synthetic
