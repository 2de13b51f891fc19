"""A variant's model on the CPU, to be judged: the variant itself, or its float32 twin where the CPU lacks kernels."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tfm_export.bundle import Bundle
from tfm_export.extras import require
from tfm_export.graph import DECODER_STEP, ENCODER, WEIGHTS
from tfm_export.precision import PRECISIONS
from tfm_export.runtime.cpu.onnx_runtime import OnnxModel

CPU = "onnxruntime-cpu"
TWIN = "onnxruntime-cpu, float32 twin"


@contextmanager
def cpu_model(
    bundle: Bundle, variant: str, *, folder: Path | None = None, threads: int | None = None
) -> Iterator[OnnxModel]:
    """A variant's step model on ONNX Runtime's CPU provider, closed when the block ends.

    ONNX Runtime's CPU has no kernels for bfloat16, and leaves out roundings of float16: such variants are judged by a
    float32 graph that rounds every value as 16-bit kernels do, see `tfm_export.passes.twin`.

    Args:
        bundle: an open bundle.
        variant: the precision.
        folder: where its graphs are, if it is not part of the bundle yet.
        threads: threads an operator may use; None for the CPUs this process may use.

    Raises:
        BackendUnavailable: a twin is needed and the package onnx is missing.
        BundleError: the bundle has no such variant, or a graph does not load.
    """
    if PRECISIONS[variant].float_type == "float32":
        model = OnnxModel(bundle, variant=variant, folder=folder, threads=threads)
        try:
            yield model
        finally:
            model.close()
        return
    with tempfile.TemporaryDirectory() as temporary:
        _write_twin(folder or bundle.variant_path(variant), Path(temporary))
        model = OnnxModel(bundle, variant="fp32", folder=Path(temporary), threads=threads)
        try:
            yield model
        finally:
            model.close()


def _write_twin(folder: Path, target: Path) -> None:
    for module in ("onnx", "onnx_ir"):
        require(module, extra="quantize")
    from tfm_export.graph_files import WeightsFile, read_graph
    from tfm_export.passes.twin import float32_twin

    weights = WeightsFile(target / WEIGHTS)
    for name in (ENCODER, DECODER_STEP):
        weights.write(float32_twin(read_graph(folder / name)), target / name)
