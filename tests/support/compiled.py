"""Where tests keep what they compile: $PHALANX_TEST_CACHE, or phalanx/tests in the user's cache directory."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

__all__ = ["folder", "native_folder"]

_HEADERS = Path(__file__).resolve().parents[2] / "core" / "include"


def folder(name: str) -> Path:
    """The folder of this name; it need not exist."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("PHALANX_TEST_CACHE") or Path(cache) / "phalanx" / "tests") / name


def native_folder(name: str) -> Path:
    """A value of PHALANX_NATIVE, for modules that phalanx names by their own sources, torch and Python.

    Args:
        name: What is compiled there, such as "c10d", so that a test finds nothing in it that it did not ask for.
    """
    text = "\0".join(path.read_text() for path in sorted(_HEADERS.rglob("*.h*")))
    found = folder(f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}")
    found.mkdir(mode=0o700, parents=True, exist_ok=True)
    return found
