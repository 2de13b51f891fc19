"""What a user can say of a variant."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tfm_export.errors import RequestError
from tfm_export.precision import PRECISIONS
from tfm_export.quantize.metrics import METRICS, Development

METHODS = ("max", "percentile", "entropy")


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """How a variant is made and judged.

    Attributes:
        target: "cpu": for ONNX Runtime on this machine's CPU, so it must be faster than fp32 here; "tensorrt": engines
            are built from it, its speed here says nothing; None for what the precision is meant for.
        calibration: real source texts, one an item; None takes the bundle's golden inputs.
        method: how the clipping of activations is found: "max", "percentile" or "entropy"; None takes the best known.
        development: sources and references to judge the metric on.
        metric: of `METRICS`.
        keep: put the variant in place even if it is not faster than fp32.
        min_agreement: share of generations that must be those of fp32; None for the precision's own.
        max_loss: points that the metric may lose; None for the precision's own.
        skip: patterns of layers that stay in fp32, such as "decoder_step/projection" or "*/layers.0.*".
        embeddings: quantise the embedding tables too, where the precision has a form for them.
        reduced_range: int8 weights of 7 bits; None for what this machine's CPU needs.
        int8_encoder: w8 and w4 with the encoder of int8: faster for long sources and for many.
        unproven: where there are no real inputs, make fp16 and bf16 all the same, unjudged.
        threads: to compute with; None for the CPUs this process may use.
    """

    target: Literal["cpu", "tensorrt"] | None = None
    calibration: Sequence[str] | None = None
    method: str | None = None
    development: Development | None = None
    metric: str = "exact"
    keep: bool = False
    min_agreement: float | None = None
    max_loss: float | None = None
    skip: Sequence[str] = ()
    embeddings: bool = True
    reduced_range: bool | None = None
    int8_encoder: bool = False
    unproven: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        """Refuse what has no meaning.

        Raises:
            RequestError: naming every such field.
        """
        problems = []
        if self.target not in (None, "cpu", "tensorrt"):
            problems.append(f"target must be cpu or tensorrt, found {self.target!r}")
        if self.method is not None and self.method not in METHODS:
            problems.append(f"method must be one of {', '.join(METHODS)}, found {self.method!r}")
        if self.metric not in METRICS:
            problems.append(f"metric must be one of {', '.join(METRICS)}, found {self.metric!r}")
        if self.min_agreement is not None and not 0 <= self.min_agreement <= 1:
            problems.append(f"min_agreement must be from 0 to 1, found {self.min_agreement}")
        if self.max_loss is not None and not self.max_loss >= 0:
            problems.append(f"max_loss must be 0 or more, found {self.max_loss}")
        if problems:
            raise RequestError(problems)

    def check_effects(self, precision: str) -> None:
        """Refuse what would change nothing of a variant, for whoever says it expects that it does.

        Raises:
            RequestError: naming every such option.
        """
        weights = [name for name, row in PRECISIONS.items() if row.weight_only]
        static = [name for name, row in PRECISIONS.items() if row.quantizes_activations]
        quantized, encoder = [*weights, *static], "those with --int8-encoder"
        given = {
            "--skip": (bool(self.skip), quantized),
            "--no-embeddings": (not self.embeddings, quantized),
            "--method": (self.method is not None, [*static, encoder]),
            "--reduced-range": (bool(self.reduced_range), ["int8", encoder]),
            "--int8-encoder": (self.int8_encoder, weights),
        }
        own = {precision, encoder} if self.int8_encoder and precision in weights else {precision}
        problems = [
            f"{name} has no effect on {precision}: it is for {', '.join(those)}"
            for name, (is_given, those) in given.items()
            if is_given and not own & set(those)
        ]
        if problems:
            raise RequestError(problems)


def check_precision(precision: str) -> None:
    """Make sure that a variant of this precision can be made.

    Raises:
        RequestError: there is none of that name, or it is fp32.
    """
    others = [name for name in PRECISIONS if name != "fp32"]
    if precision not in others:
        raise RequestError(f"precision must be one of {', '.join(others)}, found {precision!r}")


def skipped_layers(layers: Sequence[str], options: QuantizeOptions) -> set[str]:
    """The layers that options keep in fp32.

    Raises:
        RequestError: a pattern that no layer has.
    """
    skipped: set[str] = set()
    unknown = []
    for pattern in options.skip:
        found = fnmatch.filter(layers, pattern)
        skipped |= set(found)
        if not found:
            unknown.append(f"no layer is called {pattern!r}")
    if unknown:
        raise RequestError([*unknown, f"layers: {', '.join(layers)}"], "a name, or a pattern with * in it")
    if not options.embeddings:
        skipped |= {layer for layer in layers if layer.endswith("/embedding")}
    return skipped
