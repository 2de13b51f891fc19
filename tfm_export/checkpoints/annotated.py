"""The annotated Transformer's layout (Rush 2018; Huang et al. 2022), and what has been copied from it.

Pre-norm with final norms, ReLU, scaled embeddings, the paper's sinusoids in a buffer. Its norm divides by the unbiased
deviation plus an epsilon of 1e-6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfm_export.checkpoints.files import Contents
from tfm_export.checkpoints.key_map import KeyMap
from tfm_export.checkpoints.partial import PartialCheckpoint, find_prefix, same, without_prefix
from tfm_export.checkpoints.position_tables import place_tables
from tfm_export.checkpoints.wrapping import Weights

FORMAT = "an annotated Transformer (self_attn.linears.0)"
SIGNATURE = "encoder.layers.0.self_attn.linears.0.weight"
LAYOUT = "the layout"
TOLD = {
    "norm_first": True,
    "final_norm": True,
    "norm": "unbiased",
    "layer_norm_epsilon": 1e-6,
    "activation": "relu",
    "scale_embeddings": True,
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
    for name in ("pad", "bos", "eos", "source_starts_with_bos", "source_ends_with_eos"):
        found.ask(name)
    _place(found)
    return found


def _sizes(found: PartialCheckpoint) -> None:
    keys, shapes = found.keys, "the shapes"
    tables = {"source": "src_embed.0.lut.weight", "target": "tgt_embed.0.lut.weight"}
    for side, name in tables.items():
        if name in keys:
            found.infer(f"{side}_vocabulary_size", keys.size(name, 0), shapes)
    found.infer("d_model", keys.size(SIGNATURE, 1), shapes)
    found.infer("d_ff", keys.size("encoder.layers.0.feed_forward.w_1.weight", 0), shapes)
    for stack in ("encoder", "decoder"):
        layers = found.count_layers(f"{stack}.layers.{{}}.self_attn.linears.0.weight")
        found.infer(f"{stack}_layers", layers, shapes)
    source, target = (keys.tensors.get(name) for name in tables.values())
    projection = keys.tensors.get("generator.proj.weight")
    found.infer("share_embeddings", same([source, target]), "comparing the tables")
    found.infer("tie_projection", same([target, projection]), "comparing the tables")


def _place(found: PartialCheckpoint) -> None:
    keys = found.keys
    place_tables(
        found,
        embeddings={"source": "src_embed.0.lut.weight", "target": "tgt_embed.0.lut.weight"},
        projection="generator.proj.weight",
        bias="generator.proj.bias",
        positions={"source": "src_embed.1.pe", "target": "tgt_embed.1.pe"},
    )
    for stack, attentions in (
        ("encoder", {"self_attention": "self_attn"}),
        ("decoder", {"self_attention": "self_attn", "cross_attention": "src_attn"}),
    ):
        for i in range(found.value(f"{stack}_layers")):
            ours, theirs = f"{stack}_layers.{i}", f"{stack}.layers.{i}"
            for number, (name, attention) in enumerate(attentions.items()):
                for part, linear in zip("qkvo", range(4), strict=True):
                    keys.linear(f"{ours}.{name}.W_{part}", f"{theirs}.{attention}.linears.{linear}")
                _norm(keys, f"{ours}.{name}_residual.norm", f"{theirs}.sublayer.{number}.norm")
            for part in "12":
                keys.linear(f"{ours}.feed_forward.W_{part}", f"{theirs}.feed_forward.w_{part}")
            _norm(keys, f"{ours}.feed_forward_residual.norm", f"{theirs}.sublayer.{len(attentions)}.norm")
        _norm(keys, f"{stack}_norm", f"{stack}.norm")


def _norm(keys: KeyMap, ours: str, theirs: str) -> None:
    keys.norm(ours, theirs, weight="a_2", bias="b_2")
