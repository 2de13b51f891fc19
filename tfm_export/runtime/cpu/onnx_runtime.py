"""The step model on ONNX Runtime's CPU provider. Importing this module raises BackendUnavailable where there is none.

A step costs one call of the session. Every input and output lies in memory that is bound once: the caches are input
and output at the same address, so the graph writes into them in place, and the small arrays of a step are copied into
buffers that stay bound until a shape changes.
"""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tfm_export.bundle import Bundle, Limits
from tfm_export.errors import BackendUnavailable, BundleError, RequestError
from tfm_export.extras import require_onnxruntime
from tfm_export.graph import (
    DECODER_STEP,
    DECODER_STEP_ATTENTION,
    ENCODER,
    TensorSpec,
    cache_output_name,
    decoder_step_inputs,
    decoder_step_outputs,
    encoder_inputs,
    encoder_outputs,
)
from tfm_export.precision import PRECISIONS
from tfm_export.runtime.checks import check_encode, check_finite, check_step_arrays, check_steps, step_problems
from tfm_export.runtime.cpu.host_memory import HostMemory, HostPool
from tfm_export.runtime.cpu.saturation import needs_wide_sums
from tfm_export.runtime.forks import keep_for_ever, tell_of_forks
from tfm_export.runtime.onnx_sessions import check_form, run_bound, session_options
from tfm_export.runtime.step_model import Capabilities, Floats, Ids, Mask, Sentences, StepModel, StepOutput, Until
from tfm_export.runtime.threads import threads_to_use
from tfm_export.runtime.variant_files import VariantFiles

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, IOBinding

onnxruntime = require_onnxruntime()
_BINDINGS = 8  # of different (Q, full) that a batch keeps: speculative steps have 1 to 8 queries


class OnnxModel(StepModel):
    """A bundle's ONNX graphs, loaded; the `StepModel` of the CPU. Safe to use from several threads.

    Attributes:
        float_type: the dtype of caches and cross-attention keys and values.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        variant: str = "fp32",
        threads: int | None = None,
        folder: Path | None = None,
        exact: bool = False,
        copy: bool | None = None,
        files: VariantFiles | None = None,
    ) -> None:
        """Load the two graphs of a variant.

        Args:
            bundle: an open bundle.
            variant: the precision, a folder under onnx/.
            threads: threads an operator may use; None for the CPUs this process may use.
            folder: where the graphs are, for a variant that is not part of the bundle yet.
            exact: compute with the numbers that the files of a quantised variant hold, in float32: slower, and weights
                take the memory of fp32. Otherwise ONNX Runtime also rounds the activations of w8 and w4 to 8 bits.
            copy: read the weights into memory instead of mapping them; None for what their size suggests.
            files: of the variant, as they were when it was loaded on a GPU, which closes them.

        Raises:
            BackendUnavailable: the CPU provider has no kernels for the variant's numbers.
            BundleError: the bundle has no such variant, or a graph does not load or is not of the expected form.
            RequestError: threads is less than 1 or more than can be started.
        """
        threads = threads_to_use(threads)
        if folder is None:
            bundle.variant_path(variant)
        check_kernels(bundle, variant)
        self.dimensions, self.limits = bundle.manifest.dimensions, bundle.manifest.limits
        self._pools = HostPool(), HostPool()
        self.capabilities = Capabilities(offers_attention=True, steps_greedily=True, packs=True, threads=threads)
        self.float_type = PRECISIONS[variant].float_type
        self._closes_files = files is None
        self._files = files or VariantFiles(bundle, variant, folder=folder, copy=copy)
        self._threads, self._exact = threads, exact
        self._lock, self._inherited = threading.Lock(), False
        self._encoder: InferenceSession | None = self._load_encoder()
        self._decoder_step: InferenceSession | None = self._load_step()
        tell_of_forks(self)

    def _load_encoder(self) -> InferenceSession:
        return self._load(ENCODER, encoder_inputs(), encoder_outputs(self.dimensions, self.float_type))

    def _load_step(self) -> InferenceSession:
        attention = self.capabilities.gives_attention
        inputs = decoder_step_inputs(self.dimensions, self.float_type)
        outputs = decoder_step_outputs(self.dimensions, self.float_type, attention=attention)
        return self._load(DECODER_STEP_ATTENTION if attention else DECODER_STEP, inputs, outputs)

    def _load(self, name: str, inputs: list[TensorSpec], outputs: list[TensorSpec]) -> InferenceSession:
        return load_session(self._files, name, inputs, outputs, self._threads, exact=self._exact)

    def after_fork(self) -> None:
        """Leave the sessions to the parent: this process loads its own, from the same files, when it needs them."""
        self._lock, self._pools = threading.Lock(), (HostPool(), HostPool())
        self._files.after_fork()
        if self._encoder is not None:
            keep_for_ever(self._encoder)
            keep_for_ever(self._decoder_step)
            self._inherited = True

    def _sessions(self) -> tuple[InferenceSession, InferenceSession]:
        """The encoder's and the decoder step's.

        Raises:
            RequestError: the model is closed.
            BundleError: they were the parent's, and the files have changed since.
        """
        with self._lock:
            if self._inherited:
                self._encoder, self._decoder_step, self._inherited = self._load_encoder(), self._load_step(), False
        encoder, decoder_step = self._encoder, self._decoder_step
        if encoder is None or decoder_step is None:
            raise RequestError("the model is closed", "load the bundle again")
        return encoder, decoder_step

    def with_attention(self) -> OnnxModel:
        """A copy whose steps give attention; slower. The two share the encoder.

        Raises:
            RequestError: the bundle was exported without the graph for it, or the model is closed.
            BundleError: that graph does not load or is not of the expected form.
        """
        self._sessions()
        if DECODER_STEP_ATTENTION not in self._files:
            raise RequestError(
                f"the bundle has no {DECODER_STEP_ATTENTION}, so its steps cannot give attention",
                "tfm-export onnx CHECKPOINT --attention",
            )
        model = copy.copy(self)
        model.capabilities = replace(self.capabilities, gives_attention=True, offers_attention=False)
        model._decoder_step = model._load_step()  # noqa: SLF001 (a copy of this object)
        tell_of_forks(model)
        return model

    def encode(self, source_ids: Ids, source_mask: Mask, *, capacity: int) -> OnnxSentences:
        """Run the encoder on a padded batch and set up its caches; see `StepModel.encode`."""
        encoder, decoder_step = self._sessions()
        check_encode(source_ids, source_mask, capacity, dimensions=self.dimensions, limits=self.limits)
        memory = HostMemory(source_mask, capacity, self.dimensions, self.float_type, self._pools)
        binding = encoder.io_binding()
        binding.bind_cpu_input("source_ids", np.ascontiguousarray(source_ids, np.int64))
        binding.bind_cpu_input("source_mask", memory.source_mask)
        for name, array in memory.cross.items():
            _bind_output(binding, name, array)
        run_bound(encoder, binding, ENCODER)
        memory.zero_padding()
        return OnnxSentences(decoder_step, memory, self.limits, self.capabilities.gives_attention)

    def close(self) -> None:
        """Let go of the sessions, of files and of memory; what batches still need goes with the last of them."""
        with self._lock:
            self._encoder, self._decoder_step, self._inherited = None, None, False
        if self._closes_files:
            self._files.close()
        for pool in self._pools:
            pool.close()


class OnnxSentences(Sentences):
    """A batch of sentences whose caches lie in numpy's memory; see `Sentences`.

    Attributes:
        session: of the decoder step.
        memory: the caches, and what the encoder gave.
    """

    def __init__(self, session: InferenceSession, memory: HostMemory, limits: Limits, attention: bool) -> None:
        self.session, self.memory, self._limits, self._attention = session, memory, limits, attention
        self._bound: dict[tuple[int, bool], _BoundStep] = {}

    @property
    def size(self) -> int:
        """B: rows in use."""
        return self.memory.size

    @property
    def capacity(self) -> int:
        """C: slots of each row."""
        return self.memory.capacity

    def step(
        self, target_ids: Ids, positions: Ids, write_index: Ids, self_mask: Mask, *, full: bool = False
    ) -> StepOutput:
        """Write Q tokens into the cache and say what may follow each; see `Sentences.step`."""
        memory, bound = self.memory, self._filled(target_ids, positions, write_index, self_mask, full)
        run_bound(self.session, bound.binding, DECODER_STEP)
        memory.written = max(memory.written, max(write_index.tolist()) + target_ids.shape[1])
        check_finite(bound.best)
        return bound.output

    def step_greedily(
        self, target_ids: Ids, positions: Ids, write_index: Ids, self_mask: Mask, *, steps: int, until: Until
    ) -> tuple[Ids, Floats]:
        """Take several steps; see `Sentences.step_greedily`."""
        memory, bound = self.memory, self._filled(target_ids, positions, write_index, self_mask, full=False)
        check_steps(positions, write_index, steps, capacity=memory.capacity, limits=self._limits)
        tokens, log_probs = np.empty((memory.size, steps), np.int64), np.empty((memory.size, steps), np.float32)
        taken = 0
        while True:
            run_bound(self.session, bound.binding, DECODER_STEP)
            tokens[:, taken], log_probs[:, taken] = bound.best_ids[:, 0], bound.best[:, 0]
            taken += 1
            if taken == steps or until(bound.best_ids[:, 0].tolist()):
                break
            bound.follow_best()
        memory.written = max(memory.written, max(write_index.tolist()) + taken)
        check_finite(log_probs[:, :taken])
        return tokens[:, :taken], log_probs[:, :taken]

    def _filled(self, target_ids: Ids, positions: Ids, write_index: Ids, self_mask: Mask, full: bool) -> _BoundStep:
        """A step that is ready to be run."""
        memory, given = self.memory, (target_ids, positions, write_index, self_mask)
        check_step_arrays(*given, size=memory.size, capacity=memory.capacity)
        query = target_ids.shape[1]
        bound = self._bound.get((query, full)) or self._bind(query, full)
        if not bound.fill(*given):
            raise RequestError(step_problems(*given, dimensions=memory.dimensions, limits=self._limits))
        return bound

    def _bind(self, query: int, full: bool) -> _BoundStep:
        if len(self._bound) == _BINDINGS:
            del self._bound[next(iter(self._bound))]
        bound = _BoundStep(self.session, self.memory, self._limits, query, full, self._attention)
        self._bound[query, full] = bound
        return bound

    def grow(self, capacity: int) -> None:
        """Give every row `capacity` slots, keeping what is written and zeroing the rest."""
        self.memory.grow(capacity)
        self._bound.clear()

    def pack(self, slots: Ids, capacity: int) -> None:
        """Keep some slots of each row; see `Sentences.pack`."""
        self.memory.pack(slots, capacity)
        self._bound.clear()

    def move(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`."""
        self.memory.move(source, target)

    def shrink(self, size: int) -> None:
        """Keep the first `size` rows."""
        self.memory.shrink(size)
        self._bound.clear()

    def read(self, name: str) -> Floats:
        """A copy of a cache or a cross-attention tensor; see `Sentences.read`."""
        return self.memory.read(name)

    def append(self, other: Sentences) -> None:
        """Copy the rows of freshly encoded sentences of the same model behind this batch's rows."""
        if not isinstance(other, OnnxSentences) or other.session is not self.session:
            raise RequestError("sentences can only join a batch of the same model")
        self.memory.append(other.memory)
        self._bound.clear()


class _BoundStep:
    """A step of fixed shapes, with everything bound: fill the inputs, run the binding, read `output`.

    The integer inputs lie side by side in one buffer, so that a single comparison finds any that is out of range: seen
    as unsigned numbers, negative ones are large.
    """

    def __init__(
        self, session: InferenceSession, memory: HostMemory, limits: Limits, query: int, full: bool, attention: bool
    ) -> None:
        size, dimensions = memory.size, memory.dimensions
        tokens = size * query
        integers = np.zeros(2 * tokens + size, np.int64)
        self._target_ids = integers[:tokens].reshape(size, query)
        self._positions = integers[tokens : 2 * tokens].reshape(size, query)
        self._write_index = integers[2 * tokens :]
        self._self_mask = np.zeros((size, 1, query, memory.capacity), np.bool_)
        self._unsigned, self._bounds = integers.view(np.uint64), np.empty(2 * tokens + size, np.uint64)
        self._bounds[:tokens] = dimensions.target_vocabulary_size
        self._bounds[tokens : 2 * tokens] = limits.max_target_length
        self._bounds[2 * tokens :] = max(memory.capacity - query + 1, 0)

        top = (size, query, dimensions.candidates)
        log_probs = np.zeros((size, query, dimensions.target_vocabulary_size), np.float32) if full else None
        normaliser = np.zeros((size, query), np.float32) if full else None
        source = memory.source_mask.shape[1]
        weights = np.zeros((size, query, source), np.float32) if attention else None
        top_log_probs, top_ids = np.zeros(top, np.float32), np.zeros(top, np.int64)
        self.output = StepOutput(top_log_probs, top_ids, log_probs, normaliser, weights)
        self.best: Floats = self.output.top_log_probs[:, :, 0]
        self.best_ids: Ids = self.output.top_ids[:, :, 0]
        self._rows = np.arange(size)
        self.binding = self._bind(session, memory)

    def _bind(self, session: InferenceSession, memory: HostMemory) -> IOBinding:
        binding = session.io_binding()
        for name, array in memory.in_use().items():
            binding.bind_cpu_input(name, array)
            if name in memory.caches:
                _bind_output(binding, cache_output_name(name), array)  # at the same address: updated in place
        binding.bind_cpu_input("target_ids", self._target_ids)
        binding.bind_cpu_input("positions", self._positions)
        binding.bind_cpu_input("write_index", self._write_index)
        binding.bind_cpu_input("self_mask", self._self_mask)
        _bind_output(binding, "top_log_probs", self.output.top_log_probs)
        _bind_output(binding, "top_ids", self.output.top_ids)
        if self.output.log_probs is not None:
            _bind_output(binding, "log_probs", self.output.log_probs)
        if self.output.log_normaliser is not None:
            _bind_output(binding, "log_normaliser", self.output.log_normaliser)
        if self.output.attention is not None:
            _bind_output(binding, "cross_attention", self.output.attention)
        return binding

    def follow_best(self) -> None:
        """Make each row's best token the next step's, in the slot behind, which it sees. Q must be 1."""
        self._target_ids[:] = self.best_ids
        self._positions += 1
        self._write_index += 1
        self._self_mask[self._rows, 0, 0, self._write_index] = True

    def fill(self, target_ids: Ids, positions: Ids, write_index: Ids, self_mask: Mask) -> bool:
        """Copy the inputs into the bound buffers; False if one is out of range or a query sees nothing."""
        self._target_ids[:] = target_ids
        self._positions[:] = positions
        self._write_index[:] = write_index
        self._self_mask[:] = self_mask
        inside, sees = self._unsigned < self._bounds, np.logical_or.reduce(self._self_mask, axis=-1)
        return bool(np.count_nonzero(inside) == inside.size and np.count_nonzero(sees) == sees.size)


def _bind_output(binding: IOBinding, name: str, array: NDArray[Any]) -> None:
    """Have an output written into an array's memory."""
    binding.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))


def check_kernels(bundle: Bundle, variant: str, *, or_gpu: bool = True) -> None:
    """Make sure that the CPU provider can compute with a variant's numbers.

    Args:
        bundle: an open bundle.
        variant: the precision.
        or_gpu: whether a GPU would do, too.

    Raises:
        BackendUnavailable: it has no kernels for them.
    """
    if PRECISIONS[variant].runs_on_cpu:
        return
    others = [name for name in bundle.manifest.variants if PRECISIONS[name].runs_on_cpu]
    hints = ["a GPU"] * or_gpu + [f"another variant: {', '.join(others)}"] * bool(others)
    raise BackendUnavailable(f"ONNX Runtime's CPU provider cannot run {variant}", ", or ".join(hints))


def load_session(
    files: VariantFiles,
    name: str,
    inputs: list[TensorSpec],
    outputs: list[TensorSpec],
    threads: int,
    *,
    exact: bool = False,
    wide_sums: bool | None = None,
) -> InferenceSession:
    """Load a graph and compare its inputs and outputs with the table; see `OnnxModel` for the other arguments.

    Args:
        files: of its variant.
        name: of the graph.
        inputs: that the table has.
        outputs: that the table has.
        threads: threads an operator may use.
        exact: compute with float32.
        wide_sums: see `session_options`; None for what the graph needs on this processor.

    Raises:
        BundleError: it does not load, or they differ.
    """
    path = files.folder / name
    try:
        graph = files.graph(name)
        wide = needs_wide_sums(graph) if wide_sums is None else wide_sums
        options = session_options(threads, exact=exact, wide_sums=wide)
        kept = files.give_weights(options)
        session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        del kept
    except BundleError:
        raise
    except Exception as problem:  # its exceptions have no base class of their own
        raise BundleError(
            f"{path} cannot be loaded by ONNX Runtime {onnxruntime.__version__}: {problem}", "export the bundle again"
        ) from problem
    check_form(session, path, inputs, outputs)
    return session
