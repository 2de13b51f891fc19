"""Puts the emulated libraries in the place of the real ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from tests.emulation.cudart import cudart_module
from tests.emulation.machine import Machine
from tests.emulation.tensorrt import tensorrt_module


@contextmanager
def emulated_gpu(machine: Machine | None = None, **versions: int) -> Iterator[Machine]:
    """Let what is imported meanwhile find an emulated GPU.

    Models go on with the machine that they were loaded on: this needs to last only while they load.

    Args:
        machine: the machine; None for a new one.
        **versions: `driver` and `runtime`: CUDA versions as CUDA writes them, 13010 for 13.1.
    """
    machine = machine or Machine()
    modules: dict[str, ModuleType] = {
        "cuda.bindings.runtime": cudart_module(machine, **versions),
        "tensorrt": tensorrt_module(machine, "tensorrt"),
        "tensorrt_rtx": tensorrt_module(machine, "rtx"),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        yield machine
