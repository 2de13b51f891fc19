"""The emulated CUDA provider of ONNX Runtime: sessions that read and write the memory of the emulated device.

It is as strict as the emulated TensorRT: everything is bound, of the right type, at live addresses and in place, and
whatever another stream does with the same memory has been waited for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from tests.emulation.install import emulated_gpu
from tests.emulation.machine import Machine, Stream, Work
from tfm_export.graph import cache_output_name
from tfm_export.runtime.gpu import cuda_provider

TYPES = {1: "float32", 7: "int64", 9: "bool", 10: "float16", 16: "bfloat16"}
ONNX_TYPES = {"tensor(float)": 1, "tensor(int64)": 7, "tensor(bool)": 9, "tensor(float16)": 10, "tensor(bfloat16)": 16}


@dataclass
class Provider:
    """What the installed provider is like.

    Attributes:
        version: of ONNX Runtime.
        providers: that it was built with.
        works: whether a session gets the provider.
        on_the_cpu: operators that it leaves to the CPU.
        failure: what a run raises, once.
    """

    version: str = "1.31.1"
    providers: tuple[str, ...] = (cuda_provider.PROVIDER, "CPUExecutionProvider")
    works: bool = True
    on_the_cpu: tuple[str, ...] = ("Shape", "Concat")
    failure: Exception | None = None


class Session:
    """An InferenceSession on the emulated device."""

    def __init__(
        self,
        machine: Machine,
        provider: Provider,
        graph: bytes,
        options: Any,
        providers: Sequence[Any],
        enable_fallback: int,
    ) -> None:
        (first, settings), *others = providers
        assert (first, others) == (cuda_provider.PROVIDER, ["CPUExecutionProvider"])
        assert (settings["use_tf32"], enable_fallback) == ("0", 0)
        self._machine, self._provider, self.device = machine, provider, int(settings["device_id"])
        self._session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self.types = {
            value.name: ONNX_TYPES[value.type] for value in (*self._session.get_inputs(), *self._session.get_outputs())
        }

    def get_inputs(self) -> list[Any]:
        return list(self._session.get_inputs())

    def get_outputs(self) -> list[Any]:
        return list(self._session.get_outputs())

    def get_providers(self) -> list[str]:
        return ["CPUExecutionProvider"] if not self._provider.works else list(self._provider.providers)

    def get_provider_graph_assignment_info(self) -> list[Any]:
        parts = {cuda_provider.PROVIDER: ("Gemm", "Attention"), "CPUExecutionProvider": self._provider.on_the_cpu}
        return [
            SimpleNamespace(ep_name=name, get_nodes=lambda found=found: [SimpleNamespace(op_type=o) for o in found])
            for name, found in parts.items()
        ]

    def io_binding(self) -> Binding:
        return Binding(self)

    def run_with_iobinding(self, binding: Binding) -> None:
        """Run it, on a stream of its own, and wait for it."""
        if failure := self._provider.failure:
            self._provider.failure = None
            raise failure
        machine, before = self._machine, self._machine.current
        if missing := self.types.keys() - binding.bound.keys():
            raise machine.error(f"nothing is bound to {', '.join(sorted(missing))}")
        inputs = {value.name for value in self._session.get_inputs()}
        for name in inputs:
            output = cache_output_name(name)
            if output in self.types and binding.bound[output].address != binding.bound[name].address:
                raise machine.error(f"{name} is not updated in place")
        touches = [(bound.address, bound.nbytes, "device", name not in inputs) for name, bound in binding.bound.items()]
        machine.current = self.device
        stream = Stream(machine)
        try:
            stream.submit(Work("a run of ONNX Runtime", lambda: self._compute(binding, inputs), touches))
            stream.synchronize()
        finally:
            machine.handles.pop(stream.handle)
            machine.current = before

    def _compute(self, binding: Binding, inputs: set[str]) -> None:
        feeds = {name: self._array(binding.bound[name]).copy() for name in inputs}
        if "write_index" in feeds:
            query, capacity = feeds["self_mask"].shape[2:]
            if (feeds["write_index"] < 0).any() or (feeds["write_index"] + query > capacity).any():
                raise self._machine.error("a write past the capacity, or before it")
            if not feeds["self_mask"].any(-1).all():
                raise self._machine.error("a query that sees nothing")
        names = [value.name for value in self._session.get_outputs()]
        for name, array in zip(names, self._session.run(names, feeds), strict=True):
            self._array(binding.bound[name])[:] = array

    def _array(self, bound: Bound) -> NDArray[Any]:
        _, data = self._machine.find(bound.address, bound.nbytes, "device")
        return data.view(bound.dtype).reshape(bound.shape)


@dataclass(frozen=True)
class Bound:
    """What is bound to an input or output."""

    address: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


class Binding:
    """An IOBinding."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.bound: dict[str, Bound] = {}

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: int, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        machine = self._session._machine
        if (device_type, device_id) != ("cuda", self._session.device):
            raise machine.error(f"{name} is bound on {device_type}:{device_id}")
        if element_type != self._session.types[name]:
            raise machine.error(f"{name} is bound as {element_type}, and is {self._session.types[name]}")
        bound = Bound(buffer_ptr, TYPES[element_type], tuple(shape))
        machine.find(bound.address, bound.nbytes, "device")
        self.bound[name] = bound

    bind_output = bind_input


@contextmanager
def emulated_provider(machine: Machine | None = None, provider: Provider | None = None) -> Iterator[Machine]:
    """Let models that are loaded meanwhile find a GPU and the package of ONNX Runtime for it."""
    provider = provider or Provider()
    with emulated_gpu(machine) as emulated, pytest.MonkeyPatch.context() as patch:

        def session(graph: bytes, options: Any, providers: Sequence[Any], enable_fallback: int) -> Session:
            return Session(emulated, provider, graph, options, providers, enable_fallback)

        module = SimpleNamespace(
            __version__=provider.version,
            __file__="/nowhere/onnxruntime/__init__.py",
            get_available_providers=lambda: list(provider.providers),
            preload_dlls=lambda: None,
            InferenceSession=session,
        )
        patch.setattr(cuda_provider, "onnxruntime", module)
        yield emulated
