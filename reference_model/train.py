"""Train a Transformer on lines of source<TAB>target.

    python -m reference_model.train --train train.tsv --dev dev.tsv --output model.pt --preset small

The run is a function of its arguments: the batches of epoch e depend on the seed and e, the dropout of step n on the
seed and n. So a run that was killed goes on from its last saved step (`--state`, written every `--save-every` steps
and after each epoch) with the losses that it would have had.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from reference_model.checkpoint import Checkpoint, GenerationDefaults, SpecialIds, save_checkpoint, write_atomically
from reference_model.config import PRESETS, TransformerConfig
from reference_model.data import Batch, Pair, batches, encode_pairs, read_pairs
from reference_model.model import Transformer, padding_mask
from reference_model.vocabulary import SPLITS, Vocabulary

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How to train.

    Attributes:
        epochs: passes over the training pairs.
        batch_tokens: tokens of a batch, source and target and padding.
        learning_rate: the highest learning rate.
        warmup: the share of all steps in which the rate rises linearly; then it falls along a half cosine to 0.
        label_smoothing: probability mass that the right token gives up to all tokens.
        weight_decay: AdamW's, for matrices only.
        clip_norm: the gradient's norm is cut to this.
        patience: epochs without a better validation loss before the training stops early; 0 means never.
        average: how many of the last epochs' weights are averaged at the end.
        seed: decides initial weights, batches and dropout.
        save_every: steps between two writes of the training state.
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
    """bf16 where the processor multiplies it in hardware; elsewhere it would be slower than fp32."""
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

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a `state`.

        Raises:
            ValueError: it is the state of a run with another configuration, other options or other data.
        """
        if state["fingerprint"] != self.fingerprint:
            raise ValueError(f"expected the state of a run with {self.fingerprint}, found {state['fingerprint']}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.step_in_epoch = state["epoch"], state["step_in_epoch"]
        self.step_losses, self.history, self.recent = state["step_losses"], state["history"], state["recent"]

    def run(self, state_path: Path | None = None) -> None:
        """Train to the last epoch, or until the validation loss has stopped falling."""
        while self.epoch < self.options.epochs and not self._out_of_patience():
            self._run_epoch(state_path)
            if state_path:
                write_atomically(self.state(), state_path)

    def _out_of_patience(self) -> bool:
        losses = [epoch["dev_loss"] for epoch in self.history]
        patience = self.options.patience
        return bool(patience and losses and len(losses) - 1 - losses.index(min(losses)) >= patience)

    def _run_epoch(self, state_path: Path | None) -> None:
        options, start, first = self.options, time.time(), self.step_in_epoch
        epoch_batches = list(batches(self.train_pairs, self.special, options.batch_tokens, self._epoch_seed(self.epoch)))
        total_steps = self.steps_per_epoch * options.epochs
        bar = tqdm(total=len(epoch_batches), initial=first, desc=f"epoch {self.epoch + 1}/{options.epochs}", leave=False)
        self.model.train()
        for index in range(first, len(epoch_batches)):
            step = min(self.epoch * self.steps_per_epoch + index, total_steps - 1)
            self.step_losses.append(self._train_step(epoch_batches[index], step, learning_rate(step, total_steps, options)))
            self.step_in_epoch = index + 1
            bar.update()
            bar.set_postfix(loss=f"{self.step_losses[-1]:.3f}", refresh=False)
            if state_path and self.step_in_epoch % options.save_every == 0:
                write_atomically(self.state(), state_path)
        bar.close()
        dev_loss = validation_loss(self.model, self.dev_pairs, self.special, options.batch_tokens)
        losses = self.step_losses[-len(epoch_batches) :]
        self.history.append({"train_loss": sum(losses) / len(losses), "dev_loss": dev_loss})
        self.recent = [*self.recent, {k: v.clone() for k, v in self.model.state_dict().items()}][-options.average :]
        self.epoch, self.step_in_epoch = self.epoch + 1, 0
        print(
            f"epoch {self.epoch}/{options.epochs}: training loss {self.history[-1]['train_loss']:.4f}, "
            f"validation loss {dev_loss:.4f}, {time.time() - start:.0f} s",
            file=sys.stderr,
            flush=True,
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
        """Load the average of the last epochs into the model, unless the last epoch alone validates better."""
        last, average = self.recent[-1], average_weights(self.recent)
        self.model.load_state_dict(average)
        averaged_loss = validation_loss(self.model, self.dev_pairs, self.special, self.options.batch_tokens)
        if averaged_loss <= self.history[-1]["dev_loss"]:
            return f"average of the last {len(self.recent)} epochs, validation loss {averaged_loss:.4f}"
        self.model.load_state_dict(last)
        return f"last epoch, validation loss {self.history[-1]['dev_loss']:.4f}"


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m reference_model.train",
        description="Train a Transformer on lines of source<TAB>target.",
        epilog="example: python -m reference_model.train --train train.tsv --dev dev.tsv --output g2p.pt --preset small",
    )
    files = parser.add_argument_group("files")
    files.add_argument("--train", type=Path, required=True, help="training pairs, source<TAB>target")
    files.add_argument("--dev", type=Path, required=True, help="validation pairs")
    files.add_argument("--output", type=Path, required=True, help="the checkpoint to write")
    files.add_argument("--state", type=Path, help="where to keep the state to resume from [OUTPUT.state]")
    files.add_argument("--half", action="store_true", help="store the weights in fp16")
    files.add_argument("--force", action="store_true", help="overwrite OUTPUT")
    text = parser.add_argument_group("text")
    text.add_argument("--source-split", choices=SPLITS, default="words")
    text.add_argument("--target-split", choices=SPLITS, default="words")
    text.add_argument("--lowercase-source", action="store_true", help="the model reads source text in lower case")
    model = parser.add_argument_group("model (a preset, and what to set differently)")
    model.add_argument("--preset", choices=sorted(PRESETS), default="base")
    for name in ("d-model", "heads", "d-ff", "encoder-layers", "decoder-layers", "max-length"):
        model.add_argument(f"--{name}", type=int)
    model.add_argument("--dropout", type=float)
    model.add_argument("--activation", choices=("relu", "gelu"))
    model.add_argument("--pre-norm", action="store_true", help="normalise before each sublayer, and after each stack")
    model.add_argument("--share-embeddings", action="store_true")
    model.add_argument("--tie-projection", action="store_true")
    training = parser.add_argument_group("training")
    for field, default in vars(TrainingOptions()).items():
        training.add_argument(f"--{field.replace('_', '-')}", type=type(default), default=default, help=f"[{default}]")
    return parser.parse_args(arguments)


def build_config(args: argparse.Namespace, source: Vocabulary, target: Vocabulary) -> TransformerConfig:
    """The configuration that the command line asks for."""
    names = ("d_model", "heads", "d_ff", "encoder_layers", "decoder_layers", "max_length", "dropout", "activation")
    return TransformerConfig.preset(
        args.preset,
        source_vocabulary_size=len(source.tokens),
        target_vocabulary_size=len(target.tokens),
        norm_first=args.pre_norm,
        final_norm=args.pre_norm,
        share_embeddings=args.share_embeddings,
        tie_projection=args.tie_projection,
        **{name: getattr(args, name) for name in names if getattr(args, name) is not None},
    )


def main(arguments: list[str] | None = None) -> None:
    """Parse, train (or go on training), write the checkpoint."""
    args = parse_arguments(arguments)
    if args.output.exists() and not args.force:
        sys.exit(f"{args.output} exists: choose another --output, or --force to overwrite it")
    options = TrainingOptions(**{field: getattr(args, field) for field in vars(TrainingOptions())})
    train_texts, dev_texts = read_pairs(args.train), read_pairs(args.dev)
    texts = train_texts + dev_texts
    source = Vocabulary.from_texts(
        (s for s, _ in texts),
        split=args.source_split,
        special_tokens=SPECIAL_TOKENS,
        lowercase=args.lowercase_source,
    )
    target = Vocabulary.from_texts((t for _, t in texts), split=args.target_split, special_tokens=SPECIAL_TOKENS)
    special = SpecialIds()
    train, dev = (encode_pairs(x, source, target, special) for x in (train_texts, dev_texts))

    torch.manual_seed(options.seed)
    model = Transformer(build_config(args, source, target))
    trainer = Trainer(model, train, dev, special, options)
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(train):,} training pairs, "
        f"{trainer.steps_per_epoch:,} steps an epoch",
        file=sys.stderr,
    )
    state_path = args.state or args.output.with_name(args.output.name + ".state")
    if state_path.exists():
        try:
            trainer.restore(torch.load(state_path, map_location="cpu", weights_only=True))
        except ValueError as problem:
            sys.exit(f"{state_path}: {problem}. Delete it to start afresh, or choose another --state.")
        print(f"resuming at epoch {trainer.epoch + 1}, step {trainer.step_in_epoch}", file=sys.stderr)
    trainer.run(state_path)

    choice = trainer.choose_weights()
    print(choice, file=sys.stderr)
    longest = max(len(t) for _, t in train) - 1  # without the start token
    command = "python -m reference_model.train " + shlex.join(sys.argv[1:] if arguments is None else arguments)
    checkpoint = Checkpoint(
        model=model,
        source_vocabulary=source,
        target_vocabulary=target,
        special_ids=special,
        generation=GenerationDefaults(max_length=min(model.config.max_length, 2 * longest)),
        training={"command": command, "weights": choice, "history": trainer.history, "torch": torch.__version__},
    )
    save_checkpoint(checkpoint, args.output, half=args.half)
    print(json.dumps({"output": str(args.output), "weights": choice, **trainer.history[-1]}))


if __name__ == "__main__":
    main()
