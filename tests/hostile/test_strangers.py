"""Processes of the same user that are no ranks talk to a rank's socket: refused, logged, and nobody is disturbed."""

import array
import os
import signal
import socket
import struct

import intruders
import wire
from liar import LIAR, VICTIM, WAIT_SECONDS, Liar, count_descriptors, honest_rank, raised, until, world_of
from phalanx.core import FileStore
from ranks import run_ranks, scratch

STRANGER = 2
PENDING = 64  # connections that may wait for their handshake: core/src/world/monitor.cpp
UNKNOWN = bytes(range(16))


def hello(uuid, **changes):
    fields = {
        "magic": wire.MAGIC,
        "rank": 1,
        "sender": UNKNOWN,
        "to": uuid,
        "token": bytes(16),
    }
    return wire.HELLO.pack(*{**fields, **changes}.values())


def visit(rank, world_size, attack, args, words):
    """Two ranks with a group, and a stranger that attacks each of them. Returns what the attack did, in the end."""
    store = FileStore(scratch() / "strangers")
    if rank == STRANGER:
        pids = [int(store.get(f"pid.{other}", WAIT_SECONDS * 1000)) for other in (0, 1)]
        result = [attack(intruders.listening(pid), pid, *args) for pid in pids]
        store.set("attacked", str(os.getpid()))
        return result
    log = intruders.Log()
    world = world_of(rank, world_size)
    group = world.create_group("pair", [0, 1])
    store.set(f"pid.{rank}", str(os.getpid()))
    stranger = store.get("attacked", WAIT_SECONDS * 1000).decode()
    if words:
        until(lambda: log.has(f"pid {stranger}", words), f"a line on pid {stranger} among {log.lines}")
    total = array.array("f", [0.0])
    group.all_reduce(array.array("f", [rank + 1.0]), total)
    world.check()
    world.create_group("again", [0, 1]).barrier()
    world.finalize()
    return total[0]


def attack(what, *args, words=None):
    first, second, result = run_ranks(visit, 3, what, args, words)
    assert first == second == 3.0
    return result


# ---- a wrong hello


def wrong_hellos(uuid):
    return {
        "wrong token": hello(uuid),
        "wrong uuid": hello(uuid, to=UNKNOWN),
        "the rank's own uuid": hello(uuid, sender=uuid),
        "wrong magic": hello(uuid, magic=0),
        "truncated": hello(uuid)[:-1],
        "oversized": hello(uuid) + b"\0",
        "far oversized": bytes(100_000),
        "one byte": b"x",
        "nothing": b"",
        "a message": wire.ENVELOPE.pack(wire.MAGIC, wire.REVOKE, 0, 0, 0, 0, 0),
    }


def say(uuid, pid):
    """Which of them are hung up on without an answer."""
    refused = set()
    for kind, data in wrong_hellos(uuid).items():
        with wire.connect(uuid) as stranger:
            wire.send(stranger, data)
            if wire.hung_up(stranger):
                refused.add(kind)
    return refused


def test_a_wrong_hello_is_refused_without_an_answer():
    assert attack(say, words="malformed or unauthorised handshake") == [set(wrong_hellos(UNKNOWN))] * 2


def say_with_descriptors(uuid, pid):
    """How many descriptors the rank is left with."""
    before = count_descriptors(pid)
    with open("/dev/zero") as zero:
        for _ in range(50):
            with wire.connect(uuid) as stranger:
                wire.send(stranger, hello(uuid), (zero.fileno(),) * wire.MAX_FDS)
                assert wire.hung_up(stranger)
    until(lambda: count_descriptors(pid) <= before, f"process {pid} has closed what it was sent")
    return count_descriptors(pid) - before


def test_descriptors_that_come_with_a_hello_are_not_kept():
    assert max(attack(say_with_descriptors)) <= 0


def hang_up_first(uuid, pid):
    for _ in range(100):
        wire.connect(uuid).close()


def test_strangers_that_leave_at_once_are_forgotten():
    attack(hang_up_first)


# ---- silence and crowds


silent = []  # connections of the stranger


def stay_silent(uuid, pid):
    """To both ranks at once: they wait for some seconds."""
    silent.append(wire.connect(uuid))
    return len(silent) < 2 or [wire.hung_up(each) for each in silent]


def test_a_stranger_that_says_nothing_is_hung_up_on_after_a_while():
    assert attack(stay_silent) == [True, [True, True]]


def crowd(uuid, pid):
    """How many of a thousand silent connections the rank holds open, and how many descriptors it has more by then."""
    before = count_descriptors(pid)
    guests = [wire.connect(uuid) for _ in range(1000)]
    try:
        until(lambda: count_open(guests) <= PENDING, f"process {pid} has refused most of them")
        return count_open(guests), count_descriptors(pid) - before
    finally:
        for guest in guests:
            guest.close()


def count_open(guests):
    count = 0
    for guest in guests:
        guest.setblocking(False)
        try:
            count += guest.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            count += 1
        except ConnectionResetError:
            continue
    return count


def test_a_thousand_strangers_at_once_are_bounded():
    for held, descriptors in attack(crowd):
        assert held <= PENDING
        assert descriptors <= PENDING


# ---- ranks that are no strangers


def arrive_together(rank, world_size):
    """How many of 100 ranks that dial while the victim cannot listen are welcome."""
    if rank == LIAR:
        with Liar(rank, world_size) as liar:
            liar.meet()
            victim = liar.records[VICTIM]
            os.kill(victim.pid, signal.SIGSTOP)
            guests = []
            try:
                for number in range(100):
                    guests.append(wire.connect(victim.uuid))
                    wire.send(guests[-1], liar.hello(VICTIM, sender=struct.pack("<QQ", 7, number)))
            finally:
                os.kill(victim.pid, signal.SIGCONT)
            welcome = sum(len(wire.receive(guest)[0]) == wire.WELCOME.size for guest in guests)
            for guest in guests:
                guest.close()
            liar.dial()
            liar.share()
            liar.confirm()
            liar.await_others()
            return welcome
    with honest_rank(rank, world_size) as world:
        world.create_group("g", range(world_size))
    return None


def test_ranks_that_arrive_together_are_all_welcome():
    assert run_ranks(arrive_together, 2)[LIAR] == 100


def arrive_in_a_crowd(rank, world_size):
    """A rank dials one to which a hundred silent strangers are connected."""
    if rank == LIAR:
        with Liar(rank, world_size) as liar:
            liar.meet()
            guests = [wire.connect(liar.records[VICTIM].uuid) for _ in range(100)]
            liar.dial()
            liar.share()
            liar.confirm()
            for guest in guests:
                guest.close()
            liar.await_others()
            return None
    with honest_rank(rank, world_size) as world:
        world.create_group("g", range(world_size))
    return "met"


def test_silent_strangers_do_not_keep_a_rank_out():
    assert run_ranks(arrive_in_a_crowd, 2) == ["met", None]


def another_build(rank, world_size):
    """How ranks refuse a member whose record is of another build, or of a layout from before builds had names."""
    if rank == LIAR:
        with Liar(rank, world_size) as liar:
            liar.meet(build=b"9.9.9".ljust(16, b"\0") + b"0123456789abcdef")
            liar.await_others()
            return None
    with honest_rank(rank, world_size) as world:
        return raised(lambda: world.create_group("g", range(world_size)))


def test_a_rank_of_another_build_is_refused_by_its_name():  # C2
    for told in run_ranks(another_build, 3):
        if told is not None:
            assert told[0] == "AbiError"
            assert "9.9.9 (build 0123456789abcdef)" in str(told)
