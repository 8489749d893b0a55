"""Importing the package and loading the library."""

import ast
import os
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import phalanx.core
from phalanx.core._lib import library_path


def run_python(code, **env):
    """A new interpreter that finds the package as this one does, and has this environment."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": paths, **env},
    )


def test_importing_the_package_loads_neither_torch_nor_the_library():
    code = (
        "import sys, phalanx.core\n"
        "assert 'phalanx.core._lib' not in sys.modules\n"
        "phalanx.core.World, phalanx.core.load_torch_ops\n"
        "assert 'phalanx.core._lib' in sys.modules\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_no_two_modules_import_each_other():
    """Not at the top, not in functions, and not for type checkers alone."""
    folder = Path(phalanx.core.__file__).parent
    files = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.py")}
    modules = {name.removesuffix("/__init__").replace("/", "."): path for name, path in files.items()}
    imports = {}
    for module, path in modules.items():
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        named = {f"{node.module}.{alias.name}" for node in nodes for alias in node.names} | {
            node.module for node in nodes
        }
        imports[module] = {name.removeprefix("phalanx.core.") for name in named if name} & modules.keys() - {module}
    assert imports["group"] >= {"_group_calls", "symm", "errors"}
    del imports["__init__"]  # it loads every other one, by its name, when it is asked for
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules


def test_every_public_name_is_there_and_nothing_else():
    for name in phalanx.core.__all__:
        assert getattr(phalanx.core, name) is not None
    assert set(phalanx.core.__all__) <= set(dir(phalanx.core))
    with pytest.raises(AttributeError, match="'phalanx.core' has no attribute 'Wrold'"):
        phalanx.core.Wrold  # noqa: B018


def test_the_namespace_package_has_no_file_of_its_own():
    import phalanx

    assert getattr(phalanx, "__file__", None) is None


def test_a_library_that_is_not_there_is_named_with_what_to_do(tmp_path):
    missing = str(tmp_path / "libphalanx.so.0")
    done = run_python("import phalanx.core; phalanx.core.World", PHALANX_LIBRARY=missing)
    assert done.returncode != 0
    assert "ImportError" in done.stderr
    assert missing in done.stderr
    assert "PHALANX_LIBRARY" in done.stderr


def test_a_file_that_is_no_library_is_named_with_the_reason_of_the_loader(tmp_path):
    wrong = tmp_path / "libphalanx.so.0"
    wrong.write_text("not a library")
    done = run_python("import phalanx.core; phalanx.core.World", PHALANX_LIBRARY=str(wrong))
    assert "ImportError" in done.stderr
    assert f"{wrong} cannot be loaded" in done.stderr


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler (cc)")
@pytest.mark.parametrize(
    ("version", "size", "text"),
    [
        (7, 0, "has ABI version 7, this binding needs 0"),
        (0, 4, "has 4 bytes in"),
    ],
)
def test_a_library_of_another_build_is_refused(tmp_path, version, size, text):
    source, library = tmp_path / "other.c", tmp_path / "libphalanx.so.0"
    source.write_text(
        f"#include <stddef.h>\nunsigned phx_abi_version(void) {{ return {version}; }}\n"
        f"size_t phx_struct_size(const char *name) {{ return name ? {size} : 0; }}\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    done = run_python("import phalanx.core; phalanx.core.World", PHALANX_LIBRARY=str(library))
    assert done.returncode != 0
    assert text in done.stderr
    assert "reinstall phalanx-core" in done.stderr


def test_the_torch_ops_need_torch_to_be_imported_first():
    code = (
        "import phalanx.core\n"
        "try:\n    phalanx.core.load_torch_ops()\n"
        "except ImportError as error:\n    assert 'import torch before' in str(error), error\n"
        "else:\n    raise SystemExit('no error')\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_the_torch_ops_load_once_and_report_their_errors():
    pytest.importorskip("torch", reason="needs torch")
    if not library_path.with_name("libphalanx_torch.so").is_file():
        pytest.skip("needs libphalanx_torch.so beside libphalanx.so.0")
    ops = phalanx.core.load_torch_ops()
    assert ops is phalanx.core.load_torch_ops()
    assert ops.ffi.typeof("phx_group *") is phalanx.core.ffi.typeof("phx_group *")
    with phalanx.core.World(0, 1) as world:
        group = world.create_group("g", [0])
        ops.check(ops.lib.phxt_group_add(7, b"g", group.pointer))
        assert ops.lib.phxt_group_has(7, b"g") == 1
        with pytest.raises(phalanx.core.AlreadyExistsError, match="g"):
            ops.check(ops.lib.phxt_group_add(7, b"g", group.pointer))
        assert isinstance(ops.last_error(), phalanx.core.AlreadyExistsError)
        ops.check(ops.lib.phxt_group_remove(7, b"g"))
        assert ops.lib.phxt_group_has(7, b"g") == 0


def test_the_library_is_the_one_that_was_loaded():
    assert Path(library_path).is_file()
    assert str(Path(library_path).resolve()) in Path("/proc/self/maps").read_text()
