"""Files changed at random: bytes of any file, values of JSON, and what lies in archives, with sums that fit again."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable
from random import Random
from typing import Any

EDGES = (b"\0" * 4, b"\xff" * 4, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\xff" * 8, b"9" * 12)
# Instructions of pickles, so that a mutation of one is often another pickle.
OPCODES = b".()0aebcdlst2Rq\x80\x81\x85\x86\x87\x88\x89\x8aNKMJGXUhjr]})\x8f("
VALUES: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: True,
    lambda: -1,
    lambda: 0,
    lambda: 1,
    lambda: 3,
    lambda: 2**31,
    lambda: 2**63,
    lambda: 10**300,
    lambda: 0.5,
    lambda: -1e308,
    lambda: float("nan"),
    lambda: float("inf"),
    lambda: "",
    lambda: "x",
    lambda: "\ud800",
    lambda: "\x1b[2J\u202e\0",
    lambda: "../../etc/passwd",
    lambda: "z" * 100_000,
    list,
    dict,
    lambda: [0],
    lambda: [[1, 2], {"a": None}],
    lambda: {"a": 1},
    lambda: {"\ud800": "\ud800"},
    lambda: list(range(5000)),
    lambda: nested(90),
)


def nested(levels: int) -> Any:
    """Lists in lists."""
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def mutate_bytes(random: Random, content: bytes) -> bytes:
    """One to four changes, most often one: bytes altered, inserted, removed, repeated, or all after a place cut off."""
    found = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        place = random.randrange(len(found) + 1)
        end = min(len(found), place + random.choice((1, 2, 4, 8, 100)))
        match random.randrange(8):
            case 0:
                found[place:end] = bytes(b ^ 1 << random.randrange(8) for b in found[place:end])
            case 1:
                found[place:end] = random.randbytes(end - place)
            case 2:
                edge = random.choice(EDGES)
                found[place : place + len(edge)] = edge
            case 3:
                found[place:place] = random.choice((random.randbytes(3), *EDGES))
            case 4:
                del found[place:end]
            case 5:
                found[place:place] = found[place:end] * random.choice((1, 2, 50))
            case 6:
                del found[place:]
            case 7:
                found[place : place + 1] = random.choice(OPCODES).to_bytes()
    return bytes(found)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value[:50]):
            found += _places(item, (*path, key))
    return found


def mutate_json(random: Random, content: bytes) -> bytes:
    """A value replaced, removed, named otherwise or given to another; or the text itself."""
    if random.random() < 0.2:
        return mutate_text(random, content)
    state = json.loads(content)
    for _ in range(random.choice((1, 1, 2))):
        places = _places(state)[1:]
        if not places:
            return b"[]"
        *path, key = random.choice(places)
        parent = state
        for step in path:
            parent = parent[step]
        match random.randrange(6):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, dict):
                parent[random.choice(("x", "", "\ud800", *parent))] = parent.pop(key)
            case 2:
                *other, last = random.choice(places)
                source = state
                for step in other:
                    source = source[step]
                parent[key] = json.loads(json.dumps(source[last]))
            case _:
                parent[key] = random.choice(VALUES)()
    return json.dumps(state).encode()


def mutate_text(random: Random, content: bytes) -> bytes:
    """Bytes altered, or the whole in brackets that nest deeper than any parser follows."""
    if random.random() < 0.9:
        return mutate_bytes(random, content)
    deep = random.choice((b"[", b'{"a":', b"- ", b"{a: ")) * 100_000
    place = random.randrange(len(content) + 1)
    return random.choice((deep, deep + content, content[:place] + deep + content[place:]))


def mutate_lines(random: Random, content: bytes) -> bytes:
    """One line of JSON among others."""
    lines = content.splitlines(keepends=True)
    place = random.randrange(len(lines))
    lines[place] = mutate_json(random, lines[place]) + b"\n"
    return b"".join(lines)


def mutate_archive(random: Random, content: bytes) -> bytes:
    """What lies in a zip archive: an entry's bytes, its name or place; or the archive itself."""
    if random.random() < 0.2:
        return mutate_bytes(random, content)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = [(info, archive.read(info)) for info in archive.infolist()]
    inner = [place for place, (info, _) in enumerate(entries) if info.filename.endswith((".pkl", "yml.npy"))]
    place = random.choice(inner) if inner and random.random() < 0.7 else random.randrange(len(entries))
    info, data = entries[place]
    match random.randrange(8):
        case 0:
            info.filename = random.choice(("x/data.pkl", "data.pkl", "../x", "\x1b", info.filename[:-1] + "x"))
        case 1:
            entries.pop(place)
        case 2:
            # In the header, if there is one: of an array, or of a pickle's first instructions.
            entries[place] = info, mutate_bytes(random, data[:100]) + data[100:]
        case _:
            entries[place] = info, mutate_bytes(random, data)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for info, data in entries:
            archive.writestr(info.filename, data)
    return made.getvalue()


def mutate_safetensors(random: Random, content: bytes) -> bytes:
    """The header as JSON, with its length; or the bytes."""
    if random.random() < 0.3:
        return mutate_bytes(random, content)
    (length,) = struct.unpack("<Q", content[:8])
    header = mutate_json(random, content[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def mutate(random: Random, name: str, content: bytes) -> bytes:
    """A file changed in the way of its kind, by its name."""
    if name.endswith(".json"):
        return mutate_json(random, content)
    if name.endswith(".jsonl"):
        return mutate_lines(random, content)
    if name.endswith(".safetensors"):
        return mutate_safetensors(random, content)
    if content.startswith(b"PK"):
        return mutate_archive(random, content)
    if name.endswith(".txt"):
        return mutate_text(random, content)
    return mutate_bytes(random, content)
