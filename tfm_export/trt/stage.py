"""The stage trt: a variant of a bundle becomes TensorRT plans, proven to be what was asked for, in the bundle."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tfm_export import graph
from tfm_export.bundle import GOLDEN, Bundle, Manifest
from tfm_export.engines import ENGINE_FILE, ENGINES, EngineRecord, plan_file
from tfm_export.errors import BuildError, BundleError
from tfm_export.extras import require_onnxruntime
from tfm_export.graph_files import RANGES
from tfm_export.precision import FLOATS, PRECISIONS, Compute
from tfm_export.staging import Part, check_part, new_part
from tfm_export.trt.builder import Builder
from tfm_export.trt.flavor import Flavor, open_flavor
from tfm_export.trt.inspection import can_inspect, inspect_plan
from tfm_export.trt.memory import Memory, estimate_memory
from tfm_export.trt.monitor import BuildObserver, Silent
from tfm_export.trt.network_source import NetworkSource, derive_sources, uses_ranges, write_sources
from tfm_export.trt.options import DEFAULT_BEAM, EngineOptions
from tfm_export.trt.profiles import EngineLimits, usual_source_length
from tfm_export.trt.proof import PlanProof, prove

NETWORK = "network.txt"
MOST_TOLD = 3  # values that stay in float32


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """What will be built, all of it checked.

    Attributes:
        name: of the engine.
        flavor: the library.
        targets: the compute capabilities that it is built for.
        variant: the precision.
        compute: what is computed in where nothing is quantised.
        limits: the largest sizes.
        capacities: slots a sentence, the smallest first.
        sources: the graphs.
        memory: what it will take on a GPU.
        options: what the user said.
    """

    name: str
    flavor: Flavor
    targets: tuple[str, ...]
    variant: str
    compute: Compute
    limits: EngineLimits
    capacities: tuple[int, ...]
    sources: Sequence[NetworkSource]
    memory: Memory
    options: EngineOptions

    @property
    def part(self) -> str:
        """The engine's folder in the bundle."""
        return f"{ENGINES}/{self.name}"


def draw_blueprint(bundle: Bundle, options: EngineOptions, *, force: bool = False, sketch: bool = False) -> Blueprint:
    """Work out what will be built, and refuse what cannot come out well.

    Args:
        bundle: an open bundle.
        options: how it is built.
        force: an engine of that name may be replaced.
        sketch: where the bundle lacks the variant, work with graphs of the same form and size; nothing can be built
            from such a blueprint.

    Raises:
        BackendUnavailable: no TensorRT library can build here.
        BuildError: naming what cannot be had: a precision on a GPU, a flag that the library ignores, a size beyond the
            model's limits, a graph that the parser would misread.
        BundleError: the bundle lacks the variant, has an engine of that name, or cannot be written to.
    """
    if not sketch:
        _check_variant(bundle, options.variant)
    flavor = open_flavor(options.flavor)
    flavor.check_options(options)
    targets = flavor.targets(options)
    limits = resolve_limits(bundle, options)
    capacities = resolve_capacities(limits, options.capacities)
    compute = options.computes_in
    name = options.name or _default_name(options, flavor, targets)
    check_part(bundle, f"{ENGINES}/{name}", force=force)
    sources = derive_sources(bundle, options.variant, compute, limits, capacities)
    wide = bundle.manifest.dimensions.padded(PRECISIONS[compute].float_type)
    return Blueprint(
        name=name,
        flavor=flavor,
        targets=targets,
        variant=options.variant,
        compute=compute,
        limits=limits,
        capacities=capacities,
        sources=sources,
        memory=estimate_memory(sources, wide, compute, limits, capacities),
        options=options,
    )


def build_engine(
    bundle: Bundle, options: EngineOptions | None = None, progress: BuildObserver | None = None, *, force: bool = False
) -> EngineRecord:
    """Build an engine of a bundle's variant, prove that it is what was asked for, and add it to the bundle.

    What was found is in the record's `proofs`, and in reports/engine_<name>.json.

    Args:
        bundle: an open bundle, which has the variant.
        options: how it is built.
        progress: told what goes on.
        force: replace an engine of that name.

    Raises:
        BackendUnavailable: no TensorRT library can build here.
        BuildError: what is asked for cannot be had, TensorRT did not build it, or built something else.
        BundleError: the bundle lacks the variant, has an engine of that name, or cannot be written to.
        KeyboardInterrupt: Ctrl-C was pressed; the bundle is as it was.
    """
    progress = progress or Silent()
    progress.begin("deriving the graphs")
    return build_blueprint(
        bundle, draw_blueprint(bundle, options or EngineOptions(), force=force), progress, force=force
    )


def build_blueprint(
    bundle: Bundle, blueprint: Blueprint, progress: BuildObserver, *, force: bool = False
) -> EngineRecord:
    """Build what a blueprint says, prove it and add it to the bundle; raises as `build_engine` does."""
    start = time.perf_counter()
    with new_part(bundle, blueprint.part, force=force, forget=lambda m: _without(m, blueprint.name)) as part:
        _tell_kept(blueprint.sources[:2], progress)  # all capacities keep the same
        progress.begin("writing the graphs")
        write_sources(blueprint.sources, part.path)
        builder = Builder(blueprint.flavor, blueprint.options, blueprint.targets, progress)
        proofs = [_build_plan(builder, source, blueprint, part, progress) for source in blueprint.sources]
        seconds = time.perf_counter() - start
        agreement = _verify(bundle, blueprint, part, progress) if blueprint.options.verify else {}
        record = _record(bundle, blueprint, proofs, agreement, seconds)
        (part.path / ENGINE_FILE).write_text(record.to_json(), encoding="utf-8")
        part.purposes[ENGINE_FILE] = "what the engine is, and what was proven of it"
        part.record = lambda manifest: _with(manifest, record)
    return record


def resolve_limits(bundle: Bundle, options: EngineOptions) -> EngineLimits:
    """The sizes that an engine takes: what the user said, within what the model can.

    Raises:
        BuildError: naming every size that is beyond the model's.
    """
    limits, generation = bundle.manifest.limits, bundle.manifest.generation
    asked = {
        "max_source_length": (options.max_source_length, limits.max_source_length),
        "max_target_length": (options.max_target_length, limits.max_target_length),
        "max_beam_size": (options.max_beam_size, bundle.manifest.dimensions.target_vocabulary_size),
    }
    problems = [
        f"{name.replace('_', ' ')} must be at most {most}, found {value}"
        for name, (value, most) in asked.items()
        if value is not None and value > most
    ]
    if problems:
        raise BuildError(problems, "limits that the model has: tfm-export inspect shows them")
    source = options.max_source_length or limits.max_source_length
    beam = options.max_beam_size or min(
        max(DEFAULT_BEAM, generation.beam_size), bundle.manifest.dimensions.target_vocabulary_size
    )
    return EngineLimits(
        max_batch_size=options.max_batch_size,
        max_beam_size=beam,
        max_source_length=source,
        max_target_length=options.max_target_length or limits.max_target_length,
        usual_source_length=usual_source_length(bundle, source),
        usual_beam_size=min(generation.beam_size, beam),
    )


def resolve_capacities(limits: EngineLimits, asked: Sequence[int]) -> tuple[int, ...]:
    """Slots a sentence of every decoder plan: those asked for, and the largest.

    Raises:
        BuildError: naming those that hold no step, or more than the longest target needs.
    """
    least, most = 1 + limits.max_beam_size, limits.largest_capacity
    wrong = [capacity for capacity in asked if not least <= capacity <= most]
    if wrong:
        raise BuildError(
            f"capacities must be from {least}, a start token and a step of {limits.max_beam_size} beams, to {most}, "
            f"{limits.max_target_length} tokens of {limits.max_beam_size} beams; found {', '.join(map(str, wrong))}"
        )
    return tuple(sorted({*asked, most}))


def _check_variant(bundle: Bundle, variant: str) -> None:
    if variant not in bundle.manifest.variants:
        found = ", ".join(bundle.manifest.variants) or "none"
        raise BundleError(
            f"{bundle.path} has no variant {variant} to build from; it has {found}",
            f"tfm-export quantize {bundle.path} --{variant} --for tensorrt, which makes it",
        )


def _default_name(options: EngineOptions, flavor: Flavor, targets: Sequence[str]) -> str:
    words = [options.variant]
    if options.variant not in FLOATS and options.computes_in != "fp16":
        words.append(options.computes_in)
    words.append(flavor.name)
    if flavor.name == "tensorrt":  # of this GPU alone: engines for others may join it in the bundle
        words += [f"sm{target.replace('.', '')}" for target in targets]
    return "-".join(words)


def _tell_kept(sources: Sequence[NetworkSource], progress: BuildObserver) -> None:
    """Say what is computed in float32 although another type was asked for."""
    for source in sources:
        if source.kept:
            some = "; ".join(f"{name}: {reason}" for name, reason in [*source.kept.items()][:MOST_TOLD])
            more = f"; and {len(source.kept) - MOST_TOLD} more" if len(source.kept) > MOST_TOLD else ""
            progress.note(f"{source.plan}: what does not fit stays in float32: {some}{more}")


def _build_plan(
    builder: Builder, source: NetworkSource, blueprint: Blueprint, part: Part, progress: BuildObserver
) -> PlanProof:
    """Build and prove one plan, and write down what it is made of."""
    plan = part.path / plan_file(source.plan)
    built = builder.build(source, part.path, plan)
    progress.begin(f"proving {plan.name}")
    proof = prove(
        source,
        source.precision,
        blueprint.compute,
        built.network,
        plan,
        fused=built.fused and blueprint.compute != "fp32",
        readable=blueprint.flavor.name == "rtx",
    )
    listing = f"{source.plan}.{NETWORK}"
    (part.path / listing).write_text(built.text, encoding="utf-8")
    part.purposes |= {
        plan.name: f"TensorRT plan of {source.plan}",
        listing: f"the layers that TensorRT was given for {source.plan}, for people",
    }
    if can_inspect(blueprint.flavor, blueprint.targets):
        inspection = inspect_plan(blueprint.flavor, source, plan)
        layers = f"{source.plan}.layers.json"
        (part.path / layers).write_text(inspection.layers, encoding="utf-8")
        part.purposes[layers] = f"the layers that TensorRT made of {source.plan}, for people"
    return proof


def _verify(bundle: Bundle, blueprint: Blueprint, part: Part, progress: BuildObserver) -> dict[str, float]:
    """Decode with the graphs that were compiled; the shares that agree."""
    if GOLDEN not in bundle.manifest.files:
        progress.note(f"the bundle has no {GOLDEN}, so the graphs that were compiled are not decoded with")
        return {}
    if bundle.manifest.golden["synthetic"] and blueprint.variant != "fp32":
        progress.note("the golden inputs are random ids: how many generations agree is told, and nothing demanded")
    require_onnxruntime()
    from tfm_export.trt.twin import verify_sources

    comparisons = verify_sources(
        bundle,
        blueprint.sources,
        part.path,
        variant=blueprint.variant,
        compute=blueprint.compute,
        threads=blueprint.options.threads,
        progress=progress.begin,
    )
    return {comparison.name: comparison.agreement for comparison in comparisons}


def _record(
    bundle: Bundle, blueprint: Blueprint, proofs: Sequence[PlanProof], agreement: dict[str, float], seconds: float
) -> EngineRecord:
    limits, float_type = blueprint.limits, PRECISIONS[blueprint.compute].float_type
    sources = [graph.ENCODER, graph.DECODER_STEP, graph.WEIGHTS]
    if uses_ranges(blueprint.variant, blueprint.compute):
        sources.append(RANGES)
    files = [f"onnx/{blueprint.variant}/{name}" for name in sources]
    return EngineRecord(
        name=blueprint.name,
        flavor=blueprint.flavor.name,
        flavor_version=blueprint.flavor.version,
        compute_capabilities=blueprint.targets,
        variant=blueprint.variant,
        compute=blueprint.compute,
        float_type=float_type,
        max_batch_size=limits.max_batch_size,
        max_beam_size=limits.max_beam_size,
        max_source_length=limits.max_source_length,
        max_target_length=limits.max_target_length,
        capacities=blueprint.capacities,
        plans={source.plan: plan_file(source.plan) for source in blueprint.sources},
        onnx_hashes={name: bundle.manifest.files[name].sha256 for name in files},
        head_size_padded=bundle.manifest.dimensions.padded(float_type).head_size,
        attention="fused" if all(proof.fused for proof in proofs) else "decomposed",
        profiles={
            source.plan: tuple(profile.shapes(source.inputs) for profile in source.profiles)
            for source in blueprint.sources
        },
        build_seconds=round(seconds, 1),
        proofs={proof.plan: proof.facts() for proof in proofs},
        agreement=agreement,
        tools=_tool_versions(blueprint.flavor),
    )


def _tool_versions(flavor: Flavor) -> dict[str, str]:
    names = ("tfm-export", "onnx", "onnx-ir", "polygraphy")
    versions = {name: importlib.metadata.version(name) for name in names}
    return {**versions, flavor.module.__name__: flavor.version, "python": platform.python_version()}


def _with(manifest: Manifest, record: EngineRecord) -> Manifest:
    return replace(manifest, engines={**manifest.engines, record.name: record.facts()})


def _without(manifest: Manifest, name: str) -> Manifest:
    return replace(manifest, engines={other: facts for other, facts in manifest.engines.items() if other != name})
