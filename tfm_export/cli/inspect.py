"""`tfm-export inspect`: what a bundle holds, or what a checkpoint tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO

import click

from tfm_export.bundle import DEFAULT_PATH, MANIFEST, Bundle, Manifest
from tfm_export.cli.checkpoint_adapter import adapter_option
from tfm_export.cli.checkpoint_options import checkpoint_options, given_settings
from tfm_export.cli.checkpoint_report import print_checkpoint
from tfm_export.cli.expect import expect_option
from tfm_export.cli.options import json_option
from tfm_export.cli.reports import print_files, size_text, table
from tfm_export.engines import ENCODER_PLAN, ENGINES, FLAVORS, plan_file, read_engine
from tfm_export.errors import BackendUnavailable, BundleError
from tfm_export.json_text import write_json
from tfm_export.runtime.cpu.saturation import saturation_note
from tfm_export.tokenizer import load_tokenizer
from tfm_export.tokenizer.special_tokens import NamedSpecialIds, tokens_of


@click.command("inspect")
@click.argument("path", metavar="[PATH]", type=click.Path(path_type=Path), default=DEFAULT_PATH, required=False)
@checkpoint_options
@adapter_option
@expect_option
@json_option
def command(
    path: Path, as_json: bool, config: Path | None, adapter: str | None, expect: BinaryIO | None, **options: Any
) -> None:
    """Show the contents of a bundle (./tfm_bundle), or which settings a checkpoint contains and which it lacks.

    For a bundle: its model, limits, variants, files, golden inputs and tools; every file is compared with the hash in
    the manifest. For a checkpoint: the library that wrote it, the settings found in it, and the missing settings with
    the options that give them.

    \b
    Example:
      tfm-export inspect my_bundle
      tfm-export inspect checkpoint.pt --heads 8
      tfm-export inspect checkpoint.pt --heads 8 --expect pairs.tsv
      tfm-export inspect model.pt --adapter my_adapter.py:load

    With --expect, ends with exit code 3 if the pairs do not come out as expected.
    """
    if (
        adapter is not None
        or path.is_file()
        or (path.is_dir() and not (path / MANIFEST).exists() and (path / "config.json").exists())
    ):
        if adapter is not None and expect is not None:
            raise click.UsageError("--expect has no effect with --adapter here: onnx and verify take both")
        print_checkpoint(path, given_settings(config, options), adapter=adapter, expect=expect, as_json=as_json)
        return
    given_options = {"config": config, "expect": expect, **options}
    if given := [name for name, value in given_options.items() if value is not None]:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise click.UsageError(f"{names}: for checkpoints, and {path} is none")
    inspect_bundle(path, as_json=as_json)


def inspect_bundle(bundle: Path, *, as_json: bool) -> None:
    """Print what a bundle holds."""
    opened = Bundle.open(bundle)
    manifest = opened.manifest
    special = _special_tokens(opened)
    for doubt in special.doubts():
        click.echo(f"warning: {doubt}", err=True)
    if as_json:
        click.echo(write_json({"path": str(bundle), **json.loads(manifest.to_json())}, indent=2))
        return
    click.echo(f"{bundle} (format version {manifest.format_version}), every file as its manifest says")
    for title, facts in _sections(manifest).items():
        if facts:
            click.echo()
            click.echo(table([[title, ""], *([name, _text(value)] for name, value in facts.items())]))
    click.echo()
    click.echo(table(special.rows()))
    click.echo()
    click.echo(variants_table(opened))
    click.echo()
    if manifest.engines:
        click.echo(engines_table(opened))
        click.echo()
    print_files(opened)


def _special_tokens(bundle: Bundle) -> NamedSpecialIds:
    """The special ids with their tokens; without these where the tokenizer's library is missing."""
    ids = bundle.manifest.special_ids
    try:
        if tokenizer := load_tokenizer(bundle):
            return tokens_of(ids, tokenizer)
    except BackendUnavailable as problem:
        click.echo(f"note: tokens are not shown: {problem}", err=True)
    return NamedSpecialIds(ids=ids)


def variants_table(bundle: Bundle) -> str:
    """The precisions of a bundle: what they are, and what was measured when they were made."""
    auto, rows = bundle.fastest_variant(), []
    for name, facts in bundle.manifest.variants.items():
        folder = f"onnx/{name}/"
        size = sum(entry.bytes for file, entry in bundle.manifest.files.items() if file.startswith(folder))
        metric = facts.get("metric")
        rows.append(
            [
                name + (" (auto)" if name == auto else ""),
                facts.get("weights", "") + _range_text(facts),
                facts.get("compute", ""),
                facts.get("target", ""),
                facts.get("quantized", ""),
                "" if facts.get("agreement") is None else f"{facts['agreement']:.1%}",
                "" if metric is None else f"{metric['name']} {metric['variant']:.2f} (fp32 {metric['fp32']:.2f})",
                "" if facts.get("speed") is None else f"{facts['speed']:.2f} x",
                size_text(size),
            ]
        )
    head = ["variant", "weights", "compute", "for", "in these numbers", "as fp32", "metric", "speed", "size"]
    keep = [i for i in range(len(head)) if any(row[i] for row in rows)]
    text = table([[row[i] for i in keep] for row in [head, *rows]], right=[keep.index(8)] if keep else [])
    notes = {name: saturation_note(bundle, name) for name in bundle.manifest.variants}
    return "\n".join([text, *(f"note: {name}: {note}" for name, note in notes.items() if note)])


def _range_text(facts: dict[str, Any]) -> str:
    """How many bits of its weights of 8 bits a variant uses, where 8-bit activations meet them."""
    return "" if "reduced_range" not in facts else "; range 7 bits" if facts["reduced_range"] else "; range 8 bits"


def engines_table(bundle: Bundle) -> str:
    """The TensorRT engines of a bundle: what they are for, how large they are, and whether they still belong to it."""
    rows, notes = [], []
    for name, facts in bundle.manifest.engines.items():
        try:
            read_engine(bundle, name)
        except BundleError as error:
            notes += [f"note: {problem}" for problem in error.problems]
            if error.hint:
                notes.append(f"      {error.hint}")
        entries = {n: e.bytes for n, e in bundle.manifest.files.items() if n.startswith(f"{ENGINES}/{name}/")}
        plans = {file: size for file, size in entries.items() if file.endswith(".plan")}
        encoder = sum(size for file, size in plans.items() if file.endswith(f"/{plan_file(ENCODER_PLAN)}"))
        rows.append(
            [
                name,
                f"{FLAVORS.get(facts['flavor'], facts['flavor'])} {facts['flavor_version']}",
                ", ".join(facts["compute_capabilities"]),
                facts["variant"] + ("" if facts["compute"] == facts["variant"] else f" on {facts['compute']}"),
                facts["attention"],
                f"{facts['max_batch_size']} x {facts['max_beam_size']}",
                f"{facts['max_source_length']:,}, {facts['max_target_length']:,}",
                ", ".join(map(str, facts["capacities"])),
                size_text(encoder),
                size_text(sum(plans.values()) - encoder),
            ]
        )
    head = ["engine", "library", "GPUs", "numbers", "attention", "batch x beam", "lengths", "slots"]
    text = table([[*head, "encoder", "decoder"], *rows], right=[8, 9])
    return "\n".join([text, *notes])


def _sections(manifest: Manifest) -> dict[str, dict[str, Any]]:
    dimensions, limits, generation = manifest.dimensions, manifest.limits, manifest.generation
    return {
        "model": {
            "source vocabulary": dimensions.source_vocabulary_size,
            "target vocabulary": dimensions.target_vocabulary_size,
            "decoder layers": dimensions.decoder_layers,
            "heads": f"{dimensions.heads} of size {dimensions.head_size}",
            "candidates": f"{dimensions.candidates} best tokens at each step",
            **_flat({**manifest.model, "reading": manifest.model.get("reading", {}).get("verdict", "not known")}),
        },
        "limits": {
            "longest source": f"{limits.max_source_length} tokens",
            "longest target": f"{limits.max_target_length} tokens",
        },
        "decoding": {
            "longest target": f"{generation.max_length} tokens",
            "beam size": generation.beam_size,
            "length penalty": generation.length_penalty,
            **_flat(generation.options),
        },
        "golden inputs": _flat(manifest.golden),
        "made with": dict(manifest.tools),
    }


def _flat(facts: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Facts within facts, named by their path."""
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        path = f"{prefix}{name.replace('_', ' ')}"
        flat |= _flat(value, f"{path}: ") if isinstance(value, dict) else {path: value}
    return flat


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "none"
    return "none" if value is None else str(value)
