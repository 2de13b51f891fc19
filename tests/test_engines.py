"""What is known of engines: records that survive, and engines that are stale, foreign, damaged or for another GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.test_bundle import MANIFEST
from tfm_export.bundle import Bundle
from tfm_export.engines import EngineRecord, check_runs_here, read_engine
from tfm_export.errors import BackendUnavailable, BundleError

RECORD = EngineRecord(
    name="w8-rtx",
    flavor="rtx",
    flavor_version="1.7.1.116",
    compute_capabilities=("8.6", "12.0"),
    variant="w8",
    compute="fp16",
    float_type="float16",
    max_batch_size=8,
    max_beam_size=4,
    max_source_length=12,
    max_target_length=15,
    capacities=(16, 64),
    plans={
        "encoder": "encoder.plan",
        "decoder_step_16": "decoder_step_16.plan",
        "decoder_step_64": "decoder_step_64.plan",
    },
    onnx_hashes={"onnx/w8/encoder.onnx": "0" * 64},
    head_size_padded=16,
    attention="fused",
    profiles={
        "encoder": ({"source_ids": ((1, 1), (2, 6), (8, 12))},),
        "decoder_step_16": ({}, {}),
        "decoder_step_64": ({}, {}),
    },
    build_seconds=1.5,
    proofs={"encoder": {"products": {"float16 x int8": 13}}},
    agreement={"greedy, alone": 0.995},
    tools={"onnx": "1.23"},
)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """A bundle with that engine, whose files are of a few bytes."""
    folder = tmp_path / "b" / "engines" / "w8-rtx"
    (tmp_path / "b" / "onnx" / "w8").mkdir(parents=True)
    folder.mkdir(parents=True)
    (tmp_path / "b" / "onnx" / "w8" / "encoder.onnx").write_bytes(b"graph")
    for file in RECORD.plans.values():
        (folder / file).write_bytes(b"plan")
    bundle = Bundle(tmp_path / "b", replace(MANIFEST, variants={"w8": {}}))
    bundle.add_files({"onnx/w8/encoder.onnx": "graph"})
    record = replace(RECORD, onnx_hashes={"onnx/w8/encoder.onnx": bundle.manifest.files["onnx/w8/encoder.onnx"].sha256})
    (folder / "engine.json").write_text(record.to_json())
    bundle.add_files({f"engines/w8-rtx/{file}": "engine" for file in ("engine.json", *RECORD.plans.values())})
    bundle.manifest = replace(bundle.manifest, engines={"w8-rtx": record.facts()})
    bundle.save()
    return bundle


def test_a_record_survives_a_round_trip() -> None:
    assert EngineRecord.from_json(RECORD.to_json(), Path("engine.json")) == RECORD


def test_an_engine_that_belongs_to_its_bundle_is_read(bundle: Bundle) -> None:
    assert replace(read_engine(bundle, "w8-rtx"), onnx_hashes=RECORD.onnx_hashes) == RECORD


def change_record(bundle: Bundle, change: Callable[[dict[str, Any]], object]) -> None:
    """Alter engine.json as if it had been written so."""
    path = bundle.path / "engines" / "w8-rtx" / "engine.json"
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))


def problem(bundle: Bundle, name: str = "w8-rtx") -> str:
    with pytest.raises(BundleError) as caught:
        read_engine(bundle, name)
    return str(caught.value)


def test_an_engine_whose_graph_changed_is_stale(bundle: Bundle) -> None:
    (bundle.path / "onnx" / "w8" / "encoder.onnx").write_bytes(b"other")
    bundle.add_files({"onnx/w8/encoder.onnx": "graph"})
    text = problem(bundle)
    assert "onnx_hashes: onnx/w8/encoder.onnx has changed since it was built" in text
    assert (
        f"tfm-export trt {bundle.path} --w8 --flavor rtx --compute fp16 --compute-capability 86,120 "
        "--max-batch-size 8 --max-beam-size 4 --max-source-length 12 --max-target-length 15 --capacity 16,64 "
        "--name w8-rtx --force" in text
    )


def test_an_engine_whose_graph_is_gone_is_stale(bundle: Bundle) -> None:
    bundle.manifest = replace(
        bundle.manifest, files={n: e for n, e in bundle.manifest.files.items() if "onnx" not in n}
    )
    assert "onnx/w8/encoder.onnx, which it was made from, is not in the bundle any more" in problem(bundle)


def test_a_record_of_another_engine_is_foreign(bundle: Bundle) -> None:
    change_record(bundle, lambda state: state.update(name="fp16-rtx", compute_capabilities=["8.9"], max_batch_size=9))
    text = problem(bundle)
    assert "name: expected w8-rtx, engine.json says fp16-rtx" in text
    assert "compute_capabilities: the manifest says ['8.6', '12.0'], engine.json says ['8.9']" in text
    assert "max_batch_size: the manifest says 8, engine.json says 9" in text


def test_a_plan_that_is_missing_or_cut_short_is_told(bundle: Bundle) -> None:
    folder = bundle.path / "engines" / "w8-rtx"
    (folder / "encoder.plan").unlink()
    (folder / "decoder_step_64.plan").write_bytes(b"pl")
    text = problem(bundle)
    assert "plans: encoder is missing, it should be encoder.plan" in text
    assert "plans: decoder_step_64.plan should have 4 bytes, but has 2" in text


def test_an_engine_that_is_not_there_is_told_with_those_that_are(bundle: Bundle) -> None:
    assert "has no engine 'fp16-rtx'; it has w8-rtx" in problem(bundle, "fp16-rtx")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"name": "x"}', b'{"format_version": true}'])
def test_what_is_no_record_is_told(bundle: Bundle, content: bytes) -> None:
    (bundle.path / "engines" / "w8-rtx" / "engine.json").write_bytes(content)
    text = problem(bundle)
    assert "engine.json" in text
    assert "tfm-export trt" in text


def test_a_record_that_was_deleted_is_told(bundle: Bundle) -> None:
    (bundle.path / "engines" / "w8-rtx" / "engine.json").unlink()
    assert "engine.json cannot be read" in problem(bundle)


def test_a_newer_format_is_told(bundle: Bundle) -> None:
    change_record(bundle, lambda state: state.update(format_version=2, surprise=1))
    assert "has format_version 2; this tfm-export reads up to 1" in problem(bundle)


def test_fields_that_are_missing_or_unknown_are_all_named(bundle: Bundle) -> None:
    def change(state: dict[str, Any]) -> None:
        del state["plans"], state["attention"]
        state["surprise"] = 1

    change_record(bundle, change)
    text = problem(bundle)
    for expected in ("lacks the field plans", "lacks the field attention", "a field that is not known: surprise"):
        assert expected in text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": "../x"}, "name must be letters"),
        ({"flavor": "tensorflow"}, "flavor must be one of tensorrt, rtx"),
        ({"compute_capabilities": ()}, 'compute_capabilities must be a list such as ["8.6"]'),
        ({"compute_capabilities": ("86",)}, "compute_capabilities must be"),
        ({"variant": "fp4"}, "variant must be one of"),
        ({"compute": "int8"}, "compute must be one of"),
        ({"float_type": "float32"}, "float_type must be float16 with fp16, found 'float32'"),
        ({"max_batch_size": 0}, "max_batch_size must be a number from 1 up, found 0"),
        ({"max_beam_size": True}, "max_beam_size must be a number from 1 up, found True"),
        ({"capacities": (64, 16)}, "capacities must be numbers from 1 up in rising order"),
        ({"capacities": (16,)}, "plans must be"),
        ({"attention": "flash"}, "attention must be one of fused, decomposed"),
        ({"onnx_hashes": {}}, "onnx_hashes must be SHA-256 sums"),
        ({"onnx_hashes": {"a": "0"}}, "onnx_hashes must be SHA-256 sums"),
        ({"profiles": {}}, "profiles must be those of encoder"),
        ({"build_seconds": -1}, "build_seconds must be a number from 0 up"),
    ],
)
def test_fields_that_cannot_be_are_named(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(BundleError) as caught:
        replace(RECORD, **changes)
    assert expected in str(caught.value)


def test_all_problems_of_a_record_are_named_at_once() -> None:
    with pytest.raises(BundleError) as caught:
        replace(RECORD, flavor="x", variant="y", attention="z")
    assert len(caught.value.problems) == 3


def test_facts_are_plain_values_of_the_record() -> None:
    facts = RECORD.facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["compute_capabilities"] == ["8.6", "12.0"]
    assert {name: facts[name] for name in ("variant", "capacities")} == {"variant": "w8", "capacities": [16, 64]}
    assert facts.keys() < asdict(RECORD).keys()


def test_an_engine_runs_where_it_was_built_for() -> None:
    check_runs_here(RECORD, "rtx", "1.7.1.116", "12.0")


def test_what_differs_from_here_is_named_with_the_command_that_builds_for_here() -> None:
    with pytest.raises(BackendUnavailable) as caught:
        check_runs_here(RECORD, "rtx", "1.8.0", "9.0")
    text = str(caught.value)
    assert "flavor_version: it is for TensorRT-RTX 1.7.1.116, found 1.8.0" in text
    assert "compute_capabilities: it is for 8.6, 12.0, and this GPU has 9.0" in text
    assert "tfm-export trt BUNDLE --w8 --name w8-rtx --force" in text
    with pytest.raises(BackendUnavailable, match="flavor: it is for TensorRT-RTX, found TensorRT"):
        check_runs_here(RECORD, "tensorrt", "1.7.1.116", "8.6")
