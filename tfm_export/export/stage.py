"""The export stage: a checkpoint becomes a bundle whose generations are PyTorch's."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from reference_model import TransformerConfig
from tfm_export import graph
from tfm_export.bundle import GOLDEN, TOKENIZER, Bundle, Limits, Manifest, write_text
from tfm_export.checkpoints import Adapter, Factory, SourceModel, read_adapter, read_checkpoint
from tfm_export.checkpoints.key_map import MOST_POSITIONS
from tfm_export.errors import ExportError, ParityError, RequestError
from tfm_export.export.golden import MOST_LINES, GoldenSet, GoldenSource, make_golden, synthetic_sources
from tfm_export.export.promises import check_promises
from tfm_export.export.variant import dimensions_of, write_fp32_variant
from tfm_export.extras import require_onnxruntime
from tfm_export.progress import Progress
from tfm_export.staging import check_target, new_bundle
from tfm_export.tokenizer import load_tokenizer
from tfm_export.tokenizer.sources import encode_sources
from tfm_export.verify import (
    Expectations,
    ExpectedComparison,
    ParityReport,
    ReadingProof,
    adapter_hint,
    add_transformers,
    golden_text,
    verify_variant,
    write_reports,
)
from tfm_export.verify.expectations import pair_source
from tfm_export.verify.reading import check_source
from tfm_export.verify.steps import measure_tie_margin


def export_bundle(
    checkpoint: str | Path,
    path: str | Path,
    *,
    settings: Mapping[str, Any] | None = None,
    adapter: Factory | None = None,
    inputs: Sequence[str] | None = None,
    expectations: Expectations | None = None,
    made_from: Sequence[Path] = (),
    max_source_length: int | None = None,
    max_target_length: int | None = None,
    attention_layer: int | None = None,
    verify: bool = True,
    force: bool = False,
    progress: Progress = lambda _: None,
) -> tuple[Bundle, ParityReport | None]:
    """Export a checkpoint and verify the result.

    Args:
        checkpoint: the file, or a folder with a configuration and weights.
        path: the bundle to write.
        settings: what the checkpoint does not say of itself, by the names in `checkpoints.settings`.
        adapter: makes the model of the checkpoint's path, for models that are not read otherwise. It is code of the
            caller's, which runs here.
        inputs: real source texts for the golden set; without them it is synthetic.
        expectations: the user's own pairs: the reading of the checkpoint is held to them, and they join the golden set.
        made_from: files, beside the checkpoint, that must not go with a bundle that is replaced.
        max_source_length: the longest source in tokens, its end token included; None for all that the model takes, or,
            if its positions have no end, the length that its configuration names.
        max_target_length: the same of targets.
        attention_layer: also write the graph that gives this decoder layer's cross-attention weights; negative counts
            from the last.
        verify: compare with PyTorch before the bundle is put in place.
        force: replace a bundle that is there.
        progress: told what begins.

    Returns:
        The bundle, and the report of its verification.

    Raises:
        BundleError: `path` is taken or cannot be written.
        CheckpointError: the checkpoint cannot be read.
        ExportError: PyTorch's exporter failed, or the limits or inputs do not fit the model.
        ParityError: the checkpoint as it is read does not give the user's own pairs, or the graphs do not give what
            PyTorch gives; no bundle is left.
    """
    path = Path(path)
    check_target(path, force=force, inputs=[Path(checkpoint), *made_from])
    progress(f"reading {checkpoint}")
    source = read_checkpoint(checkpoint, settings) if adapter is None else read_adapter(checkpoint, adapter, settings)
    limits = _limits(source, max_source_length, max_target_length)
    attention_layer = _layer(source, attention_layer)
    if isinstance(source.model, Adapter):
        progress("running the adapter at the longest sequences")
        check_promises(source.model, limits)
    known = None
    if expectations is not None and not isinstance(source.model, Adapter):
        known = check_source(source, expectations, limits=limits, progress=progress)
    manifest = Manifest(
        dimensions=dimensions_of(source.model),
        limits=limits,
        special_ids=source.special_ids,
        generation=replace(source.generation, max_length=min(source.generation.max_length, limits.max_target_length)),
        model=_facts(source),
        tools=_tool_versions(),
    )
    report = None
    with new_bundle(path, manifest, force=force) as bundle:
        _write_tokenizer(bundle, source)
        sources = _golden_sources(bundle, source, inputs, expectations)
        progress("exporting the encoder and the decoder step")
        _write_graphs(bundle, source, attention_layer)
        synthetic = inputs is None and expectations is None
        _write_golden(bundle, source, sources, synthetic=synthetic, progress=progress)
        if expectations is not None and known is None:
            known = check_source(source, expectations, bundle=bundle, progress=progress)
        bundle.manifest = replace(bundle.manifest, model={**bundle.manifest.model, "reading": _reading(source, known)})
        if verify:
            report = verify_variant(bundle, reference=source.model, expectations=expectations, progress=progress)
            (report,) = add_transformers(bundle, [report], source, progress=progress)
            write_reports(bundle, [report])
            if not report.passed:
                model = source.model
                hint = adapter_hint(report, has_decode=model.has_decode) if isinstance(model, Adapter) else report.hint
                raise ParityError(report.problems(), hint)
    return Bundle.open(path, check_hashes=False), report


def _limits(source: SourceModel, max_source_length: int | None, max_target_length: int | None) -> Limits:
    config = source.model.config
    usual = {"source": config.max_length, "target": config.max_target_length}
    asked = {"source": max_source_length, "target": max_target_length}
    endless = isinstance(config, TransformerConfig) and config.endless
    longest = dict.fromkeys(usual, MOST_POSITIONS) if endless else usual
    problems = [
        f"max {side} length must be from 1 to {longest[side]}, the longest that the model takes; found {value}"
        for side, value in asked.items()
        if value is not None and not 1 <= value <= longest[side]
    ]
    if problems:
        raise ExportError(problems)
    return Limits(
        max_source_length=max_source_length or usual["source"],
        max_target_length=max_target_length or usual["target"],
    )


def _layer(source: SourceModel, layer: int | None) -> int | None:
    """A decoder layer's number, counted from the first."""
    if layer is not None and isinstance(source.model, Adapter):
        raise ExportError("an adapter's graphs give no attention weights", "export without them")
    layers = source.model.config.decoder_layers
    if layer is not None and not -layers <= layer < layers:
        raise ExportError(f"attention layer {layer} is not in {-layers}..{layers - 1}: the decoder has {layers} layers")
    return layer if layer is None else layer % layers


def _facts(source: SourceModel) -> dict[str, Any]:
    """What people may want to know of the model; nothing computes with it."""
    return {
        "checkpoint": source.path.name,
        "configuration": asdict(source.model.config),
        "parameters": sum(p.numel() for p in source.model.parameters()),
        "training": {name: fact for name, fact in source.training.items() if isinstance(fact, str | int | float)},
        "settings": source.settings,
        "notes": [*source.notes, *source.special_tokens.doubts()],
    }


def _tool_versions() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in ("tfm-export", "torch", "onnx", "onnxscript")}
    # onnxruntime and onnxruntime-gpu are installed under names of their own.
    return {**versions, "onnxruntime": require_onnxruntime().__version__, "python": platform.python_version()}


def _write_tokenizer(bundle: Bundle, source: SourceModel) -> None:
    if source.tokenizer:
        (bundle.path / TOKENIZER).mkdir()
    for name, content in source.tokenizer.items():
        (bundle.path / TOKENIZER / name).write_bytes(content)
    bundle.add_files({f"{TOKENIZER}/{name}": "turns text into ids and back" for name in source.tokenizer})


def _reading(source: SourceModel, known: ExpectedComparison | None) -> dict[str, Any]:
    """What the manifest says of how the checkpoint was read."""
    proven: dict[str, Any] = {} if known is None else {"pairs": known.count, "with_log_probs": known.with_log_probs}
    reading = ReadingProof(answers=source.answers, **proven)
    return {**asdict(reading), "verdict": reading.text()}


def _golden_sources(
    bundle: Bundle, source: SourceModel, inputs: Sequence[str] | None, expectations: Expectations | None
) -> list[GoldenSource]:
    if inputs is None and expectations is None:
        return synthetic_sources(source.model, source.special_ids, bundle.manifest.limits)
    lines = [line for line in inputs or [] if line.strip()]
    if inputs is not None and not lines:
        raise ExportError("the file of inputs has no lines", "give real source texts, one a line, or no file")
    if len(lines) > MOST_LINES:
        raise ExportError(
            f"{len(lines):,} inputs are more than the {MOST_LINES:,} that a golden set takes",
            f"shuf -n {MOST_LINES} takes a random sample of a file",
        )
    try:
        sources = encode_sources(lines, load_tokenizer(bundle), bundle.manifest, what="input")
    except RequestError as error:
        raise ExportError(error.problems, error.hint) from error
    texts = lines if source.tokenizer else [None] * len(lines)
    return [*_expected_sources(bundle, expectations, MOST_LINES - len(lines)), *zip(texts, sources, strict=True)]


def _expected_sources(bundle: Bundle, expectations: Expectations | None, most: int) -> list[GoldenSource]:
    """The sources of the user's own pairs, from all over their file where there are more than a golden set takes."""
    if expectations is None:
        return []
    pairs, tokenizer = expectations.pairs, load_tokenizer(bundle)
    if not most:
        raise ExportError(
            f"the {MOST_LINES:,} inputs leave no room in the golden set for the pairs of {expectations.name}",
            "fewer inputs",
        )
    taken = pairs if len(pairs) <= most else [pairs[i * len(pairs) // most] for i in range(most)]
    return [(pair.source if tokenizer else None, pair_source(pair, tokenizer)) for pair in taken]


def _write_graphs(bundle: Bundle, source: SourceModel, attention_layer: int | None) -> None:
    write_fp32_variant(
        source.model, bundle.path / "onnx" / "fp32", attention_layer=attention_layer, limits=bundle.manifest.limits
    )
    purposes = {
        graph.ENCODER: "source ids to cross-attention keys and values, once a sentence",
        graph.DECODER_STEP: "the next token, over an append-only cache",
        graph.WEIGHTS: "weights of all graphs, float32",
    }
    facts: dict[str, Any] = {"weights": "float32", "compute": "float32"}
    if attention_layer is not None:
        purposes[graph.DECODER_STEP_ATTENTION] = (
            f"the next token, with decoder layer {attention_layer}'s attention weights"
        )
        facts["attention_layer"] = attention_layer
    bundle.add_files({f"onnx/fp32/{name}": purpose for name, purpose in purposes.items()})
    bundle.manifest = replace(bundle.manifest, variants={"fp32": facts})


def _write_golden(
    bundle: Bundle, source: SourceModel, sources: list[GoldenSource], *, synthetic: bool, progress: Progress
) -> None:
    golden: GoldenSet = make_golden(
        source.model,
        sources,
        source.special_ids,
        max_length=bundle.manifest.generation.max_length,
        length_penalty=bundle.manifest.generation.length_penalty,
        synthetic=synthetic,
        progress=progress,
    )
    write_text(bundle.path / GOLDEN, golden_text(golden.golden))
    progress("measuring what rounding does to log-probabilities")
    manifest = bundle.manifest
    margin = measure_tie_margin(
        bundle.variant_path("fp32"), manifest.dimensions, manifest.limits, golden.golden, manifest.special_ids.bos
    )
    kind = "synthetic inputs" if synthetic else "real inputs"
    bundle.add_files({GOLDEN: f"{len(sources)} {kind} with what PyTorch gave for them"})
    bundle.manifest = replace(bundle.manifest, golden=golden.facts(tie_margin=margin))
