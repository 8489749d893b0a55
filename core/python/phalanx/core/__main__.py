"""`python -m phalanx.core`: the folders that C and C++ builds need."""

import argparse
import sys

from phalanx.core import _paths
from phalanx.core.commands import Parser

_DIRECTORIES = ("cmake", "include", "lib")


def parser() -> argparse.ArgumentParser:
    """The parser of `python -m phalanx.core`."""
    made = Parser(
        prog="python -m phalanx.core",
        description="Print the folders that C and C++ builds need, one line each in the order below. The exit status "
        "is 1 if a folder is missing.",
        epilog="With CMake: cmake -DCMAKE_PREFIX_PATH=$(python -m phalanx.core --cmake-dir) ...",
    )
    made.add_argument("--cmake-dir", action="store_true", help="print the folder for find_package(phalanx)")
    made.add_argument("--include-dir", action="store_true", help="print the folder of phalanx/phalanx.h")
    made.add_argument("--lib-dir", action="store_true", help="print the folder of libphalanx.so.0")
    made.add_argument("--version", action="store_true", help="print the version of libphalanx")
    return made


def main(argv: list[str] | None = None) -> int:
    """Print the folders that are asked for, one line each; None takes the arguments of the process."""
    made = parser()
    options = made.parse_args(argv)
    if not any(vars(options).values()):
        made.print_help()
        return 2
    try:
        for name in _DIRECTORIES:
            if getattr(options, f"{name}_dir"):
                print(_paths.data_dir(name))
        if options.version:
            from phalanx.core._lib import ffi, lib

            print(ffi.string(lib.phx_version()).decode())
    except (FileNotFoundError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
