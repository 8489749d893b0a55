"""phalanx.symm_mem.triton: device.h for kernels in Triton.

Kernels run in Triton's interpreter, on host memory, in real processes. For GPUs they are compiled; no test runs them.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from phalanx import symm_mem
from phalanx.core import FileStore
from phalanx.symm_mem import triton as externs
from phalanx.symm_mem.triton import (
    PHX_ERR_REVOKED,
    Team,
    phx_multicast_fence,
    phx_multicast_put,
    phx_team_at,
    phx_team_block_barrier,
    phx_team_last,
    phx_team_put,
    phx_team_wait,
    team_of,
)
from ranks import run_ranks, scratch

ROOT = Path(__file__).resolve().parents[3]
LONG, SHORT = 60 * 10**9, 50 * 10**6
INTERPRETED, COMPILED = {"TRITON_INTERPRET": "1"}, {"TRITON_INTERPRET": "0"}

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
needs_triton = pytest.mark.skipif(triton is None, reason="triton is not installed")

if triton is not None:

    @triton.jit
    def passes_right(team, status, turns, timeout_ns):
        """A ring of two channels: data goes right, room comes back left."""
        right = (team.group_rank + 1) % team.group_size
        left = (team.group_rank + team.group_size - 1) % team.group_size
        slot = phx_team_at(team, right, 0, tl.int64)
        mine = phx_team_at(team, team.group_rank, 0, tl.int64)
        late = tl.full((), 0, tl.int32)
        wrong = tl.full((), 0, tl.int32)
        first = phx_team_last(team, 2, right) + 1
        for turn in range(turns):
            if late == 0:
                if turn > 0:
                    late = phx_team_wait(team, 3, right, first + turn - 1, timeout_ns)
                tl.store(slot, 100 * turn + team.group_rank)
                phx_team_put(team, 2, right, first + turn)
                if late == 0:
                    late = phx_team_wait(team, 2, left, first + turn, timeout_ns)
                wrong += (tl.load(mine, volatile=True) != 100 * turn + left).to(tl.int32)
                phx_team_put(team, 3, left, first + turn)
        tl.store(status, late)
        tl.store(status + 1, wrong)

    @triton.jit
    def waits(team, status, channel, source, count, timeout_ns):
        tl.store(status, phx_team_wait(team, channel, source, count, timeout_ns))

    @triton.jit
    def meets(team, status, channel, timeout_ns):
        tl.store(status, phx_team_block_barrier(team, channel, timeout_ns))

    @triton.jit
    def multicasts(team, reduce: tl.constexpr):
        where = 16 * tl.arange(0, 128).to(tl.int64)
        phx_multicast_fence()
        a, b, c, d = reduce(team, where)
        phx_multicast_put(team, where, a, b, c, d)


# What each reduction by switches compiles to.
SWITCHES = {
    "sum_f32x4": "add.v4.f32",
    "sum_f16x8": "add.acc::f32.v4.f16x2",
    "sum_bf16x8": "add.acc::f32.v4.bf16x2",
    "sum_f64x2": "add.f64",
    "sum_u32x4": "add.u32",
    "sum_u64x2": "add.u64",
    **{
        f"{op}_{name}": f"{op}.v4.{form}"
        for op in ("min", "max")
        for name, form in (("f16x8", "f16x2"), ("bf16x8", "bf16x2"))
    },
    **{
        f"{op}_{name}": f"{op}.{form}"
        for op in ("min", "max")
        for name, form in (("u32x4", "u32"), ("i32x4", "s32"), ("u64x2", "u64"), ("i64x2", "s64"))
    },
    **{f"{op}_b64x2": f"{op}.b64" for op in ("and", "or", "xor")},
}


def example():
    spec = importlib.util.spec_from_file_location(
        "own_collective_triton", ROOT / "examples" / "own_collective_triton.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def joined(rank, world_size, numel, dtype):
    symm_mem.set_group_info("tp", rank, world_size, FileStore(scratch() / "store"))
    x = symm_mem.empty(numel, dtype=dtype)
    return x, symm_mem.rendezvous(x, "tp")


def test_every_function_of_the_header_is_there():  # M32
    header = (ROOT / "core" / "include" / "phalanx" / "device.h").read_text()
    names = re.findall(r"^PHX_FN [\w ]+\W+(phx_(?!private_)\w+)\(", header, re.MULTILINE)
    assert {"phx_team_put", "phx_team_wait", "phx_team_barrier", "phx_multicast_put", "phx_word_get"} <= set(names)
    assert set(names) <= set(externs.__all__)
    assert {f"phx_multicast_{name}" for name in SWITCHES} <= set(names)
    assert all(hasattr(externs, name) for name in externs.__all__)


def test_without_triton_it_can_be_imported_and_every_use_says_what_is_missing():  # M32
    program = """
import sys
sys.modules["triton"] = None
from phalanx import symm_mem
from phalanx.core import MemoryStore, UnsupportedError
from phalanx.symm_mem import triton
symm_mem.set_group_info("tp", 0, 1, MemoryStore())
x = symm_mem.empty(10)
handle = symm_mem.rendezvous(x, "tp")
team = triton.team_of(handle)
assert (team.group_rank, team.group_size, team.channels, team.bytes) == (0, 1, handle.signal_channels, 40)
assert (team.buffers, team.pads) == (handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev) and team.failed
assert triton.PHX_ERR_REVOKED == -6
for name in triton.__all__:
    if name.startswith("phx_"):
        function = getattr(triton, name)
        for call in (function, function[(1,)]):
            try:
                call(team, 0)
            except UnsupportedError as error:
                assert "phx_" in str(error) and "Triton, which is not installed" in str(error)
            else:
                raise AssertionError(name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def compiles(rank, world_size):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    team = Team("i32", "i32", "i32", "i32", "i64", "i64", "i64", "i64", "i64")
    sums = {"team": team, "out": "*fp32", "numel": "i32", "status": "*i32", "timeout_ns": "i64", "block": "constexpr"}
    ring = {"team": team, "status": "*i32", "turns": "i32", "timeout_ns": "i64"}
    made = {}
    for capability in (80, 90, 100):
        for name, kernel, signature, constants in (
            ("sums", example().all_reduce, sums, {"block": 1024}),
            ("ring", passes_right, ring, {}),
        ):
            source = ASTSource(kernel, signature=signature, constexprs=constants)
            made[name, capability] = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    for name in SWITCHES:
        signature = {"team": team, "reduce": "constexpr"}
        constants = {"reduce": getattr(externs, f"phx_multicast_{name}")}
        source = ASTSource(multicasts, signature=signature, constexprs=constants)
        made[name, 90] = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    return made


@needs_triton
def test_kernels_compile_for_gpus(tmp_path):  # M32
    env = {**COMPILED, "TRITON_CACHE_DIR": str(tmp_path)}
    (made,) = run_ranks(compiles, 1, env=env, timeout=240)
    for (name, _), ptx in made.items():
        if name in SWITCHES:
            assert f"multimem.ld_reduce.relaxed.sys.global.{SWITCHES[name]} " in ptx
            assert "multimem.st.relaxed.sys.global.v4.f32" in ptx and "fence.proxy.alias" in ptx
            continue
        assert re.search(r"@%p\d+\s+atom\.global\.sys\.release\.exch\.b32", ptx)  # by one thread, for the program
        assert re.search(r"sys\.acquire|acquire\.sys", ptx)
        assert "%globaltimer" in ptx and "nanosleep" in ptx


def runs_the_example(rank, world_size):
    """Started as torchrun starts it: its agent serves the store."""
    told = torch.distributed.FileStore(str(scratch() / "port"), -1)
    if rank == 0:
        server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        told.set("port", str(server.port))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": told.get("port").decode()}
    example().main()


@needs_triton
def test_the_example_adds_up_what_all_ranks_have():  # M32
    run_ranks(runs_the_example, 3, env=INTERPRETED)


def signals(rank, world_size):
    x, handle = joined(rank, world_size, 1, torch.int64)
    status = torch.ones(2, dtype=torch.int32)
    for _ in range(2):  # a kernel may be launched again: counts go on
        passes_right[(1,)](team_of(handle), status, 20, LONG)
        assert status.tolist() == [0, 0]
        handle.barrier()  # the last value has been read
    assert x.item() == 1900 + (rank - 1) % world_size
    return handle.get_signal_pad(rank, dtype=torch.int32).view(world_size, -1)[:, 2:4].T.tolist()


@needs_triton
def test_data_goes_round_a_ring_with_puts_and_waits():  # M27 M32
    for rank, (forth, back) in enumerate(run_ranks(signals, 3, env=INTERPRETED)):
        assert forth == [40 if source == (rank - 1) % 3 else 0 for source in range(3)]
        assert back == [40 if source == (rank + 1) % 3 else 0 for source in range(3)]


def comes_late(rank, world_size):
    _, handle = joined(rank, world_size, 1, torch.int64)
    status = torch.zeros(1, dtype=torch.int32)
    if rank == 0:
        meets[(1,)](team_of(handle), status, 0, SHORT)
        assert status.item() == 1 + 1
        waits[(1,)](team_of(handle), status, 5, 0, 1, SHORT)  # for itself
        assert status.item() == 1 + 0
    handle.barrier()
    # Counts wrap around: 5 comes after 2^32 - 16, and not before it.
    pad = handle.get_signal_pad(rank, dtype=torch.int32).view(-1, world_size)
    pad[7, rank] = 5
    waits[(1,)](team_of(handle), status, 7, rank, -16, SHORT)
    assert status.item() == 0
    pad[7, rank] = -16
    waits[(1,)](team_of(handle), status, 7, rank, 5, SHORT)
    assert status.item() == 1 + rank
    handle.barrier()
    if rank == 1:
        symm_mem.finalize()
        return
    waits[(1,)](team_of(handle), status, 8, 1, 1, LONG)
    assert status.item() == getattr(PHX_ERR_REVOKED, "value", PHX_ERR_REVOKED)


@needs_triton
def test_waits_end_when_a_rank_is_late_or_has_left():  # M30 M32
    run_ranks(comes_late, 2, env=INTERPRETED)
