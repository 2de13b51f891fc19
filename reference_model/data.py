"""Pairs of source and target texts, and their batches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from reference_model.checkpoint import SpecialIds
from reference_model.vocabulary import Vocabulary

Pair = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Batch:
    """Sentences of like length, padded.

    Attributes:
        source_ids: [B, S] int64.
        source_mask: [B, S] bool, False at padding.
        target_ids: [B, T] int64, from the start token to the last token before the end token: the decoder's input.
        labels: [B, T] int64, the token that follows each one, with the end token and the padding id.
    """

    source_ids: Tensor
    source_mask: Tensor
    target_ids: Tensor
    labels: Tensor


def read_pairs(path: str | Path) -> list[tuple[str, str]]:
    """The lines "source<TAB>target" of a file."""
    pairs = []
    with open(path, encoding="utf-8-sig", newline="\n") as file:  # a byte order mark is no text
        for number, line in enumerate(file, 1):
            parts = line.removesuffix("\n").removesuffix("\r").split("\t")
            if len(parts) != 2:
                raise ValueError(f"{path}, line {number}: expected source<TAB>target, found {len(parts)} column(s)")
            pairs.append((parts[0], parts[1]))
    return pairs


def encode_source(text: str, vocabulary: Vocabulary, special: SpecialIds) -> list[int]:
    """The source ids that the model was trained on."""
    return vocabulary.encode(text) + [special.eos] * special.source_ends_with_eos


def encode_pairs(
    pairs: list[tuple[str, str]], source: Vocabulary, target: Vocabulary, special: SpecialIds
) -> list[Pair]:
    """Texts to ids; the target between start and end token."""
    return [(encode_source(s, source, special), [special.bos, *target.encode(t), special.eos]) for s, t in pairs]


def pad(sequences: list[list[int]], pad_id: int) -> Tensor:
    """Lists of ids -> int64 [B, the longest]."""
    width = max(map(len, sequences))
    return torch.tensor([s + [pad_id] * (width - len(s)) for s in sequences], dtype=torch.long)


def make_batch(pairs: list[Pair], special: SpecialIds) -> Batch:
    """One padded batch of encoded pairs."""
    source_ids = pad([s for s, _ in pairs], special.pad)
    lengths = torch.tensor([len(s) for s, _ in pairs])
    return Batch(
        source_ids=source_ids,
        source_mask=torch.arange(source_ids.size(1)) < lengths[:, None],
        target_ids=pad([t[:-1] for _, t in pairs], special.pad),
        labels=pad([t[1:] for _, t in pairs], special.pad),
    )


def batches(pairs: list[Pair], special: SpecialIds, batch_tokens: int, seed: int | None) -> Iterator[Batch]:
    """Batches of like lengths, each of about `batch_tokens` tokens, source and target together.

    Args:
        pairs: the encoded pairs.
        special: for the padding id.
        batch_tokens: a batch's pairs times the tokens of its longest pair are at most this; a longer pair makes a
            batch of its own. Padding can add to it where the longest source and the longest target are not one pair's.
        seed: decides the order of the batches and who shares one; None keeps them sorted by length.
    """
    order = random.Random(seed)
    keys = [(len(s), len(t), order.random() if seed is not None else 0.0) for s, t in pairs]
    groups: list[list[int]] = [[]]
    longest = 0
    for i in sorted(range(len(pairs)), key=keys.__getitem__):
        tokens = len(pairs[i][0]) + len(pairs[i][1]) - 1
        longest = max(longest, tokens)
        if groups[-1] and longest * (len(groups[-1]) + 1) > batch_tokens:
            groups.append([])
            longest = tokens
        groups[-1].append(i)
    if seed is not None:
        order.shuffle(groups)
    for group in groups:
        if group:
            yield make_batch([pairs[i] for i in group], special)
