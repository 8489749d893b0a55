"""The ops torch.ops.phalanx.* of libphalanx_torch.so over the C core: ranks are processes, once they are threads.

Only the two libraries are used, by cffi, and nothing of the Python packages. What a rank must get is computed from the
inputs of all ranks, which every rank can make, in one process.
"""

import importlib.util
import itertools
import os
import re
import threading
import time
import traceback
from functools import cache
from pathlib import Path

import pytest

from ranks import run_ranks, scratch

cffi = pytest.importorskip("cffi")
torch = pytest.importorskip("torch")

CORE = Path(__file__).resolve().parents[2]
SLOT = 64 << 10  # bytes: inputs up to here are asynchronous
INVALID, PEER_DEAD, MISMATCH, EXISTS, NOT_FOUND = -1, -5, -7, -8, -9
OPS = [
    "all_reduce", "all_reduce_", "all_gather_into_tensor", "all_gather_into_tensor_out", "reduce_scatter_tensor",
    "reduce_scatter_tensor_out", "all_to_all_single", "broadcast", "broadcast_", "wait_tensor",
]  # fmt: skip


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
    for header in (CORE / "include" / "phalanx" / "phalanx.h", CORE / "torch" / "phalanx_torch.h"):
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
        info = self.ffi.new("phx_group_info *")
        info.struct_size = self.ffi.sizeof("phx_group_info")
        checked(self.core.phx_group_get_info(self.group, info))
        self.eager_bytes = info.eager_bytes

    def made(self, kind, call):
        out = self.ffi.new(kind)
        checked(call(out))
        return out[0]

    def barrier(self):
        checked(self.core.phx_group_barrier(self.group, 0))

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


# ---- registration -----------------------------------------------------------------------------------------------


def test_schemas_are_torchs_but_for_the_str_group_and_what_they_say_of_aliases():
    load()
    if not hasattr(torch.ops._c10d_functional, "all_reduce"):
        pytest.skip("this torch has no torch.distributed")
    for name in OPS:
        expected = str(getattr(torch.ops._c10d_functional, name).default._schema)
        expected = expected.replace("Any group_name", "str group_name").replace("_c10d_functional::", "phalanx::")
        expected = expected.replace("-> Tensor(a!)", "-> ()")
        if name == "wait_tensor":  # torch keeps silent about it, and its compiler makes an exception for its own op
            expected = expected.replace("(Tensor tensor) -> Tensor", "(Tensor(a) tensor) -> Tensor(a)")
        assert str(getattr(P, name).default._schema) == expected
    assert str(P.wait_tensor_.default._schema) == "phalanx::wait_tensor_(Tensor(a!) tensor) -> ()"


def test_ops_carry_torchs_tags():
    load()
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
        pytest.skip("the stable ABI of torch before 2.12 has no tags")
    for name in OPS:
        wished = set(getattr(torch.ops._c10d_functional, name).default.tags) - {torch.Tag.out}
        assert set(getattr(P, name).default.tags) == wished, name


# ---- one rank ---------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path):
    ffi, core, _ = load()
    out = ffi.new("phx_store **")
    checked(core.phx_store_memory(out))
    with World(0, 1, store=out[0]) as world:
        yield world
    core.phx_store_release(out[0])


def test_a_group_of_one_gives_back_its_input(alone):
    x = data(0, (4, 3))
    for result in (
        P.all_reduce(x, "sum", "g"), P.all_gather_into_tensor(x, 1, "g"), P.reduce_scatter_tensor(x, "max", 1, "g"),
        P.all_to_all_single(x, [], [], "g"), P.all_to_all_single(x, [4], [4], "g"), P.broadcast(x, 0, "g"),
    ):  # fmt: skip
        same(result, x)
        assert result.data_ptr() != x.data_ptr()
        assert P.wait_tensor(result).data_ptr() == result.data_ptr()


def test_wrong_arguments_are_value_errors_that_name_op_group_and_remedy(alone):
    x = torch.ones(4, 3)
    for call, parts in [
        (lambda: P.all_reduce(x, "mean", "g"), ["Invalid reduce operation mean"]),
        (lambda: P.all_reduce(x, "", "g"), ["Invalid reduce operation "]),
        (lambda: P.all_reduce(x, "PREMUL_SUM", "g"), ["all_reduce on group 'g'", "premul_sum", "factor"]),
        (
            lambda: P.all_gather_into_tensor(x, 2, "g"),
            ["all_gather_into_tensor on group 'g' (rank 0 of 1)", "group_size is 2"],
        ),
        (lambda: P.reduce_scatter_tensor(x, "sum", 3, "g"), ["group_size is 3", "1 ranks"]),
        (lambda: P.reduce_scatter_tensor(torch.tensor(1.0), "sum", 1, "g"), ["reduce_scatter_tensor", "no dimension"]),
        (lambda: P.broadcast(x, 1, "g"), ["broadcast on group 'g'", "src is 1"]),
        (lambda: P.broadcast_(x, -1, "g"), ["broadcast_ on group 'g'", "src is -1"]),
        (lambda: P.all_to_all_single(x, [4], [3], "g"), ["input_split_sizes add up to 3", "size 4"]),
        (lambda: P.all_to_all_single(x, [2, 2], [4], "g"), ["output_split_sizes has 2 entries", "1 ranks"]),
        (lambda: P.all_to_all_single(x, [-4], [4], "g"), ["output_split_sizes", "-4"]),
        (lambda: P.all_gather_into_tensor_out(x, 1, "g", out=torch.empty(5)), ["out must have 12 elements", "5"]),
        (
            lambda: P.all_gather_into_tensor_out(x, 1, "g", out=torch.empty(12, dtype=torch.int8)),
            ["dtype", "float32", "int8"],
        ),
    ]:
        text = raises(ValueError, call)
        assert all(part in text for part in parts), text
        assert alone.last_error() == (INVALID, text)


def test_what_cannot_be_reduced_is_refused_by_name_but_can_be_moved(alone):
    z = data(0, (4,), torch.complex64)
    same(P.all_reduce(z, "sum", "g"), z)
    assert "complex64" in raises(RuntimeError, lambda: P.all_reduce(z, "max", "g"))
    small = torch.ones(4).to(torch.float8_e5m2)
    assert "convert it" in raises(RuntimeError, lambda: P.all_reduce(small, "sum", "g"))
    same(P.broadcast(small, 0, "g").float(), torch.ones(4))


def test_groups_are_found_by_context_and_name(alone):
    ffi, ops = alone.ffi, alone.ops
    assert ops.phxt_group_add(0, b"g", alone.group) == EXISTS
    assert "already registered" in alone.last_error()[1]
    assert ops.phxt_group_has(0, b"g") == 1
    assert ops.phxt_group_has(1, b"g") == 0
    checked(ops.phxt_group_add(7, b"g", alone.group))
    checked(ops.phxt_group_remove(7, b"g"))
    assert ops.phxt_group_remove(7, b"g") == NOT_FOUND
    assert "context 7" in alone.last_error()[1]
    assert ops.phxt_group_add(0, ffi.NULL, alone.group) == INVALID
    ops.phxt_set_context(3)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(ops.phxt_context()))
    thread.start()
    thread.join()
    assert (ops.phxt_context(), seen) == (3, [0])
    ops.phxt_set_context(0)


def test_an_unknown_group_without_an_implementation_of_the_other_road_says_what_to_import(alone):
    if torch._C._dispatch_has_kernel_for_dispatch_key("phalanx_c10d::broadcast", "CompositeExplicitAutograd"):
        pytest.skip("phalanx.collectives was imported: there is an implementation")
    text = raises(RuntimeError, lambda: P.broadcast(torch.ones(2), 0, "nowhere"))
    assert "broadcast on group 'nowhere'" in text
    if "printed" not in text:  # torch before 2.13 cannot tell why
        assert "import phalanx.collectives" in text


def test_calls_on_unknown_groups_go_to_the_other_road_with_the_same_arguments(alone):
    library = torch.library.Library("phalanx_c10d", "IMPL")
    calls = []

    def text(number):
        return alone.ffi.string(alone.ops.phxt_text(number)).decode()

    def implement(name, result):
        def implementation(*args, **kwargs):
            calls.append((name, args))
            return result(*args, **kwargs)

        library.impl(name, implementation, "CompositeExplicitAutograd")

    x, out = torch.arange(4.0), torch.zeros(8)
    implement("all_reduce", lambda x, *_: x * 2)
    implement("all_reduce_", lambda x, *_: [x.zero_(), None][1])
    implement("all_to_all_single", lambda x, *_: x + 1)
    implement("all_gather_into_tensor_out", lambda *_, out: [out.fill_(5), None][1])
    before = alone.ops.phxt_fallback_count()
    same(P.all_reduce(x, "SUM", "other"), x * 2)
    same(P.all_to_all_single(x, [1, 3], [2, 2], "other"), x + 1)
    assert P.all_gather_into_tensor_out(x, 2, "other", out=out) is None
    assert P.all_reduce_(x, "max", "other") is None
    assert out.tolist() == [5.0] * 8
    assert x.tolist() == [0.0] * 4
    assert [name for name, _ in calls] == [
        "all_reduce",
        "all_to_all_single",
        "all_gather_into_tensor_out",
        "all_reduce_",
    ]
    assert [[text(number) for number in calls[i][1][1:]] for i in (0, 3)] == [["SUM", "other"], ["max", "other"]]
    assert (calls[1][1][1:3], text(calls[1][1][3])) == (([1, 3], [2, 2]), "other")
    assert (calls[2][1][1], text(calls[2][1][2])) == (2, "other")
    assert alone.ops.phxt_text(-1) == alone.ops.phxt_text(1 << 40) == alone.ffi.NULL
    assert alone.ops.phxt_fallback_count() == before + 4

    def fail(*_):
        raise KeyError("the reason")

    library.impl("broadcast", fail, "CompositeExplicitAutograd")
    text = raises(RuntimeError, lambda: P.broadcast(x, 0, "other"))
    assert "the reason" in text or "printed" in text
    library._destroy()


def test_waiting_for_a_tensor_without_work_returns_it(alone):
    x = torch.ones(3)
    assert P.wait_tensor(x).data_ptr() == x.data_ptr()
    assert P.wait_tensor(torch.empty(0)).numel() == 0
    assert P.wait_tensor_(x) is None


# ---- several ranks: values --------------------------------------------------------------------------------------


def each_op_against_the_reference(rank, size):
    with World(rank, size) as world:
        large = world.eager_bytes  # elements of int8, and more bytes than a slot for the others
        shapes = [(), (0,), (0, 3), (size,), (2 * size, 3, 5), (large + size - large % size,)]
        for seed, (dtype, shape) in enumerate(itertools.product(ALL, shapes)):
            inputs = [data(r, shape, dtype, seed) for r in range(size)]
            mine = inputs[rank].clone()
            ops = ["sum", "avg", "PRODUCT", "Min", "max"] if len(shape) < 2 else ["sum"]
            for op in ops + (["band", "bor", "bxor"] if dtype in INTEGERS else []):
                expected = reduced(inputs, op.lower())
                same(P.wait_tensor(P.all_reduce(mine, op, "g")), expected)
                inplace = mine.clone()
                assert P.all_reduce_(inplace, op, "g") is None
                same(P.wait_tensor(inplace), expected)
                if shape and shape[0] % size == 0:
                    part = expected.reshape(size, -1)[rank].reshape(shape[0] // size, *shape[1:])
                    same(P.wait_tensor(P.reduce_scatter_tensor(mine, op, size, "g")), part)
                    out = torch.empty_like(part)
                    P.reduce_scatter_tensor_out(mine, op, size, "g", out=out)
                    same(P.wait_tensor(out), part)
            gathered = torch.cat([x.reshape(1) if x.dim() == 0 else x for x in inputs])
            same(P.wait_tensor(P.all_gather_into_tensor(mine, size, "g")), gathered)
            out = torch.empty_like(gathered)
            P.all_gather_into_tensor_out(mine, size, "g", out=out)
            same(P.wait_tensor(out), gathered)
            source = size - 1
            same(P.wait_tensor(P.broadcast(mine, source, "g")), inputs[source])
            inplace = mine.clone()
            P.broadcast_(inplace, source, "g")
            same(P.wait_tensor(inplace), inputs[source])
            if shape and shape[0] % size == 0:
                exchanged = torch.cat([x.chunk(size)[rank] if x.numel() else x for x in inputs]) if shape[0] else mine
                same(P.wait_tensor(P.all_to_all_single(mine, [], [], "g")), exchanged)
            same(mine, inputs[rank])  # the input is as it was
        assert world.ops.phxt_pending_count() == 0


@pytest.mark.parametrize("size", [2, 3])
def test_each_op_gives_what_one_process_would_compute(size):
    load()
    run_ranks(each_op_against_the_reference, size)


def bits(x):
    """Something that can be compared, for dtypes that cannot."""
    return torch.view_as_real(x).double() if x.dtype in COMPLEX else x.view(torch.uint8)


def moves_of_other_dtypes(rank, size):
    with World(rank, size):
        for dtype in (torch.bool, *COMPLEX, torch.complex32, torch.float8_e4m3fn, torch.uint16):
            made_as = torch.bool if dtype is torch.bool else torch.complex64 if dtype.is_complex else torch.int64
            inputs = [data(r, (size, 3), made_as).to(dtype) for r in range(size)]
            same(bits(P.wait_tensor(P.all_gather_into_tensor(inputs[rank], size, "g"))), bits(torch.cat(inputs)))
            same(bits(P.wait_tensor(P.broadcast(inputs[rank], 1, "g"))), bits(inputs[1]))
            if dtype in COMPLEX:
                same(P.wait_tensor(P.all_reduce(inputs[rank], "sum", "g")), reduced(inputs, "sum"))
            if dtype is torch.bool:
                same(P.wait_tensor(P.all_reduce(inputs[rank], "max", "g")), torch.stack(inputs).any(0))


def test_dtypes_that_the_core_does_not_have_move_all_the_same():
    load()
    run_ranks(moves_of_other_dtypes, 2)


def uneven_all_to_all(rank, size):
    with World(rank, size) as world:
        for rows in (3, world.eager_bytes // 8):  # of two floats each: asynchronous, and not
            split = [[(i + 2 * j) % 3 * rows for j in range(size)] for i in range(size)]  # [from][to]
            inputs = [data(r, (sum(split[r]), 2), seed=rows) for r in range(size)]
            expected = torch.cat([inputs[r].split(split[r])[rank] for r in range(size)])
            received = [split[r][rank] for r in range(size)]
            same(P.wait_tensor(P.all_to_all_single(inputs[rank], received, split[rank], "g")), expected)


def test_all_to_all_takes_a_split_for_each_rank():
    load()
    run_ranks(uneven_all_to_all, 3)


def strided_operands(rank, size):
    with World(rank, size) as world:
        for rows in (2 * size, 2 * size * world.eager_bytes // 16):
            inputs = [data(r, (3, rows), seed=rows).t() for r in range(size)]  # columns
            mine = inputs[rank]
            total = reduced(inputs, "sum")
            result = P.wait_tensor(P.all_reduce(mine, "sum", "g"))
            assert result.is_contiguous()
            same(result, total)
            every_second = reduced([data(r, (9,)) for r in range(size)], "sum")[::2]
            same(P.wait_tensor(P.all_reduce(data(rank, (9,))[::2], "sum", "g")), every_second)
            inplace = mine.clone(memory_format=torch.preserve_format)
            assert not inplace.is_contiguous()
            P.all_reduce_(inplace, "sum", "g")
            same(P.wait_tensor(inplace), total)
            out = torch.empty(3, rows * size).t()
            P.all_gather_into_tensor_out(mine, size, "g", out=out)
            same(P.wait_tensor(out), torch.cat(inputs))
            inplace = mine.clone(memory_format=torch.preserve_format)
            P.broadcast_(inplace, 0, "g")
            same(P.wait_tensor(inplace), inputs[0])
            part = torch.empty(3, rows // size).t()
            P.reduce_scatter_tensor_out(mine, "sum", size, "g", out=part)
            same(P.wait_tensor(part), total.chunk(size)[rank])


def test_operands_may_have_any_strides():
    load()
    run_ranks(strided_operands, 2)


def slices_of_one_buffer(rank, size):
    with World(rank, size) as world:
        for count in (5, world.eager_bytes):
            inputs = [data(r, (count,), seed=count) for r in range(size)]
            whole = torch.zeros(size * count)
            mine = whole[rank * count : (rank + 1) * count]
            mine.copy_(inputs[rank])
            P.all_gather_into_tensor_out(mine, size, "g", out=whole)
            same(P.wait_tensor(whole), torch.cat(inputs))
            full = [data(r, (size * count,), seed=count + 1) for r in range(size)]
            work = full[rank].clone()
            part = work[rank * count : (rank + 1) * count]
            P.reduce_scatter_tensor_out(work, "sum", size, "g", out=part)
            same(P.wait_tensor(part), reduced(full, "sum").chunk(size)[rank])


def test_input_may_be_a_slice_of_the_output_and_the_other_way_round():
    load()
    run_ranks(slices_of_one_buffer, 2)


# ---- several ranks: split phase ---------------------------------------------------------------------------------


def input_changed_after_the_call(rank, size):
    with World(rank, size) as world:
        fits = world.eager_bytes // 4
        for count in (1, 100, fits - fits % size, fits // 2 // size * size, 4 * fits):
            inputs = [data(r, (count,), seed=count) for r in range(size)]
            gathered, total = torch.cat(inputs), reduced(inputs, "sum")
            cases = [
                (lambda x: P.all_reduce(x, "sum", "g"), total),
                (lambda x: P.all_gather_into_tensor(x, size, "g"), gathered),
                (lambda x: P.broadcast(x, 0, "g"), inputs[0]),
            ]
            if count % size == 0:
                even, exchanged = [count // size] * size, torch.cat([x.chunk(size)[rank] for x in inputs])
                cases += [
                    (lambda x: P.reduce_scatter_tensor(x, "sum", size, "g"), total.chunk(size)[rank]),
                    (lambda x: P.all_to_all_single(x, [], [], "g"), exchanged),
                    (lambda x, even=even: P.all_to_all_single(x, even, even, "g"), exchanged),
                ]
            for call, expected in cases:
                x = inputs[rank].clone()
                result = call(x)
                x.fill_(float("nan"))
                world.barrier()  # nobody waits before all have changed their input
                same(P.wait_tensor(result), expected)


@pytest.mark.parametrize("size", [2, 3])
def test_the_input_may_change_as_soon_as_the_call_returns(size):
    load()
    run_ranks(input_changed_after_the_call, size)


def pending_work(rank, size):
    with World(rank, size) as world:
        ops = world.ops
        x, total = torch.full((100,), float(rank)), torch.full((100,), float(sum(range(size))))
        first = P.all_reduce(x, "sum", "g")
        second = P.all_reduce(x + 1, "sum", "g")
        assert ops.phxt_pending_count() == 2
        assert ops.phxt_pending_has(world.ffi.cast("void *", first.untyped_storage().data_ptr())) == 1
        assert P.wait_tensor(second[7:]).data_ptr() == second[7:].data_ptr()  # a view finds it
        assert ops.phxt_pending_count() == 1
        same(second, total + size)
        assert P.wait_tensor_(first) is None
        same(P.wait_tensor(first), total)  # a second wait does nothing
        assert ops.phxt_pending_count() == 0
        # Many works on one storage.
        whole = torch.empty(4, 100)
        for i in range(4):
            whole[i] = x + i
            P.all_reduce_(whole[i], "sum", "g")
        P.wait_tensor(whole)
        assert ops.phxt_pending_count() == 0
        same(whole, torch.stack([total + i * size for i in range(4)]))
        # A result that is still pending is waited for where it goes into the next call.
        chained = x
        for _ in range(5):
            chained = P.all_reduce(chained, "sum", "g")
        same(P.wait_tensor(chained), total * size**4)
        inplace = x.clone()
        P.all_reduce_(inplace, "sum", "g")
        P.all_reduce_(inplace[:50], "sum", "g")
        same(P.wait_tensor(inplace), torch.cat([total[:50] * size, total[50:]]))
        # By address and by group.
        result = P.all_reduce(x, "sum", "g")
        checked(ops.phxt_wait_storage(world.ffi.cast("void *", result.untyped_storage().data_ptr()), 0))
        same(result, total)
        results = [P.all_reduce(x + i, "sum", "g") for i in range(2)]
        checked(ops.phxt_wait_group(0, b"g", 0))
        assert ops.phxt_pending_count() == 0
        same(results[1], total + size)
        assert ops.phxt_wait_group(0, b"absent", 0) == NOT_FOUND


def test_pending_work_is_found_by_the_storage_it_writes():
    load()
    run_ranks(pending_work, 2)


def never_waits(rank, size):
    with World(rank, size) as world:
        x = torch.ones(10)
        most = 0
        for _ in range(200):
            for _ in range(100):
                P.all_reduce(x, "sum", "g")
                most = max(most, world.ops.phxt_pending_count())
            world.barrier()  # a start never waits for the others: without this a fast rank may be any number ahead
        assert most <= 2 * 100  # at most a hundred are not complete; a sweep comes at twice what the last one left
        assert world.ops.phxt_sweep() == 0


def test_results_that_nobody_waits_for_do_not_pile_up():
    load()
    run_ranks(never_waits, 2, timeout=120)


def group_removed_while_pending(rank, size):
    world = World(rank, size)
    result = P.all_reduce(torch.ones(5), "sum", "g")
    checked(world.ops.phxt_group_remove(0, b"g"))
    same(P.wait_tensor(result), torch.full((5,), float(size)))
    world.barrier()
    world.core.phx_group_release(world.group)
    world.core.phx_world_release(world.world)


def test_work_survives_the_removal_of_its_group():
    load()
    run_ranks(group_removed_while_pending, 2)


# ---- several ranks: errors --------------------------------------------------------------------------------------


def errors_before_anything_is_sent(rank, size):
    with World(rank, size):
        x = torch.ones(3)
        if rank == 0:  # the others make no such call: nothing may be sent
            raises(ValueError, lambda: P.all_reduce(x, "nonsense", "g"))
            text = raises(ValueError, lambda: P.reduce_scatter_tensor(x, "sum", size, "g"))
            assert f"input dimension 0 has size 3, which must be a multiple of group_size {size}" in text
            raises(ValueError, lambda: P.all_gather_into_tensor(x, size + 1, "g"))
            raises(ValueError, lambda: P.all_to_all_single(x, [], [], "g"))
        same(P.wait_tensor(P.all_reduce(x, "sum", "g")), torch.full((3,), float(size)))


def test_wrong_arguments_leave_the_group_usable():
    load()
    run_ranks(errors_before_anything_is_sent, 2)


def disagreeing_ranks(rank, size):
    world = World(rank, size)
    x = torch.ones(3 + rank)
    text = raises(RuntimeError, lambda: P.wait_tensor(P.all_reduce(x, "sum", "g")))
    assert world.last_error() == (MISMATCH, text)
    assert world.ops.phxt_pending_count() == 0
    raises(RuntimeError, lambda: P.all_reduce(x, "sum", "g"))
    return text


def test_ranks_that_disagree_get_the_text_of_the_core():
    load()
    for text in run_ranks(disagreeing_ranks, 2):
        assert "float32, 3" in text
        assert "float32, 4" in text


def dead_peer(rank, size, started):
    world = World(rank, size)
    same(P.wait_tensor(P.all_reduce(torch.ones(2), "sum", "g")), torch.full((2,), 2.0))
    if rank == 1:
        deadline = time.monotonic() + 60
        while not started.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        os.kill(os.getpid(), 9)
    result = P.all_reduce(torch.ones(2), "sum", "g")
    started.touch()
    text = raises(RuntimeError, lambda: P.wait_tensor(result))
    assert world.last_error() == (PEER_DEAD, text)
    assert world.ops.phxt_pending_count() == 0
    P.wait_tensor(result)  # the error was told once
    return text


def test_a_dead_peer_is_an_error_where_the_result_is_waited_for(tmp_path):
    load()
    text, _ = run_ranks(dead_peer, 2, tmp_path / "started", expect_exit={1: -9})
    assert "rank 1" in text
    assert "all_reduce" in text


# ---- with torch.distributed, and with threads -------------------------------------------------------------------


def beside_gloo(rank, size):
    import torch.distributed as dist

    library = torch.library.Library("phalanx_c10d", "IMPL")
    other = dist.group.WORLD.group_name
    with World(rank, size) as world:

        def all_reduce(x, *texts):
            op, name = (world.ffi.string(world.ops.phxt_text(number)).decode() for number in texts)
            return torch.ops._c10d_functional.all_reduce(x, op, name)

        library.impl("all_reduce", all_reduce, "CompositeExplicitAutograd")
        x = torch.full((5,), float(rank + 1))
        total = torch.full((5,), float(size * (size + 1) // 2))
        ours, theirs = P.all_reduce(x, "sum", "g"), P.all_reduce(x * 2, "sum", other)
        same(P.wait_tensor(theirs), total * 2)
        same(P.wait_tensor(ours), total)
        same(P.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "max", other)), torch.full((5,), float(size)))
        assert world.ops.phxt_fallback_count() == 1


def test_groups_of_the_core_and_of_gloo_work_side_by_side():
    load()
    run_ranks(beside_gloo, 2, start_torch=True)


def rank_thread(rank, size, store, failures):
    try:
        with World(rank, size, context=100 + rank, store=store) as world:
            for count in (10, world.eager_bytes):  # the second blocks until the other thread has come
                for repeat in range(20):
                    x = torch.full((count,), float(rank + repeat))
                    total = torch.full((count,), float(sum(range(size)) + size * repeat))
                    same(P.wait_tensor(P.all_reduce(x, "sum", "g")), total)
    except BaseException:
        failures.append(traceback.format_exc())


def test_ranks_may_be_threads_because_ops_run_without_the_gil():
    ffi, core, _ = load()
    out, failures = ffi.new("phx_store **"), []
    checked(core.phx_store_memory(out))
    threads = [threading.Thread(target=rank_thread, args=(rank, 2, out[0], failures)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures[0]
    core.phx_store_release(out[0])
