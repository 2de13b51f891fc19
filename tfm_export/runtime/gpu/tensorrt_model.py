"""The step model on TensorRT: an engine of a bundle on a GPU.

What a step writes stays on the device. A step costs one copy there, one launch and one copy back of the best tokens.
Shapes are rounded up to a few, the rows added being inert, so that a shape that comes again is a captured CUDA graph.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from tfm_export.bundle import Bundle, Limits
from tfm_export.engines import ENCODER_PLAN, ENGINES, EngineRecord, check_runs_here, read_engine, step_plan
from tfm_export.errors import BackendUnavailable
from tfm_export.graph import TensorSpec, decoder_step_inputs, decoder_step_outputs, encoder_inputs, encoder_outputs
from tfm_export.precision import PRECISIONS
from tfm_export.runtime.gpu import cuda
from tfm_export.runtime.gpu.compiled_graphs import DeviceGraphs
from tfm_export.runtime.gpu.cuda import Gpu
from tfm_export.runtime.gpu.device_memory import RowShape
from tfm_export.runtime.gpu.device_model import MOST_WORKERS, DeviceModel
from tfm_export.runtime.gpu.tensorrt_plans import Library, Plan, RuntimeCacheFile


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


class TensorRTModel(DeviceModel):
    """An engine of a bundle, loaded; the `StepModel` of TensorRT. Safe to use from several threads.

    Attributes:
        record: what is known of the engine.
    """

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
        self.record = check_engine(bundle, engine, device)
        try:
            super().__init__(_load(bundle, self.record, Library(self.record.flavor), cuda.open_gpu(device)), workers)
        except cuda.OutOfDeviceMemory as problem:
            raise BackendUnavailable(
                [f"the engine {engine} does not fit: {p}" for p in problem.problems],
                "a smaller engine (tfm-export trt --max-batch-size, --capacity), or end what else uses the GPU",
            ) from problem


def _load(bundle: Bundle, record: EngineRecord, library: Library, gpu: Gpu) -> DeviceGraphs:
    """Load every plan of an engine."""
    dimensions, limits, kind = bundle.manifest.dimensions, bundle.manifest.limits, record.float_type
    padded = replace(dimensions, head_size=record.head_size_padded)
    folder, home = (path / ENGINES / record.name for path in (bundle.folder, bundle.path))
    with ExitStack() as undo:

        def load(name: str, inputs: list[TensorSpec], outputs: list[TensorSpec], capacity: int | None = None) -> Plan:
            path = folder / record.plans[name]
            cache = RuntimeCacheFile(home / path.name, gpu.device, library.version) if library.compiles else None
            plan = Plan(library, path, inputs, outputs, capacity=capacity, cache=cache)
            undo.callback(plan.close)
            return plan

        encoder = load(ENCODER_PLAN, encoder_inputs(), encoder_outputs(padded, kind))
        inputs, outputs = decoder_step_inputs(padded, kind), decoder_step_outputs(padded, kind)
        steps = {capacity: load(step_plan(capacity), inputs, outputs, capacity) for capacity in record.capacities}
        graphs = DeviceGraphs(
            gpu=gpu,
            encoder=encoder,
            steps=steps,
            step_queries=max(plan.profiles[0].query for plan in steps.values()),
            dimensions=dimensions,
            limits=Limits(
                max_source_length=min(limits.max_source_length, record.max_source_length),
                max_target_length=min(limits.max_target_length, record.max_target_length),
            ),
            rows=RowShape(padded.heads, padded.head_size, PRECISIONS[record.compute].item_bytes),
            float_type=kind,
        )
        undo.pop_all()
    return graphs
