"""Whether generate.onnx gives what PyTorch gave for the golden inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tfm_export.bundle import GOLDEN, Bundle
from tfm_export.decoding import Hypothesis
from tfm_export.graph import GENERATE, generate_inputs, generate_outputs
from tfm_export.precision import PRECISIONS
from tfm_export.runtime.onnx_runtime import load_session
from tfm_export.runtime.threads import threads_to_use
from tfm_export.verify.golden import compare_search, read_golden
from tfm_export.verify.report import GenerationComparison


class GenerateModel:
    """generate.onnx on ONNX Runtime's CPU provider, called as any language would call it.

    Args:
        path: the graph.
        bundle: what it belongs to.
        threads: threads an operator may use; None for the CPUs this process may use.

    Raises:
        BundleError: it does not load, or its inputs and outputs are not those of the graph table.
        RequestError: threads is less than 1 or more than can be started.
    """

    def __init__(self, path: Path, bundle: Bundle, *, threads: int | None = None) -> None:
        self._session = load_session(path, generate_inputs(), generate_outputs(), threads_to_use(threads))
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
            source_ids = np.full((len(rows), size), self._special.pad, np.int64)
            for row, ids in zip(source_ids, rows, strict=True):
                row[: len(ids)] = ids
            found += self._run(source_ids, lengths, max_length)
        return found

    def _run(self, source_ids: NDArray[np.int64], lengths: NDArray[np.int64], max_length: int) -> list[Hypothesis]:
        feeds = {"source_ids": source_ids, "source_lengths": lengths, "max_length": np.array(max_length, np.int64)}
        ids, lengths, scores = self._session.run(None, feeds)
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
    progress: Callable[[str], None] = lambda _: None,
) -> list[GenerationComparison]:
    """Decode the golden inputs with generate.onnx one by one, in batches and in padded batches.

    Args:
        bundle: an open bundle.
        variant: the precision.
        path: the graph, if it is not part of the bundle yet.
        threads: threads an operator may use; None for the CPUs this process may use.
        progress: told what begins.

    Raises:
        BundleError: the bundle has no golden inputs, or the graph does not load or is not of the expected form.
    """
    facts = bundle.manifest.golden
    model = GenerateModel(path or bundle.variant_path(variant) / GENERATE, bundle, threads=threads)

    def decode(sources: Sequence[Sequence[int]], batch: int, columns: int) -> list[Hypothesis]:
        return model.decode(sources, batch, columns, max_length=facts["max_length"])

    golden = read_golden(bundle, GOLDEN)
    return compare_search(GENERATE, golden, decode, facts, PRECISIONS[variant], progress)
