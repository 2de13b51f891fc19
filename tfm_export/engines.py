"""What is known of a bundle's TensorRT engines: engines/<name>/engine.json, and whether an engine may be used.

An engine is a plan of the encoder and one of the decoder step for each capacity. It belongs to the graphs that it was
made from, to one version of one TensorRT library, and to some GPUs: whoever loads it makes sure of all three.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeGuard

from tfm_export.bundle import Bundle, rebuild_command
from tfm_export.errors import BackendUnavailable, BundleError
from tfm_export.json_text import parse_json
from tfm_export.precision import FLOATS, PRECISIONS
from tfm_export.quotation import quote
from tfm_export.text_files import read_text

ENGINES = "engines"
ENGINE_FILE = "engine.json"
ENGINE_FORMAT_VERSION = 1
ENCODER_PLAN = "encoder"

FLAVORS = {"tensorrt": "TensorRT", "rtx": "TensorRT-RTX"}
ATTENTION = ("fused", "decomposed")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

# Of an input: the smallest shape, the one to optimise for, the largest.
Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def step_plan(capacity: int) -> str:
    """The name of the decoder step's plan with so many slots."""
    return f"decoder_step_{capacity}"


def plan_file(plan: str) -> str:
    """The file of a plan, in the engine's folder."""
    return f"{plan}.plan"


@dataclass(frozen=True, kw_only=True)
class EngineRecord:
    """The contents of engine.json.

    Attributes:
        name: of the engine, its folder under engines/.
        flavor: "tensorrt" or "rtx".
        flavor_version: of that library.
        compute_capabilities: of the GPUs that it runs on, such as "8.0".
        variant: of the bundle, that it was made from.
        compute: what is computed in where nothing is quantised: "fp32", "fp16" or "bf16".
        float_type: the dtype of caches and cross-attention keys and values: "float32", "float16" or "bfloat16".
        max_batch_size: the most sentences at once.
        max_beam_size: the most queries of a step that are optimised for; prompts may be as long as the longest target.
        max_source_length: tokens of a source.
        max_target_length: tokens of a target; also the most queries of any step.
        capacities: slots a sentence, one plan of the decoder step for each, the smallest first.
        plans: the file of each plan, by its name.
        onnx_hashes: the SHA-256 of the files that it was made from, by their path in the bundle.
        head_size_padded: the last axis of caches and cross-attention keys and values in the plans.
        attention: "fused", one kernel each; or "decomposed".
        profiles: of every plan, a mapping from inputs to their shapes for each optimisation profile.
        build_seconds: how long the build took.
        proofs: what was found of every plan: layers by type, bytes.
        agreement: the share of golden inputs for which the graphs that were compiled give PyTorch's tokens on a CPU, by
            way of decoding; nothing where that was not tried.
        tools: versions of what made it.
        format_version: of engine.json.
    """

    name: str
    flavor: str
    flavor_version: str
    compute_capabilities: tuple[str, ...]
    variant: str
    compute: str
    float_type: str
    max_batch_size: int
    max_beam_size: int
    max_source_length: int
    max_target_length: int
    capacities: tuple[int, ...]
    plans: dict[str, str]
    onnx_hashes: dict[str, str]
    head_size_padded: int
    attention: str
    profiles: dict[str, tuple[dict[str, Shapes], ...]]
    build_seconds: float
    proofs: dict[str, dict[str, Any]] = field(default_factory=dict)
    agreement: dict[str, float] = field(default_factory=dict)
    tools: dict[str, str] = field(default_factory=dict)
    format_version: int = ENGINE_FORMAT_VERSION

    def __post_init__(self) -> None:
        """Raises BundleError, naming every field that cannot be right."""
        if problems := list(_problems(self)):
            raise BundleError(
                [f"engine {quote(self.name)}: {problem}" for problem in problems], "tfm-export trt --force"
            )

    def to_json(self) -> str:
        """The text of engine.json."""
        state = asdict(self)
        return json.dumps({"format_version": state.pop("format_version"), **state}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, path: Path) -> EngineRecord:
        """Read engine.json.

        Args:
            text: its contents.
            path: its path, for messages.

        Raises:
            BundleError: it is not JSON, is of a newer format, or has a field that is missing, unknown or wrong.
        """
        hint = "tfm-export trt --force builds the engine again"
        try:
            state = parse_json(text)
        except ValueError as problem:
            raise BundleError(f"{path} is not JSON: {problem}", hint) from None
        version = state.get("format_version") if isinstance(state, dict) else None
        if not _is_count(version):
            raise BundleError(f"{path} has no format_version: it is not the record of an engine", hint)
        if version > ENGINE_FORMAT_VERSION:
            raise BundleError(
                f"{path} has format_version {version}; this tfm-export reads up to {ENGINE_FORMAT_VERSION}",
                f"update tfm-export, or {hint}",
            )
        known = {f.name for f in fields(cls)}
        problems = [f"{path} has a field that is not known: {name}" for name in state.keys() - known]
        problems += [
            f"{path} lacks the field {name}" for name in known - state.keys() - {"tools", "proofs", "agreement"}
        ]
        if problems:
            raise BundleError(sorted(problems), hint)
        return cls(**{name: _frozen(value) for name, value in state.items()})

    def facts(self) -> dict[str, Any]:
        """What the bundle's manifest says of the engine."""
        kept = (
            "flavor",
            "flavor_version",
            "compute_capabilities",
            "variant",
            "compute",
            "float_type",
            "attention",
            "capacities",
            "max_batch_size",
            "max_beam_size",
            "max_source_length",
            "max_target_length",
            "build_seconds",
        )
        state = asdict(self)
        return {name: _thawed(state[name]) for name in kept}

    def rebuild_command(self, bundle: Path | str = "BUNDLE") -> str:
        """What to type to build this engine again.

        Args:
            bundle: its path.
        """
        return rebuild_command(bundle, self.name, self.facts())


def read_engine(bundle: Bundle, name: str) -> EngineRecord:
    """The record of an engine that belongs to a bundle as it is now.

    Args:
        bundle: an open bundle.
        name: of the engine.

    Raises:
        BundleError: the bundle has no such engine; the record is damaged or another's; a plan is missing; or the
            graphs that it was made from have changed. It names what differs, and the command that builds it again.
    """
    manifest = bundle.manifest
    if name not in manifest.engines:
        found = ", ".join(manifest.engines) or "none"
        raise BundleError(f"{bundle.path} has no engine {quote(name)}; it has {found}", f"tfm-export trt {bundle.path}")
    path = bundle.path / ENGINES / name / ENGINE_FILE
    try:
        record = EngineRecord.from_json(read_text(bundle.folder / ENGINES / name / ENGINE_FILE), path)
    except (OSError, UnicodeDecodeError) as problem:
        raise BundleError(f"{path} cannot be read: {problem}", f"tfm-export trt {bundle.path} --force") from None
    if problems := [*_foreign(bundle, name, record), *_stale(bundle, record), *_missing(bundle, record)]:
        raise BundleError([f"engine {name}: {problem}" for problem in problems], record.rebuild_command(bundle.path))
    return record


def check_runs_here(record: EngineRecord, flavor: str, version: str, compute_capability: str) -> None:
    """Make sure that an engine was built for this library and this GPU.

    Args:
        record: the engine's.
        flavor: of the library that is to run it: "tensorrt" or "rtx".
        version: of that library.
        compute_capability: of the GPU, such as "8.9".

    Raises:
        BackendUnavailable: naming every field that differs, and the command that builds an engine that fits.
    """
    problems = []
    if flavor != record.flavor:
        problems.append(f"flavor: it is for {FLAVORS[record.flavor]}, found {FLAVORS.get(flavor, flavor)}")
    elif version != record.flavor_version:
        problems.append(f"flavor_version: it is for {FLAVORS[flavor]} {record.flavor_version}, found {version}")
    if compute_capability not in record.compute_capabilities:
        expected = ", ".join(record.compute_capabilities)
        problems.append(f"compute_capabilities: it is for {expected}, and this GPU has {compute_capability}")
    if problems:
        raise BackendUnavailable(
            [f"engine {record.name} does not run here: {problem}" for problem in problems],
            f"tfm-export trt BUNDLE --{record.variant} --name {record.name} --force, with this TensorRT, for this GPU",
        )


def _foreign(bundle: Bundle, name: str, record: EngineRecord) -> Iterator[str]:
    """How a record differs from what the manifest says of it."""
    if record.name != name:
        yield f"name: expected {name}, {ENGINE_FILE} says {record.name}"
    facts = record.facts()
    for key, expected in bundle.manifest.engines[name].items():
        if key in facts and facts[key] != expected:
            yield f"{key}: the manifest says {expected}, {ENGINE_FILE} says {facts[key]}"


def _stale(bundle: Bundle, record: EngineRecord) -> Iterator[str]:
    """The files that an engine was made from and that have changed."""
    files = bundle.manifest.files
    for path, expected in record.onnx_hashes.items():
        if path not in files:
            yield f"onnx_hashes: {path}, which it was made from, is not in the bundle any more"
        elif files[path].sha256 != expected:
            yield (
                f"onnx_hashes: {path} has changed since it was built "
                f"(SHA-256 was {expected[:12]}..., is {files[path].sha256[:12]}...)"
            )


def _missing(bundle: Bundle, record: EngineRecord) -> Iterator[str]:
    for plan, file in record.plans.items():
        entry, path = (
            bundle.manifest.files.get(f"{ENGINES}/{record.name}/{file}"),
            bundle.folder / ENGINES / record.name,
        )
        if entry is None or not (path / file).is_file():
            yield f"plans: {plan} is missing, it should be {file}"
        elif (path / file).stat().st_size != entry.bytes:
            yield f"plans: {file} should have {entry.bytes:,} bytes, but has {(path / file).stat().st_size:,}"


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def _are(values: object, test: Callable[[Any], object]) -> bool:
    return isinstance(values, tuple) and bool(values) and all(test(value) for value in values)


# What each field must be, for people, and a test of it.
_RULES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "name": ("letters, digits, dots, dashes and underscores", lambda v: isinstance(v, str) and NAME.fullmatch(v)),
    "flavor": (f"one of {', '.join(FLAVORS)}", lambda v: v in tuple(FLAVORS)),
    "flavor_version": ("a version", lambda v: isinstance(v, str) and NAME.fullmatch(v)),
    "compute_capabilities": (
        'a list such as ["8.6"]',
        lambda v: _are(v, lambda c: isinstance(c, str) and re.fullmatch(r"\d+\.\d", c)),
    ),
    "variant": (f"one of {', '.join(PRECISIONS)}", lambda v: v in tuple(PRECISIONS)),
    "compute": (f"one of {', '.join(FLOATS)}", lambda v: v in FLOATS),
    "attention": (f"one of {', '.join(ATTENTION)}", lambda v: v in ATTENTION),
    "capacities": ("numbers from 1 up in rising order", lambda v: _are(v, _is_count) and sorted(set(v)) == [*v]),
    "onnx_hashes": ("SHA-256 sums by file", lambda v: isinstance(v, dict) and _are((*v.values(),), _is_hash)),
    "build_seconds": ("a number from 0 up", lambda v: isinstance(v, int | float) and v >= 0),
    **dict.fromkeys(
        ("max_batch_size", "max_beam_size", "max_source_length", "max_target_length", "head_size_padded"),
        ("a number from 1 up", _is_count),
    ),
}


def _problems(record: EngineRecord) -> Iterator[str]:
    """What cannot be right in a record."""
    wrong = [name for name, (_, test) in _RULES.items() if not test(getattr(record, name))]
    yield from (f"{name} must be {_RULES[name][0]}, found {quote(getattr(record, name))}" for name in wrong)
    if "compute" not in wrong and record.float_type != (expected := PRECISIONS[record.compute].float_type):
        yield f"float_type must be {expected} with {record.compute}, found {quote(record.float_type)}"
    if "capacities" not in wrong:
        plans = {plan: plan_file(plan) for plan in (ENCODER_PLAN, *map(step_plan, record.capacities))}
        if record.plans != plans:
            yield f"plans must be {plans}, found {quote(record.plans)}"
        profiles: Any = record.profiles
        if not isinstance(profiles, dict) or profiles.keys() != plans.keys():
            yield f"profiles must be those of {', '.join(plans)}"


def _frozen(value: Any) -> Any:
    """JSON's lists as tuples."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    return {key: _frozen(item) for key, item in value.items()} if isinstance(value, dict) else value


def _thawed(value: Any) -> Any:
    """Tuples as JSON's lists."""
    return [_thawed(item) for item in value] if isinstance(value, list | tuple) else value
