"""Whether generate.onnx gives what it should for the golden inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tfm_export.bundle import GOLDEN, Bundle
from tfm_export.decoding import DecodeOptions, Hypothesis, generate
from tfm_export.graph import DECODER_STEP, GENERATE, generate_inputs, generate_outputs
from tfm_export.precision import PRECISIONS
from tfm_export.progress import Progress
from tfm_export.runtime.cpu.onnx_runtime import OnnxModel, load_session
from tfm_export.runtime.cpu.saturation import one_session_has_both
from tfm_export.runtime.onnx_sessions import run_feeds
from tfm_export.runtime.threads import threads_to_use
from tfm_export.runtime.variant_files import VariantFiles
from tfm_export.verify.golden import Golden, compare_search, read_golden
from tfm_export.verify.report import GenerationComparison

# Sums in another order round otherwise, and an activation that is rounded to 8 bits may then be another. Of 200 words
# of the g2p model that changed none in w8, int8 and fp16, and one in w4. Of a few inputs, one may differ.
LEAST_AS_OWN = 0.97


class GenerateModel:
    """generate.onnx on ONNX Runtime's CPU provider, called as any language would call it.

    Args:
        path: the graph.
        bundle: what it belongs to.
        variant: of its numbers.
        threads: threads an operator may use; None for the CPUs this process may use.

    Raises:
        BundleError: it does not load, or its inputs and outputs are not those of the graph table.
        RequestError: threads is less than 1 or more than can be started.
    """

    def __init__(self, path: Path, bundle: Bundle, variant: str, *, threads: int | None = None) -> None:
        wide_sums = False if one_session_has_both(bundle, variant) else None
        files = VariantFiles(bundle, variant, folder=path.parent, graphs=[path.name], copy=False)
        self._session = load_session(
            files, path.name, generate_inputs(), generate_outputs(), threads_to_use(threads), wide_sums=wide_sums
        )
        files.close()
        self._limits, self._special = bundle.manifest.limits, bundle.manifest.special_ids

    def decode(
        self, sources: Sequence[Sequence[int]], batch: int, columns: int = 0, *, max_length: int
    ) -> list[Hypothesis]:
        """Decode sources.

        Args:
            sources: ids, exactly as the encoder gets them.
            batch: how many at once.
            columns: of padding, beside what the longest source of a batch needs, as far as the model takes it.
            max_length: the longest target, end token included.

        Returns:
            A hypothesis each, its end token kept; its score is the sum of log-probabilities.
        """
        found = []
        for start in range(0, len(sources), batch):
            rows = sources[start : start + batch]
            lengths = np.array([len(row) for row in rows])
            size = min(int(lengths.max()) + columns, self._limits.max_source_length)
            source_ids = np.full((len(rows), size), self._special.for_sources.pad, np.int64)
            for row, ids in zip(source_ids, rows, strict=True):
                row[: len(ids)] = ids
            found += self._run(source_ids, lengths, max_length)
        return found

    def _run(self, source_ids: NDArray[np.int64], lengths: NDArray[np.int64], max_length: int) -> list[Hypothesis]:
        feeds = {"source_ids": source_ids, "source_lengths": lengths, "max_length": np.array(max_length, np.int64)}
        ids, lengths, scores = run_feeds(self._session, None, feeds, GENERATE)
        return [
            Hypothesis(
                tokens=row[:length].tolist(),
                score=float(score),
                log_probs=None,
                finished=bool(length) and int(row[length - 1]) == self._special.eos,
            )
            for row, length, score in zip(ids, lengths.tolist(), scores, strict=True)
        ]


def compare_generate_graph(
    bundle: Bundle,
    variant: str,
    *,
    path: Path | None = None,
    threads: int | None = None,
    progress: Progress = lambda _: None,
) -> list[GenerationComparison]:
    """Decode the golden inputs with generate.onnx one by one, in batches and in padded batches.

    fp32 is held to PyTorch's tokens. A precision that rounds was judged when it was made: it is held to what its own
    two graphs give, which says more of this one.

    Args:
        bundle: an open bundle.
        variant: the precision.
        path: the graph, if it is not part of the bundle yet.
        threads: threads an operator may use; None for the CPUs this process may use.
        progress: told what begins.

    Raises:
        BundleError: the bundle has no golden inputs, or a graph does not load or is not of the expected form.
        RequestError: threads is less than 1 or more than can be started.
    """
    facts, precision, name = bundle.manifest.golden, PRECISIONS[variant], GENERATE
    model = GenerateModel(path or bundle.variant_path(variant) / GENERATE, bundle, variant, threads=threads)
    golden = read_golden(bundle, GOLDEN)
    if precision.agreement < 1:
        progress(f"decoding golden inputs with {DECODER_STEP}")
        golden = _own_golden(bundle, variant, golden, threads)
        precision = replace(precision, agreement=max(min(LEAST_AS_OWN, 1 - 1 / len(golden)), 0.5))
        name = f"{GENERATE} as {DECODER_STEP}"

    def decode(sources: Sequence[Sequence[int]], batch: int, columns: int) -> list[Hypothesis]:
        return model.decode(sources, batch, columns, max_length=facts["max_length"])

    return compare_search(name, golden, decode, facts, precision, progress)


def _own_golden(bundle: Bundle, variant: str, golden: Sequence[Golden], threads: int | None) -> list[Golden]:
    """Golden inputs whose truth is what a variant's encoder.onnx and decoder_step.onnx give."""
    options = DecodeOptions(
        max_decoding_length=bundle.manifest.golden["max_length"], return_end_token=True, max_batch_size=1
    )
    model = OnnxModel(bundle, variant=variant, threads=threads)
    try:
        results = generate(model, [g.source_ids for g in golden], options, bundle.manifest.special_ids)
    finally:
        model.close()
    found = [result.hypotheses[0].tokens for result in results]
    return [
        replace(g, tokens=tokens, margins=[math.inf] * len(tokens)) for g, tokens in zip(golden, found, strict=True)
    ]
