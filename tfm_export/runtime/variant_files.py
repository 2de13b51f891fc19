"""The files of a variant, held as they were when it was loaded: what is loaded later is of the same model."""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tfm_export.bundle import MANIFEST, Bundle
from tfm_export.errors import BundleError
from tfm_export.graph import DECODER_STEP, DECODER_STEP_ATTENTION, ENCODER, WEIGHTS
from tfm_export.pinned_folder import stamp

if TYPE_CHECKING:
    from onnxruntime import SessionOptions

# Weights up to here are read into memory. Of the fp32 weights of a model with 94 million parameters (374 MB), copying
# took 1.4 s instead of 0.9 s, 519 MB instead of 287 MB and, at the peak, 936 MB instead of 333 MB; of 22 MB, 0.05 s and
# 11 MB more. A matrix that ONNX Runtime packs anew is in memory in either case.
COPIED_UP_TO = 64_000_000
GRAPHS = (ENCODER, DECODER_STEP, DECODER_STEP_ATTENTION)
_AGAIN = (
    "load the bundle again; write an update to a new folder, then rename it or flip a link, and change no file in it"
)


class VariantFiles:
    """The graphs of a variant, read into memory, and an open descriptor of their weights.

    A folder that is renamed, replaced or deleted changes nothing. Weights that are written to in place are refused, if
    they are read after that.

    Attributes:
        folder: where the graphs are, for messages.

    Args:
        bundle: an open bundle.
        variant: one that it has.
        folder: where the graphs are, for a variant that is not part of the bundle yet.
        graphs: names of their files; those that are not there are left out.
        copy: read the weights into memory; otherwise they are mapped. None for what their size suggests.

    Raises:
        BundleError: a file is not the one that was checked when the bundle was opened.
    """

    def __init__(
        self,
        bundle: Bundle,
        variant: str,
        *,
        folder: Path | None = None,
        graphs: Sequence[str] = GRAPHS,
        copy: bool | None = None,
    ) -> None:
        name = f"onnx/{variant}"
        self.folder = folder or bundle.path / name
        self._place = folder or bundle.folder / name
        self._stamps = {} if folder else {n: bundle.stamps.get(f"{name}/{n}") for n in (*graphs, WEIGHTS)}
        entry = None if folder else bundle.manifest.files.get(f"{name}/{WEIGHTS}")
        self._hash = None if entry is None else entry.sha256
        self._lock, self._descriptor = threading.Lock(), -1
        self._graphs = {n: self._read_graph(n) for n in graphs if (self._place / n).is_file()}
        if (self._place / WEIGHTS).is_file():
            self._descriptor = _open(self._place / WEIGHTS)
            self._close = weakref.finalize(self, os.close, self._descriptor)
            self._loaded = os.fstat(self._descriptor)
            self._compare(WEIGHTS, self._loaded)
            self._copied = self._loaded.st_size <= COPIED_UP_TO if copy is None else copy
            # By the time when another graph is loaded, the place may lead elsewhere. And the file there may be a link.
            self._home = Path(os.path.realpath(self._place / WEIGHTS)).parent

    def __contains__(self, name: str) -> bool:
        """Whether there was such a graph."""
        return name in self._graphs

    def graph(self, name: str) -> bytes:
        """A graph's file.

        Raises:
            FileNotFoundError: there was none.
        """
        if name not in self._graphs:
            raise FileNotFoundError(f"there is no {name}")
        return self._graphs[name]

    def give_weights(self, options: SessionOptions) -> list[bytes]:
        """Tell a session where the weights of its graph are.

        Returns:
            What has to live until the session is made.

        Raises:
            BundleError: they were written to after they had been loaded.
        """
        with self._lock:
            if self._descriptor < 0:
                return []
            if not self._copied and (place := self._mappable()):
                options.add_session_config_entry("session.model_external_initializers_file_folder_path", place)
                return []
            content = self._read_weights()
        options.add_external_initializers_from_files_in_memory([WEIGHTS], [content], [len(content)])
        return [content]

    def after_fork(self) -> None:
        """In a fork: nobody holds the lock there. The open file is that of the parent, and reads as well."""
        self._lock = threading.Lock()

    def close(self) -> None:
        """Let go of the weights' file. Graphs can no longer be loaded."""
        with self._lock:
            if self._descriptor >= 0:
                self._close()
            self._graphs, self._descriptor = {}, -1

    def _mappable(self) -> str | None:
        """A folder whose file of weights is the one that was opened, if there is one that ONNX Runtime takes.

        It takes no link to a file in another folder, and no name that is not UTF-8.
        """
        for place in (self._place, self._home):
            try:
                same = stamp(os.lstat(place / WEIGHTS)) == stamp(self._loaded)
                str(place).encode()
            except (OSError, UnicodeEncodeError):
                continue
            if same:
                return str(place)
        return None

    def _read_graph(self, name: str) -> bytes:
        with open(self._place / name, "rb") as file:
            self._compare(name, os.fstat(file.fileno()))
            return file.read()

    def _read_weights(self) -> bytes:
        """The weights, which must be those that were loaded first."""
        content = _read(self._descriptor, self._loaded.st_size)
        changed = stamp(os.fstat(self._descriptor)) != stamp(self._loaded)
        if changed and hashlib.sha256(content).hexdigest() != self._hash:
            raise BundleError(f"{self.folder / WEIGHTS} was written to after it had been loaded", _AGAIN)
        return content

    def _compare(self, name: str, status: os.stat_result) -> None:
        """Make sure that an open file is the one that was looked at when the bundle was opened."""
        expected = self._stamps.get(name)
        if expected is not None and stamp(status) != expected:
            raise BundleError(f"{self.folder / name} was replaced or written to after {MANIFEST} was read", _AGAIN)


def _read(descriptor: int, size: int) -> bytes:
    """All of a file, whatever its place is: forks of a process share that, and may read at the same time."""
    if not hasattr(os, "pread"):  # Windows, which has no forks
        os.lseek(descriptor, 0, os.SEEK_SET)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    content = os.pread(descriptor, size, 0)  # a gigabyte or two at most
    while len(content) < size and (more := os.pread(descriptor, size - len(content), len(content))):
        content += more
    return content


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))
