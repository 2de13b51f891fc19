"""The training loop: loss, schedule, steps, validation, early stop, averaging, and a state to resume from.

The run is a function of its options and its data: the batches of epoch e depend on the seed and e, the dropout of step
n on the seed and n. So a run that was killed goes on from its last saved state with the losses that it would have had;
on the same machine and number of threads they are the same to the last digit.
"""

from __future__ import annotations

import math
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from reference_model.checkpoint import SpecialIds, write_atomically
from reference_model.data import Batch, Pair, batches
from reference_model.model import Transformer, padding_mask


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How to train.

    Attributes:
        epochs: passes over the training pairs.
        batch_tokens: bound on the tokens of a batch; see `data.batches`.
        learning_rate: the highest learning rate.
        warmup: the share of all steps in which the rate rises linearly; then it falls along a half cosine to 0.
        label_smoothing: probability mass that the right token gives up to all tokens.
        weight_decay: AdamW's, for matrices only.
        clip_norm: the gradient's norm is cut to this.
        patience: epochs without a better validation loss before the training stops early; 0 means never.
        average: how many of the last epochs' weights are averaged at the end.
        seed: decides initial weights, batches and dropout.
        save_every: steps between two writes of the training state.

    Raises:
        ValueError: naming every option that does not fit.
    """

    epochs: int = 20
    batch_tokens: int = 4096
    learning_rate: float = 1e-3
    warmup: float = 0.1
    label_smoothing: float = 0.1
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    patience: int = 0
    average: int = 5
    seed: int = 0
    save_every: int = 500

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be at least {least}, found {getattr(self, name)}"
            for least, names in ((1, ("epochs", "batch_tokens", "average", "save_every")), (0, ("patience", "seed")))
            for name in names
            if getattr(self, name) < least
        ]
        problems += [
            f"{name} must be above 0, found {getattr(self, name)}"
            for name in ("learning_rate", "clip_norm")
            if not getattr(self, name) > 0
        ]
        for name in ("warmup", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                problems.append(f"{name} must be in [0, 1), found {getattr(self, name)}")
        if not self.weight_decay >= 0:
            problems.append(f"weight_decay must be at least 0, found {self.weight_decay}")
        if problems:
            raise ValueError("; ".join(problems))


def learning_rate(step: int, total_steps: int, options: TrainingOptions) -> float:
    """The rate of step 0..total_steps-1: a linear warm-up, then a half cosine."""
    warmup_steps = max(1, round(options.warmup * total_steps))
    if step < warmup_steps:
        return options.learning_rate * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return options.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def batch_loss(model: Transformer, batch: Batch, special: SpecialIds, smoothing: float = 0.0) -> Tensor:
    """The mean cross-entropy of the labels that are not padding, in nats a token."""
    # Padding only follows a target's tokens: the causal mask hides it from all of them.
    logits = model(batch.source_ids, batch.source_mask, batch.target_ids)
    return nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), batch.labels.flatten(), ignore_index=special.pad, label_smoothing=smoothing
    )


def autocast() -> Any:
    """A context: bf16 where the processor multiplies it in hardware; elsewhere it would be slower than fp32."""
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"):
        return torch.autocast("cpu", torch.bfloat16)
    return nullcontext()


@torch.inference_mode()
def validation_loss(model: Transformer, pairs: list[Pair], special: SpecialIds, batch_tokens: int) -> float:
    """The mean cross-entropy without label smoothing, in nats a token."""
    model.eval()
    total, tokens = 0.0, 0
    for batch in batches(pairs, special, batch_tokens, seed=None):
        count = int(padding_mask(batch.labels, special.pad).sum())
        total += batch_loss(model, batch, special).item() * count
        tokens += count
    return total / tokens


def average_weights(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of several state dicts."""
    return {
        name: torch.stack([s[name].double() for s in states]).mean(0).to(states[0][name].dtype) for name in states[0]
    }


class Trainer:
    """A run in progress: the model, its optimiser, where it is, and the losses so far."""

    def __init__(
        self, model: Transformer, train: list[Pair], dev: list[Pair], special: SpecialIds, options: TrainingOptions
    ) -> None:
        self.model, self.train_pairs, self.dev_pairs = model, train, dev
        self.special, self.options = special, options
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            betas=(0.9, 0.98),
            fused=True,
        )
        # Every epoch has its own batches, so also its own number of them: the schedule goes by the first one's.
        self.steps_per_epoch = sum(1 for _ in batches(train, special, options.batch_tokens, self._epoch_seed(0)))
        # What the run depends on: a state of another run is not continued.
        self.fingerprint = {"config": asdict(model.config), "options": asdict(options), "pairs": [len(train), len(dev)]}
        self.epoch, self.step_in_epoch = 0, 0
        self.step_losses: list[float] = []
        self.history: list[dict[str, float]] = []
        self.recent: list[dict[str, Tensor]] = []
        self.interrupted = False

    def _epoch_seed(self, epoch: int) -> int:
        return self.options.seed * 1_000_003 + epoch

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs to go on exactly."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
            "step_in_epoch": self.step_in_epoch,
            "step_losses": self.step_losses,
            "history": self.history,
            "recent": self.recent,
            "fingerprint": self.fingerprint,
        }

    def restore(self, state: Any) -> None:
        """Go on from a `state`.

        Raises:
            ValueError: it is the state of a run with another configuration, other options or other data, or no state.
        """
        found = state.get("fingerprint") if isinstance(state, dict) else None
        if found != self.fingerprint:
            raise ValueError(f"expected the state of a run with {self.fingerprint}, found {found}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.step_in_epoch = state["epoch"], state["step_in_epoch"]
        self.step_losses, self.history, self.recent = state["step_losses"], state["history"], state["recent"]

    def run(self, state_path: Path | None = None) -> None:
        """Train to the last epoch, until the validation loss has stopped falling, or until `interrupt` was called.

        Args:
            state_path: where to keep the state.
        """
        while not self.finished and not self.interrupted:
            self._run_epoch(state_path)
            if state_path:
                write_atomically(self.state(), state_path)

    def interrupt(self) -> None:
        """Let `run` save its state after the step that it is at, and return."""
        self.interrupted = True

    @property
    def finished(self) -> bool:
        """Whether the last epoch is over, or `patience` epochs went by without a better validation loss."""
        losses = [epoch["dev_loss"] for epoch in self.history]
        patience = self.options.patience
        stale = bool(patience and losses) and len(losses) - 1 - losses.index(min(losses)) >= patience
        return stale or self.epoch >= self.options.epochs

    def _run_epoch(self, state_path: Path | None) -> None:
        options, start, first = self.options, time.time(), self.step_in_epoch
        epoch_batches = list(
            batches(self.train_pairs, self.special, options.batch_tokens, self._epoch_seed(self.epoch))
        )
        total_steps = self.steps_per_epoch * options.epochs
        bar = tqdm(
            total=len(epoch_batches), initial=first, desc=f"epoch {self.epoch + 1}/{options.epochs}", leave=False
        )
        self.model.train()
        for index in range(first, len(epoch_batches)):
            step = min(self.epoch * self.steps_per_epoch + index, total_steps - 1)
            self.step_losses.append(
                self._train_step(epoch_batches[index], step, learning_rate(step, total_steps, options))
            )
            self.step_in_epoch = index + 1
            bar.update()
            bar.set_postfix(loss=f"{self.step_losses[-1]:.3f}", refresh=False)
            if self.interrupted:
                bar.close()
                return
            if state_path and self.step_in_epoch % options.save_every == 0:
                write_atomically(self.state(), state_path)
        bar.close()
        dev_loss = validation_loss(self.model, self.dev_pairs, self.special, options.batch_tokens)
        losses = self.step_losses[-len(epoch_batches) :]
        self.history.append({"train_loss": sum(losses) / len(losses), "dev_loss": dev_loss})
        # Enough to average, and with early stop to go back to the best epoch.
        kept = max(options.average, options.patience + 1)
        self.recent = [*self.recent, {k: v.clone() for k, v in self.model.state_dict().items()}][-kept:]
        self.epoch, self.step_in_epoch = self.epoch + 1, 0
        tell(
            f"epoch {self.epoch}/{options.epochs}: training loss {self.history[-1]['train_loss']:.4f}, "
            f"validation loss {dev_loss:.4f}, {time.time() - start:.0f} s"
        )

    def _train_step(self, batch: Batch, step: int, rate: float) -> float:
        torch.manual_seed(self.options.seed * 1_000_003 + step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with autocast():
            loss = batch_loss(self.model, batch, self.special, self.options.label_smoothing)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip_norm)
        self.optimizer.step()
        return loss.item()

    def choose_weights(self) -> str:
        """Load the average of the last epochs into the model, or one of the kept epochs if it validates better.

        Returns:
            Which it was, and its validation loss.
        """
        averaged = self.recent[-self.options.average :]
        self.model.load_state_dict(average_weights(averaged))
        loss = validation_loss(self.model, self.dev_pairs, self.special, self.options.batch_tokens)
        kept_losses = [epoch["dev_loss"] for epoch in self.history[-len(self.recent) :]]
        best = min(range(len(kept_losses)), key=kept_losses.__getitem__)
        if loss <= kept_losses[best]:
            return f"average of the last {len(averaged)} epochs, validation loss {loss:.4f}"
        self.model.load_state_dict(self.recent[best])
        return f"epoch {self.epoch - len(self.recent) + best + 1}, validation loss {kept_losses[best]:.4f}"


def tell(message: str) -> None:
    """A line for the person who waits; standard output is for the result."""
    print(message, file=sys.stderr, flush=True)
