"""The quantise stage: a precision variant joins a bundle if it earns its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tfm_export.bundle import Bundle, Manifest, write_text
from tfm_export.errors import NumericError, ParityError, RequestError
from tfm_export.passes.recipe import Recipe, layer_names
from tfm_export.precision import FLOATS, PRECISIONS
from tfm_export.progress import Progress
from tfm_export.quantize.calibration import CalibrationSample, Observation, observe, thresholds
from tfm_export.quantize.evidence import Evidence, gather_evidence, padded_samples
from tfm_export.quantize.fusion import check_fused, fused_operators
from tfm_export.quantize.options import QuantizeOptions, check_precision, skipped_layers
from tfm_export.quantize.report import MetricComparison, QuantizeReport
from tfm_export.quantize.sensitivity import layer_costs
from tfm_export.quantize.speed import Speed, measure_speed, overall
from tfm_export.quantize.variant import PURPOSES, Made, write_variant
from tfm_export.runtime.cpu.onnx_runtime import OnnxModel
from tfm_export.runtime.cpu.processor import cpu_features
from tfm_export.staging import check_part, new_part
from tfm_export.verify import GenerationComparison, compare_generations, cpu_model

LARGEST_SHARE_KEPT = 0.5  # a variant with more layers in fp32 than that is not worth its name


def quantize_bundle(
    bundle: Bundle,
    precision: str,
    options: QuantizeOptions | None = None,
    *,
    force: bool = False,
    progress: Progress = lambda _: None,
) -> QuantizeReport:
    """Make a variant of a bundle's fp32 graphs, judge it, and add it to the bundle if it is good enough.

    If quality is lost, the layers that cost most are kept in fp32 until it is not, or until half of them are. What was
    measured is also written to reports/quantize_<precision>.json.

    Args:
        bundle: an open bundle.
        precision: "fp16", "bf16", "w8", "w4", "int8" or "fp8".
        options: how it is made and judged.
        force: replace the variant that is there.
        progress: told what begins.

    Raises:
        BundleError: the bundle has that variant already, lacks the fp32 graphs, or cannot be written to.
        RequestError: there are no real inputs to calibrate on or to judge with, or the variant is not faster than fp32.
        ParityError: the quality is not good enough, whatever is kept in fp32.
        ExportError: the graphs are not of the expected form, or ONNX Runtime did not fuse what it should.
    """
    check_precision(precision)
    work = _Work(bundle, precision, options or QuantizeOptions(), progress)
    work.check()
    part_name = f"onnx/{precision}"
    check_part(bundle, part_name, force=force)
    evidence = gather_evidence(bundle, precision, work.options, progress)
    recipe = work.recipe(evidence)
    with new_part(bundle, part_name, force=force, forget=lambda manifest: _without(manifest, precision)) as part:
        report = work.make(part.path, recipe, evidence)
        part.purposes |= {file: PURPOSES[file] for file in PURPOSES if (part.path / file).is_file()}
        part.record = lambda manifest: _with(manifest, precision, report)
    reports = bundle.path / "reports"
    reports.mkdir(exist_ok=True)
    write_text(reports / f"quantize_{precision}.json", report.to_json())
    return report


def _with(manifest: Manifest, precision: str, report: QuantizeReport) -> Manifest:
    facts = {"weights": PRECISIONS[precision].weights, "compute": PRECISIONS[precision].compute, **report.facts()}
    if report.int8_encoder:
        facts |= {"weights": f"{facts['weights']}; encoder int8", "compute": f"{facts['compute']}; encoder int8"}
    return replace(manifest, variants={**manifest.variants, precision: facts})


def _multiplies(layer: str) -> bool:
    """Whether it is a linear layer, and no embedding."""
    return not layer.endswith("/embedding")


def _without(manifest: Manifest, precision: str) -> Manifest:
    return replace(manifest, variants={name: v for name, v in manifest.variants.items() if name != precision})


@dataclass
class _Work:
    """The making of one variant."""

    bundle: Bundle
    precision: str
    options: QuantizeOptions
    progress: Progress
    target: str = field(init=False)
    fp32: Path = field(init=False)
    layers: list[str] = field(init=False)
    skip: frozenset[str] = field(init=False)

    def check(self) -> None:
        """Refuse what cannot come out well, before anything is computed."""
        self.target = self.options.target or PRECISIONS[self.precision].target
        if self.target == "cpu" and not PRECISIONS[self.precision].runs_on_cpu:
            raise RequestError(f"ONNX Runtime's CPU provider has no kernels for {self.precision}", "--for tensorrt")
        self.options.check_effects(self.precision)
        self.fp32 = self.bundle.variant_path("fp32")
        self.layers = layer_names(self.fp32)
        self.skip = frozenset(skipped_layers(self.layers, self.options))
        if len(self.skip) == len(self.layers):
            raise RequestError(
                f"all {len(self.layers)} layers are to be kept in fp32: nothing would be {self.precision}",
                "a --skip pattern of fewer layers",
            )
        if self.options.int8_encoder:
            left = {layer.partition("/")[0] for layer in self.layers if layer not in self.skip and _multiplies(layer)}
            for name, numbers in (("encoder", "int8"), ("decoder_step", self.precision)):
                if name not in left:
                    raise RequestError(
                        f"all layers of {name} are to be kept in fp32: nothing would be {numbers}",
                        "a --skip pattern of fewer layers, or no --int8-encoder",
                    )

    def recipe(self, evidence: Evidence) -> Recipe:
        """How to begin: with everything quantised that the options do not skip."""
        observations = self._observe(evidence.samples)
        # Padding is computed too, though nobody looks at it: an overflow there is an infinity times a weight of zero.
        padded = self._observe(padded_samples(evidence.samples, self.bundle.manifest))
        recipe = Recipe(
            precision=self.precision,
            skip=self.skip,
            ranges={name: max(o.largest, padded[name].largest) for name, o in observations.items()},
            reduced_range=self._reduced_range(),
            int8_encoder=self.options.int8_encoder,
        )
        return recipe if self.method is None else replace(recipe, thresholds=thresholds(observations, self.method))

    @property
    def static(self) -> str | None:
        """The precision of what is computed in 8 bits with fixed scales, if anything is."""
        return (
            "int8"
            if self.options.int8_encoder
            else self.precision
            if PRECISIONS[self.precision].quantizes_activations
            else None
        )

    @property
    def method(self) -> str | None:
        """How activations are calibrated; None where they are not."""
        return None if self.static is None else self.options.method or PRECISIONS[self.static].calibration

    def _observe(self, samples: Sequence[CalibrationSample]) -> dict[str, Observation]:
        return observe(self.bundle, samples, threads=self.options.threads, progress=self.progress)

    def _reduced_range(self) -> bool:
        wanted = self.options.reduced_range
        if wanted is not None or self.static != "int8":
            return bool(wanted)
        return self.target == "cpu" and cpu_features().saturates

    def make(self, folder: Path, recipe: Recipe, evidence: Evidence) -> QuantizeReport:
        """Write the variant, and write it again with more layers in fp32 until its quality is good enough."""
        costs: dict[str, float] = {}
        first, keep = recipe, 0
        while True:
            self.progress("writing the graphs")
            made = self._write(folder, recipe)
            report = self._report(made, recipe, first, costs, evidence)
            report = self._judged(report, folder, evidence)
            if report.quality_passed:
                break
            if self.precision in FLOATS:
                raise ParityError(report.problems(), "another precision; --min-agreement and --max-loss set the limits")
            costs = costs or layer_costs(
                self.bundle, first, evidence.samples, threads=self.options.threads, progress=self.progress
            )
            keep = max(1, 2 * keep)
            if keep > LARGEST_SHARE_KEPT * len(self.layers):
                worst = ", ".join(f"{name} ({cost:.2g})" for name, cost in [*costs.items()][:5])
                raise ParityError(
                    [
                        *report.problems(),
                        f"that is with {len(recipe.skip)} of {len(self.layers)} layers kept in fp32",
                        f"the layers that cost most, in nats a token: {worst}",
                    ],
                    "another precision; --min-agreement and --max-loss set the limits",
                )
            recipe = replace(first, skip=first.skip | set([*costs][:keep]))
        if not costs and self.precision not in FLOATS and evidence.golden:
            costs = layer_costs(
                self.bundle, first, evidence.samples, threads=self.options.threads, progress=self.progress
            )
        fused = self._fused(folder, made, recipe)
        speeds = self._speeds(folder, evidence)
        return replace(report, costs=costs, speeds=speeds, fused=fused)

    def _write(self, folder: Path, recipe: Recipe) -> Made:
        for file in folder.iterdir():
            file.unlink()
        return write_variant(self.fp32, folder, recipe)

    def _judged(self, report: QuantizeReport, folder: Path, evidence: Evidence) -> QuantizeReport:
        """The report with the variant's generations and metric; numbers that are not finite are bad quality."""
        try:
            generations, metric = self._judge(folder, evidence)
        except NumericError as problem:
            return replace(report, broken=str(problem))
        return replace(report, generations=generations, metric=metric)

    def _judge(self, folder: Path, evidence: Evidence) -> tuple[list[GenerationComparison], MetricComparison | None]:
        """Decode with the variant what fp32 has decoded."""
        if not evidence.golden:
            return [], None
        precision = PRECISIONS[self.precision]
        if self.options.min_agreement is not None:
            precision = replace(precision, agreement=self.options.min_agreement)
        special = self.bundle.manifest.special_ids
        with cpu_model(self.bundle, self.precision, folder=folder, threads=self.options.threads) as model:
            facts = {**self.bundle.manifest.golden, **evidence.facts}
            generations = compare_generations(model, evidence.golden, special, facts, precision, self.progress)
            if evidence.metric is None:
                return generations, None
            self.progress(f"decoding {len(evidence.metric.sources):,} sources of the development file")
            # A file too small to show the precision's own limit gives two sources' worth of room.
            own = max(precision.metric_loss, 200 / len(evidence.metric.sources))
            limit = own if self.options.max_loss is None else self.options.max_loss
            return generations, evidence.metric.compare(model, limit)

    def _fused(self, folder: Path, made: Made, recipe: Recipe) -> dict[str, dict[str, int]]:
        """What ONNX Runtime made of the graphs; that it made what is fast, where that is the point of the variant."""
        if self.target != "cpu":
            return {}
        fused = fused_operators(folder)
        if PRECISIONS[self.precision].weight_only:
            layers = [name for name in made.quantized if _multiplies(name)]
            check_fused(folder, {name: recipe.precision_of(name.partition("/")[0]) for name in layers})
        return {name: dict(counts) for name, counts in fused.items()}

    def _speeds(self, folder: Path, evidence: Evidence) -> list[Speed]:
        """How fast it is beside fp32.

        Raises:
            RequestError: it is not faster, and is not to be kept all the same.
        """
        if self.target != "cpu":
            return []
        fp32 = OnnxModel(self.bundle, threads=self.options.threads)
        variant = OnnxModel(self.bundle, variant=self.precision, folder=folder, threads=self.options.threads)
        try:
            speeds = measure_speed(
                fp32,
                variant,
                [sample.source_ids for sample in evidence.samples],
                self.bundle.manifest.special_ids,
                max_length=self.bundle.manifest.generation.max_length,
                progress=self.progress,
            )
        finally:
            fp32.close()
            variant.close()
        if overall(speeds) <= 1 and not self.options.keep:
            found = ", ".join(f"{s.name}: {s.ratio:.2f} x" for s in speeds)
            raise RequestError(
                f"{self.precision} is not faster than fp32 on this machine: {found}",
                "--keep to have it all the same, or --for tensorrt if engines are built from it",
            )
        return speeds

    def _report(
        self,
        made: Made,
        recipe: Recipe,
        first: Recipe,
        costs: dict[str, float],
        evidence: Evidence,
    ) -> QuantizeReport:
        mended = {name: f"costs {costs[name]:.2g} nats a token" for name in recipe.skip - first.skip}
        # Not if all of it had to be kept in fp32.
        int8_encoder = recipe.int8_encoder and any(
            name.startswith("encoder/") and _multiplies(name) for name in made.quantized
        )
        return QuantizeReport(
            precision=self.precision,
            target=self.target,
            int8_encoder=int8_encoder,
            method=self.method,
            calibrated_on=len(evidence.samples) if self.method or self.precision in FLOATS else 0,
            layers=len(self.layers),
            quantized=made.quantized,
            kept={**made.kept, **mended},
            costs=costs,
            generations=[],
            metric=None,
            speeds=[],
            bytes=made.bytes,
            fp32_bytes=sum(file.stat().st_size for file in self.fp32.iterdir()),
            reduced_range=recipe.reduced_range if int8_encoder or self.precision == "int8" else None,
            notes=self._notes(recipe, evidence),
        )

    def _notes(self, recipe: Recipe, evidence: Evidence) -> list[str]:
        notes = list(evidence.notes)
        if recipe.reduced_range:
            notes.append(
                "weights have 7 bits: without VNNI, sums of products of 8 bits saturate at 16 bits, or are slow"
            )
        return notes
