"""A step model that also tells what logits are above log-probabilities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from reference_model import Transformer
from tfm_export.bundle import Limits
from tfm_export.runtime.step_model import Ids, Mask, StepOutput
from tfm_export.runtime.torch_model import TorchModel


class WithLogits(TorchModel):
    """A `TorchModel` whose steps give `log_normaliser` with `log_probs`."""

    logits: Tensor

    def __init__(self, model: Transformer, limits: Limits) -> None:
        super().__init__(model, limits=limits)
        model.projection.register_forward_hook(lambda *call: setattr(self, "logits", call[-1]))

    def encode(self, source_ids: Ids, source_mask: Mask, *, capacity: int) -> Any:
        sentences = super().encode(source_ids, source_mask, capacity=capacity)
        plain = sentences.step

        def step(*arrays: Any, full: bool = False) -> StepOutput:
            output = plain(*arrays, full=full)
            if output.log_probs is None:
                return output
            return replace(output, log_normaliser=self.logits[..., 0].numpy() - output.log_probs[..., 0])

        sentences.step = step  # type: ignore[method-assign]
        return sentences
