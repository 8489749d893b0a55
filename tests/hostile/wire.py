"""What crosses between ranks, written down a second time: records, handshakes, messages and shared memory.

The definitions are core/src/world/identity.h and link.h, core/src/group/create.cpp, control.h and derive.cpp,
core/src/p2p/layout.h and core/src/symm/rendezvous.cpp. `test_lying_rank.py` fails first when they have changed.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import time
from dataclasses import dataclass, replace
from pathlib import Path

MAGIC = 0x31584850
EXCHANGE, REVOKE, GOODBYE = 1, 2, 3
MAX_PAYLOAD, MAX_FDS = 4096, 4

HELLO = struct.Struct("<Ii16s16s16s")  # magic, rank, from, to, token
WELCOME = struct.Struct("<Ii16s")  # magic, rank, from
GROUP_CREATE, SYMM_RENDEZVOUS = 1, 3  # calls
WITH_DESCRIPTORS = 1 << 31  # in a call: descriptors follow the parcel, in a message of its number and DESCRIPTORS
DESCRIPTORS = 1 << 61
ENVELOPE = struct.Struct("<IHHQQII")  # magic, kind, descriptors, group id, ordinal, bytes of the payload, call
GEOMETRY = struct.Struct("<QiiIII4x40sI4xQ512si4x")  # of a control segment; then tuning, quota, cores, and the order
# ordinal, size, alloc id, channels, persistent, device, pad (segment, index, pads of a new segment), handle; then
# whether it is in memory of a GPU, and what is to be known of that
SYMM = struct.Struct("<QQQIiiiIIII64sii136s")
ERROR = struct.Struct("<IiiiQii32s64s640s")  # phx::ErrorInfo (core/src/base/error.h)
OPINION = struct.Struct("<QQ128s")  # bits, decided, who is absent
CALL = struct.Struct("<BBBBiQQ")  # operation, dtype, op, algo, root, count, aux
PLACE = struct.Struct("<QQ")  # key, offset
RECORD = struct.Struct("<IIIhHQQ")  # of a ring: flag, bytes, tag or number, dtype, kind, count, offset
EAGER, RTS, CTS, DATA = 1, 2, 3, 4  # kinds of records

LINE = 64
SLOTS = 4
LANE_HEADER = 2 * LINE
RECORDER_ENTRIES = 256  # for each channel, of a line each
RING_BYTES = 512 << 10  # of data, in groups of up to 64 ranks
PAGE = os.sysconf("SC_PAGESIZE")

BARRIER, ALL_REDUCE, ALL_GATHER, ALL_TO_ALL_V, SYMM_ALL_REDUCE, SYMM_ALL_TO_ALL_V = 1, 2, 3, 8, 0x82, 0x88
FLOAT32, UINT8, SUM = 3, 6, 1
ONE_SHOT = 1 << 4  # in the byte "algo" of an all_reduce: what its rank has chosen


@dataclass(frozen=True)
class PeerRecord:
    """What a rank publishes in the store."""

    FORMAT = struct.Struct("<8s32siiQ16sQQQII16s16s64sHH16sI")

    rank: int
    pid: int
    uid: int
    host_id: int
    uuid: bytes
    token: bytes
    process: bytes = bytes(16)
    magic: bytes = b"PHXPEER3"
    build: bytes = b""  # set by `meet`
    start_time: int = 0
    hostname: bytes = b"liar"

    def pack(self) -> bytes:
        head = (self.magic, self.build, self.rank, self.pid, self.host_id, self.uuid)
        nowhere = (self.hostname, 0, 0, bytes(16), 0)  # the address for ranks of other hosts: none
        return self.FORMAT.pack(*head, 0, 0, self.start_time, self.uid, 0, self.token, self.process, *nowhere)

    @classmethod
    def unpack(cls, data: bytes) -> PeerRecord:
        fields = cls.FORMAT.unpack_from(data)
        magic, build, rank, pid, host, uuid, _, _, start, uid, _, token, process, hostname, _, _, _, _ = fields
        return cls(rank, pid, uid, host, uuid, token, process, magic, build, start, hostname)

    def with_(self, **changes: object) -> PeerRecord:
        return replace(self, **changes)


def socket_name(uuid: bytes) -> bytes:
    high, low = struct.unpack("<QQ", uuid)
    return b"\0phalanx-%016x%016x" % (high, low)


def fnv(data: bytes, value: int = 0xCBF29CE484222325) -> int:
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & (1 << 64) - 1
    return value


def group_key(name: str, ranks: list[int]) -> str:
    """Under which the members of `World.create_group` meet, the first time that it is called with these."""
    return f"phalanx/group/{name}/{fnv(struct.pack(f'<{len(ranks)}i', *ranks))}/0"


def group_id(name: str, uuids: list[bytes], key: str) -> int:
    value = fnv(name.encode())
    for uuid in uuids:
        value = fnv(uuid, value)
    return fnv(key.encode(), value)


def error_info(status: int, text: str = "", **fields: int) -> bytes:
    rank, peer = fields.get("rank", -1), fields.get("peer", -1)
    return ERROR.pack(ERROR.size, status, rank, peer, 0, 0, 0, b"", b"", text.encode())


# ---- sockets


def connect(uuid: bytes) -> socket.socket:
    """A connection to the rank of that uuid, before any word is said."""
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.settimeout(30)
    try:
        while True:
            try:
                stranger.connect(socket_name(uuid))
                return stranger
            except BlockingIOError:  # with a timeout set: the queue of waiting connections is full
                time.sleep(0.001)
    except BaseException:
        stranger.close()
        raise


def listen(uuid: bytes) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.settimeout(30)
    listener.bind(socket_name(uuid))
    listener.listen(16)
    return listener


def send(link: socket.socket, data: bytes, fds: tuple[int, ...] = ()) -> bool:
    """Whether the other side was still there. It may hang up at any time, if only because it heard from a third."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        link.sendmsg([data], rights)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def receive(link: socket.socket) -> tuple[bytes, list[int]]:
    """The next message and its descriptors; b"" when the other side has closed."""
    try:
        data, ancillary, _, _ = link.recvmsg(65536, socket.CMSG_SPACE(4 * 64))
    except ConnectionResetError:
        return b"", []
    fds = array.array("i")
    for _, _, content in ancillary:
        fds.frombytes(content[: len(content) // 4 * 4])
    return data, list(fds)


def hung_up(link: socket.socket) -> bool:
    """Whether the other side closes without a word. Waits for it."""
    return receive(link)[0] == b""


# ---- shared memory


def lane_bytes(slot_bytes: int) -> int:
    return LANE_HEADER + SLOTS * (LINE + slot_bytes) + RECORDER_ENTRIES * LINE


def messages_at(channels: int, slot_bytes: int) -> int:
    return LINE + channels * lane_bytes(slot_bytes)


def segment_bytes(channels: int, slot_bytes: int, group_size: int) -> int:
    size = messages_at(channels, slot_bytes) + LINE + group_size * (LINE + RING_BYTES)
    return (size + PAGE - 1) // PAGE * PAGE


PADS = 16  # in a segment
MET = 4  # where a pad says that its owner has all that it needs for an allocation


def pad_bytes(channels: int, group_size: int) -> int:
    size = LINE + channels * LINE + 4 * channels * group_size
    return (size + PAGE - 1) // PAGE * PAGE


def met(number: int) -> bytes:
    """What the pad of the group's allocation of that number, counted from 1, says there."""
    return struct.pack("<I", 2 * number)


def unix_socket_names() -> list[bytes]:
    """Of every rank in this network namespace: the kernel tells anybody who asks."""
    lines = Path("/proc/net/unix").read_bytes().splitlines()
    return sorted({b"\0" + line.split(b"@", 1)[1] for line in lines if b"@phalanx-" in line})
