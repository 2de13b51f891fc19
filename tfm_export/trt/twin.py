"""The very graphs that were compiled, decoded on the CPU: what TensorRT was given says what PyTorch says.

No kernel of the GPU is proven by that. But whatever was done to the graphs on their way to TensorRT, from zero points
to padded heads, is done to what is decoded here; every result is rounded to the type that it has in the engine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from tfm_export import graph
from tfm_export.bundle import GOLDEN, Bundle
from tfm_export.errors import NumericError, ParityError
from tfm_export.graph_files import WeightsFile, read_graph
from tfm_export.passes.twin import float32_twin
from tfm_export.precision import PRECISIONS, Compute, Precision
from tfm_export.progress import Progress
from tfm_export.runtime.cpu.onnx_runtime import OnnxModel
from tfm_export.trt.network_source import NetworkSource
from tfm_export.verify import GenerationComparison, compare_generations, read_golden

MOST_INPUTS = 200  # int8 in the form that TensorRT wants is slow on CPUs


def verify_sources(
    bundle: Bundle,
    sources: Sequence[NetworkSource],
    folder: Path,
    *,
    variant: str,
    compute: Compute,
    threads: int | None,
    progress: Progress,
) -> list[GenerationComparison]:
    """Decode the golden inputs with the graphs that TensorRT is given, and hold every token to PyTorch's.

    Args:
        bundle: with the golden inputs.
        sources: the graphs: the encoder's, and decoder steps' that differ in their capacity.
        folder: where they were written to.
        variant: the precision.
        compute: what is computed in where nothing is quantised.
        threads: to compute with; None for the CPUs this process may use.
        progress: told what begins.

    Raises:
        ParityError: too many generations differ, or a number is not finite.
    """
    manifest, golden = bundle.manifest, read_golden(bundle, GOLDEN)[:MOST_INPUTS]
    precision, float_type = _needed(bundle, variant, compute), PRECISIONS[compute].float_type
    with compiled_model(bundle, sources, folder, compute=compute, threads=threads) as model:
        try:
            found = compare_generations(
                model, golden, manifest.special_ids, manifest.golden, precision, lambda what: progress(f"twin: {what}")
            )
        except NumericError as problem:
            raise ParityError(
                [f"the graphs for TensorRT: {text}" for text in problem.problems],
                f"--compute bf16, which has the range of float32: numbers leave that of {float_type}",
            ) from problem
    problems = [
        f"the graphs for TensorRT, {c.name}: {c.agreement:.1%} of {c.count} inputs agree, {c.needed:.0%} are needed"
        for c in found
        if not c.passed
    ]
    if problems:
        raise ParityError(problems, "--compute bf16, or another precision; --no-verify builds it all the same")
    return found


@contextmanager
def compiled_model(
    bundle: Bundle,
    sources: Sequence[NetworkSource],
    folder: Path,
    *,
    compute: Compute,
    threads: int | None,
) -> Iterator[OnnxModel]:
    """The graphs that TensorRT is given as a step model of the CPU, closed when the block ends.

    Its capacity is free again: graphs of other capacities differ in nothing else.
    """
    encoder, step = sources[0], sources[-1]
    with tempfile.TemporaryDirectory() as temporary:
        target = Path(temporary)
        weights = WeightsFile(target / graph.WEIGHTS)
        for source, file in ((encoder, graph.ENCODER), (step, graph.DECODER_STEP)):
            model = read_graph(folder / source.file)
            _name_axes(model, source)
            if compute != "fp32":
                float32_twin(model)
            _keep_infinities(model)
            weights.write(model, target / file)
        wide = bundle.manifest.dimensions.padded(PRECISIONS[compute].float_type)
        loaded = OnnxModel(
            Bundle(bundle.path, replace(bundle.manifest, dimensions=wide)), folder=target, threads=threads
        )
        try:
            yield loaded
        finally:
            loaded.close()


def _name_axes(model: ir.Model, source: NetworkSource) -> None:
    """Give inputs and outputs the axes of the table again."""
    for values, specs in ((model.graph.inputs, source.inputs), (model.graph.outputs, source.outputs)):
        for value, spec in zip(values, specs, strict=True):
            assert value.name == spec.name
            value.shape = ir.Shape(spec.axes)
    for node in model.graph:  # what was known of a capacity holds no more
        if node.op_type == "TensorScatter":
            node.outputs[0].shape = node.inputs[0].shape if node.inputs[0] is not None else None


def _keep_infinities(model: ir.Model) -> None:
    """Make what was infinite, or not a number, before it was quantised not a number afterwards.

    Integers have neither, so what overflows would go on as their largest number, and nobody would see it: x - x is 0
    for every other number.
    """
    for node in [*model.graph]:
        if node.op_type != "QuantizeLinear":
            continue
        x = node.inputs[0]
        assert x is not None
        for dequantize in [*node.outputs[0].consumers()]:
            numbers = dequantize.outputs[0]
            readers = [*numbers.uses()]
            zero = ir.node("Sub", [x, x], name=f"{numbers.name}_zero")
            checked = ir.node("Add", [numbers, zero.outputs[0]], name=f"{numbers.name}_checked")
            for made in (zero, checked):
                made.outputs[0].name, made.outputs[0].shape, made.outputs[0].dtype = made.name, x.shape, x.dtype
            model.graph.insert_after(dequantize, [zero, checked])
            for reader, index in readers:
                reader.replace_input_with(index, checked.outputs[0])


def _needed(bundle: Bundle, variant: str, compute: Compute) -> Precision:
    """How much must agree: what the variant was accepted with, less what computing in 16 bits may cost.

    Where the golden inputs are random ids, rounding may change what is made of them, and nothing is demanded.
    """
    precision = PRECISIONS[variant]
    if variant == "fp32":
        return precision
    accepted = bundle.manifest.variants[variant].get("agreement")
    needed = precision.agreement if accepted is None else min(precision.agreement, float(accepted))
    if precision.quantized:
        needed -= 1 - PRECISIONS[compute].agreement
    if bundle.manifest.golden.get("synthetic", True):
        needed = 0.0
    return replace(precision, agreement=needed, batch_invariant=False)
