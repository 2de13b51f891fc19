"""The emulated GPU notices what a real one does not: each runtime below is broken in one place."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.emulation import EmulationError, Machine
from tests.emulation.scenario import run_scenario
from tests.runtime.conftest import Backends
from tfm_export.errors import NumericError
from tfm_export.runtime.gpu import cuda, device_memory, device_worker, step_buffers
from tfm_export.runtime.gpu.cuda import CudaStream, DeviceBuffer, Gpu
from tfm_export.runtime.gpu.device_memory import BatchMemory, MemoryPool, TensorBlock
from tfm_export.runtime.gpu.device_sentences import DeviceSentences
from tfm_export.runtime.gpu.device_worker import Worker
from tfm_export.runtime.gpu.step_buffers import Buffers, Layout, StepArrays
from tfm_export.runtime.gpu.tensorrt_plans import Plan, PlanContext

Patch = pytest.MonkeyPatch


def test_a_runtime_that_is_whole_passes(backends: Backends) -> None:
    machine = Machine()
    assert run_scenario(backends.with_engine, backends.exact, machine) <= 1
    assert machine.leaks() == machine.violations == []
    assert machine.calls["cudaGraphLaunch"] >= 8


def nothing(*_: object, **__: object) -> None:
    """In the place of something that is needed."""


def memory_that_is_not_zeroed(patch: Patch) -> None:
    patch.setattr(BatchMemory, "zero", nothing)


def caches_that_are_not_updated_in_place(patch: Patch) -> None:
    bind = PlanContext.bind

    def elsewhere(self: PlanContext, key: object, sizes: Any, addresses: dict[str, int]) -> None:
        moved = {name: addresses["self_key_0"] if name.endswith("_out") else a for name, a in addresses.items()}
        bind(self, key, sizes, moved)

    patch.setattr(PlanContext, "bind", elsewhere)


def inputs_that_nobody_checks(patch: Patch) -> None:
    fill = StepArrays.fill

    def beyond(self: StepArrays, ids: Any, positions: Any, write_index: Any, *masks: Any) -> bool:
        fill(self, ids, positions, write_index, *masks)
        self._write_index[:] = self.shape.capacity
        return True

    patch.setattr(StepArrays, "fill", beyond)


def inert_rows_that_see_nothing(patch: Patch) -> None:
    patch.setattr(StepArrays, "_make_inert", nothing)


def inert_sources_without_a_token(patch: Patch) -> None:
    encoder_arrays = step_buffers.encoder_arrays

    def blind(buffers: Buffers, ids: Any, mask: Any, batch: int, source: int) -> Any:
        inputs, addresses = encoder_arrays(buffers, ids, mask, batch, source)
        step_buffers.encoder_inputs(batch, source).array(inputs, "source_mask")[len(ids) :] = False
        return inputs, addresses

    patch.setattr(device_worker, "encoder_arrays", blind)
    patch.setattr(device_worker, "bucket", lambda count, largest, smallest=1: min(max(count + 1, smallest), largest))


def results_that_are_not_waited_for(patch: Patch) -> None:
    patch.setattr(CudaStream, "synchronize", nothing)


def memory_freed_too_early(patch: Patch) -> None:
    def freed(self: MemoryPool, memory: BatchMemory) -> None:
        self._lent -= 1
        memory.close()

    patch.setattr(MemoryPool, "give_back", freed)


def memory_given_away_too_early(patch: Patch) -> None:
    encode = Worker.encode

    def and_free(self: Worker, ids: Any, mask: Any, memory: BatchMemory) -> None:
        encode(self, ids, mask, memory)
        self.graphs.gpu.release("cudaFree", memory.cross.address("cross_key_0"))

    patch.setattr(Worker, "encode", and_free)


def idle_memory_freed_in_use(patch: Patch) -> None:
    patch.setattr(device_memory, "IDLE_PIECES", 0)
    patch.setattr(device_memory, "IDLE_SHARE", 0)
    shrink = MemoryPool._shrink_idle

    def without_waiting(self: MemoryPool, *limits: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(CudaStream, "synchronize", nothing)
            shrink(self, *limits)

    patch.setattr(MemoryPool, "_shrink_idle", without_waiting)


def graphs_whose_contexts_are_used_otherwise(patch: Patch) -> None:
    run = Worker._run_captured

    def and_change(self: Worker, key: Any, plan: Any, profile: Any, memory: Any, arrays: StepArrays) -> bool:
        done = run(self, key, plan, profile, memory, arrays)
        if self._captured[key].graph is not None:
            self._captured[key].context._context.set_tensor_address("positions", arrays.addresses["target_ids"])
        return done

    patch.setattr(Worker, "_run_captured", and_change)


def graphs_captured_without_a_run_before(patch: Patch) -> None:
    run = Worker._run

    def bound_alone(self: Worker, context: PlanContext, memory: Any, arrays: StepArrays) -> None:
        with pytest.MonkeyPatch.context() as inner:
            if context not in self._contexts.values():
                inner.setattr(Worker, "_submit", nothing)
            run(self, context, memory, arrays)

    patch.setattr(Worker, "_run", bound_alone)


def graphs_for_any_batch(patch: Patch) -> None:
    patch.setattr(BatchMemory, "number", property(lambda _: 0, nothing), raising=False)


def shapes_that_no_profile_has(patch: Patch) -> None:
    patch.setattr(device_worker.DeviceGraphs, "max_source_length", 64)
    patch.setattr(device_worker, "SHORTEST_SOURCE", 64)


def steps_in_the_wrong_profile(patch: Patch) -> None:
    init = Plan.__init__

    def mistaken(self: Plan, *arguments: Any, **keywords: Any) -> None:
        init(self, *arguments, **keywords)
        self.profiles = [replace(profile, query=max(profile.query, 50)) for profile in self.profiles]

    patch.setattr(Plan, "__init__", mistaken)


def numbers_of_another_size(patch: Patch) -> None:
    def narrow(batch: int, source: int) -> Layout:
        return Layout([("source_ids", (batch, source), np.int32), ("source_mask", (batch, source), np.bool_)])

    patch.setattr(step_buffers, "encoder_inputs", narrow)


def tensors_out_of_line(patch: Patch) -> None:
    patch.setattr(step_buffers, "ALIGNMENT", 8)


def streams_that_do_not_wait(patch: Patch) -> None:
    patch.setattr(CudaStream, "wait_for", nothing)


def streams_that_the_other_does_not_wait_for(patch: Patch) -> None:
    """The memory of joining rows is used again by their own worker while they are still copied."""
    append = DeviceSentences._append

    def without_waiting(self: DeviceSentences, other: DeviceSentences) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(CudaStream, "synchronize", nothing)
            append(self, other)
        if other.worker is not self.worker:
            other.lease.memory.zero(other.worker.stream, 1)

    patch.setattr(DeviceSentences, "_append", without_waiting)


def workspaces_that_streams_share(patch: Patch) -> None:
    allocate, found = Gpu.allocate, []

    def once(self: Gpu, nbytes: int) -> DeviceBuffer:
        if nbytes != 4096:  # what the emulated contexts ask for
            return allocate(self, nbytes)
        found.append(found[0] if found else allocate(self, nbytes))
        return found[0]

    patch.setattr(Gpu, "allocate", once)
    patch.setattr(Worker, "encode", _without_waiting(Worker.encode))


def _without_waiting(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(CudaStream, "synchronize", nothing)
            return function(*arguments)

    return call


def gpus_that_are_not_chosen(patch: Patch) -> None:
    activate, seen = Gpu.activate, set[Gpu]()

    def once(self: Gpu) -> None:
        if self not in seen:
            seen.add(self)
            activate(self)

    patch.setattr(Gpu, "activate", once)


def garbage_freed_while_capturing(patch: Patch) -> None:
    capture = CudaStream.capture

    def with_garbage(self: CudaStream, work: Callable[[], None]) -> cuda.Graph:
        garbage = [self.gpu.allocate_host(8)]
        return capture(self, lambda: (work(), garbage.clear())[0])

    patch.setattr(cuda, "when_not_capturing", lambda free: free())
    patch.setattr(CudaStream, "capture", with_garbage)


def rows_copied_from_the_wrong_place(patch: Patch) -> None:
    copy = TensorBlock.copy_rows

    def shifted(
        self: TensorBlock, stream: CudaStream, source: Any, source_row: int, target_row: int, **size: int
    ) -> None:
        copy(self, stream, source, max(source_row - 1, 0), target_row, **size)

    patch.setattr(TensorBlock, "copy_rows", shifted)


def rows_copied_over_themselves(patch: Patch) -> None:
    copy = TensorBlock.copy_rows

    def doubled(self: TensorBlock, stream: CudaStream, source: Any, *rows: int, **size: int) -> None:
        copy(self, stream, source, *rows, **size)
        copy(self, stream, self, 0, 0, **size)

    patch.setattr(TensorBlock, "copy_rows", doubled)


def errors_that_nobody_takes_note_of(patch: Patch) -> None:
    allocate = Gpu.allocate

    def fail(self: Gpu, nbytes: int) -> DeviceBuffer:
        self._cudart.cudaMalloc(1 << 60)
        return allocate(self, nbytes)

    patch.setattr(Gpu, "allocate", fail)


def buffers_that_stay(patch: Patch) -> None:
    patch.setattr(Buffers, "close", nothing)


WRONG = "the numbers are wrong"
# What the broken runtime is told, or that its numbers are wrong.
BROKEN: Sequence[tuple[Callable[[Patch], None], str]] = (
    (memory_that_is_not_zeroed, "numbers that are not finite: it was not zeroed"),
    (caches_that_are_not_updated_in_place, "it is updated in place"),
    (inputs_that_nobody_checks, "a step writes past the capacity"),
    (inert_rows_that_see_nothing, "has a row that sees nothing"),
    (inert_sources_without_a_token, "source_mask has a row that sees nothing"),
    (results_that_are_not_waited_for, WRONG),
    (memory_freed_too_early, "which work still uses"),
    (memory_given_away_too_early, "is freed"),
    (idle_memory_freed_in_use, "which work still uses"),
    (graphs_whose_contexts_are_used_otherwise, "a graph was launched after its context was changed"),
    (graphs_captured_without_a_run_before, "a context must run once with new shapes before it is captured"),
    (graphs_for_any_batch, WRONG),
    (shapes_that_no_profile_has, "is not in profile"),
    (steps_in_the_wrong_profile, "is not in profile"),
    (numbers_of_another_size, "source_ids is not set"),
    (tensors_out_of_line, "is not a multiple of 256"),
    (streams_that_do_not_wait, "does not wait for what another stream does"),
    (streams_that_the_other_does_not_wait_for, "does not wait for what another stream does"),
    (workspaces_that_streams_share, "does not wait for what another stream does"),
    (gpus_that_are_not_chosen, "while GPU 0 is current"),
    (garbage_freed_while_capturing, "a thread that captures a graph may not free memory"),
    (rows_copied_from_the_wrong_place, WRONG),
    (rows_copied_over_themselves, "the two parts of a copy overlap"),
    (errors_that_nobody_takes_note_of, "an earlier call's error 2"),
    (buffers_that_stay, "bytes of device memory"),
)


@pytest.fixture(scope="module")
def _quick_collections() -> Iterator[None]:
    """Let garbage collections look at what these tests make, and at nothing else."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_quick_collections")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what finalizers raise
@pytest.mark.parametrize(("broken", "message"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_runtime_does_not_pass(
    backends: Backends, monkeypatch: Patch, broken: Callable[[Patch], None], message: str
) -> None:
    machine, error = Machine(), 0.0
    broken(monkeypatch)
    try:
        error = run_scenario(backends.with_engine, backends.exact, machine)
    except NumericError:
        told = WRONG
    except EmulationError as problem:
        told = str(problem)
    else:
        told = "" if error <= 1 else WRONG
    left = machine.leaks()
    gc.collect()  # what is broken must not come up in another test
    if message is WRONG:
        assert told
    else:
        assert any(message in line for line in [*machine.violations, *left])
