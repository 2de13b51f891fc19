"""What becomes of the keys of a Hugging Face folder: all of them are known, and none is dropped in silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.checkpoints.test_huggingface import build
from tests.oracles.layouts import Tutorial
from tfm_export.checkpoints import SourceModel, inspect_checkpoint, read_checkpoint
from tfm_export.checkpoints.generation import FACTS, SAME
from tfm_export.checkpoints.generation_keys import KEYS, documented_table
from tfm_export.errors import CheckpointError

DOCUMENT = Path(__file__).parents[2] / "docs/checkpoints.md"
# A value of each key that is refused or noted, other than a list with an integer.
VALUES = {"num_return_sequences": 2, "num_beam_groups": 2, "cache_implementation": "quantized", "guidance_scale": 1.5}
SPECIAL = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    build("bart").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Callable[..., Path]:
    """A function that makes a folder with these generation settings."""

    def make(config: dict[str, Any] | None = None, special: dict[str, Any] = SPECIAL, **generation: Any) -> Path:
        for path in saved.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        values = {**json.loads((saved / "config.json").read_text()), **(config or {})}
        (tmp_path / "config.json").write_text(json.dumps(values))
        (tmp_path / "generation_config.json").write_text(json.dumps({**special, "max_length": 12, **generation}))
        return tmp_path

    return make


def test_every_attribute_of_their_configuration_is_known() -> None:
    theirs = {name for name in vars(transformers.GenerationConfig()) if name != "_original_object_hash"}
    assert theirs <= KEYS.keys()
    assert {*SAME, *FACTS} <= {name for name, key in KEYS.items() if key.treatment == "applied"}


def test_the_document_has_the_table() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert documented_table() in text, f"docs/checkpoints.md should have:\n{documented_table()}"


def value_of(name: str) -> Any:
    return VALUES.get(name, True if False in KEYS[name].neutral else 0.5)


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if key.treatment == "refused"])
def test_what_cannot_be_had_is_refused_by_name_and_may_be_ignored(folder: Callable[..., Path], name: str) -> None:
    value, sampling = value_of(name), {"do_sample": True} if KEYS[name].sampling else {}
    path = folder(**{name: value}, **sampling)
    with pytest.raises(CheckpointError, match=rf"(?s){name} {value!r}: .*--ignore-generation {name} leaves it out"):
        read_checkpoint(path)
    source = read_checkpoint(path, {"ignore_generation": [name]})
    assert f"generation_config.json has {name} {value!r}, which is ignored, as the settings say" in source.notes
    assert source.settings == {"ignore_generation": [name]}
    without = read_checkpoint(folder(**sampling))
    assert source.generation == without.generation
    for neutral in (None, *KEYS[name].neutral):
        assert read_checkpoint(folder(**{name: neutral}, **sampling)).notes == without.notes


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if key.treatment == "noted"])
def test_what_changes_little_is_noted_by_name(folder: Callable[..., Path], name: str) -> None:
    plain, value = read_checkpoint(folder()), value_of(name)
    source = read_checkpoint(folder(**{name: value}))
    note = f"generation_config.json has {name} {value!r}, which is not applied: {KEYS[name].text}"
    assert [*filter(lambda told: told not in plain.notes, source.notes)] == [note]
    assert source.generation == plain.generation


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if key.treatment == "no effect"])
def test_what_changes_nothing_is_taken_in_silence(folder: Callable[..., Path], name: str) -> None:
    plain = read_checkpoint(folder())
    source = read_checkpoint(folder(**{name: 3}))
    assert (source.notes, source.generation) == (plain.notes, plain.generation)


def said(source: SourceModel) -> str:
    return "\n".join(source.notes)


def test_a_key_of_the_future_is_noted(folder: Callable[..., Path]) -> None:
    source = read_checkpoint(folder(quantum_penalty=2))
    assert "has quantum_penalty 2, a key that tfm-export does not know" in said(source)


def test_draws_have_no_settings_without_do_sample(folder: Callable[..., Path]) -> None:
    source = read_checkpoint(folder(temperature=0.7, min_p=0.1))
    assert "temperature 0.7, which has no effect without do_sample" in said(source)
    assert "min_p 0.1, which has no effect without do_sample" in said(source)
    assert "sampling_temperature" not in source.generation.options


def test_draws_become_the_defaults(folder: Callable[..., Path]) -> None:
    options = read_checkpoint(folder(do_sample=True, temperature=0.7)).generation.options
    assert (options["sampling_topk"], options["sampling_temperature"]) == (50, 0.7)
    assert read_checkpoint(folder(do_sample=True, top_k=500)).generation.options["sampling_topk"] == 59
    with pytest.raises(CheckpointError, match="do_sample true and num_beams 2"):
        read_checkpoint(folder(do_sample=True, num_beams=2))
    assert read_checkpoint(folder(do_sample=True, num_beams=2), {"ignore_generation": ["do_sample"]})


def test_what_transformers_does_not_read_is_noted(folder: Callable[..., Path]) -> None:
    tasks = {"task_specific_params": {"summarization": {"num_beams": 4}}}
    source = read_checkpoint(folder({"num_beams": 4, "repetition_penalty": 1.0, "max_length": 12, **tasks}))
    assert "num_beams 4, which transformers does not read beside generation_config.json" in said(source)
    assert "repetition_penalty" not in said(source)
    assert "task_specific_params (summarization), which generate does not read" in said(source)
    assert source.generation.beam_size == 1


def test_special_ids_that_are_missing(folder: Callable[..., Path]) -> None:
    source = read_checkpoint(folder(special={"bos_token_id": 5}))
    assert (source.special_ids.bos, source.special_ids.eos) == (5, 2)
    assert "no eos_token_id, which lets transformers end no target" in said(source)


@pytest.mark.parametrize(
    ("generation", "problem"),
    [
        ({"max_length": 1}, "max_length 1, which leaves no token"),
        ({"bad_words_ids": [[2]]}, r"bad_words_ids \[\[2\]\]: transformers takes no list of end tokens alone"),
        ({"bad_words_ids": [5]}, r"bad_words_ids \[5\], expected a list of lists of ids"),
        ({"bad_words_ids": [[5, 59]]}, "bad_words_ids with ids that the vocabulary of 59 lacks: 59"),
        ({"sequence_bias": {"5": 1.0}}, "sequence_bias .*expected a list of lists of ids with a number each"),
        ({"sequence_bias": [[[60], 1.0]]}, "sequence_bias with ids that the vocabulary of 59 lacks: 60"),
        ({"sequence_bias": [[[6], float("inf")]]}, "sequence_bias must hold finite numbers"),
        ({"exponential_decay_length_penalty": [5]}, "exponential_decay_length_penalty must be an integer and a number"),
        ({"forced_bos_token_id": 99}, "forced_bos_token_id with ids that the vocabulary of 59 lacks: 99"),
        ({"forced_bos_token_id": 2}, "forced_bos_token_id 2, which ends a target"),
        ({"forced_eos_token_id": 9, "suppress_tokens": [9]}, "forced_eos_token_id 9 among suppress_tokens"),
        ({"forced_eos_token_id": [2, 3], "num_beams": 2}, "a beam search takes any"),
        ({"encoder_repetition_penalty": 0.0}, "encoder_repetition_penalty must be above 0"),
        ({"bos_token_id": "x"}, "bos_token_id 'x', expected a whole number"),
        ({"begin_suppress_tokens": 5}, "begin_suppress_tokens 5, expected a list"),
    ],
    ids=str,
)
def test_values_that_transformers_could_not_use_either(
    folder: Callable[..., Path], generation: dict[str, Any], problem: str
) -> None:
    path = folder(**generation)
    with pytest.raises(CheckpointError, match=problem):
        read_checkpoint(path)


def test_a_key_that_is_not_there_cannot_be_ignored(folder: Callable[..., Path]) -> None:
    (problem,) = inspect_checkpoint(folder(), {"ignore_generation": ["top_q"]}).all_problems()
    assert problem == "ignore_generation names top_q, which generation_config.json does not have"


def test_other_formats_have_no_such_keys(tmp_path: Path) -> None:
    torch.save(Tutorial((11, 13), 12, (1, 1), 3, 8, 20).state_dict(), tmp_path / "foreign.pt")
    problems = inspect_checkpoint(tmp_path / "foreign.pt", {"ignore_generation": ["num_beams"]}).all_problems()
    assert any("ignore_generation is for folders of Hugging Face" in problem for problem in problems)


def test_the_longest_target_of_the_model_is_a_limit(folder: Callable[..., Path]) -> None:
    source = read_checkpoint(folder(max_new_tokens=99))
    assert source.generation.max_length == 40
    assert "max_new_tokens 99: the model's targets end at 40 tokens" in said(source)
