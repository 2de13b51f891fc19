"""The precisions: what numbers a variant is made of, and how far it may be from PyTorch.

The yardstick for fp32: the error against a float64 run of the same weights may be at most twice PyTorch's own float32
error, with a floor. Every other precision rounds, so its generations are judged by how many stay the same.
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


FP32_TOLERANCE = Tolerance(times_own_error=2.0, floor=1e-4)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A number format of weights and compute.

    Attributes:
        name: the variant's name in the bundle.
        weights: what the weights of linear layers are stored as, for people.
        compute: what activations are, for people.
        float_type: the dtype of caches and cross-attention keys and values.
        tolerance: its distance from PyTorch, tensor by tensor; None where single numbers are not judged.
        agreement: the share of golden inputs whose generation must be token for token that of fp32, ties aside.
        metric_loss: points that a metric of whole outputs may lose against fp32.
        batch_invariant: a sentence's tokens are the same whoever shares its batch; otherwise that, too, is judged by
            agreement.
        runs_on_cpu: ONNX Runtime's CPU provider has the kernels.
        target: what it is made for unless the user says otherwise: "cpu" or "tensorrt". ONNX Runtime's CPU only
            emulates 16-bit and 8-bit floats.
    """

    name: str
    weights: str
    compute: str
    float_type: str = "float32"
    tolerance: Tolerance | None = None
    agreement: float = 1.0
    metric_loss: float = 0.0
    batch_invariant: bool = True
    runs_on_cpu: bool = True
    target: str = "cpu"


PRECISIONS = {
    p.name: p
    for p in (
        Precision(name="fp32", weights="float32", compute="float32", tolerance=FP32_TOLERANCE),
        Precision(
            name="fp16",
            weights="float16",
            compute="float16",
            float_type="float16",
            agreement=0.97,
            metric_loss=0.1,
            target="tensorrt",
        ),
        Precision(
            name="bf16",
            weights="bfloat16",
            compute="bfloat16",
            float_type="bfloat16",
            agreement=0.90,
            metric_loss=0.1,
            runs_on_cpu=False,
            target="tensorrt",
        ),
        Precision(
            name="w8",
            weights="int8, blocks of 256",
            compute="float32",
            agreement=0.95,
            metric_loss=0.1,
            batch_invariant=False,
        ),
        Precision(
            name="w4",
            weights="int4, blocks of 128",
            compute="float32",
            agreement=0.70,
            metric_loss=0.8,
            batch_invariant=False,
        ),
        Precision(name="int8", weights="int8, a scale a channel", compute="int8", agreement=0.85, metric_loss=0.3),
        Precision(
            name="fp8",
            weights="float8 E4M3",
            compute="float8 E4M3",
            agreement=0.80,
            metric_loss=0.8,
            target="tensorrt",
        ),
    )
}
