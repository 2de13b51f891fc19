"""What a user may say about an engine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tfm_export.engines import FLAVORS, NAME
from tfm_export.errors import BuildError
from tfm_export.precision import FLOATS, FLOATS_16_BIT, PRECISIONS, Compute

FlavorName = Literal["auto", "tensorrt", "rtx"]
DEFAULT_VARIANT = "fp16"
DEFAULT_BATCH = 32
DEFAULT_BEAM = 4
OPTIMIZATION_LEVELS = range(6)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine is built.

    Attributes:
        variant: the precision, which the bundle must have: "fp32", "fp16", "bf16", "w8", "w4", "int8" or "fp8".
        compute: what is computed in where nothing is quantised: "fp16" or "bf16" with a quantised variant, otherwise
            the variant itself. None for that, or for fp16.
        flavor: the library: "tensorrt", "rtx", or "auto" for TensorRT where it and a GPU are there, else TensorRT-RTX.
        compute_capabilities: of the GPUs to build for, such as "8.6"; none for the flavour's own choice.
        max_batch_size: the most sentences at once.
        max_beam_size: the most beams; None for 4, or the bundle's own beam size if that is larger.
        max_source_length: tokens of a source; None for the model's limit.
        max_target_length: tokens of a target; None for the model's limit.
        capacities: slots a sentence for which there is to be a smaller decoder plan, beside the largest.
        name: of the engine; None for one made of the precision and the flavour.
        builder_optimization_level: from 0, quickly built, to 5; None for the library's default. TensorRT only.
        timing_cache: a file that keeps what was timed, for the next build. TensorRT only.
        workspace_bytes: the most memory that a layer may use for itself; None for all there is.
        verify: decode the golden inputs with the graphs that were compiled, on the CPU.
        threads: to verify with; None for the CPUs this process may use.
    """

    variant: str = DEFAULT_VARIANT
    compute: Compute | None = None
    flavor: FlavorName = "auto"
    compute_capabilities: tuple[str, ...] = ()
    max_batch_size: int = DEFAULT_BATCH
    max_beam_size: int | None = None
    max_source_length: int | None = None
    max_target_length: int | None = None
    capacities: tuple[int, ...] = ()
    name: str | None = None
    builder_optimization_level: int | None = None
    timing_cache: Path | None = None
    workspace_bytes: int | None = None
    verify: bool = True
    threads: int | None = None

    def __post_init__(self) -> None:
        """Raises BuildError, naming every option that means nothing."""
        if problems := list(self._problems()):
            raise BuildError(problems)

    def _problems(self) -> Iterator[str]:
        yield from self._precision_problems()
        if self.flavor not in {"auto", *FLAVORS}:
            yield f"flavor must be one of auto, {', '.join(FLAVORS)}, found {self.flavor!r}"
        for capability in self.compute_capabilities:
            if not re.fullmatch(r"\d+\.\d", capability):
                yield f'a compute capability is a number such as "8.6", found {capability!r}'
        if self.name is not None and not NAME.fullmatch(self.name):
            yield f"name must be letters, digits, dots, dashes and underscores, found {self.name!r}"
        yield from self._number_problems()

    def _precision_problems(self) -> Iterator[str]:
        if self.variant not in PRECISIONS:
            yield f"variant must be one of {', '.join(PRECISIONS)}, found {self.variant!r}"
        elif self.variant in FLOATS and self.compute not in {None, self.variant}:
            yield f"compute is for quantised variants: {self.variant} computes in {self.variant}, not {self.compute}"
        elif self.variant not in FLOATS and self.compute not in {None, *FLOATS_16_BIT}:
            yield f"compute must be {' or '.join(FLOATS_16_BIT)} with {self.variant}, found {self.compute!r}"

    def _number_problems(self) -> Iterator[str]:
        for name in ("max_batch_size", "max_beam_size", "max_source_length", "max_target_length", "workspace_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield f"{name} must be at least 1, found {value}"
        if any(capacity < 1 for capacity in self.capacities):
            yield f"capacities must be at least 1, found {', '.join(map(str, self.capacities))}"
        level = self.builder_optimization_level
        if level is not None and level not in OPTIMIZATION_LEVELS:
            yield f"builder_optimization_level must be from 0 to 5, found {level}"

    @property
    def computes_in(self) -> Compute:
        """What is computed in where nothing is quantised."""
        return self.variant if self.variant in FLOATS else self.compute or "fp16"


def compute_capability(text: str) -> str:
    """A compute capability as engines are labelled with it: "86" and "8.6" are "8.6".

    Args:
        text: digits, the last of them the minor number; or both numbers with a dot.

    Raises:
        BuildError: it is neither.
    """
    if re.fullmatch(r"\d+\.\d", text):
        return text
    if re.fullmatch(r"\d{2,}", text):
        return f"{text[:-1]}.{text[-1]}"
    raise BuildError(f"a compute capability is a number such as 86 or 8.6, found {text!r}")
