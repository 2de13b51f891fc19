"""Damaged and hostile files: weights of every layout lost or of another shape, and files of other kinds."""

from __future__ import annotations

import bz2
import copy
import gzip
import io
import json
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from tests.checkpoints.test_frameworks import FIXTURES, marian_arrays
from tests.checkpoints.test_huggingface import build
from tests.checkpoints.test_layouts import IDS, LAYOUTS, SOURCES, TORCH
from tfm_export.checkpoints import read_checkpoint, read_settings
from tfm_export.checkpoints.files import Contents, read_contents
from tfm_export.checkpoints.recognise import recognise_checkpoint
from tfm_export.errors import CheckpointError

# What PyTorch says of an odd number of heads.
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")

MUTATIONS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "lost": lambda _: None,
    "a scalar": lambda _: torch.tensor(1.0),
    "one axis more": lambda w: torch.stack([w, w]),
    "no rows": lambda w: w[:0],
}
# What a file may do without: tables that can be computed or are tied, and the projection's bias.
OPTIONAL = re.compile(r"final_logits_bias|generator\.bias|fc_out\.bias|proj\.bias|^0\.bias|pe\.pe|tgt_emb\.")


def contents(case: str, folder: Path) -> tuple[Contents, dict[str, Any]]:
    """What is read of a whole checkpoint of this layout, and the settings that it needs."""
    if case in LAYOUTS:
        asked = {"torch": TORCH, "tutorial": IDS, "annotated": {**IDS, **SOURCES}}[case]
        return Contents(path=folder, state=dict(LAYOUTS[case]().state_dict())), {**asked, "heads": 3}
    if case in {"bart", "t5"}:
        build(case).save_pretrained(folder)
        return read_contents(folder), {}
    if case == "marian":
        arrays = marian_arrays(pre_norm=True, separate=True, learned=True)
        return Contents(path=folder, state={k: torch.from_numpy(np.array(v)) for k, v in arrays.items()}), {}
    return read_contents(FIXTURES / case), {}


def weights_of(state: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The places of the weights: one of each kind."""
    seen = set()
    for name, value in state.items():
        if isinstance(value, dict) and name not in {"expected", "optim"}:
            yield from weights_of(value, (*path, name))
        elif isinstance(value, Tensor) and (kind := re.sub(r"\d+", "*", name)) not in seen:
            seen.add(kind)
            yield (*path, name)


def mutated(state: dict[str, Any], place: tuple[str, ...], change: Callable[[Tensor], Tensor | None]) -> dict[str, Any]:
    """A copy with one weight changed, or left out."""
    found = copy.copy(state)
    if len(place) > 1:
        return {**found, place[0]: mutated(found[place[0]], place[1:], change)}
    changed = change(found.pop(place[0]))
    return found if changed is None else {**found, place[0]: changed}


@pytest.mark.parametrize(
    "case", [*LAYOUTS, "bart", "t5", "marian", "opennmt_rms.pt", "eole_gated", "fairseq_learned.pt"]
)
def test_no_weight_may_be_lost_or_of_another_shape(tmp_path: Path, case: str) -> None:
    whole, settings = contents(case, tmp_path)
    recognise_checkpoint(whole, settings).finish()
    for number, place in enumerate(weights_of(whole.state)):
        name = place[-1]
        copies = case.startswith("fairseq") and re.search(
            r"version|_float_tensor|in_proj_|_(weight|bias|weights)$", name
        )
        if copies or name.startswith(
            ("special:", "decoder.transformer_layers.0.layer_scalar", "encoder.transformer_layers.0.layer_scalar")
        ):
            continue
        mutation = [*MUTATIONS][number % len(MUTATIONS)]  # all for each would take a minute
        if mutation == "lost" and (OPTIONAL.search(name) or "output_projection" in name):
            continue
        broken = replace(whole, state=mutated(whole.state, place, MUTATIONS[mutation]))
        try:
            recognise_checkpoint(broken, settings).finish()
        except CheckpointError as error:
            told = str(error)
        else:
            pytest.fail(f"{name}, {mutation}: taken as it is")
        if mutation != "lost" and not re.search("emb|pe$|tables", name):
            assert name.split(".", maxsplit=1)[-1] in told, f"{name}, {mutation}: {told}"


def test_no_row_of_a_joint_projection_is_dropped() -> None:
    whole, settings = contents("torch", Path("torch"))
    for name in whole.state:
        if "in_proj" in name:
            state = mutated(whole.state, (name,), lambda w: torch.cat([w, w[-1:]]))
            with pytest.raises(CheckpointError, match=rf"{re.escape(name)}, for .*found \[37"):
                recognise_checkpoint(replace(whole, state=state), settings).finish()


def test_a_layer_that_is_missing_between_others_is_told(tmp_path: Path) -> None:
    state = LAYOUTS["tutorial"]().state_dict()
    extra = {k.replace("layers.0", "layers.2"): v for k, v in state.items() if k.startswith("decoder.layers.0")}
    torch.save({**state, **extra}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"missing: decoder\.layers\.1\.self_attention\.fc_q\.weight"):
        read_checkpoint(tmp_path / "model.pt", {**IDS, "heads": 3})


def test_one_sides_embedding_is_not_taken_for_the_others(tmp_path: Path) -> None:
    state = LAYOUTS["torch"]().state_dict()
    del state["src_emb.weight"]
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"which is source_embedding of none"):
        read_checkpoint(tmp_path / "model.pt", TORCH)


class Harmful:
    """Would run a command if it were unpickled as its author meant it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 1",)


def zipped(**entries: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name.replace("__", "/").replace("_dot_", "."), content)
    return file.getvalue()


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def array_of_another_size() -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (10**12,)})
    return zipped(a_dot_npy=header.getvalue())


def safetensors_twice() -> bytes:
    entry = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = b"{" + entry + b"," + entry + b"}"
    return struct.pack("<Q", len(header)) + header + bytes(4)


WHOLE = {"a.weight": torch.ones(300)}
FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "a text": (lambda: b"# README\nwords\n", "is a text file; expected a file written by torch.save"),
    "one word": (lambda: b"hello", "is a text file"),
    "a text in UTF-8": ("Grüße\n".encode, "is a text file"),
    "a web page": (lambda: b"<!DOCTYPE html>", "is a web page"),
    "a pointer of Git LFS": (lambda: b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
    "a graph": (lambda: b"\x08\x0a\x12\x07pytorch", "is of an unknown kind"),
    "zeros": (lambda: bytes(600), "is of an unknown kind"),
    "gzip": (lambda: gzip.compress(saved(WHOLE)), "is compressed by gzip"),
    "bzip2": (lambda: bz2.compress(saved(WHOLE)), "is compressed by bzip2"),
    "an array without a name": (lambda: b"\x93NUMPY\x01\x00", "is one array of numpy"),
    "cut short": (lambda: saved(WHOLE)[:700], "is an archive that is cut short or damaged"),
    "cut short, old": (lambda: saved(WHOLE, _use_new_zipfile_serialization=False)[:700], "is damaged"),
    "no bytes of a pickle": (lambda: b"\x80\x02", "is damaged"),
    "an archive of something else": (lambda: zipped(a=b"b"), "is a zip archive without data.pkl"),
    "an empty archive": (zipped, "is a zip archive without data.pkl"),
    "TorchScript": (
        lambda: zipped(a__data_dot_pkl=b"", a__constants_dot_pkl=b""),
        "is a TorchScript archive, which holds code",
    ),
    "a command": (lambda: saved({"a": Harmful()}), r"is a pickle that needs \w+\.system; loading it could run code"),
    "a command, old": (
        lambda: saved({"a": Harmful()}, _use_new_zipfile_serialization=False),
        r"is a pickle that needs \w+\.system; loading it could run code",
    ),
    "a command, bare": (lambda: pickle.dumps(Harmful(), protocol=4), r"is a pickle that needs \w+\.system"),
    "a huge array": (array_of_another_size, r"a\.npy should have the shape \[1000000000000\], and has"),
    "a tensor twice": (safetensors_twice, "it names a several times"),
    "safetensors cut short": (lambda: safetensors_bytes(WHOLE)[:-9], "is not a file of safetensors, or is damaged"),
    "a header cut short": (lambda: safetensors_bytes(WHOLE)[:20], "is not a file of safetensors, or is damaged"),
}


@pytest.mark.parametrize("case", FILES)
def test_other_files_are_refused_for_what_they_are(tmp_path: Path, case: str) -> None:
    make, problem = FILES[case]
    (tmp_path / "file").write_bytes(make())
    with pytest.raises(CheckpointError, match=problem) as caught:
        read_checkpoint(tmp_path / "file")
    # PyTorch's own advice is to let the file run code.
    assert not re.search("weights_only|arbitrary code|Re-running|trusted source|mmap", str(caught.value))


def test_an_index_that_names_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": {"a": "index.json"}}))
    with pytest.raises(CheckpointError, match=r"index\.json does not hold tensors by name"):
        read_checkpoint(tmp_path / "index.json")


def test_settings_that_say_two_things_are_refused(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"heads": 3, "pad": 0, "heads": 4}')
    with pytest.raises(CheckpointError, match="it names heads several times"):
        read_settings(tmp_path / "settings.json")


@pytest.mark.parametrize("name", ["bart", "mbart", "t5 1.1"])
def test_a_shared_table_that_no_side_uses_is_left_out(tmp_path: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    build(name).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    prefix, table = next((k.removesuffix("shared.weight"), v) for k, v in state.items() if k.endswith("shared.weight"))
    for i, stack in enumerate(("encoder", "decoder")):
        state[f"{prefix}{stack}.embed_tokens.weight"] = table + (i + 1)
    state["lm_head.weight"] = table + 3
    save_file(state, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    source = read_checkpoint(tmp_path)
    assert torch.equal(source.model.source_embedding.weight, table + 1)
    assert torch.equal(source.model.target_embedding.weight, table + 2)
    assert any("shared.weight" in note for note in source.notes)
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match=r"unexpected: shared\.weight"):
        read_checkpoint(tmp_path)
    del state["lm_head.weight"]
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        read_checkpoint(tmp_path)
