"""What every runtime makes sure of before and after it runs a graph: no graph checks an index, and some never complain.

Letters as in `step_model`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tfm_export.bundle import Limits
from tfm_export.errors import NumericError, RequestError
from tfm_export.graph import Dimensions
from tfm_export.runtime.step_model import Floats, Ids, Mask


def check_encode(source_ids: Ids, source_mask: Mask, capacity: int, *, dimensions: Dimensions, limits: Limits) -> None:
    """Refuse what the encoder cannot take; see `StepModel.encode`.

    Raises:
        RequestError: naming everything that is wrong.
    """
    if source_ids.ndim != 2 or 0 in source_ids.shape:
        raise RequestError(f"source_ids must have the shape [B, S] without an empty axis, found {source_ids.shape}")
    if source_mask.shape != source_ids.shape:
        raise RequestError(f"source_mask must be {source_ids.shape}, found {source_mask.shape}")
    problems = _type_problems([("source_ids", source_ids, "i"), ("source_mask", source_mask, "b")])
    if problems:
        raise RequestError(problems)
    if source_ids.shape[1] > limits.max_source_length:
        problems.append(f"a source may have {limits.max_source_length} tokens, found {source_ids.shape[1]}")
    problems += _range_problems("source_ids", source_ids, dimensions.source_vocabulary_size)
    empty = ~source_mask.any(-1, keepdims=True)
    if empty.any():
        problems.append(f"sources without a single token: rows {_rows(empty)}")
    if capacity < 1:
        problems.append(f"capacity must be at least 1, found {capacity}")
    if problems:
        raise RequestError(problems)


def check_step_arrays(
    target_ids: Ids, positions: Ids, write_index: Ids, self_mask: Mask, *, size: int, capacity: int
) -> None:
    """Refuse arrays of the wrong shape or type; see `Sentences.step`.

    Raises:
        RequestError: naming every array that does not fit.
    """
    shape = target_ids.shape
    if (
        len(shape) == 2
        and shape[0] == size
        and positions.shape == shape
        and write_index.shape == (size,)
        and self_mask.shape == (size, 1, shape[1], capacity)
        and target_ids.dtype.kind == positions.dtype.kind == write_index.dtype.kind == "i"
        and self_mask.dtype.kind == "b"
        and shape[1]
    ):
        return
    query = shape[1] if len(shape) == 2 and shape[1] else 1
    expected: list[tuple[str, NDArray[np.generic], str, tuple[int, ...]]] = [
        ("target_ids", target_ids, "i", (size, query)),
        ("positions", positions, "i", (size, query)),
        ("write_index", write_index, "i", (size,)),
        ("self_mask", self_mask, "b", (size, 1, query, capacity)),
    ]
    problems = _type_problems([(name, array, kind) for name, array, kind, _ in expected])
    problems += [
        f"{name} must have the shape {list(wanted)}, found {list(array.shape)}"
        for name, array, _, wanted in expected
        if array.shape != wanted
    ]
    raise RequestError(problems)


def step_problems(
    target_ids: Ids, positions: Ids, write_index: Ids, self_mask: Mask, *, dimensions: Dimensions, limits: Limits
) -> list[str]:
    """What is out of range in the arrays of a step that have the right shapes."""
    query, capacity = self_mask.shape[2:]
    problems = _range_problems("target_ids", target_ids, dimensions.target_vocabulary_size)
    problems += _range_problems("positions", positions, limits.max_target_length)
    beyond = (write_index < 0) | (write_index > capacity - query)
    if beyond.any():
        problems.append(
            f"{query} tokens do not fit into {capacity} slots from slot {_some(write_index[beyond])} on: "
            f"rows {_rows(beyond)}"
        )
    blind = ~self_mask.any(-1, keepdims=True)
    if blind.any():
        problems.append(f"self_mask lets a query see no slot at all: rows {_rows(blind)}")
    return problems


def check_steps(positions: Ids, write_index: Ids, steps: int, *, capacity: int, limits: Limits) -> None:
    """Refuse several steps of one token that begin well and run out of slots or positions, or are none.

    Raises:
        RequestError: naming everything that is wrong.
    """
    problems = []
    if positions.shape[1] != 1:
        problems.append(f"several steps take one token each, found {positions.shape[1]}")
    if steps < 1:
        problems.append(f"steps must be at least 1, found {steps}")
    if (last := max(write_index.tolist()) + steps) > capacity:
        problems.append(f"{steps} steps need {last} slots, and there are {capacity}")
    if (last := int(positions.max()) + steps) > limits.max_target_length:
        problems.append(f"{steps} steps end at position {last - 1}, the last one is {limits.max_target_length - 1}")
    if problems:
        raise RequestError(problems)


def check_finite(best: Floats) -> None:
    """Refuse the outcome of a step that is not a number.

    Args:
        best: [B, Q], the best log-probability of each query.

    Raises:
        NumericError: naming the rows.
    """
    finite = np.isfinite(best)
    if np.count_nonzero(finite) < finite.size:
        raise NumericError(
            f"the log-probabilities after this step are not finite: rows {_rows(~finite)}",
            "tfm-export verify, which tells whether the bundle is sound; or a precision with a wider range",
        )


def _type_problems(arrays: list[tuple[str, NDArray[np.generic], str]]) -> list[str]:
    words = {"i": "integers", "b": "bool"}
    return [
        f"{name} must be {words[kind]}, found {array.dtype}" for name, array, kind in arrays if array.dtype.kind != kind
    ]


def _range_problems(name: str, ids: Ids, size: int) -> list[str]:
    wrong = (ids < 0) | (ids >= size)
    if not wrong.any():
        return []
    return [f"{name} must be from 0 to {size - 1}, found {_some(ids[wrong])}: rows {_rows(wrong)}"]


def _rows(wrong: NDArray[np.bool_] | np.bool_) -> str:
    """The indices along the first axis at which anything is True."""
    return _some(np.nonzero(np.asarray(wrong))[0])


def _some(values: NDArray[np.int64], limit: int = 8) -> str:
    """The distinct values, at most `limit` of them."""
    distinct = np.unique(values).tolist()
    return ", ".join(map(str, distinct[:limit])) + (f", ... ({len(distinct)})" if len(distinct) > limit else "")
