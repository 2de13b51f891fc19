"""Whether there is what the JavaScript examples need."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.skips import JAVASCRIPT, skip_if

ROOT = Path(__file__).parents[2]

needs_node = skip_if(shutil.which("node") is None, "Node", JAVASCRIPT)


def needs_packages(example: str) -> pytest.MarkDecorator:
    """Skips a test where an example's packages are missing."""
    found = (ROOT / "examples" / example / "node_modules").is_dir()
    return skip_if(not found, f"the packages of examples/{example}", JAVASCRIPT)
