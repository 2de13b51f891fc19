"""The tutorial Transformer: Ben Trevett's "pytorch-seq2seq", and the many projects that grew from it.

Post-norm with PyTorch's layer norms, ReLU, scaled embeddings, a table of learned positions for each side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfm_export.checkpoints.files import Contents
from tfm_export.checkpoints.key_map import KeyMap
from tfm_export.checkpoints.partial import PartialCheckpoint, find_prefix, without_prefix
from tfm_export.checkpoints.wrapping import Weights

FORMAT = "a tutorial Transformer (fc_q, fc_k, fc_v, fc_o)"
SIGNATURE = "encoder.layers.0.self_attention.fc_q.weight"
LAYOUT = "the layout"
TOLD = {
    "norm_first": False,
    "final_norm": False,
    "activation": "relu",
    "positions": "learned",
    "scale_embeddings": True,
    "layer_norm_epsilon": 1e-5,
    "source_starts_with_bos": True,
    "source_ends_with_eos": True,
}


def read(contents: Contents, weights: Weights, settings: Mapping[str, Any]) -> PartialCheckpoint | None:
    """What such a file tells; None if it is another one."""
    prefix = find_prefix(weights.tensors, SIGNATURE)
    if prefix is None:
        return None
    tensors, notes = without_prefix(weights.tensors, prefix)
    found = PartialCheckpoint(contents.path, FORMAT, KeyMap(tensors), settings, notes=notes)
    for name, value in TOLD.items():
        found.know(name, value, LAYOUT)
    _sizes(found)
    found.ask("heads", f"d_model is {found.value('d_model')}")
    for name in ("pad", "bos", "eos"):
        found.ask(name)
    _place(found)
    return found


def _sizes(found: PartialCheckpoint) -> None:
    keys, shapes = found.keys, "the shapes"
    tables = {"source": "encoder.tok_embedding.weight", "target": "decoder.tok_embedding.weight"}
    for side, name in tables.items():
        if name in keys:
            found.infer(f"{side}_vocabulary_size", keys.size(name, 0), shapes)
    positions = {"max_length": "encoder.pos_embedding.weight", "longest_target": "decoder.pos_embedding.weight"}
    for setting, name in positions.items():
        if name in keys:
            found.infer(setting, keys.size(name, 0), shapes)
    found.infer("d_model", keys.size(SIGNATURE, 1), shapes)
    found.infer("d_ff", keys.size("encoder.layers.0.positionwise_feedforward.fc_1.weight", 0), shapes)
    for stack in ("encoder", "decoder"):
        layers = found.count_layers(f"{stack}.layers.{{}}.self_attention.fc_q.weight")
        found.infer(f"{stack}_layers", layers, shapes)


def _place(found: PartialCheckpoint) -> None:
    keys = found.keys
    for side, stack in (("source", "encoder"), ("target", "decoder")):
        keys.put(f"{side}_embedding.weight", f"{stack}.tok_embedding.weight")
        keys.put(f"{side}_positions.table", f"{stack}.pos_embedding.weight")
        for i in range(found.value(f"{stack}_layers")):
            ours, theirs = f"{stack}_layers.{i}", f"{stack}.layers.{i}"
            attentions = {"self_attention": ("self_attention", "self_attn_layer_norm")}
            if stack == "decoder":
                attentions["cross_attention"] = ("encoder_attention", "enc_attn_layer_norm")
            for name, (attention, norm) in attentions.items():
                for part in "qkvo":
                    keys.linear(f"{ours}.{name}.W_{part}", f"{theirs}.{attention}.fc_{part}")
                keys.norm(f"{ours}.{name}_residual.norm", f"{theirs}.{norm}")
            for part in "12":
                keys.linear(f"{ours}.feed_forward.W_{part}", f"{theirs}.positionwise_feedforward.fc_{part}")
            keys.norm(f"{ours}.feed_forward_residual.norm", f"{theirs}.ff_layer_norm")
    keys.linear("projection", "decoder.fc_out")
