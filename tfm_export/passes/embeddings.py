"""Embedding tables as 8-bit integers: a step reads the rows of its tokens, and only these become floats.

    ids -> Gather of the integers and Gather of their scales -> DequantizeLinear

In a small model with a large vocabulary the tables are most of the file.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from tfm_export.errors import ExportError
from tfm_export.passes.linears import add_initializer, numbers_of
from tfm_export.passes.weight_only import BLOCKS, block_size, round_blocks

_IDS = ("source_ids", "target_ids")
_ROWS, _SCALE = "_rows", "_rows_scale"  # what the table's name gets


def quantize_embeddings(model: ir.Model, name: str, *, block: int = BLOCKS[8]) -> list[str]:
    """Quantise the table that a graph's token ids are looked up in, in place.

    A table that is tied to the projection comes after it: call this after `quantize_weights` or `quantize_static`. If
    the projection has 8-bit integers now, the two share them, stored as rows; the projection reads them through a
    Transpose of constants, which runtimes do once. If it has other numbers, the table gets integers of its own. If it
    stays in float32, so does the table, which the file has to hold anyway.

    Args:
        model: a graph of a bundle, its table in float32.
        name: of the graph: "encoder", "decoder_step" or "decoder_step_attention".
        block: how many numbers of a row share a scale; see `passes.weight_only.block_size`.

    Returns:
        The name of what was quantised, such as "encoder/embedding"; nothing if the table stays.

    Raises:
        ExportError: the graph has no table in float32, or the table has a number that is not finite. The graph is as
            it was.
    """
    lookup = _lookup(model, name)
    table = lookup.inputs[0]
    assert table is not None
    if len(table.uses()) > 1:
        return []
    numbers, scale, size = _shared(model, table) or _own(model, table, block)
    _read_rows(lookup, numbers, scale, size)
    model.graph.initializers.pop(table.name or "")
    return [f"{name}/embedding"]


def dequantize_embeddings(model: ir.Model, name: str) -> list[str]:
    """Undo `quantize_embeddings`, in place: a table of float32, with the very numbers that the rows gave.

    For runtimes that cannot gather integers. What a projection shares with the table becomes its own again.

    Args:
        model: a graph of a bundle.
        name: of the graph.

    Returns:
        The name of what was dequantised, such as "encoder/embedding"; nothing if the table is in floats.
    """
    found = [node for node in model.graph if _is_row_reader(node)]
    for node in found:
        rows, scales = (_producer(value) for value in node.inputs[:2])
        numbers, scale = (gather.inputs[0] for gather in (rows, scales))
        assert numbers is not None
        assert scale is not None
        table = _floats(numbers, scale, node.attributes["block_size"].as_int())
        stored = add_initializer(model, (numbers.name or "").removesuffix(_ROWS), table)
        _replace(node, [ir.node("Gather", [stored, rows.inputs[1]], {"axis": 0}, name=node.name)])
        model.graph.remove([rows, scales], safe=True)
        for value in (numbers, scale):
            _fold_transposes(model, value)
            model.graph.initializers.pop(value.name or "")
    return [f"{name}/embedding"] if found else []


def _lookup(model: ir.Model, name: str) -> ir.Node:
    """The Gather that reads the table, which is float32 and finite."""
    for node in model.graph:
        table, ids = (*node.inputs, None, None)[:2]
        if node.op_type != "Gather" or ids is None or ids.name not in _IDS:
            continue
        if table is None or table.const_value is None or table.dtype != ir.DataType.FLOAT:
            raise ExportError(
                f"expected an embedding table in float32 in {name}, found {None if table is None else table.dtype}",
                "start from the fp32 graphs of a bundle",
            )
        if not np.isfinite(numbers_of(table)).all():
            raise ExportError(f"the table {table.name} of {name} has numbers that are not finite")
        return node
    raise ExportError(f"{name} looks up no token ids in a table", "start from the fp32 graphs of a bundle")


def _own(model: ir.Model, table: ir.Value, block: int) -> tuple[ir.Value, ir.Value, int]:
    """Integers [V, M] and scales [V, blocks] of the table's own, and the block."""
    array = numbers_of(table)
    size = block_size(array.shape[1], block)
    numbers, scale = round_blocks(array.T, 8, size)
    stored = add_initializer(model, f"{table.name}{_ROWS}", np.ascontiguousarray(numbers.T))
    return stored, add_initializer(model, f"{table.name}{_SCALE}", np.ascontiguousarray(scale.T)), size


def _shared(model: ir.Model, table: ir.Value) -> tuple[ir.Value, ir.Value, int] | None:
    """The integers of the projection that the table is tied to, stored as rows; None if it has none of 8 bits."""
    numbers = model.graph.initializers.get(f"{table.name}_int8")
    if numbers is None:
        return None
    (dequantize,) = numbers.consumers()
    scale, block = dequantize.inputs[1], dequantize.attributes.get("block_size")
    assert scale is not None
    rows = _store_as_rows(model, numbers, f"{table.name}{_ROWS}")
    if block is not None:
        return rows, _store_as_rows(model, scale, f"{table.name}{_SCALE}"), block.as_int()
    # One scale a column of the projection, which is a row of the table.
    column = np.ascontiguousarray(numbers_of(scale)[:, None])
    assert rows.shape is not None
    return rows, add_initializer(model, f"{table.name}{_SCALE}", column), int(rows.shape.numpy()[1])


def _store_as_rows(model: ir.Model, value: ir.Value, name: str) -> ir.Value:
    """Store a constant's transpose instead of it, and let what reads the constant read that through a Transpose."""
    stored = add_initializer(model, name, np.ascontiguousarray(numbers_of(value).T))
    node = ir.node("Transpose", [stored], {"perm": [1, 0]}, name=f"{name}_transpose")
    (reader,) = value.consumers()
    model.graph.insert_before(reader, node)
    ir.convenience.replace_all_uses_with(value, node.outputs[0])
    model.graph.initializers.pop(value.name or "")
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = value.name, value.type, value.shape
    return stored


def _fold_transposes(model: ir.Model, value: ir.Value) -> None:
    """Undo `_store_as_rows` for the readers of a constant."""
    for node in list(value.consumers()):
        output = node.outputs[0]
        name = output.name or ""
        output.name = f"{name}_replaced"
        folded = add_initializer(model, name, np.ascontiguousarray(numbers_of(value).T))
        ir.convenience.replace_all_uses_with(output, folded)
        model.graph.remove(node, safe=True)


def _read_rows(lookup: ir.Node, numbers: ir.Value, scale: ir.Value, size: int) -> None:
    """Put the Gathers of integers and of scales, and DequantizeLinear, in the place of the Gather of floats."""
    ids = lookup.inputs[1]
    gathers = [
        ir.node("Gather", [value, ids], {"axis": 0}, name=f"{lookup.name}{suffix}")
        for value, suffix in ((numbers, _ROWS), (scale, _SCALE))
    ]
    for gather, value in zip(gathers, (numbers, scale), strict=True):
        assert ids is not None
        assert ids.shape is not None
        assert value.shape is not None
        rows = gather.outputs[0]
        rows.name, rows.type, rows.shape = gather.name, value.type, ir.Shape([*ids.shape, value.shape[1]])
    attributes = {"axis": 2, "block_size": size}
    rows, scales = (gather.outputs[0] for gather in gathers)
    _replace(
        lookup, [*gathers, ir.node("DequantizeLinear", [rows, scales], attributes, name=f"{lookup.name}_dequantize")]
    )


def _replace(old: ir.Node, new: list[ir.Node]) -> None:
    """Put nodes in the place of another; the last of them gives what it gave, under the same name."""
    was, now, graph = old.outputs[0], new[-1].outputs[0], old.graph
    assert graph is not None
    now.type, now.shape, name = was.type, was.shape, was.name
    graph.insert_before(old, new)
    ir.convenience.replace_all_uses_with(was, now, replace_graph_outputs=True)
    graph.remove(old, safe=True)
    now.name = name


def _is_row_reader(node: ir.Node) -> bool:
    """A DequantizeLinear of rows that were looked up by token ids."""
    rows = node.inputs[0].producer() if node.op_type == "DequantizeLinear" and node.inputs[0] is not None else None
    return rows is not None and rows.op_type == "Gather" and rows.inputs[1] is not None and rows.inputs[1].name in _IDS


def _producer(value: ir.Value | None) -> ir.Node:
    assert value is not None
    node = value.producer()
    assert node is not None
    return node


def _floats(numbers: ir.Value, scale: ir.Value, block: int) -> NDArray[np.float32]:
    """The table [V, M], float32, that integers [V, M] and scales [V, blocks] stand for."""
    integers = numbers_of(numbers)
    factors = np.repeat(numbers_of(scale), block, axis=1)[:, : integers.shape[1]]
    return np.ascontiguousarray(integers * factors, np.float32)
