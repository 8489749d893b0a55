"""`phalanx version`: the versions of what is installed."""

import argparse
import json
import platform
from typing import Any

from phalanx.core.commands import CommandError, Parser
from phalanx.core.doctor import installed_versions, torch_version


def parser() -> argparse.ArgumentParser:
    """The parser of `phalanx version`."""
    made = Parser(
        prog="phalanx version",
        description="Print the versions of what is installed: the distributions of Phalanx, libphalanx, torch, Python "
        "and the kernel. The exit status is 1 if libphalanx cannot be loaded.",
    )
    made.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    return made


def main(argv: list[str]) -> int:
    """Print the versions; `argv` are the arguments after "version"."""
    as_json = parser().parse_args(argv).json
    found: dict[str, Any] = dict(installed_versions())
    trouble = ""
    try:
        from phalanx.core._lib import ffi, lib

        build = json.loads(ffi.string(lib.phx_build_info()).decode())
        found["libphalanx"] = build["version"]
        found |= {"abi": lib.phx_abi_version(), "build": build.get("build", "unknown")}
    except ImportError as error:
        trouble = str(error)
    found |= {"torch": torch_version(), "python": platform.python_version(), "kernel": platform.release()}
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        about = f" (ABI {found.pop('abi')}, build {found.pop('build')})" if "abi" in found else ""
        for name, text in found.items():
            print(name, f"{text or 'not installed'}{about if name == 'libphalanx' else ''}")
    if trouble:
        raise CommandError(trouble)
    return 0
