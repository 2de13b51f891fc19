"""PyTorch modules to ONNX graphs. The only place that calls torch.onnx."""

from __future__ import annotations

import io
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.onnx._internal.exporter._capture_strategies import TorchExportNonStrictStrategy

from tfm_export.errors import ExportError
from tfm_export.export.size_guards import SizeGuards, users_place
from tfm_export.graph import IR_VERSION, OPSET, TensorSpec

_LONGEST_REASON = 400  # letters
HINT = (
    "sizes may come from shapes, but nothing may depend on the numbers in a tensor: torch.where instead of `if`, masks "
    "instead of slices, no .item() and no .tolist()"
)


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Silence what the exporter says about itself: missing torchvision, renamed axes, tree specs, dumps of graphs."""
    loggers = {logging.getLogger(name): logging.ERROR for name in ("torch.onnx", "torch.fx")}
    loggers[logging.getLogger("torch._guards")] = loggers[logging.getLogger("torch.export")] = logging.CRITICAL
    levels = {logger: logger.level for logger in loggers}
    for logger, level in loggers.items():
        logger.setLevel(level)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*axis name.*will not be used")
            warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def export_module(
    module: nn.Module,
    example: tuple[Any, ...],
    dynamic_shapes: tuple[Any, ...],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    largest: Mapping[str, int],
) -> ir.Model:
    """Trace a module.

    Args:
        module: what to export; it is put in evaluation mode.
        example: inputs of sizes above 1, of which each dynamic axis has one of its own.
        dynamic_shapes: as `torch.export` takes them.
        inputs: the names of the graph's inputs, in the order of the flattened example.
        outputs: names and axes of its outputs.
        largest: the largest size of an axis, by its name; others may be of any size.

    Returns:
        The model, its weights still those of the module.

    Raises:
        ExportError: the exporter failed, or what it traced does not hold for all sizes.
    """
    captured = _capture(module, example, dynamic_shapes, inputs, largest)
    try:
        with _quiet_exporter(), torch.no_grad():
            program = torch.onnx.export(
                captured,
                dynamo=True,
                opset_version=OPSET,
                verbose=False,
                input_names=[spec.name for spec in inputs],
                output_names=[spec.name for spec in outputs],
                dynamic_shapes=dynamic_shapes,
            )
    except torch.onnx.errors.OnnxExporterError as problem:
        raise ExportError(f"{type(module).__name__} cannot become a graph: {_reason(problem)}") from problem
    assert program is not None
    model = program.model
    model.ir_version = IR_VERSION
    _strip_traces(model)
    _write_biases(model)
    _name_axes(model, inputs, outputs)
    return model


def _capture(
    module: nn.Module,
    example: tuple[Any, ...],
    dynamic_shapes: tuple[Any, ...],
    inputs: Sequence[TensorSpec],
    largest: Mapping[str, int],
) -> ExportedProgram:
    """What torch.export makes of a module, if that holds for all sizes; see `export_module` for the arguments.

    The exporter's own second attempt, by another tracer, is left out: it mends little, and tells of no line.
    """
    tensors = torch.utils._pytree.tree_leaves(example)  # noqa: SLF001 (torch.export flattens with it)
    axes = {
        size: axis
        for tensor, spec in zip(tensors, inputs, strict=True)
        for size, axis in zip(tensor.shape, spec.axes, strict=True)
        if isinstance(axis, str)
    }
    guards, said = SizeGuards(axes), io.StringIO()
    with _quiet_exporter(), torch.no_grad(), guards.watch(), redirect_stderr(said):
        strategy: Any = TorchExportNonStrictStrategy()
        result = strategy(module.eval(), example, None, dynamic_shapes)
    problem = result.exception
    # What the user's code prints stays; PyTorch prints the whole graph, some of it several times.
    sys.stderr.write(said.getvalue().replace(f"{getattr(problem, 'partial_fx_graph', None)}\n", ""))
    guards.check(largest)
    if result.exported_program is None:
        place = users_place(traceback.extract_tb(problem.__traceback__))
        raise ExportError(
            f"{place or 'in the code of PyTorch or tfm-export'}\n  cannot become a graph: {_reason(problem)}", HINT
        ) from problem
    program: ExportedProgram = result.exported_program
    return program


def _reason(problem: BaseException) -> str:
    """What PyTorch says is wrong, without the graphs, stacks and links that it adds."""
    while problem.__cause__ is not None:
        problem = problem.__cause__
    text = str(problem).strip()
    paragraph = text.partition("\n\n")[0]
    return f"{type(problem).__name__}: {' '.join(paragraph.split())[:_LONGEST_REASON]}"


def _strip_traces(model: ir.Model) -> None:
    """Remove stack traces and module paths: they are of this machine, and make the file differ from run to run."""
    model.metadata_props.clear()
    model.doc_string = None
    for graph in model.graphs():
        graph.metadata_props.clear()
        graph.doc_string = None
        for node in graph:
            node.metadata_props.clear()
            node.doc_string = None
            for value in node.outputs:
                value.metadata_props.clear()
        for value in (*graph.inputs, *graph.initializers.values()):
            value.metadata_props.clear()


def _write_biases(model: ir.Model) -> None:
    """Give every Gemm a bias again: the exporter drops those of zeros, and all that is made of graphs looks for one."""
    for node in model.graph:
        weight = node.inputs[1] if node.op_type == "Gemm" else None
        if weight is None or len(node.inputs) > 2:
            continue
        assert weight.name is not None
        assert weight.shape is not None
        transposed = "transB" in node.attributes and node.attributes["transB"].as_int()
        size = weight.shape[0 if transposed else 1]
        assert isinstance(size, int)
        name = f"{weight.name.removesuffix('.weight')}.bias"
        bias = model.graph.initializers.get(name)  # of a layer that is called twice
        if bias is None:
            tensor = ir.tensor(np.zeros(size, np.float32), name=name)
            bias = ir.Value(name=name, shape=ir.Shape([size]), type=ir.TensorType(tensor.dtype), const_value=tensor)
            model.graph.register_initializer(bias)
        node.resize_inputs(3)
        node.replace_input_with(2, bias)


def _name_axes(model: ir.Model, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    """Give outputs the axes of the table, after checking that the exporter has kept every dynamic axis dynamic."""
    problems = []
    for value, spec in zip((*model.graph.inputs, *model.graph.outputs), (*inputs, *outputs), strict=True):
        found = () if value.shape is None else tuple(d if isinstance(d, int) else str(d.value) for d in value.shape)
        fixed = [
            f"axis {i} ({axis}) became {size}"
            for i, (axis, size) in enumerate(zip(spec.axes, found, strict=True))
            if isinstance(size, int) and size != axis
        ]
        if value.name != spec.name or fixed:
            problems.append(f"{spec.name}: expected {list(spec.axes)}, found {value.name} {list(found)} {fixed}")
        value.shape = ir.Shape(spec.axes)
    if problems:
        raise ExportError(
            problems, "sizes that come from the shapes of the inputs: an axis that must stay free became a number"
        )
