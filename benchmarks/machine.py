"""Where a measurement was taken, and of which state of this repository."""

from __future__ import annotations

import subprocess
from typing import Any

from tfm_export.bench.machine import describe as describe_machine

PACKAGES = ("tfm-export", "numpy", "onnxruntime", "torch", "ctranslate2")


def describe() -> dict[str, Any]:
    """The machine, the versions, the commit and the time."""
    return {
        **describe_machine(PACKAGES),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
