"""Marian's .npz files: the configuration lies among the weights, as text in "special:model.yml".

The decoder starts from an embedding of zeros, which has no row in the file: it becomes one more target token, after all
others, that no step gives. Sinusoids are tensor2tensor's, the norms' epsilon is 1e-6; both as in Marian's source.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tfm_export.checkpoints.files import Contents
from tfm_export.checkpoints.key_map import KeyMap
from tfm_export.checkpoints.partial import PartialCheckpoint
from tfm_export.checkpoints.position_tables import DEFAULT_LENGTH
from tfm_export.checkpoints.sinusoids import by_half_of_tensor2tensor
from tfm_export.checkpoints.wrapping import Weights
from tfm_export.quotation import quote

FORMAT = "a Marian Transformer"
CONFIG = "special:model.yml"
SIGNATURE = "encoder_l1_self_Wq"
SHAPES, YAML = "the shapes", "its configuration"
ACTIVATIONS = {"relu": "relu", "swish": "silu"}
NEVER = -65504.0  # the start token's logit, the lowest that float16 has: its probability is 0
# Options that must have these values; what Marian does where they are not given is the same.
EXPECTED = {
    "type": "transformer",
    "transformer-decoder-autoreg": "self-attention",
    "transformer-no-projection": "false",
    "transformer-ffn-depth": "2",
}


def read(contents: Contents, weights: Weights, settings: Mapping[str, Any]) -> PartialCheckpoint | None:
    """What such a file tells; None if it is another one."""
    if SIGNATURE not in weights.tensors:
        return None
    found = PartialCheckpoint(contents.path, FORMAT, KeyMap(weights.tensors), settings, dictionary="marian")
    config = _configuration(weights.tensors.get(CONFIG))
    found.keys.ignore([CONFIG], "its configuration")
    found.problems += [
        f"{name} must be {value}, found {config[name]}"
        for name, value in EXPECTED.items()
        if config.get(name, value) != value
    ]
    _sizes(found)
    _tell(found, config)
    _place_tables(found)
    for stack in ("encoder", "decoder"):
        _place_stack(found, stack)
    return found


def _configuration(text: Tensor | None) -> dict[str, str]:
    """The scalars of the text, by name: lines "name: value". Lists, which nothing here needs, are left out."""
    if text is None:
        return {}
    lines = bytes(text.to(torch.uint8).tolist()).decode(errors="replace").rstrip("\0").splitlines()
    pairs = (line.partition(":") for line in lines if line[:1].strip() and not line.startswith(("-", "#")))
    return {name.strip(): value.strip().strip("\"'") for name, colon, value in pairs if colon}


def _sizes(found: PartialCheckpoint) -> None:
    keys = found.keys
    found.infer("d_model", keys.size(SIGNATURE, 0), SHAPES)
    found.infer_each("d_ff", [keys.size(f"{stack}_l1_ffn_W1", 1) for stack in ("encoder", "decoder")], SHAPES)
    for stack in ("encoder", "decoder"):
        count = 0
        while f"{stack}_l{count + 1}_self_Wq" in keys:
            count += 1
        found.infer(f"{stack}_layers", max(count, 1), SHAPES)
    for side, name in _embeddings(found).items():
        extra = 1 if side == "target" or len(set(_embeddings(found).values())) == 1 else 0
        found.infer(f"{side}_vocabulary_size", extra + keys.size(name, 0), SHAPES)
    pre_norm = "encoder_l1_self_Wo_ln_scale_pre" in keys
    found.infer("norm_first", pre_norm, "its names")
    found.infer("final_norm", "decoder_top_ln_scale" in keys, "its names")
    found.infer("embedding_norm", "encoder_emb_ln_scale_pre" in keys, "its names")


def _embeddings(found: PartialCheckpoint) -> dict[str, str]:
    own = {"source": "encoder_Wemb", "target": "decoder_Wemb"}
    return {side: name if name in found.keys else "Wemb" for side, name in own.items()}


def _tell(found: PartialCheckpoint, config: Mapping[str, str]) -> None:
    found.know("layer_norm_epsilon", 1e-6, "Marian's source")
    if "transformer-heads" in config:
        heads = config["transformer-heads"]
        if re.fullmatch("[0-9]{1,6}", heads):
            found.know("heads", int(heads), YAML)
        else:
            found.problems.append(f"transformer-heads must be a whole number, found {quote(heads)}")
    else:
        found.ask("heads", f"the file has no {CONFIG}; d_model is {found.value('d_model')}")
    activation = config.get("transformer-ffn-activation")
    if activation is None:
        found.ask("activation", f"the file has no {CONFIG}")
    elif activation in ACTIVATIONS:
        found.know("activation", ACTIVATIONS[activation], YAML)
    else:
        found.problems.append(
            f"transformer-ffn-activation {activation} is not known; known are {', '.join(ACTIVATIONS)}"
        )
    learned = "Wpos" in found.keys
    found.know("scale_embeddings", not learned, "the layout")
    found.infer("positions", "learned", "the layout; sinusoids are kept as a table too")
    length = found.keys.size("Wpos", 0) if learned else found.settings.get("max_length", DEFAULT_LENGTH)
    found.know("max_length", length, "its table of positions" if learned else "the default: sinusoids have no end")
    start = found.value("target_vocabulary_size") - 1
    found.notes.append(f"token {start} was added: the start of targets, an embedding of zeros, which no step gives")
    for name, value in {"pad": 0, "bos": start, "eos": 0, "unk": 1, "source_ends_with_eos": True}.items():
        found.know(name, value, "Marian's vocabularies")


def _with_start(table: Tensor) -> Tensor:
    """A table [V, M] with a row of zeros behind it."""
    return torch.cat([table, table.new_zeros(1, table.size(1))])


def _place_tables(found: PartialCheckpoint) -> None:
    keys = found.keys
    names = _embeddings(found)
    shared = names["source"] == names["target"]
    output = "decoder_ff_logit_out"
    own = next((f"{output}_{w}" for w in ("Wt", "W") if f"{output}_{w}" in keys), None)
    found.infer("share_embeddings", shared, "its names")
    found.infer("tie_projection", own is None, "its names")
    tied = ["target_embedding.weight", *([] if own else ["projection.weight"])]
    if shared:
        keys.put(["source_embedding.weight", *tied], names["source"], _with_start)
    else:
        keys.put("source_embedding.weight", names["source"])
        keys.put(tied, names["target"], _with_start)
    if own is not None:
        keys.put("projection.weight", own, _with_start if own.endswith("Wt") else lambda w: _with_start(w.t()))
    keys.put("projection.bias", f"{output}_b", lambda b: torch.cat([b.flatten(), b.new_full((1,), NEVER)]))
    if "Wpos" in keys:
        keys.put(["source_positions.table", "target_positions.table"], "Wpos")
    else:
        table = by_half_of_tensor2tensor(found.value("max_length"), found.value("d_model"))
        keys.put_tensor(["source_positions.table", "target_positions.table"], table)


def _place_stack(found: PartialCheckpoint, stack: str) -> None:
    keys, suffix = found.keys, "_pre" if found.value("norm_first") else ""
    attentions = {"self_attention": "self"}
    if stack == "decoder":
        attentions["cross_attention"] = "context"
    for i in range(found.value(f"{stack}_layers")):
        ours, theirs = f"{stack}_layers.{i}", f"{stack}_l{i + 1}"
        for name, attention in attentions.items():
            for part in "qkvo":
                _linear(keys, f"{ours}.{name}.W_{part}", f"{theirs}_{attention}", part)
            _norm(keys, f"{ours}.{name}_residual.norm", f"{theirs}_{attention}_Wo", suffix)
        for part in "12":
            _linear(keys, f"{ours}.feed_forward.W_{part}", f"{theirs}_ffn", part)
        _norm(keys, f"{ours}.feed_forward_residual.norm", f"{theirs}_ffn_ffn", suffix)
    if found.value("final_norm"):
        _norm(keys, f"{stack}_norm", f"{stack}_top", "")
    if found.value("embedding_norm"):
        _norm(keys, f"{'source' if stack == 'encoder' else 'target'}_positions.norm", f"{stack}_emb", "_pre")


def _linear(keys: KeyMap, ours: str, theirs: str, part: str) -> None:
    keys.put(f"{ours}.weight", f"{theirs}_W{part}", Tensor.t)
    keys.bias(f"{ours}.bias", f"{theirs}_b{part}", Tensor.flatten)


def _norm(keys: KeyMap, ours: str, theirs: str, suffix: str) -> None:
    keys.put(f"{ours}.weight", f"{theirs}_ln_scale{suffix}", Tensor.flatten)
    keys.put(f"{ours}.bias", f"{theirs}_ln_bias{suffix}", Tensor.flatten)
