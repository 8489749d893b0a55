"""Processes that are no ranks and knock at the sockets of ranks all the while: as another user, or with garbage."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct

NOBODY = 65534
KNOCKS_BEFORE = 20  # until the ranks may begin

# core/src/world/link.h: magic, ABI, from, to, token, rank, pid
HELLO = struct.Struct("<Ii16s16s16s")
MAGIC = 0x31584850


def knock(kind: str, names: list[str], pipe: int, seed: int) -> int:
    """Goes on until it is killed. names: of sockets as in /proc/net/unix. Says "knocking" to the pipe."""
    if kind == "stranger":
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    rng = random.Random(seed)
    held: list[socket.socket] = []
    knocks = 0
    while True:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.setblocking(False)
        with contextlib.suppress(OSError):  # its queue is full, it hung up, or it is gone
            stranger.connect("\0" + rng.choice(names)[1:])
            knocks += 1
            for _ in range(rng.randrange(3)):
                stranger.send(_words(rng))
        if rng.randrange(4) == 0:  # some stay without a further word
            held.append(stranger)
        else:
            stranger.close()
        if len(held) > 40:
            held.pop(0).close()
        if knocks == KNOCKS_BEFORE:
            knocks += 1
            os.write(pipe, (json.dumps({"event": "knocking"}) + "\n").encode())


def _words(rng: random.Random) -> bytes:
    if rng.randrange(2):
        return rng.randbytes(rng.choice((1, 4, 55, 63, 64, 65, 256, 4096)))
    secrets = (rng.randbytes(16) for _ in range(3))
    return HELLO.pack(rng.choice((MAGIC, 0)), rng.randrange(-1, 9), *secrets)
