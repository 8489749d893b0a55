"""Checks the wheels of a directory: names, tags, no symlinks, nothing that does not belong.

python check_wheels.py DIRECTORY
"""

from __future__ import annotations

import stat
import sys
import zipfile
from pathlib import Path

# Distribution -> files that its wheel must hold.
MUST_HOLD = {
    "phalanx_core": [
        "phalanx/core/__init__.py",
        "phalanx/core/_abi.py",
        "phalanx/core/_abi_torch.py",
        "phalanx/core/cmake/phalanxConfig.cmake",
        "phalanx/core/cmake/phalanxConfigVersion.cmake",
        "phalanx/core/include/phalanx/phalanx.h",
        "phalanx/core/lib/libphalanx.so.0",
        "phalanx/core/lib/libphalanx_torch.so",
        "phalanx/core/lib/pkgconfig/phalanx.pc",
        "phalanx/core/py.typed",
    ],
    "phalanx_collectives": [
        "phalanx/collectives/__init__.py",
        "phalanx/collectives/_native/autograd.cpp",
        "phalanx/collectives/_native/core_api.h",
        "phalanx/collectives/py.typed",
        "phalanx_torch_autoload/__init__.py",
        "phalanx_torch_autoload/py.typed",
    ],
    "phalanx_symm_mem": [
        "phalanx/symm_mem/__init__.py",
        "phalanx/symm_mem/py.typed",
        "phalanx/symm_mem/_pool/pools.cpp",
    ],
    "phalanx_dtensor": ["phalanx/dtensor/__init__.py", "phalanx/dtensor/py.typed"],
    "phalanx_inductor_plugin": [
        "phalanx/inductor_plugin/__init__.py",
        "phalanx/inductor_plugin/backend.py",
        "phalanx/inductor_plugin/py.typed",
    ],
    "phalanx_tools": [
        "phalanx/tools/__init__.py",
        "phalanx/tools/bench/libphalanx_bench.so",
        "phalanx/tools/py.typed",
    ],
    "phalanx": [],
}
# Distributions that have a module outside the namespace.
BESIDE = {"phalanx_collectives": "phalanx_torch_autoload/"}


def problems_of(wheel: Path) -> list[str]:
    distribution, _, python, abi, platform = wheel.stem.split("-")
    if distribution not in MUST_HOLD:
        return ["not one of ours"]
    found = []
    pure = distribution not in ("phalanx_core", "phalanx_tools")
    if (python, abi, platform == "any") != ("py3", "none", pure):
        found.append(f"tag {python}-{abi}-{platform}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        links = [info.filename for info in archive.infolist() if stat.S_ISLNK(info.external_attr >> 16)]
    found += [f"{name} is a symlink" for name in links]
    found += [f"{name} is missing" for name in MUST_HOLD[distribution] if name not in names]
    found += [f"{name} breaks the namespace" for name in names if name == "phalanx/__init__.py"]
    own = f"phalanx/{distribution.removeprefix('phalanx_')}/"
    places = (own, BESIDE.get(distribution, own))
    outside = [name for name in names if not name.startswith(places) and ".dist-info/" not in name]
    found += [f"{name} lies outside {own}" for name in outside]
    if not any(name.endswith("LICENSE") for name in names):
        found.append("no LICENSE")
    return found


def main() -> int:
    bad = 0
    for wheel in sorted(Path(sys.argv[1]).glob("phalanx*.whl")):
        problems = problems_of(wheel)
        bad += bool(problems)
        print(f"{wheel.name}: {'; '.join(problems) or 'good'}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
