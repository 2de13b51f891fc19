"""What PyTorch says, without any cache: the source of truth for a teacher-forced target."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from reference_model import Transformer
from tfm_export.checkpoints.adapter import Adapter
from tfm_export.graph import DECODER_STEP, ENCODER
from tfm_export.graph_files import read_graph
from tfm_export.precision import FLOAT32_EPSILON, TIMES_ROUNDING
from tfm_export.verify.steps import TeacherForcing, Trace, TracedReference

Reference = Transformer | Adapter
POSITIONS = "embedding.positions"  # the table in both graphs


@dataclass(frozen=True)
class ReferenceRun:
    """One forward pass over whole targets.

    Attributes:
        log_probs: [B, T, V] float64.
        keys_values: every tensor that the graphs cache, by its name in the graph table: self_* [B, H, T, D] and
            cross_* [B, H, S, D], float64.
    """

    log_probs: NDArray[np.float64]
    keys_values: dict[str, NDArray[np.float64]]


def in_precision(model: Reference, dtype: torch.dtype) -> Reference:
    """A copy of a model that computes in another float type, position table included.

    The weights of a reference model stay the model's own: each layer casts its own while it computes, so that a model
    of several gigabytes is not there three times over. An adapter's code may read any weight anywhere, so its are cast.
    """
    if isinstance(model, Adapter):
        return copy.deepcopy(model).to(dtype).eval()
    weights = {id(weight): weight for weight in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, weights)
    for module in copied.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda _module, _inputs, rows: rows.to(dtype))
        elif [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            caster = _Caster(module, dtype)
            module.register_forward_pre_hook(caster.before)
            module.register_forward_hook(caster.after)
    return copied.eval()


class _Caster:
    """Casts a module's own weights while it computes.

    Args:
        module: the module.
        dtype: what it computes in.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.parameters, self.buffers, self.dtype = {**module._parameters}, {**module._buffers}, dtype  # noqa: SLF001

    def before(self, module: nn.Module, _inputs: Any) -> None:
        """Cast them."""
        for name, parameter in self.parameters.items():
            if parameter is not None:
                setattr(module, name, nn.Parameter(parameter.detach().to(self.dtype), requires_grad=False))
        for name, buffer in self.buffers.items():
            if buffer is not None and buffer.is_floating_point():
                setattr(module, name, buffer.to(self.dtype))

    def after(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        """Put back what they were."""
        for name, value in {**self.parameters, **self.buffers}.items():
            setattr(module, name, value)


@torch.inference_mode()
def run_reference(
    model: Reference, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor, places: Sequence[int] | None = None
) -> ReferenceRun:
    """Run a model once over whole targets and keep what its decoder projects.

    Args:
        model: in the precision to measure.
        source_ids: [B, S].
        source_mask: [B, S].
        target_ids: [B, T], from the start token on.
        places: of the target, for whose log-probabilities to ask; all of them by default.
    """
    if isinstance(model, Adapter):
        return _run_adapter(model, source_ids, source_mask, target_ids, places)
    kept: dict[str, Tensor] = {}
    hooks = [
        linear.register_forward_hook(_keep(kept, f"{kind}_{part}_{i}"))
        for i, layer in enumerate(model.decoder_layers)
        for kind, attention in (("self", layer.self_attention), ("cross", layer.cross_attention))
        for part, linear in (("key", attention.W_k), ("value", attention.W_v))
    ]
    if places is not None:
        hooks.append(model.projection.register_forward_pre_hook(lambda _module, inputs: (inputs[0][:, places],)))
    try:
        log_probs = model(source_ids, source_mask, target_ids).double().log_softmax(-1)
    finally:
        for hook in hooks:
            hook.remove()
    split = model.decoder_layers[0].self_attention.split_heads
    return ReferenceRun(log_probs.numpy(), {name: split(x).double().numpy() for name, x in kept.items()})


def _run_adapter(
    model: Adapter, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor, places: Sequence[int] | None
) -> ReferenceRun:
    """What is cached as `decode_step` computes it, and what comes out as `decode` does, which may be other code."""
    memory = model.encode(source_ids, source_mask)
    logits = model.decode(target_ids, memory, source_mask)
    log_probs = (logits if places is None else logits[:, places]).double().log_softmax(-1)
    _, caches = model.decode_with_cache(target_ids, memory, source_mask)
    kept = {
        f"{kind}_{part}_{i}": tensor.double().numpy()
        for kind, layers in (("self", caches), ("cross", model.cross_keys_values(memory)))
        for i, pair in enumerate(layers)
        for part, tensor in zip(("key", "value"), pair, strict=True)
    }
    return ReferenceRun(log_probs.numpy(), kept)


def _keep(kept: dict[str, Tensor], name: str) -> Callable[[nn.Module, Any, Tensor], None]:
    def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        kept[name] = output

    return hook


def float64_reference(model: Reference, folder: Path | None = None) -> TracedReference:
    """PyTorch in float64, for `steps.compare_steps`.

    Args:
        model: in float32.
        folder: with its graphs, if they may have been exported on another machine.
    """
    if folder is not None and not isinstance(model, Adapter):
        model = _with_stored_positions(model, folder)
    exact, watch = in_precision(model, torch.float64), _Float32Watch()  # type: ignore[no-untyped-call]

    def trace(case: TeacherForcing) -> Trace:
        source_ids, source_mask = torch.from_numpy(case.source_ids), torch.from_numpy(case.source_mask)
        with watch:
            target_ids = torch.from_numpy(case.target_ids)
            run = run_reference(exact, source_ids, source_mask, target_ids, case.places.tolist())
        visible = case.source_mask[:, None, :, None]
        tensors = {n: np.where(visible, x, 0) if n.startswith("cross") else x for n, x in run.keys_values.items()}
        return {"log_probs": run.log_probs, **tensors}

    adapter = isinstance(model, Adapter)
    return TracedReference(trace=trace, tables=adapter, float32_inside=lambda: adapter and watch.found)


def _with_stored_positions(model: Transformer, folder: Path) -> Transformer:
    """The model with the position tables that its graphs hold, where they are its own but for rounding.

    A table of sinusoids is computed anew in float32 wherever a checkpoint is read, and its last digits are the
    processor's: those of the angle, position times frequency, are as large as the position.
    """
    copied = copy.deepcopy(model, {id(weight): weight for weight in (*model.parameters(), *model.buffers())})
    for positions, name in ((copied.source_positions, ENCODER), (copied.target_positions, DECODER_STEP)):
        stored = read_graph(folder / name).graph.initializers.get(POSITIONS)
        table = positions.table
        if table is None or stored is None or stored.const_value is None:
            continue
        kept = torch.from_numpy(stored.const_value.numpy().copy())
        rounding = TIMES_ROUNDING * FLOAT32_EPSILON * (1 + torch.arange(len(kept)))[:, None]
        if kept.shape == table.shape and bool(((kept - table).abs() <= rounding).all()):
            positions.table = nn.Parameter(kept, requires_grad=False) if isinstance(table, nn.Parameter) else kept
    return copied


class _Float32Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether anything is rounded to fewer bits than float64 has: whole numbers, as of masks, are not."""

    found = False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        tensors = output if isinstance(output, list | tuple) else (output,)
        self.found = self.found or any(isinstance(t, Tensor) and _is_rounded(t) for t in tensors)
        return output


def _is_rounded(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return False
    # What -1e9 or the least number of a type is written as means itself.
    return not bool((tensor == tensor.round()).all())
