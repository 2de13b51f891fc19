"""The public classes of tfm_export, and ARCHITECTURE.md's list of them: `python -m tests.glossary` writes it anew."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "ARCHITECTURE.md"
NOUN = re.compile(r"^- `(\w+)` \(([\w/.]+)\): .", re.MULTILINE)
ROOM = re.compile(r"^\| `tfm_export/((?:\w+/)*)` \| (.*) \|$", re.MULTILINE)
TITLE, HEAD = "## Glossary", "| package | its other classes |\n|---|---|\n"


def public_classes() -> list[tuple[str, str]]:
    """The name and the file of every public class at the top of a module, by file."""
    package = ROOT / "tfm_export"
    return [
        (node.name, path.relative_to(package).as_posix())
        for path in sorted(package.rglob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def glossary(document: str) -> str:
    """The part of a document that this module reads and writes."""
    return document[document.index(TITLE) :]


def entries(document: str) -> list[tuple[str, str]]:
    """The name and the file of every class that the glossary of a document has."""
    found = NOUN.findall(glossary(document))
    for room, cell in ROOM.findall(glossary(document)):
        for file, names in re.findall(r"([\w/]+\.py): ([^;]+)", cell):
            found += [(name, f"{room}{file}") for name in re.findall(r"`(\w+)`", names)]
    return found


def written(document: str) -> str:
    """The document with its table of rooms made anew: all classes that have no line of their own above it."""
    told, rooms = {*NOUN.findall(glossary(document))}, defaultdict[str, dict[str, list[str]]](lambda: defaultdict(list))
    for name, file in public_classes():
        if (name, file) not in told:
            room, slash, module = file.rpartition("/")
            rooms[room + slash][module].append(name)
    cells = {
        room: "; ".join(
            f"{module}: {', '.join(f'`{name}`' for name in sorted(names))}" for module, names in sorted(modules.items())
        )
        for room, modules in sorted(rooms.items())
    }
    start = document.index(HEAD) + len(HEAD)
    table = "".join(f"| `tfm_export/{room}` | {cell} |\n" for room, cell in cells.items())
    return document[:start] + table + re.sub(r"\A(\|.*\n)*", "", document[start:])


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
