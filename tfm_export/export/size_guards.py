"""Branches on sizes: what a trace decided once, and whether it holds for every size that a bundle promises.

torch.export follows one way through Python code. Where the way hangs on a size, it notes under what condition it went
there, as `source <= 33`, and the ONNX exporter drops the note: longer sources would silently be computed as shorter
ones are.
"""

from __future__ import annotations

import itertools
import os
import random
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tfm_export.errors import ExportError

# Below these files are PyTorch's workings and ours, in which nobody looks for their own branch.
_NOT_THE_USERS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_TRACING = str(Path(__file__).with_name("tracing.py"))
# A condition on one size is tried at all sizes up to this one, and at some above.
_ALL_UP_TO = 512
_SOME = 2000  # tries of a condition on several sizes
_LARGEST = 1 << 16  # of sizes that nobody limits
HINT = (
    "code that computes the same for every size: torch.where on tensors instead of `if` on a size, and tables as long "
    "as the longest sequence; or promise less, with --max-source-length and --max-target-length"
)


@dataclass(frozen=True)
class Place:
    """A line of code.

    Attributes:
        file: where it is.
        line: its number.
        text: what it says.
    """

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


@dataclass(frozen=True)
class SizeGuard:
    """A condition that a trace met and took for granted.

    Attributes:
        condition: on symbols that are called like axes.
        place: the user's line that asked; None if it is in PyTorch's code or ours alone.
    """

    condition: Any
    place: Place | None

    def broken_by(self, largest: Mapping[str, int]) -> dict[str, int] | None:
        """Sizes within the limits for which it does not hold; None if there are none.

        Sizes of 1 do not count: verification compares these, and much of PyTorch's own code asks for them.

        Args:
            largest: the largest size of an axis, by its name; 65,536 for others.
        """
        symbols = sorted(self.condition.free_symbols, key=str)
        limits = [max(2, largest.get(str(symbol), _LARGEST)) for symbol in symbols]
        numbers = {int(n) for n in self.condition.atoms(sympy.Integer)}
        for sizes in _sizes(limits, numbers):
            by_name = dict(zip(map(str, symbols), sizes, strict=True))
            if by_name.get("query", 0) > by_name.get("capacity", _LARGEST):
                continue  # a step's tokens all have a slot
            if self.condition.xreplace(dict(zip(symbols, map(sympy.Integer, sizes), strict=True))) == sympy.false:
                return by_name
        return None


def _sizes(limits: list[int], numbers: set[int]) -> Iterator[tuple[int, ...]]:
    """Sizes from 2 up to each limit: near the numbers of the condition, near the limits, and many others."""
    near = {n + offset for n in numbers for offset in (-1, 0, 1)}

    def of(limit: int) -> list[int]:
        some = {limit, limit - 1, limit // 2, *near, *(2**i + 1 for i in range(17))}
        return sorted(n for n in {*range(2, min(limit, _ALL_UP_TO) + 1), *some} if 2 <= n <= limit)

    each = [of(limit) for limit in limits]
    if len(each) == 1:
        yield from ((n,) for n in each[0])
        return
    few = [sorted({*sizes[:8], *sizes[-3:], *(n for n in near if n in sizes)}) for sizes in each]
    yield from itertools.islice(itertools.product(*few), _SOME)
    draw = random.Random(0)  # noqa: S311 (tries, no secrets)
    yield from (tuple(draw.choice(sizes) for sizes in each) for _ in range(_SOME))


class SizeGuards:
    """What was asked of sizes while this watches.

    Args:
        axes: the name of the axis of each size of the example that is traced; no two axes have the same size.
    """

    def __init__(self, axes: Mapping[int, str]) -> None:
        self._axes, self._found = axes, dict[Any, SizeGuard]()  # by condition: the first line that asked counts

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note every condition that PyTorch makes a trace hang on."""
        log_guard = ShapeEnv._log_guard  # noqa: SLF001 (the one place that sees all, with the line that asked)

        def note(env: ShapeEnv, prefix: str, condition: Any, forcing_spec: bool) -> None:
            if "suppressed" not in prefix:
                self._note(env, condition)
            log_guard(env, prefix, condition, forcing_spec)

        ShapeEnv._log_guard = note  # type: ignore[method-assign,assignment]  # noqa: SLF001
        try:
            yield
        finally:
            ShapeEnv._log_guard = log_guard  # type: ignore[method-assign]  # noqa: SLF001

    def _note(self, env: ShapeEnv, condition: Any) -> None:
        names = {symbol: self._name(env, symbol) for symbol in condition.free_symbols}
        if None in names.values():
            return  # a number of a tensor's, of which no graph is made at all
        named = condition.xreplace(
            {s: sympy.Symbol(str(name), integer=True, positive=True) for s, name in names.items()}
        )
        if named not in (sympy.true, sympy.false):
            self._found.setdefault(named, SizeGuard(named, users_place(traceback.extract_stack())))

    def _name(self, env: ShapeEnv, symbol: Any) -> str | None:
        size = env.backed_var_to_val.get(symbol)
        return None if size is None else self._axes.get(int(size))

    def check(self, largest: Mapping[str, int]) -> None:
        """Refuse a trace that does not hold for all sizes.

        Args:
            largest: the largest promised size of an axis, by its name; others may be of any size.

        Raises:
            ExportError: naming each line that decided something that does not hold.
        """
        broken = {guard: sizes for guard in self._found.values() if (sizes := guard.broken_by(largest))}
        # PyTorch asks again afterwards, where no line of the user's is left.
        named = {guard: sizes for guard, sizes in broken.items() if guard.place} or broken
        problems = []
        for guard, sizes in named.items():
            wrong = " and ".join(f"{name} {size:,}" for name, size in sizes.items())
            problems.append(
                f"{guard.place or 'in the code of PyTorch or tfm-export'}\n  decides by a size: what was traced holds "
                f"where {guard.condition}, and not for {wrong}, which the bundle would promise"
            )
        if problems:
            raise ExportError(problems, HINT)


def users_place(stack: Sequence[traceback.FrameSummary]) -> Place | None:
    """The innermost line of a stack, below the call of the exporter, that is neither PyTorch's nor ours."""
    for frame in reversed(stack):
        if frame.filename == _TRACING:
            break
        if not frame.filename.startswith(_NOT_THE_USERS) and Path(frame.filename).is_file():
            return Place(frame.filename, frame.lineno or 0, (frame.line or "").strip())
    return None
