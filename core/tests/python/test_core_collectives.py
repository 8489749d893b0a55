"""Collectives on ordinary memory, against numpy: every rank computes what it must get by itself."""

import gc
import itertools
import threading
import time
import weakref

import pytest

from phalanx.core import FileStore, InvalidArgumentError, Memory, PhalanxError, UnsupportedError, World
from ranks import run_ranks, scratch

np = pytest.importorskip("numpy", reason="needs numpy")

FLOATS = ["float16", "float32", "float64"]
INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
COUNTS = [0, 1, 7, 1000, 40_001]


def await_file(name):
    while not (scratch() / name).exists():
        time.sleep(0.001)


def join(rank, world_size, **options):
    return World(rank, world_size, FileStore(scratch() / "store"), timeout_ms=30_000, **options)


def data(seed, dtype, count):
    """The input of one rank: any rank can make that of any other."""
    random = np.random.default_rng([seed, count])
    if dtype in FLOATS:
        return random.standard_normal(count).astype(dtype)
    if dtype == "bool":
        return random.integers(0, 2, count).astype(bool)
    low, high = max(np.iinfo(dtype).min, -50), 50
    return random.integers(low, high, count).astype(dtype)


def reduced(inputs, op, scale=1.0):
    """The reduction in rank order: floats of 16 bits in float32, rounded once; integers wrap around."""
    dtype = inputs[0].dtype
    wide = [x.astype(np.float32) if dtype == np.float16 else x for x in inputs]
    if op == "premul_sum":
        wide = [x * x.dtype.type(scale) for x in wide]
    step = {
        "sum": np.add,
        "avg": np.add,
        "premul_sum": np.add,
        "product": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }[op]
    total = wide[0]
    for each in wide[1:]:
        total = step(total, each)
    if op == "avg":
        total = total / total.dtype.type(len(inputs)) if dtype.kind == "f" else np.trunc(total / len(inputs))
    return total.astype(dtype)


def all_reduce_everything(rank, world_size, staging_bytes, algo):
    with join(rank, world_size, staging_bytes=staging_bytes) as world:
        group = world.create_group("all", range(world_size))
        cases = list(itertools.product(FLOATS + INTEGERS, ["sum", "avg", "product", "min", "max"], COUNTS[:4]))
        cases += itertools.product(INTEGERS, ["band", "bor", "bxor"], COUNTS[:4])
        cases += itertools.product(FLOATS, ["premul_sum"], COUNTS[:4])
        cases += itertools.product(["float32", "int64"], ["sum"], COUNTS)
        for dtype, op, count in cases:
            if dtype == "int8" and op in ("sum", "avg") and world_size > 2:
                continue  # the average of a sum that wrapped around is nobody's business
            inputs = [data(r, dtype, count) for r in range(world_size)]
            out = np.full(count, 77, dtype)
            mine = inputs[rank].copy()
            group.all_reduce(mine, out, dtype=dtype, op=op, scale=0.375, algo=algo)
            np.testing.assert_array_equal(out, reduced(inputs, op, 0.375), err_msg=f"{dtype} {op} {count}")
            np.testing.assert_array_equal(mine, inputs[rank])
            group.all_reduce(mine, mine, dtype=dtype, op=op, scale=0.375, algo=algo)
            np.testing.assert_array_equal(mine, out, err_msg=f"{dtype} {op} {count} in place")
        return group.sequence


@pytest.mark.parametrize(("world_size", "staging_bytes"), [(1, 0), (2, 0), (3, 4096), (4, 0), (4, 4096)])
def test_all_reduce_equals_numpy_in_rank_order(world_size, staging_bytes):
    sequences = run_ranks(all_reduce_everything, world_size, staging_bytes, "auto")
    assert len(set(sequences)) == 1


@pytest.mark.parametrize("algo", ["one_shot", "two_shot"])
def test_each_algorithm_gives_the_same_bits(algo):
    run_ranks(all_reduce_everything, 3, 4096, algo)


def as_float(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(values):
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def all_reduce_bfloat16(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        inputs = [to_bfloat16(data(r, "float32", 5000)) for r in range(world_size)]
        out = np.empty(5000, np.uint16)
        group.all_reduce(inputs[rank], out, dtype="bfloat16")
        total = as_float(inputs[0])
        for each in inputs[1:]:
            total = total + as_float(each)
        np.testing.assert_array_equal(out, to_bfloat16(total))


def test_bfloat16_is_summed_in_float32_and_rounded_once():
    run_ranks(all_reduce_bfloat16, 4)


def f8_values(dtype):
    """What each of the 256 codes stands for."""
    fraction_bits, bias = (3, 7) if dtype == "float8_e4m3fn" else (2, 15)
    values = []
    for code in range(256):
        exponent, fraction = (code & 127) >> fraction_bits, code & ((1 << fraction_bits) - 1)
        part = fraction / (1 << fraction_bits)
        value = (1 + part) * 2.0 ** (exponent - bias) if exponent else part * 2.0 ** (1 - bias)
        if dtype == "float8_e4m3fn" and code & 127 == 127:
            value = np.nan
        if dtype == "float8_e5m2" and exponent == 31:
            value = np.inf if fraction == 0 else np.nan
        values.append(-value if code & 128 else value)
    return np.array(values)


def to_f8(dtype, value):
    """The code of the nearest value, of two the even one."""
    distances = np.abs(f8_values(dtype) - value)
    distances[~np.isfinite(f8_values(dtype))] = np.inf
    nearest = np.flatnonzero(distances == distances.min())
    return min(nearest, key=lambda code: (code % 2, (code >= 128) != (value < 0)))


def all_reduce_f8(rank, world_size, dtype):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        values = f8_values(dtype)
        usable = np.flatnonzero(np.abs(values) < 16)
        inputs = [usable[np.random.default_rng(r).integers(0, len(usable), 3000)].astype(np.uint8) for r in range(3)]
        out = np.empty(3000, np.uint8)
        group.all_reduce(inputs[rank], out, dtype=dtype)
        total = sum(values[each].astype(np.float32) for each in inputs)
        np.testing.assert_array_equal(values[out], values[[to_f8(dtype, value) for value in total]])
        group.all_reduce(inputs[rank], out, dtype=dtype, op="max")
        np.testing.assert_array_equal(values[out], np.max([values[each] for each in inputs], axis=0))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_floats_of_8_bits_are_summed_in_float32_and_rounded_once(dtype):  # M39
    run_ranks(all_reduce_f8, 3, dtype)


def all_reduce_complex(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        for dtype, half in (("complex64", "float32"), ("complex128", "float64")):
            inputs = [data(r, half, 1000) + 1j * data(r + 10, half, 1000) for r in range(world_size)]
            assert inputs[rank].dtype == dtype
            out = np.empty(1000, dtype)
            group.all_reduce(inputs[rank], out)
            np.testing.assert_array_equal(out, (inputs[0] + inputs[1]) + inputs[2])
            group.all_reduce(inputs[rank], out, op="product")
            np.testing.assert_allclose(out, inputs[0] * inputs[1] * inputs[2], rtol=1e-5)
            for op in ("min", "max", "band"):
                with pytest.raises(UnsupportedError, match=f"{op} is not defined for dtype {dtype}"):
                    group.all_reduce(inputs[rank], out, op=op)


def test_complex_numbers_are_summed_and_multiplied_but_have_no_order():
    run_ranks(all_reduce_complex, 3)


def propagate_nan(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        mine = np.array([1.0, 2.0, 3.0], np.float32)
        mine[rank] = np.nan
        out = np.empty(3, np.float32)
        for op in ("min", "max", "sum"):
            group.all_reduce(mine, out, op=op)
            assert np.isnan(out[:2]).all(), op
            assert not np.isnan(out[2]), op


def test_minimum_and_maximum_propagate_nan():
    run_ranks(propagate_nan, 2)


def move_everything(rank, world_size, staging_bytes):
    with join(rank, world_size, staging_bytes=staging_bytes) as world:
        group = world.create_group("all", range(world_size))
        for dtype, count in itertools.product(["bool", "float16", "int32", "float64"], COUNTS):
            note = f"{dtype} {count}"
            whole = [data(r, dtype, count * world_size) for r in range(world_size)]
            part = [each[:count] for each in whole]

            out = np.empty(count * world_size, dtype)
            group.all_gather(part[rank].copy(), out)
            np.testing.assert_array_equal(out, np.concatenate(part), err_msg=note)

            group.all_to_all(whole[rank].copy(), out)
            mine = slice(rank * count, (rank + 1) * count)
            np.testing.assert_array_equal(out, np.concatenate([each[mine] for each in whole]), err_msg=note)

            if dtype != "bool":
                small = np.empty(count, dtype)
                group.reduce_scatter(whole[rank].copy(), small, op="sum")
                np.testing.assert_array_equal(small, reduced(whole, "sum")[mine], err_msg=note)

            for root in range(world_size):
                buffer = part[rank].copy()
                group.broadcast(buffer, root_group_rank=root)
                np.testing.assert_array_equal(buffer, part[root], err_msg=note)
        group.barrier()


@pytest.mark.parametrize(("world_size", "staging_bytes"), [(1, 0), (2, 0), (2, 4096), (3, 0), (4, 4096)])
def test_gather_scatter_exchange_and_broadcast_equal_numpy(world_size, staging_bytes):
    run_ranks(move_everything, world_size, staging_bytes)


def exchange_uneven(rank, world_size, staging_bytes):
    with join(rank, world_size, staging_bytes=staging_bytes) as world:
        group = world.create_group("all", range(world_size))
        for scale in (1, 500):
            # Rank i sends (i + 2 j) mod 4 times scale elements to rank j: some blocks are empty.
            def length(i, j, scale=scale):
                return (i + 2 * j) % 4 * scale

            def block(i, j):
                return data(10 * i + j, "float32", length(i, j))

            everyone = range(world_size)
            source = np.concatenate([block(rank, j) for j in everyone])
            expected = np.concatenate([block(i, rank) for i in everyone])
            out = np.full_like(expected, -1)
            sent, received = [length(rank, j) for j in everyone], [length(i, rank) for i in everyone]
            group.all_to_all_v(source, sent, out, received)
            np.testing.assert_array_equal(out, expected)
            work = group.all_to_all_v(source, sent, out, received, blocking=False)
            del sent, received
            work.wait()
            np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("world_size", "staging_bytes"), [(1, 0), (2, 0), (3, 4096), (4, 0)])
def test_all_to_all_with_uneven_and_empty_blocks(world_size, staging_bytes):
    run_ranks(exchange_uneven, world_size, staging_bytes)


def move_uneven(rank, world_size, staging_bytes):
    with join(rank, world_size, staging_bytes=staging_bytes) as world:
        group = world.create_group("all", range(world_size))
        for scale in (0, 1, 3000):
            counts = [(r * 2 + 1) % 4 * scale for r in range(world_size)]  # some are empty
            total, begin = sum(counts), sum(counts[:rank])
            part = [data(r, "int32", counts[r]) for r in range(world_size)]
            whole = [data(10 + r, "int32", total) for r in range(world_size)]
            for blocking in (True, False):
                out = np.full(total, -1, np.int32)
                work = group.all_gather_v(part[rank].copy(), out, counts, blocking=blocking)
                mine = np.full(counts[rank], -1, np.int32)
                later = group.reduce_scatter_v(whole[rank], mine, counts, op="max", blocking=blocking)
                if not blocking:
                    later.wait()
                    work.wait()
                np.testing.assert_array_equal(out, np.concatenate(part))
                expected = reduced(whole, "max")[begin : begin + counts[rank]]
                np.testing.assert_array_equal(mine, expected)


@pytest.mark.parametrize(("world_size", "staging_bytes"), [(1, 0), (2, 4096), (4, 0)])
def test_gather_and_scatter_of_uneven_and_empty_blocks_equal_numpy(world_size, staging_bytes):
    run_ranks(move_uneven, world_size, staging_bytes)


def use_roots(rank, world_size, staging_bytes):
    with join(rank, world_size, staging_bytes=staging_bytes) as world:
        group = world.create_group("all", range(world_size))
        for root, count in itertools.product(range(world_size), COUNTS):
            inputs = [data(r, "float32", count) for r in range(world_size)]
            here = rank == root
            out = np.full(count, -1, np.float32)
            group.reduce(inputs[rank], out if here else None, root_group_rank=root)
            np.testing.assert_array_equal(out, reduced(inputs, "sum") if here else np.full(count, -1, np.float32))
            group.reduce(inputs[rank], out, op="max", root_group_rank=root)  # elsewhere `out` is not looked at
            np.testing.assert_array_equal(out, reduced(inputs, "max") if here else np.full(count, -1, np.float32))
            everything = np.empty(count * world_size, np.float32) if here else None
            group.gather(inputs[rank], everything, root_group_rank=root)
            if here:
                np.testing.assert_array_equal(everything, np.concatenate(inputs))
            group.scatter(np.concatenate(inputs) if here else None, out, root_group_rank=root)
            np.testing.assert_array_equal(out, inputs[rank])
        group.barrier()


@pytest.mark.parametrize(("world_size", "staging_bytes"), [(1, 0), (2, 0), (3, 4096), (4, 0)])
def test_reduce_gather_and_scatter_have_a_root(world_size, staging_bytes):  # P30
    run_ranks(use_roots, world_size, staging_bytes)


def thread_per_channel(rank, world_size):
    with join(rank, world_size, channels=3) as world:
        group = world.create_group("all", range(world_size))
        assert group.channels == 3
        wrong = []

        def use(channel):
            mine, out = np.empty(5000, np.int64), np.empty(5000, np.int64)
            for i in range(100 + 50 * channel):  # each thread at its own pace
                mine[:] = rank + i * channel
                group.all_reduce(mine, out, channel=channel)
                if not (out == sum(range(world_size)) + i * channel * world_size).all():
                    wrong.append((channel, i))

        threads = [threading.Thread(target=use, args=(channel,)) for channel in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert group.sequence == 100
        with pytest.raises(InvalidArgumentError, match="channel is 3, but group 'all' has 3 channels"):
            group.all_reduce(np.ones(1), np.ones(1), channel=3)
        with pytest.raises(InvalidArgumentError, match="channel"):
            group.all_reduce(np.ones(1), np.ones(1), channel=-1)
        group.barrier()


def test_threads_use_channels_of_their_own():
    run_ranks(thread_per_channel, 2)


# ---- what may be given --------------------------------------------------------------------------


def use_every_kind_of_buffer(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        total = sum(range(1, world_size + 1))
        array = np.full(4, rank + 1, np.int32)
        out = np.zeros(4, np.int32)

        def result():
            values = out.copy()
            out[:] = -1
            return values.tolist()

        group.all_reduce(array, out)
        assert result() == [total] * 4
        group.all_reduce(array.ctypes.data, out.ctypes.data, 4, "int32", "sum")
        assert result() == [total] * 4
        group.all_reduce(array.ctypes.data, out, count=2, op="SUM")
        assert result() == [total, total, -1, -1]
        group.all_reduce(bytes(array), memoryview(out).cast("B"), dtype=9)
        assert result() == [total] * 4
        block = world.alloc(16)
        assert isinstance(block, Memory)
        block.buffer()[:] = array.tobytes()
        group.all_reduce(block, out, dtype="int32")
        assert result() == [total] * 4
        group.all_reduce(array.reshape(2, 2), out.reshape(2, 2))
        assert result() == [total] * 4
        out[:] = array
        group.all_reduce(out)  # in place
        assert result() == [total] * 4
        several = bytearray(16 * world_size)
        group.all_gather(block, several, 4, "int32")
        assert np.frombuffer(several, np.int32).tolist() == [r + 1 for r in range(world_size) for _ in range(4)]
        root_only = bytes(4) if rank == 0 else bytearray(b"xxxx")  # the root's buffer may be read-only
        group.broadcast(root_only, dtype="uint8")
        assert root_only == bytes(4)


def test_addresses_memory_and_all_buffers_are_accepted():
    run_ranks(use_every_kind_of_buffer, 2)


def bad_calls(group, world):
    """Name, what the text must hold, and the call; rank 0 makes them alone, so nothing may be sent."""
    a, b = np.ones(4, np.float32), np.ones(4, np.float32)
    wide = np.ones(8, np.float32)
    return [
        ("unknown dtype", "float8", lambda: group.all_reduce(a.ctypes.data, b.ctypes.data, 4, "float8")),
        ("unknown op", "median", lambda: group.all_reduce(a, b, op="median")),
        ("unknown algorithm", "ring", lambda: group.all_reduce(a, b, algo="ring")),
        ("bitwise op on floats", "band", lambda: group.all_reduce(a, b, op="band")),
        ("no dtype", "dtype is needed", lambda: group.all_reduce(a.ctypes.data, b.ctypes.data, 4)),
        ("no count", "count is needed", lambda: group.all_reduce(a.ctypes.data, b, dtype="float32")),
        ("negative count", "count", lambda: group.all_reduce(a, b, -1)),
        ("fractional count", "count", lambda: group.all_reduce(a, b, 1.5)),
        ("count beyond the buffer", "too few", lambda: group.all_reduce(a, b, 5)),
        ("count that overflows", "memory can hold", lambda: group.all_reduce(1 << 20, 1 << 21, 2**62, "float64")),
        ("short output", "must have 16 bytes", lambda: group.all_reduce(a, b[:2])),
        ("output of all_gather", "must have 32 bytes", lambda: group.all_gather(a, b)),
        ("output of reduce_scatter", "must have 16 bytes", lambda: group.reduce_scatter(wide, wide.copy())),
        ("indivisible input", "multiple of 2", lambda: group.reduce_scatter(np.ones(3, np.float32), b)),
        ("different dtypes", "float64", lambda: group.all_reduce(a, np.ones(4))),
        ("other dtype than the buffer's", "int32", lambda: group.all_reduce(a, b, dtype="int32")),
        ("read-only output", "read-only", lambda: group.all_reduce(a, bytes(16), dtype="float32")),
        ("strided input", "not contiguous", lambda: group.all_reduce(wide[::2], b)),
        ("no buffer", "address", lambda: group.all_reduce("text", b)),
        ("NULL input", "NULL|null", lambda: group.all_reduce(0, b, 4)),
        ("NULL output", "NULL|null", lambda: group.all_reduce(a, 0, 4)),
        ("overlap", "overlap", lambda: group.all_reduce(wide[:4], wide[2:6])),
        ("aliasing at the wrong place", "overlap", lambda: group.all_gather(wide[2:6], wide)),
        ("root beyond the group", "root_group_rank", lambda: group.broadcast(a, root_group_rank=2)),
        ("negative root", "root_group_rank", lambda: group.broadcast(a, root_group_rank=-1)),
        ("counts of the wrong length", "one for each rank", lambda: group.all_to_all_v(a, [4], b, [2, 2])),
        ("counts beyond the buffer", "source_counts", lambda: group.all_to_all_v(a, [4, 1], b, [2, 2])),
        ("negative counts", r"out_counts\[0\]", lambda: group.all_to_all_v(a, [2, 2], b, [-1, 2])),
        ("counts of all_gather_v", "one for each rank", lambda: group.all_gather_v(a, b, [2, 2, 0])),
        ("own count of all_gather_v", "source has 16", lambda: group.all_gather_v(a, wide, [5, 1])),
        ("sum of all_gather_v", "out has 16", lambda: group.all_gather_v(a, b, [4, 4])),
        ("own count of reduce_scatter_v", "out has 16", lambda: group.reduce_scatter_v(wide, b, [5, 3])),
        ("sum of reduce_scatter_v", "source has 32", lambda: group.reduce_scatter_v(wide, b, [4, 5])),
        ("negative count of all_gather_v", r"counts\[1\]", lambda: group.all_gather_v(a, b, [4, -1])),
        ("counts beyond memory", "no memory can hold", lambda: group.all_gather_v(1 << 20, 1 << 21, [2**63] * 2, 3)),
        ("root without output", "out is missing.*group rank 0, the root", lambda: group.reduce(a)),
        ("root without output of gather", "out is missing", lambda: group.gather(a)),
        ("root without source", "source is missing.*group rank 0, the root", lambda: group.scatter(None, a)),
        ("no source", "source is missing; give", lambda: group.all_gather(None, a)),
        ("no output", "out is missing; give", lambda: group.all_gather(a, None)),
        ("root with a short output", "must have 32 bytes", lambda: group.gather(a, b)),
        ("root of reduce", "root_group_rank", lambda: group.reduce(a, b, root_group_rank=2)),
        ("an array that shows no buffer", "dtype", lambda: group.all_reduce(np.zeros(4, "M8[s]"), b)),
        ("negative timeout", "timeout_ms", lambda: group.all_reduce(a, b, timeout_ms=-1)),
    ]


def refuse_bad_calls(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        for name, text, call in bad_calls(group, world):  # the same on all ranks, which so stay in step
            of_rank_0 = ("root without", "root with a short", "own count")
            if rank != 0 and name.startswith(of_rank_0):
                continue  # the binding finds it on rank 0, before the core hears of a call
            with pytest.raises((InvalidArgumentError, UnsupportedError), match=text) as caught:
                call()
            assert isinstance(caught.value, ValueError) or name == "bitwise op on floats", name
        world.check()
        assert (group.sequence, group.state, group.error()) == (0, "active", None)
        out = np.empty(1, np.float32)
        group.all_reduce(np.array([rank + 1], np.float32), out)
        assert out[0] == 3


def test_an_unknown_option_is_named_before_anything_is_sent():
    with World(0, 1) as world:
        group = world.create_group("one", [0])
        symm = group.rendezvous(world.alloc(64))
        values, channels = np.array([3], np.float32), "algo, channel, device, scale, stream, timeout_ms"
        for call, unknown, known in (
            (lambda: group.all_reduce(values, timeout=3), "timeout", channels),
            (lambda: group.all_gather_v(values, values, [1], color=3), "color", channels),
            (lambda: group.coalesced([], chanel=1), "chanel", channels),
            (lambda: group.send(values, 0, algo="one_shot"), "algo", "device, stream, timeout_ms"),
            (lambda: group.messages([], channel=1), "channel", "device, stream, timeout_ms"),
            (lambda: symm.all_gather(0, values, device="cpu"), "device", channels.replace("device, ", "")),
        ):
            with pytest.raises(TypeError, match=f"unknown option '{unknown}'; expected {known}$"):
                call()
        assert group.sequence == 0


def test_a_wrong_argument_is_named_and_ranks_that_refuse_alike_go_on():
    run_ranks(refuse_bad_calls, 2)


# ---- works --------------------------------------------------------------------------------------


def start_several(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        inputs = [np.full(2000, (rank + 1) * (i + 1), np.int64) for i in range(20)]
        outs = [np.zeros(2000, np.int64) for _ in inputs]
        works = [group.all_reduce(a, b, blocking=False) for a, b in zip(inputs, outs, strict=True)]
        total = sum(range(1, world_size + 1))
        for i in (7, 0, 19, *range(20)):  # in any order, and again
            works[i].wait()
            assert works[i].test()
            assert works[i].error() is None
            assert (outs[i] == total * (i + 1)).all()
        assert group.sequence == 20
        assert group.eager_bytes >= 2000 * 8


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_works_may_be_waited_for_in_any_order_and_again(world_size):
    run_ranks(start_several, world_size)


def drop_works(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        for i in range(50):
            # Neither the buffers nor the work are kept by anybody here.
            group.all_reduce(np.full(5000, i, np.float32), np.empty(5000, np.float32), blocking=False)
        out = np.empty(3, np.float32)
        group.all_reduce(np.ones(3, np.float32), out)
        assert (out == world_size).all()
        group.barrier()
        group.all_reduce(np.ones(3, np.float32), out)
        assert not group._orphans._works


def test_dropped_works_still_run_and_their_buffers_live_until_then():
    run_ranks(drop_works, 3)


def drop_group_with_works(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        view = group.rendezvous(world.alloc(64)).buffer(0)  # holds the group as the core sees it
        if rank == 1:
            await_file("done")
            return
        out = np.zeros(5000, np.float32)
        alive = weakref.ref(out)
        group.all_reduce(np.ones(5000, np.float32), out, blocking=False)
        del out, group
        gc.collect()
        assert alive() is not None
        del view
        gc.collect()
        assert alive() is None
        (scratch() / "done").touch()


def test_buffers_of_dropped_works_live_as_long_as_anything_holds_their_group():
    run_ranks(drop_group_with_works, 2)


def poll_until_complete(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        out = np.empty(4, np.float32)
        if rank == 0:
            work = group.all_reduce(np.ones(4, np.float32), out, blocking=False)
            assert not work.test()  # the other comes only after the file
            (scratch() / "go").touch()
            while not work.test():
                pass
        else:
            await_file("go")
            group.all_reduce(np.ones(4, np.float32), out)
        assert (out == 2).all()


def test_a_work_can_be_polled():
    run_ranks(poll_until_complete, 2)


def leave_early(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        for _ in range(20):
            out = np.empty(1, np.int64)
            group.all_reduce(np.array([rank], np.int64), out)
        return int(out[0])


def test_a_rank_that_is_done_may_leave_while_others_finish_the_same_collective():
    for _ in range(3):
        assert run_ranks(leave_early, 4) == [6, 6, 6, 6]


def many_small(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("all", range(world_size))
        mine, out = np.array([rank], np.int64), np.empty(1, np.int64)
        for i in range(3000):
            mine[0] = rank + i
            group.all_reduce(mine, out)
            assert out[0] == sum(range(world_size)) + i * world_size


def test_thousands_of_small_collectives_in_a_row():
    run_ranks(many_small, 4)


def errors_name_everything(rank, world_size):
    with join(rank, world_size) as world:
        group = world.create_group("tp", range(world_size))
        try:
            group.all_reduce(0, 0, 4, "float32")
        except PhalanxError as error:
            return error.operation, error.group, error.rank, error.status_name
    return None


def test_an_error_carries_operation_group_and_rank():
    results = run_ranks(errors_name_everything, 2)
    assert results == [("all_reduce", "tp", rank, "PHX_ERR_INVALID") for rank in range(2)]
