"""What the making of a variant measured, and the verdict."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from tfm_export.quantize.speed import Speed, overall
from tfm_export.verify import GenerationComparison


@dataclass(frozen=True, kw_only=True)
class MetricComparison:
    """The user's metric of fp32 and of the variant, on the same sources.

    Attributes:
        name: of the metric.
        sources: how many.
        fp32: its score.
        variant: its score.
        loss: points by which the variant is worse; negative if it is better.
        limit: the largest accepted loss.
    """

    name: str
    sources: int
    fp32: float
    variant: float
    loss: float
    limit: float

    @property
    def passed(self) -> bool:
        """Within the limit."""
        return self.loss <= self.limit


@dataclass(frozen=True, kw_only=True)
class QuantizeReport:
    """How a variant was made, and whether it earns its place.

    Attributes:
        precision: its name.
        target: "cpu" or "tensorrt".
        int8_encoder: the encoder is that of int8.
        method: how activations were calibrated; None where nothing is.
        calibrated_on: how many samples of real inputs were used.
        layers: how many there are.
        quantized: those in the new numbers.
        kept: what stays in fp32, and why.
        costs: what a layer costs alone, in nats a token (KL divergence from fp32), the most expensive first.
        generations: golden inputs decoded and compared; empty if there were only random ids.
        metric: the user's; None if none was asked for.
        speeds: beside fp32; empty unless the target is this machine's CPU.
        bytes: of the variant's files.
        fp32_bytes: of fp32's.
        fused: fused operators that ONNX Runtime made of the graphs, by graph.
        broken: why the variant could not even be judged: numbers that are not finite.
        reduced_range: weights that 8-bit activations are multiplied with have 7 bits, not 8; None where there are none.
        notes: what else people should know.
    """

    precision: str
    target: str
    int8_encoder: bool
    method: str | None
    calibrated_on: int
    layers: int
    quantized: list[str]
    kept: dict[str, str]
    costs: dict[str, float]
    generations: list[GenerationComparison]
    metric: MetricComparison | None
    speeds: list[Speed]
    bytes: int
    fp32_bytes: int
    fused: dict[str, dict[str, int]] = field(default_factory=dict)
    broken: str | None = None
    reduced_range: bool | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def quality_passed(self) -> bool:
        """Every comparison of generations, and the metric."""
        return (
            self.broken is None
            and all(c.passed for c in self.generations)
            and (self.metric is None or self.metric.passed)
        )

    @property
    def speed(self) -> float | None:
        """How many times faster than fp32, the mean over the ways of decoding; None if it was not measured."""
        return overall(self.speeds) if self.speeds else None

    @property
    def agreement(self) -> float | None:
        """The smallest share of generations that are fp32's; None if there were none to compare."""
        return min((c.agreement for c in self.generations), default=None)

    def problems(self) -> list[str]:
        """Why its quality is not enough, in sentences."""
        found = [] if self.broken is None else [self.broken]
        found += [
            f"{c.name}: {c.agreement:.1%} of {c.count} inputs agree, {c.needed:.0%} are needed"
            for c in self.generations
            if not c.passed
        ]
        if self.metric is not None and not self.metric.passed:
            m = self.metric
            found.append(
                f"{m.name}: {m.fp32:.2f} became {m.variant:.2f} on {m.sources:,} sources, {m.loss:.2f} points worse; "
                f"{m.limit:.2f} are accepted"
            )
        return found

    def facts(self) -> dict[str, Any]:
        """What the manifest says of the variant."""
        facts: dict[str, Any] = {
            "target": self.target,
            "quantized": f"{len(self.quantized)} of {self.layers} layers",
            "kept": len(self.kept),
            "bytes": self.bytes,
            "agreement": self.agreement,
        }
        if self.int8_encoder:
            facts["int8_encoder"] = True
        if self.reduced_range is not None:
            facts["reduced_range"] = self.reduced_range
        if self.method is not None:
            facts["calibration"] = self.method
        if self.metric is not None:
            facts["metric"] = {"name": self.metric.name, "fp32": self.metric.fp32, "variant": self.metric.variant}
        if self.speed is not None:
            facts["speed"] = round(self.speed, 3)
        return facts

    def to_json(self) -> str:
        """Everything, for programs."""
        state = {**asdict(self), "agreement": self.agreement, "speed": self.speed, "passed": self.quality_passed}
        for entry, speed in zip(state["speeds"], self.speeds, strict=True):
            entry["ratio"] = speed.ratio
        return json.dumps(state, indent=2, ensure_ascii=False) + "\n"
