"""The engine runtime on a real GPU, step by step: batches that change, graphs, memory that is used again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.emulation.scenario import drive
from tests.gpu.conftest import G2P, MODULES
from tfm_export.bundle import Bundle
from tfm_export.runtime.gpu.tensorrt_model import TensorRTModel

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("flavor", MODULES)
def test_rows_that_join_leave_and_grow_are_as_if_alone(
    g2p: Path,
    add_engine: Callable[[str, str], str],
    flavor: str,
    record_property: Callable[[str, object], None],
) -> None:
    from reference_model import load_checkpoint
    from tfm_export.runtime.torch_model import TorchModel

    engine, bundle = add_engine(flavor, "fp32"), Bundle.open(g2p, check_hashes=False)
    reference = load_checkpoint(G2P / "g2p.pt").model
    exact = TorchModel(copy.deepcopy(reference).double(), limits=bundle.manifest.limits)
    model = TensorRTModel(bundle, engine, workers=2)
    error = drive(model, exact)
    record_property("largest error of log_probs, in parts of the limit", f"{error:.1e}")
    record_property("graphs", model.capture_problem or "captured")
    model.close()
    assert error <= 1
    assert flavor == "rtx" or model.capture_problem is None
