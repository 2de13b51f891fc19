"""The work that is timed: the base model with random weights, in every form that a contender loads.

Sources have 32 tokens and every generation exactly 32: the end token's bias in the output projection is so low that it
never comes. So all do the same number of steps with no option that one of them may be slow at. The work of
`benchmarks.files` has targets that end: see `end_by_chains`.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contenders import (
    BUNDLE,
    CHECKPOINT,
    CTRANSLATE2,
    CTRANSLATE2_INT8,
    INT8_ENCODER,
    SOURCE_LENGTH,
    SOURCES,
    VARIANTS,
)
from tfm_export.bundle import Bundle, Manifest
from tfm_export.passes.recipe import Recipe
from tfm_export.quantize.calibration import decode_samples, observe, thresholds
from tfm_export.quantize.variant import PURPOSES, write_variant
from tfm_export.staging import new_part

if TYPE_CHECKING:  # the contenders import this module too, and some must not load PyTorch
    from reference_model.checkpoint import Checkpoint
    from reference_model.model import Transformer

VOCABULARY = 32_000
SEED = 0
LARGEST_BATCH = 32
NO_END = -1e3  # far below every other logit, and within what 16 bits hold with room to spare
FIRST = 3  # the first id that is not special
CHAIN = 64  # tokens
QUIET, PULL = 0.3, 0.95  # base model: the likeliest token then has a probability of 0.7 (0.5 to 0.9, measured)
FLOATS = {"fp16", "bf16"}  # what is made of every value's range


def never_end(model: Transformer, end: int) -> None:
    """Keep the end token from ever coming."""
    model.projection.bias[end] = NO_END


def end_by_chains(model: Transformer, end: int) -> None:
    """Make targets end, each when it should, without an option that one contender may be slow at.

    Ids lie in chains of `CHAIN`. The projection favours the id that follows the latest one, and after the last of a
    chain the end token: a target that begins n ids before the end of its chain has n tokens. For the latest token to be
    seen behind six layers of random weights, their sublayers write less.
    """
    for name, parameter in model.named_parameters():
        if name.startswith("decoder_layers") and name.endswith(("W_o.weight", "W_2.weight")):
            parameter.mul_(QUIET)
    embedding, projection = model.target_embedding.weight, model.projection.weight
    last, after = embedding[FIRST + CHAIN - 1].clone(), embedding[FIRST:-1].clone()
    embedding[FIRST + CHAIN - 1 :: CHAIN] = last
    after[CHAIN - 1 :: CHAIN] = 0  # no chain follows another
    projection[FIRST + 1 :] += PULL * after
    projection[end] += PULL * last


def prepare(
    folder: Path,
    progress: Callable[[str], None],
    *,
    ending: Callable[[Transformer, int], None] = never_end,
    preset: str = "base",
    vocabulary: int = VOCABULARY,
    variants: Sequence[str] = VARIANTS,
) -> None:
    """Fill a folder with the checkpoint, the bundle, the CTranslate2 models (where that is installed) and the sources.

    What was there goes.

    Args:
        folder: to fill.
        progress: told what begins.
        ending: changes the weights so that targets end, or do not; gets the model and the end token.
        preset: sizes of the model.
        vocabulary: tokens.
        variants: precisions.
    """
    import torch

    from reference_model.checkpoint import Checkpoint, GenerationDefaults, SpecialIds, save_checkpoint
    from reference_model.config import TransformerConfig
    from reference_model.model import Transformer
    from tfm_export.export import export_bundle

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.manual_seed(SEED)
    special = SpecialIds()
    config = TransformerConfig.preset(preset, source_vocabulary_size=vocabulary, target_vocabulary_size=vocabulary)
    model = Transformer(config).eval()
    with torch.no_grad():
        ending(model, special.eos)
    checkpoint = Checkpoint(
        model=model,
        source_vocabulary=None,
        target_vocabulary=None,
        special_ids=special,
        generation=GenerationDefaults(max_length=2),  # the golden set of an export is this long; requests say their own
    )
    progress("writing the checkpoint")
    save_checkpoint(checkpoint, folder / CHECKPOINT)
    build_peers(checkpoint, folder, progress)
    progress("exporting the bundle")
    bundle, _ = export_bundle(folder / CHECKPOINT, folder / BUNDLE, verify=False)
    generator = torch.Generator().manual_seed(SEED)
    sources = torch.randint(special.eos + 1, vocabulary, (LARGEST_BATCH, SOURCE_LENGTH), generator=generator)
    (folder / SOURCES).write_text(json.dumps(sources.tolist()))
    add_variants(bundle, variants, sources.tolist()[:4], progress)


def build_peers(checkpoint: Checkpoint, folder: Path, progress: Callable[[str], None]) -> None:
    """Write CTranslate2's models of a checkpoint, where that is installed and they are not there."""
    if importlib.util.find_spec("ctranslate2") is None:
        return
    from benchmarks.peers.ctranslate2 import build

    for name, quantization in ((CTRANSLATE2, None), (CTRANSLATE2_INT8, "int8")):
        if not (folder / name).is_dir():
            progress(f"building {name}")
            build(checkpoint, folder / name, quantization)


def reuse(folder: Path, progress: Callable[[str], None]) -> None:
    """Take what `prepare` made earlier; CTranslate2's models are made if they are missing."""
    if any(not (folder / name).is_dir() for name in (CTRANSLATE2, CTRANSLATE2_INT8)):
        from reference_model.checkpoint import load_checkpoint

        build_peers(load_checkpoint(folder / CHECKPOINT), folder, progress)


def add_variants(
    bundle: Bundle, names: Sequence[str], sources: list[list[int]], progress: Callable[[str], None]
) -> None:
    """Make variants past the gates: random weights have no quality that could be judged.

    Args:
        bundle: of random weights.
        names: precisions.
        sources: ids to calibrate on.
        progress: told what begins.
    """
    fp32 = bundle.variant_path("fp32")
    observations = observe(bundle, decode_samples(bundle, sources, beam_size=1, max_length=8))
    ranges = {value: observed.largest for value, observed in observations.items()}
    limits = thresholds(observations, "percentile")
    for name in names:
        progress(f"making {name}")

        def record(manifest: Manifest, name: str = name) -> Manifest:
            facts = {"weights": name, "compute": name, "int8_encoder": name in INT8_ENCODER}
            return replace(manifest, variants={**manifest.variants, name: facts})

        with new_part(bundle, f"onnx/{name}", force=True, forget=lambda manifest: manifest) as part:
            recipe = Recipe(precision=name, ranges=ranges, thresholds=limits, int8_encoder=name in INT8_ENCODER)
            write_variant(fp32, part.path, recipe)
            part.purposes |= {file: PURPOSES[file] for file in PURPOSES if (part.path / file).is_file()}
            part.record = record


def decoder_step_work() -> dict[str, float]:
    """What one step of one sentence has to do at least.

    Returns:
        `weight_bytes`, the float32 weights that a step reads, however many sentences share it; `flops`, the floating
        point operations of a sentence's matrix products with weights.
    """
    from reference_model.config import PRESETS

    base = PRESETS["base"]
    model, feed_forward = base["d_model"], base["d_ff"]
    # Self-attention has four projections, cross-attention two: its keys and values are the encoder's work.
    layer = 6 * model * model + 2 * model * feed_forward
    weights = base["decoder_layers"] * layer + model * VOCABULARY
    return {"weight_bytes": 4.0 * weights, "flops": 2.0 * weights}
