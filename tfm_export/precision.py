"""The precisions and how far each may be from PyTorch.

The yardstick for fp32: the error against a float64 run of the same weights may be at most twice PyTorch's own float32
error, with a floor.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """How far a graph's numbers may be from the float64 reference.

    Attributes:
        times_own_error: the error may be this many times PyTorch's own error in float32.
        floor: an error up to this is accepted in any case. Also the margin between the two best tokens, in float64,
            below which a different choice is a tie.
    """

    times_own_error: float
    floor: float

    def limit(self, own_error: float) -> float:
        """The largest accepted error, given PyTorch's own."""
        return max(self.times_own_error * own_error, self.floor)


@dataclass(frozen=True)
class Precision:
    """A number format of weights and compute.

    Attributes:
        name: the variant's name in the bundle.
        float_type: the dtype of caches and cross-attention keys and values.
        tolerance: its distance from PyTorch.
    """

    name: str
    float_type: str
    tolerance: Tolerance


PRECISIONS = {"fp32": Precision("fp32", "float32", Tolerance(times_own_error=2.0, floor=1e-4))}
