"""T5 in Hugging Face transformers, and its kin: T5 1.1, FLAN-T5, mT5, ByT5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfm_export.checkpoints.bart import STACKS, find_tables, know_activation, ties_projection, untied
from tfm_export.checkpoints.files import Contents
from tfm_export.checkpoints.key_map import KeyMap
from tfm_export.checkpoints.partial import PartialCheckpoint
from tfm_export.checkpoints.position_tables import DEFAULT_LENGTH, place_tables
from tfm_export.checkpoints.wrapping import Weights

FAMILIES = {"t5": "relu", "mt5": "gated-gelu"}  # the feed-forward where config.json does not say
QUERY = "block.0.layer.0.SelfAttention.q.weight"
SIGNATURE = f"encoder.{QUERY}"
BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
SHAPES, CONFIG, LAYOUT = "the shapes", "config.json", "the family"
TOLD = {
    "norm_first": True,
    "final_norm": True,
    "norm": "rms",
    "positions": "relative",
    "scale_embeddings": False,
    "scale_attention": False,
}
# A bias of cross-attention that old files have and no model uses.
USELESS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def read(contents: Contents, weights: Weights, settings: Mapping[str, Any]) -> PartialCheckpoint:
    """What such a folder tells."""
    config = contents.config
    found = PartialCheckpoint(
        contents.path, f"a Hugging Face model of type {config['model_type']}", KeyMap(weights.tensors), settings
    )
    if SIGNATURE not in found.keys:
        found.problems.append(f"missing: {SIGNATURE}, by which this layout is told")
        return found
    for name, value in TOLD.items():
        found.know(name, value, LAYOUT)
    _tell(found, config)
    own = {"source": "encoder.embed_tokens.weight", "target": "decoder.embed_tokens.weight"}
    embeddings, projection = find_tables(
        found, own, "shared.weight", "lm_head.weight", untied=untied(config), ties=ties_projection(config)
    )
    found.know("scale_projection", _scales(found, config), CONFIG)
    place_tables(found, embeddings=embeddings, projection=projection, bias="lm_head.bias", positions=None)
    for stack in ("encoder", "decoder"):
        _place_stack(found, stack)
    found.keys.ignore([USELESS], "a bias that no model uses")
    return found


def _tell(found: PartialCheckpoint, config: Mapping[str, Any]) -> None:
    keys = found.keys
    found.infer("d_model", keys.size(SIGNATURE, 1), SHAPES)
    for stack in STACKS:
        layers = found.count_layers(f"{stack}.block.{{}}.layer.0.SelfAttention.q.weight")
        found.infer(f"{stack}_layers", layers, SHAPES)
    _tell_heads(found)
    found.know("relative_max_distance", config.get("relative_attention_max_distance", 128), CONFIG)
    found.know("layer_norm_epsilon", config.get("layer_norm_epsilon", 1e-6), CONFIG)
    gated = "encoder.block.0.layer.1.DenseReluDense.wi_0.weight" in keys
    found.infer("gated_feed_forward", gated, "its names")
    places = [f"{stack}.block.0.layer.{number}.DenseReluDense" for number, stack in enumerate(STACKS, 1)]
    found.infer_each("d_ff", [keys.size(f"{place}.{'wi_0' if gated else 'wi'}.weight", 0) for place in places], SHAPES)
    activation = str(config.get("feed_forward_proj", FAMILIES[config["model_type"]])).removeprefix("gated-")
    # Their "gated-gelu" has always meant the approximation by a tanh.
    know_activation(found, "gelu_new" if gated and activation == "gelu" else activation)
    length = config.get("n_positions")
    found.know(
        "max_length", length or DEFAULT_LENGTH, CONFIG if length else "the default: relative positions have no end"
    )


def _tell_heads(found: PartialCheckpoint) -> None:
    keys = found.keys
    biases = [f"{stack}.{BIAS}" for stack in STACKS]
    if not all(bias in keys for bias in biases):
        return
    found.infer("relative_buckets", keys.size(biases[0], 0), SHAPES)
    heads = [keys.size(bias, 1) for bias in biases]
    queries = [f"{stack}.{QUERY}" for stack in STACKS]
    sizes = []
    for query, count in zip(queries, heads, strict=True):
        inner = keys.size(query, 0)
        if inner % count:
            found.problems.append(f"{query} has {inner} rows, which {count} heads cannot share")
        sizes.append(inner // count)
    found.infer_each("heads", heads, SHAPES)
    found.infer_each("d_head", sizes, SHAPES)


def _scales(found: PartialCheckpoint, config: Mapping[str, Any]) -> bool:
    """Whether the decoder's output is scaled down: T5 as it was first, whose projection was its embedding.

    Files of transformers 5 say so; before, tied weights meant it.
    """
    if "scale_decoder_outputs" in config:
        return bool(config["scale_decoder_outputs"])
    if config["model_type"] == "t5":
        return bool(config.get("tie_word_embeddings", True))
    old = str(config.get("transformers_version", "5")).split(".")[0] in {"2", "3", "4"}
    return old and config.get("tie_word_embeddings") is True and bool(found.value("tie_projection"))


def _place_stack(found: PartialCheckpoint, stack: str) -> None:
    keys = found.keys
    keys.put(f"{stack}_relative.bias.weight", f"{stack}.{BIAS}")
    attentions = {"self_attention": "SelfAttention"}
    if stack == "decoder":
        attentions["cross_attention"] = "EncDecAttention"
    inner = (
        {"W_1": "wi_0", "W_gate": "wi_1", "W_2": "wo"}
        if found.value("gated_feed_forward")
        else {"W_1": "wi", "W_2": "wo"}
    )
    for i in range(found.value(f"{stack}_layers")):
        ours, theirs = f"{stack}_layers.{i}", f"{stack}.block.{i}.layer"
        for number, (name, attention) in enumerate(attentions.items()):
            for part in "qkvo":
                keys.linear(f"{ours}.{name}.W_{part}", f"{theirs}.{number}.{attention}.{part}")
            keys.norm(f"{ours}.{name}_residual.norm", f"{theirs}.{number}.layer_norm", bias=None)
        number = len(attentions)
        for part, projection in inner.items():
            keys.linear(f"{ours}.feed_forward.{part}", f"{theirs}.{number}.DenseReluDense.{projection}")
        keys.norm(f"{ours}.feed_forward_residual.norm", f"{theirs}.{number}.layer_norm", bias=None)
    keys.norm(f"{stack}_norm", f"{stack}.final_layer_norm", bias=None)
