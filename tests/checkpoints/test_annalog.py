"""A real trained checkpoint of the tutorial family, from the package annalog (MIT), against that package's own code.

make installs it without what it depends on: these tests use no more of it than its model and its weights.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from reference_model.checkpoint import SpecialIds as ReferenceSpecialIds
from reference_model.data import pad
from reference_model.search import beam_batch, greedy
from tests.checkpoints.parity import assert_same_model
from tests.skips import skip_if
from tfm_export.checkpoints import read_checkpoint
from tfm_export.export import export_bundle
from tfm_export.model import load

try:
    FOLDER: Path | None = Path(str(metadata.distribution("annalog").locate_file("annalog")))
except metadata.PackageNotFoundError:
    FOLDER = None
pytestmark = skip_if(FOLDER is None, "annalog", ".venv/bin/pip install --no-deps annalog -c constraints.txt")

SETTINGS = {"heads": 8, "pad": 1, "bos": 2, "eos": 3, "unk": 0}
SPECIAL = ReferenceSpecialIds(pad=1, bos=2, eos=3)
LONGEST = 60

# 20 scaffolds of common drugs, each with 10 substituents.
SCAFFOLDS = (
    "CC(=O)Nc1ccc({})cc1", "CC(C)Cc1ccc(C(C){})cc1", "O=C(O)c1ccccc1{}", "Cn1c(=O)c2c(ncn2{})n(C)c1=O",
    "COc1ccc2cc(C(C){})ccc2c1", "CN1CCC(c2ccc({})cc2)CC1", "c1ccc2c(c1)[nH]cc2C{}", "O=S(=O)(N{})c1ccc(N)cc1",
    "Clc1ccc(C2CCN({})CC2)cc1", "CC1(C)SC2C(N{})C(=O)N2C1", "O=C1CN=C(c2ccccc2)c2cc({})ccc2N1",
    "CCN(CC)CCOC(=O)c1ccc({})cc1", "CC(C)NCC(O)COc1ccc({})cc1", "Fc1ccc(C(=O)C2CCN({})CC2)cc1",
    "c1ccc(-c2nc({})cs2)cc1", "O=C(N{})c1cccnc1", "Cc1ccc(-c2cc({})nn2C)cc1", "N#Cc1ccc(C2({})CCCC2)cc1",
    "O=c1[nH]c({})nc2ccccc12", "CN(C)CCc1c[nH]c2ccc({})cc12",
)  # fmt: skip
SUBSTITUENTS = ("C", "CC", "C(C)C", "O", "CO", "N", "CC(=O)O", "c1ccccc1", "Cc1ccccc1", "CCN1CCOCC1")
SMILES = [scaffold.format(part) for scaffold, part in itertools.product(SCAFFOLDS, SUBSTITUENTS)]


@pytest.fixture(scope="module")
def package() -> ModuleType:
    """Its folder of models as a package of its own: annalog itself imports chemistry that is not needed here."""
    folder = ModuleType("annalog_model_files")
    folder.__path__ = [str(FOLDER / "model_files")]
    sys.modules[folder.__name__] = folder
    return folder


class Theirs(nn.Module):
    """Their model with the interface that the reference's search uses."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def encode(self, source_ids: Tensor, source_mask: Tensor) -> Tensor:
        """[B, S] -> memory [B, S, M]."""
        memory: Tensor = self.model.encoder(source_ids, source_mask[:, None, None])
        return memory

    def decode(self, target_ids: Tensor, memory: Tensor, source_mask: Tensor) -> Tensor:
        """[B, T] -> logits [B, T, V]. No mask for padding: targets here have none."""
        mask = torch.ones(1, 1, target_ids.size(1), target_ids.size(1)).tril()
        logits: Tensor = self.model.decoder(target_ids, memory, mask, source_mask[:, None, None])[0]
        return logits

    def logits(self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
        """[B, T, V]."""
        return self.decode(target_ids, self.encode(source_ids, source_mask), source_mask)


@pytest.fixture(scope="module")
def theirs(package: ModuleType) -> Any:
    """Their model as their own code builds and loads it."""
    code = importlib.import_module(f"{package.__name__}.seq2seq_attention")
    sizes = (256, 3, 8, 512, 0.1, "cpu", 102)
    model = code.Seq2Seq(code.Encoder(59, *sizes), code.Decoder(59, *sizes), 1, 1, "cpu")
    state = torch.load(FOLDER / "ckpt_and_vocab/Lev_extended.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(state)

    return Theirs(model).eval()


@pytest.fixture(scope="module")
def sources(package: ModuleType) -> list[list[int]]:
    """The SMILES as their own tokenizer splits them, in the ids of their vocabulary."""
    tokenizer = importlib.import_module(f"{package.__name__}.vocabulary").SMILESTokenizer()
    text = (FOLDER / "ckpt_and_vocab/stereo_experiment_vocab_ttf.pkl").read_bytes()
    ids = read_vocabulary(text)
    return [[2, *(ids.get(t, 0) for t in tokenizer.tokenize(smiles, with_begin_and_end=False)), 3] for smiles in SMILES]


def read_vocabulary(pickled: bytes) -> dict[str, int]:
    """The strings of its list of tokens, in order; the pickle is not executed."""
    import pickletools

    strings = []
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in {"SHORT_BINUNICODE", "BINUNICODE"}:
            strings.append(argument)
        if opcode.name == "APPENDS":
            break
    return {token: i for i, token in enumerate(strings[strings.index("itos") + 1 :])}


def test_its_model_is_read_as_it_is(theirs: Any) -> None:
    source = read_checkpoint(FOLDER / "ckpt_and_vocab/Lev_extended.pt", SETTINGS)
    # Their sqrt(32) is a float32 in any precision, off by 1.7e-8 of itself.
    assert_same_model(source.model, theirs, source=40, target=30, constants_in_float32=True)


@pytest.mark.slow
@pytest.mark.parametrize("search", ["greedy", pytest.param("beam 4", marks=pytest.mark.full)])
def test_its_generations_are_its_own_token_for_token(
    theirs: Any, sources: list[list[int]], tmp_path: Path, search: str
) -> None:
    assert len(sources) == 200
    assert all(i for source in sources for i in source), "a token of these SMILES is unknown"
    bundle, _ = export_bundle(FOLDER / "ckpt_and_vocab/Lev_extended.pt", tmp_path / "bundle", settings=SETTINGS)
    ids = pad(sources, 1)
    mask = torch.from_numpy(np.arange(ids.size(1)) < np.array([[len(s)] for s in sources]))
    with load(bundle.path) as model:
        beam = {} if search == "greedy" else {"beam_size": 4}
        ours = model.generate_ids(sources, max_decoding_length=LONGEST, **beam)
    run: Callable[..., Any] = greedy if search == "greedy" else beam_batch
    expected = run(theirs, ids, mask, SPECIAL, LONGEST, *beam.values())
    best = expected if search == "greedy" else [hypotheses[0] for hypotheses in expected]
    different = [i for i, (a, b) in enumerate(zip(ours, best, strict=True)) if a.hypotheses[0].tokens != b.tokens]
    assert different == []
