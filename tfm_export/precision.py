"""The one table of precisions: what numbers a variant is made of, what runs it, and how far it may be from PyTorch.

Of fp32 every number is judged, by what rounding explains: see `tfm_export.verify.steps`. Every other precision rounds
on purpose, so its generations are judged by how many stay the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

FLOAT32_EPSILON, FLOAT64_EPSILON = 2.0**-23, 2.0**-52

# What rounding explains is the most that any of some trials changes: where two keys are equally good, one trial may
# move both alike. An error may be so many times as large: `python -m benchmarks.rounding` shows that right ones are far
# below that.
TRIALS = 4
TIMES_ROUNDING = 16.0

FloatType = Literal["float32", "float16", "bfloat16"]
Compute = Literal["fp32", "fp16", "bf16"]
FLOATS: tuple[Compute, ...] = get_args(Compute)  # the precisions that quantise nothing, which engines may compute in


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A number format of weights and compute.

    Attributes:
        name: the variant's name in the bundle.
        weights: what the weights of linear layers are stored as, for people.
        compute: what activations are, for people.
        weight_type: the dtype that the weights of linear layers are stored in; "fp8" is E4M3.
        float_type: the dtype of what is not quantised; with it of caches and cross-attention keys and values.
        calibration: where activations are quantised, to the type of the weights: how their clipping is found unless the
            user says otherwise.
        fused_operator: what ONNX Runtime makes of a quantised layer on a CPU, if it has such an operator; where it does
            not, the weights are dequantised anew at each call.
        least_capability: the least compute capability of GPUs with instructions for it, if it is above TensorRT's own.
        judged_by_number: every tensor is compared, number by number.
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
    weight_type: Literal[FloatType, "int8", "int4", "fp8"]
    float_type: FloatType = "float32"
    # By what the example loses: floats of 8 bits have range to spare, and lose by clipping.
    calibration: Literal["percentile", "max"] | None = None
    fused_operator: str | None = None
    least_capability: str | None = None
    judged_by_number: bool = False
    agreement: float = 1.0
    metric_loss: float = 0.0
    batch_invariant: bool = True
    runs_on_cpu: bool = True
    target: str = "cpu"

    @property
    def quantized(self) -> bool:
        """Whether weights are stored in another type than that of what is computed."""
        return self.weight_type != self.float_type

    @property
    def quantizes_activations(self) -> bool:
        """Whether the inputs of linear layers are quantised, too, at scales that calibration has found."""
        return self.calibration is not None

    @property
    def weight_only(self) -> bool:
        """Whether weights are quantised, and activations are not."""
        return self.quantized and not self.quantizes_activations

    @property
    def item_bytes(self) -> int:
        """The bytes of a number of `float_type`."""
        return 4 if self.float_type == "float32" else 2


PRECISIONS = {
    p.name: p
    for p in (
        Precision(name="fp32", weights="float32", compute="float32", weight_type="float32", judged_by_number=True),
        Precision(
            name="fp16",
            weights="float16",
            compute="float16",
            weight_type="float16",
            float_type="float16",
            agreement=0.97,
            metric_loss=0.1,
            target="tensorrt",
        ),
        Precision(
            name="bf16",
            weights="bfloat16",
            compute="bfloat16",
            weight_type="bfloat16",
            float_type="bfloat16",
            least_capability="8.0",
            agreement=0.90,
            metric_loss=0.1,
            runs_on_cpu=False,
            target="tensorrt",
        ),
        Precision(
            name="w8",
            weights="int8, blocks of 256",
            compute="float32",
            weight_type="int8",
            fused_operator="MatMulNBits",
            agreement=0.95,
            metric_loss=0.1,
            batch_invariant=False,
        ),
        Precision(
            name="w4",
            weights="int4, blocks of 128",
            compute="float32",
            weight_type="int4",
            fused_operator="MatMulNBits",
            least_capability="8.0",
            agreement=0.70,
            metric_loss=0.8,
            batch_invariant=False,
        ),
        Precision(
            name="int8",
            weights="int8, a scale a channel",
            compute="int8",
            weight_type="int8",
            calibration="percentile",
            fused_operator="QGemm",
            agreement=0.85,
            metric_loss=0.3,
        ),
        Precision(
            name="fp8",
            weights="float8 E4M3",
            compute="float8 E4M3",
            weight_type="fp8",
            calibration="max",
            least_capability="8.9",
            agreement=0.80,
            metric_loss=0.8,
            target="tensorrt",
        ),
    )
}
FLOATS_16_BIT = tuple(name for name in FLOATS if PRECISIONS[name].item_bytes == 2)
