"""Processes of another user: the kernel says who they are, so nothing that they know or say helps them."""

import errno
import os
import select
import struct
import threading
from contextlib import suppress

import intruders
import wire
from liar import BYSTANDER, LIAR, VICTIM, WAIT_SECONDS, Liar, honest_rank, raised, until, world_of
from phalanx.core import FileStore
from ranks import run_ranks, scratch

pytestmark = intruders.needs_root

REFUSED = "ranks of a group must run as one user"


# ---- dialing a rank


def dial(uuid, data):
    """What a process of another user reads after it has sent that."""
    with wire.connect(uuid) as link:
        wire.send(link, data)
        return wire.receive(link)[0]


def dial_with_all_it_takes(rank, world_size):
    """A process of another user that has read the store: everything in its hello is right."""
    log = intruders.Log()
    if rank == LIAR:
        with Liar(rank, world_size) as liar:
            liar.meet()
            for to in (VICTIM, BYSTANDER):
                assert intruders.as_user(intruders.NOBODY, dial, liar.records[to].uuid, liar.hello(to)) == b""
            liar.dial()  # the same hello from this user
            liar.share()
            liar.confirm()
            liar.await_others()
            return None
    with honest_rank(rank, world_size) as world:
        world.create_group("g", range(world_size))
        until(lambda: log.has(f"of user {intruders.NOBODY}", REFUSED), f"a refusal among {log.lines}")
    return "went on"


def test_another_user_is_refused_whatever_it_knows():
    assert run_ranks(dial_with_all_it_takes, 3) == ["went on", None, "went on"]


def crowd(uuid):
    """Connections of another user, one after another, as fast as they go."""
    for _ in range(2000):
        with wire.connect(uuid) as link:
            wire.send(link, b"x")
    return True


def work_in_a_crowd(rank, world_size):
    store = FileStore(scratch() / "crowd")
    if rank == LIAR:
        victim = int(store.get("pid", WAIT_SECONDS * 1000))
        arrived = intruders.as_user(intruders.NOBODY, crowd, intruders.listening(victim))
        store.set("said.1", b"")
        return arrived
    with honest_rank(rank, world_size) as world:
        if rank == VICTIM:
            store.set("pid", str(os.getpid()))
        for number in range(10):  # new groups need the monitor, which is busy refusing
            world.create_group(f"pair {number}", [VICTIM, BYSTANDER]).barrier()
        store.get("said.1", WAIT_SECONDS * 1000)
    return True


def test_a_crowd_of_another_user_keeps_no_ranks_from_meeting():
    assert run_ranks(work_in_a_crowd, 3) == [True] * 3


# ---- the memory


def open_memory(pid, fds):
    """How every way to the shared memory of a process ends: an errno each."""
    paths = [f"/proc/{pid}/fd", f"/proc/{pid}/map_files", f"/proc/{pid}/mem", f"/proc/{pid}/maps"]
    paths += [f"/proc/{pid}/fd/{fd}" for fd in fds]
    ends = {}
    for path in paths:
        try:
            if os.path.isdir(path):
                os.listdir(path)
            else:
                os.close(os.open(path, os.O_RDWR if "/fd/" in path or path.endswith("mem") else os.O_RDONLY))
            ends[path] = 0
        except OSError as error:
            ends[path] = error.errno
    return ends


def reach_for_memory(rank, world_size):
    with honest_rank(rank, world_size) as world:
        group = world.create_group("g", range(world_size))
        block = world.alloc(1 << 16)
        group.rendezvous(block)
        fds = [fd for fd in os.listdir("/proc/self/fd") if fd_leads_to(fd, "/memfd:phalanx")]
        assert fds
        return intruders.as_user(intruders.NOBODY, open_memory, os.getpid(), fds)


def fd_leads_to(fd, prefix):
    with suppress(FileNotFoundError):
        return os.readlink(f"/proc/self/fd/{fd}").startswith(prefix)
    return False


def test_shared_memory_cannot_be_opened_through_proc():
    for ends in run_ranks(reach_for_memory, 1):
        assert set(ends.values()) <= {errno.EACCES, errno.EPERM, errno.ENOENT}, ends  # the last with hidepid


# ---- squatting


def squat(uuid, tell, end):
    """Another user listens where a rank is expected, until `end` closes. Returns who came, and what they said."""
    visitors, said = 0, b""
    with wire.listen(uuid) as listener:
        os.write(tell, b"x")
        while listener in select.select([listener, end], [], [], WAIT_SECONDS)[0]:
            link, _ = listener.accept()
            with link:
                visitors += 1
                said += wire.receive(link)[0]
    return visitors, said


def send_to_a_squatter(rank, world_size):
    """The record in the store leads to a socket of another user: the smallest uuid is dialed by everybody."""
    if rank == LIAR:
        with Liar(rank, world_size) as liar:
            liar.uuid = struct.pack("<Q8s", 0, os.urandom(8))
            ready, tell = os.pipe()
            end, keep = os.pipe()

            def be_rank():
                os.read(ready, 1)
                liar.meet()
                liar.await_others()
                os.close(keep)

            liar_thread = threading.Thread(target=be_rank)
            liar_thread.start()
            answer = intruders.as_user(intruders.NOBODY, squat, liar.uuid, tell, end, closing=[keep])
            liar_thread.join()
            for fd in (ready, tell, end):
                os.close(fd)
            return answer
    with honest_rank(rank, world_size) as world:
        return raised(lambda: world.create_group("g", range(world_size), timeout_ms=2000))


def test_a_socket_of_another_user_is_told_nothing():
    victim, (visitors, said), bystander = run_ranks(send_to_a_squatter, 3)
    assert visitors >= 1 and said == b""
    assert victim[:2] == ("AccessDeniedError", LIAR)
    assert "rank 1 (pid " in victim[2] and "runs as another user" in victim[2]
    # It may wait for the victim to dial first, which has given up by then.
    assert bystander[:2] in [("AccessDeniedError", LIAR), ("WaitTimeoutError", VICTIM)]


def name_worlds(rank, world_size):
    names = set()
    for _ in range(20):
        world = world_of(rank, world_size)
        names.add(wire.socket_name(intruders.listening(os.getpid())))
        world.finalize()
    return names


def test_the_name_of_a_socket_cannot_be_taken_in_advance():
    names = run_ranks(name_worlds, 1)[0]
    assert len(names) == 20
    # Random in every place: each of 32 digits differs somewhere among 20.
    digits = zip(*(name.removeprefix(b"\0phalanx-") for name in names), strict=True)
    assert [len(set(digit)) > 1 for digit in digits] == [True] * 32


# ---- the stores


def open_store(path):
    error, _, text = raised(lambda: FileStore(path))
    return error, text


def keep_a_store(rank, world_size):
    directory = scratch() / "open"
    directory.mkdir(mode=0o777)
    directory.chmod(0o777)
    path = directory / "store"
    FileStore(path).set("key", "value")
    for parent in (scratch(), scratch().parent):  # let the other user come as far as the file
        parent.chmod(0o711)
    return intruders.as_user(intruders.NOBODY, open_store, path)


def test_a_file_store_cannot_be_opened_by_another_user():
    error, text = run_ranks(keep_a_store, 1)[0]
    assert error == "AccessDeniedError"
    assert "could not open" in text
