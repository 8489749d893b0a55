"""Numbers and names of dtypes, reductions and algorithms."""

import pytest

from phalanx.core import Algo, DType, InvalidArgumentError, ReduceOp, ffi, lib
from phalanx.core.dtypes import algo_of, dtype_of, reduce_op_of

SIZES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


def test_dtypes_have_the_names_and_sizes_of_the_core():
    assert [dtype.name.lower() for dtype in DType] == list(SIZES)
    for dtype in DType:
        assert ffi.string(lib.phx_dtype_name(dtype)).decode() == dtype.name.lower()
        assert dtype.itemsize == SIZES[dtype.name.lower()] == lib.phx_dtype_size(dtype)
    assert ffi.string(lib.phx_dtype_name(len(DType) + 1)) == b"?"


def test_reductions_have_the_names_of_the_core():
    for op in ReduceOp:
        assert ffi.string(lib.phx_op_name(op)).decode() == op.name.lower()
    assert ffi.string(lib.phx_op_name(len(ReduceOp) + 1)) == b"?"


def test_enumerations_are_those_of_the_header():
    header = {
        DType.FLOAT16: lib.PHX_DTYPE_F16,
        DType.BFLOAT16: lib.PHX_DTYPE_BF16,
        DType.BOOL: lib.PHX_DTYPE_BOOL,
        DType.COMPLEX64: lib.PHX_DTYPE_C64,
        DType.COMPLEX128: lib.PHX_DTYPE_C128,
        DType.FLOAT8_E4M3FN: lib.PHX_DTYPE_F8E4M3,
        DType.FLOAT8_E5M2: lib.PHX_DTYPE_F8E5M2,
        ReduceOp.SUM: lib.PHX_OP_SUM,
        ReduceOp.PREMUL_SUM: lib.PHX_OP_PREMUL_SUM,
    }
    assert all(int(ours) == theirs for ours, theirs in header.items())
    assert [int(algo) for algo in Algo] == [
        lib.PHX_ALGO_AUTO,
        lib.PHX_ALGO_ONE_SHOT,
        lib.PHX_ALGO_TWO_SHOT,
        lib.PHX_ALGO_MULTIMEM,
    ]


def test_names_in_any_case_and_numbers_are_understood():
    assert dtype_of("float32") is dtype_of("Float32") is dtype_of(3) is DType.FLOAT32
    assert reduce_op_of("sum") is reduce_op_of("SUM") is reduce_op_of(1) is ReduceOp.SUM
    assert reduce_op_of("prod") is reduce_op_of("product") is ReduceOp.PRODUCT
    assert algo_of("one_shot") is algo_of(1) is Algo.ONE_SHOT


@pytest.mark.parametrize("wish", ["float8", "", 0, 18, -1, None, [], 3.5])
def test_an_unknown_dtype_is_an_error_that_lists_the_known_ones(wish):
    with pytest.raises(InvalidArgumentError, match=r"unknown dtype .*float16, bfloat16, float32"):
        dtype_of(wish)


@pytest.mark.parametrize("wish", ["median", 0, 10, None])
def test_an_unknown_reduction_is_an_error_that_lists_the_known_ones(wish):
    with pytest.raises(InvalidArgumentError, match=r"unknown reduce op .*sum, avg, product, min, max"):
        reduce_op_of(wish)


def test_an_unknown_algorithm_is_an_error_that_lists_the_known_ones():
    with pytest.raises(InvalidArgumentError, match=r"unknown algorithm 'ring'; expected auto, one_shot, two_shot"):
        algo_of("ring")
