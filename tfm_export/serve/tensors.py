"""Tensors of the Open Inference Protocol: as JSON, or as bytes behind it (Triton's binary tensor extension).

https://github.com/kserve/open-inference-protocol and
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tfm_export.quotation import quote, shorten
from tfm_export.serve.limits import Refusal

DTYPES = {"INT64": np.int64, "INT32": np.int32, "FP32": np.float32}
HEADER_LENGTH = "inference-header-content-length"


@dataclass(frozen=True, kw_only=True)
class InferRequest:
    """An inference request, its tensors read.

    Attributes:
        identifier: the client's own; "" if there is none.
        inputs: arrays by name; BYTES are str in an object array.
        parameters: the request's.
        outputs: the names that are wanted, and whether each is to come as bytes; None for all.
        binary: whether outputs come as bytes that do not say.
    """

    identifier: str
    inputs: dict[str, NDArray[Any]]
    parameters: dict[str, Any]
    outputs: dict[str, bool] | None
    binary: bool


def parse_object(content: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        Refusal: it is none.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as problem:
        raise Refusal(400, [f"the body is not JSON: {shorten(str(problem), 200)}"]) from None
    if not isinstance(value, dict):
        raise Refusal(400, [f"the body must be a JSON object, found {quote(value)}"])
    return value


def parse_request(body: bytes, header_length: str | None) -> InferRequest:
    """Read the body of an inference request.

    Args:
        body: JSON, and behind it the bytes of the inputs that are not part of it.
        header_length: how many bytes are JSON, where there are such inputs.

    Raises:
        Refusal: it is not of the protocol's form; all that is wrong with its inputs.
    """
    length = len(body)
    if header_length is not None:
        if not header_length.isascii() or not header_length.isdecimal() or int(header_length) > len(body):
            raise Refusal(400, [f"{HEADER_LENGTH} must be a number up to {len(body)}, found {quote(header_length)}"])
        length = int(header_length)
    state, rest = parse_object(body[:length]), memoryview(body)[length:]
    inputs = state.get("inputs")
    if not isinstance(inputs, list) or not inputs or not all(isinstance(one, dict) for one in inputs):
        raise Refusal(400, ["inputs must be a list of one or more tensors"])
    arrays: dict[str, NDArray[Any]] = {}
    problems = []
    for tensor in inputs:
        try:
            name, array, rest = _input(tensor, rest, arrays)
            arrays[name] = array
        except (ValueError, TypeError, OverflowError, struct.error) as problem:
            problems.append(f"input {quote(tensor.get('name'))}: {shorten(str(problem), 200)}")
            break  # where the next one's bytes begin is not known
    if len(rest) and not problems:
        problems.append(f"{len(rest)} bytes are left behind the inputs")
    parameters = state.get("parameters", {})
    if not isinstance(parameters, dict):
        problems.append(f"parameters must be an object, found {quote(parameters)}")
    if problems:
        raise Refusal(400, problems)
    binary = parameters.get("binary_data_output") is True
    identifier = state.get("id", "")
    return InferRequest(
        identifier=identifier if isinstance(identifier, str) else "",
        inputs=arrays,
        parameters=parameters,
        outputs=_outputs(state.get("outputs"), binary),
        binary=binary,
    )


def _outputs(wanted: Any, binary: bool) -> dict[str, bool] | None:
    if wanted is None or wanted == []:
        return None
    if not isinstance(wanted, list) or not all(isinstance(o, dict) and isinstance(o.get("name"), str) for o in wanted):
        raise Refusal(400, ["outputs must be a list of objects with a name"])
    found = {}
    for one in wanted:
        own = one.get("parameters", {})
        found[one["name"]] = own.get("binary_data", binary) is True if isinstance(own, dict) else binary
    return found


def _input(
    tensor: Mapping[str, Any], rest: memoryview, others: Collection[str]
) -> tuple[str, NDArray[Any], memoryview]:
    name, kind, shape = tensor.get("name"), tensor.get("datatype"), tensor.get("shape")
    if not isinstance(name, str):
        raise TypeError("name must be a string")
    if name in others:
        raise ValueError("it is there twice")
    if kind not in DTYPES and kind != "BYTES":
        raise ValueError(f"datatype must be one of BYTES, {', '.join(DTYPES)}, found {quote(kind)}")
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 1 << 31 for size in shape):
        raise ValueError(f"shape must be a list of sizes, found {quote(shape)}")
    parameters = tensor.get("parameters", {})
    size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
    if size is None:
        values = _from_json(tensor.get("data"), kind)
    else:
        if type(size) is not int or not 0 <= size <= len(rest):
            raise ValueError(f"binary_data_size must be a number up to {len(rest)}, found {quote(size)}")
        values, rest = _from_bytes(rest[:size], kind), rest[size:]
    count = 1
    for one in shape:
        count *= one
    if values.size != count:
        raise ValueError(f"its shape {shape} has {count} elements, and there are {values.size}")
    return name, values.reshape(shape), rest


def _from_json(data: Any, kind: str) -> NDArray[Any]:
    if not isinstance(data, list):
        raise TypeError("data must be a list, or binary_data_size must say how many bytes behind the JSON it has")
    flat = list(_flat(data))
    if kind == "BYTES":
        if wrong := [value for value in flat if not isinstance(value, str)]:
            raise TypeError(f"data of BYTES must be strings, found {quote(wrong[0])}")
        return np.array(flat, object)
    numbers = (int,) if kind.startswith("INT") else (int, float)
    if wrong := [value for value in flat if isinstance(value, bool) or not isinstance(value, numbers)]:
        raise TypeError(f"data of {kind} must be numbers, found {quote(wrong[0])}")
    return np.array(flat, DTYPES[kind])


def _flat(data: list[Any], level: int = 0) -> Any:
    for value in data:
        if isinstance(value, list):
            if level > 3:
                raise ValueError("data is nested too deeply")
            yield from _flat(value, level + 1)
        else:
            yield value


def _from_bytes(content: memoryview, kind: str) -> NDArray[Any]:
    if kind != "BYTES":
        return np.frombuffer(content, np.dtype(DTYPES[kind]).newbyteorder("<")).astype(DTYPES[kind])
    found, place = [], 0
    while place < len(content):
        (length,) = struct.unpack_from("<I", content, place)
        place += 4
        if place + length > len(content):
            raise ValueError("an element of BYTES is longer than what there is")
        found.append(bytes(content[place : place + length]).decode("utf-8"))
        place += length
    return np.array(found, object)


def response(
    request: InferRequest, model: str, version: str, outputs: Mapping[str, NDArray[Any]]
) -> tuple[bytes, dict[str, str]]:
    """The body and the headers of an answer.

    Raises:
        Refusal: an output is wanted that there is not.
    """
    wanted = request.outputs or dict.fromkeys(outputs, request.binary)
    if unknown := [name for name in wanted if name not in outputs]:
        raise Refusal(400, [f"there is no output {quote(name)}; there are {', '.join(outputs)}" for name in unknown])
    tensors, behind = [], []
    for name, binary in wanted.items():
        array = outputs[name]
        tensor: dict[str, Any] = {"name": name, "datatype": _kind(array), "shape": list(array.shape)}
        if binary:
            content = _to_bytes(array)
            tensor["parameters"] = {"binary_data_size": len(content)}
            behind.append(content)
        else:
            tensor["data"] = _to_json(array)
        tensors.append(tensor)
    state: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": tensors}
    if request.identifier:
        state["id"] = request.identifier
    header = json.dumps(state, ensure_ascii=False, allow_nan=False).encode()
    if not behind:
        return header, {"Content-Type": "application/json"}
    return b"".join([header, *behind]), {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(header)),
    }


def _kind(array: NDArray[Any]) -> str:
    if array.dtype == object:
        return "BYTES"
    return next(name for name, dtype in DTYPES.items() if array.dtype == dtype)


def _to_json(array: NDArray[Any]) -> list[Any]:
    values: list[Any] = array.reshape(-1).tolist()
    return [None if isinstance(value, float) and value != value else value for value in values]  # noqa: PLR0124 (NaN)


def _to_bytes(array: NDArray[Any]) -> bytes:
    if array.dtype != object:
        return array.astype(array.dtype.newbyteorder("<")).tobytes()
    encoded: Sequence[bytes] = [text.encode() for text in array.reshape(-1)]
    return b"".join(struct.pack("<I", len(one)) + one for one in encoded)
