"""Checkpoints of fairseq's `transformer*` models: its arguments lie beside the weights.

Its sinusoids are tensor2tensor's, the decoder starts from the end token, and position 0 is the row after the padding
id, which is 1 in all dictionaries that fairseq makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfm_export.checkpoints.bart import STACKS, find_tables, place_stack
from tfm_export.checkpoints.files import Contents
from tfm_export.checkpoints.key_map import KeyMap, rows
from tfm_export.checkpoints.partial import PartialCheckpoint, find_prefix, without_prefix
from tfm_export.checkpoints.position_tables import place_tables
from tfm_export.checkpoints.sinusoids import by_half_of_tensor2tensor
from tfm_export.checkpoints.wrapping import Weights
from tfm_export.quotation import quote

FORMAT = "a fairseq Transformer"
SIGNATURE = "encoder.layers.0.self_attn.q_proj.weight"
SHAPES, ARGUMENTS, DICTIONARIES = "the shapes", "its arguments", "fairseq's dictionaries"
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_accurate": "gelu_tanh", "gelu_fast": "gelu_tanh", "swish": "silu"}
PAD = 1
LONGEST = 1024  # fairseq's default
MARKS = ("encoder.version", "encoder.embed_positions._float_tensor", "decoder.embed_positions._float_tensor")
# Of fairseq 0.12, for PyTorch's fast path: what lies in a file may be older than the weights themselves.
COPIES = tuple(
    f"encoder.layers.*.{part}_{kind}" for part in ("in_proj", "out_proj", "fc1", "fc2") for kind in ("weight", "bias")
)
# Tasks whose sources or targets hold tokens that name languages, which no text here would get.
LANGUAGES = ("multilingual_translation", "multilingual_translation_latent_depth", "translation_from_pretrained_bart")
LANGUAGE_OPTIONS = ("encoder_langtok", "decoder_langtok", "add_lang_token", "prepend_bos_and_append_tgt_lang_id")
PROJECTIONS = ("project_in_dim", "project_out_dim")
# What would make it another model, each with the value at which it does not.
UNSUPPORTED = {
    "no_token_positional_embeddings": False,
    "adaptive_softmax_cutoff": None,
    "adaptive_input": False,
    "character_embeddings": False,
    "cross_self_attention": False,
    "no_cross_attention": False,
    "layer_wise_attention": False,
    "no_decoder_final_norm": False,
    "use_rope": False,
}


def read(contents: Contents, weights: Weights, settings: Mapping[str, Any]) -> PartialCheckpoint | None:
    """What such a file tells; None if it is another one."""
    prefix = find_prefix(weights.tensors, SIGNATURE)
    arguments = _arguments(contents.state)
    if prefix is None or not (arguments or any(f"{prefix}{mark}" in weights.tensors for mark in MARKS)):
        return None
    tensors, notes = without_prefix(weights.tensors, prefix)
    found = PartialCheckpoint(contents.path, FORMAT, KeyMap(tensors), settings, notes=notes, dictionary="fairseq")
    found.problems += [
        f"{name} is {quote(arguments[name])}, which is not supported"
        for name, plain in UNSUPPORTED.items()
        if arguments.get(name, plain) not in (plain, None, "")
    ]
    _refuse_languages(found, contents.state)
    if others := [name for name in PROJECTIONS if f"decoder.{name}.weight" in tensors]:
        found.problems.append(
            f"decoder_input_dim or decoder_output_dim is not decoder_embed_dim ({', '.join(others)}), "
            "which is not supported"
        )
    _sizes(found)
    _tell(found, arguments)
    own = {side: f"{stack}.embed_tokens.weight" for side, stack in (("source", "encoder"), ("target", "decoder"))}
    projection = "decoder.embed_out" if "decoder.embed_out" in tensors else "decoder.output_projection.weight"
    embeddings, projection = find_tables(found, own, own["source"], projection)
    place_tables(
        found, embeddings=embeddings, projection=projection, bias="decoder.output_projection.bias", positions=None
    )
    _place_positions(found, arguments)
    for stack in ("encoder", "decoder"):
        place_stack(found, stack)
    found.keys.ignore([*MARKS, "decoder.version"], "marks of a format")
    found.keys.ignore_matching(COPIES, "copies that fairseq makes anew when it loads a file")
    return found


def _arguments(state: Any) -> dict[str, Any]:
    """The model's arguments: of fairseq before 0.10 in "args", since then in "cfg"."""
    if not isinstance(state, dict):
        return {}
    config = state.get("cfg")
    for values in (config.get("model") if isinstance(config, dict) else None, state.get("args")):
        if isinstance(values, dict):
            return values
    return {}


def _refuse_languages(found: PartialCheckpoint, state: Any) -> None:
    """Note what the task does with languages: since fairseq 0.10 it lies in "cfg", before among the arguments."""
    config = state.get("cfg") if isinstance(state, dict) else None
    task = config.get("task") if isinstance(config, dict) else None
    values = task if isinstance(task, dict) else _arguments(state)
    name = values.get("_name", values.get("task"))
    told = [f"{option} {values[option]!r}" for option in LANGUAGE_OPTIONS if values.get(option)]
    if name in LANGUAGES or told:
        found.problems.append(
            f"its task is {name}{''.join(f', {part}' for part in told)}: tokens for languages stand in sources or "
            "targets, which is not supported in fairseq's files"
        )
        found.hint = (
            "convert it to a folder of transformers (M2M-100 and mBART have conversions there), whose language tokens "
            "are supported"
        )


def _sizes(found: PartialCheckpoint) -> None:
    keys = found.keys
    widths = {"d_model": ("self_attn.q_proj", 1), "d_ff": ("fc1", 0)}
    for size, (name, axis) in widths.items():
        found.infer_each(size, [keys.size(f"{stack}.layers.0.{name}.weight", axis) for stack in STACKS], SHAPES)
    for stack in STACKS:
        found.infer(f"{stack}_layers", found.count_layers(f"{stack}.layers.{{}}.self_attn.q_proj.weight"), SHAPES)
    pre_norm = "encoder.layer_norm.weight" in keys or "decoder.layer_norm.weight" in keys
    found.infer("norm_first", pre_norm, "its names")
    found.infer("final_norm", pre_norm, "its names")
    found.infer("embedding_norm", "encoder.layernorm_embedding.weight" in keys, "its names")


def _tell(found: PartialCheckpoint, arguments: Mapping[str, Any]) -> None:
    found.know("layer_norm_epsilon", 1e-5, "PyTorch's default")
    if not arguments:
        found.ask("heads", f"the file has no arguments; d_model is {found.value('d_model')}")
        found.ask("activation", "fairseq's default is relu")
        found.ask("scale_embeddings", "fairseq's default is true")
    else:
        found.know_heads([arguments.get(f"{stack}_attention_heads", 8) for stack in STACKS], ARGUMENTS)
        activation = str(arguments.get("activation_fn", "relu"))
        if activation not in ACTIVATIONS:
            found.problems.append(f"activation_fn {quote(activation)} is not known; known are {', '.join(ACTIVATIONS)}")
        found.know("activation", ACTIVATIONS.get(activation, "relu"), ARGUMENTS)
        found.know("scale_embeddings", not arguments.get("no_scale_embedding", False), ARGUMENTS)
    for name, value in {"pad": PAD, "bos": 2, "eos": 2, "unk": 3, "source_ends_with_eos": True}.items():
        found.know(name, value, DICTIONARIES)
    # As fairseq's generator does by default: a target is never empty, nor padding.
    found.options |= {"suppress_sequences": [[PAD]], "min_decoding_length": 1}


def _place_positions(found: PartialCheckpoint, arguments: Mapping[str, Any]) -> None:
    keys, lengths = found.keys, {}
    first = PAD + 1
    found.infer("positions", "learned", "the layout; sinusoids are kept as a table too")
    for side, stack in (("source", "encoder"), ("target", "decoder")):
        name, target = f"{stack}.embed_positions.weight", f"{side}_positions.table"
        if name in keys or arguments.get(f"{stack}_learned_pos"):
            keys.put(target, name, rows(first, None))
            lengths[side] = max(1, keys.size(name, 0) - first)
            continue
        asked = found.settings.get("max_length" if side == "source" else "longest_target")
        lengths[side] = asked or int(arguments.get(f"max_{side}_positions") or LONGEST)
        width = found.value("d_model")
        if side == "target":
            width = found.value("decoder_d_model", width)
        keys.put_tensor(target, by_half_of_tensor2tensor(first + lengths[side], width)[first:])
        keys.ignore([f"{stack}.embed_positions.weights"], "computed anew: sinusoids")
    found.know("max_length", lengths["source"], ARGUMENTS)
    found.know("longest_target", lengths["target"], ARGUMENTS)
