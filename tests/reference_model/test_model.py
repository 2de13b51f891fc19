"""The model's parts against numbers worked out by hand, and what masks, sharing and tying promise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reference_model import Transformer, TransformerConfig
from reference_model.model import (
    FeedForward,
    MultiHeadAttention,
    RelativePositions,
    causal_mask,
    make_norm,
    padding_mask,
    scaled_dot_product_attention,
    sinusoid_table,
)
from tests.numerics import assert_close, exactly, near


def build(**fields: Any) -> Transformer:
    """A small model without dropout whose layer norms and biases are not trivial."""
    sizes = {"source_vocabulary_size": 11, "target_vocabulary_size": 11, "d_model": 12, "heads": 3, "d_ff": 20}
    layers = {"encoder_layers": 2, "decoder_layers": 3, "max_length": 16}
    model = Transformer(TransformerConfig(**{**sizes, **layers, **fields})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


NORM_ORDERS = pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])


def test_attention_by_hand() -> None:
    """Scores 1/sqrt(2) and 0: weights e^0.7071 / (e^0.7071 + 1) = 0.66976 and 0.33024."""
    query = torch.tensor([[[[1.0, 0.0]]]])
    key = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])
    value = torch.tensor([[[[10.0, 0.0], [0.0, 20.0]]]])
    attended, weights = scaled_dot_product_attention(query, key, value, None)
    # Half a unit in the last of the digits above, and what ten and twenty times of that is.
    torch.testing.assert_close(weights, torch.tensor([[[[0.66976, 0.33024]]]]), rtol=0, atol=0.6e-5)
    torch.testing.assert_close(attended, torch.tensor([[[[6.6976, 6.6048]]]]), rtol=0, atol=1.2e-4)


def test_attention_by_hand_with_a_mask() -> None:
    query, key = torch.ones(1, 1, 2, 4), torch.ones(1, 1, 3, 4)
    value = torch.tensor([3.0, 5.0, 100.0])[None, None, :, None]
    mask = torch.tensor([[True, True, False], [False, True, False]])
    attended, weights = scaled_dot_product_attention(query, key, value, mask)
    assert weights[0, 0].tolist() == [[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]]
    assert attended[0, 0, :, 0].tolist() == [4.0, 5.0]


def test_a_query_that_may_see_nothing_stays_finite() -> None:
    query, key, value = (torch.randn(1, 2, 3, 4) for _ in range(3))
    attended, weights = scaled_dot_product_attention(query, key, value, torch.zeros(3, 3, dtype=torch.bool))
    assert weights.numpy() == near(np.full(weights.shape, 1 / 3))
    assert_close(attended, exactly(lambda v: v.mean(2, keepdim=True).expand_as(v), value))


def test_heads_are_slices_of_the_projections() -> None:
    """Head h attends with columns h*D..h*D+D-1 of W_q x, W_k x and W_v x; W_o joins them in that order."""
    attention = MultiHeadAttention(build().config).eval()
    x, y = torch.randn(1, 4, 12), torch.randn(1, 5, 12)
    found, _ = attention.attend(x, *attention.keys_values(y), None)

    def slices(attention: Any, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = attention.W_q(x)[0], attention.W_k(y)[0], attention.W_v(y)[0]
        heads = []
        for h in range(3):
            part = slice(4 * h, 4 * h + 4)
            heads.append((q[:, part] @ k[:, part].T / math.sqrt(4)).softmax(-1) @ v[:, part])
        joined: Tensor = attention.W_o(torch.cat(heads, 1))
        return joined

    assert_close(found[0], exactly(slices, attention, x, y))


def test_position_1_of_the_papers_sinusoids() -> None:
    row = sinusoid_table(3, 4)[1]
    torch.testing.assert_close(row, torch.tensor([0.8415, 0.5403, 0.0100, 0.99995]), rtol=0, atol=5e-5)  # four digits


def test_sinusoids_by_their_formula() -> None:
    table = sinusoid_table(50, 10)
    for position in (0, 1, 7, 49):
        for i in range(5):
            angle = position / 10000 ** (2 * i / 10)
            # The angle is a float32 too: what it is off, its sine is off.
            assert table[position, 2 * i].item() == near(math.sin(angle), made_of=[1, angle])
            assert table[position, 2 * i + 1].item() == near(math.cos(angle), made_of=[1, angle])


def test_embeddings_are_scaled_and_get_their_positions() -> None:
    model = build()
    embedded = model.embed_source(torch.tensor([[3, 7]]))
    rows = model.source_embedding.weight[[3, 7]]
    assert_close(embedded[0], exactly(lambda rows, table: rows * math.sqrt(12) + table, rows, sinusoid_table(2, 12)))


def test_masks() -> None:
    assert padding_mask(torch.tensor([[4, 0], [5, 6]]), 0).tolist() == [[True, False], [True, True]]
    assert causal_mask(3).tolist() == [[True, False, False], [True, True, False], [True, True, True]]


@NORM_ORDERS
@torch.inference_mode()
def test_source_padding_changes_nothing(*, norm_first: bool) -> None:
    model = build(norm_first=norm_first)
    target_ids = torch.tensor([[1, 5, 6]])
    inputs = torch.tensor([[4, 9, 2]]), torch.ones(1, 3, dtype=torch.bool), target_ids
    alone, exact = model(*inputs), exactly(lambda m: m(*inputs), model)
    mask = torch.tensor([[True, True, True, False, False]])
    for padding in (0, 8):
        padded = model(torch.tensor([[4, 9, 2, padding, padding]]), mask, target_ids)
        assert_close(padded, exact)
    seen = model(torch.tensor([[4, 9, 2, 8, 8]]), torch.ones(1, 5, dtype=torch.bool), target_ids)
    assert (seen - alone).abs().max() > 1e-3


@NORM_ORDERS
@torch.inference_mode()
def test_future_target_tokens_change_nothing_before_them(*, norm_first: bool) -> None:
    model = build(norm_first=norm_first)
    source_ids, mask = torch.tensor([[4, 9, 2]]), torch.ones(1, 3, dtype=torch.bool)
    first = model(source_ids, mask, torch.tensor([[1, 5, 6, 7]]))
    second = model(source_ids, mask, torch.tensor([[1, 5, 8, 3]]))
    assert_close(second[:, :2], exactly(lambda m: m(source_ids, mask, torch.tensor([[1, 5]])), model))
    assert (second[:, 2:] - first[:, 2:]).abs().amax(-1).min() > 1e-3


@torch.inference_mode()
def test_target_padding_changes_nothing() -> None:
    model = build()
    source_ids, mask = torch.tensor([[4, 9, 2]]), torch.ones(1, 3, dtype=torch.bool)
    alone = exactly(lambda m: m(source_ids, mask, torch.tensor([[1, 5, 6]])), model)
    target_mask = torch.tensor([[False, True, True, True]])
    first, second = (model(source_ids, mask, torch.tensor([[p, 1, 5, 6]]), target_mask) for p in (0, 7))
    shifted = exactly(lambda m: m(source_ids, mask, torch.tensor([[0, 1, 5, 6]]), target_mask)[:, 1:], model)
    for content in (first, second):  # it is not seen
        assert_close(content[:, 1:], shifted)
    behind = model(source_ids, mask, torch.tensor([[1, 5, 6, 0]]), torch.tensor([[True, True, True, False]]))
    assert_close(behind[:, :3], alone)


@NORM_ORDERS
@torch.inference_mode()
def test_fully_masked_sources_stay_finite(*, norm_first: bool) -> None:
    model = build(norm_first=norm_first, final_norm=norm_first)
    logits = model(torch.tensor([[4, 9, 2]]), torch.zeros(1, 3, dtype=torch.bool), torch.tensor([[1, 5]]))
    assert logits.isfinite().all()


@torch.inference_mode()
def test_attention_weights_are_returned() -> None:
    """Shapes as documented; every row sums to 1; nothing at masked places."""
    model = build()
    source_ids = torch.tensor([[4, 9, 2, 0], [5, 6, 7, 2]])
    source_mask, target_ids = padding_mask(source_ids, 0), torch.tensor([[1, 5, 6], [1, 7, 8]])
    encoder, self_attention, cross_attention = [], [], []  # type: ignore[var-annotated]
    memory = model.encode(source_ids, source_mask, encoder)
    logits = model.decode(
        target_ids, memory, source_mask, self_attention=self_attention, cross_attention=cross_attention
    )
    assert_close(logits, exactly(lambda m: m(source_ids, source_mask, target_ids), model))
    assert [tuple(w.shape) for w in encoder] == [(2, 3, 4, 4)] * 2
    assert [tuple(w.shape) for w in self_attention] == [(2, 3, 3, 3)] * 3
    assert [tuple(w.shape) for w in cross_attention] == [(2, 3, 3, 4)] * 3
    for weights in encoder + self_attention + cross_attention:
        assert weights.sum(-1).numpy() == near(np.ones(weights.shape[:-1]))
    for weights in encoder + cross_attention:
        assert weights[0, :, :, 3].max() == 0
        assert weights[1].min() > 0
    for weights in self_attention:
        assert weights.triu(1).max() == 0


def test_layer_counts_and_vocabularies_are_separate() -> None:
    model = build(source_vocabulary_size=7, target_vocabulary_size=13, encoder_layers=1, decoder_layers=2)
    assert (len(model.encoder_layers), len(model.decoder_layers)) == (1, 2)
    logits = model(torch.tensor([[6, 2]]), torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1, 12, 3]]))
    assert logits.shape == (1, 3, 13)


def test_sharing_and_tying() -> None:
    separate, shared = build(), build(share_embeddings=True)
    tied, both = build(tie_projection=True), build(share_embeddings=True, tie_projection=True)
    assert separate.target_embedding is not separate.source_embedding
    assert shared.target_embedding is shared.source_embedding
    assert tied.projection.weight is tied.target_embedding.weight
    assert both.projection.weight is both.source_embedding.weight
    sizes = [sum(p.numel() for p in model.parameters()) for model in (separate, shared, tied, both)]
    assert sizes == [sizes[0], sizes[0] - 11 * 12, sizes[0] - 11 * 12, sizes[0] - 2 * 11 * 12]
    both(torch.tensor([[4, 2]]), torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1]])).sum().backward()
    assert both.projection.weight.grad is not None


def test_a_seed_gives_one_model() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(7)
        states.append(Transformer(build().config).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_initial_embeddings_enter_at_the_scale_of_the_positions() -> None:
    config = TransformerConfig.preset("tiny", source_vocabulary_size=500, target_vocabulary_size=500)
    model = Transformer(config)
    for embedding in (model.source_embedding, model.target_embedding):
        assert (embedding.weight * math.sqrt(config.d_model)).std().item() == pytest.approx(1, abs=0.05)


def test_dropout_is_for_training_only() -> None:
    model = build(dropout=0.5)
    inputs = torch.tensor([[4, 9, 2]]), torch.ones(1, 3, dtype=torch.bool), torch.tensor([[1, 5]])
    assert torch.equal(model(*inputs), model(*inputs))
    model.train()
    assert not torch.equal(model(*inputs), model(*inputs))


def test_a_learned_table_is_a_weight_of_each_side() -> None:
    model = build(positions="learned", longest_target=5)
    assert model.source_positions.table.shape == (16, 12)
    assert model.target_positions.table.shape == (5, 12)
    embedded = model.embed_target(torch.tensor([[3, 7]]), torch.tensor([[4, 0]]))
    rows, table = model.target_embedding.weight[[3, 7]], model.state_dict()["target_positions.table"][[4, 0]]
    assert_close(embedded[0], exactly(lambda rows, table: rows * math.sqrt(12) + table, rows, table))


def test_embeddings_may_be_left_unscaled_and_normalised() -> None:
    model = build(positions="none", scale_embeddings=False, embedding_norm=True)
    norm = model.source_positions.norm

    def formula(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        centred = rows - rows.mean(1, keepdim=True)
        return centred / (rows.var(1, keepdim=True, correction=0) + 1e-5).sqrt() * weight + bias

    exact = exactly(formula, model.source_embedding.weight[[3, 7]], norm.weight, norm.bias)
    assert_close(model.embed_source(torch.tensor([[3, 7]]))[0], exact)


def test_norms_by_their_formulas() -> None:
    x = torch.randn(5, 12) * 3 + 1
    rms = make_norm(build(norm="rms", layer_norm_epsilon=0.5).config)
    assert_close(rms(x), exactly(lambda x: x / ((x**2).mean(-1, keepdim=True) + 0.5).sqrt(), x))
    unbiased = make_norm(build(norm="unbiased", layer_norm_epsilon=0.5).config)
    with torch.no_grad():
        unbiased.weight.mul_(3)
        unbiased.bias.add_(2)
    expected = exactly(lambda x: 3 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 0.5) + 2, x)
    assert_close(unbiased(x), expected)


def test_activations_and_the_gate_by_their_formulas() -> None:
    x = torch.randn(5, 12)
    formulas = {
        "relu": lambda y: y.clamp(min=0),
        "gelu": lambda y: y * (1 + torch.erf(y / math.sqrt(2))) / 2,
        "gelu_tanh": lambda y: y / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))),
        "silu": lambda y: y / (1 + torch.exp(-y)),
    }
    for activation, formula in formulas.items():
        for gated in (False, True):
            layer = FeedForward(build(activation=activation, gated_feed_forward=gated).config)

            def by_hand(layer: Any, x: Tensor, formula: Any = formula, gated: bool = gated) -> Tensor:
                hidden = formula(layer.W_1(x)) * (layer.W_gate(x) if gated else 1)
                found: Tensor = layer.W_2(hidden)
                return found

            assert_close(layer(x), exactly(by_hand, layer, x))


def test_distances_share_buckets_by_their_logarithm() -> None:
    """Eight buckets up to distance 16: 0, 1, 2, 3 have their own, then 4-5, 6-7, 8-11 and all from 12 on."""
    config = build(positions="relative", relative_buckets=8, relative_max_distance=16).config
    backwards = RelativePositions(config, both_ways=False).buckets(-torch.arange(20))
    assert backwards.tolist() == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, *[7] * 8]
    assert RelativePositions(config, both_ways=False).buckets(torch.tensor([1, 9])).tolist() == [0, 0]
    # Both ways: half of them for each direction, two of these exact, then 2-5 and all from 6 on (2 sqrt(8) = 5.7).
    both = RelativePositions(config, both_ways=True).buckets(torch.arange(-7, 8))
    assert both.tolist() == [3, 3, 2, 2, 2, 2, 1, 0, 5, 6, 6, 6, 6, 7, 7]


@torch.inference_mode()
def test_relative_positions_are_added_to_the_scores_of_self_attention() -> None:
    model = build(positions="relative", encoder_layers=1, scale_attention=False)
    x, mask = torch.randn(1, 4, 12), torch.ones(1, 1, 1, 4, dtype=torch.bool)
    relative, layer = model.encoder_relative, model.encoder_layers[0]
    _, weights = layer(x, mask, relative.between(4))

    def by_hand(attention: Any, bias: Tensor, x: Tensor, head: int, q: int) -> Tensor:
        query, (key, _) = attention.split_heads(attention.W_q(x)), attention.keys_values(x)
        scores = [
            query[0, head, q] @ key[0, head, k] + bias[relative.buckets(torch.tensor(k - q)), head] for k in range(4)
        ]
        return torch.stack(scores).softmax(0)

    for head in range(3):
        for q in range(4):
            exact = exactly(by_hand, layer.self_attention, relative.bias.weight, x, head, q)
            assert_close(weights[0, head, q], exact)


@torch.inference_mode()
def test_the_output_may_be_scaled_down_before_the_projection() -> None:
    plain, scaled = build(), build(scale_projection=True)
    scaled.load_state_dict(plain.state_dict())
    x = torch.randn(1, 2, 12)
    linear = torch.nn.functional.linear
    exact = exactly(lambda m, x: linear(x / math.sqrt(12), m.projection.weight, m.projection.bias), plain, x)
    assert_close(scaled.project(x), exact)


@pytest.mark.parametrize("positions", ["relative", "none"])
def test_where_there_is_no_table_sequences_have_no_end(positions: str) -> None:
    model = build(max_length=4, positions=positions)
    ids = torch.ones(1, 9, dtype=torch.long)
    assert model(ids, ids > 0, ids).shape == (1, 9, 11)


def test_a_sequence_beyond_the_position_table_is_refused() -> None:
    model = build(max_length=4)
    model(torch.ones(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.bool), torch.tensor([[1]]))
    with pytest.raises(ValueError, match=r"4 rows \(max_length\), found a sequence of 5"):
        model.encode(torch.ones(1, 5, dtype=torch.long), torch.ones(1, 5, dtype=torch.bool))
