"""torch finds the backend `phalanx` in interpreters that import nothing of ours, and `import torch` never suffers."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch.distributed as dist

from c10d_groups import native_folder

# What the programs below write as START.
START = "dist.init_process_group('phalanx', init_method='file://' + path, rank=0, world_size=1)"
HEAD = "import sys, warnings; warnings.simplefilter('error', UserWarning); path = sys.argv[1]\n"
OURS = "[name for name in sys.modules if name.partition('.')[0] == 'phalanx']"

SPAWN = """
import sys
import torch, torch.distributed as dist, torch.multiprocessing as mp

def work(rank, path):
    dist.init_process_group("phalanx", init_method="file://" + path, rank=rank, world_size=2)
    x = torch.full((3,), rank + 1.0)
    dist.all_reduce(x)
    assert x.tolist() == [3.0] * 3 and dist.get_backend() == "phalanx"
    group = dist.new_group([0, 1], backend="cpu:phalanx")
    y = [torch.empty(1) for _ in range(2)]
    dist.all_gather(y, torch.tensor([float(rank)]), group=group)
    assert [z.item() for z in y] == [0, 1]
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), 2)
    print("done")
"""

# Modules that cannot be imported, as after `pip uninstall` of one half, or where files were deleted.
WITHOUT = """
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[2] or name.startswith(sys.argv[2] + "."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import torch, torch.distributed as dist
x = torch.ones(2) + 1
try:
    START
except ImportError as error:
    print(error)
"""


def run(tmp_path, code, *args, **env):
    program, native = tmp_path / "program.py", native_folder()
    program.write_text(HEAD + code.replace("START", START) if "mp.spawn" not in code else code)
    done = subprocess.run(
        [sys.executable, program, str(tmp_path / "store"), *args],
        env={**os.environ, "PHALANX_NATIVE": native, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_spawned_ranks_that_import_nothing_of_ours_have_the_backend(tmp_path):
    assert run(tmp_path, SPAWN) == "done"


def test_importing_torch_loads_none_of_our_packages_and_registers_nothing(tmp_path):
    code = f"import torch, torch.distributed as dist; print({OURS}, 'PHALANX' in dist.Backend._plugins, "
    assert run(tmp_path, code + "dist.is_backend_available('phalanx'))") == "[] False True"


def test_a_group_of_gloo_keeps_its_default_backend_beside_us(tmp_path):
    """A registered plug-in takes it away from groups that are made by "cpu:gloo", up to torch 2.13."""
    code = (
        "import torch.distributed as dist\n"
        "dist.init_process_group('cpu:gloo', init_method='file://' + path, rank=0, world_size=1)\n"
        "print(dist.group.WORLD._get_sequence_number_for_group()); dist.destroy_process_group()"
    )
    assert run(tmp_path, code) == "0"


@pytest.mark.slow
def test_importing_our_package_before_or_after_a_group_changes_nothing(tmp_path):
    code = (
        "import torch, torch.distributed as dist\nif sys.argv[2] == 'before': import phalanx.collectives\n"
        "START; known = dist.Backend._plugins['PHALANX']\n"
        "import phalanx.collectives as pc; assert dist.Backend._plugins['PHALANX'] is known\n"
        "x = torch.ones(1); dist.all_reduce(x); print(x.item(), pc.all_reduce(x, 'sum', dist.group.WORLD).item())\n"
        "dist.destroy_process_group()"
    )
    for when in ("before", "after"):
        assert run(tmp_path, code, when) == "1.0 1.0"
        (tmp_path / "store").unlink(missing_ok=True)


@pytest.mark.parametrize(
    "missing",
    [
        "phalanx",
        *(
            pytest.param(f"phalanx.{name}", marks=pytest.mark.slow)
            for name in ("core", "collectives", "collectives._process_group")
        ),
    ],
)
def test_where_a_part_is_missing_torch_works_and_the_backend_says_what_to_do(tmp_path, missing):
    text = run(tmp_path, WITHOUT, missing)
    assert "backend 'phalanx': phalanx.collectives cannot be imported: No module named 'phalanx" in text
    assert "install both again" in text


def test_without_autoload_the_name_is_unknown_until_our_package_is_imported(tmp_path):
    code = (
        "import torch, torch.distributed as dist; print(hasattr(dist.Backend, 'PHALANX'))\n"
        "import phalanx.collectives; print(dist.Backend.PHALANX, 'PHALANX' in dist.Backend._plugins)"
    )
    assert run(tmp_path, code, TORCH_DEVICE_BACKEND_AUTOLOAD="0").split() == ["False", "phalanx", "True"]


def test_without_torch_distributed_nothing_happens(tmp_path):
    code = "import phalanx_torch_autoload as ours; ours.autoload(); ours.register(); print('torch' in sys.modules)"
    assert run(tmp_path, code) == "False"


def installed(folder):
    """A copy of the module and of the distribution's metadata, which come before the installed ones."""
    import phalanx_torch_autoload as ours

    folder.mkdir()
    source = Path(ours.__file__).parent
    shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(distribution("phalanx-collectives")._path, folder / "phalanx_collectives-0.1.0.dist-info")
    return folder


# Without the installed packages and their import hooks, only what lies in the folder is found.
ALONE = """
import importlib.util, os; warnings.simplefilter("ignore")
folder = sys.argv[2]
torch_at = os.path.dirname(os.path.dirname(importlib.util.find_spec("torch").origin))
sys.meta_path[:] = [finder for finder in sys.meta_path if isinstance(finder, type)]
for name in os.listdir(torch_at):
    if "phalanx" not in name.lower() and not os.path.exists(os.path.join(folder, name)):
        os.symlink(os.path.join(torch_at, name), os.path.join(folder, name))
sys.path[:] = [folder] + [p for p in sys.path if p.startswith(sys.base_prefix) and "site-packages" not in p]
import torch, torch.distributed as dist
try:
    print(dist.is_backend_available("phalanx"))
except RuntimeError as error:
    print(type(error).__name__)
try:
    START
except Exception as error:
    print("unknown" if "Unknown backend" in str(error) else type(error).__name__)
"""
DELETED = {
    # Torch 2.14 looks for the entry point itself, and says that it cannot be loaded.
    "phalanx_torch_autoload/__init__.py": (
        ["RuntimeError"] * 2 if hasattr(dist.Backend, "_ensure_backend_registered") else ["False", "unknown"]
    ),
    "phalanx_collectives-0.1.0.dist-info/entry_points.txt": ["False", "unknown"],
    "phalanx_collectives-0.1.0.dist-info": ["False", "unknown"],
    "nothing": ["True", "ImportError"],  # phalanx itself is not in the folder
}


@pytest.mark.parametrize("deleted", DELETED)
def test_torch_is_imported_whatever_was_deleted(tmp_path, deleted):
    folder = installed(tmp_path / "site")
    if (folder / deleted).is_dir():
        shutil.rmtree(folder / deleted)
    else:
        (folder / deleted).unlink(missing_ok=True)
    assert run(tmp_path, ALONE, str(folder)).split() == DELETED[deleted]


def test_a_torch_that_has_changed_is_still_imported(tmp_path):
    code = (
        "import types, phalanx_torch_autoload as ours\n"
        "c10d = types.SimpleNamespace(Backend=type('Backend', (), {}))\n"
        "sys.modules['torch.distributed.distributed_c10d'] = c10d\n"
        "ours.autoload(); ours.register(); print('fine')"
    )
    assert run(tmp_path, code) == "fine"


def test_the_entry_point_of_torch_2_14_registers_at_once(tmp_path):
    code = (
        "import torch.distributed as dist, phalanx_torch_autoload as ours; ours.register(); ours.register()\n"
        f"print('PHALANX' in dist.Backend._plugins, {OURS})"
    )
    assert run(tmp_path, code) == "True []"


@pytest.mark.slow
def test_it_warns_where_ignite_would_train_without_synchronising(tmp_path):
    code = (
        "import types; sys.modules['ignite.distributed'] = types.ModuleType('ignite.distributed')\n"
        "import torch.distributed as dist\n"
        "with warnings.catch_warnings(record=True) as caught:\n    warnings.simplefilter('always'); START\n"
        "print([str(each.message)[:34] for each in caught if 'ignite' in str(each.message)])\n"
        "dist.destroy_process_group()"
    )
    assert run(tmp_path, code) == "['ignite.distributed.auto_model does']"
