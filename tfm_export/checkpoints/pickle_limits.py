"""What reading a pickle would build, counted without building it.

A pickle refers to its own parts, so that a few bytes of it can stand for any size: texts that are joined with
themselves, tuples of tuples that are hashed, arrays of a number of bytes. PyTorch's weights-only reader runs no code of
a pickle, but it does build all of that. `check_pickle` goes through the same instructions with sizes in the place of
values, and refuses what would grow beyond measure before that reader sees it.
"""

from __future__ import annotations

import pickle
import pickletools
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tfm_export.errors import CheckpointError

MOST_STEPS = 20_000_000  # of building and hashing all values: as many as a checkpoint of the largest vocabularies has
SLOW = 4  # steps that one visit of a call's arguments counts as: they are counted one by one
MOST_TIMES_FILE = 8  # all tensors, and all that functions make of texts, in times of the file: tied weights count each
LEAST_BYTES = 16_000_000  # that functions may make in any case
MOST_LEVELS = 100  # of containers in each other

CONTAINERS = ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "EMPTY_TUPLE")
NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1")
TEXTS = ("BINUNICODE", "SHORT_BINSTRING")
REBUILD = "torch._utils._rebuild"
# What is called with arguments beyond the stand-ins of `pickles`; tensors and storages are only named.
CALLED = {
    "collections.OrderedDict",
    "collections.Counter",
    "builtins.set",
    "builtins.bytearray",
    "builtins.complex",
    "torch.Size",
    "torch.device",
    "torch.serialization._get_layout",
    "torch.nn.parameter.Parameter",
}
COPIES = "torch._utils._rebuild_device_tensor"  # each call would copy a tensor
ELEMENT_BYTES = {"Double": 8, "Long": 8, "ComplexFloat": 8, "ComplexDouble": 16, "Float": 4, "Int": 4, "QInt32": 4}
ELEMENT_BYTES |= dict.fromkeys(("Half", "BFloat16", "Short"), 2)


@dataclass(slots=True, eq=False)
class Planned:
    """A value that a pickle would build.

    Attributes:
        text: characters and bytes in it.
        steps: what hashing it visits: of a tuple also its parts, as often as they occur.
        levels: of tuples in it.
        value: of numbers and texts themselves; of a function or class its name.
        items: of containers their parts, of dictionaries names and values by turns.
        named: it is a function or class.
    """

    text: int = 0
    steps: int = 1
    levels: int = 0
    value: Any = None
    items: list[Planned] | None = None
    named: bool = False


ATOM = Planned()


class _Counter:
    """Goes through the instructions of one pickle.

    Args:
        path: of the file, for messages.
        size: of the file.
        stand_ins: names of the functions and classes that this project puts in the place of others.
        storages: bytes of each storage, by its key: filled.
    """

    def __init__(self, path: Path, size: int, stand_ins: Iterable[str], storages: dict[Any, int]) -> None:
        self.path, self.storages = path, storages
        self.called = CALLED | {*stand_ins}
        self.most_bytes = LEAST_BYTES + MOST_TIMES_FILE * size
        self.bytes = self.steps = 0
        self.stack: list[Planned] = []
        self.below: list[list[Planned]] = []
        self.memo: dict[int, Planned] = {}
        self.known: dict[str, Callable[[Any], None]] = {
            "PROTO": lambda _: None,
            **dict.fromkeys(("NONE", "NEWTRUE", "NEWFALSE", "BINFLOAT"), lambda _: self.stack.append(ATOM)),
            **dict.fromkeys(CONTAINERS, lambda _: self.stack.append(Planned(items=[]))),
            **dict.fromkeys(NUMBERS, lambda number: self.stack.append(Planned(value=number))),
            **dict.fromkeys(TEXTS, lambda text: self.stack.append(Planned(value=text, text=len(text)))),
            **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda place: self.stack.append(self.memo[place])),
            **dict.fromkeys(("BINPUT", "LONG_BINPUT"), self._remember),
            "GLOBAL": lambda name: self.stack.append(Planned(value=_modern(name), named=True)),
            "MARK": self._mark,
            "TUPLE": lambda _: self._tuple(None),
            "TUPLE1": lambda _: self._tuple(1),
            "TUPLE2": lambda _: self._tuple(2),
            "TUPLE3": lambda _: self._tuple(3),
            "APPEND": lambda _: self._fill(1, names=False),
            "APPENDS": lambda _: self._fill(None, names=False),
            "SETITEM": lambda _: self._fill(2, names=True),
            "SETITEMS": lambda _: self._fill(None, names=True),
            "REDUCE": self._call,
            "NEWOBJ": self._call,
            "BUILD": self._build,
            "BINPERSID": self._store,
        }

    def run(self, file: IO[bytes]) -> bool:
        """Count one pickle of a file, as far as PyTorch's reader goes; whether that is to its end."""
        for opcode, argument, _ in pickletools.genops(file):
            self.steps += 1
            if opcode.name not in self.known:
                return opcode.name == "STOP"
            self.known[opcode.name](argument)
            if self.steps > MOST_STEPS:
                raise self._refusal("refers to its own parts again and again, or has more than 20 million values")
            if self.bytes > self.most_bytes:
                raise self._refusal(f"is small and would make more than {self.most_bytes:,} bytes of texts")
        return False

    def _remember(self, place: int) -> None:
        self.memo[place] = self.stack[-1]

    def _mark(self, _: Any) -> None:
        self.below.append(self.stack)
        self.stack = []

    def _build(self, _: Any) -> None:
        self.steps += len(self.stack.pop().items or ())  # attributes are copied

    def _pop(self, count: int | None) -> list[Planned]:
        """The topmost values, or all above the last mark."""
        if count is None:
            found, self.stack = self.stack, self.below.pop()
            return found
        found = self.stack[-count:]
        del self.stack[-count:]
        return found

    def _tuple(self, count: int | None) -> None:
        items = self._pop(count)
        made = Planned(
            text=sum(part.text for part in items),
            steps=1 + sum(part.steps for part in items),
            levels=1 + max((part.levels for part in items), default=0),
            items=items,
        )
        if made.steps > MOST_STEPS or made.levels > MOST_LEVELS:
            raise self._refusal(f"has tuples in tuples, in more than {MOST_LEVELS} levels or 20 million parts")
        self.stack.append(made)

    def _fill(self, count: int | None, *, names: bool) -> None:
        items = self._pop(count)
        self.steps += len(items)
        if names:  # they are hashed
            self.steps += sum(part.steps for part in items[::2])
        target = self.stack[-1]
        if target.items is None:
            raise pickle.UnpicklingError("it puts values into what is no container")
        target.items += items

    def _call(self, _: Any) -> None:
        function, arguments = self._pop(2)
        name, given = _called_name(function), arguments.items or []
        if name == "torch._tensor._rebuild_from_type_v2":
            name = _called_name(given[0]) if given else ""
            known = name.startswith(REBUILD)
        else:
            known = name in self.called or name.startswith(REBUILD) or (name.startswith("torch.") and not given)
        if not known or name.startswith(COPIES):
            raise pickle.UnpicklingError(f"it calls {name or 'something that is no function'}")
        size = arguments.text
        if name == "builtins.bytearray" and given and isinstance(given[0].value, int):
            size += max(given[0].value, 0)
        self.bytes += size
        self.steps += SLOW * sum(map(_steps, given))
        self.stack.append(Planned(text=size, items=[]))

    def _store(self, _: Any) -> None:
        """The storage of a tensor: its type, key, place and number of elements."""
        items = self.stack.pop().items or []
        if len(items) > 4 and isinstance(items[4].value, int):
            kind = str(items[1].value).removeprefix("torch.").removesuffix("Storage")
            key = items[2].value
            self.storages[key] = max(self.storages.get(key, 0), items[4].value * ELEMENT_BYTES.get(kind, 1))
        self.stack.append(Planned())

    def _refusal(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} {what}: refused", "save the weights alone: torch.save(model.state_dict(), ...)"
        )


def _called_name(part: Planned) -> str:
    return str(part.value) if part.named else ""


def _steps(part: Planned) -> int:
    """What hashing the parts of an argument visits, and the first of pairs in it."""
    items = part.items or ()
    return part.steps + sum(item.steps + sum(first.steps for first in (item.items or ())[:2]) for item in items)


def _modern(name: str) -> str:
    """The name of a function or class, "module name" in the pickle, by today's names of modules."""
    module, _, name = name.partition(" ")
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    return f"{module}.{name}"


def check_pickle(
    path: Path, file: IO[bytes], size: int, stand_ins: Iterable[str], *, pickles: int = 1
) -> dict[Any, int]:
    """Make sure that reading the pickles at the start of a file takes time and memory in proportion to its size.

    Args:
        path: of the file, for messages.
        file: whose `read` gives no more than is there, whatever it is asked for.
        size: of the file in bytes.
        stand_ins: names of the functions and classes that `pickles` puts in the place of others.
        pickles: how many follow each other.

    Returns:
        The bytes of each storage that they name.

    Raises:
        CheckpointError: it would grow beyond measure.
        UnpicklingError: it calls what is not read.
        ValueError, LookupError: it is cut short, or no pickle.
    """
    storages: dict[Any, int] = {}
    for _ in range(pickles):
        if not _Counter(path, size, stand_ins, storages).run(file):
            break
    return storages
