"""Golden inputs and what PyTorch gives for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reference_model import Transformer
from reference_model.checkpoint import SpecialIds as ReferenceSpecialIds
from reference_model.data import pad
from reference_model.search import Hypothesis, beam_batch, greedy
from tfm_export.bundle import Limits, SpecialIds
from tfm_export.checkpoints.adapter import Adapter
from tfm_export.progress import Progress
from tfm_export.verify.golden import BeamGolden, Golden
from tfm_export.verify.reference import in_precision

# PyTorch decodes the golden inputs without a cache, so that nothing of ours can be wrong in it: this bounds its work.
MOST_TOKENS = 128
MOST_LINES = 1000
SYNTHETIC_COUNT = 16
SYNTHETIC_TOKENS = 32  # random weights may never end a target
SYNTHETIC_LENGTH = 32
BATCH = 32
# A beam search costs beam_size times as much: it is made for the first inputs only.
BEAM_SIZE = 4
BEAM_COUNT = 100

GoldenSource = tuple[str | None, list[int]]


@dataclass(frozen=True)
class GoldenSet:
    """Golden inputs, and what the manifest says of them.

    Attributes:
        golden: one an input.
        max_length: of the generations.
        length_penalty: of the beam searches.
        synthetic: random ids instead of real text.
    """

    golden: list[Golden]
    max_length: int
    length_penalty: float
    synthetic: bool

    def facts(self, *, tie_margin: float) -> dict[str, int | float | bool]:
        """For the manifest, with the margin below which float32 may choose either of two tokens."""
        return {
            "count": len(self.golden),
            "synthetic": self.synthetic,
            "max_length": self.max_length,
            "beam_size": BEAM_SIZE,
            "length_penalty": self.length_penalty,
            "tie_margin": tie_margin,
        }


def synthetic_sources(
    model: Transformer | Adapter, special: SpecialIds, limits: Limits, seed: int = 0
) -> list[GoldenSource]:
    """Random ids of random lengths; they end as real sources do."""
    rng = np.random.default_rng(seed)
    longest = max(min(SYNTHETIC_LENGTH, limits.max_source_length) - len(special.wrap_source([])), 0)
    lengths = rng.integers(min(1, longest), longest + 1, SYNTHETIC_COUNT)
    size = model.config.source_vocabulary_size
    return [(None, special.wrap_source([*map(int, rng.integers(0, size, n))])) for n in lengths]


def make_golden(
    model: Transformer | Adapter,
    sources: Sequence[GoldenSource],
    special: SpecialIds,
    *,
    max_length: int,
    length_penalty: float,
    synthetic: bool,
    progress: Progress,
) -> GoldenSet:
    """Decode sources with PyTorch: float32, no cache; then measure every greedy choice's margin in float64.

    Args:
        model: in float32 and evaluation mode.
        sources: texts, or None, and their ids.
        special: the model's special ids.
        max_length: of the generations, end token included; cut to `MOST_TOKENS`, or `SYNTHETIC_TOKENS`.
        length_penalty: of the beam searches.
        synthetic: whether the sources are random.
        progress: told what begins.
    """
    max_length = min(max_length, SYNTHETIC_TOKENS if synthetic else MOST_TOKENS)
    reference_special = _reference_special(special)
    exact = in_precision(model, torch.float64)
    golden: dict[int, Golden] = {}
    order = sorted(range(len(sources)), key=lambda i: len(sources[i][1]))
    for start in range(0, len(order), BATCH):
        indices = order[start : start + BATCH]
        progress(f"decoding golden inputs with PyTorch, {start + len(indices)} of {len(sources)}")
        source_ids, source_mask = _padded_sources([sources[i][1] for i in indices], special)
        hypotheses = greedy(model, source_ids, source_mask, reference_special, max_length)
        beams: list[BeamGolden | None] = [None] * len(indices)
        wanted = [place for place, i in enumerate(indices) if i < BEAM_COUNT]
        if wanted:
            ids, mask = source_ids[wanted], source_mask[wanted]
            found = beam_batch(model, ids, mask, reference_special, max_length, BEAM_SIZE, length_penalty)
            for place, (best, *_) in zip(wanted, found, strict=True):
                score = best.normalised_score(length_penalty)
                beams[place] = BeamGolden(tokens=_with_end(best, special), score=score, margin=min(best.margin, 1e9))
        tokens = [_with_end(h, special) for h in hypotheses]
        margins = _margins(exact, source_ids, source_mask, tokens, special)
        rows = zip(indices, hypotheses, tokens, margins, beams, strict=True)
        for i, hypothesis, row_tokens, row_margins, beam in rows:
            golden[i] = Golden(
                text=sources[i][0],
                source_ids=sources[i][1],
                tokens=row_tokens,
                log_probs=hypothesis.log_probs,
                margins=row_margins,
                beam=beam,
            )
    return GoldenSet([golden[i] for i in range(len(sources))], max_length, length_penalty, synthetic)


def _with_end(hypothesis: Hypothesis, special: SpecialIds) -> list[int]:
    return [*hypothesis.tokens, special.eos] if hypothesis.finished else hypothesis.tokens


def _padded_sources(sequences: list[list[int]], special: SpecialIds) -> tuple[Tensor, Tensor]:
    ids = pad(sequences, special.for_sources.pad)
    return ids, torch.arange(ids.size(1)) < torch.tensor([len(s) for s in sequences])[:, None]


def _reference_special(special: SpecialIds) -> ReferenceSpecialIds:
    return ReferenceSpecialIds(
        pad=special.pad, bos=special.bos, eos=special.eos, source_ends_with_eos=special.source_ends_with_eos
    )


@torch.inference_mode()
def _margins(
    exact: Transformer | Adapter,
    source_ids: Tensor,
    source_mask: Tensor,
    tokens: list[list[int]],
    special: SpecialIds,
) -> list[list[float]]:
    """The float64 margin of the two best tokens at every step of every row."""
    target_ids = pad([[special.bos, *row[:-1]] for row in tokens], special.pad)
    best = exact(source_ids, source_mask, target_ids).log_softmax(-1).topk(2).values
    margins = (best[..., 0] - best[..., 1]).tolist()
    return [row[: len(t)] for row, t in zip(margins, tokens, strict=True)]
