"""The commands: phalanx, phalanx doctor, phalanx version, python -m phalanx.core."""

import importlib.metadata
import json
import os
import resource
from pathlib import Path

import pytest

from phalanx.core import __main__ as module_main
from phalanx.core import _cli, _paths, doctor, ffi, lib


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
    assert f"libphalanx {version} (ABI {lib.phx_abi_version()})" in capsys.readouterr().out


def test_doctor_says_what_the_host_offers(capsys):
    status = doctor.main([])
    lines = capsys.readouterr().out.splitlines()
    findings = {line[6:22].strip(): line[:4].strip() for line in lines if not line.startswith(" ")}
    expected = ["python", "torch", "kernel", "pidfd", "cores", "memory", "memfd", "/dev/shm"]
    expected += ["abstract sockets", "open files", "locked memory", "library", "isa", "packages"]
    for name in expected:
        assert findings[name] in ("ok", "warn"), lines
    assert status == 0


def test_doctor_writes_json(capsys):
    assert doctor.main(["--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {"level", "name", "text", "advice"} == set(findings[0])
    library = next(each for each in findings if each["name"] == "library")
    assert library["text"].startswith(ffi.string(lib.phx_version()).decode())


def test_doctor_fails_where_memfds_do_not_work(monkeypatch, capsys):
    def forbidden(name, flags):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    assert doctor.main([]) == 1
    text = capsys.readouterr().out
    assert "fail  memfd" in text
    assert "allow memfd_create" in text


def test_doctor_warns_of_few_open_files_and_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    assert "warn  open files" in text
    assert "ulimit -n 4096" in text


def test_doctor_reports_a_check_that_itself_breaks(monkeypatch):
    def _check_moon():
        raise KeyError("phase")
        yield

    monkeypatch.setattr(doctor, "_CHECKS", (_check_moon,))
    (finding,) = doctor.examine()
    assert (finding.level, finding.name) == ("fail", "moon")
    assert "phase" in finding.text


def test_doctor_warns_of_an_old_torch(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.1+cpu")
    finding = next(each for each in doctor.examine() if each.name == "torch")
    assert (finding.level, finding.text) == ("warn", "2.9.1+cpu")


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
    assert "pip install phalanx-core" in capsys.readouterr().err
