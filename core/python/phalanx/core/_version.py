"""The version of this distribution."""

from importlib import metadata

from phalanx.core import _paths


def _find() -> str:
    try:
        return metadata.version("phalanx-core")
    except metadata.PackageNotFoundError:  # in a source tree that is not installed
        source = _paths.source_dir()
        return "unknown" if source is None else (source / "VERSION").read_text(encoding="utf-8").strip()


__version__ = _find()
