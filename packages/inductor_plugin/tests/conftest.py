"""Every test has its own caches of Inductor, and nothing of the caller's environment."""

import os
import tempfile

_folder = tempfile.TemporaryDirectory(prefix="phalanx-inductor-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _folder.name  # read when torch compiles, also by the ranks
os.environ.pop("PHALANX_COMPILE", None)
