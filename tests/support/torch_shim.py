"""What the tests of libphalanx_torch.so share: the two libraries by cffi, a rank, and a reference.

Nothing of the Python packages is used. What a rank must get is computed from the inputs of all ranks, which every rank
can make, in one process.
"""

import contextlib
import importlib.util
import os
import re
import threading
from functools import cache
from pathlib import Path

import pytest

from ranks import scratch

cffi = pytest.importorskip("cffi")
torch = pytest.importorskip("torch")

CORE = Path(__file__).resolve().parents[2] / "core"
SLOT = 64 << 10  # bytes: inputs up to here are asynchronous
INVALID, PEER_DEAD, MISMATCH, EXISTS, NOT_FOUND = -1, -5, -7, -8, -9


# ---- the libraries ----------------------------------------------------------------------------------------------


def library_dir():
    if given := os.environ.get("PHALANX_LIBRARY"):
        return Path(given).parent
    try:
        spec = importlib.util.find_spec("phalanx.core")
    except ModuleNotFoundError:
        spec = None
    for entry in (spec.submodule_search_locations or []) if spec else []:
        if (Path(entry) / "lib" / "libphalanx_torch.so").is_file():
            return Path(entry) / "lib"
    return None


@cache
def load():
    """ffi, libphalanx, libphalanx_torch."""
    directory = library_dir()
    if directory is None or not (directory / "libphalanx_torch.so").is_file():
        pytest.skip(
            "no libphalanx_torch.so: install phalanx-core, or set PHALANX_LIBRARY to the libphalanx.so.0 of a build"
        )
    ffi = cffi.FFI()
    public = [CORE / "include" / "phalanx" / f"{name}.h" for name in ("phalanx", "cuda", "tuning", "random")]
    for header in (*public, CORE / "torch" / "phalanx_torch.h"):
        regions = re.findall(
            r"/\* cdef: begin \*/(.*?)/\* cdef: end \*/", header.read_text(encoding="utf-8"), re.DOTALL
        )
        ffi.cdef(re.sub(r"\bPHX\w*_API\b", "", "\n".join(regions)))
    core = ffi.dlopen(str(directory / "libphalanx.so.0"))
    ops = ffi.dlopen(str(directory / "libphalanx_torch.so"))
    assert ops.phxt_load_error() == ffi.NULL, ffi.string(ops.phxt_load_error())
    return ffi, core, ops


def checked(status):
    ffi, core, _ = load()
    assert status == 0, (status, ffi.string(core.phx_last_error()).decode())


class World:
    """One rank: a world, a group "g" of all ranks, and the group's registration with the ops."""

    def __init__(self, rank, size, *, context=0, store=None, timeout_ms=30_000, name=b"g", slot=SLOT):
        self.ffi, self.core, self.ops = load()
        self.rank, self.size, self.context, self.name = rank, size, context, name
        own_store = None
        if store is None:
            own_store = store = self.made(
                "phx_store **", lambda out: self.core.phx_store_file(str(scratch() / "store").encode(), out)
            )
        params = self.ffi.new("phx_world_params *")
        params.struct_size = self.ffi.sizeof("phx_world_params")
        params.rank, params.size, params.store = rank, size, store
        params.timeout_ms, params.staging_bytes = timeout_ms, slot
        self.world = self.made("phx_world **", lambda out: self.core.phx_world_create(params, out))
        if own_store is not None:
            self.core.phx_store_release(own_store)
        ranks = self.ffi.new("int32_t[]", list(range(size)))
        self.group = self.made(
            "phx_group **", lambda out: self.core.phx_group_create(self.world, name, ranks, size, 0, out)
        )
        checked(self.ops.phxt_group_add(context, name, self.group))
        self.ops.phxt_set_context(context)
        info = self.ffi.new("phx_group_stats *")
        info.struct_size = self.ffi.sizeof("phx_group_stats")
        checked(self.core.phx_group_get_stats(self.group, info))
        self.eager_bytes = info.eager_bytes

    def made(self, kind, call):
        out = self.ffi.new(kind)
        checked(call(out))
        return out[0]

    def barrier(self):
        checked(self.core.phx_barrier(self.group, self.ffi.NULL, self.ffi.NULL))

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.barrier()  # nobody leaves while another still waits
        self.ops.phxt_group_remove(self.context, self.name)
        self.core.phx_group_release(self.group)
        self.core.phx_world_release(self.world)

    def last_error(self):
        return self.ops.phxt_last_status(), self.ffi.string(self.ops.phxt_last_error()).decode()


# ---- reference --------------------------------------------------------------------------------------------------

P = torch.ops.phalanx
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
ALL = [*FLOATS, *INTEGERS]
COMPLEX = (torch.complex64, torch.complex128)


def data(rank, shape, dtype=torch.float32, seed=0):
    """The input of one rank: any rank can make that of any other."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_complex or dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(
            dtype
        )
    return torch.randint(0, 9, shape, generator=generator).to(dtype)


def reduced(inputs, op):
    """In rank order; 16-bit floats in float32, rounded once."""
    dtype = inputs[0].dtype
    wide = [x.float() if dtype in (torch.float16, torch.bfloat16) else x for x in inputs]
    step = {
        "sum": torch.add, "avg": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
        "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
    }[op]  # fmt: skip
    total = wide[0]
    for each in wide[1:]:
        total = step(total, each)
    if op == "avg":
        total = total / len(inputs) if dtype.is_floating_point else torch.div(total, len(inputs), rounding_mode="trunc")
    return total.to(dtype)


def same(result, expected):
    assert result.shape == expected.shape, (result.shape, expected.shape)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def raises(kind, call):
    try:
        call()
    except kind as error:
        assert type(error) is kind, type(error)
        return str(error)
    raise AssertionError("nothing was raised")


@contextlib.contextmanager
def one_rank():
    """A world of one rank, whose store is in memory."""
    ffi, core, _ = load()
    out = ffi.new("phx_store **")
    checked(core.phx_store_memory(out))
    with World(0, 1, store=out[0]) as world:
        yield world
    core.phx_store_release(out[0])


def run_threads(rank_thread, size):
    """Run rank_thread(rank, size, store, failures) in a thread for each rank; what it adds to `failures` is raised."""
    ffi, core, _ = load()
    out, failures = ffi.new("phx_store **"), []
    checked(core.phx_store_memory(out))
    threads = [threading.Thread(target=rank_thread, args=(rank, size, out[0], failures)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures[0]
    core.phx_store_release(out[0])
