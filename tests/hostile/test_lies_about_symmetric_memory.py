"""A member that lies in a rendezvous: what it says of its block, and the memory that it offers."""

import fcntl
import mmap
import os
import struct

import pytest

import wire
from liar import BYSTANDER, LIAR, SEALS, SIGNAL_CHANNELS, TIMEOUT_MS, VICTIM, Liar, group_with_liar, honest_rank, raised
from phalanx.core import PhalanxError
from ranks import run_ranks

SIZE = 1 << 16


def parcel(**changes):
    fields = {
        "ordinal": 0,
        "size": SIZE,
        "alloc_id": 0,
        "channels": SIGNAL_CHANNELS,
        "persistent": 0,
        "device_type": 1,
    }
    return wire.SYMM.pack(
        *{
            **fields,
            "device_index": 0,
            "pad_segment": 0,
            "pad_index": 0,
            "pads_made": wire.PADS,
            "handle_size": 0,
            "handle": b"",
            "has_gpu": 0,
            "reserved": 0,
            "gpu": b"",
            **changes,
        }.values()
    )


def pad(liar, size=None, seals=SEALS):
    """A segment of pads; the first one says that the liar has all that it needs for the first allocation."""
    whole = wire.PADS * wire.pad_bytes(SIGNAL_CHANNELS, liar.world_size)
    fd = liar.memfd(whole if size is None else size, seals)
    if size is None:
        os.pwrite(fd, wire.met(1), wire.MET)
    return fd


def rendezvous(rank, world_size, lie, args):
    """Returns how it fails on each rank; the liar has None."""
    if rank == LIAR:
        with Liar(rank, world_size) as liar:
            liar.join()
            lie(liar, *args)
            liar.await_others()
            return None
    with honest_rank(rank, world_size) as world:
        group = group_with_liar(world)
        return raised(lambda: group.rendezvous(world.alloc(SIZE), timeout_ms=TIMEOUT_MS))


def expect(error, text, lie, *args):
    results = run_ranks(rendezvous, 3, lie, args)[::2]
    for seen, _, told in results:
        assert seen == error, told
        assert text in told
    return results


# ---- what it says


def say(liar, changes):
    """The same to everybody: all come to the same verdict, and nobody maps anything."""
    liar.exchange(parcel(**changes), (pad(liar), liar.memfd(SIZE)))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"size": 1 << 20}, "different sizes: 65536 bytes on ranks 0, 2; 1048576 bytes on rank 1"),
        ({"size": (1 << 64) - 1}, "18446744073709551615 bytes on rank 1"),
        ({"size": 0}, "0 bytes on rank 1"),
        ({"channels": 1 << 31}, "2147483648 channels on rank 1"),
        ({"device_type": -7}, "device type -7 on rank 1"),
        ({"ordinal": 1 << 40}, "rendezvous #1099511627776 on rank 1"),
        ({"has_gpu": 1}, "memory of phalanx's CUDA allocator on rank 1"),
        ({"persistent": 1, "alloc_id": 3}, "alloc_id 3 on rank 1"),
    ],
    ids=str,
)
def test_a_block_that_is_unlike_the_others_is_named(changes, text):
    for _, peer, _ in expect("MismatchError", text, say, changes):
        assert peer == LIAR


def lie_in_form(liar, kind):
    payload, fds = {
        "empty": (b"", (pad(liar), liar.memfd(SIZE))),
        "short": (parcel()[:-1], (pad(liar), liar.memfd(SIZE))),
        "long": (parcel() + b"\0", (pad(liar), liar.memfd(SIZE))),
        "no descriptor": (parcel(), ()),
        "three descriptors": (parcel(), (pad(liar), liar.memfd(SIZE), liar.memfd(SIZE))),
    }[kind]
    liar.exchange(parcel(), (pad(liar), liar.memfd(SIZE)), {VICTIM: (payload, fds)})
    liar.confirm()


@pytest.mark.parametrize("kind", ["empty", "short", "long", "no descriptor", "three descriptors"])
def test_a_parcel_of_another_form_is_malformed(kind):
    expect("AbiError", "rank 1 sent malformed data", lie_in_form, kind)


def lie_about_pad(liar, changes):
    liar.exchange(parcel(), (pad(liar), liar.memfd(SIZE)), {VICTIM: (parcel(**changes), (pad(liar), liar.memfd(SIZE)))})
    liar.confirm()


@pytest.mark.parametrize(
    "changes",
    [
        {"pads_made": 0},
        {"pads_made": 0, "pad_segment": (1 << 32) - 1},
        {"pad_segment": 1},
        {"pad_index": 1},
        {"pads_made": 1 << 31},
    ],
    ids=str,
)
def test_a_pad_that_does_not_exist_is_refused(changes):
    expect("AbiError", "which does not exist", lie_about_pad, changes)


# ---- what it offers


def offer(liar, kind):
    zero = os.open("/dev/zero", os.O_RDWR)
    liar.fds.append(zero)
    fds = {
        "a pad that is too small": (pad(liar, 0), liar.memfd(SIZE)),
        "a pad without seals": (pad(liar, seals=0), liar.memfd(SIZE)),
        "a pad that is a device": (zero, liar.memfd(SIZE)),
        "a block that is too small": (pad(liar), liar.memfd(SIZE - 1)),
        "a block without seals": (pad(liar), liar.memfd(SIZE, seals=fcntl.F_SEAL_GROW)),
        "a block that is a device": (pad(liar), zero),
        "no block": (pad(liar),),
    }[kind]
    liar.exchange(parcel(handle_size=(1 << 32) - 1), (pad(liar), liar.memfd(SIZE)), {VICTIM: (parcel(), fds)})
    liar.confirm()


@pytest.mark.parametrize(
    "kind",
    [
        "a pad that is too small",
        "a pad without seals",
        "a pad that is a device",
        "a block that is too small",
        "a block without seals",
        "a block that is a device",
        "no block",
    ],
)
def test_memory_that_could_fault_is_refused_and_its_owner_named(kind):
    for error, peer, text in run_ranks(rendezvous, 3, offer, (kind,))[::2]:
        assert (error, peer) in [("AccessDeniedError", LIAR), ("AccessDeniedError", VICTIM)]  # or who reports it
        assert "the memory of rank 1 (pid " in text
        assert "refused" in text


def test_a_member_that_leaves_a_rendezvous_is_named_at_the_deadline():
    for error, peer, text in run_ranks(rendezvous_soon, 3)[::2]:
        assert (error, peer) == ("WaitTimeoutError", LIAR), text
        assert "rank 1 (pid" in text


def rendezvous_soon(rank, world_size):
    if rank == LIAR:
        with Liar(rank, world_size) as liar:
            liar.join()
            liar.await_others()
            return None
    with honest_rank(rank, world_size) as world:
        group = group_with_liar(world)
        return raised(lambda: group.rendezvous(world.alloc(SIZE), timeout_ms=1500))


# ---- what it writes into the pads


def spoil_signals(rank, world_size):
    if rank == LIAR:
        with Liar(rank, world_size) as liar:
            liar.join()
            own = pad(liar)
            after = wire.MET + len(wire.met(1))
            for fd in [own] + [fds[0] for _, fds in liar.exchange(parcel(), (own, liar.memfd(SIZE))).values()]:
                with mmap.mmap(fd, 0) as pads:
                    pads[after:] = b"\xff" * (len(pads) - after)  # every counter is at -1
            liar.await_others()
            return None
    with honest_rank(rank, world_size) as world:
        group = group_with_liar(world)
        symm = group.rendezvous(world.alloc(SIZE))
        told = [raised(lambda: symm.wait_signal(LIAR, 1, timeout_ms=200))]
        told.append(raised(lambda: symm.barrier(0, timeout_ms=200)))
        return told


def test_counters_that_a_liar_puts_back_are_waited_for_until_the_deadline():
    for signal, barrier in run_ranks(spoil_signals, 3)[::2]:
        assert signal[:2] == ("WaitTimeoutError", LIAR)
        assert "symm_wait_signal on group 'g', channel 1" in signal[2] and "rank 1 (pid" in signal[2]
        assert barrier[0] == "WaitTimeoutError"
        assert "symm_barrier on group 'g', channel 0" in barrier[2]


# ---- what it writes while it is read


def take_back(rank, world_size):
    """The liar says that it keeps its whole block for itself and sends nothing, and that nothing was expected of it."""
    elements = SIZE // 4
    if rank == LIAR:
        with Liar(rank, world_size) as liar:
            liar.join()
            liar.exchange(parcel(), (pad(liar), liar.memfd(SIZE)))
            liar.await_epoch(BYSTANDER, 1)
            expected = liar.segments[BYSTANDER]
            expected.put(1, bytes(6 * 8))
            liar.segments[LIAR].put(1, struct.pack("<6Q", 0, 0, elements, elements, 0, 0))
            liar.segments[LIAR].publish(1, expected.call(1))
            liar.segments[LIAR].publish(2, expected.call(1))
            liar.await_others()
            return None
    counts = [0, elements if rank == BYSTANDER else 0, 0]
    with honest_rank(rank, world_size) as world:
        group = group_with_liar(world)
        symm = group.rendezvous(world.alloc(SIZE))
        out = bytearray(4 * sum(counts))
        try:
            symm.all_to_all_v(0, [0, 0, 0], out, counts, "float32")
        except PhalanxError as error:
            return type(error).__name__, str(error)
    return None


def test_counts_that_are_taken_back_do_not_lead_beyond_the_block():
    error, text = run_ranks(take_back, 3)[BYSTANDER] or ("", "read what lies behind the block")
    assert error == "MismatchError", text
    assert "group rank 1 sends 0 elements to group rank 2, which expects 16384" in text
