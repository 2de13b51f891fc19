"""Writing bundles, and parts of them, so that nothing half-written is ever seen.

A new bundle, a new part such as onnx/w8, or a new file of a part is made in a hidden sibling and renamed. Whoever
writes holds a lock on that, so that what a killed process left behind can be told from what is being written, and goes.
"""

from __future__ import annotations

import errno
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tfm_export.bundle import MANIFEST, Bundle, FileEntry, Manifest
from tfm_export.errors import BundleError

NEW, OLD = ".new.", ".old."  # in the names of what is being written, and of what is being replaced
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk, a share of it, a file: all as large as they may be

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: leftovers of killed processes stay, and two writers must not meet
    fcntl = None


def check_target(path: Path, *, force: bool, inputs: Sequence[Path] = ()) -> None:
    """Make sure that a new bundle may be written to `path`; called before any work is done.

    A bundle that was there and that a killed process has left moved away is put back before.

    Args:
        path: where the bundle will be.
        force: replace a bundle that is there.
        inputs: what it is made from, which must not go with the bundle that is replaced.

    Raises:
        BundleError: something is there and may not be overwritten, or the folder around it cannot be written to.
    """
    hint = "another folder with -o"
    try:
        _restore(path.resolve())
        exists = path.exists()
    except OSError as problem:
        raise BundleError(f"{path} cannot be written: {problem.strerror}", hint) from problem
    if exists and not force:
        raise BundleError(f"{path} exists", f"--force to replace it, or {hint}")
    if exists and not (path / MANIFEST).is_file() and (not path.is_dir() or any(path.iterdir())):
        raise BundleError(f"{path} exists and is not a bundle: it is not replaced even with --force", hint)
    if lost := [str(file) for file in inputs if file.resolve().is_relative_to(path.resolve())]:
        raise BundleError([f"{file} lies in {path}, and would be replaced with it" for file in lost], hint)
    parent = path.resolve().parent
    while not os.path.lexists(parent):
        parent = parent.parent
    if not parent.is_dir():
        raise BundleError(f"{parent} is not a folder", hint)
    if not os.access(parent, os.W_OK):
        raise BundleError(f"{parent} cannot be written to", hint)


@contextmanager
def new_bundle(path: Path, manifest: Manifest, *, force: bool) -> Iterator[Bundle]:
    """A bundle to fill, in a sibling folder that takes the place of `path` when the block ends without an error.

    `check_target` comes first, before any work is done; what has changed since then is seen before the bundle is put
    in place.

    Args:
        path: where the bundle will be.
        manifest: what is known of it so far.
        force: replace a bundle that is there.

    Raises:
        BundleError: something is there now that may not be overwritten, or the disk is full.
    """
    path = path.resolve()  # a link stays, and what it points to is replaced
    with _failed_writing_told(path, "use another disk with -o"):
        path.parent.mkdir(parents=True, exist_ok=True)
        _restore(path)  # before what killed processes left behind is removed
        with _staging(path, _empty_folder) as staging:
            bundle = Bundle(staging, manifest)
            yield bundle
            bundle.save()
            check_target(path, force=force)  # somebody else may have been faster
            _put_in_place(staging, path)


@dataclass
class Part:
    """A folder that joins a bundle: a variant or an engine.

    Attributes:
        path: where to write its files.
        purposes: what each file is for, by its name in the folder; all that are not named here are dropped.
        record: gives the bundle's manifest what there is to say of the part.
    """

    path: Path
    purposes: dict[str, str] = field(default_factory=dict)
    record: Callable[[Manifest], Manifest] = lambda manifest: manifest


@contextmanager
def new_part(bundle: Bundle, name: str, *, force: bool, forget: Callable[[Manifest], Manifest]) -> Iterator[Part]:
    """A part of a bundle to fill; it is put in place, and into the manifest, when the block ends without an error.

    Several processes may add parts to one bundle at the same time: the manifest is read again, under a lock, before
    it is changed. Whoever has the bundle open goes on with the old files. `check_part` comes first, before any work is
    done; what has changed since then is seen under the lock.

    Args:
        bundle: an open bundle; its manifest is the new one afterwards.
        name: the folder below the bundle, such as "onnx/w8".
        force: replace the part that is there.
        forget: takes the old part out of a manifest, before its files go.

    Raises:
        BundleError: the bundle has that part and may not lose it, cannot be written to, or the disk is full.
    """
    target = bundle.path.resolve() / name
    with _failed_writing_told(bundle.path, "copy the bundle to another disk"):
        target.parent.mkdir(exist_ok=True)
        _sweep(target.parent, "*")  # of all parts: nobody may ever want to replace the one that was being written
        with _staging(target, _empty_folder) as staging:
            part = Part(staging)
            yield part
            for file in staging.iterdir():
                if file.name in part.purposes:
                    os.chmod(file, 0o644)  # readable by the user that the service runs as
                else:
                    file.unlink()
            with _locked(bundle.path):
                current = Bundle.open(bundle.path, check_hashes=False, unchecked=name.partition("/")[0])
                check_part(current, name, force=force)  # somebody else may have been faster
                if _has_part(current, name):
                    files = {n: entry for n, entry in current.manifest.files.items() if not n.startswith(f"{name}/")}
                    current.manifest = replace(forget(current.manifest), files=files)
                    current.save()
                _put_in_place(staging, target)
                current.add_files({f"{name}/{file}": purpose for file, purpose in part.purposes.items()})
                current.manifest = part.record(current.manifest)
                current.save()
            bundle.manifest = current.manifest


def check_part(bundle: Bundle, name: str, *, force: bool) -> None:
    """Make sure that a part may be added to a bundle; called before any work is done.

    Args:
        bundle: an open bundle.
        name: the folder below the bundle, such as "onnx/w8".
        force: replace the part that is there.

    Raises:
        BundleError: the bundle has that part and may not lose it, or cannot be written to.
    """
    if _has_part(bundle, name) and not force:
        raise BundleError(f"{bundle.path} has {name} already", "--force to replace it")
    if not os.access(bundle.path, os.W_OK):
        raise BundleError(f"{bundle.path} cannot be written to", "copy the bundle to where this user may write")


@contextmanager
def new_file(bundle: Bundle, name: str, purpose: str, *, force: bool) -> Iterator[Path]:
    """A file to write; it joins a part of a bundle, and its manifest, when the block ends without an error.

    `check_file` comes first, before any work is done; what has changed since then is seen under the bundle's lock.

    Args:
        bundle: an open bundle; its manifest is the new one afterwards.
        name: the file below the bundle, such as "onnx/w8/generate.onnx".
        purpose: what it is for.
        force: replace the file that is there.

    Returns:
        Where to write it: a hidden file beside its place, so that it can refer to the part's other files.

    Raises:
        BundleError: the bundle has that file and may not lose it, its part was replaced meanwhile, it cannot be written
            to, or the disk is full.
    """
    target = bundle.path.resolve() / name
    with _failed_writing_told(bundle.path, "copy the bundle to another disk"), _staging(target, _empty_file) as staging:
        yield staging
        with _locked(bundle.path):
            current = Bundle.open(bundle.path, check_hashes=False)
            check_file(current, name, force=force)  # somebody else may have been faster
            if not staging.exists() or _beside(current, name) != _beside(bundle, name):
                raise BundleError(f"{target.parent} was replaced while {target.name} was made for it", "once more")
            if name in current.manifest.files:
                files = {n: entry for n, entry in current.manifest.files.items() if n != name}
                current.manifest = replace(current.manifest, files=files)
                current.save()
            os.chmod(staging, 0o644)  # readable by the user that the service runs as
            os.replace(staging, target)
            current.add_files({name: purpose})
            current.save()
        bundle.manifest = current.manifest


def check_file(bundle: Bundle, name: str, *, force: bool) -> None:
    """Make sure that a file may be added to a part of a bundle; called before any work is done.

    Raises:
        BundleError: the bundle has that file and may not lose it, or cannot be written to.
    """
    if name in bundle.manifest.files and not force:
        raise BundleError(f"{bundle.path} has {name} already", "--force to replace it")
    for folder in (bundle.path, (bundle.path / name).parent):
        if not os.access(folder, os.W_OK):
            raise BundleError(f"{folder} cannot be written to", "copy the bundle to where this user may write")


def _beside(bundle: Bundle, name: str) -> dict[str, FileEntry]:
    """The other files of a file's part."""
    folder = name.rpartition("/")[0]
    return {n: entry for n, entry in bundle.manifest.files.items() if n.startswith(f"{folder}/") and n != name}


def _has_part(bundle: Bundle, name: str) -> bool:
    return any(file.startswith(f"{name}/") for file in bundle.manifest.files)


@contextmanager
def _failed_writing_told(path: Path, hint: str) -> Iterator[None]:
    """Tell what the system said of writing to `path` or beside it; errors of anything else are left as they are.

    A full disk fails in `write`, whose errors name no file: one without a name counts as ours if it says so.
    """
    try:
        yield
    except OSError as problem:
        full = problem.errno in FULL
        if not (_is_beside(problem.filename, path) if problem.filename else full):
            raise
        place = path if path.is_dir() else path.parent
        free = f" ({shutil.disk_usage(place).free / 1e6:,.0f} MB free there)" if full and place.is_dir() else ""
        raise BundleError(
            f"{path} could not be written: {problem}{free}", f"make room, or {hint}" if full else hint
        ) from problem


def _is_beside(file: Any, path: Path) -> bool:
    """Whether an error's file is `path`, the folder around it, or in or beside `path` under a hidden name of ours."""
    if not isinstance(file, str | bytes):  # a descriptor
        return False
    target, found = Path(os.path.realpath(path)), Path(os.path.realpath(os.fsdecode(file)))
    ours = (f".{target.name}{NEW}", f".{target.name}{OLD}")
    if found == target or target in found.parents or found in target.parents:
        return True
    return target.parent in found.parents and found.relative_to(target.parent).parts[0].startswith(ours)


def _empty_folder(parent: Path, prefix: str) -> Path:
    return Path(tempfile.mkdtemp(dir=parent, prefix=prefix))


def _empty_file(parent: Path, prefix: str) -> Path:
    descriptor, name = tempfile.mkstemp(dir=parent, prefix=prefix)
    os.close(descriptor)
    return Path(name)


@contextmanager
def _staging(path: Path, make: Callable[[Path, str], Path]) -> Iterator[Path]:
    """Something hidden beside `path`, locked while it lives; what killed processes left behind is removed.

    Args:
        path: where it will be.
        make: makes it in a folder, with a name that begins so.
    """
    _sweep(path.parent, glob.escape(path.name))
    with _locked_new(path.parent, f".{path.name}{NEW}", make) as staging:
        yield staging


@contextmanager
def _locked_new(parent: Path, prefix: str, make: Callable[[Path, str], Path]) -> Iterator[Path]:
    """Something new in a folder, locked and there as long as the block runs, unless that gives it another name."""
    while True:
        made = make(parent, prefix)
        with ExitStack() as locks:
            with suppress(FileNotFoundError):
                locks.enter_context(_locked(made))
            if not made.exists():  # another process took it for a leftover before it was locked
                continue
            try:
                yield made
            finally:
                _remove(made)
            return


def _sweep(parent: Path, name: str) -> None:
    """Remove what killed processes left behind of a name, which may be a pattern."""
    for kind in (NEW, OLD):
        for leftover in parent.glob(f".{name}{kind}*"):
            _remove_if_abandoned(leftover)


def _restore(path: Path) -> None:
    """Put a bundle back that was moved away to be replaced, by a process that was killed before it put the new one."""
    for old in path.parent.glob(f".{glob.escape(path.name)}{OLD}*"):
        with suppress(OSError), _locked(old, wait=False):  # otherwise it is being replaced right now
            if not path.exists() and (old / path.name).exists():
                os.rename(old / path.name, path)


def _remove(staging: Path) -> None:
    if staging.is_dir():
        shutil.rmtree(staging, ignore_errors=True)
    else:
        staging.unlink(missing_ok=True)


def _remove_if_abandoned(staging: Path) -> None:
    """Remove what no living process holds the lock of."""
    try:
        with _locked(staging, wait=False):
            _remove(staging)
    except OSError:
        return  # it is being written to, or is another user's


@contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock on a folder or a file.

    Raises:
        OSError: somebody else has it, and this is not to wait.
    """
    if fcntl is None:
        if not wait:
            raise OSError
        yield
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)


def _put_in_place(staging: Path, path: Path) -> None:
    """Rename a finished folder to `path`; what is there goes, once the new one has its place."""
    os.chmod(staging, 0o755)
    if not path.exists():
        os.rename(staging, path)
        return
    with _locked_new(path.parent, f".{path.name}{OLD}", _empty_folder) as old:
        os.rename(path, old / path.name)
        try:
            os.rename(staging, path)
        except BaseException:
            os.rename(old / path.name, path)
            raise
