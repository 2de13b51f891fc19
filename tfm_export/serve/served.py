"""The models in service, by name and version; replaced while requests run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tfm_export.bundle import MANIFEST
from tfm_export.errors import TfmExportError
from tfm_export.model import Model
from tfm_export.serve.limits import Refusal

LOG = logging.getLogger("tfm_export")

Load = Callable[[Path, str], Model]  # a folder, and the name that observers know the model by


@dataclass(eq=False, kw_only=True)
class Version:
    """A loaded bundle.

    Attributes:
        name: of the model.
        number: of the version.
        path: the bundle's folder.
        stamp: what tells that its manifest was replaced.
        model: loaded and warm.
    """

    name: str
    number: str
    path: Path
    stamp: tuple[int, int, int]
    model: Model


class ServedModels:
    """All models of a server. Safe to use from several threads.

    Args:
        folders: by name: a bundle, or a folder with bundles in folders that are called 1, 2, ...
        load: loads a bundle.
        drain: seconds that a model which was replaced has for what it has taken.

    Attributes:
        problem: an error of the server itself; health fails from then on.
    """

    def __init__(self, folders: dict[str, Path], load: Load, *, drain: float) -> None:
        self._folders, self._load, self._drain = dict(folders), load, drain
        self._versions: dict[str, dict[str, Version]] = {}
        self._lock = threading.Lock()  # of loading; reading needs none
        self.problem: Exception | None = None

    def load_all(self) -> None:
        """Load every model.

        Raises:
            TfmExportError: one cannot be loaded.
        """
        for name in self._folders:
            self.load(name)

    @property
    def names(self) -> list[str]:
        """Of all models, loaded or not."""
        return list(self._folders)

    def version(self, name: str, number: str | None = None) -> Version:
        """A loaded version of a model; the newest unless another is named.

        Raises:
            Refusal: there is none.
        """
        versions = self._versions.get(name)
        if versions is None:
            known = ", ".join(self._versions) or "none"
            status = 503 if name in self._folders else 404
            raise Refusal(status, [f"model {name[:200]!r} is not loaded; loaded are: {known}"])
        if number is None:
            return versions[max(versions, key=int)]
        if number not in versions:
            raise Refusal(404, [f"model {name!r} has no version {number[:20]!r}; there are {', '.join(versions)}"])
        return versions[number]

    def versions(self, name: str) -> list[str]:
        """The numbers of a model's loaded versions."""
        return sorted(self._versions.get(name, ()), key=int)

    @property
    def ready(self) -> bool:
        """Whether all models are loaded and nothing of the server has failed."""
        return self.problem is None and all(name in self._versions for name in self._folders)

    def load(self, name: str) -> None:
        """Load what is new of a model, warm it up, switch to it, and let the old one end what it has taken.

        Raises:
            Refusal: there is no such model.
            TfmExportError: it cannot be loaded; the old one stays in service.
        """
        with self._lock:
            if (folder := self._folders.get(name)) is None:
                raise Refusal(404, [f"there is no model {name[:200]!r}; there are {', '.join(self._folders)}"])
            old, new = self._versions.get(name, {}), dict[str, Version]()
            for number, path in _bundles(folder).items():
                stamp = _stamp(path)
                if number in old and (old[number].path, old[number].stamp) == (path, stamp):
                    new[number] = old[number]
                    continue
                model = self._load(path, name)
                model.warm_up()
                new[number] = Version(name=name, number=number, path=path, stamp=stamp, model=model)
            self._versions[name] = new
            self._end(version for version in old.values() if version not in new.values())

    def unload(self, name: str) -> None:
        """Take a model out of service; what it has taken is answered.

        Raises:
            Refusal: it is not loaded.
        """
        with self._lock:
            if name not in self._versions:
                raise Refusal(404, [f"model {name[:200]!r} is not loaded"])
            self._end(self._versions.pop(name).values())

    def reload_changed(self) -> None:
        """Load what has changed on disk; a model that cannot be loaded is logged, and the old one stays."""
        for name in list(self._versions):
            try:
                found = {number: _stamp(path) for number, path in _bundles(self._folders[name]).items()}
                if found != {number: version.stamp for number, version in self._versions[name].items()}:
                    self.load(name)
                    LOG.info("model %s was loaded again: versions %s", name, ", ".join(self.versions(name)))
            except (TfmExportError, OSError) as problem:
                LOG.warning("model %s stays as it is, since it cannot be loaded again: %s", name, problem)

    def watch(self, folder: Path) -> None:
        """Take in new models of a folder, reload those that have changed, drop those that are gone."""
        found = {path.name: path for path in sorted(folder.iterdir()) if path.is_dir() and _bundles(path, missing=True)}
        for name, path in found.items():
            if name not in self._folders:
                self._folders[name] = path
                try:
                    self.load(name)
                    LOG.info("model %s is in service", name)
                except (TfmExportError, OSError) as problem:
                    del self._folders[name]
                    LOG.warning("model %s cannot be loaded: %s", name, problem)
        for name, path in list(self._folders.items()):
            if path.parent == folder and name not in found and not path.exists():
                del self._folders[name]
                self.unload(name)
                LOG.info("model %s is gone", name)
        self.reload_changed()

    def close(self, drain: float) -> None:
        """End all models; see `Model.close`."""
        for versions in list(self._versions.values()):
            for version in versions.values():
                version.model.close(drain)

    def _end(self, versions: Iterable[Version]) -> None:
        for version in versions:
            threading.Thread(target=version.model.close, args=(self._drain,), daemon=True).start()


def _bundles(folder: Path, *, missing: bool = False) -> dict[str, Path]:
    """The bundles of a model, by version."""
    if (folder / MANIFEST).is_file():
        return {"1": folder}
    found = {}
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name.isascii() and path.name.isdecimal() and (path / MANIFEST).is_file():
                found[path.name] = path
    return found if found or missing else {"1": folder}  # loading it says what is missing


def _stamp(path: Path) -> tuple[int, int, int]:
    state = (path / MANIFEST).stat() if (path / MANIFEST).exists() else None
    return (0, 0, 0) if state is None else (state.st_ino, state.st_mtime_ns, state.st_size)
