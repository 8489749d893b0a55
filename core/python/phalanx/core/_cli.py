"""The command `phalanx`. Other packages add subcommands through the entry points phalanx.commands."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

Command = Callable[[list[str]], int]

ENTRY_POINTS = "phalanx.commands"  # name -> callable(list of arguments) -> exit status
# Commands of phalanx-tools, and what to install for each.
_TOOLS = {
    "bench": "phalanx-tools",
    "demo": "phalanx-tools[demo]",
    "trace": "phalanx-tools",
    "tune": "phalanx-tools",
    "verify": "phalanx-tools[verify]",
}


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: Arguments after the program's name; None takes those of the process.

    Returns:
        Exit status; 2 for no command, or one that does not exist; 130 after Ctrl-C; 141 when nobody reads the output
        any more.
    """
    try:
        status = _run(argv)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("phalanx: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Python would fail once more when it flushes stdout at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _run(argv: list[str] | None) -> int:
    plugins = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    parser = argparse.ArgumentParser(
        prog="phalanx",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Symmetric memory and collectives among the ranks of one host.",
        epilog="commands:\n" + _listing(plugins) + "\n\n`phalanx COMMAND --help` says more.",
    )
    parser.add_argument("command", metavar="COMMAND", choices=sorted({*_BUILT_IN, *_TOOLS, *plugins}))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed to the command")
    words = sys.argv[1:] if argv is None else argv
    if not words:
        parser.print_help()
        return 2
    given = parser.parse_args(words)
    if given.command in _BUILT_IN:
        return _BUILT_IN[given.command][1](given.arguments)
    if given.command not in plugins:
        wanted = _TOOLS[given.command]
        print(
            f"phalanx {given.command}: phalanx-tools is not installed. Install {wanted}; "
            f"from the sources of Phalanx: pip install './{wanted.removeprefix('phalanx-')}'",
            file=sys.stderr,
        )
        return 1
    point = plugins[given.command]
    try:
        command: Command = point.load()
    except (ImportError, AttributeError) as error:
        print(
            f"phalanx {point.name}: {point.value} of {_origin(point)} cannot be loaded: {error}\n"
            f"Reinstall {_origin(point)}.",
            file=sys.stderr,
        )
        return 1
    return command(given.arguments)


def _doctor(argv: list[str]) -> int:
    from phalanx.core import doctor

    return doctor.main(argv)


def _version(argv: list[str]) -> int:
    from phalanx.core.doctor import installed_versions

    argparse.ArgumentParser(prog="phalanx version", description="Versions of what is installed.").parse_args(argv)
    for name, version in installed_versions().items():
        print(name, version)
    try:
        from phalanx.core._lib import ffi, lib
    except ImportError as error:
        print(error, file=sys.stderr)
        return 1
    build = json.loads(ffi.string(lib.phx_build_info()).decode())
    print(f"libphalanx {build['version']} (ABI {lib.phx_abi_version()}, build {build.get('build', 'unknown')})")
    return 0


# These win over entry points of the same name.
_BUILT_IN: dict[str, tuple[str, Command]] = {
    "doctor": ("what this host offers, and what is wrong with it", _doctor),
    "version": ("versions of what is installed", _version),
}


def _listing(plugins: dict[str, EntryPoint]) -> str:
    lines = {name: text for name, (text, _) in _BUILT_IN.items()}
    for name, point in plugins.items():
        lines.setdefault(name, f"from {_origin(point)}")
    for name in _TOOLS:
        lines.setdefault(name, "needs phalanx-tools, which is not installed")
    return "\n".join(f"  {name:12}  {text}" for name, text in sorted(lines.items()))


def _origin(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown distribution"


if __name__ == "__main__":
    sys.exit(main())
