"""Which backend runs a bundle on this machine.

There are three: a TensorRT engine of the bundle on the GPU that it was built for, the bundle's ONNX graphs on ONNX
Runtime's CUDA provider, and the same graphs on its CPU provider. They are tried in that order, and the first one that
runs here is taken; a request may leave only some of them. The order depends on nothing but the bundle, the request and
what this machine has.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from tfm_export.bundle import Bundle
from tfm_export.errors import BackendUnavailable, BundleError, RequestError, TfmExportError
from tfm_export.extras import require_onnxruntime
from tfm_export.precision import PRECISIONS
from tfm_export.runtime.cpu.saturation import saturation_note
from tfm_export.runtime.gpu import cuda
from tfm_export.runtime.speculative import SpeculativeModel
from tfm_export.runtime.step_model import StepModel
from tfm_export.runtime.variant_files import VariantFiles

LOG = logging.getLogger(__name__)
BACKENDS = ("auto", "onnxruntime", "tensorrt")
NO_GPU = [0]  # where there is none: `BackendChoice.check` says why
GPU = re.compile(r"cuda|(?:cuda:)?([0-9]{1,4})")
DOCTOR = "tfm-export doctor BUNDLE, which shows what this machine has and what of the bundle runs on it"

Backend = Literal["auto", "onnxruntime", "tensorrt"]
DeviceName = int | str | None


@dataclass(frozen=True, kw_only=True)
class BackendChoice:
    """A way to run a bundle.

    Attributes:
        variant: the precision.
        gpu: the number of the GPU; None for the CPU.
        engine: the name of the TensorRT engine; None for ONNX Runtime.
        draft: the precision that guesses the next tokens; None if none does.
    """

    variant: str
    gpu: int | None = None
    engine: str | None = None
    draft: str | None = None

    def __str__(self) -> str:
        place = "the CPU" if self.gpu is None else f"GPU {self.gpu}"
        if self.engine is not None:
            return f"the TensorRT engine {self.engine} ({self.variant}) on {place}"
        drafted = "" if self.draft is None else f", its tokens guessed by {self.draft}"
        return f"{self.variant} with ONNX Runtime on {place}{drafted}"

    @property
    def variants(self) -> list[str]:
        """The precisions whose files it reads: the draft's, too."""
        return [self.variant] if self.draft is None else [self.variant, self.draft]

    def check(self, bundle: Bundle) -> None:
        """Make sure that it can run here, without loading anything large.

        Raises:
            BackendUnavailable: a library, a driver or a GPU is missing, or is another than the engine's.
            BundleError: the engine was made from other graphs than those of the bundle.
        """
        if self.engine is not None and self.gpu is not None:
            from tfm_export.runtime.gpu.tensorrt_model import check_engine

            cuda.open_gpu(self.gpu)  # without one, it matters little what else is missing
            check_engine(bundle, self.engine, self.gpu)
        elif self.gpu is not None:
            from tfm_export.runtime.gpu.cuda_provider import check_cuda_provider

            check_cuda_provider(self.gpu, variant=self.variant)
        else:
            require_onnxruntime()
            from tfm_export.runtime.cpu.onnx_runtime import check_kernels

            for variant in self.variants:
                check_kernels(bundle, variant, or_gpu=self.draft is None)

    def open(self, bundle: Bundle, *, threads: int | None = None, copy: bool | None = None) -> StepModel:
        """Load it; see `check`, and `open_backend` for the arguments."""
        if self.engine is not None and self.gpu is not None:
            from tfm_export.runtime.gpu.tensorrt_model import TensorRTModel

            return TensorRTModel(bundle, self.engine, self.gpu)
        if self.gpu is not None:
            from tfm_export.runtime.gpu.onnx_cuda import OnnxCudaModel

            files = VariantFiles(bundle, self.variant, copy=copy)
            attending = functools.partial(attending_on_cpu, bundle, self.variant, threads, files=files)
            return OnnxCudaModel(bundle, variant=self.variant, device=self.gpu, attending=attending, files=files)
        from tfm_export.runtime.cpu.onnx_runtime import OnnxModel

        model, *drafts = (OnnxModel(bundle, variant=variant, threads=threads, copy=copy) for variant in self.variants)
        return SpeculativeModel(model, drafts[0], {bundle.manifest.special_ids.eos}) if drafts else model


def open_backend(
    bundle: Bundle,
    *,
    backend: Backend = "auto",
    device: DeviceName = None,
    variant: str | None = None,
    draft: str | None = None,
    threads: int | None = None,
    copy: bool | None = None,
) -> tuple[BackendChoice, StepModel]:
    """Load a bundle on the first backend that runs here.

    Args:
        bundle: an open bundle.
        backend: "onnxruntime" or "tensorrt" for no other; "auto" for any.
        device: the number of a GPU, or "cuda:0", or "cpu", for no other; None for any.
        variant: the precision; see `backend_choices`.
        draft: the precision that guesses the next tokens; see `backend_choices`.
        threads: threads to compute with on the CPU; None for the CPUs this process may use.
        copy: read the weights into memory on a CPU, instead of mapping them; None for what their size suggests.

    Returns:
        What was chosen, and the loaded model.

    Raises:
        BackendUnavailable: nothing that was asked for runs here; it says why.
        BundleError: the bundle has no such variant, or its graphs do not load.
        RequestError: an argument means nothing.
    """
    passed: list[tuple[BackendChoice, TfmExportError]] = []
    found = backend_choices(bundle, backend=backend, device=device, variant=variant, draft=draft)
    for choice in found:
        try:
            choice.check(bundle)
            model = choice.open(bundle, threads=threads, copy=copy)
        except (BackendUnavailable, BundleError) as problem:
            if isinstance(problem, BundleError) and choice.engine is None:
                raise  # a damaged graph is no reason to take another
            passed.append((choice, problem))
        else:
            _tell(bundle, choice, passed)
            return choice, model
    raise _unavailable(passed)


def attending_on_cpu(
    bundle: Bundle, variant: str, threads: int | None = None, *, files: VariantFiles | None = None
) -> StepModel:
    """A variant with steps that give attention, on the CPU: for a GPU, which has no graph for it; much slower.

    Args:
        bundle: an open bundle.
        variant: one that it has.
        threads: threads to compute with; None for the CPUs this process may use.
        files: of the variant, as they were when it was loaded; None for what they are now.

    Raises:
        BackendUnavailable: the CPU cannot run this variant.
        RequestError: the bundle was exported without the graph for it.
    """
    from tfm_export.runtime.cpu.onnx_runtime import OnnxModel

    LOG.info("what needs attention weights is decoded on the CPU")
    with closing(OnnxModel(bundle, variant=variant, threads=threads, files=files)) as model:
        return model.with_attention()


def backend_choices(
    bundle: Bundle,
    *,
    backend: Backend = "auto",
    device: DeviceName = None,
    variant: str | None = None,
    draft: str | None = None,
) -> list[BackendChoice]:
    """The ways to run a bundle that a request leaves, the first choice first.

    Engines come first, those whose variant is nearer to fp32 before others, each on every GPU; then ONNX Runtime on
    the first GPU, where its package for GPUs is installed; then ONNX Runtime on the CPU. Whether they can run here is
    not looked into.

    Args:
        bundle: an open bundle.
        backend: see `open_backend`.
        device: see `open_backend`.
        variant: the precision. None is fp32 with ONNX Runtime, and an engine of any. "auto" is an engine of any; with
            ONNX Runtime the fastest variant that was made for a CPU (`Bundle.fastest_variant`), on a GPU fp16 if the
            bundle has it.
        draft: the precision that guesses the next tokens (see `runtime.speculative`); only ONNX Runtime on the CPU is
            left then. None if none does.

    Raises:
        BackendUnavailable: TensorRT was asked for, and the bundle has no engine.
        BundleError: the bundle has no such variant.
        RequestError: an argument means nothing.
    """
    place = _place(device)
    _check_request(bundle, backend, place, variant)
    if draft is not None:
        return [_drafted(bundle, backend, place, variant, draft)]
    found: list[BackendChoice] = []
    if backend != "onnxruntime" and place != "cpu":
        engines = _engines(bundle, variant)
        if backend == "tensorrt" and not engines:
            raise _no_engine(bundle, variant)
        gpus = (_gpus() or NO_GPU if engines else []) if place is None else [int(place)]
        found += [BackendChoice(variant=of, gpu=gpu, engine=name) for name, of in engines for gpu in gpus]
    if backend != "tensorrt" and place != "cpu" and (place is not None or _has_cuda_provider()):
        on_gpu = ("fp16" if "fp16" in bundle.manifest.variants else "fp32") if variant == "auto" else variant or "fp32"
        found.append(BackendChoice(variant=on_gpu, gpu=0 if place is None else int(place)))
    if backend != "tensorrt" and place in {None, "cpu"}:
        on_cpu = bundle.fastest_variant() if variant == "auto" else variant or "fp32"
        found.append(BackendChoice(variant=on_cpu))
    return found


def _drafted(bundle: Bundle, backend: str, place: str | int | None, variant: str | None, draft: str) -> BackendChoice:
    """The one way to run a bundle whose tokens a draft guesses."""
    if backend == "tensorrt" or place not in {None, "cpu"}:
        raise RequestError("a draft guesses tokens for ONNX Runtime on the CPU only", 'device="cpu", or no draft')
    bundle.variant_path(draft)
    on_cpu = bundle.fastest_variant() if variant == "auto" else variant or "fp32"
    if draft == on_cpu:
        others = [name for name in bundle.manifest.variants if name != on_cpu and PRECISIONS[name].runs_on_cpu]
        raise RequestError(
            f"the draft of {on_cpu} must be another variant, and a faster one",
            f"one of {', '.join(others)}" if others else "tfm-export quantize makes one",
        )
    return BackendChoice(variant=on_cpu, draft=draft)


def survey(
    bundle: Bundle, *, gpus: Sequence[int] | None = None, cpu: bool = True
) -> list[tuple[BackendChoice, TfmExportError | None]]:
    """Every way to run every engine and variant of a bundle, each with what keeps it from running here, if anything.

    Args:
        bundle: an open bundle.
        gpus: their numbers; None for all of this machine.
        cpu: whether the CPU is looked at, too.
    """
    numbers, variants = (_gpus() or NO_GPU) if gpus is None else gpus, list(bundle.manifest.variants)
    ways = [BackendChoice(variant=of, gpu=gpu, engine=name) for name, of in _engines(bundle, None) for gpu in numbers]
    ways += [BackendChoice(variant=variant, gpu=gpu) for gpu in numbers for variant in variants]
    ways += [BackendChoice(variant=variant) for variant in variants if cpu]
    return [(way, _problem(way, bundle)) for way in ways]


def _problem(choice: BackendChoice, bundle: Bundle) -> TfmExportError | None:
    try:
        choice.check(bundle)
    except TfmExportError as problem:
        return problem
    except Exception as problem:  # noqa: BLE001 (a survey tells what is broken, in whatever way)
        return BackendUnavailable(f"{type(problem).__name__}: {problem}")
    return None


def _place(device: DeviceName) -> Literal["cpu"] | int | None:
    """The CPU, the number of a GPU, or None for any."""
    if device is None:
        return None
    if device == "cpu":
        return "cpu"
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return device
    if isinstance(device, str) and (found := GPU.fullmatch(device)):
        return int(found[1] or 0)
    raise RequestError(f'device must be None, "cpu", the number of a GPU or "cuda:NUMBER", found {device!r}')


def _check_request(bundle: Bundle, backend: str, place: str | int | None, variant: str | None) -> None:
    if backend not in BACKENDS:
        raise RequestError(f"backend must be one of {', '.join(BACKENDS)}, found {backend!r}")
    if backend == "tensorrt" and place == "cpu":
        raise RequestError("TensorRT engines run on GPUs only", 'backend="onnxruntime", or another device')
    if variant not in {None, "auto"}:
        bundle.variant_path(str(variant))


def _engines(bundle: Bundle, variant: str | None) -> list[tuple[str, str]]:
    """Names and variants of the engines of a variant, or of all: first those nearer to fp32, then by name."""
    order = {name: place for place, name in enumerate(PRECISIONS)}
    found = [(name, str(facts.get("variant"))) for name, facts in bundle.manifest.engines.items()]
    kept = [(name, of) for name, of in found if variant in {None, "auto", of}]
    return sorted(kept, key=lambda engine: (order.get(engine[1], len(order)), engine[0]))


def _no_engine(bundle: Bundle, variant: str | None) -> BackendUnavailable:
    wanted = "TensorRT engine" if variant in {None, "auto"} else f"TensorRT engine of {variant}"
    there = ", ".join(f"{name} ({of})" for name, of in _engines(bundle, None)) or "none"
    precision = "fp16" if variant in {None, "auto"} else variant
    return BackendUnavailable(
        f"{bundle.path} has no {wanted}; it has {there}", f"tfm-export trt {bundle.path} --{precision} makes one"
    )


def _has_cuda_provider() -> bool:
    """Whether the ONNX Runtime that is installed is the one for GPUs."""
    try:
        return "CUDAExecutionProvider" in require_onnxruntime().get_available_providers()
    except BackendUnavailable:
        return False


def _gpus() -> list[int]:
    """The numbers of the GPUs; none where they cannot be counted."""
    try:
        return [device.index for device in cuda.devices()]
    except Exception:  # noqa: BLE001 (`BackendChoice.check` meets it again)
        return []


def _tell(bundle: Bundle, choice: BackendChoice, passed: list[tuple[BackendChoice, TfmExportError]]) -> None:
    """Log what was chosen, and why it is slow, and what was passed over: as a warning where there is a GPU."""
    level = logging.WARNING if passed and _gpus() else logging.INFO
    for other, problem in passed:
        LOG.log(level, "%s is not used: %s", other, " ".join(problem.problems))
    LOG.info("%s is used", choice)
    for variant in choice.variants if choice.gpu is None else ():
        if note := saturation_note(bundle, variant):
            LOG.info("%s: %s", variant, note)


def _unavailable(passed: list[tuple[BackendChoice, TfmExportError]]) -> TfmExportError:
    """One error for all that was passed over: the error itself where there is but one."""
    if len({str(problem) for _, problem in passed}) == 1:
        return passed[0][1]
    problems = [f"{choice}: {' '.join(problem.problems)}" for choice, problem in passed]
    return BackendUnavailable(problems, DOCTOR)
