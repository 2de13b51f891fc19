"""Reading pickles without executing anything: tensors and plain values, and inert stand-ins for a few known classes.

PyTorch's weights-only reader does the work. Training frameworks put settings beside the weights, in classes such as
argparse.Namespace; the classes of `STAND_INS` are read as plain values by functions of this file, and their own code is
neither imported nor run. All other classes are refused by name.
"""

from __future__ import annotations

import io
import mmap
import pickle
import pickletools
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Self, cast

import torch
from torch import Tensor

from tfm_export.checkpoints.pickle_limits import LEAST_BYTES, MOST_LEVELS, MOST_TIMES_FILE, check_pickle
from tfm_export.errors import CheckpointError
from tfm_export.pinned_folder import utf8_path
from tfm_export.quotation import shorten, shorten_all

MOST_PICKLE_BYTES = 16_000_000  # of a pickle that is only looked at to name what it needs
MOST_PICKLES = 5  # of the old format: a number, a version, a system, the contents, the names of storages
MOST_VALUES = 20_000_000  # written out: a small pickle can refer to its parts ever again
# What PyTorch's reader, zipfile and zlib raise where they stumble over something in a damaged file.
DAMAGED = (
    RuntimeError, EOFError, LookupError, ValueError, TypeError, AttributeError, OSError, AssertionError, struct.error,
    zlib.error, zipfile.BadZipFile,
)  # fmt: skip
ENDLESS = "(refers to its own parts again and again)"  # in the place of a container of more values than that
AGAIN = "copy it again and compare its size and hash with the original's"


class StandIn:
    """Takes the place of an object whose class is not run: it keeps what it would have been made of."""

    def __new__(cls, *_arguments: Any) -> Self:
        """Whatever the arguments, an object without any state."""
        return super().__new__(cls)

    def __init__(self, *_arguments: Any) -> None:
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def plain(self) -> Any:
        """The plain value that it stands for."""
        return self.state


class Namespace(StandIn):
    """argparse.Namespace, and other objects of which the attributes are of use: these."""


class Container(StandIn):
    """An OmegaConf container: its content. One that refers to other values by name keeps the reference as text."""

    def plain(self) -> Any:
        """A dictionary or a list."""
        return self.state.get("_content") if isinstance(self.state, dict) else None


class Node(StandIn):
    """An OmegaConf leaf: its value."""

    def plain(self) -> Any:
        """The value."""
        return self.state.get("_val") if isinstance(self.state, dict) else None


class Nothing(StandIn):
    """Types named in annotations, and other things that are of no use here."""

    def plain(self) -> Any:
        """None."""
        return None


class NumpyType(StandIn):
    """numpy.dtype: its code, such as "f8"."""

    def __new__(cls, code: Any = "", *_arguments: Any) -> Self:
        """A type of this code."""
        made = object.__new__(cls)
        made.code = code if isinstance(code, str) else ""
        return made

    code: str

    def plain(self) -> Any:
        """The code."""
        return self.code


NUMPY_FORMATS = {"f8": "<d", "f4": "<f", "i8": "<q", "i4": "<i", "b1": "<?", "u1": "<B", "i2": "<h", "u8": "<Q"}


def _numpy_scalar(kind: Any, content: Any = b"") -> Any:
    """The number that numpy would have made of its bytes; None for types that no checkpoint needs."""
    code = NUMPY_FORMATS.get(getattr(kind, "code", ""))
    if code is None or not isinstance(content, bytes) or len(content) != struct.calcsize(code):
        return None
    return struct.unpack(code, content)[0]


def _encoded(text: str, encoding: str = "latin1") -> bytes:
    """How pickles of protocol 2 hold bytes."""
    return text.encode("latin1" if encoding in {"latin1", "latin-1"} else "utf-8")


def _empty_dictionary(*_arguments: Any) -> dict[Any, Any]:
    """Of a subclass of dict: its items follow in the pickle."""
    return {}


def _joined_path(*parts: Any) -> str:
    return "/".join(part for part in parts if isinstance(part, str))


def _stand_ins() -> dict[str, Callable[..., Any]]:
    """What is put in the place of each class or function, by its full name."""
    found: dict[str, Callable[..., Any]] = {
        "argparse.Namespace": Namespace,
        "_codecs.encode": _encoded,
        "collections.defaultdict": _empty_dictionary,
        "pytorch_lightning.utilities.parsing.AttributeDict": _DictionaryType,
        "lightning.pytorch.utilities.parsing.AttributeDict": _DictionaryType,
        "lightning_fabric.utilities.data.AttributeDict": _DictionaryType,
        "lightning.fabric.utilities.data.AttributeDict": _DictionaryType,
        "numpy.dtype": NumpyType,
        "omegaconf.dictconfig.DictConfig": Container,
        "omegaconf.listconfig.ListConfig": Container,
        "typing.Any": Nothing,
    }
    # The fields of OpenNMT-py 2, which hold its vocabularies, and what they name.
    for module in ("torchtext", "torchtext.legacy"):
        for name in ("data.field.Field", "data.field.RawField", "vocab.Vocab"):
            found[f"{module}.{name}"] = Namespace
        for name in ("data.utils._split_tokenizer", "vocab._default_unk_index"):
            found[f"{module}.{name}"] = Nothing
    found["onmt.inputters.text_dataset.TextMultiField"] = Namespace
    found["onmt.inputters.text_dataset._feature_tokenize"] = found["functools.partial"] = Nothing
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        found[f"{module}.scalar"] = _numpy_scalar
    for name in ("ContainerMetadata", "Metadata"):
        found[f"omegaconf.base.{name}"] = Nothing
    for name in ("Any", "String", "Integer", "Float", "Boolean", "Enum", "Path", "Bytes"):
        found[f"omegaconf.nodes.{name}Node"] = Node
    for name in ("dict", "list", "int", "float", "str", "bool", "tuple", "object"):
        found[f"builtins.{name}"] = found[f"__builtin__.{name}"] = Nothing
    for module in ("pathlib", "pathlib._local"):
        for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath"):
            found[f"{module}.{name}"] = _joined_path
    return found


class _DictionaryType:
    """A subclass of dict: making one gives a plain dictionary."""

    def __new__(cls, *_arguments: Any) -> dict[Any, Any]:  # type: ignore[misc]
        return {}


STAND_INS = _stand_ins()


def load_pickle(path: Path) -> Any:
    """The contents of a file that torch.save wrote, if they are tensors, plain values and known settings.

    Raises:
        CheckpointError: it is damaged or something else, it wants code to be executed, or it would grow beyond measure.
    """
    archive = _is_archive(path)
    try:
        if archive:
            _check_archive(path)
        else:
            _check_start(path)
        _check_growth(path, archive=archive)
        with warnings.catch_warnings(), torch.serialization.safe_globals([(f, n) for n, f in STAND_INS.items()]):
            # What cannot be read is refused below, and quantised weights where they are used.
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            warnings.filterwarnings("ignore", module=r"torch\._utils")
            with utf8_path(path) as name:
                state = torch.load(name, map_location="cpu", weights_only=True, mmap=archive)
        return _Plain(path).of(state)
    except pickle.UnpicklingError as problem:
        raise _refusal(path, str(problem)) from problem
    except MemoryError as problem:
        raise out_of_memory(path) from problem
    except DAMAGED as problem:
        if "can't allocate memory" in str(problem):
            raise out_of_memory(path) from problem
        raise CheckpointError(
            f"{path} is damaged or not a PyTorch checkpoint: {_first_line(problem)}", AGAIN
        ) from problem


def out_of_memory(path: Path) -> CheckpointError:
    """The error of a file for which there is not enough memory."""
    return CheckpointError(
        f"{path} has {path.stat().st_size:,} bytes, and reading it takes more memory than this process can get",
        "end other programs, allow it more (ulimit -v, the limit of its container), or take a machine with more",
    )


# What people have instead of a checkpoint, by its first bytes.
OTHER_FILES = {
    b"version https://git-lfs": ("a pointer of Git LFS, not the file itself", "git lfs pull"),
    b"\x1f\x8b": ("compressed by gzip", "unpack it"),
    b"BZh": ("compressed by bzip2", "unpack it"),
    b"\xfd7zXZ": ("compressed by xz", "unpack it"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "unpack it"),
    b"\x93NUMPY": ("one array of numpy without a name", "save the weights by name: numpy.savez or torch.save"),
    b"\x89HDF": ("a file of HDF5", "load it with the library that wrote it, and save the weights with torch.save"),
    b"GGUF": ("a file of GGUF", "take the file that it was converted from"),
    b"<": ("a web page", "download the file itself"),
    b"PK": ("an archive that is cut short or damaged", AGAIN),
}
EXPECTED = "expected a file written by torch.save, safetensors or numpy.savez"


def _is_archive(path: Path) -> bool:
    """Whether PyTorch takes it for an archive, which is by its first bytes."""
    with open(path, "rb") as file:
        return file.read(2) == b"PK" and zipfile.is_zipfile(path)


def _check_growth(path: Path, *, archive: bool) -> None:
    """Refuse what would take more memory than its own size accounts for."""
    size = path.stat().st_size
    if archive:
        check_pickle(path, io.BytesIO(_archived_pickle(path)), size, STAND_INS)
        return
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        readable = cast("IO[bytes]", mapped)  # which gives no more than there is, however much is asked for
        storages = check_pickle(path, readable, size, STAND_INS, pickles=MOST_PICKLES)
    if (wanted := sum(storages.values())) > size:
        raise CheckpointError(
            f"{path} is damaged or cut short: its tensors take {wanted:,} bytes, and it has {size:,}", AGAIN
        )


def _check_start(path: Path) -> None:
    """Refuse what is no pickle before PyTorch's reader, whose message would be of no help, stumbles over it."""
    with open(path, "rb") as file:
        start = file.read(4096)
    for mark, (found, hint) in OTHER_FILES.items():
        if start.startswith(mark):
            raise CheckpointError(f"{path} is {found}; {EXPECTED}", hint)
    if start[:1] != b"\x80":  # pickles begin so since Python 2.3
        text = all(byte >= 32 or byte in b"\t\n\r\f" for byte in start)
        found = "a text file" if text else "of an unknown kind"
        raise CheckpointError(f"{path} is {found}; {EXPECTED}", "name the checkpoint's file")


def _check_archive(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        pickles = [name for name in names if name.lower().endswith("data.pkl")]
        if not any(name.endswith("data.pkl") for name in pickles):
            raise CheckpointError(f"{path} is a zip archive without data.pkl; {EXPECTED}", "name the checkpoint's file")
        if any(name.endswith("constants.pkl") for name in names):
            raise CheckpointError(
                f"{path} is a TorchScript archive, which holds code: refused",
                "save the weights alone: torch.save(model.state_dict(), ...), or those of torch.jit.load(...)",
            )
        if twice := sorted({name for name in names if names.count(name) > 1} if len(names) < 100_000 else ()):
            raise CheckpointError(f"{path} has several entries named {shorten_all(twice)}: refused", AGAIN)
        if len(pickles) > 1:
            raise CheckpointError(f"{path} has several pickles, {shorten_all(pickles)}: refused", AGAIN)
        if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
            raise CheckpointError(
                f"{path} is a compressed archive; torch.save writes none, and it may unpack to any size: refused",
                "save the weights with torch.save",
            )


class _Plain:
    """Turns stand-ins into plain values and holds values and tensors to the size of their file.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        size = path.stat().st_size
        self.path, self.limit, self.bytes = path, MOST_TIMES_FILE * size, 0
        self.most_text = LEAST_BYTES + self.limit
        self.done: dict[int, tuple[Any, int, int]] = {}
        self.kept: list[Any] = []  # what ids were taken of must stay

    def of(self, value: Any) -> Any:
        """The plain value; containers are new, and one that occurs twice stays one.

        Raises:
            CheckpointError: tensors are larger than the file, or containers are in each other in too many levels.
        """
        return self._sized(value, 0)[0]

    def _sized(self, value: Any, level: int) -> tuple[Any, int, int]:
        """The plain value, and how many values and characters it is, written out with what occurs twice twice."""
        if isinstance(value, str | bytes | bytearray):
            return value, 1, len(value)
        if isinstance(value, Tensor):
            self._weigh(value)
        if not isinstance(value, StandIn | dict | list | tuple | set):
            return value, 1, 0
        if level > MOST_LEVELS:
            raise CheckpointError(f"{self.path} has more than {MOST_LEVELS} containers in each other: refused")
        if id(value) not in self.done:
            self.kept.append(value)
            self.done[id(value)] = None, 1, 0  # of a value that contains itself
            self.done[id(value)] = self._converted(value, level + 1)
        return self.done[id(value)]

    def _converted(self, value: Any, level: int) -> tuple[Any, int, int]:
        if isinstance(value, StandIn):
            return self._sized(value.plain(), level)
        parts = [self._sized(item, level) for item in (value.values() if isinstance(value, dict) else value)]
        items = [item for item, _, _ in parts]
        count = 1 + len(value) + sum(count for _, count, _ in parts)
        characters = sum(characters for _, _, characters in parts)
        if isinstance(value, dict):
            characters += sum(len(key) for key in value if isinstance(key, str))
        if count > MOST_VALUES or characters > self.most_text:
            return ENDLESS, 1, len(ENDLESS)
        if isinstance(value, dict):
            return dict(zip(value, items, strict=True)), count, characters
        return (type(value)(items) if type(value) in {list, tuple, set} else items), count, characters

    def _weigh(self, tensor: Tensor) -> None:
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
            return  # refused where it is used
        stored = tensor.untyped_storage().nbytes()
        if tensor.numel() * tensor.element_size() > stored:
            raise CheckpointError(
                f"{self.path} holds a tensor of shape {list(tensor.shape)} made of {stored:,} bytes: it would grow "
                "beyond its file: refused",
                "save tensors with .contiguous()",
            )
        self.bytes += tensor.numel() * tensor.element_size()
        if self.bytes > self.limit:
            raise CheckpointError(
                f"{self.path} has tensors of more than {MOST_TIMES_FILE} times its own size: refused",
                "save every tensor with .clone()",
            )


def _refusal(path: Path, message: str) -> CheckpointError:
    classes = classes_needed(path)
    if classes:
        return CheckpointError(
            f"{path} is a pickle that needs {shorten_all(classes, 40)}; loading it could run code: refused",
            "save the weights alone: torch.save(model.state_dict(), ...), where those classes can be imported",
        )
    return CheckpointError(f"{path} is damaged or not a PyTorch checkpoint: {_first_line(message)}", AGAIN)


def classes_needed(path: Path) -> list[str]:
    """The functions and classes that a pickle names beyond those that are read, found without executing any of it."""
    names: set[str] = set()
    strings: list[str] = []
    try:
        content = io.BytesIO(_pickle_bytes(path))
        for _ in range(MOST_PICKLES):  # the old format has several, one after the other
            for opcode, argument, _ in pickletools.genops(content):
                if opcode.name == "GLOBAL":
                    names.add(str(argument).replace(" ", "."))
                elif opcode.name == "STACK_GLOBAL" and len(strings) > 1:
                    names.add(".".join(strings[-2:]))
                elif isinstance(argument, str):
                    strings.append(argument)
    except (*DAMAGED, StopIteration):
        pass  # not a pickle to its end: what was found so far is told
    harmless = re.compile(r"torch\._utils\._rebuild.*|torch\.\w+Storage|collections\.(OrderedDict|Counter)")
    return sorted(name for name in names - STAND_INS.keys() if not harmless.fullmatch(name))


def _pickle_bytes(path: Path) -> bytes:
    """The pickle in a file of torch.save, without the tensors' data; or the start of any other file."""
    if _is_archive(path):
        return _archived_pickle(path)[:MOST_PICKLE_BYTES]
    with open(path, "rb") as file:
        return file.read(MOST_PICKLE_BYTES)


def _archived_pickle(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def _first_line(problem: object) -> str:
    """What a reader says of a file, without PyTorch's advice to load it as code."""
    text = re.sub(r"In PyTorch 2\.6.*?trusted source\.?", "", str(problem), flags=re.DOTALL)
    lines = [line.strip() for line in text.strip().splitlines() if "weights_only" not in line]
    return shorten(next((line for line in lines if line), type(problem).__name__), 400)
