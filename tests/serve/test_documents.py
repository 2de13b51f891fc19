"""docs/serving.md and the Dockerfile: what they show works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT, DOCKERFILE = ROOT / "docs/serving.md", ROOT / "examples/docker/Dockerfile"


def test_the_snippet_of_the_document_runs(g2p_bundle: Path) -> None:
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    ended = subprocess.run(
        [sys.executable, "-c", snippet], cwd=g2p_bundle.parent, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("['T IY', 'K AO F IY', ")


@pytest.mark.parametrize("wanted", ["USER 65534:65534", "HEALTHCHECK ", "STOPSIGNAL SIGTERM", '"tfm-export", "serve"'])
def test_the_image_is_not_root_and_has_a_health_check(wanted: str) -> None:
    assert wanted in DOCKERFILE.read_text(encoding="utf-8")
