"""A batch that meets everything: prompts, graphs captured and launched, rows that leave and join, caches that grow."""

from __future__ import annotations

import threading

from tests.emulation.install import emulated_gpu
from tests.emulation.machine import Machine
from tests.runtime.drive import Batch, padded
from tfm_export.bundle import Bundle
from tfm_export.runtime.gpu.tensorrt_model import TensorRTModel
from tfm_export.runtime.step_model import Sentences, StepModel
from tfm_export.runtime.torch_model import TorchModel

SOURCES = [[5, 7, 9, 11, 2], [4, 2], [8, 8, 10, 2], [29, 28, 27, 26, 25, 24, 23, 2], [6, 6, 2]]


def run_scenario(bundle: Bundle, exact: TorchModel, machine: Machine) -> float:
    """Run it on the second GPU of an emulated machine, and free everything.

    Returns:
        The largest error of log_probs, in parts of what float32 may be off.
    """
    with emulated_gpu(machine):
        model = TensorRTModel(bundle, "emulated", 1, workers=2)
    machine.current = 0  # as if other code had used the first GPU meanwhile
    error = drive(model, exact)
    model.close()
    return error


def drive(model: StepModel, exact: TorchModel) -> float:
    """Run it, in this thread and with rows from another one; the largest error, see `Batch`."""
    errors = []
    batch = Batch(model, exact, [*SOURCES[:3], SOURCES[1], SOURCES[4]], capacity=4)
    errors.append(batch.step(queries=2))  # five rows and an inert one
    batch.leave(0)
    batch.leave(3)
    batch.sentences.grow(12)
    errors += [batch.step() for _ in range(6)]  # the last ones as a graph
    batch.join([SOURCES[3]])  # longer sources: everything moves
    errors += [batch.step() for _ in range(2)]
    batch.sentences.grow(60)  # to the next plan, and at once more rows
    batch.join([SOURCES[2]])
    errors += [batch.step(queries=2) for _ in range(5)]
    joining = _encoded_elsewhere(model, SOURCES[4:])
    errors.append(batch.step())
    batch.sentences.append(joining)
    batch.rows += Batch(exact, exact, SOURCES[4:], capacity=1).rows
    errors += [batch.step() for _ in range(2)]
    errors.append(batch.step(queries=7))  # more than the profile for steps takes
    del batch, joining
    errors += [_small_batch(model, exact) for _ in range(6)]  # the same memory again, with its graphs
    return max(errors)


def _small_batch(model: StepModel, exact: TorchModel) -> float:
    batch = Batch(model, exact, SOURCES[:3], capacity=20)
    return max(batch.step(), batch.step(queries=2))


def _encoded_elsewhere(model: StepModel, sources: list[list[int]]) -> Sentences:
    """Sentences of another thread's worker, which has not waited for everything yet."""
    found: list[Sentences] = []

    def encode() -> None:
        found.append(model.encode(*padded(sources), capacity=3))
        found[0].grow(20)

    thread = threading.Thread(target=encode)
    thread.start()
    thread.join()
    return found[0]
