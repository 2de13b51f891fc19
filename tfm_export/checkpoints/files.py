"""Reading what lies on disk, in whatever container: nothing in it is executed, and every refusal says why.

A container is told by its first bytes, never by the name of the file.
"""

from __future__ import annotations

import math
import os
import re
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tfm_export.checkpoints.pickles import load_pickle, out_of_memory
from tfm_export.errors import CheckpointError
from tfm_export.json_text import parse_json, unique
from tfm_export.pinned_folder import utf8_path
from tfm_export.quotation import quote, shorten

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
# The weights of a folder, the first that is there.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.00.safetensors",  # Eole's first; others follow with 01, 02 ...
)
MOST_JSON_BYTES = 64_000_000
# Version 3 of numpy's format differs from 2 only in how names of fields are written.
READ_HEADER = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,
}
MOST_COMPRESSION = 20  # what an array may unpack to, in times of its size: trained weights hardly compress


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What was read of a checkpoint, before anyone knows whose it is.

    Attributes:
        path: the file or the folder.
        state: what the file holds; of a folder, its tensors by name.
        config: config.json of a folder; empty for a file.
        generation: generation_config.json of a folder, if it has one.
        files: of a folder, what lies in it, by name.
    """

    path: Path
    state: Any
    config: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)


def read_contents(path: Path) -> Contents:
    """Read a checkpoint's file, or a folder in the way of Hugging Face.

    Raises:
        CheckpointError: there is no such thing, it is damaged or something else, or it wants code to be executed.
    """
    if path.is_dir():
        return _read_folder(path)
    return Contents(path=path, state=read_file(path))


def _read_folder(path: Path) -> Contents:
    files = {p.name: p for p in sorted(path.iterdir()) if p.is_file()}
    weights = next((files[name] for name in WEIGHT_FILES if name in files), None)
    if CONFIG not in files or weights is None:
        raise CheckpointError(
            f"{path} is a folder; expected one with {CONFIG} and weights ({', '.join(WEIGHT_FILES)}), as "
            "save_pretrained writes it",
            "name the checkpoint's file in it",
        )
    return Contents(
        path=path,
        state=_read_numbered(files) if weights.name == WEIGHT_FILES[-1] else read_file(weights),
        config=read_json(files[CONFIG]),
        generation=read_json(files[GENERATION_CONFIG]) if GENERATION_CONFIG in files else {},
        files=files,
    )


def read_file(path: Path) -> Any:
    """The contents of a file of weights: torch.save's, safetensors, an archive of numpy arrays, or an index of shards.

    Raises:
        CheckpointError: there is no such file, it is damaged or something else, or it wants code to be executed.
    """
    if not os.path.isfile(path):  # a name from an index may be none that a disk can have
        raise CheckpointError(f"{shorten(str(path), 400)} does not exist", "check the path")
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} is empty", "copy it again")
    with open(path, "rb") as file:
        start = file.read(16)
    if start[8:9] == b"{" and not start.startswith(b"PK"):
        return _read_safetensors(path)
    if start.lstrip().startswith(b"{"):
        return _read_shards(path)
    if start.startswith(b"PK") and _holds_arrays(path):
        return _read_arrays(path)
    return load_pickle(path)


def read_json(path: Path) -> dict[str, Any]:
    """An object in JSON.

    Raises:
        CheckpointError: it is something else, or cannot be read.
    """
    try:
        if path.stat().st_size > MOST_JSON_BYTES:
            raise CheckpointError(f"{path} has more than {MOST_JSON_BYTES:,} bytes: refused")
        value = parse_json(path.read_bytes(), object_pairs_hook=unique)
    except ValueError as problem:
        raise CheckpointError(f"{path} is not JSON: {problem}", 'expected an object such as {"heads": 8}') from None
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be read: {problem.strerror}", "check the path") from problem
    if not isinstance(value, dict):
        raise CheckpointError(f'{path} holds {type(value).__name__}; expected an object such as {{"heads": 8}}')
    return value


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        _check_header(path)
        with utf8_path(path) as name, safe_open(name, framework="pt") as file:
            return {tensor: file.get_tensor(tensor) for tensor in file.keys()}  # noqa: SIM118 (it is no dictionary)
    except MemoryError as problem:
        raise out_of_memory(path) from problem
    except (SafetensorError, ValueError, TypeError, OSError, RuntimeError) as problem:
        raise CheckpointError(
            f"{path} is not a file of safetensors, or is damaged: {shorten(str(problem), 400)}",
            "copy it again and compare its size and hash with the original's",
        ) from problem


def _check_header(path: Path) -> None:
    """Make sure that the header is as large as it says, and no tensor there twice: the library would take the last."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > min(MOST_JSON_BYTES, path.stat().st_size):
            raise ValueError(f"its header should have {size:,} bytes, and the file has {path.stat().st_size:,}")
        parse_json(file.read(size), object_pairs_hook=unique)


def _read_shards(path: Path) -> dict[str, Tensor]:
    """The tensors that an index names, each from the file beside it that it says."""
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise CheckpointError(
            f"{path} is JSON, and no index of shards: it has no weight_map", "name the file of the weights"
        )
    tensors: dict[str, Tensor] = {}
    problems = []
    for name in dict.fromkeys(index.values()):
        if Path(name).name != name:
            problems.append(f"{path} names {shorten(name)}, which is not beside it")
            continue
        shard = read_file(path.parent / name) if not _is_json(path.parent / name) else None
        if not isinstance(shard, dict):
            problems.append(f"{path.parent / shorten(name)} does not hold tensors by name")
            continue
        problems += [f"{shorten(key)} stands in several shards" for key in shard if key in tensors]
        tensors |= shard
    problems += [f"{shorten(key)} is in the index and in no shard" for key in index if key not in tensors]
    if problems:
        raise CheckpointError(problems, "copy the whole folder again")
    return tensors


def _is_json(path: Path) -> bool:
    """Whether a shard is another index, maybe this one."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(16).lstrip().startswith(b"{")


def _read_numbered(files: Mapping[str, Path]) -> dict[str, Tensor]:
    """The tensors of model.00.safetensors, model.01.safetensors ..."""
    tensors: dict[str, Tensor] = {}
    problems = []
    for name in (name for name in files if re.fullmatch(r"model\.\d\d\.safetensors", name)):
        shard = _read_safetensors(files[name])
        problems += [f"{shorten(key)} stands in several shards" for key in shard if key in tensors]
        tensors |= shard
    if problems:
        raise CheckpointError(problems, "copy the whole folder again")
    return tensors


def _holds_arrays(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError):
        return False  # for the reader of pickles to refuse
    return bool(names) and all(name.endswith(".npy") for name in names)


def _read_arrays(path: Path) -> dict[str, Tensor]:
    """The arrays of an .npz file; bytes and text in it stay arrays of bytes."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if len({*names}) < len(names):
                raise CheckpointError(f"{path} has several arrays of one name: refused", "save it again")
            if sum(entry.compress_size for entry in archive.infolist()) > path.stat().st_size:
                raise CheckpointError(f"{path} has arrays that are larger than itself: refused", "copy it again")
            for entry in archive.infolist():
                _check_array(archive, entry)
                if entry.file_size > MOST_COMPRESSION * max(entry.compress_size, 1) + 1000:
                    raise CheckpointError(
                        f"{path}: {shorten(entry.filename)} unpacks to {entry.file_size:,} bytes: refused"
                    )
        with np.load(path, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(np.array(arrays[name])) for name in arrays.files}
    except MemoryError as problem:
        raise out_of_memory(path) from problem
    # numpy, zipfile and zlib raise whatever they stumble over in a damaged file.
    except (
        ValueError,
        TypeError,
        SyntaxError,
        LookupError,
        OSError,
        EOFError,
        RuntimeError,
        zlib.error,
        zipfile.BadZipFile,
        tokenize.TokenError,
    ) as problem:
        raise CheckpointError(
            f"{path} is not an archive of plain numpy arrays, or is damaged: {shorten(str(problem), 400)}",
            "copy it again and compare its size and hash with the original's",
        ) from problem


def _check_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    """Make sure that an array is as large as its header says, before memory is asked for."""
    name = shorten(entry.filename)
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        if version not in READ_HEADER:
            raise ValueError(f"{name} is of version {version} of numpy's format")
        shape, _, kind = READ_HEADER[version](file)
    if math.prod(shape) * kind.itemsize > entry.file_size and not kind.hasobject:
        raise ValueError(f"{name} should have the shape {quote(list(shape))}, and has {entry.file_size:,} bytes")
