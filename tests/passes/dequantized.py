"""Quantised variants on disk, and the PyTorch model whose weights are what their integers stand for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import nn

from reference_model import Transformer
from tfm_export import graph
from tfm_export.graph_files import WeightsFile, read_graph

MODULES = {
    "query": "W_q",
    "key": "W_k",
    "value": "W_v",
    "output": "W_o",
    "expand": "W_1",
    "gate": "W_gate",
    "contract": "W_2",
}
NAMES = ("encoder", "decoder_step", "decoder_step_attention")


def write_variant(fp32: Path, target: Path, convert: Callable[[ir.Model, str], object]) -> Path:
    """Copy the graphs of a folder, each converted in place on the way."""
    target.mkdir()
    weights = WeightsFile(target / graph.WEIGHTS)
    for name in NAMES:
        if (fp32 / f"{name}.onnx").is_file():
            model = read_graph(fp32 / f"{name}.onnx")
            convert(model, name)
            weights.write(model, target / f"{name}.onnx")
    return target


def constants(path: Path) -> dict[str, NDArray[np.float64]]:
    """The constants of a graph by name, in float64."""
    initializers = read_graph(path).graph.initializers.items()
    return {name: v.const_value.numpy().astype(np.float64) for name, v in initializers if v.const_value is not None}


def spread(numbers: NDArray[np.float64], scale: NDArray[np.float64], block: int) -> NDArray[np.float64]:
    """numbers [K, N] x scale [ceil(K / block), N], each scale for `block` rows."""
    return np.array([row * scale[k // block] for k, row in enumerate(numbers)])


def dequantized_model(model: Transformer, folder: Path, block: int = 128) -> Transformer:
    """A float64 copy of a model, with the weights and embedding tables that a variant's integers stand for.

    Args:
        model: the one that was exported.
        folder: of the variant.
        block: rows that share a scale.
    """
    model = copy.deepcopy(model).double().eval()
    stacks = {"encoder": model.encoder_layers, "decoder_step": model.decoder_layers}
    for name, layers in stacks.items():
        found = constants(folder / f"{name}.onnx")
        for constant, numbers in found.items():
            layer, _, ending = constant.rpartition(".weight_")
            if ending in {"int8", "int4"}:
                weight = spread(numbers, found[f"{layer}.weight_scale"], block)
                _linear(model, layers, layer).weight = nn.Parameter(torch.from_numpy(weight.T.copy()))
            elif ending == "rows":
                rows = spread(numbers.T, found[f"{layer}.weight_rows_scale"].T, block)
                embedding = model.source_embedding if name == "encoder" else model.target_embedding
                if embedding is model.source_embedding and name == "decoder_step":  # one module, from now on two
                    embedding = model.target_embedding = copy.deepcopy(embedding)
                embedding.weight = nn.Parameter(torch.from_numpy(rows.T.copy()))
                if f"{layer}.weight_scale" not in found and layer == "projection":
                    model.projection.weight = nn.Parameter(torch.from_numpy(rows.T.copy()))
    return model


def _linear(model: Transformer, layers: nn.ModuleList, name: str) -> nn.Linear:
    """The PyTorch layer that a graph's "layers.0.self_attention.query", "cross.0.key" or "projection" is."""
    *path, last = name.split(".")
    if last == "projection":
        return model.projection
    if path[0] == "cross":
        attention = model.decoder_layers[int(path[1])].cross_attention
        return getattr(attention, MODULES[last])
    part = getattr(layers[int(path[1])], path[2])
    return getattr(part, MODULES[last])
