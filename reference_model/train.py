"""Train a Transformer on lines of source<TAB>target.

    python -m reference_model.train --train train.tsv --dev dev.tsv --output model.pt --preset small

A run that was killed goes on where it was when the same command is given again: its state is in OUTPUT.state (or
`--state`), written every `--save-every` steps, after each epoch and on Ctrl-C. When the checkpoint is written the
state is removed. `training.py` has the loop.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reference_model.checkpoint import Checkpoint, GenerationDefaults, SpecialIds, read_file, save_checkpoint
from reference_model.config import ACTIVATIONS, PRESETS, TransformerConfig
from reference_model.data import Pair, encode_pairs, read_pairs
from reference_model.model import Transformer
from reference_model.training import Trainer, TrainingOptions, tell
from reference_model.vocabulary import SPLITS, Vocabulary

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m reference_model.train",
        description="Train a Transformer on lines of source<TAB>target.",
        epilog="example: python -m reference_model.train --train train.tsv --dev dev.tsv --output g2p.pt --preset tiny",
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
    model.add_argument("--activation", choices=ACTIVATIONS)
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


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The training and validation pairs in ids, and the vocabularies made from them."""

    train: list[Pair]
    dev: list[Pair]
    source: Vocabulary
    target: Vocabulary


def read_texts(args: argparse.Namespace, special: SpecialIds) -> Texts:
    """Read both files and build the vocabularies.

    Raises:
        ValueError: a file is malformed or empty.
    """
    train, dev = read_pairs(args.train), read_pairs(args.dev)
    for path, pairs in ((args.train, train), (args.dev, dev)):
        if not pairs:
            raise ValueError(f"{path} is empty")
    source = Vocabulary.from_texts(
        (s for s, _ in train + dev),
        split=args.source_split,
        special_tokens=SPECIAL_TOKENS,
        lowercase=args.lowercase_source,
    )
    target = Vocabulary.from_texts((t for _, t in train + dev), split=args.target_split, special_tokens=SPECIAL_TOKENS)
    return Texts(
        train=encode_pairs(train, source, target, special),
        dev=encode_pairs(dev, source, target, special),
        source=source,
        target=target,
    )


def check_lengths(texts: Texts, max_length: int) -> None:
    """Find out before the training whether every pair fits the position table.

    Raises:
        ValueError: naming the side and the length that do not.
    """
    pairs = texts.train + texts.dev
    longest = {"source": max(len(s) for s, _ in pairs), "target": max(len(t) - 1 for _, t in pairs)}
    problems = [f"the longest {side} has {n} tokens" for side, n in longest.items() if n > max_length]
    if problems:
        raise ValueError(f"{' and '.join(problems)}, max_length is {max_length}: raise --max-length or drop such lines")


def build_trainer(args: argparse.Namespace, texts: Texts, special: SpecialIds) -> Trainer:
    """The run that the command line asks for, at its beginning.

    Raises:
        ValueError: an option does not fit, or a pair is too long.
    """
    options = TrainingOptions(**{field: getattr(args, field) for field in vars(TrainingOptions())})
    config = build_config(args, texts.source, texts.target)
    check_lengths(texts, config.max_length)
    torch.manual_seed(options.seed)
    return Trainer(Transformer(config), texts.train, texts.dev, special, options)


def resume(trainer: Trainer, state_path: Path) -> None:
    """Restore a state that an earlier run left, or stop with the reason."""
    try:
        trainer.restore(read_file(state_path))
    except ValueError as problem:
        sys.exit(f"{state_path}: {problem}. Delete it to start afresh, or choose another --state.")
    tell(f"resuming at epoch {trainer.epoch + 1}, step {trainer.step_in_epoch}")


@contextmanager
def interruptible(trainer: Trainer) -> Iterator[None]:
    """Within it, the first Ctrl-C ends the run after the step that it is at; the second kills it as usual."""
    usual = signal.getsignal(signal.SIGINT)

    def on_interrupt(*_: Any) -> None:
        trainer.interrupt()
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def main(arguments: list[str] | None = None) -> None:
    """Parse, train (or go on training), write the checkpoint."""
    args = parse_arguments(arguments)
    if args.output.exists() and not args.force:
        sys.exit(f"{args.output} exists: choose another --output, or --force to overwrite it")
    special = SpecialIds()
    try:
        texts = read_texts(args, special)
        trainer = build_trainer(args, texts, special)
    except (OSError, ValueError) as problem:
        sys.exit(str(problem))
    parameters = sum(p.numel() for p in trainer.model.parameters())
    tell(f"{parameters:,} parameters, {len(texts.train):,} training pairs, {trainer.steps_per_epoch:,} steps an epoch")
    state_path = args.state or args.output.with_name(args.output.name + ".state")
    if state_path.exists():
        resume(trainer, state_path)
    with interruptible(trainer):
        trainer.run(state_path)
    if not trainer.finished:
        where = f"epoch {trainer.epoch + 1}, step {trainer.step_in_epoch}"
        tell(f"interrupted at {where}: the state is in {state_path}; the same command goes on from there")
        sys.exit(130)

    choice = trainer.choose_weights()
    tell(choice)
    longest = max(len(t) for _, t in texts.train) - 1  # without the start token
    command = "python -m reference_model.train " + shlex.join(sys.argv[1:] if arguments is None else arguments)
    checkpoint = Checkpoint(
        model=trainer.model,
        source_vocabulary=texts.source,
        target_vocabulary=texts.target,
        special_ids=special,
        generation=GenerationDefaults(max_length=min(trainer.model.config.max_length, 2 * longest)),
        training={"command": command, "weights": choice, "history": trainer.history, "torch": str(torch.__version__)},
    )
    save_checkpoint(checkpoint, args.output, half=args.half)
    state_path.unlink(missing_ok=True)
    print(json.dumps({"output": str(args.output), "weights": choice, **trainer.history[-1]}))


if __name__ == "__main__":
    main()
