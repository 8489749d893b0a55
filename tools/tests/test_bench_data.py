"""The inputs of phalanx bench, and the check of results, against the same formula written in Python."""

import ctypes
import struct

import pytest

from phalanx.tools.bench import _native

RANKS, COUNT = 3, 700
PATH = _native.library_path()


def value(rank, element, iteration):
    phase = (iteration * 0x85EBCA77 ^ (rank + 1) * 0xC2B2AE3D) & 0xFFFFFFFF
    return (element * 0x9E3779B1 + phase & 0xFFFFFFFF) >> 27  # 5 bits: 3 * 31 is below 256


def encode(dtype, numbers):
    words = [struct.unpack("<I", struct.pack("<f", number))[0] for number in numbers]
    return b"".join(struct.pack("<I", word) if dtype == "float32" else struct.pack("<H", word >> 16) for word in words)


def expected(collective, rank, iteration):
    """What a rank must get, as a list of numbers."""
    inputs = [[value(each, i, iteration) for i in range(RANKS * COUNT)] for each in range(RANKS)]
    mine = slice(rank * COUNT, (rank + 1) * COUNT)
    match collective:
        case "all_reduce":
            return [sum(column) for column in zip(*(given[:COUNT] for given in inputs), strict=True)]
        case "all_gather":
            return [number for given in inputs for number in given[:COUNT]]
        case "reduce_scatter":
            return [sum(column) for column in zip(*(given[mine] for given in inputs), strict=True)]
        case "all_to_all":
            return [number for given in inputs for number in given[mine]]
        case "broadcast":
            return inputs[0][:COUNT]
    raise AssertionError(collective)


def plan_of(collective, dtype, rank, given, taken):
    plan = _native.Plan(
        ctypes.sizeof(_native.Plan), _native.COLLECTIVES[collective], _native.DTYPES[dtype], rank, RANKS, 0
    )
    plan.count = COUNT
    plan.input, plan.output = ctypes.addressof(given), ctypes.addressof(taken)
    return plan


def check(plan, iteration):
    failure = _native.Failure()
    status = _native.Library(str(PATH)).lib.phxb_check(plan, iteration, failure)
    return status, failure


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
def test_the_right_result_passes_and_one_wrong_bit_anywhere_does_not(collective, dtype):
    iteration, rank = 5_000_000_019, 1
    right = encode(dtype, expected(collective, rank, iteration))
    given = (ctypes.c_uint8 * 1)()
    taken = (ctypes.c_uint8 * len(right)).from_buffer_copy(right)
    plan = plan_of(collective, dtype, rank, given, taken)
    assert check(plan, iteration)[0] == _native.OK
    assert check(plan, iteration + 1)[0] == _native.WRONG_RESULT
    size = _native.DTYPE_BYTES[dtype]
    for element in (0, 1, COUNT - 1, len(right) // size - 1):
        taken[element * size + 1] ^= 1
        status, failure = check(plan, iteration)
        assert (status, failure.index) == (_native.WRONG_RESULT, element)
        assert failure.seen != failure.expected == expected(collective, rank, iteration)[element]
        taken[element * size + 1] ^= 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("collective", "blocks"), [("all_reduce", 1), ("reduce_scatter", 3), ("broadcast", 0)])
def test_inputs_are_what_the_formula_says_and_nothing_beyond_them_is_written(collective, blocks, dtype):
    size = _native.DTYPE_BYTES[dtype]
    given = (ctypes.c_uint8 * (size * (RANKS * COUNT + 1)))(*[0xEE] * (size * (RANKS * COUNT + 1)))
    plan = plan_of(collective, dtype, 2, given, given)
    assert _native.Library(str(PATH)).lib.phxb_fill(plan, 41) == _native.OK
    written = encode(dtype, [value(2, i, 41) for i in range(blocks * COUNT)])
    assert bytes(given) == written + b"\xee" * (len(given) - len(written))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_of_a_list_lie_apart(dtype):
    size, gap = _native.DTYPE_BYTES[dtype], 5
    each = (COUNT + gap) * size
    given, taken = (ctypes.c_uint8 * (RANKS * each))(*[0xEE] * (RANKS * each)), (ctypes.c_uint8 * (RANKS * each))()
    plan = plan_of("all_to_all", dtype, 1, given, taken)
    plan.gap = gap
    assert _native.Library(str(PATH)).lib.phxb_fill(plan, 41) == _native.OK
    for block in range(RANKS):
        values = encode(dtype, [value(1, block * COUNT + i, 41) for i in range(COUNT)])
        assert bytes(given)[block * each : (block + 1) * each] == values + b"\xee" * gap * size
    wanted = expected("all_to_all", 1, 41)
    for block in range(RANKS):
        assert check(plan, 41)[0] == _native.WRONG_RESULT
        values = encode(dtype, wanted[block * COUNT : (block + 1) * COUNT])
        taken[block * each : block * each + len(values)] = values
    assert check(plan, 41)[0] == _native.OK


def test_sums_stay_exact_in_bfloat16_for_the_most_ranks():
    given = (ctypes.c_float * COUNT)()
    largest = 0.0
    for ranks in (2, 8, 9, 32, _native.MAX_RANKS):
        plan = plan_of("all_reduce", "float32", 0, given, given)
        plan.ranks = ranks
        assert _native.Library(str(PATH)).lib.phxb_fill(plan, 1) == _native.OK
        largest = max(given)
        assert largest >= 1 and largest * ranks <= 256


def test_a_plan_of_another_build_is_refused():
    given = (ctypes.c_uint8 * 4096)()
    plan = plan_of("all_reduce", "float32", 0, given, given)
    plan.struct_size -= 8
    assert _native.Library(str(PATH)).lib.phxb_fill(plan, 0) == _native.BAD_PLAN
