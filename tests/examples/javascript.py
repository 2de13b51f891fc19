"""Whether there is what the JavaScript examples need."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def needs_packages(example: str) -> pytest.MarkDecorator:
    """Skips a test where an example's packages are missing."""
    found = (ROOT / "examples" / example / "node_modules").is_dir()
    return pytest.mark.skipif(
        not found, reason=f"the packages of examples/{example} are not installed: make javascript"
    )
