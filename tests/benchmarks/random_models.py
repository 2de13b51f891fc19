"""Small random models whose targets vary and whose sentences sometimes end, and what the reference says of them."""

from __future__ import annotations

from typing import Any

import torch

from reference_model import search
from reference_model.checkpoint import SpecialIds
from reference_model.config import TransformerConfig
from reference_model.model import Transformer

SPECIAL = SpecialIds()
LENGTH = 12
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "post-norm": {},
    "pre-norm": {"norm_first": True, "final_norm": True, "activation": "gelu"},
    "pre-norm without final norm, shared": {"norm_first": True, "share_embeddings": True, "tie_projection": True},
    "unequal stacks": {
        "norm_first": True,
        "final_norm": True,
        "d_model": 60,
        "heads": 5,
        "d_ff": 33,
        "decoder_d_model": 42,
        "decoder_heads": 3,
        "decoder_d_ff": 71,
    },
    "post-norm with final norm, tied": {"final_norm": True, "tie_projection": True, "activation": "gelu"},
}


def random_model(**fields: Any) -> Transformer:
    """Unequal depths, an unusual epsilon, no weight at its initial 0 or 1."""
    torch.manual_seed(0)
    sizes = {"source_vocabulary_size": 30, "target_vocabulary_size": 30 if "share_embeddings" in fields else 37}
    config = TransformerConfig.preset(
        "tiny", **{**sizes, "encoder_layers": 3, "decoder_layers": 2, "layer_norm_epsilon": 1e-3, **fields}
    )
    model = Transformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() == 1 else 0.02))
        # Scores that hang on the latest token, so that targets vary; an end token that comes to some of them.
        model.target_embedding.weight.mul_(4)
        model.projection.weight[SPECIAL.eos] *= 1.5
    return model


def random_sources() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 30, (n,), generator=generator).tolist() for n in (4, 9, 1, 6, 12, 3, 3, 7)]


def reference_greedy(model: Transformer, sources: list[list[int]]) -> list[search.Hypothesis]:
    width = max(map(len, sources))
    ids = torch.tensor([source + [SPECIAL.pad] * (width - len(source)) for source in sources])
    mask = torch.arange(width) < torch.tensor([[len(source)] for source in sources])
    return search.greedy(model, ids, mask, SPECIAL, LENGTH)
