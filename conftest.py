"""Every test of this repository may use tests/support, which pyproject.toml puts on the path."""

import os

os.environ.setdefault("PHALANX_NATIVE", "")  # tests do not depend on what `phalanx build` left in a cache
pytest_plugins = ["ranks"]
