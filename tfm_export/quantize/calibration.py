"""Calibration: what the fp32 graphs compute on real inputs, while they decode them.

Samples are what fp32 itself decodes for real sources: what greedy search and beams feed the decoder with. The graphs
run over them with all their intermediate values as outputs. A step that takes a whole target under a causal mask
computes the very numbers of its decoding, so that a sample costs one step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from tfm_export.bundle import Bundle
from tfm_export.decoding import DecodeOptions, generate
from tfm_export.errors import NumericError, RequestError
from tfm_export.graph import DECODER_STEP, DECODER_STEP_ATTENTION, ENCODER, Dimensions, cross_names, self_cache_names
from tfm_export.graph_files import read_graph
from tfm_export.passes.linears import linears
from tfm_export.progress import Progress
from tfm_export.quantize.histogram import Collector, Observation, thresholds
from tfm_export.runtime.cpu.onnx_runtime import OnnxModel, onnxruntime
from tfm_export.runtime.onnx_sessions import run_feeds, session_options
from tfm_export.runtime.threads import usable_cpus

__all__ = ["CalibrationSample", "Observation", "decode_samples", "observe", "thresholds"]

MOST_TOKENS = 512  # that run at once: a value of theirs has 1 MB in a model of 512, logits of 32,000 have 65 MB

Array = NDArray[Any]

# What they give are the numbers of their first input, each once.
_END_MASKS = frozenset({"Attention", "LogSoftmax", "Softmax"})  # minus infinity becomes a weight of 0 there
_MASK_SIZE = 1 << 20  # numbers of a constant that is looked through for infinities; weights have none
_REARRANGE = frozenset({"Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


@dataclass(frozen=True)
class CalibrationSample:
    """One source and one way to decode it.

    Attributes:
        source_ids: what the encoder reads.
        target_ids: what the decoder reads: the start token, and all that follows but the last token.
    """

    source_ids: list[int]
    target_ids: list[int]


def decode_samples(
    bundle: Bundle,
    sources: Sequence[list[int]],
    *,
    beam_size: int = 4,
    max_length: int,
    threads: int | None = None,
    progress: Progress = lambda _: None,
) -> list[CalibrationSample]:
    """Decode sources with the fp32 graphs.

    Args:
        bundle: with the fp32 graphs.
        sources: ids, as the encoder reads them; of equal ones, one.
        beam_size: of the beam search whose hypotheses, all of them, join those of greedy search; 1 for greedy alone.
        max_length: the longest target.
        threads: for the runtime.
        progress: told what begins.

    Returns:
        The samples of each source in turn, greedy first, each once.

    Raises:
        RequestError: a source that the model cannot take, or a max_length that it cannot reach.
    """
    sources = [list(source) for source in dict.fromkeys(map(tuple, sources))]
    manifest = bundle.manifest
    searches = [DecodeOptions(max_decoding_length=max_length, return_end_token=True)]
    if beam_size > 1:
        searches.append(
            DecodeOptions(
                max_decoding_length=max_length,
                return_end_token=True,
                beam_size=beam_size,
                num_hypotheses=beam_size,
                length_penalty=manifest.generation.length_penalty,
            )
        )
    model = OnnxModel(bundle, threads=threads)
    targets: list[dict[tuple[int, ...], None]] = [{} for _ in sources]
    for options in searches:
        progress(f"decoding {len(sources):,} sources with fp32, beam size {options.beam_size}")
        for i, result in enumerate(generate(model, sources, options, manifest.special_ids)):
            targets[i] |= dict.fromkeys((manifest.special_ids.bos, *h.tokens[:-1]) for h in result.hypotheses)
    model.close()
    return [
        CalibrationSample(source, [*target]) for source, found in zip(sources, targets, strict=True) for target in found
    ]


def observe(
    bundle: Bundle,
    samples: Sequence[CalibrationSample],
    values: Collection[str] | None = None,
    *,
    threads: int | None = None,
    progress: Progress = lambda _: None,
) -> dict[str, Observation]:
    """Run the fp32 graphs over samples and note how large their values get.

    The runs have no padding: sources of one length are encoded together, and their targets of one length decoded
    together. The same samples give the same observations, in whatever order they come.

    Args:
        bundle: with the fp32 graphs.
        samples: what to run; every source is encoded once, and each of its targets decoded once.
        values: names of values, "graph/value", such as "encoder/layer_norm" or "decoder_step/relu_1"; None for every
            float32 value that the graphs compute or read. The graph with attention weights, if the bundle has it, is
            one of them.
        threads: for the runtime; None for the CPUs this process may use.
        progress: told what begins.

    Returns:
        An observation of each value. What linear layers read has a histogram; in the graph with attention weights it is
        the decoder step's own, so that both are quantised alike.

    Raises:
        RequestError: there are no samples, a sample is beyond the model's limits, or a value is none of the graphs'.
        NumericError: the fp32 graphs give numbers that are not finite.
    """
    _check_samples(bundle, samples)
    folder = bundle.variant_path("fp32")
    files = [file for file in (ENCODER, DECODER_STEP, DECODER_STEP_ATTENTION) if (folder / file).is_file()]
    probes = [_Probe(folder / file, threads or usable_cpus()) for file in files]
    known = {f"{probe.name}/{value}" for probe in probes for value in probe.aliases}
    if values is not None and (unknown := sorted(set(values) - known)):
        raise RequestError(f"the fp32 graphs have no float32 value {', '.join(unknown)}")
    for probe in probes:
        probe.start([v for v in probe.aliases if values is None or f"{probe.name}/{v}" in values])
    encoder, *steps = probes
    total, done = len({tuple(sample.source_ids) for sample in samples}), 0
    for sources in _batches(samples):
        progress(f"running the fp32 graphs over {total:,} sources, {done:,} done")
        cross = encoder.run(_encoder_feeds(sources.source_ids), cross_names(bundle.manifest.dimensions))
        for rows, target_ids in sources.targets():
            feeds = _step_feeds(target_ids, {n: a[rows] for n, a in cross.items()}, bundle.manifest.dimensions)
            for step in steps:
                if step.watches:
                    step.run(feeds)
        done += len(sources.source_ids)
    return _share_with_attention({f"{p.name}/{v}": o for p in probes for v, o in p.observations().items()}, probes)


def _check_samples(bundle: Bundle, samples: Sequence[CalibrationSample]) -> None:
    if not samples:
        raise RequestError("there are no samples to observe", "real sources")
    limits, sizes = bundle.manifest.limits, bundle.manifest.dimensions
    problems = []
    for what, sequences, longest, size in (
        ("source", [t.source_ids for t in samples], limits.max_source_length, sizes.source_vocabulary_size),
        ("target", [t.target_ids for t in samples], limits.max_target_length, sizes.target_vocabulary_size),
    ):
        lengths, ids = {len(s) for s in sequences}, [i for s in sequences for i in s]
        if min(lengths) < 1 or max(lengths) > longest:
            problems.append(f"a {what} has 1 to {longest} tokens, found {min(lengths)} to {max(lengths)}")
        if ids and not 0 <= min(ids) <= max(ids) < size:
            problems.append(f"{what} ids are from 0 to {size - 1}, found {min(ids)} to {max(ids)}")
    if problems:
        raise RequestError(problems, "samples that decode_samples gave for this bundle")


@dataclass(frozen=True)
class _Batch:
    """Sources of one length, with the targets of each."""

    source_ids: NDArray[np.int64]
    of_each: list[list[tuple[int, ...]]]

    def targets(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Targets of one length [B, T], and which source each belongs to [B]; few enough to run at once."""
        by_length: dict[int, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
        for row, targets in enumerate(self.of_each):
            for target in targets:
                by_length[len(target)].append((row, target))
        for length, pairs in sorted(by_length.items()):
            size = max(1, MOST_TOKENS // max(length, self.source_ids.shape[1]))
            for first in range(0, len(pairs), size):
                rows, some = zip(*pairs[first : first + size], strict=True)
                yield np.array(rows), np.array(some, np.int64)


def _batches(samples: Sequence[CalibrationSample]) -> Iterator[_Batch]:
    """The samples by source, the shortest first."""
    targets: dict[tuple[int, ...], set[tuple[int, ...]]] = defaultdict(set)
    for sample in samples:
        targets[tuple(sample.source_ids)].add(tuple(sample.target_ids))
    by_length: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for source in sorted(targets):
        by_length[len(source)].append(source)
    for length, sources in sorted(by_length.items()):
        size = max(1, MOST_TOKENS // length)
        for first in range(0, len(sources), size):
            some = sources[first : first + size]
            yield _Batch(np.array(some, np.int64), [sorted(targets[source]) for source in some])


def _encoder_feeds(source_ids: NDArray[np.int64]) -> dict[str, Array]:
    return {"source_ids": source_ids, "source_mask": np.ones(source_ids.shape, np.bool_)}


def _step_feeds(target_ids: NDArray[np.int64], cross: dict[str, Array], dimensions: Dimensions) -> dict[str, Array]:
    """A step that takes whole targets [B, T] into caches that are just large enough."""
    batch, length = target_ids.shape
    cache = np.zeros((batch, dimensions.heads, length, dimensions.head_size), np.float32)
    source = next(iter(cross.values())).shape[2]
    return {
        "target_ids": target_ids,
        "positions": np.tile(np.arange(length), (batch, 1)),
        "write_index": np.zeros(batch, np.int64),
        "self_mask": np.tile(np.tri(length, dtype=np.bool_), (batch, 1, 1, 1)),
        "source_mask": np.ones((batch, source), np.bool_),
        **dict.fromkeys(self_cache_names(dimensions), cache),
        **cross,
    }


def _masked(model: ir.Model) -> set[str]:
    """Values that may hold minus infinity, because a constant does: what fills masked positions, up to the softmax."""
    found = {
        value.name or ""
        for value in model.graph.initializers.values()
        if value.dtype == ir.DataType.FLOAT and value.const_value is not None and value.const_value.size <= _MASK_SIZE
        if np.isneginf(value.const_value.numpy()).any()
    }
    for node in model.graph:
        if node.op_type not in _END_MASKS and any(v is not None and v.name in found for v in node.inputs):
            found |= {value.name or "" for value in node.outputs}
    return found


class _Probe:
    """A graph of which every float32 value can be watched.

    Attributes:
        name: of the graph.
        aliases: every float32 value that it reads or computes, and the value that has the same numbers and is watched.
        layers: the value that each linear layer reads.
    """

    def __init__(self, path: Path, threads: int) -> None:
        self.name, self._folder, self._threads = path.stem, path.parent, threads
        self._model = read_graph(path)
        graph = self._model.graph
        self.aliases: dict[str, str] = {
            v.name or "": v.name or "" for v in graph.inputs if v.dtype == ir.DataType.FLOAT
        }
        for node in graph:
            for value in node.outputs:
                if value.dtype == ir.DataType.FLOAT:
                    first = node.inputs[0] if node.op_type in _REARRANGE else None
                    name = value.name or ""
                    self.aliases[name] = self.aliases.get(first.name or "", name) if first is not None else name
        # Keys and values are written to a cache that was empty: what is in it are what was written.
        self.aliases |= {v: f"{v}_out" for v in self.aliases if f"{v}_out" in self.aliases}
        self.layers = {
            layer.name.partition("/")[2]: layer.input.name or "" for layer in linears(self._model, self.name)
        }
        self._inputs, self._masked = {value.name or "" for value in graph.inputs}, _masked(self._model)
        self._largest: dict[str, float] = {}
        self._collectors: dict[str, Collector] = {}

    @property
    def watches(self) -> bool:
        """Whether any value is wanted of this graph."""
        return bool(self._largest)

    def start(self, values: Collection[str]) -> None:
        """Load the graph with the wanted values as outputs; its weights are read where they lie."""
        self._values = list(values)
        wanted = {self.aliases[value] for value in values}
        watched = [value for value in self.aliases if value in wanted]  # in the order of the graph
        self._largest = dict.fromkeys(watched, 0.0)
        read = {self.aliases[value] for value in self.layers.values()}
        self._collectors = {value: Collector() for value in watched if value in read}
        graph = self._model.graph
        there = {value.name for value in (*graph.inputs, *graph.outputs)}
        computed = [value for node in graph for value in node.outputs]
        graph.outputs.extend(value for value in computed if value.name in wanted - there)
        options = session_options(self._threads)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(self._folder))
        graph_bytes = ir.serde.serialize_model(self._model).SerializeToString()
        self._session = onnxruntime.InferenceSession(graph_bytes, options, providers=["CPUExecutionProvider"])

    def run(self, feeds: dict[str, Array], wanted: Collection[str] = ()) -> dict[str, Array]:
        """Run the graph once, note what is watched, and give the wanted outputs."""
        computed = [value for value in self._largest if value not in self._inputs]
        names = list(dict.fromkeys([*computed, *wanted]))
        outputs = dict(zip(names, run_feeds(self._session, names, feeds, self.name), strict=True))
        broken = []
        for value in self._largest:
            numbers = outputs[value] if value in outputs else feeds[value]
            if value in self._masked:
                numbers = np.where(np.isneginf(numbers), 0, numbers)
            magnitudes = np.abs(numbers)
            largest = float(magnitudes.max(initial=0))
            if not np.isfinite(largest):
                broken.append(value)
                continue
            self._largest[value] = max(self._largest[value], largest)
            if value in self._collectors:
                self._collectors[value].add(magnitudes)
        if broken:
            raise NumericError(
                f"the fp32 graph {self.name} gives numbers that are not finite; {broken[0]} is the first, and "
                f"{len(broken) - 1} values that follow have some",
                "tfm-export verify, which tells whether the bundle is sound",
            )
        return {name: outputs[name] for name in wanted}

    def observations(self) -> dict[str, Observation]:
        """Of every value that was asked for."""
        found = {
            value: Observation(largest, c.histogram() if (c := self._collectors.get(value)) else None)
            for value, largest in self._largest.items()
        }
        return {value: found[self.aliases[value]] for value in self._values}


def _share_with_attention(observations: dict[str, Observation], probes: Sequence[_Probe]) -> dict[str, Observation]:
    """Let the layers of decoder_step_attention have the observations of decoder_step's."""
    if len(probes) == 3:
        step, attention = probes[1:]
        for layer, value in attention.layers.items():
            name = f"{attention.name}/{value}"
            if name in observations:
                observations[name] = observations.get(f"{step.name}/{step.layers[layer]}", observations[name])
    return observations
