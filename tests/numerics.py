"""How far a right result may be from another: what rounding explains of the difference, and nothing absolute.

The yardstick of `tfm_export.verify`, for tests. A result in float32 is held to the same computation in float64. How far
it may be away is measured there: it is run once more with every operation's result moved at random by what rounding can
move it, a sum of products by epsilon times the sum of their magnitudes |x| |w|, anything else by epsilon of what it
reads and gives. An error may be `TIMES_ROUNDING` times what that changes. So a limit grows with the numbers and the
condition of what is computed, and does not hang on the order in which a processor or a library adds up.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from reference_model import Transformer
from tfm_export.bundle import Manifest
from tfm_export.precision import FLOAT32_EPSILON, FLOAT64_EPSILON, TIMES_ROUNDING
from tfm_export.verify.float64 import Float64Graph, Moves
from tfm_export.verify.golden import tie_margin

__all__ = [
    "BFLOAT16_EPSILON",
    "FLOAT16_EPSILON",
    "FLOAT32_EPSILON",
    "FLOAT64_EPSILON",
    "Exact",
    "MonteCarlo",
    "assert_close",
    "attention_limit",
    "bundle_log_prob_limit",
    "exact_arrays",
    "exact_graph",
    "exactly",
    "log_prob_limit",
    "near",
    "score_limit",
]

# The distance from 1 to the next number in types of 16 bits.
FLOAT16_EPSILON, BFLOAT16_EPSILON = 2.0**-10, 2.0**-7
# Known numbers go through a handful of operations, each off by epsilon times what it adds up; libraries' exponentials
# and logarithms are off by up to four units in the last place.
FEW_OPERATIONS = 8
# One random number says little of what the largest may be: of few results there are several trials.
LEAST_RESULTS = 64


@dataclass(frozen=True)
class Exact:
    """What a computation gives in float64.

    Attributes:
        value: float64.
        rounding: the largest difference that rounding to float32 made, see above.
        float32_inside: the computation rounds to float32 whatever it is given.
    """

    value: NDArray[np.float64]
    rounding: float
    float32_inside: bool = False

    def limit(self, epsilon: float = FLOAT32_EPSILON) -> float:
        """The largest error that a right computation in a float type may have.

        Args:
            epsilon: of the type, the distance from 1 to the next number.
        """
        return TIMES_ROUNDING * self.rounding * max(epsilon, self.float32_inside * FLOAT32_EPSILON) / FLOAT32_EPSILON


def assert_close(found: Any, exact: Exact, *, epsilon: float = FLOAT32_EPSILON, times: float = 1.0) -> None:
    """Fail unless a result is within the limit of what it is in float64.

    Args:
        found: the result, of the same shape.
        exact: what it is.
        epsilon: of the float type it was computed in.
        times: how many computations in that type stand between the two, such as 2 for a model that is held to what
            another one was given in float32.
    """
    array = np.asarray(found.detach() if isinstance(found, Tensor) else found, np.float64)
    assert array.shape == exact.value.shape
    error, limit = _largest(array - exact.value), times * exact.limit(epsilon)
    explained = limit / times / TIMES_ROUNDING
    assert error <= limit, f"off by {error:.2e}; rounding explains {explained:.2e}, the limit is {limit:.2e}"


# Of PyTorch.


def exactly(compute: Callable[..., Tensor], *parts: Any) -> Exact:
    """A computation of PyTorch in float64, and what rounding explains.

    Args:
        compute: gets the parts and gives a tensor.
        parts: modules and tensors; it gets copies in float64.
    """
    with torch.inference_mode(mode=False), torch.no_grad(), _unfused():
        parts = tuple(_in_float64(part) for part in parts)
        (exact,) = exact_arrays(lambda: [compute(*parts).double().numpy()])
    return exact


def exact_arrays(compute: Callable[[], Sequence[NDArray[Any]]]) -> list[Exact]:
    """The same for a computation whose models are in float64 already, such as a search with a `TorchModel`.

    Args:
        compute: gives the same arrays each time but for rounding.
    """
    with _Watch() as watch:
        values = [np.array(array, np.float64) for array in compute()]
    rounding = [0.0] * len(values)
    for seed in range(-(-LEAST_RESULTS // max(min(value.size for value in values), 1))):
        with MonteCarlo(seed=seed):
            moved = compute()
        rounding = [max(r, _largest(m - v)) for r, m, v in zip(rounding, moved, values, strict=True)]
    return [Exact(value, r, watch.found) for value, r in zip(values, rounding, strict=True)]


@functools.cache
def log_prob_limit(model: nn.Module, longest: int = 50) -> float:
    """How far a right computation's log-probabilities may be from those in float64, for sequences up to some length.

    Args:
        model: a reference model or an adapter; called with source_ids, source_mask and target_ids.
        longest: sequences, as far as the model takes them.
    """
    inputs = _random_ids(model, longest)
    return exactly(lambda m: m(*inputs).log_softmax(-1), model).limit()


@functools.cache
def attention_limit(model: Transformer, layer: int, longest: int = 50) -> float:
    """The same for the weights of a layer's cross-attention, the mean over its heads.

    Args:
        model: a reference model.
        layer: of the decoder, from 0.
        longest: sequences, as far as the model takes them.
    """
    source_ids, mask, target_ids = _random_ids(model, longest)

    def compute(model: Transformer) -> Tensor:
        weights: list[Tensor] = []
        model.decode(target_ids, model.encode(source_ids, mask), mask, cross_attention=weights)
        return weights[layer].mean(1)

    return exactly(compute, model).limit()


def _random_ids(model: nn.Module, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """source_ids, source_mask and target_ids of four sentences."""
    config: Any = model.config
    generator = torch.Generator().manual_seed(0)
    length = min(longest, config.max_length)
    mask = torch.arange(length) < torch.tensor([length, -(-length // 2), 5, 2])[:, None]
    source_ids = torch.randint(0, config.source_vocabulary_size, mask.shape, generator=generator)
    targets = 4, min(longest, config.max_target_length)
    return source_ids, mask, torch.randint(0, config.target_vocabulary_size, targets, generator=generator)


class MonteCarlo(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves the result of every operation in float64 at random, by what rounding to another float type can move it.

    What is computed in float32 all the same stays as it is: it rounds by itself, and an index may come of it.

    Args:
        epsilon: of the type.
        seed: of the moves.
    """

    def __init__(self, epsilon: float = FLOAT32_EPSILON, seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._epsilon, self._random = epsilon, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute one operation."""
        kwargs = kwargs or {}
        with self:
            parts = func.decompose(*args, **kwargs)
        return self._rounded(func, args, kwargs) if parts is NotImplemented else parts

    def _rounded(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.overloadpacket.__name__
        if func.is_view or name.rstrip("_") in EXACT or name.startswith("new_"):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return self._moved(func(*args, **kwargs), None)
        if name in SUMS:
            return self._moved(func(*args, **kwargs), func(*map(_magnitude, args), **kwargs))
        if name.startswith("_scaled_dot_product"):
            query, key, value, *rest = args
            # A score is a sum of D products: see tfm_export.verify.float64.
            wide = math.sqrt(query.shape[-1])
            found = func(self._near(query, wide), self._near(key, wide), value, *rest, **kwargs)
            return self._moved(found, func(query, key, value.abs(), *rest, **kwargs))
        found = func(*map(self._near, args), **kwargs)
        if name != "native_layer_norm":
            return self._moved(found, None)
        # The variance may be computed as the difference of two larger numbers.
        mean, variance = args[0].mean(-1, keepdim=True), args[0].var(-1, keepdim=True, correction=0)
        size = found[0].abs() * (1 + mean**2 / variance.clamp(min=torch.finfo(torch.float32).tiny))
        return self._moved(found, (size, *found[1:]))

    def _near(self, tensor: Any, times: float = 1.0) -> Any:
        if not _is_exact(tensor):
            return tensor
        moved = tensor * (1 + times * self._epsilon * self._uniform(tensor))
        return torch.where(tensor.isfinite(), moved, tensor)

    def _moved(self, found: Any, sizes: Any) -> Any:
        pairs = zip(_tensors(found), _tensors(found if sizes is None else sizes), strict=True)
        for tensor, size in pairs:
            if _is_exact(tensor):
                tensor.add_(self._epsilon * self._uniform(tensor) * torch.where(size.isfinite(), size.abs(), 0))
        return found

    def _uniform(self, tensor: Tensor) -> Tensor:
        return torch.rand(tensor.shape, generator=self._random, dtype=tensor.dtype) * 2 - 1


# Operations that round nothing: they move numbers, choose among them, or make them up. Views are known to PyTorch.
EXACT = frozenset(
    """
    _local_scalar_dense _to_copy _unsafe_view abs amax amin arange argmax bernoulli cat clamp clamp_min clone
    constant_pad_nd copy embedding empty empty_like fill flip full full_like gather index index_copy index_put
    index_select lift_fresh masked_fill max maximum min minimum neg ones ones_like rand randint randn relu repeat roll
    scalar_tensor scatter sort stack topk tril triu where zero zeros zeros_like
    """.split()  # noqa: SIM905 (fifty quoted names are no easier to read)
)
# Operations that sum products, or numbers: epsilon times the same sum of magnitudes bounds what rounding does.
SUMS = frozenset(("addmm", "addmv", "baddbmm", "bmm", "convolution", "cumsum", "dot", "mean", "mm", "mv", "sum"))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether numbers of float32 come into results of float64; what becomes an integer does not count."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = (tensor for argument in args for tensor in _tensors(argument))
        self.found |= any(map(_is_exact, _tensors(result))) and any(_is_float(x) and not _is_exact(x) for x in given)
        return result


@contextmanager
def _unfused() -> Iterator[None]:
    """PyTorch's encoder layers as the operations that they are made of."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _in_float64(part: Any) -> Any:
    if isinstance(part, nn.Module):
        return copy.deepcopy(part).double()
    return part.double() if _is_float(part) else part


def _tensors(found: Any) -> Any:
    return found if isinstance(found, tuple | list) else (found,)


def _is_float(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_floating_point()


def _is_exact(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.dtype == torch.float64


def _magnitude(tensor: Any) -> Any:
    return tensor.abs() if _is_float(tensor) else tensor


# Of ONNX graphs.


def exact_graph(path: Path, feeds: Mapping[str, NDArray[Any]], names: Sequence[str]) -> list[Exact]:
    """Outputs of a graph in float64, and what rounding explains.

    Args:
        path: of the graph.
        feeds: its inputs.
        names: of the outputs.
    """
    exact, moved = (
        Float64Graph.read(path).moved(moves).run(feeds) for moves in (Moves(), Moves(results=FLOAT32_EPSILON))
    )
    return [Exact(exact[name], _largest(moved[name] - exact[name])) for name in names]


def bundle_log_prob_limit(manifest: Manifest) -> float:
    """How far a bundle's log-probabilities may be from those in float64: the export measured it.

    Args:
        manifest: of a bundle with golden inputs.
    """
    return tie_margin(manifest.golden) / 2


# Of numbers that tests know.


def score_limit(log_prob: float, tokens: int, divisor: float = 1.0) -> float:
    """How far a hypothesis's score may be off: the sum of its log-probabilities, divided by its length or the like.

    Args:
        log_prob: how far one of them may be off.
        tokens: how many they are.
        divisor: by what they are divided.
    """
    return tokens * log_prob / divisor


def near(expected: Any, *, made_of: ArrayLike | None = None, epsilon: float = FLOAT32_EPSILON) -> Any:
    """What pytest compares with, for a few operations on known numbers.

    Args:
        expected: a number or several.
        made_of: the numbers that a result adds up, where they are larger than it; their magnitudes are added.
        epsilon: of the float type of the computation.
    """
    sizes = np.abs(np.asarray(expected if made_of is None else made_of, np.float64))
    size = np.where(np.isfinite(sizes), sizes, 0).max(initial=0.0) if made_of is None else sizes.sum()
    return pytest.approx(expected, rel=0, abs=FEW_OPERATIONS * epsilon * float(size))


def _largest(difference: NDArray[Any]) -> float:
    error = float(np.abs(difference).max(initial=0.0))
    return error if math.isfinite(error) else math.inf
