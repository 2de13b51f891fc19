"""PyTorch modules to ONNX graphs. The only place that calls torch.onnx."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from tfm_export.errors import ExportError
from tfm_export.graph import IR_VERSION, OPSET, TensorSpec


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Silence what the exporter says about itself: missing torchvision, renamed axes, tree specs."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*axis name.*will not be used")
            warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            yield
    finally:
        logger.setLevel(level)


def export_module(
    module: nn.Module,
    example: tuple[Any, ...],
    dynamic_shapes: tuple[Any, ...],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
) -> ir.Model:
    """Trace a module.

    Args:
        module: what to export; it is put in evaluation mode.
        example: inputs of any size above 1.
        dynamic_shapes: as `torch.export` takes them.
        inputs: the names of the graph's inputs, in the order of the flattened example.
        outputs: names and axes of its outputs.

    Returns:
        The model, its weights still those of the module.

    Raises:
        ExportError: the exporter failed, or fixed an axis that should be dynamic.
    """
    try:
        with _quiet_exporter(), torch.no_grad():
            program = torch.onnx.export(
                module.eval(),
                example,
                dynamo=True,
                opset_version=OPSET,
                verbose=False,
                input_names=[spec.name for spec in inputs],
                output_names=[spec.name for spec in outputs],
                dynamic_shapes=dynamic_shapes,
            )
    except torch.onnx.errors.OnnxExporterError as problem:
        raise ExportError(f"PyTorch could not export {type(module).__name__}: {problem}") from problem
    assert program is not None
    model = program.model
    model.ir_version = IR_VERSION
    _strip_traces(model)
    _write_biases(model)
    _name_axes(model, inputs, outputs)
    return model


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
        raise ExportError(problems, "report this: the exporter specialised an axis that must stay dynamic")
