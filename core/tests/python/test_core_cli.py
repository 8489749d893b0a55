"""The commands: phalanx, phalanx version, python -m phalanx.core."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.core import __main__ as module_main
from phalanx.core import _cli, _paths, ffi, lib


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
    assert "needs phalanx-tools" in text


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
    assert "trian" in text
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


def run_command(commands, *words, body):
    commands(FakePoint("task", lambda: body))
    return _cli.main(["task", *words])


def test_ctrl_c_ends_a_command_without_a_traceback(commands, capsys):
    def body(argv):
        raise KeyboardInterrupt

    assert run_command(commands, body=body) == 130
    assert capsys.readouterr().err == "phalanx: interrupted\n"


def test_a_reader_that_goes_away_ends_a_command_without_a_traceback():
    phalanx = [sys.executable, "-c", "import sys; from phalanx.core._cli import main; sys.exit(main())", "doctor"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(phalanx, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


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
