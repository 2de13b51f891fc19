"""The step model on TensorRT: an engine of a bundle on a GPU.

What a step writes stays on the device. A step costs one copy there, one launch and one copy back of the best tokens.
Shapes are rounded up to a few, the rows added being inert, so that a shape that comes again is a captured CUDA graph.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import replace

from tfm_export.bundle import Bundle, Limits
from tfm_export.engines import ENCODER_PLAN, ENGINES, EngineRecord, check_runs_here, read_engine, step_plan
from tfm_export.errors import BackendUnavailable, RequestError
from tfm_export.graph import (
    TensorSpec,
    decoder_step_inputs,
    decoder_step_outputs,
    encoder_inputs,
    encoder_outputs,
)
from tfm_export.precision import PRECISIONS
from tfm_export.runtime import cuda
from tfm_export.runtime.checks import check_encode
from tfm_export.runtime.cuda import Gpu, when_not_capturing
from tfm_export.runtime.device_memory import RowShape
from tfm_export.runtime.device_sentences import REFILL_AT, DeviceSentences
from tfm_export.runtime.device_worker import CLOSED, Engine
from tfm_export.runtime.step_model import Ids, Mask
from tfm_export.runtime.tensorrt_plans import Library, Plan, RuntimeCacheFile
from tfm_export.runtime.thread_workers import MOST_WORKERS, Workers


def check_engine(bundle: Bundle, engine: str, device: int = 0) -> EngineRecord:
    """Make sure that an engine can run here, without loading it.

    Args:
        bundle: an open bundle.
        engine: its name.
        device: the number of the GPU.

    Raises:
        BundleError: the bundle has no such engine, or changed since it was built.
        BackendUnavailable: its TensorRT is not installed, there is no such GPU, or it was built for others.
    """
    record = read_engine(bundle, engine)
    library, gpu = Library(record.flavor), cuda.find_device(device)
    check_runs_here(record, record.flavor, library.version, gpu.compute_capability)
    return record


class TensorRTModel:
    """An engine of a bundle, loaded; the `StepModel` of TensorRT. Safe to use from several threads.

    Attributes:
        record: what is known of the engine.
        dimensions: the sizes that the graphs show.
        limits: the longest sequences.
        gives_attention: steps give none.
        refill_at: see `StepModel.refill_at`.
        max_batch_size: the most sentences at once.
    """

    refill_at = REFILL_AT

    def __init__(self, bundle: Bundle, engine: str, device: int = 0, *, workers: int = MOST_WORKERS) -> None:
        """Load the plans, and make ready to run.

        Args:
            bundle: an open bundle.
            engine: its name, a folder under engines/.
            device: the number of the GPU.
            workers: the most threads that run at the same time.

        Raises:
            BundleError: see `check_engine`; or a plan is not of the expected form.
            BackendUnavailable: see `check_engine`; or TensorRT does not take a plan, or the GPU's memory is too small.
            RequestError: workers is less than 1.
        """
        self.record, self.gives_attention = check_engine(bundle, engine, device), False
        try:
            loaded = _load(bundle, self.record, Library(self.record.flavor), cuda.open_gpu(device))
            self._workers = Workers(loaded, workers)
        except cuda.OutOfDeviceMemory as problem:
            raise BackendUnavailable(
                [f"the engine {engine} does not fit: {p}" for p in problem.problems],
                "a smaller engine (tfm-export trt --max-batch-size, --capacity), or end what else uses the GPU",
            ) from problem
        self.dimensions, self.limits, self.max_batch_size = loaded.dimensions, loaded.limits, loaded.max_batch_size
        self._close = weakref.finalize(self, when_not_capturing, self._workers.close)

    @property
    def capture_problem(self) -> str | None:
        """Why steps do not run as CUDA graphs captured here; None if they do."""
        return self._workers.capture_problem

    def encode(self, source_ids: Ids, source_mask: Mask, *, capacity: int) -> DeviceSentences:
        """Run the encoder on a padded batch and set up its caches; see `StepModel.encode`."""
        if not self._close.alive:
            raise RequestError(*CLOSED)
        check_encode(source_ids, source_mask, capacity, dimensions=self.dimensions, limits=self.limits)
        return DeviceSentences(self._workers.of_this_thread(), source_ids, source_mask, capacity)

    def close(self) -> None:
        """Free what is on the GPU; what batches still need goes with the last of them."""
        self._close()


def _load(bundle: Bundle, record: EngineRecord, library: Library, gpu: Gpu) -> Engine:
    """Load every plan of an engine."""
    dimensions, limits, kind = bundle.manifest.dimensions, bundle.manifest.limits, record.float_type
    padded = replace(dimensions, head_size=record.head_size_padded)
    folder = bundle.path / ENGINES / record.name
    with ExitStack() as undo:

        def load(name: str, inputs: list[TensorSpec], outputs: list[TensorSpec], capacity: int | None = None) -> Plan:
            path = folder / record.plans[name]
            cache = RuntimeCacheFile(path, gpu.device, library.version) if library.compiles else None
            plan = Plan(library, path, inputs, outputs, capacity=capacity, cache=cache)
            undo.callback(plan.close)
            return plan

        engine = Engine(
            gpu=gpu,
            encoder=load(ENCODER_PLAN, encoder_inputs(), encoder_outputs(padded, kind)),
            steps={
                capacity: load(
                    step_plan(capacity), decoder_step_inputs(padded, kind), decoder_step_outputs(padded, kind), capacity
                )
                for capacity in record.capacities
            },
            dimensions=dimensions,
            limits=Limits(
                max_source_length=min(limits.max_source_length, record.max_source_length),
                max_target_length=min(limits.max_target_length, record.max_target_length),
            ),
            rows=RowShape(padded.heads, padded.head_size, PRECISIONS[record.compute].item_bytes),
            float_type=kind,
        )
        undo.pop_all()
    return engine
