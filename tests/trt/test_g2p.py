"""The shipped model, whose weights are trained and large enough for their bytes to tell: engines of every precision."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.once import Once
from tests.trt.conftest import build
from tests.trt.variants import add_variant
from tfm_export.bundle import Bundle
from tfm_export.precision import PRECISIONS
from tfm_export.quantize import QuantizeOptions, quantize_bundle

G2P = Path(__file__).parents[2] / "examples" / "g2p"
WORDS = 40
CLIPPED = {"int8", "fp8"}  # whose activations the tests clip anywhere: what they decode means nothing

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("rtx")]


@pytest.fixture(scope="module")
def g2p(once: Once) -> Path:
    """Its bundle with a variant of every precision."""

    def make(folder: Path) -> None:
        from tfm_export.export import export_bundle

        words = (G2P / "words.txt").read_text(encoding="utf-8").split()[:WORDS]
        bundle, _ = export_bundle(G2P / "g2p.pt", folder / "tfm_bundle", inputs=words, verify=False)
        for name in PRECISIONS:
            if name != "fp32":
                add_variant(bundle, name)

    return once("g2p_every_precision", make) / "tfm_bundle"


@pytest.mark.parametrize("variant", PRECISIONS)
def test_every_precision_is_proven_to_the_byte(g2p: Path, tmp_path: Path, variant: str) -> None:
    bundle = Bundle.open(shutil.copytree(g2p, tmp_path / "b"))
    sizes = {"max_beam_size": 4, "max_target_length": 64, "capacities": (64,)}
    record = build(bundle, variant=variant, verify=variant not in CLIPPED, **sizes)
    assert record.attention == ("decomposed" if variant == "fp32" else "fused")
    for plan, proof in record.proofs.items():
        # Measured: 25 to 142 kB more than 1.5 to 11.2 MB, whose half or double this could not be.
        assert -5_000 < proof["stored_bytes"] - proof["weight_bytes"] < 200_000, plan
    if variant not in CLIPPED:
        assert min(record.agreement.values()) >= PRECISIONS[variant].agreement


def test_an_encoder_of_int8_before_a_decoder_of_w4_decodes_like_the_variant(g2p: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(shutil.copytree(g2p, tmp_path / "b"))
    quantize_bundle(bundle, "w4", QuantizeOptions(keep=True, int8_encoder=True), force=True)
    record = build(bundle, variant="w4", verify=True, max_beam_size=4, max_target_length=64, capacities=(64,))
    assert record.proofs["encoder"]["products"] == {"int8 x int8": 24}
    assert record.proofs["decoder_step_64"]["products"] == {"float16 x int4": 19}
    assert min(record.agreement.values()) >= PRECISIONS["w4"].agreement


@pytest.mark.parametrize("target", ["7.5", "8.0", "8.6", "8.9", "12.0", "12.1"])
def test_every_gpu(g2p: Path, tmp_path: Path, target: str) -> None:
    bundle = Bundle.open(shutil.copytree(g2p, tmp_path / "b"))
    record = build(bundle, variant="fp16", compute_capabilities=(target,), max_beam_size=8, max_target_length=64)
    assert record.compute_capabilities == (target,)
    assert record.capacities == (520,)
