"""The same weights in `torch.nn.Transformer` give the same logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from reference_model import Transformer, TransformerConfig
from reference_model.model import MultiHeadAttention, Residual
from tests.numerics import assert_close, exactly


def torch_stacks(config: TransformerConfig) -> nn.Transformer:
    """PyTorch's own encoder and decoder of this configuration, untrained."""
    sizes, own = (
        {"d_model": stack.d_model, "nhead": stack.heads, "dim_feedforward": stack.d_ff, "dropout": 0.0}
        for stack in (config, config.decoder)
    )
    kinds = {"activation": config.activation, "norm_first": config.norm_first, "batch_first": True}
    widths = (config.d_model, config.decoder.d_model)
    norms = [nn.LayerNorm(width) if config.final_norm else None for width in widths]
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(**sizes, **kinds),  # type: ignore[arg-type]
        config.encoder_layers,
        norms[0],
        enable_nested_tensor=False,
    )
    decoder_layer = nn.TransformerDecoderLayer(**own, **kinds)  # type: ignore[arg-type]
    if widths[0] != widths[1]:
        decoder_layer.multihead_attn = nn.MultiheadAttention(
            widths[1], config.decoder.heads, kdim=widths[0], vdim=widths[0], batch_first=True
        )
    decoder = nn.TransformerDecoder(decoder_layer, config.decoder_layers, norms[1])
    return nn.Transformer(
        config.d_model, config.heads, custom_encoder=encoder, custom_decoder=decoder, batch_first=True
    )


def input_projections(theirs: nn.MultiheadAttention, ours: MultiHeadAttention) -> list[tuple[Tensor, Tensor]]:
    """Theirs, which are one unless keys are made of another width, with ours."""
    parts = [ours.W_q.weight, ours.W_k.weight, ours.W_v.weight]
    if theirs.in_proj_weight is not None:
        return [(theirs.in_proj_weight, torch.cat(parts))]
    return [*zip((theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight), parts, strict=True)]


@torch.no_grad()
def load(stacks: nn.Transformer, model: Transformer) -> None:
    """Put the model's weights into PyTorch's stacks; every parameter of theirs is set."""
    untouched = {id(parameter) for parameter in stacks.parameters()}

    def put(theirs: Tensor, ours: Tensor) -> None:
        theirs.copy_(ours)
        untouched.discard(id(theirs))

    def attention(theirs: nn.MultiheadAttention, ours: MultiHeadAttention) -> None:
        for theirs_weight, weight in input_projections(theirs, ours):
            put(theirs_weight, weight)
        put(theirs.in_proj_bias, torch.cat([ours.W_q.bias, ours.W_k.bias, ours.W_v.bias]))
        put(theirs.out_proj.weight, ours.W_o.weight)
        put(theirs.out_proj.bias, ours.W_o.bias)

    def norm(theirs: nn.LayerNorm, ours: nn.Module) -> None:
        put(theirs.weight, ours.weight)  # type: ignore[arg-type]
        put(theirs.bias, ours.bias)  # type: ignore[arg-type]

    for theirs, ours in [
        *zip(stacks.encoder.layers, model.encoder_layers, strict=True),
        *zip(stacks.decoder.layers, model.decoder_layers, strict=True),
    ]:
        residuals: list[Residual] = [part for part in ours.children() if isinstance(part, Residual)]
        for number, residual in enumerate(residuals, 1):
            norm(getattr(theirs, f"norm{number}"), residual.norm)
        attention(theirs.self_attn, ours.self_attention)
        if hasattr(ours, "cross_attention"):
            attention(theirs.multihead_attn, ours.cross_attention)
        for linear, feed_forward in ((theirs.linear1, ours.feed_forward.W_1), (theirs.linear2, ours.feed_forward.W_2)):
            put(linear.weight, feed_forward.weight)
            put(linear.bias, feed_forward.bias)
    if model.config.final_norm:
        norm(stacks.encoder.norm, model.encoder_norm)
        norm(stacks.decoder.norm, model.decoder_norm)
    assert not untouched


def torch_logits(
    stacks: nn.Transformer,
    model: Transformer,
    source_ids: Tensor,
    source_mask: Tensor,
    target_ids: Tensor,
    target_mask: Tensor,
) -> Tensor:
    """What PyTorch's stacks make of the model's embeddings and projection."""

    def embed(weight: Tensor, ids: Tensor) -> Tensor:
        m = weight.size(1)
        angles = [
            [position / 10000 ** (2 * (i // 2) / m) + (i % 2) * math.pi / 2 for i in range(m)]  # cos x = sin(x + pi/2)
            for position in range(ids.size(1))
        ]
        table = torch.tensor(angles, dtype=torch.double).sin().float()
        return weight[ids] * m**0.5 + table.to(weight.dtype)

    # One after the other: nn.Transformer asks for inputs of one width.
    memory = stacks.encoder(embed(model.source_embedding.weight, source_ids), src_key_padding_mask=~source_mask)
    hidden = stacks.decoder(
        embed(model.target_embedding.weight, target_ids),
        memory,
        tgt_mask=torch.ones(target_ids.size(1), target_ids.size(1), dtype=torch.bool).triu(1),
        tgt_key_padding_mask=~target_mask,
        memory_key_padding_mask=~source_mask,
    )
    return hidden @ model.projection.weight.T + model.projection.bias


def mask_of(lengths: list[int]) -> Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


UNEQUAL = {"d_model": 30, "heads": 5, "d_ff": 17, "decoder_heads": 3, "decoder_d_ff": 41}


@pytest.mark.parametrize("sizes", [{}, UNEQUAL, {**UNEQUAL, "decoder_d_model": 42}], ids=["equal", "unequal", "wide"])
@pytest.mark.parametrize("final_norm", [False, True], ids=["no final norm", "final norm"])
@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize(
    ("source_lengths", "target_lengths"), [([1], [1]), ([7], [5]), ([5, 1, 9], [3, 8, 1]), ([4] * 4, [11] * 4)]
)
@torch.no_grad()
def test_logits_are_torchs(
    source_lengths: list[int],
    target_lengths: list[int],
    activation: str,
    sizes: dict[str, int],
    *,
    norm_first: bool,
    final_norm: bool,
) -> None:
    common = {
        "source_vocabulary_size": 17,
        "target_vocabulary_size": 23,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "activation": activation,
        "norm_first": norm_first,
        "final_norm": final_norm,
        "max_length": 16,
    }
    config = TransformerConfig.preset("tiny", **common, **sizes)
    model = Transformer(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.2)
    source_mask, target_mask = mask_of(source_lengths), mask_of(target_lengths)
    source_ids = torch.randint(3, 17, source_mask.shape)
    target_ids = torch.randint(3, 23, target_mask.shape)
    found = model(source_ids, source_mask, target_ids, target_mask)
    stacks = torch_stacks(model.config).eval()
    load(stacks, model)

    def theirs(stacks: nn.Transformer, model: Transformer) -> Tensor:
        return torch_logits(stacks, model, source_ids, source_mask, target_ids, target_mask)[target_mask]

    exact = exactly(theirs, stacks, model)
    assert exact.value.std() > 0.1
    for logits in (found[target_mask], theirs(stacks, model)):
        assert_close(logits, exact)
