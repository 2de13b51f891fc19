"""Hugging Face's decoding loops over our numbers: an independent oracle for every way of decoding.

`Oracle.generate` runs transformers' own `GenerationMixin.generate` on a `reference_model.Transformer`: their search,
penalties, stop rules and ranking; our logits, from the whole decoder over the whole target so far.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from reference_model import SpecialIds, Transformer
from reference_model.data import pad

Ids = tuple[int, ...]


class _Numbering(nn.Module):
    """What `generate` takes for the encoder: its output is the number of each source, [B, 1, 1].

    `generate` repeats an encoder's output for every beam and hands it back at every step: a number does as well as the
    real output, and tells which source a row belongs to.
    """

    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[Ids] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> BaseModelOutput:
        """input_ids [B, S], attention_mask [B, S] (1 or 0) -> numbers [B, 1, 1]."""
        rows = zip(input_ids, attention_mask.bool(), strict=True)
        self.sources = [tuple(ids[mask].tolist()) for ids, mask in rows]
        return BaseModelOutput(last_hidden_state=torch.arange(len(self.sources))[:, None, None])


class HuggingFaceTransformer(PreTrainedModel, GenerationMixin):
    """A `Transformer` that Hugging Face's `generate` can drive.

    The logits after a target depend on it and its source alone; they are computed once and remembered, because
    searches with other options pass through the same targets again.

    Args:
        transformer: the model, in evaluation mode.
        special: its ids.
        normalised: give log-probabilities where Hugging Face expects logits. It makes no difference, except that a
            greedy repetition penalty multiplies what it is given: on logits it depends on a constant that
            log-probabilities do not have.
    """

    config_class = PretrainedConfig
    main_input_name = "input_ids"

    def __init__(self, transformer: Transformer, special: SpecialIds, *, normalised: bool = False) -> None:
        ids = {"pad_token_id": special.pad, "bos_token_id": special.bos, "eos_token_id": special.eos}
        config = PretrainedConfig(is_encoder_decoder=True, decoder_start_token_id=special.bos, **ids)
        config.vocab_size = transformer.config.target_vocabulary_size
        super().__init__(config)
        self.encoder, self.transformer, self.special, self.normalised = _Numbering(), transformer, special, normalised
        self.generation_config = GenerationConfig(decoder_start_token_id=special.bos, use_cache=False, **ids)
        self.memories: dict[Ids, Tensor] = {}
        self.logits: dict[tuple[Ids, Ids], Tensor] = {}

    def get_encoder(self, *_: Any) -> nn.Module:
        """What `generate` runs once a batch."""
        return self.encoder

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, encoder_outputs: BaseModelOutput, **_: Any
    ) -> dict[str, Any]:
        """The arguments of `forward` at a step; without a cache, the whole target so far."""
        return {"decoder_input_ids": input_ids, "encoder_outputs": encoder_outputs}

    def forward(self, decoder_input_ids: Tensor, encoder_outputs: BaseModelOutput, **_: Any) -> Seq2SeqLMOutput:
        """decoder_input_ids [B, T] -> the logits [B, 1, V] of the token that follows."""
        sources = [self.encoder.sources[i] for i in encoder_outputs.last_hidden_state[:, 0, 0].tolist()]
        keys = list(zip(sources, map(tuple, decoder_input_ids.tolist()), strict=True))
        missing = list(dict.fromkeys(key for key in keys if key not in self.logits))
        if missing:
            self._compute(missing)
        logits = torch.stack([self.logits[key] for key in keys])[:, None]
        return Seq2SeqLMOutput(logits=logits.log_softmax(-1) if self.normalised else logits)

    def _compute(self, keys: list[tuple[Ids, Ids]]) -> None:
        for source in {source for source, _ in keys if source not in self.memories}:
            source_ids = torch.tensor([source])
            self.memories[source] = self.transformer.encode(source_ids, torch.ones_like(source_ids, dtype=torch.bool))[
                0
            ]
        memories = [self.memories[source] for source, _ in keys]
        lengths = torch.tensor([len(memory) for memory in memories])
        source_mask = torch.arange(int(lengths.max())) < lengths[:, None]
        memory = nn.utils.rnn.pad_sequence(memories, batch_first=True)
        targets = torch.tensor([target for _, target in keys])
        logits = self.transformer.decode(targets, memory, source_mask)[:, -1]
        self.logits.update(zip(keys, logits, strict=True))


@dataclass(frozen=True)
class Generated:
    """A sequence that Hugging Face gave.

    Attributes:
        tokens: the ids after start token and prefix, the end token included if it came.
        log_probs: of each, after penalties and normalised again: their `compute_transition_scores` with
            normalize_logits. Greedy only.
        score: the `sequences_scores` by which beams are ranked. Beam search only.
    """

    tokens: list[int]
    log_probs: list[float] | None
    score: float | None


class Oracle:
    """Hugging Face's `generate` for one model.

    Args:
        transformer: the model, in evaluation mode.
        special: its ids.
        normalised: see `HuggingFaceTransformer`.
    """

    def __init__(self, transformer: Transformer, special: SpecialIds, *, normalised: bool = False) -> None:
        self.special = special
        self.model = HuggingFaceTransformer(transformer, special, normalised=normalised).eval()

    def generate(
        self, sources: list[list[int]], *, prefixes: list[list[int]] | None = None, **options: Any
    ) -> list[list[Generated]]:
        """Decode.

        Args:
            sources: the ids that the encoder gets, one list a sentence.
            prefixes: the tokens that each target begins with, after the start token.
            **options: the fields of their `GenerationConfig`, by their names: num_beams, num_return_sequences,
                length_penalty, early_stopping, no_repeat_ngram_size, repetition_penalty, min_length, max_length (which
                count the start token), min_new_tokens, max_new_tokens...

        Returns:
            The sequences of each sentence, the best first.
        """
        prefixes = prefixes or [[] for _ in sources]
        by_length = defaultdict(list)  # their loop wants one prefix length a batch
        for i, prefix in enumerate(prefixes):
            by_length[len(prefix)].append(i)
        results: list[list[Generated]] = [[] for _ in sources]
        for length, indices in by_length.items():
            source_ids = pad([sources[i] for i in indices], self.special.pad)
            lengths = torch.tensor([len(sources[i]) for i in indices])
            output = self.model.generate(
                input_ids=source_ids,
                attention_mask=(torch.arange(source_ids.size(1)) < lengths[:, None]).long(),
                decoder_input_ids=torch.tensor([[self.special.bos, *prefixes[i]] for i in indices]),
                return_dict_in_generate=True,
                output_scores=True,
                **options,
            )
            sequences = _beams(output, 1 + length) if "beam_indices" in output else self._greedy(output, 1 + length)
            each = len(sequences) // len(indices)
            for row, i in enumerate(indices):
                results[i] = sequences[row * each : (row + 1) * each]
        return results

    def _greedy(self, output: Any, start: int) -> list[Generated]:
        log_probs = torch.stack(output.scores, 1).log_softmax(-1)  # [B, T, V]
        chosen = output.sequences[:, start:]
        results = []
        for tokens, values in zip(chosen.tolist(), log_probs.gather(2, chosen[:, :, None]).tolist(), strict=True):
            end = tokens.index(self.special.eos) + 1 if self.special.eos in tokens else len(tokens)
            results.append(Generated(tokens[:end], [value for (value,) in values[:end]], None))
        return results


def _beams(output: Any, start: int) -> list[Generated]:
    lengths = (output.beam_indices >= 0).sum(1).tolist()
    return [
        Generated(tokens[start : start + length].tolist(), None, score.item())
        for tokens, length, score in zip(output.sequences, lengths, output.sequences_scores, strict=True)
    ]
