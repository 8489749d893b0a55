"""The installed distributions, and the files that describe them."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from phalanx.core.doctor import _library, installed_versions

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = {
    "phalanx": ROOT,
    "phalanx-core": ROOT / "core",
    "phalanx-collectives": ROOT / "packages" / "collectives",
    "phalanx-symm-mem": ROOT / "packages" / "symm_mem",
    "phalanx-dtensor": ROOT / "packages" / "dtensor",
    "phalanx-inductor-plugin": ROOT / "packages" / "inductor_plugin",
    "phalanx-tools": ROOT / "tools",
}
# Only downwards: what each may name among its dependencies.
BELOW = {
    "phalanx-core": set(),
    "phalanx-collectives": {"phalanx-core"},
    "phalanx-symm-mem": {"phalanx-core", "phalanx-collectives"},
    "phalanx-dtensor": {"phalanx-core", "phalanx-collectives"},
    "phalanx-inductor-plugin": {"phalanx-core", "phalanx-collectives"},
    "phalanx-tools": {"phalanx-core", "phalanx-dtensor"},
    "phalanx": {
        "phalanx-core",
        "phalanx-collectives",
        "phalanx-symm-mem",
        "phalanx-dtensor",
        "phalanx-inductor-plugin",
        "phalanx-tools",
    },
}


def project(name: str) -> dict:
    return tomllib.loads((PROJECTS[name] / "pyproject.toml").read_text())


def requirements(name: str) -> set[str]:
    return names_of(project(name)["project"].get("dependencies", []))


def names_of(texts: list[str]) -> set[str]:
    return {re.split(r"[<>=!~ ;\[]", text)[0] for text in texts}


@pytest.mark.parametrize("name", PROJECTS)
def test_dependencies_point_down_only(name: str) -> None:
    extras = project(name)["project"].get("optional-dependencies", {}).values()
    wanted = requirements(name).union(*map(names_of, extras))
    assert {other for other in wanted if other.startswith("phalanx")} <= BELOW[name]


def test_what_users_install_does_not_bring_the_tools() -> None:
    assert not [name for name in PROJECTS if "phalanx-tools" in requirements(name)]


@pytest.mark.parametrize("name", PROJECTS)
def test_no_distribution_needs_torch_to_be_built(name: str) -> None:
    assert not any(text.startswith("torch") for text in project(name)["build-system"]["requires"])


def test_core_does_not_need_torch() -> None:
    assert "torch" not in requirements("phalanx-core")


@pytest.mark.parametrize("name", PROJECTS)
def test_the_installed_version_is_that_of_the_source(name: str) -> None:
    declared = project(name)["project"].get("version") or (ROOT / "core" / "VERSION").read_text().strip()
    assert importlib.metadata.version(name) == declared


@pytest.mark.parametrize("name", [name for name in PROJECTS if name != "phalanx"])
def test_the_changelog_has_an_entry_for_the_version(name: str) -> None:
    version = importlib.metadata.version(name)
    assert re.search(rf"^## {re.escape(version)}\b", (PROJECTS[name] / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_namespace_has_no_module_of_its_own() -> None:
    assert not list(ROOT.glob("**/phalanx/__init__.py"))


def test_torch_finds_the_backend_by_its_name() -> None:
    (found,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="phalanx")
    assert found.dist is not None and found.dist.name == "phalanx-inductor-plugin"
    assert callable(found.load())


@pytest.mark.parametrize("group", ["torch.backends", "torch.distributed.backends"])
def test_torch_finds_the_process_group_backend_without_an_import(group: str) -> None:
    (found,) = importlib.metadata.entry_points(group=group, name="phalanx")
    assert found.dist is not None and found.dist.name == "phalanx-collectives"
    assert callable(found.load())
    # pip removes in the order of names: the entry point must go before the module that it names.
    assert found.module > "phalanx_collectives"


def test_one_command_compiles_all_that_would_be_compiled_later(tmp_path: Path) -> None:
    compiler, native = tmp_path / "compiler", tmp_path / "native"
    compiler.write_text('#!/bin/sh\nfor word; do [ "$last" = -o ] && : > "$word"; last=$word; done\n')  # takes no time
    compiler.chmod(0o700)
    code = "import sys; from phalanx.core import _cli; sys.exit(_cli.main(['build']))"
    env = {**os.environ, "PHALANX_NATIVE": str(native), "CXX": str(compiler)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sources = (path.read_text() for path in ROOT.glob("packages/*/src/**/*.py"))
    expected = {name for text in sources for name in re.findall(r'\bExtension\(\s*"(\w+)"', text)}
    assert {path.name.partition("-torch")[0] for path in native.iterdir()} == expected == set(_library._NATIVE)


def test_importing_core_loads_neither_torch_nor_the_library() -> None:
    code = "import sys, phalanx.core; print('torch' in sys.modules, 'libphalanx' in open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_doctor_and_version_know_every_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1")
    assert installed_versions() == dict.fromkeys(PROJECTS, "1")


@pytest.mark.parametrize("command", ["bench", "demo", "doctor", "trace", "tune", "verify"])
def test_every_command_explains_itself(command: str) -> None:
    code = f"import sys; from phalanx.core._cli import main; sys.exit(main(['{command}', '--help']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout


@pytest.mark.parametrize("package", ["collectives", "symm_mem", "dtensor", "inductor_plugin"])
def test_a_package_has_the_version_of_its_distribution(package: str) -> None:
    module = importlib.import_module(f"phalanx.{package}")
    assert module.__version__ == importlib.metadata.version(f"phalanx-{package.replace('_', '-')}")
    with pytest.raises(AttributeError, match=f"module 'phalanx.{package}' has no attribute '__versions__'"):
        module.__versions__  # noqa: B018
