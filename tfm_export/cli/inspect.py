"""`tfm-export inspect`: what a bundle holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from tfm_export.bundle import Bundle, Manifest
from tfm_export.cli.options import bundle_argument, json_option
from tfm_export.cli.reports import print_files, table


@click.command("inspect")
@bundle_argument
@json_option
def command(bundle: Path, as_json: bool) -> None:
    """Show what a BUNDLE (./tfm_bundle) holds: its model, limits, variants, files, golden inputs and tools.

    Every file is compared with the hash in its manifest.

    \b
    Example:
      tfm-export inspect my_bundle
    """
    opened = Bundle.open(bundle)
    manifest = opened.manifest
    if as_json:
        click.echo(json.dumps({"path": str(bundle), **json.loads(manifest.to_json())}, indent=2, ensure_ascii=False))
        return
    click.echo(f"{bundle} (format version {manifest.format_version}), every file as its manifest says")
    for title, facts in _sections(manifest).items():
        if facts:
            click.echo()
            click.echo(table([[title, ""], *([name, _text(value)] for name, value in facts.items())]))
    click.echo()
    print_files(opened)


def _sections(manifest: Manifest) -> dict[str, dict[str, Any]]:
    dimensions, limits, special = manifest.dimensions, manifest.limits, manifest.special_ids
    generation = manifest.generation
    return {
        "model": {
            "source vocabulary": dimensions.source_vocabulary_size,
            "target vocabulary": dimensions.target_vocabulary_size,
            "decoder layers": dimensions.decoder_layers,
            "heads": f"{dimensions.heads} of size {dimensions.head_size}",
            "candidates": f"{dimensions.candidates} best tokens at each step",
            **_flat(manifest.model),
        },
        "limits": {
            "longest source": f"{limits.max_source_length} tokens",
            "longest target": f"{limits.max_target_length} tokens",
        },
        "special ids": {
            "padding": special.pad,
            "start": special.bos,
            "end": f"{special.eos}, {'also' if special.source_ends_with_eos else 'not'} at the end of sources",
            "unknown": "none" if special.unk is None else special.unk,
        },
        "decoding": {
            "longest target": f"{generation.max_length} tokens",
            "beam size": generation.beam_size,
            "length penalty": generation.length_penalty,
        },
        "variant": {name: _facts(facts) for name, facts in manifest.variants.items()},
        "engine": {name: _facts(facts) for name, facts in manifest.engines.items()},
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


def _facts(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_text(value)}" for name, value in _flat(facts).items()) or "-"


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
