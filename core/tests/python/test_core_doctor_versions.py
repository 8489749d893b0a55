"""`phalanx doctor` on what is installed: versions, the library, what was compiled."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys

import pytest

from phalanx.core import ffi, lib
from phalanx.core.doctor import _library, _machine
from phalanx.core.doctor._host import Host, findings_of

HERE = Host(ranks=2)


def only(look, host=HERE):
    (finding,) = findings_of(look, host)
    return finding


@pytest.mark.parametrize(
    ("version", "level"),
    [("2.9.1+cpu", "warn"), ("2.11.0", "ok"), ("2.15.1+cu130", "ok"), ("2.16.0a0", "warn"), ("3.0", "warn")],
)
def test_the_version_of_torch_is_compared_with_those_that_are_known_to_work(monkeypatch, version, level):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    finding = only(_library.check_torch)
    assert finding.level == level
    assert finding.text.startswith(version)


class FakeTorch:
    """A distribution whose torch/version.py is in a directory."""

    def __init__(self, folder, line):
        self.folder = folder
        (folder / "torch").mkdir()
        (folder / "torch/version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip: Optional[str] = None\n")

    def locate_file(self, name):
        return self.folder / name


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("cuda: Optional[str] = None", "2.13.0, CPU build"),
        ("cuda: Optional[str] = '12.8'", "2.13.0, for CUDA 12.8"),
        ("cuda = '13.0'", "2.13.0, for CUDA 13.0"),
        ("", "2.13.0"),
    ],
)
def test_what_torch_was_built_for_is_read_without_importing_it(monkeypatch, tmp_path, line, text):
    torch = FakeTorch(tmp_path, line)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0")
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: torch)
    assert only(_library.check_torch).text == text


@pytest.fixture
def installed(monkeypatch):
    """Sets which distributions there are: (version, requirements) by name, with _ for -."""

    def use(**given):
        known = {name.replace("_", "-"): value for name, value in given.items()}

        def field(name, number):
            if name not in known:
                raise importlib.metadata.PackageNotFoundError(name)
            return known[name][number]

        monkeypatch.setattr(importlib.metadata, "version", lambda name: field(name, 0))
        monkeypatch.setattr(importlib.metadata, "requires", lambda name: field(name, 1))

    return use


def test_distributions_of_different_releases_are_named(installed):
    pins = ["phalanx-core==0.1.*", "torch>=2.11"]
    installed(phalanx_core=("0.1.4", None), phalanx_collectives=("0.1.0", pins))
    assert only(_library.check_packages).level == "ok"
    installed(phalanx_core=("0.10.0", None), phalanx_collectives=("0.1.0", pins))
    finding = only(_library.check_packages)
    assert finding.level == "warn"
    assert "phalanx-collectives needs phalanx-core 0.1.*, and there is 0.10.0" in finding.text
    installed(phalanx_collectives=("0.1.0", pins))
    assert "phalanx-core 0.1.*, and there is none" in only(_library.check_packages).text
    installed()
    assert "no phalanx distribution" in only(_library.check_packages).text


def test_what_phalanx_build_made_is_found_if_nobody_else_may_write_it(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    folder = tmp_path / "native"
    monkeypatch.setenv("PHALANX_NATIVE", str(folder))
    finding = only(_library.check_native)
    assert finding.level == "ok" and "phalanx build" in finding.advice
    folder.mkdir(mode=0o700)
    (folder / "collectives-torch2.12.0-0123.so").touch(mode=0o700)
    assert only(_library.check_native).text == (
        "collectives not compiled, DTensor not compiled, c10d back end not compiled, memory pool not compiled, "
        f"for torch 2.13.0+cpu in {folder}"
    )
    library = folder / "collectives-torch2.13.0+cpu-4567.so"
    library.touch(mode=0o700)
    finding = only(_library.check_native)
    assert finding.level == "ok" and finding.text.startswith("collectives compiled, DTensor not compiled, ")
    assert "compiles what is missing" in finding.advice
    for part in ("dtensor", "c10d", "symm_mem_pool"):
        (folder / f"{part}-torch2.13.0+cpu-89ab.so").touch(mode=0o700)
    assert "missing" not in only(_library.check_native).advice
    library.chmod(0o722)
    finding = only(_library.check_native)
    assert finding.level == "warn" and f"chmod go-w {library}" in finding.advice
    monkeypatch.setenv("PHALANX_NATIVE", "")
    assert only(_library.check_native).text.startswith("nothing: PHALANX_NATIVE is empty")


def test_what_the_first_use_of_the_backend_compiled_does_not_stand_for_phalanx_build(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "phalanx.dtensor" else object())
    monkeypatch.setenv("PHALANX_NATIVE", str(tmp_path))
    tmp_path.chmod(0o700)
    library = tmp_path / "c10d-torch2.13.0-0123.so"
    library.touch(mode=0o700)
    finding = only(_library.check_native)
    assert finding.text.startswith("collectives not compiled, c10d back end compiled, ")
    assert "`phalanx build` compiles what is missing:" in finding.advice


def test_without_the_package_above_there_is_nothing_to_compile(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert _library.check_native(HERE) is None


def test_a_library_of_another_version_than_the_distribution_is_a_warning(installed):
    installed(phalanx_core=("0.0.9", None))
    library = next(_library.check_library(HERE))
    assert (library.level, library.name) == ("warn", "library")
    assert "phalanx-core is 0.0.9" in library.advice


def test_missing_operators_for_torch_are_a_warning(monkeypatch, tmp_path):
    from phalanx.core import _lib

    monkeypatch.setattr(importlib.metadata, "version", lambda name: ffi.string(lib.phx_version()).decode())
    monkeypatch.setattr(_lib, "library_path", tmp_path / "libphalanx.so.0")
    (finding,) = (each for each in _library.check_library(HERE) if each.name == "torch ops")
    assert finding.level == "warn"
    assert "PHX_BUILD_TORCH=ON" in finding.advice


def test_a_library_that_cannot_be_loaded_is_one_failure(tmp_path):
    code = "import sys; from phalanx.core import doctor; sys.exit(doctor.main(['--json']))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    env["PHALANX_LIBRARY"] = str(tmp_path / "nothing.so")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 1, done.stderr
    failed = [each["name"] for each in json.loads(done.stdout) if each["level"] == "fail"]
    assert failed == ["library"]


def test_the_variables_that_steer_phalanx_are_shown(monkeypatch):
    monkeypatch.setenv("PHALANX_HOST_ID", "17")
    assert "PHALANX_HOST_ID=17" in only(_library.check_environment).text


def test_a_kernel_set_below_what_the_processor_has_is_a_warning(monkeypatch, tmp_path):
    (tmp_path / "proc").mkdir()
    flags = "avx2 f16c fma avx512f avx512bw avx512dq avx512vl"
    (tmp_path / "proc/cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\n")
    chosen = json.loads(ffi.string(lib.phx_build_info()).decode())["isa"]
    host = Host(2, tmp_path)
    monkeypatch.delenv("PHALANX_ISA", raising=False)
    finding = only(_machine.check_instructions, host)
    assert finding.text == f"{chosen}; the processor has {flags}"
    assert finding.level == ("ok" if chosen == "avx512" else "warn")
    monkeypatch.setattr(_machine, "_NEEDS", {"avx1024": {"avx2"}})
    assert "built without it" in only(_machine.check_instructions, host).advice
    monkeypatch.setenv("PHALANX_ISA", chosen)
    finding = only(_machine.check_instructions, host)
    assert finding.level == "warn" and f"unset PHALANX_ISA, which is {chosen}" in finding.advice


def test_a_kernel_set_that_does_not_exist_or_not_here_is_a_warning(monkeypatch):
    monkeypatch.setattr(_machine, "_KERNELS", ("first", *_machine._KERNELS, "last"))
    for wish in ("foo", "", "last"):  # the last would be worse than what was chosen: it was not obeyed
        monkeypatch.setenv("PHALANX_ISA", wish)
        finding = only(_machine.check_instructions)
        assert finding.level == "warn" and f"PHALANX_ISA is {wish!r}" in finding.text
        assert "it has no effect" in finding.advice


def test_the_variables_of_all_packages_are_known():
    pytest.importorskip("phalanx.core.environment")
    assert {"PHALANX_TUNING", "PHALANX_NATIVE", "PHALANX_BENCH_PEERS", "PHALANX_COMPILE"} <= _library.known_variables()


def test_variables_without_effect_are_warnings(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("PHALANX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(_library, "known_variables", lambda: frozenset({"PHALANX_TUNING", "PHALANX_DUMP"}))
    monkeypatch.setenv("PHALANX_TUNIGN", "x")
    monkeypatch.setenv("PHALANX_DUMP", str(tmp_path / "dumps"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "abc")
    first, *warnings = _library.check_environment(HERE)
    assert first.level == "ok" and {finding.level for finding in warnings} == {"warn"}
    assert [finding.text for finding in warnings] == [
        "PHALANX_TUNIGN is not a variable of Phalanx",
        f"PHALANX_DUMP is {tmp_path / 'dumps'}, which is not a folder",
        "LOCAL_WORLD_SIZE is 'abc', which is not a number of ranks",
    ]
    assert "or set PHALANX_TUNING" in warnings[0].advice
    monkeypatch.delenv("PHALANX_TUNIGN")
    (tmp_path / "dumps").mkdir()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert only(_library.check_environment).level == "ok"


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ("host=1 ranks=2 one_shot_bytes=64\n\ngpu=H ranks=2 shared=0 line_bytes=1\n", 0),
        ("host=1 ranks=2 one_shot_bytes=64\n\x00\x01garbage\n", 2),
        ("host=1 ranks=two one_shot_bytes=64\n", 1),
        ("gpu=H ranks=2\n", 1),
        ("host=1 ranks=2 one_shot_by", 1),
    ],
)
def test_a_damaged_table_is_a_warning_with_the_line(monkeypatch, tmp_path, table, line):
    path = tmp_path / "tuning"
    path.write_text(table)
    monkeypatch.setenv("PHALANX_TUNING", str(path))
    finding = only(_library.check_tuning)
    if line:
        assert finding.level == "warn"
        assert finding.text == f"{path}, line {line} is not a row of a tuning table"
        assert "run `phalanx tune` again" in finding.advice
    else:
        assert finding.level == "ok"
