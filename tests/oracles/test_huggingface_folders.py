"""Folders of Hugging Face with settings of all kinds: the tokens of transformers' `generate` with their defaults.

Models of random weights, saved by transformers, whose configurations are then changed on disk. Neither side is told
anything else: transformers loads the folder and generates, and ours decodes with the bundle's defaults.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "transformers", reason="needs transformers: run `.venv/bin/pip install -e '.[dev]' -c constraints.txt`"
)
from click.testing import CliRunner
from transformers import AutoModelForSeq2SeqLM

import tfm_export
from tests.checkpoints.test_huggingface import build
from tfm_export.bundle import Bundle, GenerationDefaults, Limits
from tfm_export.checkpoints import SourceModel, read_checkpoint
from tfm_export.cli import cli
from tfm_export.decoding import DecodeOptions, generate
from tfm_export.runtime.torch_model import TorchModel

QUICK = ("bart", "marian", "t5")
MODELS = ("bart", "mbart", "marian", "m2m_100", "pegasus", "blenderbot", "t5")
LEGACY = {"num_beams": 4, "no_repeat_ngram_size": 2, "length_penalty": 0.5, "min_length": 6, "early_stopping": True}


@dataclass(frozen=True)
class Folder:
    """What is in the files, beside the special ids.

    Attributes:
        generation: of generation_config.json; None where there is none.
        config: of config.json, beside what describes the model.
        note: part of a note that must be given.
    """

    generation: dict[str, Any] | None = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    note: str = ""


FOLDERS = {
    "legacy keys beside generation_config.json": Folder({"max_length": 16}, LEGACY, "does not read beside"),
    "legacy forced first token": Folder({"max_length": 16, "num_beams": 2}, {"forced_bos_token_id": 33}),
    "null over legacy keys": Folder({**dict.fromkeys(LEGACY), "max_new_tokens": 14}, LEGACY, "num_beams 4"),
    "legacy forced last token": Folder({"max_length": 8, "num_beams": 2, "min_length": 30}, {"forced_eos_token_id": 7}),
    "legacy keys alone": Folder(None, {**LEGACY, "max_length": 15, "suppress_tokens": [9, 10]}),
    "legacy bos, nothing else": Folder(
        None, {"force_bos_token_to_be_generated": True, "bos_token_id": 33}, "targets end at 20"
    ),
    "greedy, no first tokens, no bigrams of the source": Folder(
        {"max_new_tokens": 12, "begin_suppress_tokens": [*range(5, 30), -1], "encoder_no_repeat_ngram_size": 2}
    ),
    "beams, tokens of the source, earlier ends": Folder(
        {
            "num_beams": 3,
            "max_length": 20,
            "encoder_repetition_penalty": 1.4,
            "exponential_decay_length_penalty": [4, 1.2],
        }
    ),
    "beams, biases, bad words": Folder(
        {
            "num_beams": 4,
            "max_length": 14,
            "sequence_bias": [[[20], 2.0], [[21], -1.5], [[20, 22], 4.0]],
            "bad_words_ids": [[0], [1], [2], [30, 31], [40]],
            "suppress_tokens": [41, 42, -1, 10**6],
        }
    ),
    "beams, penalties, normalised again": Folder(
        {"num_beams": 3, "max_length": 14, "repetition_penalty": 1.6, "renormalize_logits": True, "length_penalty": 2.0}
    ),
    "no lengths": Folder({"num_beams": 2, "min_new_tokens": 3, "length_penalty": 1.4}, note="targets end at 20 tokens"),
    "forced tokens": Folder(
        {
            "num_beams": 2,
            "max_length": 9,
            "forced_bos_token_id": 33,
            "forced_eos_token_id": [7],
            "begin_suppress_tokens": [*range(34, 55)],
        }
    ),
    "several ends, never early": Folder(
        {"num_beams": 3, "max_length": 18, "eos_token_id": [2, 0, 1, 44, 45], "early_stopping": "never"}
    ),
    "drawn, nearly the best": Folder(
        {"do_sample": True, "temperature": 1e-5, "top_k": 7, "top_p": 0.9, "max_length": 12, "repetition_penalty": 1.5}
    ),
}


def lively(model: Any) -> Any:
    """A model whose next token depends on the source, and is not the last one again since its embedding is the same."""
    generator = torch.Generator().manual_seed(3)
    norms = [name for name, _ in model.named_parameters() if "decoder" in name and name.endswith("norm.weight")]
    last = [name for name in norms if "layers" not in name and "block" not in name] or norms[-1:]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and ("encoder_attn" in name or "EncDec" in name):
                parameter.mul_(8)
            elif parameter.dim() == 1 and name.endswith("bias"):
                parameter.mul_(0.1)
            if name in last:
                parameter.mul_(torch.randint(0, 2, parameter.shape, generator=generator) - 0.5)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.mul_(0.1)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that builds a model and saves its folder, once."""
    done: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in done:
            done[name] = tmp_path_factory.mktemp("saved")
            lively(build(name)).save_pretrained(done[name])
        return done[name]

    return save


def change(path: Path, target: Path, folder: Folder) -> Path:
    """A copy of a folder with other settings of generation."""
    shutil.copytree(path, target)
    ids = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
    own = json.loads((path / "generation_config.json").read_text())
    special = {name: own[name] for name in ids if name in own}
    if folder.generation is None:
        (target / "generation_config.json").unlink()
    else:
        (target / "generation_config.json").write_text(json.dumps({**special, **folder.generation}))
    config = json.loads((path / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **special, **folder.config}))
    return target


def assert_same_tokens(folder: Path, source: SourceModel, sources: int) -> None:
    """Both generate for random sources of several lengths, one by one; the end token and the start token left out."""
    theirs = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    special, size = source.special_ids, source.model.config.source_vocabulary_size
    generator = torch.Generator().manual_seed(11)
    ids = [[*torch.randint(3, size - 2, (2 + n,), generator=generator).tolist(), special.eos] for n in range(sources)]
    # As a bundle keeps them.
    defaults = GenerationDefaults(**json.loads(json.dumps(asdict(source.generation))))
    options = DecodeOptions(
        beam_size=defaults.beam_size,
        length_penalty=defaults.length_penalty,
        max_decoding_length=defaults.max_length,
        return_end_token=True,
        **defaults.options,
    )
    limits = Limits(max_source_length=40, max_target_length=39)
    results = generate(TorchModel(source.model, limits=limits), ids, options, special)
    ours = [result.hypotheses[0].tokens for result in results]
    # Their cache wants as many layers in the decoder as in the encoder.
    expected = [theirs.generate(torch.tensor([one]), use_cache=False)[0, 1:].tolist() for one in ids]
    assert ours == expected
    assert len({tuple(tokens) for tokens in expected}) > 1


CASES = [
    pytest.param(name, kind, id=f"{name}, {kind}", marks=[] if name in QUICK else pytest.mark.full)
    for name in MODELS
    for kind in FOLDERS
]


# Transformers warns of its default length, and of a least length that is more than the longest.
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default", "ignore:Unfeasible length constraints")
@pytest.mark.parametrize("sources", [4, pytest.param(10, marks=pytest.mark.full)])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_folder_generates_what_transformers_generates_from_it(
    saved: Callable[[str], Path], tmp_path: Path, name: str, kind: str, sources: int
) -> None:
    folder = change(saved(name), tmp_path / "folder", FOLDERS[kind])
    source = read_checkpoint(folder)
    assert FOLDERS[kind].note in "\n".join(source.notes)
    assert_same_tokens(folder, source, sources)


def test_a_bundle_of_such_a_folder(saved: Callable[[str], Path], tmp_path: Path) -> None:
    settings = {
        "num_beams": 3,
        "max_length": 14,
        "forced_bos_token_id": 33,
        "renormalize_logits": True,
        "sequence_bias": [[[20], 2.0], [[20, 22], 4.0]],
        "begin_suppress_tokens": [21, 22],
        "exponential_decay_length_penalty": [4, 1.2],
        "encoder_no_repeat_ngram_size": 2,
    }
    folder = change(saved("bart"), tmp_path / "folder", Folder({**settings, "guidance_scale": 1.5}))
    arguments = ["onnx", str(folder), "-o", str(tmp_path / "bundle"), "--no-verify"]
    refused = CliRunner().invoke(cli, arguments)
    assert refused.exit_code == 1
    assert "guidance_scale 1.5" in refused.stderr
    done = CliRunner().invoke(cli, [*arguments, "--ignore-generation", "guidance_scale"])
    assert done.exit_code == 0, done.output
    assert "note: generation_config.json has guidance_scale 1.5, which is ignored" in done.stdout
    model_facts = Bundle.open(tmp_path / "bundle").manifest.model
    assert model_facts["settings"] == {"ignore_generation": ["guidance_scale"]}
    sources = [[5, 9, 17, 2], [20, 21, 22, 30, 41, 7, 2], [8, 2]]
    theirs = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    with tfm_export.load(tmp_path / "bundle") as model:
        ours = [generation.tokens for generation in model.generate_ids(sources, return_end_token=True)]
    expected = [
        theirs.generate(torch.tensor([ids]), use_cache=False, guidance_scale=1.0)[0, 1:].tolist() for ids in sources
    ]
    assert ours == expected
