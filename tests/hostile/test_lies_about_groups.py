"""A member of a group that lies while the group is made: every honest rank is told, and goes on without it."""

import fcntl
import os
import tempfile

import pytest

import wire
from liar import BYSTANDER, LIAR, TIMEOUT_MS, VICTIM, Liar, honest_rank, raised
from ranks import run_ranks

HUGE_PAGE = 2 << 20


def make_group(rank, world_size, lie, args, timeout_ms):
    """Returns how it fails on each rank; the liar has None."""
    if rank == LIAR:
        with Liar(rank, world_size) as liar:
            lie(liar, *args)
            liar.await_others()
            return None
    with honest_rank(rank, world_size) as world:
        return raised(lambda: world.create_group("g", range(world_size), timeout_ms=timeout_ms).barrier())


def attack(lie, *args, timeout_ms=TIMEOUT_MS):
    victim, _, bystander = run_ranks(make_group, 3, lie, args, timeout_ms)
    return victim, bystander


def expect(error, text, lie, *args):
    """The victim sees through the lie; the bystander, who was told the truth, hears it from the victim."""
    victim, bystander = attack(lie, *args)
    assert victim[0] == error, victim
    assert text in victim[2]
    assert bystander[0] == error, bystander
    assert text in bystander[2]


def expect_hang_up(lie, *args):
    """The victim closes the connection and gives up; the bystander, who still has one, is told by the victim."""
    victim, bystander = attack(lie, *args)
    assert victim[:2] == ("PeerDeadError", LIAR), victim
    assert "rank 1 (pid " in victim[2] and "closed its connection" in victim[2]
    assert bystander[:2] == ("PeerDeadError", LIAR), bystander
    assert ("rank 0 (pid " in bystander[2] and "gave up: " in bystander[2]) or "(on rank 0)" in bystander[2], bystander


# ---- the parcel that goes with the memory


def lie_about_geometry(liar, changes):
    liar.meet()
    liar.dial()
    liar.share({VICTIM: (liar.geometry(**changes), (liar.memfd(liar.segment_bytes()),))})
    liar.confirm()


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"slot_bytes": 64}, "MismatchError", "rank 1 came as member 1 of 3 with staging_bytes 64"),
        ({"slot_bytes": 1 << 63}, "MismatchError", "with staging_bytes 9223372036854775808"),
        ({"group_rank": 0}, "MismatchError", "rank 1 came as member 0 of 3"),
        ({"group_rank": -1}, "MismatchError", "rank 1 came as member -1 of 3"),
        ({"group_size": 1 << 30}, "MismatchError", "rank 1 came as member 1 of 1073741824"),
        ({"channels": 64}, "MismatchError", "rank 1 made its world with 64 channels"),
        ({"reduction_order": 2}, "MismatchError", "rank 1 asks for the reduction order 'ranks', rank 0 for 'hosts'"),
        ({"reduction_order": -1}, "MismatchError", "rank 1 asks for the reduction order 'unknown'"),
        ({"recorder_entries": 1 << 20}, "MismatchError", "rank 1 made its world with 1048576 recorder entries"),
    ],
    ids=str,
)
def test_a_member_with_another_geometry_is_named(changes, error, text):
    expect(error, text, lie_about_geometry, changes)


def lie_with_parcel(liar, kind):
    liar.meet()
    liar.dial()
    truth = liar.geometry()
    memory = liar.memfd(liar.segment_bytes())
    liar.share(
        {
            VICTIM: {
                "empty": (b"", (memory,)),
                "short": (truth[:-1], (memory,)),
                "long": (truth + b"\0", (memory,)),
                "no descriptor": (truth, ()),
                "two descriptors": (truth, (memory, memory)),
                "five descriptors": (truth, (memory,) * 5),
                "oversize": (truth.ljust(wire.MAX_PAYLOAD + 1, b"\0"), (memory,)),
            }[kind]
        }
    )
    liar.confirm()


@pytest.mark.parametrize("kind", ["empty", "short", "long", "no descriptor", "two descriptors"])
def test_a_parcel_of_another_form_is_malformed(kind):
    expect("AbiError", "rank 1 sent malformed data", lie_with_parcel, kind)


@pytest.mark.parametrize("kind", ["five descriptors", "oversize"])
def test_a_message_that_no_rank_sends_ends_the_connection(kind):
    expect_hang_up(lie_with_parcel, kind)


def lie_in_envelope(liar, changes):
    liar.meet()
    liar.dial()
    memory = (liar.memfd(liar.segment_bytes()),)
    call = wire.GROUP_CREATE | wire.WITH_DESCRIPTORS
    liar.tell(BYSTANDER, liar.geometry(), memory, 1, call=call)
    liar.tell(VICTIM, liar.geometry(), memory, 1, call=call, **changes)
    assert liar.hear(VICTIM, 2) is None


@pytest.mark.parametrize(
    "changes",
    [{"magic": 0}, {"fd_count": 4}, {"fd_count": 0}, {"fd_count": 65535}, {"payload_bytes": 1 << 31}],
    ids=str,
)
def test_an_envelope_that_does_not_fit_its_message_ends_the_connection(changes):
    expect_hang_up(lie_in_envelope, changes)


def make_another_call(liar, call):
    liar.meet()
    liar.dial()
    for rank in (VICTIM, BYSTANDER):
        liar.tell(rank, liar.geometry(), (liar.memfd(liar.segment_bytes()),), 1, call=call)


@pytest.mark.parametrize(
    ("call", "name"),
    [(wire.SYMM_RENDEZVOUS, "symm_rendezvous"), (0, "something else"), ((1 << 32) - 1, "something else")],
)
def test_an_exchange_for_another_call_is_a_mismatch(call, name):
    for error, peer, text in attack(make_another_call, call):
        assert (error, peer) == ("MismatchError", LIAR)
        assert f"called {name} while rank" in text and "called group_create" in text


# ---- the memory


def make_memory(liar, kind):
    """A descriptor that a liar may offer instead of a sealed memfd of the right size."""
    size = liar.segment_bytes()
    fd = -1
    if kind == "memfd, too small":
        return liar.memfd(size - wire.PAGE)
    if kind == "memfd, empty":
        return liar.memfd(0)
    if kind == "memfd without seals":
        return liar.memfd(size, seals=0)
    if kind == "memfd sealed against growing":
        return liar.memfd(size, seals=fcntl.F_SEAL_GROW)
    if kind == "memfd sealed against writing":
        return liar.memfd(size, seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
    if kind == "memfd, read-only":
        fd = os.open(f"/proc/self/fd/{liar.memfd(size)}", os.O_RDONLY)
    if kind == "memfd of huge pages":
        return liar.memfd((size + HUGE_PAGE - 1) // HUGE_PAGE * HUGE_PAGE, flags=os.MFD_HUGETLB)
    if kind in ("file", "file of /dev/shm"):
        directory = tempfile.gettempdir() if kind == "file" else "/dev/shm"
        fd, path = tempfile.mkstemp(dir=directory)
        os.unlink(path)
        os.ftruncate(fd, size)
    if kind == "/dev/zero":
        fd = os.open("/dev/zero", os.O_RDWR)
    if kind == "pipe":
        fd, other = os.pipe()
        liar.fds.append(other)
    if kind == "directory":
        fd = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    if kind == "socket":
        fd = os.dup(liar.links[VICTIM].fileno())
    liar.fds.append(fd)
    return fd


def lie_with_memory(liar, kind):
    liar.meet()
    liar.dial()
    liar.share({VICTIM: (liar.geometry(), (make_memory(liar, kind),))})
    liar.confirm()


UNSEALED = "a peer sent a file that is not a memfd sealed against shrinking"
MEMORIES = {
    "memfd, too small": ("AccessDeniedError", "and sent memory of"),
    "memfd, empty": ("AccessDeniedError", "and sent memory of 0"),
    "memfd without seals": ("AccessDeniedError", UNSEALED),
    "memfd sealed against growing": ("AccessDeniedError", UNSEALED),
    "memfd sealed against writing": ("AccessDeniedError", "could not map"),
    "memfd of huge pages": ("AccessDeniedError", "a peer sent a memfd of reserved huge pages"),
    "memfd, read-only": ("AccessDeniedError", "could not map"),
    "file": ("AccessDeniedError", UNSEALED),
    "file of /dev/shm": ("AccessDeniedError", UNSEALED),
    "/dev/zero": ("AccessDeniedError", UNSEALED),
    "pipe": ("AccessDeniedError", UNSEALED),
    "directory": ("AccessDeniedError", UNSEALED),
    "socket": ("AccessDeniedError", UNSEALED),
}


@pytest.mark.parametrize("kind", MEMORIES)
def test_memory_that_could_fault_is_refused(kind):
    if kind == "memfd of huge pages":
        try:
            os.close(os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_HUGETLB))
        except OSError as error:
            pytest.skip(f"the kernel has no memfd of huge pages ({error})")
    expect(*MEMORIES[kind], lie_with_memory, kind)


def shrink_after_offering(liar):
    liar.meet()
    liar.dial()
    liar.share()
    with pytest.raises(PermissionError):
        os.ftruncate(liar.fds[0], 0)
    # A hole is allowed, and harmless: it reads as zeros.
    libc_fallocate(liar.fds[0], liar.segment_bytes())
    liar.exchange(b"no confirmation")


def libc_fallocate(fd, size):
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    keep_size, punch_hole = 1, 2
    arguments = (ctypes.c_int(fd), ctypes.c_int(keep_size | punch_hole), ctypes.c_long(0), ctypes.c_long(size))
    assert libc.fallocate(*arguments) == 0, os.strerror(ctypes.get_errno())


def test_memory_that_was_offered_can_be_emptied_but_not_taken_away():
    for error, _, text in attack(shrink_after_offering):
        assert error == "AbiError" and "sent malformed data" in text


# ---- the confirmation


def lie_in_confirmation(liar, payload):
    liar.meet()
    liar.dial()
    liar.share()
    liar.exchange(wire.error_info(0), lies={VICTIM: (payload, ())})


def test_a_failure_that_a_liar_makes_up_is_an_error_that_names_it():
    text = "x" * 700  # cut at the end of its field, and without a terminating zero
    for error, peer, told in attack(lie_in_confirmation, wire.error_info(-11, text)):
        assert (error, peer) == ("SystemCallError", LIAR)
        assert "it failed on rank 1: xxxx" in told


# ---- staying away


def say_nothing(liar):
    liar.meet()
    liar.dial()


def test_a_member_that_says_nothing_is_named_at_the_deadline():
    for error, peer, text in attack(say_nothing, timeout_ms=2000):
        assert (error, peer) == ("WaitTimeoutError", LIAR)
        assert "still waits for rank 1 (pid" in text
