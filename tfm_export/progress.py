"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]
"""Told what begins; told again with another count behind its last comma ("..., 32 of 200"), how far that is."""
