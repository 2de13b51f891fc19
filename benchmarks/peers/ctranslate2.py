"""CTranslate2 on the weights of a reference_model Transformer: the peer in the benchmarks, an oracle in the tests.

>>> folder = build(checkpoint, "ct2_model")  # doctest: +SKIP
>>> with Peer(folder, threads=2) as peer:  # doctest: +SKIP
...     peer.translate([[5, 7, 2]], beam_size=4)[0][0].tokens
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import ctranslate2
import numpy as np
from ctranslate2.specs import Activation, TransformerSpec
from ctranslate2.specs.common_spec import LayerNormSpec
from ctranslate2.specs.transformer_spec import TransformerDecoderSpec, TransformerEncoderSpec
from numpy.typing import NDArray

if TYPE_CHECKING:  # running a model takes no PyTorch, and a process that measures memory must not load it
    import torch
    from torch import nn

    from reference_model.checkpoint import Checkpoint, SpecialIds
    from reference_model.model import Transformer

ACTIVATIONS = {"relu": Activation.RELU, "gelu": Activation.GELU}
# The options of a configuration that are not turned into CTranslate2's.
PAPER = {
    "positions": "sinusoidal",
    "norm": "layer",
    "gated_feed_forward": False,
    "embedding_norm": False,
    "scale_embeddings": True,
    "scale_attention": True,
    "scale_projection": False,
    "d_head": 0,
    "decoder_d_head": 0,
    "longest_target": 0,
}
UNKNOWN = "<unk>"


@dataclass(frozen=True)
class Hypothesis:
    """What CTranslate2 gave for a source.

    Attributes:
        tokens: target ids, without the start token; the end token only with return_end_token.
        score: CTranslate2's, nan unless return_scores was asked for. With a length_penalty other than 0 it is
            divided by length ** length_penalty, in greedy search too.
        logits: [length, V] each, with return_logits_vocab.
        attention: [length, S], with return_attention.
    """

    tokens: list[int]
    score: float = math.nan
    logits: list[NDArray[np.float32]] | None = None
    attention: list[list[float]] | None = None


def build(
    checkpoint_or_model: Checkpoint | Transformer,
    folder: str | Path,
    quantization: str | None = None,
    *,
    special: SpecialIds | None = None,
    tokens: tuple[Sequence[str], Sequence[str]] | None = None,
) -> Path:
    """Write a CTranslate2 model.

    Args:
        checkpoint_or_model: the weights; a Transformer in the paper's form, whatever its sizes and the order of norms.
        folder: where to; made if it is not there.
        quantization: None keeps float32; "int8" or another scheme of CTranslate2's.
        special: the special ids; a checkpoint's own, or the defaults, if not given.
        tokens: the source's and the target's names of their ids; a checkpoint's vocabularies, or made-up names, if not
            given. Names matter to CTranslate2 only where an option takes names.

    Returns:
        The folder.

    Raises:
        ValueError: the two sides call a special id by different names; CTranslate2 knows special tokens by name. Or
            the configuration has an option that the paper does not.
    """
    from reference_model.checkpoint import Checkpoint, SpecialIds

    model = checkpoint_or_model
    if isinstance(model, Checkpoint):
        special, tokens = special or model.special_ids, tokens or _vocabularies(model)
        model = model.model
    special, tokens = special or SpecialIds(), tokens or _made_up_names(model)
    spec = _spec(model)
    spec.register_source_vocabulary(list(tokens[0]))
    spec.register_target_vocabulary(list(tokens[1]))
    for name, value in _special_names(special, tokens).items():
        setattr(spec.config, name, value)
    spec.config.layer_norm_epsilon = model.config.layer_norm_epsilon
    spec.validate()
    spec.optimize(quantization=quantization)
    Path(folder).mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))
    return Path(folder)


def _vocabularies(checkpoint: Checkpoint) -> tuple[Sequence[str], Sequence[str]] | None:
    source, target = checkpoint.source_vocabulary, checkpoint.target_vocabulary
    return (source.tokens, target.tokens) if source and target else None


def _made_up_names(model: Transformer) -> tuple[Sequence[str], Sequence[str]]:
    sizes = model.config.source_vocabulary_size, model.config.target_vocabulary_size
    source, target = ([f"w{i}" for i in range(size)] for size in sizes)
    return source, target


def _special_names(special: SpecialIds, tokens: tuple[Sequence[str], Sequence[str]]) -> dict[str, str]:
    pairs = {name: (tokens[0][i], tokens[1][i]) for name, i in (("bos", special.bos), ("eos", special.eos))}
    problems = [f"{name} is {a!r} in the source and {b!r} in the target" for name, (a, b) in pairs.items() if a != b]
    if problems:
        raise ValueError("CTranslate2 needs one name for a special token: " + "; ".join(problems))
    # Without a token for unknown words, any special one does: sources come as ids, so that nothing is ever unknown.
    unknown = UNKNOWN if UNKNOWN in tokens[0] and UNKNOWN in tokens[1] else pairs["bos"][0]
    bos, eos = pairs["bos"][0], pairs["eos"][0]
    return {"bos_token": bos, "eos_token": eos, "decoder_start_token": bos, "unk_token": unknown}


def _spec(model: Transformer) -> TransformerSpec:
    config = model.config
    if others := [name for name, value in PAPER.items() if getattr(config, name) != value]:
        raise ValueError(f"this peer is made for the paper's Transformer, not for other {', '.join(others)}")
    options = {
        "pre_norm": config.norm_first,
        "no_final_norm": not config.final_norm,
        "activation": ACTIVATIONS[config.activation],
    }
    spec = TransformerSpec(
        TransformerEncoderSpec(config.encoder_layers, config.heads, **options),
        # The mean over all heads is what a caller gets who asks for attention.
        TransformerDecoderSpec(config.decoder_layers, config.decoder.heads, alignment_heads=0, **options),
    )
    spec.encoder.embeddings[0].weight = _array(model.source_embedding.weight)
    spec.decoder.embeddings.weight = _array(model.target_embedding.weight)
    spec.encoder.position_encodings.encodings = _array(model.source_positions.table)
    spec.decoder.position_encodings.encodings = _array(model.target_positions.table)
    encoder_layers: list[Any] = list(model.encoder_layers)
    for into, layer in zip(spec.encoder.layer, encoder_layers, strict=True):
        _self_attention(into.self_attention, layer.self_attention, layer.self_attention_residual.norm)
        _feed_forward(into.ffn, layer)
    decoder_layers: list[Any] = list(model.decoder_layers)
    for into, layer in zip(spec.decoder.layer, decoder_layers, strict=True):
        _self_attention(into.self_attention, layer.self_attention, layer.self_attention_residual.norm)
        _cross_attention(into.attention, layer.cross_attention, layer.cross_attention_residual.norm)
        _feed_forward(into.ffn, layer)
    if config.final_norm:
        for stack, norm in ((spec.encoder, model.encoder_norm), (spec.decoder, model.decoder_norm)):
            # The specification has a final norm in pre-norm models only; the library applies it wherever there is one.
            stack.__dict__.setdefault("layer_norm", LayerNormSpec())
            _norm(stack.layer_norm, norm)
    _linear(spec.decoder.projection, model.projection)
    return spec


def _array(tensor: torch.Tensor) -> NDArray[np.float32]:
    return tensor.detach().float().numpy()


def _linear(into: Any, *parts: nn.Linear) -> None:
    into.weight = np.concatenate([_array(part.weight) for part in parts])
    into.bias = np.concatenate([_array(part.bias) for part in parts])


def _norm(into: Any, norm: Any) -> None:
    into.gamma, into.beta = _array(norm.weight), _array(norm.bias)


def _self_attention(into: Any, attention: Any, norm: Any) -> None:
    _linear(into.linear[0], attention.W_q, attention.W_k, attention.W_v)
    _linear(into.linear[1], attention.W_o)
    _norm(into.layer_norm, norm)


def _cross_attention(into: Any, attention: Any, norm: Any) -> None:
    _linear(into.linear[0], attention.W_q)
    _linear(into.linear[1], attention.W_k, attention.W_v)
    _linear(into.linear[2], attention.W_o)
    _norm(into.layer_norm, norm)


def _feed_forward(into: Any, layer: Any) -> None:
    _linear(into.linear_0, layer.feed_forward.W_1)
    _linear(into.linear_1, layer.feed_forward.W_2)
    _norm(into.layer_norm, layer.feed_forward_residual.norm)


class Peer:
    """A loaded CTranslate2 model that takes and gives ids; a context manager.

    Which matrix library CTranslate2 uses is decided once per process, before its first model: CT2_USE_MKL=0 in the
    environment takes oneDNN.

    Args:
        folder: what `build` wrote.
        threads: threads for one batch.
        replicas: batches decoded at once.
        compute_type: "default" computes in the type the model is stored in.
        device: "cpu" or "cuda".
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        threads: int = 2,
        replicas: int = 1,
        compute_type: str = "default",
        device: str = "cpu",
    ) -> None:
        self.translator = ctranslate2.Translator(
            str(folder), device=device, inter_threads=replicas, intra_threads=threads, compute_type=compute_type
        )
        self.source_tokens, self.target_tokens = (_read_vocabulary(Path(folder), side) for side in ("source", "target"))
        self._target_ids = {token: i for i, token in enumerate(self.target_tokens)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model."""
        self.translator.unload_model()

    def translate(
        self,
        sources: Sequence[Sequence[int]],
        *,
        target_prefix: Sequence[Sequence[int]] | None = None,
        suppress_sequences: Iterable[Sequence[int]] | None = None,
        end_token: Sequence[int] | None = None,
        **options: Any,
    ) -> list[list[Hypothesis]]:
        """Decode.

        Args:
            sources: ids, exactly what the encoder is to get: an end token is not added.
            target_prefix: ids without the start token, one sequence a source.
            suppress_sequences: ids.
            end_token: ids.
            **options: any other option of `ctranslate2.Translator.translate_batch`, under its name. Defaults that
                differ from CTranslate2's: beam_size=1 (2 there), min_decoding_length=0 (1 there) and
                max_input_length=0, that is, nothing is truncated (1024 there).

        Returns:
            The hypotheses of every source, the best first.
        """
        options = {"beam_size": 1, "min_decoding_length": 0, "max_input_length": 0, **options}
        if target_prefix is not None:
            options["target_prefix"] = self._names(target_prefix, self.target_tokens)
        if suppress_sequences is not None:
            options["suppress_sequences"] = self._names(suppress_sequences, self.target_tokens)
        if end_token is not None:
            options["end_token"] = list(end_token)
        results = self.translator.translate_batch(self._names(sources, self.source_tokens), **options)
        return [list(self._hypotheses(result)) for result in results]

    def translate_iterable(
        self, sources: Sequence[Sequence[int]], target_prefix: Sequence[Sequence[int]] | None = None, **options: Any
    ) -> Iterator[list[int]]:
        """Decode a file's worth of sources in order; the best hypothesis of each.

        Args:
            sources: see `translate`.
            target_prefix: see `translate`.
            **options: of `ctranslate2.Translator.translate_iterable`; see `translate` for the defaults.
        """
        prefix = None if target_prefix is None else self._names(target_prefix, self.target_tokens)
        options = {"min_decoding_length": 0, "max_input_length": 0, **options}
        names = self._names(sources, self.source_tokens)
        for result in self.translator.translate_iterable(names, prefix, **options):
            yield [self._target_ids[name] for name in result.hypotheses[0]]

    def step_ends(self, source: Sequence[Sequence[int]], length: int) -> list[float]:
        """The time at the end of every step of a greedy generation of `length` tokens, in seconds."""
        ends: list[float] = []

        def note(step: ctranslate2.GenerationStepResult) -> bool:
            if step.batch_id == 0:
                ends.append(time.perf_counter())
            return False

        self.translate(source, max_decoding_length=length, callback=note)
        return ends

    @staticmethod
    def _names(rows: Iterable[Sequence[int]], tokens: Sequence[str]) -> list[list[str]]:
        return [[tokens[i] for i in row] for row in rows]

    def _hypotheses(self, result: ctranslate2.TranslationResult) -> Iterator[Hypothesis]:
        for i, names in enumerate(result.hypotheses):
            yield Hypothesis(
                tokens=[self._target_ids[name] for name in names],
                score=result.scores[i] if result.scores else math.nan,
                logits=[np.array(x) for x in result.logits[i]] if result.logits else None,
                attention=result.attention[i] if result.attention else None,
            )


def translate(
    folder: str | Path, sources: Sequence[Sequence[int]], *, threads: int = 2, **options: Any
) -> list[list[Hypothesis]]:
    """Load a model, decode, free it: see `Peer.translate`."""
    with Peer(folder, threads=threads) as peer:
        return peer.translate(sources, **options)


def _read_vocabulary(folder: Path, side: str) -> list[str]:
    path = folder / f"{side}_vocabulary.json"
    tokens: list[str] = json.loads((path if path.exists() else folder / "shared_vocabulary.json").read_text("utf-8"))
    return tokens
