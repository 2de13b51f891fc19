"""ONNX graphs on disk: several of them beside one file of weights that they share, and how large their numbers get."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import onnx
import onnx_ir as ir

from tfm_export.errors import BundleError
from tfm_export.pinned_folder import pinned_folder
from tfm_export.text_files import read_text

# Smaller tensors stay inside the graph: runtimes fold shape constants only if they can see them.
EXTERNAL_FROM_BYTES = 1024
ALIGNMENT = 64
RANGES = "ranges.json"


def read_graph(path: Path) -> ir.Model:
    """A graph from disk, its weights mapped into memory when they are looked at.

    Raises:
        BundleError: it is not an ONNX model.
    """
    try:
        return ir.load(path)
    except Exception as problem:  # protobuf's errors have no base class of their own
        raise BundleError(f"{path} is not an ONNX model: {problem}", "export the bundle again") from problem


def weight_bytes(model: ir.Model) -> int:
    """What a model's weights take, those of its subgraphs included."""
    tensors = (value.const_value for graph in model.graphs() for value in graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def write_graph(model: ir.Model, path: Path, *, weights_inside: bool) -> None:
    """Write a graph whose weights lie in a file of weights already.

    Args:
        model: the graph.
        path: its file, readable by every user.
        weights_inside: put the weights into it; otherwise it refers to the file of weights, which must lie beside it.
    """
    if weights_inside:
        model = ir.external_data.load_to_model(model)
    _write(model, path)


def _write(model: ir.Model, path: Path) -> None:
    path.write_bytes(ir.serde.serialize_model(model).SerializeToString(deterministic=True))
    with pinned_folder(path.parent) as folder:  # a name in UTF-8, which the checker wants
        onnx.checker.check_model(folder / path.name)
    os.chmod(path, 0o644)  # readable by the user that the service runs as


def write_ranges(ranges: Mapping[str, float], path: Path) -> None:
    """Write down how large the values of graphs get, to four digits.

    Args:
        ranges: the largest absolute value of each, by "graph/value".
        path: the file, readable by every user.
    """
    path.write_text(json.dumps({name: float(f"{r:.4g}") for name, r in ranges.items()}, indent=0), encoding="utf-8")
    os.chmod(path, 0o644)


def read_ranges(path: Path) -> dict[str, float]:
    """What `write_ranges` wrote.

    Raises:
        BundleError: the file is not of that form.
    """
    try:
        return {str(name): float(largest) for name, largest in json.loads(read_text(path)).items()}
    except (AttributeError, TypeError, ValueError) as problem:
        raise BundleError(
            f"{path} does not tell how large values get: {problem}",
            "make the variant again: tfm-export quantize --force",
        ) from problem


class WeightsFile:
    """A file of weights that several graphs share; a tensor that occurs twice is stored once.

    Args:
        path: the file, beside the graphs that refer to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[tuple[str, str, tuple[int, ...]], tuple[int, int]] = {}

    def write(self, model: ir.Model, path: Path) -> None:
        """Move a model's weights into the file and write its graph to `path`."""
        with open(self.path, "ab") as file:
            for value in model.graph.initializers.values():
                tensor = value.const_value
                if tensor is not None and tensor.nbytes >= EXTERNAL_FROM_BYTES:
                    value.const_value = self._place(tensor, file)
        _write(model, path)
        os.chmod(self.path, 0o644)  # readable by the user that the service runs as

    def _place(self, tensor: ir.TensorProtocol, file: BinaryIO) -> ir.ExternalTensor:
        content = tensor.tobytes()  # as ONNX stores it: 4-bit numbers two a byte
        shape = tuple(int(size) for size in tensor.shape.numpy())
        key = (hashlib.sha256(content).hexdigest(), str(tensor.dtype), shape)
        if key not in self._places:
            file.write(b"\0" * (-file.tell() % ALIGNMENT))
            self._places[key] = (file.tell(), len(content))
            file.write(content)
        offset, length = self._places[key]
        return ir.ExternalTensor(
            self.path.name,
            offset,
            length,
            tensor.dtype,
            shape=ir.Shape(shape),
            name=tensor.name or "",
            base_dir=self.path.parent,
        )
