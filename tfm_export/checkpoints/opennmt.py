"""Checkpoints of OpenNMT-py 2 and 3: its options and vocabularies lie beside the weights.

Pre-norm with final norms; the table of positions, where there is one, is in the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from tfm_export.checkpoints.files import Contents
from tfm_export.checkpoints.key_map import KeyMap
from tfm_export.checkpoints.partial import PartialCheckpoint, same
from tfm_export.checkpoints.position_tables import DEFAULT_LENGTH, place_tables
from tfm_export.checkpoints.vocabularies import vocabulary_files
from tfm_export.checkpoints.wrapping import Weights
from tfm_export.quotation import quote

FORMAT = "an OpenNMT-py Transformer"
SIGNATURE = "encoder.transformer.0.self_attn.linear_query.weight"
SHAPES, OPTIONS, VOCABULARY = "the shapes", "its options", "its vocabulary"
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "silu": "silu", "gated-gelu": "gelu"}
GATED = ("silu", "gated-gelu")
BLANK, UNKNOWN, START, END = "<blank>", "<unk>", "<s>", "</s>"
# What would make it another model, each with the value at which it does not.
UNSUPPORTED = {
    "copy_attn": False,
    "parallel_residual": False,
    "num_kv": 0,
    "num_experts": 0,
    "aan_useffn": False,
    "multiquery": False,
}
# The same attention by other kernels; the second is the default of version 3.
ATTENTIONS = ("scaled-dot", "scaled-dot-flash")
# Positions that enter each attention, in place of or beside those of the embeddings.
POSITIONS = {
    -1: "rotary positions, which turn queries and keys",
    -2: "ALiBi, a bias that grows with the distance",
}
SHAW = "relative positions of Shaw et al., vectors that are added to keys and values"


def read(contents: Contents, weights: Weights, settings: Mapping[str, Any]) -> PartialCheckpoint | None:
    """What such a file tells; None if it is another one."""
    state = contents.state
    if SIGNATURE not in weights.tensors or not isinstance(state, dict) or not isinstance(state.get("opt"), dict):
        return None
    generator = state.get("generator") or {}
    weights.notes[:] = [note for note in weights.notes if not note.startswith("'generator' has weights too")]  # used
    tensors = {**weights.tensors, **{f"generator.{name.removeprefix('0.')}": w for name, w in generator.items()}}
    found = PartialCheckpoint(contents.path, FORMAT, KeyMap(tensors), settings)
    options = state["opt"]
    found.problems += [
        f"{name} is {quote(options[name])}, which is not supported"
        for name, plain in UNSUPPORTED.items()
        if options.get(name, plain) not in (plain, None)
    ]
    found.problems += _attention_problems(options)
    _sizes(found)
    _tell(found, options)
    start = options.get("decoder_start_token") or START
    tell_vocabularies(found, state.get("vocab"), {"pad": BLANK, "bos": start, "eos": END, "unk": UNKNOWN})
    names = {
        side: f"{stack}.embeddings.make_embedding" for side, stack in (("source", "encoder"), ("target", "decoder"))
    }
    place_tables(
        found,
        embeddings={side: f"{name}.emb_luts.0.weight" for side, name in names.items()},
        projection="generator.weight",
        bias="generator.bias",
        positions={side: f"{name}.pe.pe" for side, name in names.items()} if options.get("position_encoding") else None,
    )
    _place(found)
    return found


def _attention_problems(options: Mapping[str, Any]) -> Iterator[str]:
    kind, distance = options.get("self_attn_type"), options.get("max_relative_positions")
    if kind not in {None, *ATTENTIONS}:
        yield f"self_attn_type is {kind!r}, which is not supported; known are {', '.join(ATTENTIONS)}"
    if distance:
        yield (
            f"max_relative_positions is {distance!r}: {POSITIONS.get(distance, SHAW)}; the graphs here have positions "
            "in embeddings, or T5's, alone"
        )


def _sizes(found: PartialCheckpoint) -> None:
    keys = found.keys
    found.infer("d_model", keys.size(SIGNATURE, 1), SHAPES)
    found.infer("d_ff", keys.size("encoder.transformer.0.feed_forward.w_1.weight", 0), SHAPES)
    found.infer("encoder_layers", found.count_layers("encoder.transformer.{}.layer_norm.weight"), SHAPES)
    found.infer("decoder_layers", found.count_layers("decoder.transformer_layers.{}.layer_norm_1.weight"), SHAPES)
    tables: dict[str, Tensor | None] = {}
    for side, stack in (("source", "encoder"), ("target", "decoder")):
        name = f"{stack}.embeddings.make_embedding.emb_luts.0.weight"
        tables[side] = keys.tensors.get(name)
        found.infer(f"{side}_vocabulary_size", keys.size(name, 0), SHAPES)
    found.infer("share_embeddings", same(tables.values()), "comparing the tables")
    projection = keys.tensors.get("generator.weight")
    found.infer("tie_projection", same([tables["target"], projection]), "comparing the tables")


def _tell(found: PartialCheckpoint, options: Mapping[str, Any]) -> None:
    found.know("norm_first", True, "the layout")
    found.know("final_norm", True, "the layout")
    found.know("norm", "rms" if options.get("layer_norm") == "rms" else "layer", OPTIONS)
    found.know("layer_norm_epsilon", options.get("norm_eps", 1e-6), OPTIONS)
    found.know("heads", options.get("heads", 8), OPTIONS)
    activation = options.get("pos_ffn_activation_fn", "relu")
    if activation not in ACTIVATIONS:
        found.problems.append(
            f"pos_ffn_activation_fn {quote(activation)} is not known; known are {', '.join(ACTIVATIONS)}"
        )
    found.know("activation", ACTIVATIONS.get(activation, "relu"), OPTIONS)
    found.infer("gated_feed_forward", "encoder.transformer.0.feed_forward.w_3.weight" in found.keys, "its names")
    # Their embeddings are scaled where positions are added, and nowhere else.
    positioned = bool(options.get("position_encoding", False))
    found.know("scale_embeddings", positioned, OPTIONS)
    if not positioned:
        found.know("positions", "none", OPTIONS)
        found.know("max_length", DEFAULT_LENGTH, "the default: without positions there is no end")


def tell_vocabularies(found: PartialCheckpoint, vocabulary: Any, special: Mapping[str, str]) -> None:
    """The special ids, and the tokens as a tokenizer of words: texts come split into the model's own pieces.

    Args:
        found: gets to know them.
        vocabulary: what lies under "src" and "tgt".
        special: the tokens of "pad", "bos", "eos" and "unk".
    """
    found.know("source_ends_with_eos", False, "the layout")
    sides = _tokens(vocabulary)
    if sides is None:
        for name in ("pad", "bos", "eos"):
            found.ask(name, "the file has no vocabularies in a form that is known")
        return
    for name, token in special.items():
        here, there = (tokens.index(token) if token in tokens else None for tokens in sides.values())
        if there is not None:
            found.know(name, there, VOCABULARY)
        elif name != "unk":
            found.ask(name, f"its vocabulary has no {token}")
        if here != there and not (name == "pad" and here is None):
            found.know(f"source_{name}", here, VOCABULARY)
    sizes = {side: found.value(f"{side}_vocabulary_size") for side in sides}
    found.problems += [
        f"its {side} vocabulary has {len(tokens)} tokens, the embedding {sizes[side]} rows"
        for side, tokens in sides.items()
        if len(tokens) != sizes[side]
    ]
    if twice := [side for side, tokens in sides.items() if len(set(tokens)) < len(tokens)]:
        found.notes.append(f"its vocabulary names a token twice ({', '.join(twice)}): the bundle takes ids, not texts")
    else:
        found.tokenizer = vocabulary_files(
            {side: {"tokens": tokens, "split": "words", "lowercase": False} for side, tokens in sides.items()}
        )


def _tokens(vocabulary: Any) -> dict[str, list[str]] | None:
    """The tokens of each side, if the vocabularies have them as lists of strings."""
    sides = {"source": "src", "target": "tgt"}
    found = {side: vocabulary.get(name) if isinstance(vocabulary, dict) else None for side, name in sides.items()}
    lists = {side: tokens for side, v in found.items() if isinstance(tokens := _field_tokens(v), list)}
    whole = len(lists) == len(sides) and all(isinstance(token, str) for tokens in lists.values() for token in tokens)
    return lists if whole else None


def _field_tokens(field: Any) -> Any:
    """What version 3 has as a list stands in version 2 in the vocabulary of a field's first part."""
    try:
        return field["fields"][0][1]["vocab"]["itos"] if isinstance(field, dict) else field
    except (LookupError, TypeError):
        return None


def _place(found: PartialCheckpoint) -> None:
    keys = found.keys
    bias = None if found.value("norm") == "rms" else "bias"
    stacks = {
        "encoder": ("encoder.transformer", {"self_attention": ("self_attn", "layer_norm")}),
        "decoder": (
            "decoder.transformer_layers",
            {"self_attention": ("self_attn", "layer_norm_1"), "cross_attention": ("context_attn", "layer_norm_2")},
        ),
    }
    inner = {"W_1": "feed_forward.w_1", "W_2": "feed_forward.w_2"}
    if found.value("gated_feed_forward"):
        inner["W_gate"] = "feed_forward.w_3"
    for stack, (layers, attentions) in stacks.items():
        for i in range(found.value(f"{stack}_layers")):
            place_layer(
                keys,
                f"{stack}_layers.{i}",
                f"{layers}.{i}",
                attentions=attentions,
                inner=inner,
                inner_norm="feed_forward.layer_norm",
                bias=bias,
            )
        keys.norm(f"{stack}_norm", f"{stack}.layer_norm", bias=bias)


def place_layer(
    keys: KeyMap,
    ours: str,
    theirs: str,
    *,
    attentions: Mapping[str, tuple[str, str]],
    inner: Mapping[str, str],
    inner_norm: str,
    bias: str | None,
) -> None:
    """Say where the weights of a layer are; the parts of Eole's have other names than OpenNMT-py's.

    Args:
        keys: the map.
        ours: the layer in the reference model.
        theirs: in the file.
        attentions: by the name of ours, theirs and its norm.
        inner: by the linear layers of our feed-forward, theirs.
        inner_norm: the feed-forward's norm.
        bias: what norms call theirs; None where they have none.
    """
    parts = {"q": "linear_query", "k": "linear_keys", "v": "linear_values", "o": "final_linear"}
    for name, (attention, norm) in attentions.items():
        for part, linear in parts.items():
            keys.linear(f"{ours}.{name}.W_{part}", f"{theirs}.{attention}.{linear}")
        keys.norm(f"{ours}.{name}_residual.norm", f"{theirs}.{norm}", bias=bias)
    for part, linear in inner.items():
        keys.linear(f"{ours}.feed_forward.{part}", f"{theirs}.{linear}")
    keys.norm(f"{ours}.feed_forward_residual.norm", f"{theirs}.{inner_norm}", bias=bias)
