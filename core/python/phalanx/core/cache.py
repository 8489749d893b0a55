"""Where files are kept that the packages make for one user on one host."""

import os
from pathlib import Path


def cache_path(variable: str, name: str) -> Path | None:
    """What an environment variable names, else a file or folder in the user's cache directory.

    Args:
        variable: The environment variable. An empty value says that there is to be none.
        name: The name of the file or folder below phalanx/ in $XDG_CACHE_HOME, else in $HOME/.cache.

    Returns:
        The path, whether or not it exists; None where there is to be none, or neither directory is known.
    """
    given = os.environ.get(variable)
    if given is not None:
        return Path(given) if given else None
    for directory, below in (("XDG_CACHE_HOME", ""), ("HOME", ".cache")):
        base = os.environ.get(directory, "")
        if base.startswith("/"):
            return Path(base, below, "phalanx", name)
    return None
