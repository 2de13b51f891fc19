"""`tfm-export trt`: TensorRT engines join a bundle."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from tfm_export.bundle import Bundle
from tfm_export.cli.options import bundle_argument, force_option, json_option, threads_option
from tfm_export.cli.progress import INTERVAL, Stopwatch
from tfm_export.cli.reports import print_check, size_text, table
from tfm_export.engines import ENGINES, FLAVORS, EngineRecord
from tfm_export.extras import require, require_onnxruntime
from tfm_export.precision import FLOATS_16_BIT, PRECISIONS

if TYPE_CHECKING:
    from tfm_export.trt.options import EngineOptions
    from tfm_export.trt.stage import Blueprint

# What the library also knows, said here so that help texts load nothing; a test holds the two together.
DEFAULT_VARIANT = "fp16"
DEFAULT_BATCH = 32


def precision_options(command: Any) -> Any:
    """`--fp16`, `--w8` and so on, each a flag of its own name."""
    for name in reversed(PRECISIONS):
        default = "  [default]" if name == DEFAULT_VARIANT else ""
        text = f"Weights {PRECISIONS[name].weights}.{default}"
        command = click.option(f"--{name}", name, is_flag=True, help=text)(command)
    return command


class Numbers(click.ParamType[tuple[int, ...]]):
    """Whole numbers with commas between them."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The numbers of a text."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(number) for number in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 64,256", param, ctx)


@click.command("trt")
@bundle_argument
@precision_options
@click.option(
    "--compute",
    type=click.Choice(FLOATS_16_BIT),
    help="The type in which layers of a quantised variant compute that are not quantised.  [default: fp16]",
)
@click.option(
    "--flavor",
    type=click.Choice(["auto", *FLAVORS]),
    default="auto",
    show_default=True,
    help="The library: tensorrt builds on the GPU that the engine is for; rtx builds without a GPU, for several GPUs. "
    "auto uses tensorrt if it and a GPU are usable, else rtx.",
)
@click.option(
    "--compute-capability",
    metavar="LIST",
    help="The GPUs to build for, such as 80,86,89,120, all in one engine.  [default: rtx: those of these four that "
    "support the precision; tensorrt: the GPU of this machine]",
)
@click.option(
    "--max-batch-size",
    type=click.IntRange(min=1),
    default=DEFAULT_BATCH,
    show_default=True,
    help="The largest batch, in sentences.",
)
@click.option(
    "--max-beam-size",
    type=click.IntRange(min=1),
    help="The largest number of beams.  [default: 4, or the bundle's own if larger]",
)
@click.option(
    "--max-source-length", type=click.IntRange(min=1), help="Longest source in tokens.  [default: the bundle's limit]"
)
@click.option(
    "--max-target-length", type=click.IntRange(min=1), help="Longest target in tokens.  [default: the bundle's limit]"
)
@click.option(
    "--capacity",
    type=Numbers(),
    metavar="LIST",
    default=(),
    help="Cache slots per sentence, such as 64,256: also build a decoder plan for each of these capacities, for "
    "shorter targets or fewer beams. Each plan has its own copy of the decoder's weights.",
)
@click.option("--name", help="The name of the engine.  [default: the precision and the flavour]")
@click.option(
    "--builder-optimization-level", type=click.IntRange(0, 5), help="How long to search for kernels; tensorrt only."
)
@click.option(
    "--timing-cache",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A file that stores the timings of kernels, so that the next build is faster; tensorrt only.",
)
@click.option(
    "--workspace", type=click.IntRange(min=1), metavar="MB", help="The most temporary memory that a layer may use."
)
@click.option("--no-verify", is_flag=True, help="Do not decode with the compiled graphs on the CPU.")
@click.option("--dry-run", is_flag=True, help="Only say what would be built, and how much memory it would take.")
@force_option
@threads_option
@json_option
def command(
    bundle: Path,
    compute: Literal["fp16", "bf16"] | None,
    flavor: Literal["auto", "tensorrt", "rtx"],
    compute_capability: str | None,
    max_batch_size: int,
    max_beam_size: int | None,
    max_source_length: int | None,
    max_target_length: int | None,
    capacity: tuple[int, ...],
    name: str | None,
    builder_optimization_level: int | None,
    timing_cache: Path | None,
    workspace: int | None,
    no_verify: bool,
    dry_run: bool,
    force: bool,
    threads: int | None,
    as_json: bool,
    **precisions: bool,
) -> None:
    """Build a TensorRT engine from a variant of BUNDLE (./tfm_bundle), check it, and add it to the bundle.

    If the bundle lacks the variant, it is made first. TensorRT-RTX needs no GPU to build.

    \b
    Example:
      tfm-export trt --fp16
      tfm-export trt my_bundle --int8 --flavor rtx --compute-capability 86,89 --capacity 64
      tfm-export trt my_bundle --w8 --dry-run

    The checks: every matrix product and attention has the requested type, every cache is updated in place, attention
    is fused, the plan's weights have the expected size, and the compiled graphs give PyTorch's tokens on a CPU. Ends
    with exit code 3, and adds nothing, if a check fails.
    """
    chosen = [variant for variant, wanted in precisions.items() if wanted] or [DEFAULT_VARIANT]
    if len(chosen) > 1:
        raise click.UsageError(f"one precision at a time: {' and '.join(f'--{variant}' for variant in chosen)}")
    opened = Bundle.open(bundle, unchecked=ENGINES)  # damaged ones are built again
    for module in ("onnx", "onnx_ir", "polygraphy"):
        require(module, extra="rtx")
    from tfm_export.trt.options import EngineOptions
    from tfm_export.trt.options import compute_capability as capability
    from tfm_export.trt.stage import build_blueprint, draw_blueprint

    options = EngineOptions(
        variant=chosen[0],
        compute=compute,
        flavor=flavor,
        compute_capabilities=tuple(map(capability, compute_capability.split(","))) if compute_capability else (),
        max_batch_size=max_batch_size,
        max_beam_size=max_beam_size,
        max_source_length=max_source_length,
        max_target_length=max_target_length,
        capacities=capacity,
        name=name,
        builder_optimization_level=builder_optimization_level,
        timing_cache=timing_cache,
        workspace_bytes=None if workspace is None else workspace * 1_000_000,
        verify=not no_verify,
        threads=threads,
    )
    with BuildProgress() as progress:
        progress.begin("looking at what is to be built")
        blueprint = draw_blueprint(opened, options, force=force, sketch=True)
        if dry_run:
            progress.end()
            _print_blueprint(blueprint, opened, as_json=as_json)
            return
        if options.variant not in opened.manifest.variants:
            _make_variant(opened, options, progress)
            progress.begin("deriving the graphs")
            blueprint = draw_blueprint(opened, options, force=force)
        record = build_blueprint(opened, blueprint, progress, force=force)
    if as_json:
        click.echo(record.to_json(), nl=False)
    else:
        _print_record(record, opened, blueprint)


class BuildProgress(Stopwatch):
    """What a build does, with the time it takes; on a terminal also what phase it is in."""

    def __init__(self) -> None:
        super().__init__()
        self._doing, self._since, self._drawn, self._width = "", 0.0, 0.0, 0

    def begin(self, what: str) -> None:
        """Something begins."""
        super().begin(what)
        self._doing, self._since = what, time.perf_counter()

    def advance(self, phase: str) -> None:
        """What has begun is in this phase now."""
        now = time.perf_counter()
        if sys.stderr.isatty() and now - self._drawn >= INTERVAL:
            self._drawn = now
            self._draw(f"{self._doing} ... {phase}, {now - self._since:.1f} s")

    def note(self, text: str) -> None:
        """Something that the user should know."""
        self.end()
        click.echo(f"note: {text}", err=True)

    def end(self) -> None:
        """The last thing is over."""
        if self._width:
            self._draw(f"{self._doing} ... ")
            self._width = 0
        super().end()

    def _draw(self, text: str) -> None:
        """Write over the line; leave the cursor behind the text."""
        click.echo(f"\r{text.ljust(self._width)}\r{text}", nl=False, err=True)
        self._width = len(text)


def _make_variant(bundle: Bundle, options: EngineOptions, progress: BuildProgress) -> None:
    """Make the precision variant that the engine is built from."""
    require_onnxruntime()
    from tfm_export.quantize import QuantizeOptions, quantize_bundle

    progress.note(f"the bundle lacks the variant {options.variant}, so it is made first")
    # A bundle that was exported without inputs still gets its engine; what nobody could judge is said.
    quantize_options = QuantizeOptions(target="tensorrt", unproven=True, threads=options.threads)
    report = quantize_bundle(bundle, options.variant, quantize_options, progress=progress.begin)
    progress.end()
    for note in report.notes:
        progress.note(note)


def _print_blueprint(blueprint: Blueprint, bundle: Bundle, *, as_json: bool) -> None:
    """What would be built."""
    memory, limits = blueprint.memory, blueprint.limits
    if as_json:
        state = {
            "name": blueprint.name,
            "flavor": blueprint.flavor.name,
            "flavor_version": blueprint.flavor.version,
            "compute_capabilities": blueprint.targets,
            "variant": blueprint.variant,
            "compute": blueprint.compute,
            "capacities": blueprint.capacities,
            "profiles": {s.plan: {p.name: p.shapes(s.inputs) for p in s.profiles} for s in blueprint.sources},
            "memory": memory.facts(),
        }
        click.echo(json.dumps(state, indent=2))
        return
    missing = blueprint.variant not in bundle.manifest.variants
    click.echo(f"{blueprint.part}: {blueprint.flavor.label}, compute capability {', '.join(blueprint.targets)}")
    click.echo(
        f"{blueprint.variant}, computing in {blueprint.compute}{'; the variant is made first' if missing else ''}"
    )
    click.echo()
    rows = []
    for source in blueprint.sources:
        for profile in source.profiles:
            axes = [profile.axes.get(axis) for axis in ("batch", "source", "query", "capacity")]
            rows.append([source.plan, profile.name, *("" if a is None else _range(a) for a in axes)])
    click.echo(table([["plan", "profile", "sentences", "source", "tokens a step", "slots"], *rows], right=range(2, 6)))
    click.echo()
    sentence = {f"a sentence, {slots:,} slots": size for slots, size in memory.cache_a_sentence.items()}
    parts = {
        **{f"weights of {plan}": size for plan, size in memory.weights.items()},
        **{f"activations of {plan}, at most": size for plan, size in memory.activations.items()},
        **{f"caches of {what}": size for what, size in sentence.items()},
        f"of that, each of {limits.max_beam_size} beams": memory.cache_a_beam,
        f"cross-attention of a sentence, {limits.max_source_length:,} source tokens": memory.cross_a_sentence,
        f"{limits.max_batch_size} of the longest sentences with all beams, everything": memory.full_batch,
    }
    rows = [[what, size_text(size)] for what, size in parts.items()]
    click.echo(table([["memory on the GPU", ""], *rows], right=[1]))


def _range(axis: Any) -> str:
    """A range of sizes, the usual one in brackets."""
    if axis.smallest == axis.largest:
        return f"{axis.largest:,}"
    return f"{axis.smallest:,}-{axis.largest:,} ({axis.usual:,})"


def _print_record(record: EngineRecord, bundle: Bundle, blueprint: Blueprint) -> None:
    """What was built, and what was proven of it."""
    capabilities = ", ".join(record.compute_capabilities)
    label = f"{FLAVORS[record.flavor]} {record.flavor_version}"
    click.echo(f"{bundle.path}/{ENGINES}/{record.name}: {label}, compute capability {capabilities}")
    click.echo()
    rows = []
    for plan, proof in record.proofs.items():
        stored = proof["stored_bytes"]
        rows.append(
            [
                plan,
                _counts(proof["products"]),
                _counts(proof["attention"]) + (", fused" if proof["fused"] else ""),
                str(proof["caches"] or ""),
                size_text(proof["weight_bytes"]),
                "" if stored is None else size_text(stored),
                size_text(proof["plan_bytes"]),
            ]
        )
    head = ["plan", "matrix products", "attention", "caches", "weights", "in the plan", "plan"]
    click.echo(table([head, *rows], right=[3, 4, 5, 6]))
    click.echo()
    print_check(True, "matrix products, attention and caches are those of the graphs, in the types that were asked for")
    if record.attention == "decomposed" and record.compute != "fp32":
        print_check(False, "attention is not fused: TensorRT has no kernel of this form for these GPUs")
    if any(proof["stored_bytes"] is not None for proof in record.proofs.values()):
        print_check(True, "the plans hold as many bytes of weights as the graphs")
    if record.agreement:
        text = f"at least {min(record.agreement.values()):.1%} of the golden inputs give PyTorch's tokens"
        print_check(True, f"the graphs that were compiled, on the CPU, decoded in {len(record.agreement)} ways: {text}")
    else:
        click.echo("note: the graphs that were compiled were not decoded with")
    if blueprint.flavor.gpu not in record.compute_capabilities:
        click.echo("note: no GPU here has run it")


def _counts(counted: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counted.items())) or "none"
