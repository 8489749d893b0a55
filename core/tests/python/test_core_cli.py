"""The commands: phalanx, phalanx version, python -m phalanx.core."""

import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.core import __main__ as module_main
from phalanx.core import _cli, _paths, ffi, lib
from phalanx.core.commands import CommandError, paint


class FakePoint:
    """An entry point of a package that is not installed."""

    def __init__(self, name, load, value="somewhere:main"):
        self.name, self.value, self.dist = name, value, None
        self.load = load


@pytest.fixture
def commands(monkeypatch):
    """Sets what is found in the entry point group."""

    def use(*points):
        def found(*, group):
            assert group == "phalanx.commands"
            return points

        monkeypatch.setattr(_cli, "entry_points", found)

    return use


def test_a_command_of_another_package_gets_its_arguments(commands):
    seen = []

    def train(argv):
        seen.append(argv)
        return 3

    commands(FakePoint("train", lambda: train))
    assert _cli.main(["train", "--size", "4", "x"]) == 3
    assert seen == [["--size", "4", "x"]]


def test_the_help_lists_all_commands(commands, capsys):
    commands(FakePoint("train", None))
    with pytest.raises(SystemExit) as caught:
        _cli.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in ("bench", "doctor", "train", "tune", "version"):
        assert f"\n  {name} " in text
    assert "(needs phalanx-tools, which is not installed)" in text
    assert "added by an unknown distribution" in text


@pytest.mark.parametrize("command", ["bench", "demo", "trace", "tune", "verify"])
def test_a_command_of_phalanx_tools_says_what_to_install_where_that_is_missing(commands, capsys, command):
    commands(FakePoint("train", None))
    assert _cli.main([command, "--help"]) == 1
    assert f"phalanx {command}: phalanx-tools is not installed. Install phalanx-tools" in capsys.readouterr().err
    commands(FakePoint(command, lambda: len))
    assert _cli.main([command, "--help"]) == 1  # the number of its arguments
    assert capsys.readouterr().err == ""


def test_without_a_command_the_help_is_shown(commands, capsys):
    commands()
    assert _cli.main([]) == 2
    assert "doctor" in capsys.readouterr().out


def test_an_unknown_command_is_an_error_that_lists_the_known_ones(commands, capsys):
    commands(FakePoint("train", None))
    with pytest.raises(SystemExit) as caught:
        _cli.main(["trian"])
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert "there is no command 'trian'; did you mean 'train'?" in text
    assert all(name in text for name in ("bench", "doctor", "train", "tune", "version"))


def test_a_command_that_cannot_be_loaded_is_named_with_its_origin(commands, capsys):
    def load():
        raise ImportError("no module named 'somewhere'")

    commands(FakePoint("train", load))
    assert _cli.main(["train"]) == 1
    assert "phalanx train: somewhere:main" in capsys.readouterr().err


def test_a_built_in_command_wins_over_an_entry_point_of_its_name(commands, capsys):
    commands(FakePoint("version", lambda: pytest.fail))
    assert _cli.main(["version"]) == 0
    version = ffi.string(lib.phx_version()).decode()
    build = json.loads(ffi.string(lib.phx_build_info()).decode())["build"]
    assert f"libphalanx {version} (ABI {lib.phx_abi_version()}, build {build})" in capsys.readouterr().out
    assert _cli.main(["version", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["libphalanx"], found["abi"], found["build"]) == (version, lib.phx_abi_version(), build)
    assert (found["python"], found["kernel"]) == (platform.python_version(), platform.release())
    assert "torch" in found


def test_the_version_of_the_command_is_that_of_the_core(capsys):
    with pytest.raises(SystemExit) as caught:
        _cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"phalanx {ffi.string(lib.phx_version()).decode()}\n"


def test_an_unknown_option_is_an_error_of_two_lines_that_names_a_similar_one(commands, capsys):
    commands()
    with pytest.raises(SystemExit) as caught:
        _cli.main(["doctor", "--rnaks", "2"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines() == [
        "phalanx doctor: unrecognized arguments: --rnaks 2",
        "Did you mean --ranks? `phalanx doctor --help` lists the options.",
    ]


def test_colours_are_for_terminals_that_show_them(monkeypatch):
    class Stream:
        def __init__(self, terminal):
            self.isatty = lambda: terminal

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert paint("fail", "red", Stream(True)) == "\x1b[31mfail\x1b[0m"
    assert paint("fail", "red", Stream(False)) == "fail"
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint("fail", "red", Stream(True)) == "fail"
    monkeypatch.delenv("NO_COLOR")
    for terminal in ("dumb", None):
        monkeypatch.setenv("TERM", terminal) if terminal else monkeypatch.delenv("TERM")
        assert paint("fail", "red", Stream(True)) == "fail"


# ---- errors, signals, closed pipes ---------------------------------------------------------------

PHALANX = [sys.executable, "-c", "import sys; from phalanx.core._cli import main; sys.exit(main())"]


def run_command(commands, *words, body):
    commands(FakePoint("task", lambda: body))
    return _cli.main(["task", *words])


def test_ctrl_c_ends_a_command_without_a_traceback(commands, capsys):
    def body(argv):
        raise KeyboardInterrupt

    assert run_command(commands, body=body) == 130
    assert capsys.readouterr().err == "phalanx task: interrupted\n"


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (CommandError("there is no moon"), 1, "phalanx task: there is no moon\n"),
        (CommandError("what is a moon?", 2), 2, "phalanx task: what is a moon?\n"),
        (
            FileNotFoundError(2, "No such file or directory", "a.json"),
            2,
            "phalanx task: a.json: No such file or directory\n",
        ),
        (ConnectionResetError("the other end is gone"), 2, "phalanx task: the other end is gone\n"),
        (ImportError("no library at X", name="phalanx.core"), 1, "phalanx task: no library at X\n"),
    ],
)
def test_what_a_command_cannot_do_is_said_without_a_traceback(commands, capsys, error, status, text):
    def body(argv):
        raise error

    assert run_command(commands, body=body) == status
    assert capsys.readouterr().err == text


def test_a_defect_of_a_command_keeps_its_traceback(commands):
    def body(argv):
        raise KeyError("moon")

    with pytest.raises(KeyError):
        run_command(commands, body=body)


# A command that says that it runs, and cleans up in the end, for as long as it is not told to end.
BODY = """
import signal, sys, time
from phalanx.core import _cli

def body(argv):
    try:
        print("running", flush=True)
        time.sleep(100)
    finally:
        signal.raise_signal(signal.SIGINT)  # the impatience of whoever presses Ctrl-C a second time
        print("cleaned up", flush=True)

class Point:
    name, value, dist, load = "task", "x", None, lambda self: body

_cli.entry_points = lambda group: [Point()]
sys.exit(_cli.main(["task"]))
"""


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (signal.SIGINT, "interrupted"),
        (signal.SIGTERM, "ended by SIGTERM"),
        (signal.SIGHUP, "ended by SIGHUP"),
    ],
)
def test_a_signal_ends_a_command_in_order_and_a_second_one_changes_nothing(number, text):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

    def is_heard():  # nohup, say, has made this process ignore SIGHUP
        signal.signal(number, signal.SIG_DFL)

    with subprocess.Popen([sys.executable, "-c", BODY], text=True, preexec_fn=is_heard, **pipes) as process:
        assert process.stdout.readline() == "running\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (128 + number, "cleaned up\n", f"phalanx task: {text}\n")


@pytest.mark.parametrize("words", [["doctor"], ["doctor", "--json"], ["--help"], ["version"]])
def test_a_reader_that_goes_away_ends_a_command_without_a_traceback(words):
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run([*PHALANX, *words], stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(write_end)
    assert done.stderr == ""
    assert done.returncode == 141 or words == ["--help"]  # argparse passes over the error if nothing is buffered


def test_output_that_cannot_be_written_is_an_error_of_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run([*PHALANX, "version"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "phalanx version: [Errno 28] No space left on device\n")


# ---- python -m phalanx.core ----------------------------------------------------------------------


def test_the_module_prints_the_version(capsys):
    assert module_main.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == ffi.string(lib.phx_version()).decode()


def test_the_module_prints_the_directories_that_builds_need(monkeypatch, tmp_path, capsys):
    for name in ("cmake", "include", "lib"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(_paths, "package_dirs", lambda: [tmp_path])
    assert module_main.main(["--cmake-dir", "--include-dir", "--lib-dir"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [Path(line) for line in lines] == [tmp_path / name for name in ("cmake", "include", "lib")]


def test_the_module_says_what_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(_paths, "package_dirs", lambda: [tmp_path])
    assert module_main.main(["--cmake-dir"]) == 1
    assert "install phalanx-core from its sources" in capsys.readouterr().err
