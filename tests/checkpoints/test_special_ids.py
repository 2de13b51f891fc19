"""Special ids of the two sides: given, told by dictionaries, or the same on both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tests.oracles.layouts import Tutorial
from tfm_export.bundle import SourceIds
from tfm_export.checkpoints import read_checkpoint
from tfm_export.checkpoints.special_ids import id_problems, make_special_ids, told_sources
from tfm_export.cli import cli
from tfm_export.errors import CheckpointError

SOURCE = ["<pad>", "<unk>", "<s>", "</s>", "a", "b"]
TARGET = ["<blank>", "<go>", "<stop>", "a", "b", "c", "d"]
TOKENS: dict[str, Any] = {"source_tokens": SOURCE, "target_tokens": TARGET, "heads": 3}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny model of the tutorial's layout, whose sources begin with bos and end with eos."""
    torch.save(Tutorial((len(SOURCE), len(TARGET)), 12, (1, 1), 3, 8, 20).state_dict(), tmp_path / "model.pt")
    return tmp_path / "model.pt"


def test_dictionaries_tell_the_ids_of_each_side(checkpoint: Path) -> None:
    source = read_checkpoint(checkpoint, TOKENS)
    special = source.special_ids
    assert (special.pad, special.bos, special.eos, special.unk) == (0, 1, 2, None)
    assert special.source == SourceIds(pad=0, bos=2, eos=3, unk=1)
    for note in (
        "bos is 1: '<go>' in the target's dictionary",
        "source_bos is 2: '<s>' in the source's dictionary",
        "source_unk is 1: '<unk>' in the source's dictionary",
    ):
        assert note in source.notes
    assert [*source.special_tokens.doubts()] == []


def test_the_dictionary_goes_before_the_targets_ids_and_an_option_before_the_dictionary(checkpoint: Path) -> None:
    both = read_checkpoint(checkpoint, {**TOKENS, "pad": 0, "bos": 1, "eos": 2}).special_ids
    assert both.source == SourceIds(pad=0, bos=2, eos=3, unk=1)
    said = read_checkpoint(checkpoint, {**TOKENS, "source_pad": 3, "source_bos": 4, "source_eos": 5}).special_ids
    assert said.source == SourceIds(pad=3, bos=4, eos=5, unk=1)
    without = {"heads": 3, "pad": 0, "bos": 1, "eos": 2, "source_eos": 3}
    assert read_checkpoint(checkpoint, without).special_ids.source == SourceIds(pad=0, bos=1, eos=3, unk=None)
    without.pop("source_eos")
    assert read_checkpoint(checkpoint, without).special_ids.source is None


def test_what_is_not_told_is_asked_for(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(checkpoint, {**TOKENS, "target_tokens": [*TARGET[:2], "<s>", *TARGET[3:]]})
    assert [problem.split(": ")[0] for problem in error.value.problems[1:]] == ["bos", "eos"]


def test_ids_that_the_vocabularies_do_not_have() -> None:
    sizes = {"source": 6, "target": 9}
    known: dict[str, Any] = {"pad": 7, "bos": 8, "eos": 9, "source_unk": 6, "source_starts_with_bos": True}
    assert id_problems(known, sizes) == [
        "eos id 9 is outside the target vocabulary of 9",
        "pad id 7 is outside the source vocabulary of 6",
        "bos id 8 is outside the source vocabulary of 6",
        "unk id 6 is outside the source vocabulary of 6",
    ]
    known = {"pad": 0, "bos": 8, "eos": 1, "source_bos": None, "source_starts_with_bos": True}
    (problem,) = id_problems(known, sizes)
    assert "--source-bos" in problem


def test_sources_without_special_tokens_have_none() -> None:
    """Letters that have the ids of the target's start, end and unknown token can be read."""
    tokens = {"source": ["<pad>", "a", "b", "c"], "target": ["<pad>", "<s>", "</s>", "<unk>", "x"]}
    known = {"pad": 0, "bos": 1, "eos": 2, "unk": 3}
    told = told_sources(known, tokens)
    assert {name: i for name, (i, _) in told.items()} == dict.fromkeys(("source_bos", "source_eos", "source_unk"))
    ids = {name: i for name, (i, _) in told.items()}
    assert make_special_ids({**known, **ids}).source == SourceIds(pad=0, bos=None, eos=None, unk=None)
    assert "source_eos" not in told_sources({**known, "source_ends_with_eos": True}, tokens)


def test_the_same_token_on_both_sides_stands() -> None:
    """Decoders of fairseq start from </s>, although there is an <s>."""
    tokens = {"source": ["<s>", "<pad>", "</s>", "<unk>", "a"], "target": ["<s>", "<pad>", "</s>", "<unk>", "x", "y"]}
    assert told_sources({"pad": 1, "bos": 2, "eos": 2, "unk": 3}, tokens) == {}
    assert told_sources({"pad": 1, "bos": 2, "eos": 2, "unk": 3}, {"source": tokens["source"]}) == {}


def test_inspect_shows_tokens_and_asks(checkpoint: Path, tmp_path: Path) -> None:
    for side, tokens in (("source", SOURCE), ("target", TARGET)):
        (tmp_path / f"{side}.txt").write_text("\n".join(tokens) + "\n")
    config = tmp_path / "config.json"
    config.write_text(
        f'{{"source_dictionary": "{tmp_path}/source.txt", "target_dictionary": "{tmp_path}/target.txt", "heads": 3}}'
    )
    done = CliRunner().invoke(cli, ["inspect", str(checkpoint), "--config", str(config)])
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "bos 2 '<s>', added 1 '<go>'" in lines
    assert "unk 1 '<unk>' none" in lines
    assert "warning" not in done.output
    options = ["--source-bos", "1", "--source-eos", "4", "--unk", "6"]
    done = CliRunner().invoke(cli, ["inspect", str(checkpoint), "--config", str(config), *options])
    warnings = [line for line in done.stdout.splitlines() if line.startswith("warning")]
    assert warnings == [
        "warning: is '<unk>' the source's bos, id 1? --source-bos gives another",
        "warning: is 'a' the source's eos, id 4? --source-eos gives another",
        "warning: is id 1 the source's bos and unk? --source-unk gives another",
        "warning: is 'd' the target's unk, id 6? --unk gives another, --source-unk alone one for sources only",
    ]
