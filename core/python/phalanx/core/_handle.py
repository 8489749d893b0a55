"""Owned C handles: released once, never in a forked child, never inside a callback."""

import os
from collections.abc import Callable
from typing import Any

from phalanx.core import _callbacks
from phalanx.core._lib import ffi
from phalanx.core.errors import InvalidArgumentError, UnsupportedError, check
from phalanx.core.uncopied import Uncopied


class _Process:
    """Counts forks: a handle belongs to the process that made it."""

    generation = 0

    @classmethod
    def forked(cls) -> None:
        cls.generation += 1


os.register_at_fork(after_in_child=_Process.forked)


class Handle(Uncopied):
    """One reference to a C object, counted again here.

    The count gives an order that Python does not: in a cycle of garbage, finalizers run in any
    order, but a world must be released after its blocks.

    Args:
        pointer: What the core handed out.
        release: The core's release function, called with `pointer` when nobody uses it any more.
        what: For error texts, such as "group 'tp'".
        owners: Handles that must be released after this one.
        keep: Anything else that must live until then.
    """

    __slots__ = ("__weakref__", "_generation", "_keep", "_owners", "_pid", "_pointer", "_release", "_users", "what")

    def __init__(
        self,
        pointer: Any,
        release: Callable[[Any], object],
        what: str,
        owners: tuple["Handle", ...] = (),
        keep: object = None,
    ) -> None:
        self._pointer = pointer
        self._generation = _Process.generation
        self._pid = os.getpid()
        self._owners = tuple(owner.retain() for owner in owners)
        self._keep = [keep]
        self.what = what
        # Lists, because append and pop are atomic, and a lock could be held when a finalizer runs.
        self._users = [None]
        self._release = [release]  # whoever takes it out calls it

    @property
    def pointer(self) -> Any:
        """The C pointer. Raises UnsupportedError in a fork of the process that made it."""
        if self._generation != _Process.generation:
            raise UnsupportedError(
                f"{self.what} was made in process {self._pid}, and this process ({os.getpid()}) is "
                "a fork of it: threads and connections do not survive a fork. Make worlds after "
                "the fork, or start processes with the 'spawn' method"
            )
        return self._pointer

    def alive(self) -> bool:
        """Whether this process may use the handle."""
        return self._generation == _Process.generation

    def retain(self) -> "Handle":
        """Count one more user, who must call `drop`."""
        self._users.append(None)
        return self

    def keep(self, thing: object) -> None:
        """Let a thing live as long as this handle."""
        self._keep.append(thing)

    def drop(self) -> None:
        """Count one user less; the last one releases the C object."""
        self._users.pop()
        if self._users or not self.alive():
            return
        try:
            release = self._release.pop()
        except IndexError:  # another thread was faster
            return
        _callbacks.release(lambda: self._end(release))

    def _end(self, release: Callable[[Any], object]) -> None:
        release(self._pointer)
        for owner in self._owners:
            owner.drop()

    def __del__(self) -> None:
        if hasattr(self, "_release"):  # else __init__ failed
            self.drop()


def c_text(value: str, what: str) -> bytes:
    """Encode a string for C, which would cut it off at a NUL character."""
    if not isinstance(value, str):
        raise InvalidArgumentError(f"{what} must be a str, not {type(value).__name__}")
    if "\0" in value:
        raise InvalidArgumentError(f"{what} {value!r} holds a NUL character; leave it out")
    return value.encode()


def c_optional_text(value: str | None, what: str) -> Any:
    """`c_text`, or NULL for None."""
    return ffi.NULL if value is None else c_text(value, what)


def c_integer(value: int, what: str, low: int, high: int) -> int:
    """Check an integer's range, which cffi would report without saying which argument it was."""
    try:
        number = value.__index__()
    except (AttributeError, TypeError):
        raise InvalidArgumentError(f"{what} must be an integer, not {type(value).__name__}") from None
    if not low <= number <= high:
        raise InvalidArgumentError(f"{what} is {number}; it must be between {low} and {high}")
    return number


INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1


def c_timeout(timeout_ms: int) -> int:
    """Check a timeout in milliseconds; 0 is the default of the world."""
    if type(timeout_ms) is int and 0 <= timeout_ms <= INT64_MAX:
        return timeout_ms
    number = c_integer(timeout_ms, "timeout_ms", -INT64_MAX, INT64_MAX)
    if number < 0:
        raise InvalidArgumentError(
            f"timeout_ms is {number}; give the milliseconds to wait, or 0 for the world's default "
            "(no wait is unbounded)"
        )
    return number


def view(address: int, size: int, owner: object) -> memoryview:
    """Writable bytes at an address; `owner` lives until the last view of them is gone."""
    # ffi.buffer keeps the pointer alive, and the pointer its destructor, which does nothing but hold the owner.
    pointer = ffi.gc(ffi.cast("char *", address), lambda _, held=owner: None)
    return memoryview(ffi.buffer(pointer, size))


def create(kind: str, function: Callable[..., int], *arguments: Any) -> Any:
    """What a function of the core makes, such as a "phx_group *", and returns through its last argument."""
    out = ffi.new(f"{kind}*")
    check(function(*arguments, out))
    return out[0]
