"""Groups: named, ordered sets of ranks."""

import os
from collections.abc import Iterable
from typing import Any, NamedTuple, Unpack, overload

from phalanx.core._call import AnyCall, Blocking, Nonblocking, operand
from phalanx.core._group_calls import GroupCalls
from phalanx.core._handle import INT32_MAX, UINT64_MAX, c_integer, c_optional_text, c_text, c_timeout, create
from phalanx.core._lib import ffi, lib, new_struct
from phalanx.core.coalesced import Call, Coalesced
from phalanx.core.errors import PhalanxError, check, found, stored_error
from phalanx.core.symm import Symm
from phalanx.core.tuning import GpuTuning, Tuning, c_path, c_tuning, get_tuning
from phalanx.core.work import Work


class Agreement(NamedTuple):
    """What the living ranks of a group agreed on.

    Attributes:
        bits: The bitwise AND of the bits of all.
        alive: The group ranks that took part, in order.
    """

    bits: int
    alive: tuple[int, ...]


class Group(GroupCalls):
    """A named, ordered set of ranks. Made by `World.create_group` or `World.attach_group`.

    Where its ranks are on several hosts, UCX moves what crosses. Such a group has every collective and message on
    memory of the CPU; symmetric memory and memory of GPUs raise UnsupportedError.

    The collectives take addresses (int), `Memory`, or objects with the buffer protocol (numpy
    arrays, bytearrays, memoryviews). For buffers, `count` and `dtype` may be left out: then the
    input fills them. Buffers are checked before anything is sent.

    With `blocking=False` a collective returns a `Work` at once, and any number may be in flight; its
    buffers must stay unchanged, and its output unread, until `Work.wait`. All ranks must issue the
    collectives of one channel of a group in one order, so two threads must not race to issue them:
    give each a channel of its own. Channels are independent of each other.

    With `device` the buffers are memory of a GPU, and the call puts its work on a stream: see docs/howto/gpu.md.

    While a call waits for peers, other Python threads run. Ctrl-C takes effect when the call
    returns, at the latest at its timeout.

    Attributes:
        world: The world it belongs to.
        name: Its name.
        group_rank: This rank's position in it.
        group_size: Number of ranks.
        ranks: Global ranks, in order.
        id: The same number on all its ranks.
        channels: How many independent sequences of collectives it has.
        hosts: On how many hosts its ranks are. With 1, they share memory.
        reduction_order: In which order it adds up where it is on several hosts: "hosts" or "ranks"; see
            `World.create_group`.
    """

    def _stats(self) -> Any:
        stats = new_struct("phx_group_stats")
        check(lib.phx_group_get_stats(self._handle.pointer, stats))
        return stats

    @property
    def sequence(self) -> int:
        """Collectives that this rank has issued on channel 0."""
        return int(self._info().sequence)

    @property
    def eager_bytes(self) -> int:
        """Ops of `torch.ops.phalanx` with more bytes of input than this are complete when they return."""
        return int(self._stats().eager_bytes)

    @property
    def zero_copies(self) -> int:
        """How many collectives of this rank read all inputs where they lay, in symmetric memory, without a copy."""
        return int(self._stats().zero_copies)

    @property
    def state(self) -> str:
        """ "active", or "failed" after an error that put the ranks out of step."""
        return "failed" if self._info().state else "active"

    def error(self) -> PhalanxError | None:
        """The first cause of the group's failure, or None while it is healthy. Never blocks.

        Example:
            >>> group.error() is None
            True
        """
        return stored_error(lib.phx_group_get_error, self._handle.pointer)

    def revoke(self, reason: str) -> None:
        """Make every later call on the group fail, on every rank. Not collective.

        Args:
            reason: Named by the RevokedError that the ranks get.

        Example:
            >>> alone = group.split(rank)
            >>> alone.revoke("no more data")
            >>> alone.state
            'failed'
        """
        check(lib.phx_group_revoke(self._handle.pointer, c_text(reason, "reason")))

    def refuse(self, reason: str, channel: int = 0) -> None:
        """Stand for a collective whose arguments were wrong on this rank, as if the core had refused it.

        The other ranks, which would wait for this one, fail at once. Waits for nobody.

        Args:
            reason: For the MismatchError of the other ranks.
            channel: The channel of the collective.

        Example:
            >>> both = group.split(0)
            >>> try:  # prints on rank 1
            ...     both.barrier() if rank else both.refuse("count is negative")
            ... except MismatchError as error:
            ...     print("count is negative" in str(error))
            True
        """
        check(lib.phx_group_refuse(self._handle.pointer, channel, c_text(reason, "reason")))

    def set_timeout(self, timeout_ms: int) -> None:
        """Set the default of every later wait of this rank on the group and on what is made on it. Not collective.

        Groups that are made of this one take it over.

        Args:
            timeout_ms: In milliseconds; 0 is the default of the world, as at first.

        Example:
            >>> group.set_timeout(10_000)
        """
        check(lib.phx_group_set_timeout(self._handle.pointer, c_timeout(timeout_ms)))

    # ---- groups made of this one ------------------------------------------------------------------

    def split(self, color: int, key: int = 0, name: str | None = None, *, timeout_ms: int = 0) -> "Group | None":
        """Make one group of the ranks that give the same color. Collective. Needs no store.

        As MPI_Comm_split.

        Args:
            color: The color of this rank. With a negative one it takes part, but is in no new group.
            key: The new group is ordered by it, and then by rank.
            name: The name of the new group; None is the name of this one.
            timeout_ms: In milliseconds; 0 is the world's default.

        Returns:
            The new group, or None for a negative color.

        Raises:
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.

        Example:
            >>> group.split(0, key=-rank).ranks
            (1, 0)
        """
        numbers = (c_integer(color, "color", -INT32_MAX, INT32_MAX), c_integer(key, "key", -INT32_MAX, INT32_MAX))
        arguments = (self._handle.pointer, *numbers, c_optional_text(name, "name"), c_timeout(timeout_ms))
        pointer = create("phx_group *", lib.phx_group_split, *arguments)
        return None if pointer == ffi.NULL else Group(self.world, pointer)

    def shrink(self, name: str | None = None, *, timeout_ms: int = 0) -> "Group":
        """Make a group of the ranks that are alive. Collective among them, also where the group has failed.

        As MPIX_Comm_shrink of MPI's fault tolerance. A rank that does not call it within half of the time is left
        out as if it were dead. Needs no store.

        Args:
            name: The name of the new group; None is the name of this one.
            timeout_ms: In milliseconds; 0 is the world's default.

        Returns:
            The new group: the ranks that took part, in the order that they had.

        Raises:
            RevokedError: This rank came too late, and the others went on without it.
            WaitTimeoutError: The survivors could not make the group in time.

        Example:
            >>> group.shrink().ranks
            (0, 1)
        """
        arguments = (self._handle.pointer, c_optional_text(name, "name"), c_timeout(timeout_ms))
        return Group(self.world, create("phx_group *", lib.phx_group_shrink, *arguments))

    def agree(self, bits: int = 0, *, timeout_ms: int = 0) -> Agreement:
        """Agree on bits, and on who is alive. Collective among the living, also where the group has failed.

        As MPIX_Comm_agree of MPI's fault tolerance. A rank that does not call it within half of the time is left
        out as if it were dead.

        Args:
            bits: 64 bits.
            timeout_ms: In milliseconds; 0 is the world's default.

        Returns:
            The same on all ranks that took part.

        Raises:
            RevokedError: This rank came too late, and the others went on without it.

        Example:
            >>> group.agree(0b01 if rank == 0 else 0b11)
            Agreement(bits=1, alive=(0, 1))
        """
        inout = ffi.new("uint64_t *", c_integer(bits, "bits", 0, UINT64_MAX))
        alive = ffi.new("uint8_t[]", self.group_size)
        check(lib.phx_group_agree(self._handle.pointer, inout, alive, c_timeout(timeout_ms)))
        return Agreement(int(inout[0]), tuple(rank for rank in range(self.group_size) if alive[rank]))

    def rendezvous(self, block: Any, timeout_ms: int = 0) -> Symm:
        """Map the blocks of all ranks here. Collective, except for a block that was mapped before.

        Args:
            block: A Memory, or an address inside one; of the same size on all ranks.
            timeout_ms: How long to wait for the others, in milliseconds; 0 is the world's default.

        Returns:
            The handle. For a block that was mapped before it is the same mapping, without
            communication.

        Raises:
            MismatchError: Sizes differ; the text names the odd rank.
            NotFoundError: The address is in no block of this world.

        Example:
            >>> group.rendezvous(world.alloc(64))  # on rank 1
            Symm(64 bytes on Group('all', rank 1 of 2))
        """
        arguments = (self._handle.pointer, operand(block, "block", writable=False).pointer, c_timeout(timeout_ms))
        return Symm(self, create("phx_symm *", lib.phx_symm_rendezvous, *arguments))

    def find_symm(self, block: Any) -> Symm | None:
        """The handle of a block that was mapped before, or None. Not collective.

        Args:
            block: A Memory, or an address inside one.

        Example:
            >>> group.find_symm(memory) == symm, group.find_symm(world.alloc(64))
            (True, None)
        """
        out = ffi.new("phx_symm **")
        inside = operand(block, "block", writable=False)
        return Symm(self, out[0]) if found(lib.phx_symm_find(self._handle.pointer, inside.pointer, out)) else None

    # ---- several as one -------------------------------------------------------------------------

    @overload
    def coalesced(self, calls: Iterable[Call], **options: Unpack[Blocking]) -> None: ...
    @overload
    def coalesced(self, calls: Iterable[Call], **options: Unpack[Nonblocking]) -> Work: ...
    @overload
    def coalesced(self, calls: Iterable[Call], **options: Unpack[AnyCall]) -> Work | None: ...
    def coalesced(self, calls: Iterable[Call], **options: Unpack[AnyCall]) -> Work | None:
        """Run several collectives as one: small ones share rounds, so many cost little more than one. Collective.

        All ranks give the same calls in one order; their dtypes, reductions and roots may differ. No output may
        overlap another output or input. All complete together.

        Args:
            calls: Made by the methods of `Call`. May be empty.
            options: `blocking=False` to return a Work at once, and those of `CallOptions`.

        Raises:
            InvalidArgumentError: An argument is wrong; the text names the call. Nothing was sent.
            MismatchError, PeerDeadError, WaitTimeoutError, RevokedError: The group has failed.

        Example:
            >>> x, y = array("i", [rank]), array("i", [rank])
            >>> group.coalesced([Call.all_reduce(x), Call.broadcast(y, root_group_rank=1)])
            >>> x, y
            (array('i', [1]), array('i', [1]))
        """
        return Coalesced(self, calls).run(**options)

    def prepare(self, calls: Iterable[Call]) -> Coalesced:
        """Check calls now that shall run as one again and again. Not collective.

        Args:
            calls: As for `coalesced`.

        Returns:
            What they are laid out in. Its `run` does what `coalesced` does.

        Raises:
            InvalidArgumentError: An argument is wrong; the text names the call.

        Example:
            >>> x = array("i", [1])
            >>> calls = group.prepare([Call.all_reduce(x)])
            >>> calls.run()
            >>> calls.run()
            >>> x
            array('i', [4])
        """
        return Coalesced(self, calls)

    # ---- how algorithms are chosen --------------------------------------------------------------

    def get_tuning(self) -> Tuning:
        """The values by which the group chooses its algorithms; those of its group rank 0. Not collective.

        Example:
            >>> group.get_tuning().one_shot_bytes > 0
            True
        """
        return get_tuning(self._handle.pointer, Tuning)

    def set_tuning(self, tuning: Tuning, timeout_ms: int = 0) -> None:
        """Set the values by which the group chooses its algorithms. Collective; those of group rank 0 hold.

        Args:
            tuning: Zero means the built-in value, so `Tuning()` takes all back.
            timeout_ms: How long to wait for the others, in milliseconds; 0 is the world's default.

        Raises:
            InvalidArgumentError: A value is out of range; raised on every rank.

        Example:
            >>> group.set_tuning(Tuning(one_shot_bytes=4096))
            >>> group.get_tuning().one_shot_bytes
            4096
        """
        check(lib.phx_group_set_tuning(self._handle.pointer, c_tuning(tuning, Tuning), c_timeout(timeout_ms)))

    def save_tuning(self, path: str | os.PathLike[str] | None = None) -> None:
        """Write the group's values to the table, for later groups of this size on this host. Not collective.

        Args:
            path: The table; None is the one that new groups read: $PHALANX_TUNING, else phalanx/tuning in the
                user's cache directory.

        Raises:
            SystemCallError: It cannot be written.

        Example:
            >>> group.save_tuning("tuning")
        """
        check(lib.phx_group_save_tuning(self._handle.pointer, c_path(path)))

    def get_gpu_tuning(self) -> GpuTuning:
        """The values by which collectives on GPUs choose their kernels. Not collective.

        Until the first rendezvous of memory of GPUs, or the first collective on it, they are the built-in ones, unless
        others were set; then those of the table, if it has a row for group rank 0's GPU.

        Example:
            >>> group.get_gpu_tuning().line_bytes > 0
            True
        """
        return get_tuning(self._handle.pointer, GpuTuning)

    def set_gpu_tuning(self, tuning: GpuTuning, timeout_ms: int = 0) -> None:
        """Set the values by which collectives on GPUs choose their kernels. Collective; group rank 0's hold.

        Args:
            tuning: Zero means the built-in value, so `GpuTuning()` takes all back.
            timeout_ms: How long to wait for the others, in milliseconds; 0 is the world's default.

        Raises:
            InvalidArgumentError: A value is out of range; raised on every rank.

        Example:
            >>> group.set_gpu_tuning(GpuTuning(line_bytes=4096))
            >>> group.get_gpu_tuning().line_bytes
            4096
        """
        check(lib.phx_group_set_gpu_tuning(self._handle.pointer, c_tuning(tuning, GpuTuning), c_timeout(timeout_ms)))

    def save_gpu_tuning(self, path: str | os.PathLike[str] | None = None) -> None:
        """Write the values for GPUs to the table, for later groups of this size on such GPUs. Not collective.

        Args:
            path: As for `save_tuning`.

        Raises:
            InvalidArgumentError: The ranks have no memory of GPUs in common yet, so it is not known for which GPU.
            SystemCallError: It cannot be written.
        """
        check(lib.phx_group_save_gpu_tuning(self._handle.pointer, c_path(path)))

    def __repr__(self) -> str:
        return f"Group({self.name!r}, rank {self.group_rank} of {self.group_size})"
