"""Real builds with TensorRT-RTX: what comes out, what is written, what is refused, what is left when it goes wrong."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.export.conftest import Exported
from tests.trt.conftest import Told, build, unchanged
from tests.trt.variants import add_variant, bundle_of
from tfm_export import graph
from tfm_export.bundle import Bundle, file_hash
from tfm_export.cli.trt import command as trt_command
from tfm_export.engines import EngineRecord, read_engine
from tfm_export.errors import BuildError, BundleError, ParityError
from tfm_export.graph_files import RANGES, WeightsFile, read_graph
from tfm_export.precision import PRECISIONS
from tfm_export.trt import builder
from tfm_export.trt.flavor import Flavor, least_capability
from tfm_export.trt.options import EngineOptions
from tfm_export.trt.stage import draw_blueprint

pytestmark = pytest.mark.usefixtures("rtx")

ASKED = {
    "fp32": "float32 x float32",
    "fp16": "float16 x float16",
    "bf16": "bfloat16 x bfloat16",
    "w8": "float16 x int8",
    "w4": "float16 x int4",
    "int8": "int8 x int8",
    "fp8": "fp8 x fp8",
}
WEIGHT_ONLY = {"w8", "w4"}


def products(bundle: Bundle, variant: str) -> dict[str, int]:
    """Matrix products that a plan of the tiny bundle should have."""
    layers = bundle.manifest.dimensions.decoder_layers
    encoder_layers = bundle.manifest.model["configuration"]["encoder_layers"]
    counts = {"encoder": 6 * encoder_layers + 2 * layers, "decoder_step": 8 * layers + 1}
    if variant in WEIGHT_ONLY:  # query, key and value are one, and so is what all decoder layers read of the encoder
        return {"encoder": 4 * encoder_layers + 1, "decoder_step": 6 * layers + 1}
    return counts


def check_proofs(record: EngineRecord, bundle: Bundle, asked: str) -> None:
    """What was found of every plan is what the model's configuration says."""
    layers = bundle.manifest.dimensions.decoder_layers
    expected = products(bundle, record.variant)
    for plan, proof in record.proofs.items():
        encoder = plan == "encoder"
        assert proof["products"] == {asked: expected["encoder" if encoder else "decoder_step"]}
        count = bundle.manifest.model["configuration"]["encoder_layers"] if encoder else 2 * layers
        assert proof["attention"] == {record.float_type: count}
        assert proof["caches"] == (0 if encoder else 2 * layers)
        assert proof["fused"] == (record.compute != "fp32")
        assert proof["plan_bytes"] == (bundle.path / "engines" / record.name / f"{plan}.plan").stat().st_size
        # Measured: 20 to 107 kB more than the weights for the tiny model's two layers.
        assert -5_000 < proof["stored_bytes"] - proof["weight_bytes"] < 150_000


# fp16 is built for the fixture engine_bundle, w8 in tests/cli, w4 in tests/benchmarks; so each once by the quick tests.
QUICK = {"fp32", "bf16", "int8", "fp8"}


@pytest.mark.parametrize("variant", [v if v in QUICK else pytest.param(v, marks=pytest.mark.full) for v in PRECISIONS])
def test_every_precision_is_built_and_proven(rtx: Flavor, bundle: Bundle, variant: str) -> None:
    record = build(bundle, variant=variant)
    check_proofs(record, bundle, ASKED[variant])
    least = least_capability("rtx", variant) or "0.0"
    assert set(record.compute_capabilities) == {c for c in ("8.0", "8.6", "8.9", "12.0") if float(c) >= float(least)}
    assert record.attention == ("decomposed" if variant == "fp32" else "fused")
    assert (record.flavor, record.flavor_version) == ("rtx", rtx.version)
    weights = (bundle.variant_path("fp32") / graph.WEIGHTS).stat().st_size
    stored = sum(proof["weight_bytes"] for proof in record.proofs.values())
    share = {"fp32": 1.0, "fp16": 0.5, "bf16": 0.5, "w8": 0.29, "w4": 0.18, "int8": 0.29, "fp8": 0.29}[variant]
    assert stored == pytest.approx(share * weights, rel=0.06)


@pytest.mark.usefixtures("rtx")
def test_an_encoder_of_int8_is_built_and_proven_as_one(bundle: Bundle) -> None:
    shutil.rmtree(bundle.variant_path("w8"))
    add_variant(bundle, "w8", int8_encoder=True)
    record = build(bundle, variant="w8")
    assert record.proofs["encoder"]["asked"] == "int8 x int8"
    assert record.proofs["encoder"]["products"] == {"int8 x int8": products(bundle, "int8")["encoder"]}
    (step,) = (proof for plan, proof in record.proofs.items() if plan != "encoder")
    assert step["products"] == {ASKED["w8"]: products(bundle, "w8")["decoder_step"]}


@pytest.mark.full
@pytest.mark.parametrize("compute", ["fp16", "bf16"])
@pytest.mark.parametrize("variant", ["w8", "w4", "int8", "fp8"])
@pytest.mark.parametrize("target", ["7.5", "8.0", "8.6", "8.9", "12.0", "12.1"])
def test_the_matrix_of_precisions_and_gpus(bundle: Bundle, variant: str, compute: str, target: str) -> None:
    """Every pair is built and proven, or refused before the build because the builder would not have it."""
    least = max((least_capability("rtx", name) or "0.0" for name in (variant, compute)), key=float)
    if float(target) < float(least):
        with unchanged(bundle), pytest.raises(BuildError, match=f"needs compute capability {least}"):
            build(bundle, variant=variant, compute=compute, compute_capabilities=(target,))
        return
    record = build(bundle, variant=variant, compute=compute, compute_capabilities=(target,))
    check_proofs(record, bundle, ASKED[variant].replace("float16", PRECISIONS[compute].float_type))
    assert record.compute_capabilities == (target,)


@pytest.mark.full
@pytest.mark.parametrize("target", ["7.5", "8.0", "8.6", "8.9", "12.0", "12.1"])
@pytest.mark.parametrize("variant", ["fp32", "fp16", "bf16"])
def test_the_matrix_of_floats_and_gpus(bundle: Bundle, variant: str, target: str) -> None:
    if float(target) < float(least_capability("rtx", variant) or "0.0"):
        with pytest.raises(BuildError, match="needs compute capability"):
            build(bundle, variant=variant, compute_capabilities=(target,))
        return
    check_proofs(build(bundle, variant=variant, compute_capabilities=(target,)), bundle, ASKED[variant])


@pytest.mark.full
@pytest.mark.parametrize(
    ("variant", "target"),
    [("fp32", "7.5"), ("bf16", "7.5"), ("w4", "7.5"), ("fp8", "7.5"), ("fp8", "8.0"), ("fp8", "8.6")],
)
def test_what_is_refused_is_what_the_builder_cannot_build(
    bundle: Bundle, variant: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the refusal TensorRT-RTX fails: not one pair is refused that it could build."""
    monkeypatch.setattr("tfm_export.trt.flavor.least_capability", lambda *_: None)
    with unchanged(bundle), pytest.raises(BuildError, match=r"TensorRT-RTX .* could not build"):
        build(bundle, variant=variant, compute_capabilities=(target,))


def test_the_engine_is_in_the_bundle_with_everything_about_it(engine_bundle: Path) -> None:
    opened = Bundle.open(engine_bundle)
    record = read_engine(opened, "fp16-rtx")
    check_proofs(record, opened, ASKED["fp16"])
    assert opened.manifest.engines == {"fp16-rtx": record.facts()}
    folder = engine_bundle / "engines" / "fp16-rtx"
    plans = ["encoder", "decoder_step_16", "decoder_step_64"]  # 1 + 3 x 20 slots, rounded up to a multiple of 8
    assert record.capacities == (16, 64)
    assert record.plans == {plan: f"{plan}.plan" for plan in plans}
    listings = {f"{plan}.network.txt" for plan in plans}
    assert {p.name for p in folder.iterdir()} == {"engine.json", *record.plans.values(), *listings}
    assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o644}
    files = {name: entry for name, entry in opened.manifest.files.items() if name.startswith("engines/")}
    assert {name.rpartition("/")[2] for name in files} == {p.name for p in folder.iterdir()}
    assert all(file_hash(engine_bundle / name) == entry.sha256 for name, entry in files.items())
    sources = [f"onnx/fp16/{name}" for name in (graph.ENCODER, graph.DECODER_STEP, graph.WEIGHTS)]
    assert record.onnx_hashes == {name: file_hash(engine_bundle / name) for name in sources}
    assert "KV_CACHE_UPDATE" in (folder / "decoder_step_16.network.txt").read_text()


def test_the_graphs_that_were_compiled_decode_as_pytorch_does(engine_bundle: Path) -> None:
    agreement = read_engine(Bundle.open(engine_bundle), "fp16-rtx").agreement
    assert agreement.keys() >= {"greedy, alone", "greedy, batched", "beam 4, padded"}
    assert set(agreement.values()) == {1.0}


def test_the_profiles_are_written_down_as_built(engine_bundle: Path) -> None:
    record = read_engine(Bundle.open(engine_bundle), "fp16-rtx")
    (encoder,) = record.profiles["encoder"]
    usual = 6  # the median of the golden sources and their end tokens: a, hello, don't, parity, transformer
    assert encoder["source_ids"] == ((1, 1), (1, usual), (4, 12))
    prompt, step = record.profiles["decoder_step_64"]
    assert prompt["target_ids"] == ((1, 1), (1, 10), (4, 20))
    assert step["target_ids"] == ((1, 1), (1, 1), (4, 3))
    assert step["self_mask"][2] == (4, 1, 3, 64)
    assert step["self_key_1"] == ((1, 4, 64, 16), (1, 4, 64, 16), (4, 4, 64, 16))
    assert step["cross_value_0"][2] == (4, 4, 12, 16)
    assert record.profiles["decoder_step_16"][0]["target_ids"][2] == (4, 16), "no more tokens than slots"


def test_heads_of_20_are_padded(export_configuration: Callable[[str], Exported], tmp_path: Path) -> None:
    """16-bit attention does not take them; float32 does. The table is tied to the projection."""
    bundle = bundle_of(export_configuration("tied"), tmp_path / "b", "fp16")
    record = build(bundle, variant="fp16")
    assert (record.head_size_padded, record.attention) == (24, "fused")
    assert record.profiles["decoder_step_48"][0]["self_key_0"][2] == (32, 3, 48, 24)
    assert record.profiles["decoder_step_48"][1]["cross_key_0"][2] == (32, 3, 64, 24)


def test_attention_that_has_no_fused_kernel_is_built_decomposed_and_told(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT-RTX has none in float32, as it is found out where that is not known beforehand."""

    def not_even_float32(trt: ModuleType, network: Any, *, all_of_them: bool) -> None:
        for layer in map(network.get_layer, range(network.num_layers)):
            if layer.type == trt.LayerType.ATTENTION_INPUT:
                layer.__class__ = trt.IAttentionInputLayer
                layer.attention.decomposable = all_of_them

    monkeypatch.setattr(builder, "_set_decomposable", not_even_float32)
    told = Told()
    record = build(bundle, told, variant="fp32")
    assert record.attention == "decomposed"
    assert [proof["fused"] for proof in record.proofs.values()] == [False, False]
    assert len(told.notes) == 2
    assert all("no fused attention of this form in 16 bits" in note for note in told.notes)
    assert "building encoder.plan, attention decomposed" in told.begun


def test_a_second_engine_needs_a_name_or_force(engine_bundle: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(shutil.copytree(engine_bundle, tmp_path / "b"))
    with unchanged(bundle), pytest.raises(BundleError, match="has engines/fp16-rtx already"):
        build(bundle, variant="fp16")
    told = Told()
    # A batch of 1, which TensorRT-RTX 1.7.1 does not compile as such.
    replaced = build(bundle, told, force=True, max_batch_size=1, compute_capabilities=("12.0", "8.6", "8.6"))
    opened = Bundle.open(bundle.path)
    assert read_engine(opened, "fp16-rtx") == replaced
    assert (replaced.max_batch_size, replaced.capacities) == (1, (48,))
    assert replaced.compute_capabilities == ("8.6", "12.0")
    assert not (bundle.path / "engines" / "fp16-rtx" / "decoder_step_16.plan").exists()
    assert told.begun[0] == "deriving the graphs"
    assert "building decoder_step_48.plan" in told.begun
    assert "Building engine" in told.phases


@pytest.mark.full
@pytest.mark.parametrize("variant", PRECISIONS)
@pytest.mark.parametrize(
    "sizes", [(1, 1, 64, 20), (1, 4, 1, 20), (2, 1, 1, 1), (1, 1, 1, 1), (32, 1, 64, 1), (3, 5, 7, 9)]
)
def test_the_smallest_sizes_are_built(bundle: Bundle, variant: str, sizes: tuple[int, int, int, int]) -> None:
    names = ("max_batch_size", "max_beam_size", "max_source_length", "max_target_length")
    record = build(bundle, variant=variant, **dict(zip(names, sizes, strict=True)))
    assert tuple(getattr(record, name) for name in names) == sizes


def test_a_variant_that_is_not_there_is_told(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(shutil.copytree(tiny_bundle, tmp_path / "b"))
    with unchanged(bundle), pytest.raises(BundleError, match="has no variant w8 to build from; it has fp32") as caught:
        build(bundle, variant="w8")
    assert f"tfm-export quantize {bundle.path} --w8 --for tensorrt" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_source_length": 65}, "max source length must be at most 64, found 65"),
        ({"max_target_length": 65, "max_source_length": 99}, "max target length must be at most 64, found 65"),
        ({"max_beam_size": 35}, "max beam size must be at most 34"),
        ({"capacities": (2,)}, "capacities must be from 3, a start token and a step of 2 beams, to 48"),
        ({"capacities": (49,)}, "found 49"),
    ],
)
def test_sizes_that_cannot_be_are_refused(bundle: Bundle, options: dict[str, object], message: str) -> None:
    with unchanged(bundle), pytest.raises(BuildError, match=message):
        build(bundle, variant="fp16", **options)


def test_too_small_a_workspace_fails_with_what_tensorrt_says(bundle: Bundle) -> None:
    with unchanged(bundle), pytest.raises(BuildError, match=r"could not build encoder: .*workspace limit"):
        build(bundle, variant="fp16", workspace_bytes=1000)


def test_graphs_that_decode_otherwise_leave_no_engine(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that gets a scale wrong: every layer has its type and its size, and only decoding can tell."""

    def wrong(model: ir.Model, float_type: str) -> None:  # noqa: ARG001 (as the pass has it)
        for node in model.graph:
            if node.op_type == "Attention":
                node.attributes["scale"] = ir.AttrFloat32("scale", 0.01)

    monkeypatch.setattr("tfm_export.trt.network_source.pad_heads", wrong)
    with unchanged(bundle), pytest.raises(ParityError, match="inputs agree") as caught:
        build(bundle, variant="fp16", verify=True)
    assert caught.value.exit_code == 3


def test_numbers_that_leave_float16_are_told(bundle: Bundle) -> None:
    """What a quantised variant computes between its products is float32 where it was made, and float16 here."""
    folder = bundle.variant_path("w8")
    models = {name: read_graph(folder / name) for name in (graph.ENCODER, graph.DECODER_STEP)}
    scale = models[graph.ENCODER].graph.initializers["layers.0.feed_forward.expand.weight_scale"]
    assert scale.const_value is not None
    scale.const_value = ir.Tensor(np.minimum(scale.const_value.numpy() * 1e6, 6e4), name=scale.name)
    bundle_folder = folder.with_name("changed")
    bundle_folder.mkdir()
    weights = WeightsFile(bundle_folder / graph.WEIGHTS)
    for name, model in models.items():
        weights.write(model, bundle_folder / name)
    shutil.copy(folder / RANGES, bundle_folder)
    shutil.rmtree(folder)
    bundle_folder.rename(folder)
    bundle.add_files({f"onnx/w8/{file.name}": "changed" for file in folder.iterdir()})
    bundle.save()
    with unchanged(bundle), pytest.raises(ParityError, match="not finite") as caught:
        build(bundle, variant="w8", verify=True)
    assert "--compute bf16" in str(caught.value)


def test_the_blueprint_can_be_drawn_before_there_is_a_variant(tiny_bundle: Path, bundle: Bundle) -> None:
    """Its sizes are those of the engine that is built later."""
    options = {"flavor": "rtx", "max_beam_size": 2, "max_target_length": 20}
    for variant in ("fp16", "int8"):
        sketch = draw_blueprint(Bundle.open(tiny_bundle), EngineOptions(variant=variant, **options), sketch=True)
        exact = draw_blueprint(bundle, EngineOptions(variant=variant, **options))
        assert sketch.memory == exact.memory
        assert sketch.targets == exact.targets


def test_engine_json_says_what_made_it_and_how_to_make_it_again(rtx: Flavor, engine_bundle: Path) -> None:
    folder = engine_bundle / "engines" / "fp16-rtx"
    state = json.loads((folder / "engine.json").read_text())
    assert state["format_version"] == 1
    assert state["tools"]["tensorrt_rtx"] == rtx.version
    assert state["build_seconds"] > 0
    command = read_engine(Bundle.open(engine_bundle), "fp16-rtx").rebuild_command(engine_bundle)
    assert command == (
        f"tfm-export trt {engine_bundle} --fp16 --flavor rtx --compute-capability 80,86,89,120 --max-batch-size 4 "
        "--max-beam-size 3 --max-source-length 12 --max-target-length 20 --capacity 16,64 --name fp16-rtx --force"
    )
    # What it says is what the command line takes.
    context = trt_command.make_context("trt", shlex.split(command)[2:])
    assert context.params["capacity"] == (16, 64)
    assert context.params["fp16"] is True


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"variant": "fp16"}, "fp16-rtx"),
        ({"variant": "w8"}, "w8-rtx"),
        ({"variant": "w8", "compute": "fp16"}, "w8-rtx"),
        ({"variant": "w8", "compute": "bf16"}, "w8-bf16-rtx"),
        ({"variant": "fp16", "name": "small"}, "small"),
    ],
)
def test_an_engine_is_named_after_its_precision_and_flavour(
    tiny_variants: Path, options: dict[str, Any], name: str
) -> None:
    assert draw_blueprint(Bundle.open(tiny_variants), EngineOptions(flavor="rtx", **options)).name == name
