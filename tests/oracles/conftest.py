"""All tests of this folder run PyTorch on one thread."""

import pytest


@pytest.fixture(autouse=True)
def _one_thread(one_torch_thread: None) -> None:
    """Every test, without asking."""
