"""State dicts of models built on torch.nn.Transformer, or on its TransformerEncoder and TransformerDecoder.

Names and shapes tell the stacks. Embeddings, projection and positions are the user's own modules, under any names: what
their names and shapes make plain is taken, everything else is asked for as "keys".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tfm_export.checkpoints.files import Contents
from tfm_export.checkpoints.key_map import KeyMap, third
from tfm_export.checkpoints.partial import PartialCheckpoint, same
from tfm_export.checkpoints.position_tables import as_table, place_tables
from tfm_export.checkpoints.wrapping import Weights

FORMAT = "a model on torch.nn.Transformer"
DECODER = re.compile(r"(.*?)layers\.0\.multihead_attn\.in_proj_weight")
ENCODER = re.compile(r"(.*?)layers\.0\.self_attn\.in_proj_weight")
SHAPES, NAMES = "the shapes", "its names and shapes"

ROLES = ("source_embedding", "target_embedding", "projection", "source_positions", "target_positions")
# What the names of embeddings and tables of positions say, tried on the parts of a name.
POSITION = re.compile(r"(^|[._])(pos|pe|position)", re.IGNORECASE)
SOURCE = re.compile(r"(^|[._])(src|source|enc|encoder|input|in)([._]|emb|tok|word|$)", re.IGNORECASE)
TARGET = re.compile(r"(^|[._])(tgt|trg|target|dec|decoder|output)([._]|emb|tok|word|$)", re.IGNORECASE)


def read(contents: Contents, weights: Weights, settings: Mapping[str, Any]) -> PartialCheckpoint | None:
    """What such a file tells; None if it is another one."""
    tensors = weights.tensors
    decoders = [m[1] for name in tensors if (m := DECODER.fullmatch(name))]
    encoders = [m[1] for name in tensors if (m := ENCODER.fullmatch(name)) and m[1] not in decoders]
    if not decoders or not encoders:
        return None
    found = PartialCheckpoint(contents.path, FORMAT, KeyMap(tensors), settings)
    if len(decoders) > 1 or len(encoders) > 1:
        found.problems.append(f"expected one encoder and one decoder, found {', '.join(encoders + decoders)}")
    stacks = {"encoder": encoders[0], "decoder": decoders[0]}
    _sizes(found, stacks)
    _ask(found)
    for stack, prefix in stacks.items():
        _place_stack(found, stack, prefix)
    _place_rest(found)
    return found


def _sizes(found: PartialCheckpoint, stacks: Mapping[str, str]) -> None:
    keys = found.keys
    found.infer("d_model", keys.size(f"{stacks['decoder']}layers.0.multihead_attn.in_proj_weight", 1), SHAPES)
    found.infer_each("d_ff", [keys.size(f"{prefix}layers.0.linear1.weight", 0) for prefix in stacks.values()], SHAPES)
    for stack, prefix in stacks.items():
        layers = found.count_layers(f"{prefix}layers.{{}}.self_attn.in_proj_weight")
        found.infer(f"{stack}_layers", layers, SHAPES)
    norms = [f"{prefix}norm.weight" in keys for prefix in stacks.values()]
    found.infer("final_norm", any(norms), NAMES)  # one of two is a weight that is missing


def _ask(found: PartialCheckpoint) -> None:
    found.know("layer_norm_epsilon", 1e-5, "PyTorch's default")
    found.ask("heads", f"a divisor of d_model, which is {found.value('d_model')}")
    found.ask("norm_first", "PyTorch's default is false")
    found.ask("activation", "PyTorch's default is relu")
    found.ask("scale_embeddings")
    for name in ("pad", "bos", "eos", "source_starts_with_bos", "source_ends_with_eos"):
        found.ask(name)


def _place_stack(found: PartialCheckpoint, stack: str, prefix: str) -> None:
    keys = found.keys
    attentions = {"self_attention": "self_attn"}
    if stack == "decoder":
        attentions["cross_attention"] = "multihead_attn"
    for i in range(found.value(f"{stack}_layers")):
        ours, theirs = f"{stack}_layers.{i}", f"{prefix}layers.{i}"
        for number, (name, attention) in enumerate(attentions.items(), 1):
            for place, part in enumerate("qkv"):
                keys.put(f"{ours}.{name}.W_{part}.weight", f"{theirs}.{attention}.in_proj_weight", third(place))
                keys.bias(f"{ours}.{name}.W_{part}.bias", f"{theirs}.{attention}.in_proj_bias", third(place))
            keys.linear(f"{ours}.{name}.W_o", f"{theirs}.{attention}.out_proj")
            keys.norm(f"{ours}.{name}_residual.norm", f"{theirs}.norm{number}")
        for part in "12":
            keys.linear(f"{ours}.feed_forward.W_{part}", f"{theirs}.linear{part}")
        keys.norm(f"{ours}.feed_forward_residual.norm", f"{theirs}.norm{len(attentions) + 1}")
    if found.value("final_norm"):
        keys.norm(f"{stack}_norm", f"{prefix}norm")


def _place_rest(found: PartialCheckpoint) -> None:
    """Embeddings, projection, positions: by the keys that the user gives, then by what names and shapes make plain."""
    roles = _given_roles(found)
    if roles is None:
        return
    _recognise_roles(found, roles)
    for role, name in roles.items():
        found.notes.append(f"{name} is the {role.replace('_', ' ')}")
    lacking = [role for role in ROLES[:3] if role not in roles]
    if lacking:
        left = [key for key in _left(found) if key not in roles.values()]
        form = ", ".join(f'"NAME": "{role}"' for role in lacking)
        found.missing["keys"] = f"which is {', '.join(lacking)} of {', '.join(left) or 'none'}? {{{form}}}"
        return
    source, target, projection = (found.keys.tensors[roles[role]] for role in ROLES[:3])
    for side in ("source", "target"):
        found.infer(f"{side}_vocabulary_size", found.keys.size(roles[f"{side}_embedding"], 0), SHAPES)
    shared = roles["source_embedding"] == roles["target_embedding"] or same([source, target])
    found.infer("share_embeddings", shared, "comparing the tables")
    found.infer("tie_projection", same([target, projection]) or projection is target, "comparing the tables")
    place_tables(
        found,
        embeddings={side: roles[f"{side}_embedding"] for side in ("source", "target")},
        projection=roles["projection"],
        bias=_bias_of(roles["projection"]),
        positions={side: roles[f"{side}_positions"] for side in ("source", "target") if f"{side}_positions" in roles},
    )


def _given_roles(found: PartialCheckpoint) -> dict[str, str] | None:
    """Role -> name in the file, of the setting "keys"; one name may have several roles, joined by commas."""
    roles: dict[str, str] = {}
    problems = []
    for name, wanted in found.settings.get("keys", {}).items():
        if name not in found.keys:
            problems.append(f"keys: the file has no {name}")
        for role in re.split(r"[,\s]+", wanted.strip()):
            role = role.removesuffix(".weight").removesuffix(".table")  # noqa: PLW2901 (either form will do)
            if role not in ROLES:
                problems.append(f"keys: {name} is given as {role}; expected one of {', '.join(ROLES)}")
            elif role in roles:
                problems.append(f"keys: {role} is both {roles[role]} and {name}")
            roles[role] = name
    found.problems += problems
    return None if problems else roles


def _left(found: PartialCheckpoint) -> list[str]:
    """The names of tables that no part of the stacks has used."""
    width = found.value("d_model")
    return [
        name
        for name in found.keys.unused()
        if (table := as_table(found.keys.tensors[name])) is not None and table.size(-1) == width
    ]


def _recognise_roles(found: PartialCheckpoint, roles: dict[str, str]) -> None:
    """Find the roles that the user has not given. Nothing is taken that could be two things."""
    tensors = found.keys.tensors
    left = [name for name in _left(found) if name not in roles.values()]
    positions = [name for name in left if POSITION.search(name) or tensors[name].dim() == 3]
    left = [name for name in left if name not in positions]
    _recognise_sides(roles, positions, "positions")
    if "projection" not in roles:
        with_bias = [name for name in left if _bias_of(name) in tensors]
        if len(with_bias) == 1:
            roles["projection"] = with_bias[0]
    left = [name for name in left if name not in roles.values()]
    if "projection" in roles:
        rows = len(tensors[roles["projection"]])
        of_target = [name for name in left if len(tensors[name]) == rows]
        if len(left) == 2 and len(of_target) == 1:
            roles.setdefault("target_embedding", of_target[0])
            roles.setdefault("source_embedding", next(name for name in left if name not in of_target))
    _recognise_sides(roles, [name for name in left if name not in roles.values()], "embedding")


def _bias_of(name: str) -> str:
    return name.removesuffix("weight") + "bias"


def _recognise_sides(roles: dict[str, str], names: list[str], kind: str) -> None:
    """Which of one or two tables is the source's, and which the target's, where names tell."""
    sides = {name: (bool(SOURCE.search(name)), bool(TARGET.search(name))) for name in names}
    if len(names) == 1 and (kind == "positions" or sides[names[0]] in {(True, True), (False, False)}):
        roles.setdefault(f"source_{kind}", names[0])
        roles.setdefault(f"target_{kind}", names[0])
    for side, wanted in (("source", (True, False)), ("target", (False, True))):
        plain = [name for name in names if sides[name] == wanted]
        if len(names) <= 2 and len(plain) == 1:
            roles.setdefault(f"{side}_{kind}", plain[0])
