"""`python -m phalanx.core`: where the files are that C and C++ builds need."""

import argparse
import sys

from phalanx.core import _paths

_DIRECTORIES = {"cmake": "cmake", "include": "include", "lib": "lib"}


def main(argv: list[str] | None = None) -> int:
    """Print what is asked for, one line each.

    Args:
        argv: Arguments; None takes those of the process.

    Returns:
        Exit status: 1 if something is not there.
    """
    parser = argparse.ArgumentParser(
        prog="python -m phalanx.core",
        description="Where the files are that C and C++ builds need.",
        epilog="With CMake: cmake -Dphalanx_DIR=$(python -m phalanx.core --cmake-dir) ...",
    )
    parser.add_argument("--cmake-dir", action="store_true", help="for find_package(phalanx)")
    parser.add_argument("--include-dir", action="store_true", help="holds phalanx/phalanx.h")
    parser.add_argument("--lib-dir", action="store_true", help="holds libphalanx.so.0")
    parser.add_argument("--version", action="store_true", help="of the library")
    options = parser.parse_args(argv)
    if not any(vars(options).values()):
        parser.print_help()
        return 2
    try:
        for name, folder in _DIRECTORIES.items():
            if getattr(options, f"{name}_dir"):
                print(_paths.data_dir(folder))
        if options.version:
            from phalanx.core._lib import ffi, lib

            print(ffi.string(lib.phx_version()).decode())
    except (FileNotFoundError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
