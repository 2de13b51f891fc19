"""One plan: parse a graph, configure the builder, build, and look at what it was given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tfm_export.errors import BuildError
from tfm_export.trt.flavor import OPERATORS, Flavor, polygraphy
from tfm_export.trt.monitor import BuildObserver, progress_monitor, stoppable
from tfm_export.trt.network_source import NetworkSource
from tfm_export.trt.options import EngineOptions
from tfm_export.trt.proof import Network, look_at
from tfm_export.trt.refusals import check_inputs, check_warnings

# What TensorRT says where it has no fused kernel for an attention that must not be decomposed.
NOT_FUSED = "is_decomposable"


@dataclass(frozen=True, kw_only=True)
class Built:
    """A network that TensorRT has built, as it was given.

    Attributes:
        network: what TensorRT was given, counted.
        text: the layers of that network, for people.
        fused: no attention in 16 bits was decomposed.
    """

    network: Network
    text: str
    fused: bool


class Builder:
    """Builds the plans of one engine.

    Args:
        flavor: the library.
        options: what the user said; they have been checked.
        targets: the compute capabilities to build for.
        progress: told the phases.
    """

    def __init__(self, flavor: Flavor, options: EngineOptions, targets: Sequence[str], progress: BuildObserver) -> None:
        self._flavor, self._options, self._targets, self._progress = flavor, options, targets, progress
        self._trt = flavor.module
        self._log = _log(self._trt)
        with stoppable():  # whatever calls back must not be interrupted: what is raised in there would be lost
            self._builder = self._trt.Builder(self._log)

    def build(self, source: NetworkSource, folder: Path, plan: Path) -> Built:
        """Build a plan; attention in 16 bits fused where TensorRT has a kernel for it, decomposed where it has not.

        Args:
            source: the graph, which lies in `folder`.
            folder: of the ONNX files.
            plan: where the plan is written to.

        Raises:
            BuildError: TensorRT did not parse or build it.
            KeyboardInterrupt: Ctrl-C was pressed; nothing is written.
        """
        try:
            return self._build(source, folder, plan, fused=True)
        except _NotFused as problem:
            self._progress.note(
                f"{source.plan}: {self._flavor.label} has no fused attention of this form in 16 bits, so it is built "
                f"of several kernels, which are slower ({problem.problems[0]})"
            )
            return self._build(source, folder, plan, fused=False)

    def _build(self, source: NetworkSource, folder: Path, plan: Path, *, fused: bool) -> Built:
        self._progress.begin(f"building {plan.name}{'' if fused else ', attention decomposed'}")
        with stoppable() as stop:
            network = self._parse(source, folder)
            _set_decomposable(self._trt, network, all_of_them=not fused)
            config = self._builder.create_builder_config()
            config.progress_monitor = progress_monitor(self._trt, self._progress, stop)
            self._flavor.configure(config, self._options, self._targets)
            self._add_profiles(source, network, config)
            self._log.take()
            content = None if stop.wanted else self._builder.build_serialized_network(network, config)
            if content is not None and not stop.wanted:
                plan.write_bytes(memoryview(content))
                self._flavor.keep_timings(config, self._options)
        said = self._log.take()
        if content is None:
            raise self._failure(f"build {source.plan}", said, fused=fused)
        check_warnings(source.plan, said)
        return Built(network=look_at(self._trt, network), text=self._listing(network), fused=fused)

    def _parse(self, source: NetworkSource, folder: Path) -> Any:
        """An INetworkDefinition, strongly typed."""
        trt, log = self._trt, self._log
        log.take()
        network = self._builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, log)
        if missing := [name for name in OPERATORS if not parser.supports_operator(name)]:
            raise BuildError(
                f"the ONNX parser of {self._flavor.label} does not know {' and '.join(missing)}",
                "a newer release of it",
            )
        parsed = parser.parse_from_file(str(folder / source.file))
        said = log.take()
        if not parsed:
            errors = [parser.get_error(i).desc() for i in range(parser.num_errors)]
            raise self._failure(f"parse {source.file}", [*errors, *said], fused=False)
        check_warnings(source.plan, said)
        check_inputs(source.plan, [spec.name for spec in source.inputs], network)
        return network

    def _add_profiles(self, source: NetworkSource, network: Any, config: Any) -> None:
        kind = polygraphy(self._flavor).Profile
        for number, profile in enumerate(source.profiles):
            shapes = kind()
            for name, points in profile.shapes(source.inputs).items():
                shapes.add(name, *points)
            if config.add_optimization_profile(shapes.to_trt(self._builder, network)) != number:
                raise self._failure(f"use the profile {profile.name} of {source.plan}", self._log.take(), fused=False)

    def _listing(self, network: Any) -> str:
        """The layers of a network. Polygraphy's own listing of whole networks wants `tensorrt` even with RTX."""
        describe = polygraphy(self._flavor).util.str_from_layer
        return "\n".join(describe(network.get_layer(index), index) for index in range(network.num_layers)) + "\n"

    def _failure(self, what: str, said: Sequence[str], *, fused: bool) -> BuildError:
        reasons = [*dict.fromkeys(said)] or ["it gave no reason"]
        kind = _NotFused if fused and any(NOT_FUSED in text for text in reasons) else BuildError
        return kind([f"{self._flavor.label} could not {what}: {text}" for text in reasons])


class _NotFused(BuildError):
    """There is no fused kernel for an attention."""


def _set_decomposable(trt: ModuleType, network: Any, *, all_of_them: bool) -> None:
    """Let attention be decomposed: in float32, for which there is no fused kernel; or all of it."""
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            in_float = layer.get_input(0).dtype == trt.DataType.FLOAT
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = all_of_them or in_float


def _log(trt: ModuleType) -> Any:
    """An ILogger that keeps what TensorRT says."""

    class Log(trt.ILogger):  # type: ignore[misc, name-defined]
        """Warnings and errors, until they are taken."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self._said: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            """Called by TensorRT."""
            if int(severity) <= int(trt.ILogger.WARNING):
                self._said.append(message.strip())

        def take(self) -> list[str]:
            """What was said since the last time."""
            said, self._said = self._said, []
            return said

    return Log()
