"""The precisions: what numbers a variant is made of, and how far it may be from PyTorch.

Of fp32 every number is judged, by what rounding explains: see `tfm_export.verify.steps`. Every other precision rounds
on purpose, so its generations are judged by how many stay the same.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOAT32_EPSILON, FLOAT64_EPSILON = 2.0**-23, 2.0**-52

# What rounding explains is the most that any of some trials changes: where two keys are equally good, one trial may
# move both alike. An error may be so many times as large: `python -m benchmarks.rounding` shows that right ones are far
# below that.
TRIALS = 4
TIMES_ROUNDING = 16.0


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A number format of weights and compute.

    Attributes:
        name: the variant's name in the bundle.
        weights: what the weights of linear layers are stored as, for people.
        compute: what activations are, for people.
        float_type: the dtype of caches and cross-attention keys and values.
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
    float_type: str = "float32"
    judged_by_number: bool = False
    agreement: float = 1.0
    metric_loss: float = 0.0
    batch_invariant: bool = True
    runs_on_cpu: bool = True
    target: str = "cpu"


PRECISIONS = {
    p.name: p
    for p in (
        Precision(name="fp32", weights="float32", compute="float32", judged_by_number=True),
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
