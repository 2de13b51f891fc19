"""A model of somebody's own on torch.nn.Transformer, with their own greedy decoding: what `--expect` is held to.

No code of the product or of the reference model computes anything here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.oracles.layouts import TorchSeq2Seq

SOURCE = ["<blank>", "<go>", "<stop>", *"abcdefghijklmnopqrst"]
TARGET = ["<blank>", "<go>", "<stop>", *"ABCDEFGHIJKLMNOPQRST"]
PAD, BOS, EOS = 0, 1, 2
HEADS = 6
WORDS = ("cat", "dog", "parrot", "snail", "tiger", "monkeh", "fish", "ant", "bee", "eagle", "rabbit", "horse")

# What is right to answer where the file does not say it.
RIGHT: dict[str, Any] = {
    "heads": HEADS,
    "norm_first": True,
    "activation": "gelu",
    "scale_embeddings": False,
    "pad": PAD,
    "bos": BOS,
    "eos": EOS,
    "source_starts_with_bos": True,
    "source_ends_with_eos": True,
    "source_tokens": SOURCE,
    "target_tokens": TARGET,
    "source_split": "characters",
    "target_split": "characters",
}


def own_model(seed: int = 0) -> TorchSeq2Seq:
    """A model whose targets differ between sources and end: attention is sharp, each token favours another one."""
    torch.manual_seed(seed)
    model = TorchSeq2Seq(
        (len(SOURCE), len(TARGET)),
        24,
        HEADS,
        length=20,
        learned=True,
        scaled=False,
        dim_feedforward=48,
        num_encoder_layers=1,
        num_decoder_layers=1,
        norm_first=True,
        activation="gelu",
    ).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.add_(0.1 * torch.randn_like(weight))
            elif "in_proj" in name:
                weight[: 2 * weight.size(1)] *= 4
            elif "linear" in name:
                weight.mul_(3)
        model.generator.weight.add_(1.5 * model.tgt_emb.weight.roll(3, 0))
        model.generator.bias[EOS] += 2.5
        model.generator.bias[[PAD, BOS]] -= 20
    return model


@torch.no_grad()
def own_greedy(model: TorchSeq2Seq, text: str, longest: int = 20) -> tuple[list[int], list[float]]:
    """Token after token, without the end token, and the log-probability of each, the end token's included."""
    source = torch.tensor([[BOS, *(SOURCE.index(c) for c in text), EOS]])
    tokens, log_probs = [BOS], list[float]()
    while len(tokens) <= longest:
        logits: Tensor = model.logits(source, torch.ones_like(source, dtype=torch.bool), torch.tensor([tokens]))
        scores = logits[0, -1].log_softmax(-1)
        tokens.append(int(scores.argmax()))
        log_probs.append(float(scores.max()))
        if tokens[-1] == EOS:
            return tokens[1:-1], log_probs
    return tokens[1:], log_probs


def own_lines(model: TorchSeq2Seq, words: tuple[str, ...] = WORDS) -> list[str]:
    """Sources and outputs with a tab between them."""
    return [f"{word}\t{''.join(TARGET[i] for i in own_greedy(model, word)[0])}" for word in words]


def own_json(model: TorchSeq2Seq, words: tuple[str, ...] = WORDS, *, total: bool = False) -> list[str]:
    """The same as JSON lines, with log-probabilities: of each token, or their sum."""
    found = {word: own_greedy(model, word) for word in words}
    return [
        json.dumps({"source": word, "tokens": tokens, "log_probs": sum(log_probs) if total else log_probs})
        for word, (tokens, log_probs) in found.items()
    ]


def save_own(model: TorchSeq2Seq, folder: Path) -> Path:
    """Their checkpoint: a state dict."""
    torch.save(model.state_dict(), folder / "own.pt")
    return folder / "own.pt"
