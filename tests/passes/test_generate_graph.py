"""generate.onnx: PyTorch's greedy tokens in one call, whatever the batch, the padding and the limit."""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from reference_model import SpecialIds as ReferenceSpecialIds
from reference_model.search import Hypothesis, greedy
from tests.export.conftest import Exported
from tests.numerics import log_prob_limit, score_limit
from tfm_export import graph
from tfm_export.decoding import DecodeOptions
from tfm_export.decoding import generate as decode
from tfm_export.graph_files import WeightsFile, read_graph, write_graph
from tfm_export.passes.generate_graph import build_generate_graph
from tfm_export.passes.linears import add_initializer, linears
from tfm_export.runtime.cpu.onnx_runtime import OnnxModel

LENGTHS = (1, 9, 4, 13, 2)  # of sources, in tokens; the traced example has 7
LONGEST = 20
PAD, EOS = 0, 2


def easing(exported: Exported) -> float:
    """What to take off the end token's logit for targets of many lengths: most of these models end at once."""
    config = exported.model.config
    if config.positions == "relative":
        return 4.0
    return 2.0 if config.tie_projection else 6.0


def ease_ending(decoder_step: ir.Model, exported: Exported) -> None:
    bias = decoder_step.graph.initializers["projection.bias"]
    numbers = bias.const_value.numpy().copy()
    numbers[EOS] -= easing(exported)
    bias.const_value = ir.tensor(numbers, name=bias.name)


def build(folder: Path, exported: Exported, *, eased: bool = False) -> ir.Model:
    manifest = exported.bundle.manifest
    decoder_step = read_graph(folder / graph.DECODER_STEP)
    if not eased:
        ease_ending(decoder_step, exported)
    return build_generate_graph(
        read_graph(folder / graph.ENCODER),
        decoder_step,
        manifest.special_ids,
        max_target_length=manifest.limits.max_target_length,
    )


class Generate:
    """A session of generate.onnx with the options that any other language would start with."""

    def __init__(self, path: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def __call__(self, source_ids: Any, lengths: Any, max_length: int = LONGEST) -> list[np.ndarray]:
        feeds = {
            "source_ids": np.asarray(source_ids, np.int64),
            "source_lengths": np.asarray(lengths, np.int64),
            "max_length": np.asarray(max_length, np.int64),
        }
        return self.session.run(None, feeds)


@pytest.fixture
def path(exported: Exported, tmp_path: Path) -> Path:
    """The graph of a configuration, on disk."""
    write_graph(build(exported.folder, exported), tmp_path / graph.GENERATE, weights_inside=True)
    return tmp_path / graph.GENERATE


@pytest.fixture
def generate(path: Path) -> Generate:
    return Generate(path)


def sources(exported: Exported, width: int = max(LENGTHS), filler: int = PAD) -> np.ndarray:
    size = exported.model.config.source_vocabulary_size
    ids = np.full((len(LENGTHS), width), filler, np.int64)
    for row, length in zip(ids, LENGTHS, strict=True):
        row[:length] = np.random.default_rng(length).integers(3, size, length)
    return ids


def expected(exported: Exported, max_length: int = LONGEST) -> Iterator[Hypothesis]:
    """What PyTorch's search without a cache gives for each source alone."""
    model = copy.deepcopy(exported.model)
    with torch.no_grad():
        model.projection.bias[EOS] -= easing(exported)
    for ids, length in zip(sources(exported), LENGTHS, strict=True):
        source = torch.from_numpy(ids[None, :length])
        special = ReferenceSpecialIds(pad=PAD, bos=1, eos=EOS)
        yield greedy(model, source, torch.ones_like(source, dtype=torch.bool), special, max_length)[0]


def assert_same_scores(exported: Exported, found: Any, expected: Any, longest: int = LONGEST) -> None:
    """Sums of log-probabilities of two searches in float32."""
    limit = score_limit(2 * log_prob_limit(exported.model, LONGEST), longest)
    np.testing.assert_allclose(found, expected, rtol=0, atol=limit)


def rows(ids: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    return [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]


def test_a_padded_batch_gives_pytorchs_tokens_and_scores(exported: Exported, generate: Generate) -> None:
    hypotheses = [*expected(exported)]
    tokens = [h.tokens + [EOS] * h.finished for h in hypotheses]
    ids, lengths, scores = generate(sources(exported), LENGTHS)
    assert rows(ids, lengths) == tokens
    assert ids.shape == (len(LENGTHS), max(map(len, tokens)))
    assert all((row[length:] == PAD).all() for row, length in zip(ids, lengths, strict=True))
    assert_same_scores(exported, scores, [h.score for h in hypotheses])
    assert (ids.dtype, lengths.dtype, scores.dtype) == (np.int64, np.int64, np.float32)


def test_a_row_is_the_same_alone_and_in_any_company(exported: Exported, generate: Generate) -> None:
    ids, lengths, scores = generate(sources(exported), LENGTHS)
    wide = generate(sources(exported, width=31, filler=1), LENGTHS)
    assert rows(*wide[:2]) == rows(ids, lengths)
    for row, length in enumerate(LENGTHS):
        alone = generate(sources(exported)[row : row + 1, :length], [length])
        assert alone[0].tolist() == rows(ids, lengths)[row : row + 1]
        assert_same_scores(exported, alone[2], scores[row : row + 1])


@pytest.mark.parametrize("max_length", [1, 2, 7])
def test_max_length_cuts_every_row(exported: Exported, generate: Generate, max_length: int) -> None:
    ids, lengths, scores = generate(sources(exported), LENGTHS, max_length)
    hypotheses = [*expected(exported, max_length)]
    assert rows(ids, lengths) == [h.tokens + [EOS] * h.finished for h in hypotheses]
    assert ids.shape[1] == max(lengths) <= max_length
    assert_same_scores(exported, scores, [h.score for h in hypotheses], max_length)


def test_targets_reach_the_end_of_the_position_table_and_no_further(exported: Exported, generate: Generate) -> None:
    limit = exported.bundle.manifest.limits.max_target_length
    most = generate(sources(exported), LENGTHS, limit)
    if exported.model.config.target_vocabulary_size > 5:  # with five tokens, four of them special, all targets end
        assert most[0].shape[1] == limit
    assert rows(*most[:2]) == [h.tokens + [EOS] * h.finished for h in expected(exported, limit)]
    for asked in (limit + 1, 2**62):
        for found, one in zip(generate(sources(exported), LENGTHS, asked), most, strict=True):
            np.testing.assert_array_equal(found, one)
    for asked in (0, -3):
        np.testing.assert_array_equal(generate(sources(exported), LENGTHS, asked)[0], most[0][:, :1])


def test_a_row_without_a_source_has_an_empty_target(exported: Exported, generate: Generate) -> None:
    full = generate(sources(exported), LENGTHS)
    lengths = [1, 0, 4, 13, 0]
    ids, found, scores = generate(sources(exported), lengths)
    assert found.tolist() == [0 if n == 0 else length for n, length in zip(lengths, full[1].tolist(), strict=True)]
    assert (ids[[1, 4]] == PAD).all()
    assert scores[[1, 4]].tolist() == [0, 0]
    assert [r for r in rows(ids, found) if r] == [r for i, r in enumerate(rows(*full[:2])) if i not in {1, 4}]
    nothing = generate(sources(exported), [0] * len(LENGTHS))
    assert (nothing[0] == PAD).all()
    assert nothing[1].tolist() == [0] * len(LENGTHS)


def test_what_the_model_cannot_take_is_an_error(exported: Exported, generate: Generate) -> None:
    config = exported.model.config
    with pytest.raises(Exception, match="out of data bounds"):
        generate([[config.source_vocabulary_size]], [1])
    if config.positions != "relative":  # those have no end
        too_long = config.max_length + 1
        with pytest.raises(Exception, match=r"Add|broadcast"):
            generate(np.full((1, too_long), 3), [too_long])


def test_the_inputs_and_outputs_are_the_tables(generate: Generate) -> None:
    types = {"int64": "tensor(int64)", "float32": "tensor(float)"}
    for found, specs in (
        (generate.session.get_inputs(), graph.generate_inputs()),
        (generate.session.get_outputs(), graph.generate_outputs()),
    ):
        assert [(v.name, v.type, v.shape) for v in found] == [(s.name, types[s.dtype], [*s.axes]) for s in specs]


def test_the_step_runs_in_one_loop_with_caches_that_grow(exported: Exported, path: Path) -> None:
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", graph.OPSET)]
    (loop,) = [node for node in model.graph.node if node.op_type == "Loop"]
    (body,) = [attribute.g for attribute in loop.attribute if attribute.name == "body"]
    layers = exported.model.config.decoder_layers
    counts = Counter(node.op_type for node in body.node)
    assert counts["TensorScatter"] == 0
    caches = {value.name for value in body.input[6:]}
    assert len([n for n in body.node if n.op_type == "Concat" and n.input[0] in caches]) == len(caches) == 2 * layers
    assert counts["Attention"] == 2 * layers
    # The encoder, with the cross-attention keys and values of every layer, runs once.
    outside = Counter(node.op_type for node in model.graph.node)
    assert outside["Attention"] == exported.model.config.encoder_layers
    layer = 6 + exported.model.config.gated_feed_forward
    assert outside["Gemm"] == layer * exported.model.config.encoder_layers + 2 * layers


def test_nothing_is_there_twice_or_for_nothing(exported: Exported, path: Path) -> None:
    model = onnx.load(path)
    (body,) = [a.g for node in model.graph.node for a in node.attribute if a.name == "body"]
    names = [v.name for g in (model.graph, body) for v in (*g.initializer, *g.input)]
    names += [name for g in (model.graph, body) for node in g.node for name in node.output]
    assert len(names) == len(set(names)), "a name within the Loop must not hide one outside it"
    used = {name for g in (model.graph, body) for node in g.node for name in node.input}
    assert {t.name for g in (model.graph, body) for t in g.initializer} <= used
    used |= {value.name for g in (model.graph, body) for value in g.output}
    assert [node.name for g in (model.graph, body) for node in g.node if not used & set(node.output)] == []
    large = [t for g in (model.graph, body) for t in g.initializer if t.ByteSize() > 1024]
    assert len({t.raw_data for t in large}) == len(large)
    weights = (exported.folder / graph.WEIGHTS).stat().st_size
    assert path.stat().st_size < weights + 200_000


def test_onnx_runtime_has_nothing_to_warn_of(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Generate(path)([[4, 5, 2]], [3])
    assert capfd.readouterr().err == ""


def test_the_weights_may_stay_in_their_file(exported: Exported, path: Path, tmp_path: Path) -> None:
    (tmp_path / "beside").mkdir()
    beside, weights = tmp_path / "beside" / graph.GENERATE, tmp_path / "beside" / graph.WEIGHTS
    shutil.copy(exported.folder / graph.WEIGHTS, weights)
    write_graph(build(exported.folder, exported), beside, weights_inside=False)
    assert beside.stat().st_size < 100_000 + 4 * exported.model.config.target_vocabulary_size  # the bias was eased
    model = onnx.load(beside, load_external_data=False)
    (body,) = [a.g for node in model.graph.node for a in node.attribute if a.name == "body"]
    # ONNX Runtime's web build does not find weights files for a Loop's body.
    assert not [t.name for t in body.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    found = Generate(beside)(sources(exported), LENGTHS)
    for one, other in zip(found, Generate(path)(sources(exported), LENGTHS), strict=True):
        np.testing.assert_array_equal(one, other)
    weights.unlink()
    with pytest.raises(Exception, match=graph.WEIGHTS):
        Generate(beside)


def test_two_makings_are_the_same(export_configuration: Any, tmp_path: Path) -> None:
    exported = export_configuration("paper")
    for name in "ab":
        write_graph(build(exported.folder, exported), tmp_path / name, weights_inside=True)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def quantize_by_hand(model: ir.Model, name: str) -> None:
    """Weights as int8 with one scale: what ONNX Runtime fuses with the MatMul behind it, if it finds both."""
    for layer in linears(model, name):
        weight = layer.weight()
        scale = np.full((weight.shape[0] // 16, weight.shape[1]), np.abs(weight).max() / 127, np.float32)
        numbers = add_initializer(model, f"{layer.name}.numbers", np.round(weight / scale[0, 0]).astype(np.int8))
        node = ir.node("DequantizeLinear", [numbers, add_initializer(model, f"{layer.name}.scale", scale)],
                       {"axis": 0, "block_size": 16}, name=f"{layer.name}.dequantize")  # fmt: skip
        node.outputs[0].name = node.name
        layer.node.graph.insert_before(layer.node, node)
        layer.replace(layer.input, node.outputs[0])


@pytest.fixture
def quantised(export_configuration: Any, tmp_path: Path) -> tuple[Exported, Path]:
    """A configuration, and the folder of its graphs with eight-bit weights."""
    exported, folder = export_configuration("paper"), tmp_path / "quantised"
    folder.mkdir()
    weights = WeightsFile(folder / graph.WEIGHTS)
    for file in (graph.ENCODER, graph.DECODER_STEP):
        model = read_graph(exported.folder / file)
        if file == graph.DECODER_STEP:
            ease_ending(model, exported)
        quantize_by_hand(model, file.removesuffix(".onnx"))
        weights.write(model, folder / file)
    return exported, folder


def test_quantised_weights_stay_where_onnx_runtime_fuses_them(quantised: tuple[Exported, Path], tmp_path: Path) -> None:
    exported, folder = quantised
    write_graph(build(folder, exported, eased=True), tmp_path / "g.onnx", weights_inside=True)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 3  # what is optimised for this machine should stay on it
    onnxruntime.InferenceSession(tmp_path / "g.onnx", options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(tmp_path / "optimised.onnx").graph.node
    (body,) = [a.g for node in nodes for a in node.attribute if a.name == "body"]
    assert Counter(n.op_type for n in body.node)["MatMulNBits"] >= 6 * exported.model.config.decoder_layers

    manifest = exported.bundle.manifest
    runtime = OnnxModel(exported.bundle, folder=folder, threads=1)
    options = DecodeOptions(max_decoding_length=LONGEST, return_end_token=True)
    inputs = [ids[:length].tolist() for ids, length in zip(sources(exported), LENGTHS, strict=True)]
    results = decode(runtime, inputs, options, manifest.special_ids)
    ids, lengths, _ = Generate(tmp_path / "g.onnx")(sources(exported), LENGTHS)
    assert rows(ids, lengths) == [result.hypotheses[0].tokens for result in results]
