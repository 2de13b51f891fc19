"""Greedy and beam search without a cache: slow, obvious, and the oracle for everything faster.

Every step runs the whole decoder over the whole target so far.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reference_model.checkpoint import SpecialIds
from reference_model.model import Transformer


@dataclass(frozen=True)
class Hypothesis:
    """One way to go on to the end.

    Attributes:
        tokens: target ids without the start token and the end token.
        score: the sum of the log-probabilities of the tokens and of the end token, if it came.
        log_probs: the log-probability of each token, and of the end token, if it came.
        finished: the end token came before the length limit.
    """

    tokens: list[int]
    score: float
    log_probs: list[float]
    finished: bool

    def normalised_score(self, length_penalty: float) -> float:
        """score / length ** length_penalty; the end token counts."""
        return self.score / max(len(self.log_probs), 1) ** length_penalty


@torch.inference_mode()
def next_log_probs(model: Transformer, memory: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
    """The log-probabilities [B, V] of the token after target_ids [B, T]."""
    return model.decode(target_ids, memory, source_mask)[:, -1].log_softmax(-1)


@torch.inference_mode()
def greedy(
    model: Transformer, source_ids: Tensor, source_mask: Tensor, special: SpecialIds, max_length: int
) -> list[Hypothesis]:
    """The likeliest token at every step, until the end token or `max_length` tokens, the end token included.

    Args:
        model: in evaluation mode.
        source_ids: [B, S] int64.
        source_mask: [B, S] bool.
        special: the start and end ids.
        max_length: at most this many tokens.

    Returns:
        One hypothesis a sentence.
    """
    memory = model.encode(source_ids, source_mask)
    target = torch.full((source_ids.size(0), 1), special.bos)
    chosen: list[list[tuple[int, float]]] = [[] for _ in range(source_ids.size(0))]
    live = [True] * source_ids.size(0)
    for _ in range(max_length):
        values, tokens = next_log_probs(model, memory, source_mask, target).max(-1)
        for i, (token, value) in enumerate(zip(tokens.tolist(), values.tolist(), strict=True)):
            if live[i]:
                chosen[i].append((token, value))
                live[i] = token != special.eos
        if not any(live):
            break
        target = torch.cat([target, tokens[:, None]], 1)
    return [_hypothesis([t for t, _ in row], [p for _, p in row], special) for row in chosen]


@torch.inference_mode()
def beam(
    model: Transformer,
    source_ids: Tensor,
    special: SpecialIds,
    max_length: int,
    beam_size: int,
    length_penalty: float = 1.0,
) -> list[Hypothesis]:
    """Beam search over one sentence.

    Each step extends every live hypothesis by every token and looks at the 2 x beam_size best results. Those that end
    and are among the first beam_size are finished; the first beam_size that do not end live on. The search is over
    when beam_size hypotheses are finished, or at `max_length` tokens, where the live ones count too.

    Args:
        model: in evaluation mode.
        source_ids: [S] int64, without padding.
        special: the start and end ids.
        max_length: at most this many tokens, the end token included.
        beam_size: hypotheses kept at each step.
        length_penalty: see `Hypothesis.normalised_score`.

    Returns:
        At most beam_size hypotheses, the best first.
    """
    source_mask = torch.ones(1, source_ids.size(0), dtype=torch.bool)
    memory = model.encode(source_ids[None], source_mask)
    live: list[tuple[list[int], list[float]]] = [([], [])]
    finished: list[Hypothesis] = []
    for _ in range(max_length):
        rows = len(live)
        target = torch.tensor([[special.bos, *tokens] for tokens, _ in live])
        log_probs = next_log_probs(model, memory.expand(rows, -1, -1), source_mask.expand(rows, -1), target)
        totals = log_probs.double() + torch.tensor([[sum(p)] for _, p in live], dtype=torch.double)
        best = totals.flatten().topk(min(2 * beam_size, totals.numel())).indices.tolist()
        extended: list[tuple[list[int], list[float]]] = []
        for rank, index in enumerate(best):
            row, token = divmod(index, log_probs.size(1))
            tokens, values = [*live[row][0], token], [*live[row][1], log_probs[row, token].item()]
            if token != special.eos:
                extended.append((tokens, values))
            elif rank < beam_size:
                finished.append(_hypothesis(tokens, values, special))
        live = extended[:beam_size]
        if len(finished) >= beam_size:
            break
    else:
        finished += [_hypothesis(tokens, values, special) for tokens, values in live]
    return sorted(finished, key=lambda h: -h.normalised_score(length_penalty))[:beam_size]


def _hypothesis(tokens: list[int], log_probs: list[float], special: SpecialIds) -> Hypothesis:
    ended = bool(tokens) and tokens[-1] == special.eos
    return Hypothesis(tokens[:-1] if ended else tokens, sum(log_probs), log_probs, ended)
