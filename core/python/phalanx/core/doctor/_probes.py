"""Programs that `doctor` runs in processes of their own. They import nothing of Phalanx.

cuda                what libcuda has, as JSON
peer NAME FUTEX     the second process of a trial: the name of its socket, the number of the system call futex
"""

import ctypes
import json
import mmap
import os
import socket
import sys
import time
from typing import Any

# CUdevice_attribute of cuda.h
_MAJOR, _MINOR = 75, 76
_VMM, _FDS = 102, 103  # VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
_FABRIC, _MULTICAST = 128, 132  # HANDLE_TYPE_FABRIC_SUPPORTED, MULTICAST_SUPPORTED


def probe() -> dict[str, Any]:
    """What there is.

    Only "missing", the loader's text, where there is no libcuda. Else "version", "status" and "reason" of cuInit, and
    if the status is 0, "devices".
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"missing": str(error)}
    version, status = _ask(cuda.cuDriverGetVersion), cuda.cuInit(0)
    found = {"status": status, "reason": _name(cuda, status), "version": version}
    if status == 0:
        count = _ask(cuda.cuDeviceGetCount)
        found["devices"] = [_device(cuda, index, count) for index in range(count)]
    return found


def _ask(function: Any, *arguments: int) -> int:
    """What a function writes through its first argument; 0 where an older driver does not know what is asked for."""
    value = ctypes.c_int()
    function(ctypes.byref(value), *arguments)
    return value.value


def _device(cuda: Any, index: int, count: int) -> dict[str, Any]:
    name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
    cuda.cuDeviceGetName(name, len(name), index)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), index)

    def attribute(number: int) -> int:
        return _ask(cuda.cuDeviceGetAttribute, number, index)

    return {
        "name": name.value.decode(errors="replace"),
        "memory": memory.value,
        "capability": [attribute(_MAJOR), attribute(_MINOR)],
        "vmm": attribute(_VMM),
        "fds": attribute(_FDS),
        "fabric": attribute(_FABRIC),
        "multicast": attribute(_MULTICAST),
        "peers": [peer for peer in range(count) if peer != index and _ask(cuda.cuDeviceCanAccessPeer, index, peer)],
    }


def _name(cuda: Any, status: int) -> str:
    text = ctypes.c_char_p()
    cuda.cuGetErrorName(status, ctypes.byref(text))
    return (text.value or b"unknown").decode(errors="replace")


_SECONDS = 10
_FUTEX_WAKE = 1  # linux/futex.h


def meet(name: str, futex: int) -> None:
    """Take memory through an abstract socket, write to it, wake the process that sleeps on it.

    Exits with a text if that fails.
    """
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
    if sys.argv[1] == "cuda":
        print(json.dumps(probe()))
    else:
        meet(sys.argv[2], int(sys.argv[3]))
