"""Folders of Eole, OpenNMT-py's successor: config.json, vocab.json and model.00.safetensors.

Pre-norm with final norms; the table of positions, where there is one, is in the file. Only options that were set are
in config.json: the others have Eole's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tfm_export.checkpoints.bart import STACKS
from tfm_export.checkpoints.files import Contents, read_json
from tfm_export.checkpoints.key_map import KeyMap
from tfm_export.checkpoints.opennmt import BLANK, END, START, UNKNOWN, place_layer, tell_vocabularies
from tfm_export.checkpoints.partial import PartialCheckpoint, same
from tfm_export.checkpoints.position_tables import DEFAULT_LENGTH, place_tables
from tfm_export.checkpoints.wrapping import Weights
from tfm_export.quotation import quote

FORMAT = "an Eole Transformer"
QUERY = "transformer_layers.0.self_attn.linear_query.weight"
SIGNATURE = f"encoder.{QUERY}"
VOCABULARY = "vocab.json"
SHAPES, OPTIONS = "the shapes", "config.json"
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu-tanh": "gelu_tanh", "silu": "silu"}
NORMS = {"standard": "layer", "standardFP32": "layer", "rms": "rms"}
SINUSOIDS = ("SinusoidalInterleaved", "SinusoidalConcat")
# What would make it another model, each with the values at which it does not.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "parallel_residual": (False,),
    "shared_layer_norm": (False,),
    "ffn_layernorm": (False,),
    "query_norm": (False,),
    "key_norm": (False,),
    "value_norm": (False,),
    "q_gating": (False,),
    "num_experts": (0,),
    "sliding_window": (0,),
    "relative_positions_buckets": (0,),
    "attn_scaling": (),
    "layer_types": (),
    "encoder_layer_style": ("standard",),
    "final_encoder_layer_norm": (True,),
}
UNSUPPORTED_EMBEDDINGS: dict[str, tuple[Any, ...]] = {
    "embedding_type": ("standard",),
    "normalize": (False,),
    "position_shift": (0,),
    "position_encoding_type": (*SINUSOIDS, "Learned"),
}


def read(contents: Contents, weights: Weights, settings: Mapping[str, Any]) -> PartialCheckpoint | None:
    """What such a folder tells; None if it is something else."""
    model = contents.config.get("model")
    if SIGNATURE not in weights.tensors or not isinstance(model, dict):
        return None
    found = PartialCheckpoint(contents.path, FORMAT, KeyMap(weights.tensors), settings)
    stacks = {stack: {**model, **_dictionary(model.get(stack))} for stack in ("encoder", "decoder")}
    embeddings = _dictionary(model.get("embeddings"))
    problems = [*_unsupported(embeddings, UNSUPPORTED_EMBEDDINGS)]
    for options in stacks.values():
        problems += [problem for problem in _unsupported(options, UNSUPPORTED) if problem not in problems]
    found.problems += problems
    _sizes(found)
    _tell(found, stacks, embeddings)
    _vocabulary(found, contents)
    kind = embeddings.get("position_encoding_type", SINUSOIDS[0])
    table = "pe.weight" if kind == "Learned" else "pe.pe"
    place_tables(
        found,
        embeddings={"source": "src_emb.embeddings.weight", "target": "tgt_emb.embeddings.weight"},
        projection="generator.weight",
        bias="generator.bias",
        positions=None if kind is None else {"source": f"src_emb.{table}", "target": f"tgt_emb.{table}"},
    )
    for stack in stacks:
        _place(found, stack)
    return found


def _dictionary(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _unsupported(options: Mapping[str, Any], plain: Mapping[str, tuple[Any, ...]]) -> list[str]:
    return [
        f"{name} is {quote(options[name])}, which is not supported"
        for name, values in plain.items()
        if options.get(name) is not None and options[name] not in values
    ]


def _sizes(found: PartialCheckpoint) -> None:
    keys = found.keys
    found.infer("d_model", keys.size(SIGNATURE, 1), SHAPES)
    expand = "transformer_layers.0.mlp.gate_up_proj.weight"
    found.infer_each("d_ff", [keys.size(f"{stack}.{expand}", 0) for stack in STACKS], SHAPES)
    for stack in STACKS:
        pattern = f"{stack}.transformer_layers.{{}}.self_attn.linear_query.weight"
        found.infer(f"{stack}_layers", found.count_layers(pattern), SHAPES)
    tables = {side: keys.tensors.get(f"{short}_emb.embeddings.weight") for side, short in SIDES.items()}
    if tables["target"] is None:  # Eole leaves out what is shared
        tables["target"] = tables["source"]
        if tables["source"] is not None:
            keys.tensors["tgt_emb.embeddings.weight"] = tables["source"]
    for side, short in SIDES.items():
        found.infer(f"{side}_vocabulary_size", keys.size(f"{short}_emb.embeddings.weight", 0), SHAPES)
    found.infer("share_embeddings", same(tables.values()), "comparing the tables")
    projection = keys.tensors.get("generator.weight")
    found.infer("tie_projection", projection is None or same([tables["target"], projection]), "comparing the tables")


SIDES = {"source": "src", "target": "tgt"}


def _tell(found: PartialCheckpoint, stacks: Mapping[str, Mapping[str, Any]], embeddings: Mapping[str, Any]) -> None:
    found.know("norm_first", True, "the layout")
    found.know("final_norm", True, "the layout")
    options = stacks["encoder"]
    both = {
        "norm_eps": 1e-5,
        "layer_norm": "standard",
        "mlp_activation_fn": "relu",
    }
    for name, default in both.items():
        first, second = (stack.get(name, default) for stack in stacks.values())
        if first != second:
            found.problems.append(f"{name} is {quote(first)} in the encoder and {quote(second)} in the decoder")
    heads = [values.get("heads", 8) for values in stacks.values()]
    found.know_heads(heads, OPTIONS)
    for stack, values in stacks.items():
        if values.get("heads_kv") not in [None, values.get("heads", 8)]:
            found.problems.append(f"heads_kv is {quote(values['heads_kv'])} in the {stack}, which is not supported")
    widths = [found.keys.size(f"{stack}.{QUERY}", 0) for stack in STACKS]
    if any(width != found.value("d_model") for width in widths) and all(
        isinstance(count, int) and count > 0 and width % count == 0 for width, count in zip(widths, heads, strict=True)
    ):
        sizes = [width // count for width, count in zip(widths, heads, strict=True)]
        found.infer_each("d_head", sizes, SHAPES)
    found.know("layer_norm_epsilon", options.get("norm_eps", 1e-5), OPTIONS)
    for name, known in (("layer_norm", NORMS), ("mlp_activation_fn", ACTIVATIONS)):
        value = str(options.get(name, both[name])).removeprefix("gated-")
        if value not in known:
            found.problems.append(f"{name} {quote(value)} is not known; known are {', '.join(known)}")
        found.know(
            {"layer_norm": "norm"}.get(name, "activation"),
            known.get(value, "layer" if known is NORMS else "relu"),
            OPTIONS,
        )
    found.infer("gated_feed_forward", "encoder.transformer_layers.0.mlp.up_proj.weight" in found.keys, "its names")
    kind = embeddings.get("position_encoding_type", SINUSOIDS[0])
    found.know("scale_embeddings", kind in SINUSOIDS, OPTIONS)  # they scale where they add sinusoids
    if kind is None:
        found.know("positions", "none", OPTIONS)
        found.know("max_length", DEFAULT_LENGTH, "the default: without positions there is no end")


def _vocabulary(found: PartialCheckpoint, contents: Contents) -> None:
    vocabulary = read_json(contents.files[VOCABULARY]) if VOCABULARY in contents.files else {}
    special = _dictionary(vocabulary.get("specials"))
    usual = {"pad": BLANK, "bos": START, "eos": END, "unk": UNKNOWN}
    names = {name: str(special.get(f"{name}_token", token)) for name, token in usual.items()}
    names["bos"] = str(vocabulary.get("decoder_start_token") or names["bos"])
    tell_vocabularies(found, vocabulary, names)


def _place(found: PartialCheckpoint, stack: str) -> None:
    keys, bias = found.keys, None if found.value("norm") == "rms" else "bias"
    attentions = {"self_attention": ("self_attn", "input_layernorm")}
    if stack == "decoder":
        attentions["cross_attention"] = ("context_attn", "precontext_layernorm")
    inner = {"W_1": "mlp.gate_up_proj", "W_2": "mlp.down_proj"}
    if found.value("gated_feed_forward"):
        inner["W_gate"] = "mlp.up_proj"
    for i in range(found.value(f"{stack}_layers")):
        theirs = f"{stack}.transformer_layers.{i}"
        place_layer(
            keys,
            f"{stack}_layers.{i}",
            theirs,
            attentions=attentions,
            inner=inner,
            inner_norm="post_attention_layernorm",
            bias=bias,
        )
        _ignore_scalar(found, f"{theirs}.layer_scalar")
    keys.norm(f"{stack}_norm", f"{stack}.layer_norm", bias=bias)


def _ignore_scalar(found: PartialCheckpoint, name: str) -> None:
    """What Eole multiplies a layer's output by, in models of other kinds: 1 here."""
    scalar: Tensor | None = found.keys.tensors.get(name)
    if scalar is None:
        return
    if not bool((scalar == 1).all()):
        found.problems.append(f"{name} is not 1, which is not supported")
    found.keys.ignore([name], "it is 1")
