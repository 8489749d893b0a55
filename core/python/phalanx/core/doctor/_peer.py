"""The second process of `_sharing`: a program that imports nothing of ours. Arguments: socket name, number of futex."""

import ctypes
import mmap
import os
import socket
import sys
import time

_SECONDS = 10
_FUTEX_WAKE = 1  # linux/futex.h


def main(name: str, futex: int) -> None:
    """Take the memory, write to it, wake whoever sleeps on it. Exits with a text if that fails."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_SECONDS)
        connection.connect(f"\0{name}")
        _, received, _, _ = socket.recv_fds(connection, 1, 1)
    if len(received) != 1:
        sys.exit("no descriptor arrived")
    block = mmap.mmap(received[0], mmap.PAGESIZE)
    os.close(received[0])
    words = (ctypes.c_uint32 * 2).from_buffer(block)
    words[1] = 1
    syscall = ctypes.CDLL(None).syscall
    syscall.restype = ctypes.c_long
    number, wake, one = map(ctypes.c_long, (futex, _FUTEX_WAKE, 1))
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:  # until the other one sleeps
        if syscall(number, ctypes.byref(words), wake, one, None, None, 0) == 1:
            return
        time.sleep(0.001)
    sys.exit("nobody sleeps on the futex")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
