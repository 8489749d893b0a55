"""Calling the core: what collectives and messages take, the checks that need no communication, and the call itself.

The collectives have one row each (`CollectiveSpec`). Addresses, `Memory` and buffers become pointers for C with a count
and a dtype (`Operand`), and `CallOptions` a phx_options. `call_async` makes the call and its Work.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypedDict
from weakref import WeakKeyDictionary

from phalanx.core._handle import UINT32_MAX, UINT64_MAX, Handle, c_integer, c_timeout
from phalanx.core._lib import ffi, lib
from phalanx.core.dtypes import Algo, DType, DTypeLike, algo_of, dtype_of, dtype_of_format
from phalanx.core.errors import InvalidArgumentError, check
from phalanx.core.memory import Device, Memory, c_device, device_of
from phalanx.core.work import OrphanedWorks, Work

# ---- the collectives -----------------------------------------------------------------------------


class CollectiveSpec(NamedTuple):
    """One collective.

    Attributes:
        name: Its name, as in error texts.
        kind: Its PHX_CALL_* number.
        function: The function of the core for ordinary memory.
        symmetric: The function whose input is in symmetric memory.
        listed: The function for lists of buffers, or None where there is no such form.
        source_blocks: Whether the source has a block of `count` elements for each rank; else it has one.
        out_blocks: Whether the output has a block of `count` elements for each rank; else it has one.
        source_on_root: Whether only the root has a source.
        out_on_root: Whether only the root has an output.
    """

    name: str
    kind: int
    function: Callable[..., int]
    symmetric: Callable[..., int]
    listed: Callable[..., int] | None
    source_blocks: bool = False
    out_blocks: bool = False
    source_on_root: bool = False
    out_on_root: bool = False


def _spec(name: str, **sides: bool) -> CollectiveSpec:
    kind, listed = getattr(lib, f"PHX_CALL_{name.upper()}"), getattr(lib, f"phx_{name}_blocks", None)
    return CollectiveSpec(name, kind, getattr(lib, f"phx_{name}"), getattr(lib, f"phx_symm_{name}"), listed, **sides)


ALL_REDUCE = _spec("all_reduce")
ALL_GATHER = _spec("all_gather", out_blocks=True)
REDUCE_SCATTER = _spec("reduce_scatter", source_blocks=True)
ALL_TO_ALL = _spec("all_to_all", source_blocks=True, out_blocks=True)
BROADCAST = _spec("broadcast")
REDUCE = _spec("reduce", out_on_root=True)
GATHER = _spec("gather", out_blocks=True, out_on_root=True)
SCATTER = _spec("scatter", source_blocks=True, source_on_root=True)

# ---- operands ------------------------------------------------------------------------------------

_VOID = ffi.typeof("void *")

# bfloat16 has no format character: arrays of it are seen as 16-bit integers. Arrays of 8-bit floats are plain bytes.
_SAME_BITS = {(DType.UINT16, DType.BFLOAT16), (DType.INT16, DType.BFLOAT16)}


class Operand(NamedTuple):
    """One side of a collective.

    Attributes:
        pointer: For C.
        nbytes: Its length, or None for a bare address.
        dtype: What the buffer says its elements are, or None.
        keep: What must stay alive while C uses the pointer, or None.
    """

    pointer: Any
    nbytes: int | None
    dtype: DType | None
    keep: object


ABSENT = Operand(ffi.NULL, None, None, None)  # the side of a collective that this rank has no part in
IN_BLOCKS = object()  # the source of a collective whose input is in symmetric memory, which the core checks


def operand(value: Any, name: str, writable: bool) -> Operand:
    """Read one side of a collective: an address (int), a Memory, or an object with the buffer protocol."""
    if type(value) is int and 0 <= value <= UINT64_MAX:
        return Operand(ffi.cast(_VOID, value), None, None, None)
    if isinstance(value, Memory):
        return Operand(_address(value.address, name), value.size, None, value)
    try:
        seen = memoryview(value)
    except TypeError:
        return Operand(_address(value, name), None, None, None)
    except (BufferError, ValueError) as error:
        raise InvalidArgumentError(
            f"{name} does not give its buffer ({error}); give a view of it as integers of the same size, and dtype"
        ) from None
    with seen:
        if not seen.c_contiguous:
            raise InvalidArgumentError(
                f"{name} is not contiguous (shape {seen.shape}, strides {seen.strides}); make a contiguous copy of it"
            )
        if writable and seen.readonly:
            raise InvalidArgumentError(f"{name} is read-only; give a writable buffer")
        nbytes, dtype = seen.nbytes, dtype_of_format(seen.format)
    chars = ffi.from_buffer("char[]", value, require_writable=writable)
    pointer = ffi.cast(_VOID, chars)
    if isinstance(value, memoryview):
        # CPython crashes when garbage holds a memoryview that is still exported, and what fails
        # here ends up in tracebacks, which are garbage soon. A memoryview pins its object itself.
        ffi.release(chars)
        return Operand(pointer, nbytes, dtype, value)
    return Operand(pointer, nbytes, dtype, chars)


def _address(value: Any, name: str) -> Any:
    try:
        address = c_integer(value, name, 0, UINT64_MAX)
    except InvalidArgumentError:
        raise InvalidArgumentError(
            f"{name} is {value!r}; give an address (int), a Memory, or a contiguous object with "
            "the buffer protocol (numpy array, bytearray, memoryview)"
        ) from None
    return ffi.cast(_VOID, address)


def resolve_dtype(wish: DTypeLike, operands: Sequence[Operand]) -> DType:
    """The element type of a collective: the one given, else the one that the buffers have."""
    dtype = None if wish is None else dtype_of(wish)
    for operand in operands:
        if operand.dtype is None:
            continue
        if dtype is None:
            dtype = operand.dtype
        elif operand.dtype != dtype and (operand.dtype, dtype) not in _SAME_BITS:
            raise InvalidArgumentError(
                f"dtype is {dtype.name.lower()}, but a buffer holds {operand.dtype.name.lower()} "
                "elements; give buffers of one type, or views of their bytes"
            )
    if dtype is None:
        raise InvalidArgumentError("dtype is needed: addresses and plain bytes have none")
    return dtype


def resolve_count(wish: int | None, itemsize: int, sides: Sequence[tuple[str, Operand, int]]) -> int:
    """The element count of a collective: the one given, else the one that fills the buffers.

    Each side has a name, an operand, and how many times `count` elements it must hold.
    """
    if wish is None:
        if not sides:
            raise InvalidArgumentError("count is needed: this rank gives no buffer to derive it from")
        name, first, factor = sides[0]
        if first.nbytes is None:
            raise InvalidArgumentError(f"count is needed: {name} is a bare address, which has no length; give count")
        count, rest = divmod(first.nbytes, itemsize * factor)
        if rest:
            raise InvalidArgumentError(
                f"{name} has {first.nbytes} bytes, which is not a multiple of {factor} x {itemsize} "
                "bytes; give count, or a buffer of fitting size"
            )
        for other_name, other, times in sides[1:]:
            if other.nbytes is not None and other.nbytes != count * times * itemsize:
                raise InvalidArgumentError(
                    f"{name} has {first.nbytes} bytes, so {other_name} must have "
                    f"{count * times * itemsize} bytes, not {other.nbytes}; give count, or buffers "
                    "of fitting sizes"
                )
        return count
    count = c_integer(wish, "count", 0, 2**63 - 1)
    for name, side, factor in sides:
        if side.nbytes is not None and count * factor * itemsize > side.nbytes:
            raise InvalidArgumentError(
                f"{name} has {side.nbytes} bytes, too few for {count * factor} elements of "
                f"{itemsize} bytes; give a smaller count or a longer buffer"
            )
    return count


class Ranks(Protocol):
    """The ranks of a Group or a Symm."""

    group_rank: int
    group_size: int


class Operands(NamedTuple):
    """Both sides of a collective, checked."""

    source: Operand
    out: Operand
    n: int  # elements of one block
    dtype: DType


def resolve(
    spec: CollectiveSpec,
    ranks: Ranks,
    source: Any,
    out: Any,
    count: int | None,
    dtype: DTypeLike,
    root: int | None = None,
) -> Operands:
    """Check both sides of a collective, and work out the count and the dtype where they are None.

    What only the root has is not looked at on other ranks, and a source of `IN_BLOCKS` nowhere.
    """
    elsewhere = root is not None and root != ranks.group_rank
    source_side = out_side = ABSENT
    sides = []
    if source is not IN_BLOCKS and not (spec.source_on_root and elsewhere):
        if source is None:
            raise _missing("source", root if spec.source_on_root else None, "whose blocks are scattered")
        source_side = operand(source, "source", False)
        sides.append(("source", source_side, ranks.group_size if spec.source_blocks else 1))
    if not (spec.out_on_root and elsewhere):
        if out is None:
            raise _missing("out", root if spec.out_on_root else None, "which takes the result")
        out_side = operand(out, "out", True)
        sides.append(("out", out_side, ranks.group_size if spec.out_blocks else 1))
    if spec.source_on_root:
        sides.reverse()  # the side that all ranks have says the count
    kind = resolve_dtype(dtype, (source_side, out_side))
    return Operands(source_side, out_side, resolve_count(count, kind.itemsize, sides), kind)


def resolve_one(
    value: Any, name: str, writable: bool, count: int | None, dtype: DTypeLike
) -> tuple[Operand, int, DType]:
    """`resolve` for a call that has one buffer: its operand, count and dtype."""
    side = operand(value, name, writable)
    kind = resolve_dtype(dtype, (side,))
    return side, resolve_count(count, kind.itemsize, ((name, side, 1),)), kind


def c_root(root_group_rank: int, ranks: Ranks) -> int:
    """Check the root of a collective."""
    return c_integer(root_group_rank, "root_group_rank", 0, ranks.group_size - 1)


def c_counts(counts: Sequence[int], name: str, ranks: Ranks, dtype: DType, *sides: tuple[str, Operand, int]) -> Any:
    """A list of counts for C, one for each group rank.

    Each side has a name, an operand, and the group rank whose block it must hold; -1 for the blocks of all.
    """
    if len(counts) != ranks.group_size:
        raise InvalidArgumentError(
            f"{name} has {len(counts)} entries; the group has {ranks.group_size} ranks: give one for each rank"
        )
    checked = [c_integer(n, f"{name}[{i}]", 0, UINT64_MAX) for i, n in enumerate(counts)]
    total = sum(checked) * dtype.itemsize
    if total > UINT64_MAX:
        raise InvalidArgumentError(f"{name} adds up to {total} bytes, which no memory can hold")
    for side_name, side, rank in sides:
        needed = total if rank < 0 else checked[rank] * dtype.itemsize
        if side.nbytes is not None and needed > side.nbytes:
            what = "adds up to" if rank < 0 else f"has, at this rank's place {rank},"
            raise InvalidArgumentError(
                f"{name} {what} {needed} bytes, but {side_name} has {side.nbytes}; give smaller counts or a longer "
                "buffer"
            )
    return ffi.new("size_t[]", checked)


def _missing(name: str, root: int | None, why: str) -> InvalidArgumentError:
    if root is None:
        return InvalidArgumentError(f"{name} is missing; give an address (int), a Memory, or a buffer")
    return InvalidArgumentError(f"{name} is missing: this is group rank {root}, the root, {why}")


# ---- options -------------------------------------------------------------------------------------


class MessageOptions(TypedDict, total=False):
    """Options of messages, all of them optional.

    Attributes:
        timeout_ms: How long the start may wait, and the wait once more, in milliseconds; 0 is the default of the group.
        device: Where the buffers lie; None is the host. For a GPU, such as ("cuda", 0), give addresses or `Memory`.
        stream: The stream of the GPU: a CUstream as an integer (`torch.cuda.Stream.cuda_stream`); 0 is the default
            stream. The call puts its work on it and returns, so there is no Work.
    """

    timeout_ms: int
    device: Device | None
    stream: int


class CallOptions(MessageOptions, total=False):
    """Options that every collective takes, all of them optional.

    Attributes:
        algo: The algorithm; the same on all ranks.
        channel: The sequence of collectives that the call belongs to, below `Group.channels`; the same on all ranks.
        scale: The factor of "premul_sum"; the same on all ranks.
        timeout_ms, device, stream: As in `MessageOptions`. Collectives of a `Symm` know the device.
    """

    algo: Algo | int | str
    channel: int
    scale: float


class BlockingMessage(MessageOptions, total=False):  # returns None
    blocking: Literal[True]


class NonblockingMessage(MessageOptions):  # returns a Work
    blocking: Literal[False]


class AnyMessage(MessageOptions, total=False):
    blocking: bool


class Blocking(BlockingMessage, CallOptions, total=False):  # the same of collectives
    pass


class Nonblocking(NonblockingMessage, CallOptions):
    pass


class AnyCall(AnyMessage, CallOptions, total=False):
    pass


CALL_OPTIONS = CallOptions.__optional_keys__
MESSAGE_OPTIONS = MessageOptions.__optional_keys__
SYMM_OPTIONS = CALL_OPTIONS - {"device"}
_SIZE = ffi.sizeof("phx_options")
_GPU_SIZE = ffi.sizeof("phx_gpu_options")
_kept: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # what phx_options points to, as long as they live


def c_stream(stream: int) -> Any:
    """A CUstream, given as an integer."""
    return ffi.cast(_VOID, c_integer(stream, "stream", 0, UINT64_MAX))


def c_options(options: CallOptions | MessageOptions, known: frozenset[str] = CALL_OPTIONS) -> Any:
    """A phx_options pointer; NULL when all is default. Raises TypeError for a name that is not `known`."""
    if not options:
        return ffi.NULL
    result = ffi.new("phx_options *")
    result.struct_size = _SIZE
    result.scale = 1.0
    named: Any = options
    stream, device = 0, None
    for name, value in named.items():
        if name not in known:
            raise TypeError(f"unknown option {name!r}; expected {', '.join(sorted(known))}")
        if name == "timeout_ms":
            result.timeout_ms = c_timeout(value)
        elif name == "channel":
            result.channel = c_integer(value, "channel", 0, UINT32_MAX)
        elif name == "algo":
            result.algo = algo_of(value)
        elif name == "scale":
            result.scale = value
        elif name == "stream":
            stream = value
        else:
            device = value
    if stream != 0 or device is not None:
        gpu = ffi.new("phx_gpu_options *")
        gpu.struct_size = _GPU_SIZE
        gpu.stream = c_stream(stream)
        if device is not None:
            gpu.device = c_device(device_of(device))[0]
        result.gpu = gpu
        _kept[result] = gpu
    return result


# ---- the call ------------------------------------------------------------------------------------


def call_async(
    function: Callable[..., int],
    arguments: tuple[Any, ...],
    owner: Handle,
    orphans: OrphanedWorks,
    operands: tuple[Operand, ...],
    options: AnyCall | AnyMessage,
    known: frozenset[str] = CALL_OPTIONS,
) -> Work | None:
    """Call a function of the core that ends in phx_options and a phx_work; make a Work of it unless it blocks."""
    blocking = options.pop("blocking", True)
    made = c_options(options, known)
    orphans.sweep()
    if blocking:
        check(function(*arguments, made, ffi.NULL))
        return None
    out = ffi.new("phx_work **")
    check(function(*arguments, made, out))
    keep = tuple(operand.keep for operand in operands if operand.keep is not None)
    return Work(out[0], f"a work of {owner.what}", owner, keep, orphans.add)
