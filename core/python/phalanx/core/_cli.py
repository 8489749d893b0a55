"""The command `phalanx`. Other packages add subcommands through the entry points phalanx.commands.

What holds for every command is here: errors have no traceback, and a signal or a closed pipe ends a command in order,
so that it ends the processes that it has started.
"""

import argparse
import contextlib
import difflib
import importlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from types import FrameType
from typing import Any, NoReturn

from phalanx.core.commands import CommandError, Parser

ENTRY_POINTS = "phalanx.commands"  # name -> callable(list of arguments) -> exit status
# What the commands of other distributions do, and what to install for each. The help does not load them.
KNOWN = {
    "bench": ("compare the speed of the collectives with gloo, MPI and oneCCL", "phalanx-tools"),
    "build": ("compile the native fast path for the installed torch", "phalanx-collectives"),
    "demo": ("train a small model on several ranks, and check it against one process", "phalanx-tools[demo]"),
    "trace": ("find hangs and stragglers in dumps of the flight recorder", "phalanx-tools"),
    "tune": ("measure which algorithm is fastest at which size on this host", "phalanx-tools"),
    "verify": ("check the sharding rules of DTensor by brute force", "phalanx-tools[verify]"),
}
# What the commands of this distribution do, and their modules. They win over entry points of the same name.
BUILT_IN = {
    "doctor": ("check this host and this installation, and say how to mend them", "phalanx.core.doctor"),
    "version": ("print the versions of what is installed", "phalanx.core._versions"),
}
_FOLDERS = {"phalanx-collectives": "packages/collectives"}  # in the sources, where it is not called as the distribution
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Ended(KeyboardInterrupt):
    """A signal asks for the end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: Arguments after the program's name; None takes those of the process.

    Returns:
        Exit status: 0 if all is well; 1 if the command found something wrong; 2 if what it was given cannot be used;
        128 and the number of the signal that ended it, as 130 after Ctrl-C and 141 when nobody reads the output any
        more.
    """
    words = sys.argv[1:] if argv is None else argv
    name = " ".join(["phalanx", *words[:1]]) if words[:1] and not words[0].startswith("-") else "phalanx"
    try:
        with _signals_raise():
            try:
                return _run(words)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
    except KeyboardInterrupt as error:
        number = error.number if isinstance(error, _Ended) else signal.SIGINT
        _complain(f"{name}: " + ("interrupted" if number == signal.SIGINT else f"ended by {error}"))
        return 128 + number
    except CommandError as error:
        _complain(f"{name}: {error}")
        return error.status
    except ImportError as error:
        if error.name != "phalanx.core":
            raise
        _complain(f"{name}: {error}")  # libphalanx is missing, or of another version
        return 1
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            _drop_output()
            return 128 + signal.SIGPIPE
        _complain(f"{name}: {error.filename}: {error.strerror}" if error.filename else f"{name}: {error}")
        _drop_output()
        return 2


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Signals that ask for the end raise in the main thread. The first one counts: the command is ending then."""

    def end(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise _Ended(number)

    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        # A signal that is ignored stays so, as nohup wishes.
        before = {each: signal.getsignal(each) for each in _SIGNALS if signal.getsignal(each) is not signal.SIG_IGN}
    for each in before:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _complain(text: str) -> None:
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError):  # the terminal may be gone
        clear = "\r\x1b[K" if sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb" else ""  # "^C", a bar
        print(clear + text, file=sys.stderr, flush=True)


def _nobody_reads() -> bool:
    """Whether standard output is a pipe that has no reader any more."""
    poll = select.poll()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _drop_output() -> None:
    """Let what is left of the output go nowhere if it cannot be written: Python would fail once more at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (AttributeError, ValueError):  # it is closed
        pass


# ---- commands ------------------------------------------------------------------------------------------------------


class _Commands(Parser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"phalanx: {message}\n`phalanx --help` lists the commands.\n")


def _run(words: list[str]) -> int:
    plugins = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    main_parser = _parser(plugins)
    if not words:
        main_parser.print_help()
        return 2
    given = main_parser.parse_args(words[:1] if words[0][:1] != "-" else words)
    name, arguments = given.command, words[1:]
    if name in BUILT_IN:
        module = importlib.import_module(BUILT_IN[name][1])
        return int(module.main(arguments))
    if name in plugins:
        return _load(plugins[name])(arguments)
    if name in KNOWN:
        wanted = KNOWN[name][1]
        distribution = wanted.partition("[")[0]
        folder = wanted.replace(distribution, _FOLDERS.get(distribution, distribution.removeprefix("phalanx-")))
        raise CommandError(
            f"{distribution} is not installed. Install {wanted}; from the sources of Phalanx: pip install './{folder}'"
        )
    known = sorted({*BUILT_IN, *KNOWN, *plugins})
    meant = difflib.get_close_matches(name, known, 1)
    hint = f"; did you mean {meant[0]!r}?" if meant else "."
    return main_parser.error(f"there is no command {name!r}{hint} The commands are {', '.join(known)}.")


def _load(point: EntryPoint) -> Callable[[list[str]], int]:
    try:
        command: Callable[[list[str]], int] = point.load()
    except (ImportError, AttributeError) as error:
        origin = _origin(point)
        raise CommandError(f"{point.value} of {origin} cannot be loaded: {error}\nReinstall {origin}.") from None
    return command


def parser() -> argparse.ArgumentParser:
    """The parser of `phalanx`, for the reference."""
    return _parser({})


def _parser(plugins: dict[str, EntryPoint]) -> argparse.ArgumentParser:
    made = _Commands(
        prog="phalanx",
        usage="phalanx [-h] [--version] COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Symmetric memory and collectives among the ranks of one host or several.",
        epilog="commands:\n" + _listing(plugins) + "\n\n`phalanx COMMAND --help` describes the options of a command.",
    )
    made.add_argument("--version", action=_Version, nargs=0, help="print the version of phalanx-core and exit")
    made.add_argument("command", metavar="COMMAND", help=argparse.SUPPRESS)
    return made


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from phalanx.core.doctor import core_version

        print(f"phalanx {core_version()}")
        parser.exit()


def _listing(plugins: dict[str, EntryPoint]) -> str:
    lines = {name: text for name, (text, _) in BUILT_IN.items()}
    for name, point in plugins.items():
        lines.setdefault(name, KNOWN[name][0] if name in KNOWN else f"added by {_origin(point)}")
    for name, (text, wanted) in KNOWN.items():
        lines.setdefault(name, f"{text}\n{'':12}(needs {wanted}, which is not installed)")
    return "\n".join(f"  {name:8}  {text}" for name, text in sorted(lines.items()))


def _origin(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown distribution"


if __name__ == "__main__":
    sys.exit(main())
