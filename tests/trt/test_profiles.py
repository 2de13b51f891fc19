"""Profiles and memory: shapes worked out by hand, and those that do not fit together found before a build."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest

from tests.export.conftest import Exported
from tests.test_bundle import MANIFEST
from tfm_export import graph
from tfm_export.bundle import Bundle
from tfm_export.errors import BuildError
from tfm_export.graph_files import read_graph
from tfm_export.trt.memory import estimate_memory, most_alive
from tfm_export.trt.network_source import NetworkSource, derive_sources
from tfm_export.trt.options import EngineOptions
from tfm_export.trt.profiles import (
    EngineLimits,
    OptimizationProfile,
    Range,
    check_profiles,
    propagate,
    usual_source_length,
)
from tfm_export.trt.stage import resolve_capacities, resolve_limits

LIMITS = EngineLimits(
    max_batch_size=32,
    max_beam_size=4,
    max_source_length=50,
    max_target_length=20,
    usual_source_length=9,
    usual_beam_size=2,
)


def axes(profile: OptimizationProfile) -> dict[str, tuple[int, int, int]]:
    return {name: (axis.smallest, axis.usual, axis.largest) for name, axis in profile.axes.items()}


def test_the_encoder_has_one_profile() -> None:
    (profile,) = LIMITS.encoder_profiles()
    assert axes(profile) == {"batch": (1, 8, 32), "source": (1, 9, 50)}


def test_the_step_has_one_for_prompts_and_one_for_beams() -> None:
    prompt, step = LIMITS.step_profiles(88)
    shared = {"batch": (1, 8, 32), "source": (1, 9, 50), "capacity": (88, 88, 88)}
    assert axes(prompt) == {**shared, "query": (1, 10, 20)}
    assert axes(step) == {**shared, "query": (1, 2, 4)}


@pytest.mark.parametrize(("beams", "target", "expected"), [(1, 7, 8), (4, 20, 88), (4, 22, 96), (1, 1, 8), (3, 10, 32)])
def test_the_largest_capacity_holds_the_start_token_and_every_beams_tokens(
    beams: int, target: int, expected: int
) -> None:
    limits = replace(LIMITS, max_beam_size=beams, max_target_length=target)
    assert limits.largest_capacity == expected >= 1 + beams * target


def test_no_step_writes_more_tokens_than_there_are_slots() -> None:
    prompt, step = replace(LIMITS, max_target_length=64).step_profiles(16)
    assert (prompt.axes["query"].largest, step.axes["query"].largest) == (16, 4)


def test_a_batch_is_never_fixed_at_one() -> None:
    """TensorRT-RTX 1.7.1 does not compile the 16-bit step then."""
    limits = replace(LIMITS, max_batch_size=1)
    for profile in (*limits.encoder_profiles(), *limits.step_profiles(88)):
        assert axes(profile)["batch"] == (1, 1, 2)


def write_golden(path: Path, lengths: list[int], *, synthetic: bool) -> Bundle:
    lines = [json.dumps({"source_ids": [4] * length}) + "\n" for length in lengths]
    (path / "golden.jsonl").write_text("".join(lines))
    return Bundle(path, replace(MANIFEST, golden={"synthetic": synthetic}))


def test_the_usual_source_is_the_median_of_real_ones(tmp_path: Path) -> None:
    bundle = write_golden(tmp_path, [3, 40, 5, 4, 4], synthetic=False)
    assert usual_source_length(bundle, 50) == 4
    assert usual_source_length(bundle, 2) == 2
    assert usual_source_length(write_golden(tmp_path, [3, 40, 5], synthetic=True), 50) == 25
    (tmp_path / "golden.jsonl").unlink()
    assert usual_source_length(bundle, 51) == 26


def test_limits_are_the_models_unless_the_user_says_less(tmp_path: Path) -> None:
    bundle = Bundle(tmp_path, MANIFEST)
    limits = resolve_limits(bundle, EngineOptions())
    assert (limits.max_source_length, limits.max_target_length) == (12, 15)
    assert (limits.max_batch_size, limits.max_beam_size) == (32, 4)
    larger = replace(MANIFEST, generation=replace(MANIFEST.generation, beam_size=6))
    assert resolve_limits(Bundle(tmp_path, larger), EngineOptions()).max_beam_size == 6
    two_words = replace(MANIFEST, dimensions=replace(MANIFEST.dimensions, target_vocabulary_size=2))
    assert resolve_limits(Bundle(tmp_path, two_words), EngineOptions()).max_beam_size == 2


def test_capacities_are_those_asked_for_and_the_largest() -> None:
    assert resolve_capacities(LIMITS, ()) == (88,)
    assert resolve_capacities(LIMITS, (64, 16, 64)) == (16, 64, 88)
    assert resolve_capacities(LIMITS, (88, 5)) == (5, 88)
    with pytest.raises(BuildError, match=r"capacities must be from 5, .* to 88, .*; found 4, 89"):
        resolve_capacities(LIMITS, (4, 16, 89))


@pytest.fixture
def sources(export_configuration: Callable[[str], Exported]) -> list[NetworkSource]:
    """The graphs of the fp32 engine of a model with three heads of 20, an encoder layer and three decoder layers."""
    return derive_sources(export_configuration("tied").bundle, "fp32", "fp32", LIMITS, (16, 88))


def test_shapes_go_all_the_way_through(sources: list[NetworkSource]) -> None:
    """Every value of every graph gets a shape, also at the sizes that broadcasting could hide: 1."""
    for source in sources:
        for profile in source.profiles:
            for point in range(3):
                shapes = propagate(source.model, profile.sizes(point))
                values = [value.name for node in source.model.graph for value in node.outputs]
                known = {value.name for node in source.model.graph if node.op_type == "Shape" for value in node.outputs}
                assert [name for name in values if name not in shapes and name not in known] == []
    step = sources[-1]
    shapes = propagate(step.model, {"batch": 3, "source": 7, "query": 2, "capacity": 88})
    assert shapes["log_probs"] == ((3, 2, 34), 4)
    assert shapes["top_ids"] == ((3, 2, 16), 8)
    assert shapes["self_key_2_out"] == ((3, 3, 88, 20), 4)


def test_checking_leaves_the_graph_as_it_was(sources: list[NetworkSource]) -> None:
    before = ir.serde.serialize_model(sources[0].model).SerializeToString()
    check_profiles("encoder", sources[0].profiles, sources[0].model, sources[0].outputs)
    assert ir.serde.serialize_model(sources[0].model).SerializeToString() == before


def test_sizes_out_of_order_are_named(sources: list[NetworkSource]) -> None:
    encoder = sources[0]
    wrong = OptimizationProfile(
        name="encoder",
        axes={"batch": Range(smallest=2, usual=1, largest=3), "source": Range(smallest=0, usual=5, largest=4)},
    )
    with pytest.raises(BuildError) as caught:
        check_profiles("encoder", [wrong], encoder.model, encoder.outputs)
    text = str(caught.value)
    assert "encoder, profile encoder: batch must rise from 1, found 2, 1, 3" in text
    assert "source must rise from 1, found 0, 5, 4" in text


def test_a_capacity_that_the_masks_do_not_have_is_found(sources: list[NetworkSource]) -> None:
    """The caches are 16 slots wide in the graph, and the profile says 88."""
    step = sources[1]
    with pytest.raises(BuildError, match="decoder_step_16, smallest shapes of prompt"):
        check_profiles(step.plan, sources[2].profiles, step.model, step.outputs)


def test_an_output_of_another_width_is_found(sources: list[NetworkSource]) -> None:
    encoder = sources[0]
    wider = [replace_axis(spec, 3, 24) for spec in encoder.outputs]
    with pytest.raises(BuildError, match=r"cross_key_0 must be \[1, 3, 1, 24\], found \[1, 3, 1, 20\]"):
        check_profiles("encoder", encoder.profiles, encoder.model, wider)


def replace_axis(spec: graph.TensorSpec, axis: int, size: int) -> graph.TensorSpec:
    return graph.TensorSpec(spec.name, spec.dtype, (*spec.axes[:axis], size, *spec.axes[axis + 1 :]))


def test_memory_is_what_the_sizes_say(
    sources: list[NetworkSource], export_configuration: Callable[[str], Exported]
) -> None:
    exported = export_configuration("tied")
    dimensions = exported.bundle.manifest.dimensions
    memory = estimate_memory(sources, dimensions, "fp32", LIMITS, (16, 88))
    # Keys and values of 3 layers, 3 heads of 20, 4 bytes.
    assert memory.cache_a_sentence == {16: 16 * 2 * 3 * 3 * 20 * 4, 88: 88 * 2 * 3 * 3 * 20 * 4}
    assert memory.cache_a_beam == memory.cache_a_sentence[88] // 4
    assert memory.cross_a_sentence == 50 * 2 * 3 * 3 * 20 * 4
    assert memory.weights.keys() == {"encoder", "decoder_step_16", "decoder_step_88"}
    assert memory.weights["decoder_step_16"] == memory.weights["decoder_step_88"]
    file = exported.folder / graph.WEIGHTS
    assert sum(memory.weights.values()) - memory.weights["decoder_step_16"] >= file.stat().st_size
    everything = 32 * (memory.cache_a_sentence[88] + memory.cross_a_sentence)
    assert memory.full_batch == everything + sum(memory.weights.values()) + max(memory.activations.values())
    half = estimate_memory(sources, dimensions, "bf16", LIMITS, (16, 88))
    assert half.cache_a_beam * 2 == memory.cache_a_beam


def test_what_is_alive_is_counted_node_by_node() -> None:
    """y = (a + a) + a for a of 10 floats: two of the three values at once, and the output to the end."""
    a = ir.Value(name="a", shape=ir.Shape(["batch", 5]), type=ir.TensorType(ir.DataType.FLOAT))
    twice = ir.node("Add", [a, a])
    view = ir.node("Identity", [twice.outputs[0]])
    thrice = ir.node("Add", [view.outputs[0], a])
    last = ir.node("Add", [thrice.outputs[0], a])
    for node, name in ((twice, "twice"), (view, "view"), (thrice, "thrice"), (last, "y")):
        node.outputs[0].name, node.outputs[0].dtype = name, ir.DataType.FLOAT
    nodes = [twice, view, thrice, last]
    model = ir.Model(ir.Graph([a], [last.outputs[0]], nodes=nodes, opset_imports={"": 24}, name="g"), ir_version=11)
    assert most_alive(model, {"batch": 2}) == 2 * 10 * 4
    assert most_alive(model, {"batch": 4}) == 2 * 20 * 4


def test_activations_hold_the_largest_output(sources: list[NetworkSource]) -> None:
    step = sources[-1]
    largest = step.profiles[0].sizes(-1)
    log_probs = largest["batch"] * largest["query"] * 34 * 4
    assert most_alive(step.model, largest) > 2 * log_probs  # logits, and what the log-softmax makes of them


def test_a_graph_is_not_read_twice_for_its_shapes(export_configuration: Callable[[str], Exported]) -> None:
    """Weights stay where they are: a model of gigabytes has its shapes checked in no time."""
    model = read_graph(export_configuration("tied").folder / graph.ENCODER)
    propagate(model, {"batch": 1, "source": 3})
    tensors = [v.const_value for v in model.graph.initializers.values()]
    external = [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]
    assert external
    assert all(tensor.raw is None for tensor in external)
