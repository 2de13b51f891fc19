"""The bundle: a folder with everything that a service needs to run a model, and a manifest that vouches for it.

    tfm_bundle/
      bundle.json       the manifest
      tokenizer/        whatever turns text into ids and back
      onnx/<variant>/   encoder.onnx, decoder_step.onnx and their weights
      golden.jsonl      inputs with what PyTorch gave for them
      reports/          what was measured

`tfm_export.staging` writes bundles and adds parts to them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tfm_export.errors import BundleError
from tfm_export.field_types import fact_problems, field_problems
from tfm_export.graph import Dimensions
from tfm_export.json_text import parse_json
from tfm_export.pinned_folder import stamp
from tfm_export.precision import PRECISIONS
from tfm_export.quotation import quote, shorten
from tfm_export.text_files import read_text

FORMAT_VERSION = 1
MANIFEST = "bundle.json"
MOST_BYTES = 64_000_000  # of a manifest
GOLDEN = "golden.jsonl"
TOKENIZER = "tokenizer"
DEFAULT_PATH = Path("tfm_bundle")
# What facts are, where a manifest has them.
VARIANT_FACTS = {
    "weights": str,
    "compute": str,
    "target": str,
    "quantized": str,
    "agreement": float | None,
    "metric": dict[str, Any] | None,
    "speed": float,
    "reduced_range": bool,
    "int8_encoder": bool,
}
GOLDEN_FACTS = {"synthetic": bool, "max_length": int}
MODEL_FACTS = {"notes": list[str], "settings": dict[str, Any]}
ENGINE_FACTS = {
    **dict.fromkeys(("variant", "compute", "flavor", "flavor_version", "attention"), str),
    **dict.fromkeys(("max_batch_size", "max_beam_size", "max_source_length", "max_target_length"), int),
    "compute_capabilities": list[str],
    "capacities": list[int],
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The longest sequences a model takes.

    Attributes:
        max_source_length: tokens of a source, its end token included.
        max_target_length: tokens of a target, the start token not counted, the end token included; positions
            0..max_target_length-1 are all in the position table.
    """

    max_source_length: int
    max_target_length: int


@dataclass(frozen=True, kw_only=True)
class SourceIds:
    """The ids of sources that are not text.

    Attributes:
        pad: fills the end of short sources.
        bos: the start token; None where sources have none.
        eos: the end token; None where sources have none.
        unk: stands for unknown tokens; None where the vocabulary has no such token.
    """

    pad: int
    bos: int | None
    eos: int | None
    unk: int | None


@dataclass(frozen=True, kw_only=True)
class SpecialIds:
    """The ids that are not text: those of targets, and those of sources where they are others.

    Attributes:
        pad: fills the end of short targets.
        bos: what the decoder starts from.
        eos: ends a target.
        source_ends_with_eos: sources get their end token appended.
        unk: stands for unknown tokens; None where the vocabulary has no such token.
        source_starts_with_bos: sources get their start token put in front.
        source: the ids of sources; None where they are those of targets.

    Raises:
        ValueError: sources are to have a start or end token, and there is none.
    """

    pad: int
    bos: int
    eos: int
    source_ends_with_eos: bool
    unk: int | None = None
    source_starts_with_bos: bool = False
    source: SourceIds | None = None

    def __post_init__(self) -> None:
        if self.source == SourceIds(pad=self.pad, bos=self.bos, eos=self.eos, unk=self.unk):
            object.__setattr__(self, "source", None)  # equal sets are equal however they were given
        for name, needed in (("bos", self.source_starts_with_bos), ("eos", self.source_ends_with_eos)):
            if needed and getattr(self.for_sources, name) is None:
                raise ValueError(f"sources need their {name}, and have none")

    @property
    def for_sources(self) -> SourceIds:
        """The ids of sources."""
        return self.source or SourceIds(pad=self.pad, bos=self.bos, eos=self.eos, unk=self.unk)

    def wrap_source(self, ids: Sequence[int]) -> list[int]:
        """Put the start and end token around the ids of a source text, where the model wants them."""
        source = self.for_sources
        start = [source.bos] if self.source_starts_with_bos and source.bos is not None else []
        end = [source.eos] if self.source_ends_with_eos and source.eos is not None else []
        return [*start, *ids, *end]


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """How the model is decoded unless a request says otherwise.

    Attributes:
        max_length: the longest target, end token included.
        beam_size: hypotheses kept at each step; 1 is greedy.
        length_penalty: the exponent by which a hypothesis's length divides its score.
        options: further decoding options by their names, such as a forced first token.
    """

    max_length: int
    beam_size: int = 1
    length_penalty: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """What the manifest says of a file: how to tell that it is the right one, and what it is for."""

    sha256: str
    bytes: int
    purpose: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of bundle.json.

    Attributes:
        dimensions: the sizes that the graphs show.
        limits: the longest sequences.
        special_ids: the ids that are not text.
        generation: decoding defaults.
        variants: the precisions under onnx/, each with facts about its making.
        golden: number of golden inputs, and whether they are synthetic.
        model: the model's configuration as its checkpoint gave it, for people.
        tools: versions of what made the bundle.
        files: every file that a service needs, by path relative to the bundle; not the manifest, not reports/.
        engines: TensorRT engines by name.
    """

    dimensions: Dimensions
    limits: Limits
    special_ids: SpecialIds
    generation: GenerationDefaults
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    golden: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    tools: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """The text of bundle.json."""
        state = asdict(self)
        if self.special_ids.source is None:
            del state["special_ids"]["source"]  # older versions of tfm-export do not know it
        return json.dumps({"format_version": state.pop("format_version"), **state}, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, path: Path) -> Manifest:
        """Read bundle.json.

        Args:
            text: its contents.
            path: its path, for messages.

        Raises:
            BundleError: it is not JSON, is of a newer format, or lacks a field or has one that it should not.
        """
        try:
            state = parse_json(text)
        except ValueError as problem:
            raise BundleError(f"{path} is not JSON: {problem}", "export the bundle again") from None
        version = state.get("format_version") if isinstance(state, dict) else None
        if not isinstance(version, int):
            raise BundleError(f"{path} has no format_version: it is not the manifest of a bundle")
        if version > FORMAT_VERSION:
            raise BundleError(
                f"{path} has format version {version}; this tfm-export reads up to {FORMAT_VERSION}",
                "update tfm-export, or export the bundle again with this version",
            )
        try:
            manifest = cls(
                **{
                    **state,
                    "dimensions": Dimensions(**state["dimensions"]),
                    "limits": Limits(**state["limits"]),
                    "special_ids": _special_ids(state["special_ids"]),
                    "generation": GenerationDefaults(**state["generation"]),
                    "files": {name: FileEntry(**entry) for name, entry in state["files"].items()},
                }
            )
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            expected = ", ".join(f.name for f in fields(cls))
            raise BundleError(
                f"{path} does not have the fields of a manifest ({expected}): {shorten(str(problem))}",
                "export the bundle again",
            ) from None
        if problems := [*manifest.problems()]:
            raise BundleError([f"{path}: {problem}" for problem in problems], "export the bundle again")
        return manifest

    def problems(self) -> Iterator[str]:
        """What has another type than it should, or contradicts itself."""
        parts = {"dimensions": self.dimensions, "limits": self.limits, "special_ids": self.special_ids}
        found = [problem for name, part in parts.items() for problem in field_problems(part, f"{name}.")]
        found += field_problems(self.generation, "generation.")
        found += field_problems(self)
        for name, entry in self.files.items():
            found += field_problems(entry, f"files: {name}: ")
        if found:
            yield from found
            return
        yield from fact_problems(self.golden, GOLDEN_FACTS, "golden.")
        yield from fact_problems(self.model, MODEL_FACTS, "model.")
        for name, facts in self.variants.items():
            if name not in PRECISIONS:
                yield f"variants: {shorten(name)} is no precision; known are {', '.join(PRECISIONS)}"
            yield from fact_problems(facts, VARIANT_FACTS, f"variants: {name}: ")
        for name, facts in self.engines.items():
            yield from fact_problems(facts, ENGINE_FACTS, f"engines: {name}: ")
            yield from (f"engines: {shorten(name)}: it has no {fact}" for fact in ENGINE_FACTS if fact not in facts)
        yield from self._size_problems()

    def _size_problems(self) -> Iterator[str]:
        special, sizes = self.special_ids, self.dimensions
        for part in (self.dimensions, self.limits):
            yield from (f"{name} must be at least 1, found {n}" for name, n in asdict(part).items() if n < 1)
        for name, size in (
            ("pad", sizes.source_vocabulary_size),
            ("bos", sizes.target_vocabulary_size),
            ("eos", sizes.target_vocabulary_size),
        ):
            if not 0 <= getattr(special, name) < size:
                yield f"{name} id {getattr(special, name)} is outside the vocabulary of {size}"
        longest = self.limits.max_target_length
        if not 1 <= self.generation.max_length <= longest:
            yield f"generation.max_length must be from 1 to {longest}, found {self.generation.max_length}"


def _special_ids(state: Mapping[str, Any]) -> SpecialIds:
    source = state.get("source")
    return SpecialIds(**{**state, "source": None if source is None else SourceIds(**source)})


def file_hash(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def rebuild_command(bundle: Path | str, name: str, facts: Mapping[str, Any]) -> str:
    """What to type to build an engine again.

    Args:
        bundle: its path.
        name: of the engine.
        facts: what the manifest says of it.
    """
    words = ["tfm-export trt", shlex.quote(str(bundle)), f"--{facts['variant']}", f"--flavor {facts['flavor']}"]
    if facts["compute"] != facts["variant"]:
        words.append(f"--compute {facts['compute']}")
    if facts["flavor"] == "rtx":
        words.append(f"--compute-capability {','.join(c.replace('.', '') for c in facts['compute_capabilities'])}")
    limits = ("max_batch_size", "max_beam_size", "max_source_length", "max_target_length")
    words += [f"--{limit.replace('_', '-')} {facts[limit]}" for limit in limits]
    words.append(f"--capacity {','.join(map(str, facts['capacities']))}")
    return " ".join([*words, f"--name {name}", "--force"])


class Bundle:
    """A bundle on disk.

    Attributes:
        path: its folder.
        manifest: what bundle.json says.
        folder: where its files are read: another path to the same folder while a model is loaded.
        stamps: of the files that were checked while a model is loaded, by name; see `tfm_export.pinned_folder`.
    """

    def __init__(self, path: Path, manifest: Manifest, *, folder: Path | None = None) -> None:
        self.path, self.manifest, self.folder = path, manifest, folder or path
        self.stamps: dict[str, tuple[int, ...]] = {}

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        check_hashes: bool = True,
        unchecked: str | None = None,
        folder: Path | None = None,
    ) -> Bundle:
        """Read a bundle's manifest and check its files.

        Args:
            path: the folder.
            check_hashes: read every file and compare its hash; otherwise only presence and size are checked.
            unchecked: a folder in it, such as "engines", that is not used: whatever lies there will do.
            folder: where to read, for a path that may come to lead elsewhere; see `tfm_export.pinned_folder`.

        Raises:
            BundleError: naming every file that is missing or altered.
        """
        path = Path(path)
        manifest_path, place = path / MANIFEST, (folder or path) / MANIFEST
        try:
            if place.stat().st_size > MOST_BYTES:
                raise BundleError(f"{manifest_path} has more than {MOST_BYTES:,} bytes: it is no manifest of a bundle")
            text = read_text(place)
        except (FileNotFoundError, NotADirectoryError):
            raise BundleError(
                f"{path} is not a bundle: it has no {MANIFEST}", "tfm-export onnx CHECKPOINT makes one"
            ) from None
        except UnicodeDecodeError:
            raise BundleError(f"{manifest_path} is not text in UTF-8", "export the bundle again") from None
        except OSError as problem:
            raise BundleError(
                f"{manifest_path} cannot be read: {problem.strerror}", "let this user read the bundle"
            ) from problem
        bundle = cls(path, Manifest.from_json(text, manifest_path), folder=folder)
        names = [n for n in bundle.manifest.files if unchecked is None or not n.startswith(f"{unchecked}/")]
        bundle.check(names, hashes=check_hashes)
        return bundle

    def check(self, names: Iterable[str], *, hashes: bool = True) -> None:
        """Make sure that files are there and as the manifest says.

        Args:
            names: the manifest's for them.
            hashes: read them and compare their hashes; otherwise only presence and size are checked.

        Raises:
            BundleError: naming every file that is missing or altered.
        """
        problems = {name: p for name in names if (p := self._problem_of(name, hashes))}
        if problems:
            again = "copy the bundle again with all its files"
            raise BundleError([*problems.values()], f"{self._remedy(problems)}, or {again}")

    def _remedy(self, files: Iterable[str]) -> str:
        """How to make files again: of engines alone, there is no need to export anything."""
        parts = {file.split("/")[1] if file.startswith("engines/") else "" for file in files}
        facts = {name: self.manifest.engines.get(name) for name in sorted(parts)}
        if not all(facts.values()):
            return "export the bundle again"
        return "; ".join(rebuild_command(self.path, name, found) for name, found in facts.items() if found)

    def _problem_of(self, name: str, check_hash: bool) -> str | None:
        entry, path, shown = self.manifest.files[name], self.folder / name, shorten(name)
        # A link to a file elsewhere is fine: caches and volumes are made of links, and the hash tells what it leads to.
        if Path(name).is_absolute() or Path(name).drive or ".." in Path(name).parts:
            return f"{shown} points outside the bundle"
        if not os.path.isfile(path):  # a name that no disk can have is no file; Path.is_file raises
            return f"{shown} is missing ({shorten(entry.purpose)})"
        status = path.stat()
        if status.st_size != entry.bytes:
            return f"{shown} should have {entry.bytes:,} bytes, but has {status.st_size:,}"
        if self.folder is not self.path:
            self.stamps[name] = stamp(status)
        if not os.access(path, os.R_OK):
            return f"{shown} cannot be read by this user"
        if check_hash and file_hash(path) != entry.sha256:
            return f"{shown} was altered: its SHA-256 is not the one in {MANIFEST}"
        return None

    def variant_path(self, variant: str) -> Path:
        """The folder of a variant's graphs.

        Raises:
            BundleError: the bundle has no such variant.
        """
        if variant not in self.manifest.variants:
            found = ", ".join(self.manifest.variants) or "none"
            raise BundleError(f"{self.path} has no variant {quote(variant)}; it has {found}")
        return self.path / "onnx" / variant

    def fastest_variant(self) -> str:
        """The variant that `variant="auto"` stands for on a CPU: the same one each time, on every machine.

        Of the variants that were made for a CPU, and so were faster than fp32 when they were made, the one with the
        largest recorded speed; the first by name where two are level, fp32 where there is none.
        """
        speeds = {name: facts["speed"] for name, facts in self.manifest.variants.items() if "speed" in facts}
        best = min(speeds, key=lambda name: (-speeds[name], name), default="fp32")
        return best if speeds.get(best, 0.0) > 1 else "fp32"

    def add_files(self, purposes: dict[str, str]) -> None:
        """Put files that lie in the bundle's folder into the manifest in memory; `save` writes it.

        Args:
            purposes: what each file is for, by its path relative to the bundle.
        """
        entries = {
            name: FileEntry(
                sha256=file_hash(self.path / name), bytes=(self.path / name).stat().st_size, purpose=purpose
            )
            for name, purpose in purposes.items()
        }
        self.manifest = replace(self.manifest, files={**self.manifest.files, **entries})

    def save(self) -> None:
        """Write the manifest, whole or not at all."""
        write_text(self.path / MANIFEST, self.manifest.to_json())


def write_text(path: Path, text: str) -> None:
    """Write a text file so that it is there whole or not at all, and readable by every user."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all, and readable by every user."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
