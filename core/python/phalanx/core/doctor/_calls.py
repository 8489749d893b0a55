"""System calls that Python has no function for."""

import ctypes
import errno
import os
import platform
from functools import cache
from typing import Any

_NUMBERS = {  # asm/unistd.h
    "x86_64": {"futex": 202, "mbind": 237, "membarrier": 324},
    "aarch64": {"futex": 98, "mbind": 235, "membarrier": 283},
}


def number(name: str) -> int:
    """The number of a system call on this processor.

    Raises:
        OSError: It is not known here.
    """
    known = _NUMBERS.get(platform.machine(), {})
    if name not in known:
        raise OSError(errno.ENOSYS, f"the number of {name} on {platform.machine()} is not known here")
    return known[name]


def call(name: str, *arguments: Any) -> int:
    """Make a system call.

    Args:
        name: Of the call.
        arguments: ints, and what ctypes passes as a pointer.

    Raises:
        OSError: It failed.
    """
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = int(_libc().syscall(ctypes.c_long(number(name)), *words))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc
