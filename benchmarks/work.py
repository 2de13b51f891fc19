"""The work that is timed: the base model with random weights, in every form that a contender loads.

Sources have 32 tokens and every generation exactly 32: the end token's bias in the output projection is so low that it
never comes. So all do the same number of steps with no option that one of them may be slow at.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from benchmarks.contenders import BUNDLE, CHECKPOINT, CTRANSLATE2, SOURCE_LENGTH, SOURCES

VOCABULARY = 32_000
SEED = 0
LARGEST_BATCH = 32
NO_END = -1e4


def prepare(
    folder: Path, progress: Callable[[str], None], *, preset: str = "base", vocabulary: int = VOCABULARY
) -> None:
    """Fill a folder with the checkpoint, the bundle, the CTranslate2 model and the sources; what was there goes."""
    import torch

    from benchmarks.peers.ctranslate2 import build
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
        model.projection.bias[special.eos] = NO_END
    checkpoint = Checkpoint(
        model=model,
        source_vocabulary=None,
        target_vocabulary=None,
        special_ids=special,
        generation=GenerationDefaults(max_length=2),  # the golden set of an export is this long; requests say their own
    )
    progress("writing the checkpoint")
    save_checkpoint(checkpoint, folder / CHECKPOINT)
    progress("building the CTranslate2 model")
    build(checkpoint, folder / CTRANSLATE2)
    progress("exporting the bundle")
    export_bundle(folder / CHECKPOINT, folder / BUNDLE, verify=False)
    generator = torch.Generator().manual_seed(SEED)
    sources = torch.randint(special.eos + 1, vocabulary, (LARGEST_BATCH, SOURCE_LENGTH), generator=generator)
    (folder / SOURCES).write_text(json.dumps(sources.tolist()))


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
