"""PyTorch eager with a key/value cache that grows by concatenation: what people write by hand, and what we replace.

The same weights and modules as the reference model; attention is PyTorch's own `scaled_dot_product_attention`.
Letters in the shapes as in reference_model/model.py; R rows: sentences, or sentences x beams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from reference_model.checkpoint import SpecialIds
from reference_model.model import MultiHeadAttention, Transformer


@dataclass
class State:
    """What a step needs of the steps before it.

    Attributes:
        cross: the key and the value of every decoder layer's cross-attention, each [R, H, S, D].
        past: the key and the value of every decoder layer's self-attention, each [R, H, T, D].
        source_mask: [R, 1, 1, S] bool.
        length: T, tokens decoded so far.
    """

    cross: list[tuple[Tensor, Tensor]]
    past: list[tuple[Tensor, Tensor] | None]
    source_mask: Tensor
    length: int = 0

    def reorder(self, rows: Tensor) -> None:
        """Keep the given rows of the past, in that order. Cross-attention is the same for all beams of a sentence."""
        self.past = [layer and (layer[0][rows], layer[1][rows]) for layer in self.past]


def encode(model: Transformer, source_ids: Tensor, source_mask: Tensor, *, beams: int = 1) -> State:
    """Run the encoder on source_ids [B, S] and source_mask [B, S]; every sentence gets `beams` rows."""
    memory = model.encode(source_ids, source_mask)
    layers: list[Any] = list(model.decoder_layers)
    cross = [layer.cross_attention.keys_values(memory) for layer in layers]
    if beams > 1:
        cross = [(key.repeat_interleave(beams, 0), value.repeat_interleave(beams, 0)) for key, value in cross]
        source_mask = source_mask.repeat_interleave(beams, 0)
    return State(cross, [None] * len(layers), source_mask[:, None, None, :])


def step(model: Transformer, state: State, tokens: Tensor) -> Tensor:
    """Decode one token: tokens [R] -> logits [R, V] of the next."""
    x = model.embed_target(tokens[:, None], torch.full((len(tokens), 1), state.length))
    layers: list[Any] = list(model.decoder_layers)
    for i, layer in enumerate(layers):
        y = layer.self_attention_residual.before(x)
        key, value = layer.self_attention.keys_values(y)
        if (past := state.past[i]) is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        state.past[i] = key, value
        x = layer.self_attention_residual.after(x, _attend(layer.self_attention, y, key, value, None))
        y = layer.cross_attention_residual.before(x)
        y = _attend(layer.cross_attention, y, *state.cross[i], state.source_mask)
        x = layer.cross_attention_residual.after(x, y)
        y = layer.feed_forward(layer.feed_forward_residual.before(x))
        x = layer.feed_forward_residual.after(x, y)
    state.length += 1
    logits: Tensor = model.projection(model.decoder_norm(x[:, 0]))
    return logits


def _attend(attention: MultiHeadAttention, x: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    attended = scaled_dot_product_attention(attention.split_heads(attention.W_q(x)), key, value, attn_mask=mask)
    projected: Tensor = attention.W_o(attention.merge_heads(attended))
    return projected


@torch.inference_mode()
def greedy(
    model: Transformer, sources: Sequence[Sequence[int]], special: SpecialIds, max_length: int
) -> list[list[int]]:
    """The likeliest token at every step, until every sentence has ended or has `max_length` tokens, the end included.

    Returns:
        The tokens of every source, without start and end tokens.
    """
    source_ids, source_mask = _padded(sources, special.pad)
    state = encode(model, source_ids, source_mask)
    tokens = torch.full((len(sources),), special.bos)
    live = torch.ones(len(sources), dtype=torch.bool)
    chosen = []
    for _ in range(max_length):
        tokens = step(model, state, tokens).argmax(-1)
        chosen.append(tokens)
        live &= tokens != special.eos
        if not live.any():
            break
    return [_before_end(row, special.eos) for row in torch.stack(chosen, 1).tolist()]


@torch.inference_mode()
def beam(
    model: Transformer, sources: Sequence[Sequence[int]], special: SpecialIds, max_length: int, beam_size: int
) -> list[list[int]]:
    """Beam search with caches that follow their beams; ranked and stopped as `reference_model.search.beam` does.

    A sentence that is over stays in the batch until all are.

    Returns:
        The best hypothesis of every source (length_penalty 1), without start and end tokens.
    """
    source_ids, source_mask = _padded(sources, special.pad)
    state = encode(model, source_ids, source_mask, beams=beam_size)
    batch = len(sources)
    tokens = torch.full((batch * beam_size,), special.bos)
    scores = torch.full((batch, beam_size), -torch.inf)
    scores[:, 0] = 0.0  # all beams of a sentence begin alike: extend one
    paths: list[list[list[int]]] = [[[] for _ in range(beam_size)] for _ in range(batch)]
    finished: list[list[tuple[float, list[int]]]] = [[] for _ in range(batch)]
    for n in range(1, max_length + 1):
        log_probs = step(model, state, tokens).log_softmax(-1).view(batch, beam_size, -1)
        vocabulary = log_probs.size(-1)
        best = (scores[:, :, None] + log_probs).flatten(1).topk(2 * beam_size)
        parents, next_tokens = best.indices // vocabulary, best.indices % vocabulary
        rows = torch.empty(batch, beam_size, dtype=torch.long)
        for b in range(batch):
            candidates = list(zip(best.values[b].tolist(), parents[b].tolist(), next_tokens[b].tolist(), strict=True))
            if len(finished[b]) < beam_size:
                ended = [c for c in candidates[:beam_size] if c[2] == special.eos or n == max_length]
                finished[b] += [
                    (score / n, [*paths[b][parent], *([] if token == special.eos else [token])])
                    for score, parent, token in ended
                ]
            going_on = [c for c in candidates if c[2] != special.eos][:beam_size]
            paths[b] = [[*paths[b][parent], token] for _, parent, token in going_on]
            scores[b] = torch.tensor([score for score, _, _ in going_on])
            rows[b] = torch.tensor([parent for _, parent, _ in going_on]) + b * beam_size
        if all(len(sentence) >= beam_size for sentence in finished):
            break
        tokens = torch.tensor([path[-1] for sentence in paths for path in sentence])
        state.reorder(rows.flatten())
    return [max(sentence, key=lambda hypothesis: hypothesis[0])[1] for sentence in finished]


def _padded(sources: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    width = max(map(len, sources))
    ids = torch.tensor([[*source, *[pad] * (width - len(source))] for source in sources])
    return ids, torch.arange(width) < torch.tensor([[len(source)] for source in sources])


def _before_end(tokens: list[int], eos: int) -> list[int]:
    return tokens[: tokens.index(eos)] if eos in tokens else tokens
