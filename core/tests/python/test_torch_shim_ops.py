"""The ops torch.ops.phalanx.* of libphalanx_torch.so over the C core: what they are, and what they compute."""

import itertools
import threading

import pytest

from ranks import run_ranks
from torch_shim import (
    ALL,
    COMPLEX,
    EXISTS,
    INTEGERS,
    INVALID,
    NOT_FOUND,
    P,
    World,
    checked,
    data,
    load,
    one_rank,
    raises,
    reduced,
    same,
    torch,
)

OPS = [
    "all_reduce", "all_reduce_", "all_gather_into_tensor", "all_gather_into_tensor_out", "reduce_scatter_tensor",
    "reduce_scatter_tensor_out", "all_to_all_single", "broadcast", "broadcast_", "wait_tensor",
]  # fmt: skip


# ---- registration -----------------------------------------------------------------------------------------------


def test_kernels_are_found_by_the_names_of_ops():
    ffi, _, ops = load()
    assert all(ops.phxt_kernel_of(name.encode()) != ffi.NULL for name in OPS)
    assert ops.phxt_kernel_of(b"nonsense") == ops.phxt_kernel_of(ffi.NULL) == ffi.NULL


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


def without_tensors(rank, size):
    with World(rank, size) as world:
        ffi, ops = world.ffi, world.ops
        x, out = data(rank, (40,)), torch.zeros(40)
        where = [ffi.cast("void *", each.data_ptr()) for each in (x, out)]
        number = 6  # torch's, of float32
        wanted = reduced([data(each, (40,)) for each in range(size)], "sum")
        assert ops.phxt_all_reduce(*where, 40, number, b"sum", 3, b"nobody", 6) == 0
        assert ops.phxt_all_reduce(*where, 40, number, b"sum", 3, b"g", 1) == 1
        same(out, wanted)
        y = x.clone()
        P.all_reduce_(y, "sum", "g")  # while it is pending only the op can tell what has to be waited for
        assert world.ops.phxt_pending_count() == 1
        assert ops.phxt_all_reduce(*where, 40, number, b"sum", 3, b"g", 1) == 0
        P.wait_tensor(y)
        assert ops.phxt_all_reduce(where[0], where[0], 40, number, b"sum", 3, b"g", 1) == 1
        same(x, wanted)


def test_an_all_reduce_of_bare_memory_is_the_op_without_tensors():
    run_ranks(without_tensors, 2)


# ---- one rank ---------------------------------------------------------------------------------------------------


@pytest.fixture
def alone():
    with one_rank() as world:
        yield world


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
        (lambda: P.all_reduce(x, "mean", "g"), ["unknown reduce op 'mean'; expected sum, avg"]),
        (lambda: P.all_reduce(x, "", "g"), ["unknown reduce op ''"]),
        (lambda: P.all_reduce(x, "PREMUL_SUM", "g"), ["all_reduce on group 'g'", "premul_sum", "factor"]),
        (
            lambda: P.all_gather_into_tensor(x, 2, "g"),
            ["all_gather_into_tensor on group 'g' (rank 0 of 1)", "group_size is 2"],
        ),
        (lambda: P.reduce_scatter_tensor(x, "sum", 3, "g"), ["group_size is 3", "1 ranks"]),
        (lambda: P.reduce_scatter_tensor(torch.tensor(1.0), "sum", 1, "g"), ["reduce_scatter_tensor", "no dims"]),
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


def test_an_unknown_group_without_an_implementation_in_python_says_what_to_import(alone):
    if torch._C._dispatch_has_kernel_for_dispatch_key("phalanx_c10d::broadcast", "CompositeExplicitAutograd"):
        pytest.skip("phalanx.collectives was imported: there is an implementation")
    text = raises(RuntimeError, lambda: P.broadcast(torch.ones(2), 0, "nowhere"))
    assert "broadcast on group 'nowhere'" in text
    if "printed" not in text:  # torch before 2.13 cannot tell why
        assert "import phalanx.collectives" in text


def test_calls_on_unknown_groups_go_to_phalanx_c10d_with_the_same_arguments(alone):
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
