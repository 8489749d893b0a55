"""phalanx/device.h for kernels in Triton: functions of the same names that a `@triton.jit` kernel may call::

    from phalanx.symm_mem.triton import phx_team_at, phx_team_barrier, team_of

    @triton.jit
    def kernel(team, status, ...):
        late = phx_team_barrier(team, tl.program_id(0), 10_000_000_000)
        theirs = phx_team_at(team, peer, 0, tl.float32)     # a pointer into the block of a rank
        ...

    kernel[grid](team_of(handle), status, ...)

The rules of device.h for threads apply to programs: all threads of a program take part in each call and get the same
result, and programs that run at the same time each take a channel of their own. Words and pointers have the meaning
that they have in device.h, so one rank may run a kernel in Triton while another runs one in C. Counts are int32 and
wrap around.

This module can be imported without Triton; its functions then raise. On symmetric memory of the host, kernels run in
Triton's interpreter (set TRITON_INTERPRET=1 before Triton is imported). On symmetric memory of GPUs they are launched
as other kernels, on torch's current stream; the tests compile these functions for GPUs, and did not run them on one.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# (Triton reads the annotations of kernels, and knows but its own.)

import importlib
import os
import time
from typing import Any, NamedTuple

from phalanx.core import UnsupportedError, ffi
from phalanx.symm_mem._handle import SymmetricMemory

__all__ = [
    "PHX_ERR_REVOKED",
    "Team",
    "phx_clock_ns",
    "phx_multicast_and_b64x2",
    "phx_multicast_fence",
    "phx_multicast_max_bf16x8",
    "phx_multicast_max_f16x8",
    "phx_multicast_max_i32x4",
    "phx_multicast_max_i64x2",
    "phx_multicast_max_u32x4",
    "phx_multicast_max_u64x2",
    "phx_multicast_min_bf16x8",
    "phx_multicast_min_f16x8",
    "phx_multicast_min_i32x4",
    "phx_multicast_min_i64x2",
    "phx_multicast_min_u32x4",
    "phx_multicast_min_u64x2",
    "phx_multicast_or_b64x2",
    "phx_multicast_put",
    "phx_multicast_sum_bf16x8",
    "phx_multicast_sum_f16x8",
    "phx_multicast_sum_f32x4",
    "phx_multicast_sum_f64x2",
    "phx_multicast_sum_u32x4",
    "phx_multicast_sum_u64x2",
    "phx_multicast_xor_b64x2",
    "phx_pause",
    "phx_team_at",
    "phx_team_barrier",
    "phx_team_block_barrier",
    "phx_team_last",
    "phx_team_put",
    "phx_team_wait",
    "phx_team_word",
    "phx_word_get",
    "phx_word_put",
    "team_of",
]


class Team(NamedTuple):
    """A phx_team as an argument of a kernel: addresses are integers. Made by `team_of`.

    Attributes:
        group_rank: This rank's position in the group.
        group_size: Number of ranks.
        channels: Number of channels of each signal pad.
        pad_stride: Distance in words between the parts of two writers in a pad.
        buffers: Address of group_size pointers to the blocks of the ranks.
        pads: Address of group_size pointers to the signal pads of the ranks.
        multicast: Address of all blocks at once, or 0.
        bytes: Size of each block in bytes.
        failed: Address of group_size words; a word is not 0 if the rank has failed, so that waiting for it is useless.
    """

    group_rank: int
    group_size: int
    channels: int
    pad_stride: int
    buffers: int
    pads: int
    multicast: int
    bytes: int
    failed: int


def team_of(handle: SymmetricMemory) -> Team:
    """The argument for kernels that use the memory of a handle. Not collective.

    Args:
        handle: The handle. Keep it until the last kernel with this argument has ended.

    Returns:
        The argument, a tuple of numbers.

    Raises:
        PhalanxError: The GPU cannot map the memory of the ranks.
    """
    team = ffi.cast("phx_team *", handle.team)
    return Team(*(int(ffi.cast("uintptr_t", getattr(team, field))) for field in Team._fields))


class _Missing:
    """Replaces a function of this module if Triton is not installed."""

    def __init__(self, function: Any) -> None:
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        raise UnsupportedError(
            f"{self.__name__}: the function is for kernels in Triton, which is not installed; install it with "
            "`pip install triton`"
        )

    def __getitem__(self, grid: Any) -> Any:
        return self


tl: Any  # Any: Triton has no types, and need not be there
try:
    _triton: Any = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
    jit: Any = _triton.jit
    constexpr: Any = tl.constexpr
    PHX_ERR_REVOKED: Any = tl.constexpr(-6)
except ImportError:
    jit, tl, constexpr = _Missing, None, str
    PHX_ERR_REVOKED = -6


# ---- what differs between a GPU and the interpreter ----------------------------------------------

# All threads of a program must see one clock and one state of `failed`, or they part ways in the loop of a wait. So
# each thread asks for itself, and the largest answer is everybody's. (Atomics are done by one thread, for all.)


@jit
def phx_clock_ns():
    """Nanoseconds since some moment."""
    lanes = tl.arange(0, tl.extra.cuda.num_threads())
    now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l,r", [lanes], dtype=tl.int64, is_pure=False, pack=1)
    return tl.max(now, axis=0)


@jit
def phx_pause(looks):
    """Between two looks at a word: after the first ones the program rests."""
    if looks > 64:
        tl.inline_asm_elementwise("nanosleep.u32 20; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@jit
def _read_only(word):
    lanes = tl.arange(0, tl.extra.cuda.num_threads())
    value = tl.inline_asm_elementwise(
        "ld.acquire.sys.global.u32 $0, [$1];", "=r,l,r", [word, lanes], dtype=tl.int32, is_pure=False, pack=1
    )
    return tl.max(value, axis=0)


if type(phx_clock_ns).__name__ == "InterpretedFunction":  # on the host, where a program is one thread

    def phx_clock_ns():
        return tl.full((), time.monotonic_ns(), tl.int64)

    def phx_pause(looks):
        os.sched_yield()

    def _read_only(word):
        return tl.load(word, volatile=True)


# ---- words ---------------------------------------------------------------------------------------


@jit
def phx_word_put(word, value):
    """Write a word; whoever sees it with phx_word_get sees all that the program wrote before."""
    tl.debug_barrier()  # that of its other threads too
    tl.atomic_xchg(word, value, sem="release", scope="sys")


@jit
def phx_word_get(word):
    """A word of a signal pad, for all threads of the program."""
    return tl.atomic_add(word, 0, sem="acquire", scope="sys")


# ---- memory and signals --------------------------------------------------------------------------


@jit
def phx_team_at(team, group_rank, offset, dtype):
    """A pointer to elements of `dtype`, `offset` bytes into the block of a rank."""
    blocks = tl.cast(team.buffers, tl.pointer_type(tl.int64))
    return tl.cast(tl.load(blocks + group_rank) + offset, tl.pointer_type(dtype))


@jit
def phx_team_word(team, pad_of, channel, source):
    """A pointer to the word that the rank `source` writes in the pad of the rank `pad_of`."""
    pads = tl.cast(team.pads, tl.pointer_type(tl.int64))
    return tl.cast(tl.load(pads + pad_of), tl.pointer_type(tl.int32)) + (source * team.pad_stride + channel)


@jit
def phx_team_last(team, channel, to):
    """The count that this rank last put for another rank, 0 at first: the next signal is this + 1."""
    return phx_word_get(phx_team_word(team, to, channel, team.group_rank))


@jit
def phx_team_put(team, channel, to, count):
    """Tell a rank that `count` is reached. What was written before is visible to it after its wait. Never waits."""
    phx_word_put(phx_team_word(team, to, channel, team.group_rank), count)


@jit
def phx_team_wait(team, channel, source, count, timeout_ns):
    """Wait until a rank has put `count` or more for this one. 0, 1 + the rank that is late, or PHX_ERR_REVOKED."""
    word = phx_team_word(team, team.group_rank, channel, source)
    failed = tl.cast(team.failed, tl.pointer_type(tl.int32)) + source
    status = tl.full((), 0, tl.int32)
    looks = tl.full((), 0, tl.int32)
    begun = tl.full((), 0, tl.int64)
    behind = phx_word_get(word) - count < 0
    while behind & (status == 0):
        looks += 1
        if looks % 64 == 0:
            now = phx_clock_ns()
            if begun == 0:
                begun = now
            if _read_only(failed) != 0:
                if phx_word_get(word) - count < 0:  # it may have put it before it left
                    status += PHX_ERR_REVOKED
            elif now - begun > timeout_ns:
                status += 1 + source
        phx_pause(looks)
        behind = phx_word_get(word) - count < 0
    return tl.where(behind, status, 0)


@jit
def phx_team_barrier(team, channel, timeout_ns):
    """Wait until a program of every rank has come to this barrier. As phx_team_wait; the first that is late counts."""
    me = team.group_rank
    size = team.group_size
    count = phx_team_last(team, channel, me) + 1
    for step in range(1, size + 1):
        phx_team_put(team, channel, (me + step) % size, count)  # itself last
    status = tl.full((), 0, tl.int32)
    step = tl.full((), 1, tl.int32)
    while (step < size) & (status == 0):
        status += phx_team_wait(team, channel, (me + step) % size, count, timeout_ns)
        step += 1
    return status


phx_team_block_barrier = phx_team_barrier  # a program is a block


# ---- NVLink switches -----------------------------------------------------------------------------

# `offset`: int64 offsets into the blocks, multiples of 16, each of 16 bytes: that many elements are in the names. The
# bytes are four int32. From sm_90 on, and only where team.multicast is not 0; not in the interpreter.


@jit
def phx_multicast_fence():
    """Between what is done by the blocks and by multicast, which are two addresses of one memory. See device.h."""
    tl.inline_asm_elementwise("fence.proxy.alias; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@jit
def phx_multicast_put(team, offset, a, b, c, d):
    """Write 16 bytes for each offset to the blocks of all ranks."""
    tl.inline_asm_elementwise(
        "multimem.st.relaxed.sys.global.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;",
        "=r,l,r,r,r,r",
        [team.multicast + offset, a, b, c, d],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


# The reductions over the blocks of all ranks, for each offset: four int32. `{load}` is an instruction without operands.
_AT_ONCE = "{load} {{$0, $1, $2, $3}}, [$4];"
_BY_FOURS = "{load} $0, [$4]; {load} $1, [$4 + 4]; {load} $2, [$4 + 8]; {load} $3, [$4 + 12];"
_BY_EIGHTS = (
    "{{ .reg .b64 first, second; {load} first, [$4]; {load} second, [$4 + 8]; "
    "mov.b64 {{$0, $1}}, first; mov.b64 {{$2, $3}}, second; }}"
)


def _reduction(name: str, form: str, instruction: str, doc: str) -> Any:
    assembly = constexpr(form.format(load=f"multimem.ld_reduce.relaxed.sys.global.{instruction}"))
    # "&": the address is still read after the first result has been written.
    operands = constexpr("=r,=r,=r,=r,l" if form is _AT_ONCE else "=&r,=&r,=&r,=&r,l")

    def reduce(team, offset):
        return tl.inline_asm_elementwise(
            assembly,
            operands,
            [team.multicast + offset],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )

    reduce.__name__ = reduce.__qualname__ = f"phx_multicast_{name}"  # Triton tells functions apart by it
    reduce.__doc__ = doc
    return jit(reduce)


phx_multicast_sum_f32x4 = _reduction("sum_f32x4", _AT_ONCE, "add.v4.f32", "The sum, in an order of the switch's own.")
phx_multicast_sum_f16x8 = _reduction(
    "sum_f16x8", _AT_ONCE, "add.acc::f32.v4.f16x2", "The sum in float32, rounded once."
)
phx_multicast_sum_bf16x8 = _reduction(
    "sum_bf16x8", _AT_ONCE, "add.acc::f32.v4.bf16x2", "The sum in float32, rounded once."
)
phx_multicast_sum_f64x2 = _reduction("sum_f64x2", _BY_EIGHTS, "add.f64", "The sum, in an order of the switch's own.")
phx_multicast_sum_u32x4 = _reduction("sum_u32x4", _BY_FOURS, "add.u32", "The sum, of signed integers as well.")
phx_multicast_sum_u64x2 = _reduction("sum_u64x2", _BY_EIGHTS, "add.u64", "The sum, of signed integers as well.")
phx_multicast_min_f16x8 = _reduction("min_f16x8", _AT_ONCE, "min.v4.f16x2", "The minimum; with a NaN left open.")
phx_multicast_min_bf16x8 = _reduction("min_bf16x8", _AT_ONCE, "min.v4.bf16x2", "The minimum; with a NaN left open.")
phx_multicast_min_u32x4 = _reduction("min_u32x4", _BY_FOURS, "min.u32", "The minimum.")
phx_multicast_min_i32x4 = _reduction("min_i32x4", _BY_FOURS, "min.s32", "The minimum.")
phx_multicast_min_u64x2 = _reduction("min_u64x2", _BY_EIGHTS, "min.u64", "The minimum.")
phx_multicast_min_i64x2 = _reduction("min_i64x2", _BY_EIGHTS, "min.s64", "The minimum.")
phx_multicast_max_f16x8 = _reduction("max_f16x8", _AT_ONCE, "max.v4.f16x2", "The maximum; with a NaN left open.")
phx_multicast_max_bf16x8 = _reduction("max_bf16x8", _AT_ONCE, "max.v4.bf16x2", "The maximum; with a NaN left open.")
phx_multicast_max_u32x4 = _reduction("max_u32x4", _BY_FOURS, "max.u32", "The maximum.")
phx_multicast_max_i32x4 = _reduction("max_i32x4", _BY_FOURS, "max.s32", "The maximum.")
phx_multicast_max_u64x2 = _reduction("max_u64x2", _BY_EIGHTS, "max.u64", "The maximum.")
phx_multicast_max_i64x2 = _reduction("max_i64x2", _BY_EIGHTS, "max.s64", "The maximum.")
phx_multicast_and_b64x2 = _reduction("and_b64x2", _BY_EIGHTS, "and.b64", "`and` of each bit.")
phx_multicast_or_b64x2 = _reduction("or_b64x2", _BY_EIGHTS, "or.b64", "`or` of each bit.")
phx_multicast_xor_b64x2 = _reduction("xor_b64x2", _BY_EIGHTS, "xor.b64", "`xor` of each bit.")
