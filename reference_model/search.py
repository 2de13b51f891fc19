"""Greedy and beam search without a cache: slow, obvious, and the oracle for everything faster.

Every step runs the whole decoder over the whole target so far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from reference_model.checkpoint import SpecialIds


class EncoderDecoder(Protocol):
    """What the searches need of a model; `reference_model.Transformer` has it."""

    def encode(self, source_ids: Tensor, source_mask: Tensor, /) -> Tensor:
        """source_ids [B, S], source_mask [B, S] -> memory [B, S, M]."""
        ...

    def decode(self, target_ids: Tensor, memory: Tensor, source_mask: Tensor, /) -> Tensor:
        """target_ids [B, T], memory [B, S, M], source_mask [B, S] -> logits [B, T, V]."""
        ...


@dataclass(frozen=True)
class Hypothesis:
    """One way to go on to the end.

    Attributes:
        tokens: target ids without the start token and the end token.
        score: the sum of the log-probabilities of the tokens and of the end token, if it came.
        log_probs: the log-probability of each token, and of the end token, if it came.
        finished: the end token came before the length limit.
        margin: of the beam search that found it, see `BeamSearch`.
    """

    tokens: list[int]
    score: float
    log_probs: list[float]
    finished: bool
    margin: float = field(default=math.inf, compare=False)

    def normalised_score(self, length_penalty: float) -> float:
        """score / length ** length_penalty; the end token counts."""
        length: float = max(len(self.log_probs), 1) ** length_penalty
        return self.score / length


@torch.inference_mode()
def next_log_probs(model: EncoderDecoder, memory: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
    """The log-probabilities [B, V] of the token after target_ids [B, T]."""
    return model.decode(target_ids, memory, source_mask)[:, -1].log_softmax(-1)


@torch.inference_mode()
def greedy(
    model: EncoderDecoder, source_ids: Tensor, source_mask: Tensor, special: SpecialIds, max_length: int
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
    targets = [[special.bos] for _ in source_ids]
    log_probs: list[list[float]] = [[] for _ in source_ids]
    live = list(range(source_ids.size(0)))
    for _ in range(max_length):
        step = next_log_probs(model, memory[live], source_mask[live], torch.tensor([targets[i] for i in live]))
        values, tokens = step.max(-1)
        for i, token, value in zip(live, tokens.tolist(), values.tolist(), strict=True):
            targets[i].append(token)
            log_probs[i].append(value)
        live = [i for i in live if targets[i][-1] != special.eos]
        if not live:
            break
    return [_hypothesis(target[1:], values, special) for target, values in zip(targets, log_probs, strict=True)]


class BeamSearch:
    """Beam search over one sentence, one step at a time.

    Each step extends every live hypothesis by every token and looks at the 2 x beam_size best results. Those that end
    and are among the first beam_size are finished; the first beam_size that do not end live on. The search is over
    when beam_size hypotheses are finished; else at `max_length` tokens, where all results end.

    Attributes:
        live: the hypotheses to extend, the best first: their tokens and the log-probability of each.
        finished: those that came to their end, in the order in which they did.
        over: no step is left to do.
        margin: the smallest difference, divided by the tokens so far, that decided whether a hypothesis was kept or
            could finish. Where it is within rounding, another search may be just as right.
    """

    def __init__(self, special: SpecialIds, max_length: int, beam_size: int) -> None:
        self.special, self.max_length, self.beam_size = special, max_length, beam_size
        self.live: list[tuple[list[int], list[float]]] = [([], [])]
        self.finished: list[Hypothesis] = []
        self.over = False
        self.margin = math.inf

    def targets(self) -> list[list[int]]:
        """The decoder's input for each live hypothesis, all of one length."""
        return [[self.special.bos, *tokens] for tokens, _ in self.live]

    def step(self, log_probs: Tensor) -> None:
        """Extend by one token, given the log-probabilities [live, V] of the token after each of `targets`."""
        totals = log_probs.double() + torch.tensor([[sum(values)] for _, values in self.live], dtype=torch.double)
        scores, best = totals.flatten().topk(min(2 * self.beam_size + 1, totals.numel()))
        best = best[: 2 * self.beam_size]
        chosen_log_probs = log_probs.flatten()[best].tolist()
        extended, kept = [], 0
        for rank, (index, log_prob) in enumerate(zip(best.tolist(), chosen_log_probs, strict=True)):
            row, token = divmod(index, log_probs.size(1))
            tokens, values = [*self.live[row][0], token], [*self.live[row][1], log_prob]
            if token != self.special.eos and len(tokens) < self.max_length:
                extended.append((tokens, values))
                kept = rank + 1 if len(extended) <= self.beam_size else kept
            elif rank < self.beam_size:
                self.finished.append(_hypothesis(tokens, values, self.special))
        self.over = len(self.finished) >= self.beam_size or len(self.targets()[0]) == self.max_length
        self.live = extended[: self.beam_size]
        steps = [scores[i - 1] - scores[i] for i in {self.beam_size, kept, 2 * self.beam_size} if 0 < i < len(scores)]
        self.margin = min([self.margin, *(float(step) / len(tokens) for step in steps)])

    def results(self, length_penalty: float) -> list[Hypothesis]:
        """At most beam_size finished hypotheses, the best first."""
        best = sorted(self.finished, key=lambda h: -h.normalised_score(length_penalty))[: self.beam_size]
        return [replace(hypothesis, margin=self.margin) for hypothesis in best]


@torch.inference_mode()
def beam_batch(
    model: EncoderDecoder,
    source_ids: Tensor,
    source_mask: Tensor,
    special: SpecialIds,
    max_length: int,
    beam_size: int,
    length_penalty: float = 1.0,
) -> list[list[Hypothesis]]:
    """`BeamSearch` over several sentences side by side: they share the decoder's runs and nothing else.

    Args:
        model: in evaluation mode.
        source_ids: [B, S] int64.
        source_mask: [B, S] bool.
        special: the start and end ids.
        max_length: at most this many tokens, the end token included.
        beam_size: hypotheses kept at each step.
        length_penalty: see `Hypothesis.normalised_score`.

    Returns:
        At most beam_size hypotheses a sentence, the best first.
    """
    memory = model.encode(source_ids, source_mask)
    searches = [BeamSearch(special, max_length, beam_size) for _ in range(source_ids.size(0))]
    while going := [i for i, search in enumerate(searches) if not search.over]:
        # Every search is at the same step, so all targets have one length. Row r belongs to sentence sentences[r].
        sentences = [i for i in going for _ in searches[i].live]
        targets = torch.tensor([target for i in going for target in searches[i].targets()])
        log_probs = next_log_probs(model, memory[sentences], source_mask[sentences], targets)
        rows = iter(log_probs)
        for i in going:
            searches[i].step(torch.stack([next(rows) for _ in searches[i].live]))
    return [search.results(length_penalty) for search in searches]


def beam(
    model: EncoderDecoder,
    source_ids: Tensor,
    special: SpecialIds,
    max_length: int,
    beam_size: int,
    length_penalty: float = 1.0,
) -> list[Hypothesis]:
    """`beam_batch` for one sentence: source_ids [S] int64, without padding."""
    source_mask = torch.ones(1, source_ids.size(0), dtype=torch.bool)
    return beam_batch(model, source_ids[None], source_mask, special, max_length, beam_size, length_penalty)[0]


def _hypothesis(tokens: list[int], log_probs: list[float], special: SpecialIds) -> Hypothesis:
    ended = bool(tokens) and tokens[-1] == special.eos
    return Hypothesis(tokens[:-1] if ended else tokens, sum(log_probs), log_probs, ended)
