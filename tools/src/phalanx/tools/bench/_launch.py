"""Starts one rank. Run by its path, in whichever Python: this directory becomes a package of another name there.

python -P .../_launch.py JSON
"""

import importlib
import importlib.util
import sys
from pathlib import Path

_NAME = "phalanx_bench_rank"


def _load() -> None:
    here = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location(_NAME, here / "__init__.py", submodule_search_locations=[str(here)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    _load()
    importlib.import_module(f"{_NAME}._rank").main(sys.argv[1])
