"""A member of a group that is no Phalanx: honest to everybody, but for the lies that a test gives it.

Real ranks run the library and meet it in the store. They are victims or bystanders; afterwards they make a group of
their own, which shows that they can go on.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import itertools
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import wire
from phalanx.core import FileStore, Group, PhalanxError, Store, World
from ranks import scratch

VICTIM, LIAR, BYSTANDER = 0, 1, 2
TIMEOUT_MS = 20_000
SLOT_BYTES = 4096
CHANNELS = 1
SIGNAL_CHANNELS = 4
WAIT_SECONDS = 30
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Parcel = tuple[bytes, tuple[int, ...]]  # what goes with an exchange: payload and descriptors


def until(condition: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited in vain: {what}")
        os.sched_yield()


def count_descriptors(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


class Segment:
    """A control segment: lane 0 and the area for messages."""

    def __init__(self, fd: int, group_size: int) -> None:
        self.map = mmap.mmap(fd, wire.segment_bytes(CHANNELS, SLOT_BYTES, group_size))
        self.words = memoryview(self.map).cast("I")  # stored and loaded as a whole

    def close(self) -> None:
        self.words.release()
        self.map.close()

    def slot(self, epoch: int) -> int:
        return wire.LINE + wire.LANE_HEADER + epoch % wire.SLOTS * (wire.LINE + SLOT_BYTES)

    def write(self, offset: int, data: bytes) -> None:
        self.map[offset : offset + len(data)] = data

    def put(self, epoch: int, data: bytes) -> None:
        self.write(self.slot(epoch) + wire.LINE, data)

    def publish(self, epoch: int, call: bytes, place: tuple[int, int] | None = None) -> None:
        """place: the key and the offset of an input that is not in the slot."""
        slot = self.slot(epoch)
        self.write(slot + 8, call)  # as `call` gives it
        self.write(slot + 32, wire.PLACE.pack(*(place or (0, 0))))
        if place is None:
            self.words[(slot + 48) // 4] = epoch  # the slot has its data
        self.words[(slot + 4) // 4] = epoch - 1  # done with all before
        self.words[slot // 4] = epoch

    def call(self, epoch: int) -> bytes:
        start = self.slot(epoch) + 8
        return self.map[start : start + wire.CALL.size]

    def place(self, epoch: int) -> tuple[int, int]:
        start = self.slot(epoch) + 32
        key, offset = wire.PLACE.unpack(self.map[start : start + wire.PLACE.size])
        return key, offset

    def arrived(self, epoch: int) -> bool:
        return self.words[self.slot(epoch) // 4] == epoch

    def data(self, epoch: int, size: int) -> bytes:
        start = self.slot(epoch) + wire.LINE
        return self.map[start : start + size]

    def finish(self, epoch: int) -> None:
        self.words[wire.LINE // 4] = epoch  # done

    # ---- messages to the owner of this segment

    def area(self) -> int:
        return wire.messages_at(CHANNELS, SLOT_BYTES)

    def ring(self, sender: int) -> int:
        return self.area() + wire.LINE + sender * (wire.LINE + wire.RING_BYTES)

    def send(self, sender: int, record: bytes, flag: int = 1) -> None:
        """The first record of the ring: what follows its flag, then the flag, then the bell."""
        start = self.ring(sender) + wire.LINE
        self.write(start + 4, record[4:])
        self.words[start // 4] = flag
        self.words[self.area() // 4] += 1


class Liar:
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.store = FileStore(scratch() / "store")
        # The largest uuid dials everybody else.
        self.uuid = struct.pack("<Q8s", (1 << 64) - 1, os.urandom(8))
        self.token = os.urandom(16)
        self.records: dict[int, wire.PeerRecord] = {}
        self.links: dict[int, socket.socket] = {}
        self.segments: dict[int, Segment] = {}
        self.fds: list[int] = []
        self.ordinals = itertools.count(1)
        self.group_id = 0

    # ---- life

    def __enter__(self) -> Liar:
        return self

    def __exit__(self, *_: object) -> None:
        for segment in self.segments.values():
            segment.close()
        for link in self.links.values():
            link.close()
        for fd in self.fds:
            os.close(fd)

    def await_others(self) -> None:
        """Stays until everybody has said what he saw: a liar that ends would be called dead."""
        others = [f"said.{rank}" for rank in range(self.world_size) if rank != self.rank]
        self.store.wait(others, WAIT_SECONDS * 1000)

    def said(self, rank: int) -> bool:
        """Whether that rank has said what it saw."""
        try:
            self.store.wait([f"said.{rank}"], 1)
        except PhalanxError:
            return False
        return True

    # ---- the steps of group_create

    def meet(self, name: str = "g", **changes: Any) -> None:
        ranks = list(range(self.world_size))
        key = wire.group_key(name, ranks)
        for rank in ranks:
            if rank == self.rank:
                continue
            data = self.store.get(f"{key}/member/{rank}", WAIT_SECONDS * 1000)
            self.records[rank] = wire.PeerRecord.unpack(data)
        other = next(iter(self.records.values()))
        mine = wire.PeerRecord(self.rank, os.getpid(), os.geteuid(), other.host_id, self.uuid, self.token)
        # It does not listen, so it would be taken for dead if the process did not look alive.
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        mine = mine.with_(start_time=started, build=other.build)
        self.records[self.rank] = mine
        self.store.set(f"{key}/member/{self.rank}", mine.with_(**changes).pack())
        self.group_id = wire.group_id(name, [self.records[rank].uuid for rank in ranks], key)

    def hello(self, to: int, **changes: Any) -> bytes:
        peer = self.records[to]
        fields = {
            "magic": wire.MAGIC,
            "rank": self.rank,
            "sender": self.uuid,
            "to": peer.uuid,
            "token": peer.token,
        }
        return wire.HELLO.pack(*{**fields, **changes}.values())

    def dial(self) -> None:
        for rank, record in self.records.items():
            if rank == self.rank:
                continue
            link = self.links[rank] = wire.connect(record.uuid)
            wire.send(link, self.hello(rank))
            magic, _, sender = wire.WELCOME.unpack(wire.receive(link)[0])
            assert (magic, sender) == (wire.MAGIC, record.uuid)

    def geometry(self, **changes: Any) -> bytes:
        fields = {"slot_bytes": SLOT_BYTES}
        fields.update(group_rank=self.rank, group_size=self.world_size)
        fields.update(channels=CHANNELS, recorder_entries=wire.RECORDER_ENTRIES)
        cores, order = b"\1" + bytes(511), changes.pop("reduction_order", 1)
        return wire.GEOMETRY.pack(*{**fields, **changes}.values(), 1, bytes(40), 0, 0, cores, order)

    def memfd(self, size: int, seals: int = SEALS, flags: int = 0) -> int:
        fd = os.memfd_create("phalanx-group", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        self.fds.append(fd)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd

    def segment_bytes(self) -> int:
        return wire.segment_bytes(CHANNELS, SLOT_BYTES, self.world_size)

    def share(self, lies: Mapping[int, Parcel] | None = None) -> None:
        own = self.memfd(self.segment_bytes())
        self.segments[self.rank] = Segment(own, self.world_size)
        for rank, (_, fds) in self.exchange(self.geometry(), (own,), lies).items():
            self.segments[rank] = Segment(fds[0], self.world_size)

    def join(self) -> None:
        """Becomes a member like any other, of ranks that call `group_with_liar`. Returns when it is one for all."""
        self.meet()
        self.dial()
        self.share()
        self.confirm()
        self.store.wait([f"joined.{rank}" for rank in self.links], WAIT_SECONDS * 1000)

    # ---- messages of the links

    def envelope(self, payload: bytes, fds: tuple[int, ...], ordinal: int, **changes: Any) -> bytes:
        fields = {
            "magic": wire.MAGIC,
            "kind": wire.EXCHANGE,
            "fd_count": len(fds),
            "group_id": self.group_id,
            "ordinal": ordinal,
        }
        fields["payload_bytes"] = len(payload)
        # Making a group takes the first two exchanges.
        fields["call"] = wire.GROUP_CREATE if ordinal <= 2 else wire.SYMM_RENDEZVOUS
        return wire.ENVELOPE.pack(*{**fields, **changes}.values()) + payload

    def tell(self, to: int, payload: bytes, fds: tuple[int, ...] = (), ordinal: int = 0, **changes: Any) -> bool:
        return wire.send(self.links[to], self.envelope(payload, fds, ordinal, **changes), fds)

    def hear(self, rank: int, ordinal: int) -> tuple[bytes, list[int]] | None:
        """The payload of that number from that rank; what comes before it is dropped. None: it has hung up."""
        while True:
            data, fds = wire.receive(self.links[rank])
            self.fds += fds
            if data == b"":
                return None
            fields = wire.ENVELOPE.unpack_from(data)
            if fields[1] == wire.EXCHANGE and fields[4] == ordinal:
                return data[wire.ENVELOPE.size :], fds

    def asked(self, rank: int, ordinal: int) -> bool:
        """Whether that rank sends a message of that number, rather than nothing for a second or an end."""
        self.links[rank].settimeout(1)
        try:
            return self.hear(rank, ordinal) is not None
        except TimeoutError:
            return False
        finally:
            self.links[rank].settimeout(WAIT_SECONDS)

    def exchange(
        self, payload: bytes, fds: tuple[int, ...] = (), lies: Mapping[int, Parcel] | None = None
    ) -> dict[int, tuple[bytes, list[int]]]:
        """As Group::exchange; `lies` are what some are told instead."""
        ordinal = next(self.ordinals)
        call = wire.GROUP_CREATE if ordinal <= 2 else wire.SYMM_RENDEZVOUS
        if fds:
            call |= wire.WITH_DESCRIPTORS
        told = {rank: (lies or {}).get(rank, (payload, fds)) for rank in self.links}
        for rank, (parcel, _) in told.items():
            self.tell(rank, parcel, (), ordinal, call=call)
        heard = {rank: self.hear(rank, ordinal) for rank in self.links}
        if not fds:
            return {rank: parcel for rank, parcel in heard.items() if parcel is not None}
        for rank, (_, with_fds) in told.items():
            self.tell(rank, b"", with_fds, ordinal | wire.DESCRIPTORS, call=call)
        whole = {}
        for rank, parcel in heard.items():
            descriptors = self.hear(rank, ordinal | wire.DESCRIPTORS) if parcel is not None else None
            if parcel is not None and descriptors is not None:
                whole[rank] = (parcel[0], descriptors[1])
        return whole

    def confirm(self, status: int = 0, text: str = "") -> None:
        self.exchange(wire.error_info(status, text))

    # ---- shared memory

    def await_epoch(self, rank: int, epoch: int) -> None:
        until(lambda: self.segments[rank].arrived(epoch), f"rank {rank} in epoch {epoch}")


def world_of(rank: int, world_size: int, store: Store | None = None, **options: Any) -> World:
    settings = {
        "timeout_ms": TIMEOUT_MS,
        "staging_bytes": SLOT_BYTES,
        "channels": CHANNELS,
        "signal_channels": SIGNAL_CHANNELS,
    }
    return World(rank, world_size, store or FileStore(scratch() / "store"), **{**settings, **options})


def group_with_liar(world: World) -> Group:
    group = world.create_group("g", range(world.size))
    FileStore(scratch() / "store").set(f"joined.{world.rank}", b"")
    return group


def go_on(world: World, honest: list[int]) -> None:
    """The honest ranks of the world make a group without the liar, and it works."""
    group = world.create_group("honest", honest)
    total = array.array("f", [0.0] * 100)
    group.all_reduce(array.array("f", [world.rank + 1.0] * 100), total)
    assert list(total) == [sum(rank + 1.0 for rank in honest)] * 100


@contextlib.contextmanager
def honest_rank(rank: int, world_size: int, **options: Any) -> Iterator[World]:
    """A world of a real rank, which goes on with the other real ranks after what the block does."""
    world = world_of(rank, world_size, **options)
    yield world
    FileStore(scratch() / "store").set(f"said.{rank}", b"")
    go_on(world, [other for other in range(world_size) if other != LIAR])
    world.finalize()


def raised(call: Callable[[], object]) -> tuple[str, int, str]:
    """What a call raises, in a form that can cross between processes: class, rank at fault, text."""
    try:
        call()
    except PhalanxError as error:
        return type(error).__name__, error.peer, str(error)
    return "nothing", -1, "it raised nothing"
