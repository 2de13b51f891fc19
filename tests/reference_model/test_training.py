"""The training loop: it learns, it can be killed and go on, and it does what its options say."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from reference_model import SpecialIds, Transformer, TransformerConfig, load_checkpoint
from reference_model import training as training_module
from reference_model.data import Pair, encode_source, make_batch, pad
from reference_model.search import greedy
from reference_model.train import build_trainer, main, parse_arguments, read_texts, resume
from reference_model.training import (
    Trainer,
    TrainingOptions,
    autocast,
    average_weights,
    batch_loss,
    learning_rate,
    validation_loss,
)
from tests.numerics import log_prob_limit, near

SPECIAL = SpecialIds()
TINY = ["--preset", "tiny", "--d-model", "32", "--heads", "2", "--d-ff", "64"]
TINY += ["--encoder-layers", "1", "--decoder-layers", "1", "--max-length", "16"]


def write_task(folder: Path, count: int = 400) -> list[str]:
    """Files of words to spell backwards, and the arguments that name them."""
    rng = random.Random(0)
    words = list(dict.fromkeys("".join(rng.choices("abcdef", k=rng.randint(1, 5))) for _ in range(2 * count)))
    for name, part in (("train", words[:count]), ("dev", words[count : count + 60])):
        lines = "".join(f"{word}\t{word[::-1]}\n" for word in part)
        (folder / f"{name}.tsv").write_text(lines, encoding="utf-8")
    files = ["--train", str(folder / "train.tsv"), "--dev", str(folder / "dev.tsv")]
    return [*files, "--source-split", "characters", "--target-split", "characters", *TINY]


def trainer_of(arguments: list[str]) -> Trainer:
    args = parse_arguments(arguments)
    return build_trainer(args, read_texts(args, SPECIAL), SPECIAL)


SHORT = ["--epochs", "3", "--batch-tokens", "400", "--save-every", "4", "--learning-rate", "3e-3"]


def test_it_learns_to_spell_backwards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "model.pt"
    learn = ["--epochs", "30", "--batch-tokens", "800", "--learning-rate", "6e-3", "--pre-norm", "--dropout", "0"]
    main([*write_task(tmp_path, 600), *learn, "--output", str(output), "--half"])
    out, err = capsys.readouterr()
    assert "epoch 1/30: training loss" in err
    result = json.loads(out)
    checkpoint = load_checkpoint(output)
    history = checkpoint.training["history"]
    assert history[-1]["dev_loss"] < 0.1 * history[0]["dev_loss"]
    assert result["output"] == str(output)
    assert "--learning-rate 6e-3" in checkpoint.training["command"]
    assert checkpoint.generation.max_length == 12  # twice the longest target of 5 letters and its end
    assert not (tmp_path / "model.pt.state").exists()
    assert checkpoint.source_vocabulary is not None
    assert checkpoint.target_vocabulary is not None
    unseen = [line.split("\t")[0] for line in (tmp_path / "dev.tsv").read_text("utf-8").splitlines()]
    source_ids = pad([encode_source(word, checkpoint.source_vocabulary, SPECIAL) for word in unseen], SPECIAL.pad)
    found = greedy(checkpoint.model, source_ids, source_ids != SPECIAL.pad, SPECIAL, 12)
    right = sum(
        checkpoint.target_vocabulary.decode(h.tokens) == word[::-1] for h, word in zip(found, unseen, strict=True)
    )
    assert right >= 0.95 * len(unseen)


KILLED = """
import os, signal, sys
import torch
from reference_model import train, training
torch.set_num_threads(1)
step = training.Trainer._train_step
def killed(self, batch, number, rate):
    loss = step(self, batch, number, rate)
    if len(self.step_losses) == 17:
        os.kill(os.getpid(), signal.SIGKILL)
    return loss
training.Trainer._train_step = killed
train.main(sys.argv[1:])
"""


def test_a_killed_run_goes_on_with_exactly_the_losses_it_would_have_had(tmp_path: Path) -> None:
    arguments = [*write_task(tmp_path), *SHORT, "--output", str(tmp_path / "model.pt")]
    whole = trainer_of(arguments)
    whole.run()

    process = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, text=True, check=False)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert not (tmp_path / "model.pt").exists()
    resumed = trainer_of(arguments)
    resume(resumed, tmp_path / "model.pt.state")
    assert 0 < len(resumed.step_losses) <= 17 < len(whole.step_losses)
    assert resumed.step_losses == whole.step_losses[: len(resumed.step_losses)]
    resumed.run()
    assert resumed.step_losses == whole.step_losses
    assert resumed.history == whole.history
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], weight)
    assert resumed.choose_weights() == whole.choose_weights()


@pytest.fixture
def interrupted_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function: send Ctrl-C, once or more, in the middle of the step with this number."""
    step = Trainer._train_step

    def arm(number: int, times: int = 1) -> None:
        def interrupted(self: Trainer, *args: Any) -> float:
            if len(self.step_losses) == number:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            return step(self, *args)

        monkeypatch.setattr(Trainer, "_train_step", interrupted)

    yield arm
    monkeypatch.setattr(Trainer, "_train_step", step)


def test_ctrl_c_leaves_a_state_and_says_so_in_one_line(
    tmp_path: Path, interrupted_at: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*write_task(tmp_path), *SHORT, "--output", str(tmp_path / "model.pt")]
    usual = signal.getsignal(signal.SIGINT)
    interrupted_at(6)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 130
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "interrupted" in line]
    assert f"epoch 1, step 7: the state is in {tmp_path / 'model.pt.state'}" in line
    assert signal.getsignal(signal.SIGINT) is usual

    interrupted_at(-1)
    main(arguments)
    assert "resuming at epoch 1, step 7" in capsys.readouterr().err
    assert (tmp_path / "model.pt").exists()
    assert not (tmp_path / "model.pt.state").exists()
    whole = trainer_of(arguments)
    whole.run()
    assert load_checkpoint(tmp_path / "model.pt").training["history"] == whole.history


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path, interrupted_at: Any) -> None:
    interrupted_at(6, times=2)
    with pytest.raises(KeyboardInterrupt):
        main([*write_task(tmp_path), *SHORT, "--output", str(tmp_path / "model.pt")])
    assert torch.load(tmp_path / "model.pt.state", weights_only=True)["step_in_epoch"] == 4


@pytest.mark.parametrize("change", [["--seed", "1"], ["--epochs", "4"], ["--d-ff", "32"]])
def test_a_state_of_another_run_is_refused(tmp_path: Path, interrupted_at: Any, change: list[str]) -> None:
    arguments = [*write_task(tmp_path), *SHORT, "--output", str(tmp_path / "model.pt")]
    interrupted_at(0)
    with pytest.raises(SystemExit):
        main(arguments)
    before = (tmp_path / "model.pt.state").read_bytes()
    with pytest.raises(SystemExit, match=r"expected the state of a run with .* Delete it to start afresh"):
        main([*arguments, *change])
    assert (tmp_path / "model.pt.state").read_bytes() == before


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pt.state").write_bytes(b"nothing")
    arguments = [*write_task(tmp_path), *SHORT, "--output", str(tmp_path / "model.pt")]
    with pytest.raises(SystemExit, match=r"model\.pt\.state: .* is damaged.* Delete it"):
        main(arguments)
    torch.save([1], tmp_path / "model.pt.state")
    with pytest.raises(SystemExit, match=r"expected the state of a run with .*, found None\. Delete it"):
        main(arguments)


def test_an_output_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_text("mine", encoding="utf-8")
    with pytest.raises(SystemExit, match="--force to overwrite"):
        main([*write_task(tmp_path), *SHORT, "--output", str(tmp_path / "model.pt")])
    assert (tmp_path / "model.pt").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--epochs", "0", "--clip-norm", "-1", "--label-smoothing", "1"], "epochs .*; clip_norm .*; label_smoothing"),
        (["--max-length", "5"], "longest source has 6 tokens and the longest target has 6 tokens, max_length is 5"),
        (["--heads", "5"], "multiple of heads"),
        (["--dev", "none.tsv"], "none.tsv"),
    ],
)
def test_what_cannot_be_trained_is_refused_at_once(tmp_path: Path, extra: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main([*write_task(tmp_path), "--output", str(tmp_path / "model.pt"), *extra])


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    arguments = write_task(tmp_path)
    (tmp_path / "dev.tsv").write_text("", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"dev\.tsv is empty"):
        main([*arguments, "--output", str(tmp_path / "model.pt")])


def small_trainer(**options: Any) -> Trainer:
    """A run over a few pairs."""
    config = TransformerConfig.preset("tiny", source_vocabulary_size=9, target_vocabulary_size=9, max_length=16)
    pairs: list[Pair] = [([3 + i % 5] * (i % 3 + 1) + [2], [1, 3 + i % 5, 2]) for i in range(24)]
    torch.manual_seed(0)
    return Trainer(Transformer(config), pairs, pairs[:6], SPECIAL, TrainingOptions(**{"batch_tokens": 64, **options}))


def script_validation(monkeypatch: pytest.MonkeyPatch, losses: list[float]) -> None:
    values: Iterator[float] = iter(losses)
    monkeypatch.setattr(training_module, "validation_loss", lambda *_: next(values))


def test_early_stop_and_the_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best is epoch 2; two epochs later the run ends, and goes back to it unless the average is better."""
    trainer = small_trainer(epochs=9, patience=2, average=2)
    script_validation(monkeypatch, [3.0, 2.0, 2.5, 2.2, 2.1])
    trainer.run()
    assert (trainer.epoch, trainer.finished) == (4, True)
    best = trainer.recent[-3]
    assert trainer.choose_weights() == "epoch 2, validation loss 2.0000"
    assert all(torch.equal(weight, best[name]) for name, weight in trainer.model.state_dict().items())


def test_without_patience_all_epochs_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = small_trainer(epochs=5, average=3)
    script_validation(monkeypatch, [1.0, 2.0, 3.0, 4.0, 5.0, 3.9])
    trainer.run()
    assert trainer.epoch == 5
    assert len(trainer.recent) == 3


def test_the_average_is_chosen_when_it_validates_better(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = small_trainer(epochs=3, average=2)
    script_validation(monkeypatch, [3.0, 2.0, 1.0, 0.5])
    trainer.run()
    assert trainer.choose_weights() == "average of the last 2 epochs, validation loss 0.5000"
    for name, weight in trainer.model.state_dict().items():
        mean = (trainer.recent[-1][name].double() + trainer.recent[-2][name].double()) / 2
        assert weight.numpy() == near(mean.numpy())
        assert not torch.equal(trainer.recent[-1][name], trainer.recent[-2][name]), "the epochs are kept apart"


def test_the_average_is_the_mean() -> None:
    found = average_weights([{"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([2.0, 6.0])}, {"a": torch.zeros(2)}])
    assert found["a"].tolist() == pytest.approx([1.0, 8 / 3])
    assert found["a"].dtype == torch.float32


def test_the_schedule() -> None:
    options = TrainingOptions(learning_rate=2.0, warmup=0.1)
    rates = [learning_rate(step, 100, options) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert rates[55] == pytest.approx(1.0)
    assert rates[32] == pytest.approx(1 + math.cos(math.pi * 22 / 90))
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert 0 < rates[-1] < 0.01
    assert learning_rate(0, 1, options) == 2.0


@torch.inference_mode()
def test_the_loss_is_a_mean_over_tokens_whatever_the_padding() -> None:
    model = small_trainer().model.eval()
    limit = 2 * log_prob_limit(model, 6)  # a loss is a mean of log-probabilities
    pairs: list[Pair] = [([3, 2], [1, 5, 2]), ([4, 4, 4, 4, 2], [1, 6, 7, 8, 3, 2]), ([5, 2], [1, 2])]
    together = batch_loss(model, make_batch(pairs, SPECIAL), SPECIAL).item()
    alone = [batch_loss(model, make_batch([pair], SPECIAL), SPECIAL).item() for pair in pairs]
    assert together == pytest.approx((2 * alone[0] + 5 * alone[1] + 1 * alone[2]) / 8, rel=0, abs=limit)
    assert validation_loss(model, pairs, SPECIAL, 5) == pytest.approx(together, rel=0, abs=limit)
    smooth = batch_loss(model, make_batch(pairs[2:], SPECIAL), SPECIAL, 0.1).item()
    logits = model(torch.tensor([[5, 2]]), torch.ones(1, 2, dtype=torch.bool), torch.tensor([[1]]))
    log_probs = logits[0, 0].log_softmax(-1)
    assert smooth == pytest.approx((-0.9 * log_probs[2] - 0.1 * log_probs.mean()).item(), rel=0, abs=limit)


def test_a_step_is_a_function_of_its_number() -> None:
    """Dropout is drawn anew for every step, and the same for the same step."""
    losses = []
    for number in (4, 4, 5):
        trainer = small_trainer()
        trainer.model.train()
        torch.rand(17)
        losses.append(trainer._train_step(make_batch(trainer.train_pairs, SPECIAL), number, 1e-3))
    assert losses[0] == losses[1] != losses[2]


def test_matrices_decay_and_vectors_do_not() -> None:
    groups = small_trainer(weight_decay=0.3).optimizer.param_groups
    assert [(group["weight_decay"], {p.dim() for p in group["params"]}) for group in groups] == [(0.3, {2}), (0.0, {1})]


@pytest.mark.parametrize("capability", ["amx_bf16", "avx512_bf16", None])
def test_bf16_where_the_processor_has_it(monkeypatch: pytest.MonkeyPatch, capability: str | None) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {capability: True} if capability else {"avx2": True})
    with autocast():
        dtype = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    assert dtype == (torch.bfloat16 if capability else torch.float32)
    trainer = small_trainer(epochs=1)
    trainer.run()
    assert all(math.isfinite(loss) for loss in trainer.step_losses)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_a_failed_write_of_the_state_does_not_lose_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = small_trainer(epochs=1, save_every=1)
    trainer.run(tmp_path / "state")
    before = (tmp_path / "state").read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="No space"):
        small_trainer(epochs=1, save_every=1).run(tmp_path / "state")
    assert (tmp_path / "state").read_bytes() == before
    assert os.listdir(tmp_path) == ["state"]
