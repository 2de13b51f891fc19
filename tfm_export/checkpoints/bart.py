"""BART and its kin in Hugging Face transformers: mBART, PLBart, MarianMT, M2M-100 and NLLB, Pegasus, Blenderbot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tfm_export.checkpoints.files import Contents
from tfm_export.checkpoints.key_map import KeyMap, rows
from tfm_export.checkpoints.partial import PartialCheckpoint, find_prefix, same, without_prefix
from tfm_export.checkpoints.position_tables import place_tables
from tfm_export.checkpoints.sinusoids import by_half, by_half_of_tensor2tensor
from tfm_export.checkpoints.wrapping import Weights
from tfm_export.quotation import quote

SIGNATURE = "encoder.layers.0.self_attn.q_proj.weight"
STACKS = ("encoder", "decoder")
SHAPES, CONFIG = "the shapes", "config.json"
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """What sets a family apart.

    Attributes:
        norm_first: pre-norm, with a norm at the end of each stack.
        embedding_norm: embeddings are normalised.
        positions: "table", "halves" (computed if not in the file) or "tensor2tensor" (always computed).
        first_row: the table's row of position 0; None is the one after the padding id.
        activation: of the feed-forward, where config.json does not say.
        scale_embedding: multiply embeddings by sqrt(d_model), where config.json does not say.
    """

    norm_first: bool
    embedding_norm: bool
    positions: str
    first_row: int | None = 0
    activation: str = "gelu"
    scale_embedding: bool = False


FAMILIES = {
    "bart": Family(norm_first=False, embedding_norm=True, positions="table", first_row=2),
    "plbart": Family(norm_first=False, embedding_norm=True, positions="table", first_row=2, scale_embedding=True),
    "mbart": Family(norm_first=True, embedding_norm=True, positions="table", first_row=2),
    "marian": Family(norm_first=False, embedding_norm=False, positions="halves"),
    "pegasus": Family(norm_first=True, embedding_norm=False, positions="halves"),
    "blenderbot": Family(norm_first=True, embedding_norm=False, positions="table"),
    "m2m_100": Family(
        norm_first=True,
        embedding_norm=False,
        positions="tensor2tensor",
        first_row=None,
        activation="relu",
        scale_embedding=True,
    ),
}


def read(contents: Contents, weights: Weights, settings: Mapping[str, Any]) -> PartialCheckpoint:
    """What such a folder tells."""
    family = FAMILIES[contents.config["model_type"]]
    tensors, notes = without_prefix(weights.tensors, find_prefix(weights.tensors, SIGNATURE) or "")
    name = f"a Hugging Face model of type {contents.config['model_type']}"
    found = PartialCheckpoint(contents.path, name, KeyMap(tensors), settings, notes=notes)
    if SIGNATURE not in tensors:
        found.problems.append(f"missing: {SIGNATURE}, by which this layout is told")
        return found
    _tell(found, contents.config, family)
    embeddings, projection = _tables(found, contents.config)
    names = {side: f"{stack}.embed_positions.weight" for side, stack in (("source", "encoder"), ("target", "decoder"))}
    place_tables(found, embeddings=embeddings, projection=projection, bias="final_logits_bias", positions=None)
    _place_positions(found, contents.config, family, names)
    for stack in ("encoder", "decoder"):
        place_stack(found, stack)
    found.keys.ignore(["encoder.version", "decoder.version"], "numbers of a format")
    return found


def _tell(found: PartialCheckpoint, config: Mapping[str, Any], family: Family) -> None:
    keys = found.keys
    found.infer("d_model", keys.size(SIGNATURE, 1), SHAPES)
    found.infer_each("d_ff", [keys.size(f"{stack}.layers.0.fc1.weight", 0) for stack in STACKS], SHAPES)
    for stack in STACKS:
        found.infer(f"{stack}_layers", found.count_layers(f"{stack}.layers.{{}}.self_attn.q_proj.weight"), SHAPES)
    layout = "the family"
    found.know("norm_first", family.norm_first, layout)
    found.know("final_norm", family.norm_first, layout)
    found.know("embedding_norm", family.embedding_norm, layout)
    found.know("layer_norm_epsilon", 1e-5, layout)
    found.know("scale_embeddings", config.get("scale_embedding", family.scale_embedding), CONFIG)
    know_activation(found, config.get("activation_function", family.activation))
    found.know_heads([config.get(f"{stack}_attention_heads") for stack in STACKS], CONFIG)


def know_activation(found: PartialCheckpoint, theirs: str) -> None:
    """Note the activation by our name; one that has none is a problem."""
    if theirs in ACTIVATIONS:
        found.know("activation", ACTIVATIONS[theirs], CONFIG)
    else:
        found.problems.append(f"activation {quote(theirs)} is not known; known are {', '.join(ACTIVATIONS)}")


def _tables(found: PartialCheckpoint, config: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """The names of the embeddings and the projection, and which of them are one."""
    own = {"source": "encoder.embed_tokens.weight", "target": "decoder.embed_tokens.weight"}
    return find_tables(
        found, own, "shared.weight", "lm_head.weight", untied=untied(config), ties=ties_projection(config)
    )


def ties_projection(config: Mapping[str, Any]) -> bool:
    """Whether config.json lets the projection be the target's embedding."""
    return bool(config.get("tie_word_embeddings", True))


def untied(config: Mapping[str, Any]) -> bool:
    """Whether config.json says that no tables are tied; MarianMT has another name for those of embeddings."""
    return not config.get("tie_word_embeddings", True) or not config.get("share_encoder_decoder_embeddings", True)


def find_tables(
    found: PartialCheckpoint,
    own: Mapping[str, str],
    shared: str,
    projection: str,
    *,
    untied: bool = False,
    ties: bool | None = None,
) -> tuple[dict[str, str], str]:
    """Find embeddings and projection where files may leave out all but one of those that are tied.

    Args:
        found: gets to know the vocabularies' sizes, share_embeddings and tie_projection.
        own: the name of each side's own table.
        shared: the name of the table of both sides.
        projection: the name of the projection's weight.
        untied: whether each side has its own table: transformers keeps one for both beside them, of no use then.
        ties: whether the projection is the target's embedding, by the file's configuration; None if it does not say.

    Returns:
        The name of each side's table, and of the projection's weight, which is the target's where they are tied.
    """
    keys = found.keys
    names = {side: name if name in keys else shared for side, name in own.items()}
    tables = {side: keys.tensors.get(name) for side, name in names.items()}
    for side in tables:
        found.infer(f"{side}_vocabulary_size", keys.size(names[side], 0), SHAPES)
    if shared not in names.values():
        if any(same([keys.tensors.get(shared), table]) for table in tables.values()):
            keys.ignore([shared], "the same as an embedding")
        elif untied:
            keys.ignore([shared], f"{CONFIG} says that each side has its own embedding")
    one = names["source"] == names["target"] or same(tables.values())
    found.infer("share_embeddings", one, "comparing the tables")
    return names, _find_projection(found, names["target"], shared, projection, untied=untied, ties=ties)


def _find_projection(
    found: PartialCheckpoint, target: str, shared: str, projection: str, *, untied: bool, ties: bool | None
) -> str:
    """The name of the projection's weight; `find_tables` has the arguments.

    A file may have tables that differ although its configuration ties them: transformers 5 takes them as they are, and
    transformers 4 took the embedding for the projection.
    """
    keys = found.keys
    embedding, own = keys.tensors.get(target), keys.tensors.get(projection)
    if own is None and ties and not untied and shared in keys and not same([embedding, keys.tensors[shared]]):
        projection, own = shared, keys.tensors[shared]
    tied = (own is None and ties is not False) or same([embedding, own])
    if tied or not ties or own is None:
        found.infer("tie_projection", tied, "comparing the tables")
    elif found.know("tie_projection", False, "comparing the tables"):
        keys.ignore([projection], "tie_projection is given")
    else:
        found.notes.append(
            f"{projection} differs from {target}, although {CONFIG} ties them: it is taken for the projection, as "
            'transformers 5 does; if the model was used with transformers 4, say "tie_projection": true'
        )
    return projection


def _place_positions(
    found: PartialCheckpoint, config: Mapping[str, Any], family: Family, names: Mapping[str, str]
) -> None:
    keys = found.keys
    found.infer("positions", "learned", "the family; sinusoids are kept as a table too")
    lengths: dict[str, int] = {}
    for side, name in names.items():
        target = f"{side}_positions.table"
        if family.positions != "tensor2tensor" and (family.positions == "table" or name in keys):
            first = family.first_row or 0
            keys.put(target, name, rows(first, None))
            lengths[side] = max(1, keys.size(name, 0) - first)
            continue
        length = config.get("max_position_embeddings")
        if not isinstance(length, int) or length < 1:
            found.ask("max_length", f"{CONFIG} has no max_position_embeddings")
            return
        lengths[side] = length
        keys.put_tensor(target, _computed(found, config, family, length))
    if family.first_row:
        found.notes.append(f"the first {family.first_row} rows of the position tables are never used, and left out")
    if family.positions == "tensor2tensor":
        keys.ignore(
            [f"{stack}.embed_positions.weights" for stack in ("encoder", "decoder")], "computed anew: sinusoids"
        )
    found.infer("max_length", lengths["source"], "its table of positions")
    if lengths["target"] != lengths["source"]:
        found.infer("longest_target", lengths["target"], "its table of positions")


def _computed(found: PartialCheckpoint, config: Mapping[str, Any], family: Family, length: int) -> Tensor:
    width = found.value("d_model")
    if family.positions == "halves":
        return by_half(length, width)
    first = config.get("pad_token_id", 1) + 1
    return by_half_of_tensor2tensor(first + length, width)[first:]


def place_stack(found: PartialCheckpoint, stack: str) -> None:
    """Put the layers and norms of a stack in their places; it must know norm_first and embedding_norm."""
    keys = found.keys
    attentions = {"self_attention": "self_attn"}
    if stack == "decoder":
        attentions["cross_attention"] = "encoder_attn"
    for i in range(found.value(f"{stack}_layers")):
        ours, theirs = f"{stack}_layers.{i}", f"{stack}.layers.{i}"
        for name, attention in attentions.items():
            for part, projection in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("o", "out_proj")):
                keys.linear(f"{ours}.{name}.W_{part}", f"{theirs}.{attention}.{projection}")
            keys.norm(f"{ours}.{name}_residual.norm", f"{theirs}.{attention}_layer_norm")
        for part in "12":
            keys.linear(f"{ours}.feed_forward.W_{part}", f"{theirs}.fc{part}")
        keys.norm(f"{ours}.feed_forward_residual.norm", f"{theirs}.final_layer_norm")
    if found.value("norm_first"):
        keys.norm(f"{stack}_norm", f"{stack}.layer_norm")
    if found.value("embedding_norm"):
        side = "source" if stack == "encoder" else "target"
        keys.norm(f"{side}_positions.norm", f"{stack}.layernorm_embedding")
