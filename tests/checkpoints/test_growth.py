"""Small files that stand for much: refused, or read, in little time and memory, and with short messages."""

from __future__ import annotations

import io
import json
import pickle
import struct
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from reference_model.checkpoint import FORMAT
from tests.mutations import nested
from tests.test_fuzzed_files import held_to_limits
from tfm_export.bundle import Bundle
from tfm_export.checkpoints import files, inspect_checkpoint, pickles, read_checkpoint, read_settings
from tfm_export.cli import cli
from tfm_export.errors import BundleError, CheckpointError

PROTO, STOP = b"\x80\x02", b"."


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def put(place: int) -> bytes:
    return b"r" + struct.pack("<I", place)


def get(place: int) -> bytes:
    return b"j" + struct.pack("<I", place)


def integer(value: int) -> bytes:
    digits = value.to_bytes(9, "little", signed=True)
    return b"\x8a" + bytes([len(digits)]) + digits


def called(function: str, *arguments: bytes) -> bytes:
    return b"c" + function.replace(" ", "\n").encode() + b"\n(" + b"".join(arguments) + b"tR"


def doubled_text(times: int) -> bytes:
    """A path of two paths, each of which is the path before."""
    steps = (called("pathlib PosixPath", get(0), get(0)) + put(0) for _ in range(times))
    return text("x" * 64) + put(0) + b"".join(steps) + get(0)


def doubled_tuple(times: int) -> bytes:
    """A tuple of two tuples, each of which is the tuple before: only hashing it takes time."""
    return b")" + put(0) + b"".join(get(0) + get(0) + b"\x86" + put(0) for _ in range(times))


def nested_tuple(levels: int) -> bytes:
    return b")" + b"\x85" * levels


def doubled_list(times: int) -> bytes:
    return b"]" + put(0) + b"".join(b"](" + get(0) + get(0) + b"e" + put(0) for _ in range(times))


def archive(content: bytes) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as made:
        for name, data in (("data.pkl", PROTO + content + STOP), ("version", b"3\n"), ("byteorder", b"little")):
            made.writestr(f"a/{name}", data)
    return written.getvalue()


def old_format(numbers: int) -> bytes:
    """A file as torch.save wrote it before archives, with a tensor of so many numbers and no data."""
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + integer(numbers) + b"NtQ"
    tensor = called("torch._utils _rebuild_tensor_v2", storage, b"K\0", b"K\x01\x85", b"K\x01\x85", b"\x89", b"}")
    first = (pickle.dumps(value, protocol=2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
    main = PROTO + b"}" + text("a") + tensor + b"s" + STOP
    return b"".join(first) + main + pickle.dumps(["0"], protocol=2)


def array(version: tuple[int, int]) -> bytes:
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (10000000000000,), }".ljust(117) + b"\n"
    length = struct.pack("<H" if version == (1, 0) else "<I", len(header))
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as made:
        made.writestr("a.npy", b"\x93NUMPY" + bytes(version) + length + header + bytes(64))
    return written.getvalue()


def safetensors(header: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header


DEEP = b'{"a":' * 100_000
FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "a text that doubles": (lambda: archive(doubled_text(40)), r"is small and would make more than 16,\d+,\d+ bytes"),
    "a large array of bytes": (
        lambda: archive(called("builtins bytearray", integer(400_000_000))),
        "is small and would make more than",
    ),
    "by its old name": (
        lambda: archive(called("__builtin__ bytearray", integer(400_000_000))),
        "is small and would make more than",
    ),
    "a tensor without data": (
        lambda: archive(called("torch FloatTensor", integer(10**11))),
        r"is a pickle that needs torch\.FloatTensor",
    ),
    "an array of bytes, called by another function": (
        lambda: archive(
            called("torch._tensor _rebuild_from_type_v2", b"c__builtin__\nbytearray\n", b"N", integer(10**9) + b"\x85")
        ),
        r"needs __builtin__\.bytearray, torch\._tensor\._rebuild_from_type_v2",
    ),
    "a name that takes for ever to hash": (
        lambda: archive(doubled_tuple(80) + b"}" + get(0) + b"Ns"),
        "has tuples in tuples, in more than 100 levels or 20 million parts",
    ),
    "a name whose hash overflows the stack": (
        lambda: archive(b"}" + nested_tuple(300_000) + b"Ns"),
        "has tuples in tuples",
    ),
    "lists in lists": (
        lambda: archive(b"]" * 500 + b"a" * 499),
        "has more than 100 containers in each other",
    ),
    "a text that is cut short": (
        lambda: archive(b"X\xff\xff\xff\xff"),
        "is damaged or not a PyTorch checkpoint: expected 4294967295 bytes",
    ),
    "two pickles": (
        lambda: archive(b"}").replace(b"a/version", b"data.pkl\0"),
        "is damaged|has several pickles|zip",
    ),
    "an old file without its data": (
        lambda: old_format(10**12),
        r"is damaged or cut short: its tensors take 4,000,000,000,000 bytes, and it has \d+",
    ),
    **{
        f"an array of version {version}": (
            lambda version=version: array(version),  # type: ignore[misc]
            r"a\.npy should have the shape \[10000000000000\], and has 192 bytes|should have the shape",
        )
        for version in ((1, 0), (2, 0), (3, 0))
    },
    "a deep header": (lambda: safetensors(DEEP), "it is nested too deeply"),
    "a header longer than the file": (
        lambda: safetensors(b"{}", 10**15),
        "its header should have 1,000,000,000,000,000 bytes, and the file has 10",
    ),
    "a deep index": (lambda: DEEP, "is not JSON: it is nested too deeply"),
}


@pytest.mark.parametrize("case", FILES)
def test_what_would_grow_is_refused_at_once(tmp_path: Path, case: str) -> None:
    make, problem = FILES[case]
    path = tmp_path / "file"
    path.write_bytes(make())
    with held_to_limits(0), pytest.raises(CheckpointError, match=problem) as caught:
        read_checkpoint(path)
    assert len(str(caught.value)) < 1000


def test_lists_that_hold_each_other_beside_weights_are_no_matter(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(archive(doubled_list(60)))
    with held_to_limits(0), pytest.raises(CheckpointError, match="holds no tensors by name"):
        read_checkpoint(tmp_path / "model.pt")
    written_out = json.dumps(pickles.load_pickle(tmp_path / "model.pt"))
    assert pickles.ENDLESS in written_out
    assert len(written_out) < 10**9


def test_a_part_without_end_is_quoted_shortly(tmp_path: Path) -> None:
    state = doubled_list(60) + b"}" + text("format") + text(FORMAT) + b"s" + text("config") + get(0) + b"s"
    (tmp_path / "model.pt").write_bytes(archive(state))
    with held_to_limits(0), pytest.raises(CheckpointError) as caught:
        read_checkpoint(tmp_path / "model.pt")
    assert len(str(caught.value)) < 2000


def test_hashing_the_same_list_again_and_again_is_refused(tmp_path: Path) -> None:
    values = b"]" + put(0) + b"(" + b"K\x01" * 5_000 + b"e"
    sets = b"](" + called("builtins set", get(0)) * 5_000 + b"e"
    (tmp_path / "model.pt").write_bytes(archive(values + sets))
    with held_to_limits(10**6), pytest.raises(CheckpointError, match="refers to its own parts again and again"):
        read_checkpoint(tmp_path / "model.pt")


def test_what_torch_writes_is_counted_without_an_objection(tmp_path: Path) -> None:
    state: dict[str, Any] = OrderedDict(weight=torch.ones(3), bias=torch.zeros(2, dtype=torch.bfloat16))
    state["half"] = torch.ones(4).half()
    beside = {"set": {1, 2}, "bytes": b"\xff\0", "shape": torch.Size([2]), "name": "Grüße", "long": 2**70}
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]).state_dict()
    whole = {"model": state, "beside": beside, "optimizer": optimizer, "parameter": torch.nn.Parameter(torch.ones(1))}
    for new in (True, False):
        torch.save(whole, tmp_path / "model.pt", _use_new_zipfile_serialization=new)
        found = pickles.load_pickle(tmp_path / "model.pt")
        assert {**found["beside"], "shape": torch.Size(found["beside"]["shape"])} == beside
        assert found["model"].keys() == state.keys()
        assert all(torch.equal(found["model"][name], state[name]) for name in state)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "settings.json"])
def test_deep_json_is_refused(tmp_path: Path, name: str) -> None:
    for content in (DEEP, json.dumps(nested(150)).encode()):
        (tmp_path / name).write_bytes(content)
        with held_to_limits(0), pytest.raises(CheckpointError, match=r"is not JSON: it .*(deeply|in each other)"):
            read_settings(tmp_path / name) if name == "settings.json" else files.read_json(tmp_path / name)


def test_a_deep_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bundle.json").write_bytes(DEEP)
    with pytest.raises(BundleError, match=r"bundle\.json is not JSON: it is nested too deeply"):
        Bundle.open(tmp_path)


def test_a_lack_of_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "model.pt")
    np.savez(tmp_path / "model.npz", a=np.ones(3))

    def lack(*_arguments: Any, **_options: Any) -> None:
        raise MemoryError

    def allocate(*_arguments: Any, **_options: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    for module, name, instead in ((torch, "load", lack), (torch, "load", allocate), (files.np, "load", lack)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, instead)
            path = tmp_path / ("model.pt" if module is torch else "model.npz")
            with pytest.raises(CheckpointError, match=r"bytes, and reading it takes more memory .*\n.*ulimit -v"):
                read_checkpoint(path)
    for instead in (lack, allocate):
        monkeypatch.setattr("tfm_export.checkpoints.inspect_checkpoint", instead)
        result = CliRunner().invoke(cli, ["inspect", str(tmp_path / "model.pt")])
        assert result.exit_code == 1
        assert "this takes more memory than the process can get" in result.stderr


def test_long_and_unprintable_names_are_shortened(tmp_path: Path) -> None:
    names = ["k" * 10**6, "\x1b[2J\u202ename", "\ud800"]
    torch.save({name: torch.ones(1) for name in names}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError) as caught:
        inspect_checkpoint(tmp_path / "model.pt")
    told = str(caught.value)
    assert len(told) < 2000
    assert r"kkk...kkk" in told
    assert r"\x1b[2J\u202ename, \ud800" in told


def test_counting_is_quick(tmp_path: Path) -> None:
    vocabulary = {f"token{i}": i for i in range(100_000)}
    torch.save({"model": {"a": torch.ones(1)}, "vocabulary": vocabulary}, tmp_path / "model.pt")
    began = time.process_time()
    pickles.load_pickle(tmp_path / "model.pt")
    assert time.process_time() - began < 10
