"""Key-value stores, through which ranks find each other."""

import itertools
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from phalanx.core import _callbacks
from phalanx.core._handle import INT64_MAX, Handle, c_integer, c_text, c_timeout, create
from phalanx.core._lib import ffi, lib, new_struct
from phalanx.core.errors import InvalidArgumentError, check
from phalanx.core.uncopied import Uncopied

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.002  # between looks at a store of the caller's
_ABSENT = "phalanx: nobody has written this key"
_FIRST_CAPACITY = 4096  # bytes; a longer value costs a second call


class Store(Uncopied):
    """A key-value store that all ranks see. Make one of the subclasses.

    A `timeout_ms` of 0 means the core's default. Thread-safe. Nothing here is collective.

    Example:
        >>> store = MemoryStore()
        >>> store.set("key", "value")
        >>> store.get("key"), store.add("counter", 2)
        (b'value', 2)
    """

    def __init__(self, pointer: Any, what: str, keep: object = None) -> None:
        self._handle = Handle(pointer, lib.phx_store_release, what, keep=keep)

    @property
    def pointer(self) -> Any:
        """The phx_store pointer, for calls through `lib`."""
        return self._handle.pointer

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key, replacing its value.

        Args:
            key: Not empty, without NUL characters.
            value: Bytes, or text that is stored as UTF-8.

        Raises:
            PhalanxError: The store cannot be reached.
        """
        data = _bytes(value)
        self._call(lib.phx_store_set, c_text(key, "key"), data, len(data))

    def get(self, key: str, timeout_ms: int = 0) -> bytes:
        """Wait for a key and return its value.

        Args:
            key: What to wait for.
            timeout_ms: How long, in milliseconds.

        Raises:
            WaitTimeoutError: The key did not appear in time.
        """
        name, wait_ms = c_text(key, "key"), c_timeout(timeout_ms)
        size = ffi.new("size_t *")
        capacity = _FIRST_CAPACITY
        while True:
            value = ffi.new("char[]", capacity)
            self._call(lib.phx_store_get, name, value, capacity, size, wait_ms)
            if size[0] <= capacity:
                return bytes(ffi.buffer(value, size[0]))
            capacity = size[0]

    def wait(self, keys: Sequence[str], timeout_ms: int = 0) -> None:
        """Wait until all of these keys are set.

        Args:
            keys: What to wait for.
            timeout_ms: How long, in milliseconds, for all of them together.

        Raises:
            WaitTimeoutError: Not all of them appeared in time.
        """
        names = [ffi.new("char[]", c_text(key, "key")) for key in keys]
        array = ffi.new("char *[]", names)
        self._call(lib.phx_store_wait, array, len(names), c_timeout(timeout_ms))

    def add(self, key: str, delta: int) -> int:
        """Add to a decimal counter that starts at 0.

        Args:
            key: Name of the counter.
            delta: What to add; may be negative.

        Returns:
            The new value.
        """
        result = ffi.new("int64_t *")
        number = c_integer(delta, "delta", -INT64_MAX - 1, INT64_MAX)
        self._call(lib.phx_store_add, c_text(key, "key"), number, result)
        return int(result[0])

    def remove(self, key: str) -> None:
        """Remove a key.

        Raises:
            NotFoundError: There is none.
        """
        self._call(lib.phx_store_remove, c_text(key, "key"))

    def _call(self, function: Callable[..., int], *args: Any) -> None:
        check(function(self._handle.pointer, *args))


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class MemoryStore(Store):
    """A store for ranks that are threads of one process.

    Example:
        >>> MemoryStore().add("counter", 2)
        2
    """

    def __init__(self) -> None:
        super().__init__(create("phx_store *", lib.phx_store_memory), "memory store")


class FileStore(Store):
    """A store in a file that all ranks see, made with mode 0600. Removing it is the user's job.

    Args:
        path: The file; made if it does not exist.

    Example:
        >>> store = FileStore(f"store of rank {rank}")
        >>> store.set("key", "value")
        >>> store.get("key")
        b'value'
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        pointer = create("phx_store *", lib.phx_store_file, c_text(self.path, "path"))
        super().__init__(pointer, f"file store {self.path!r}")


class TCPStore(Store):
    """A store served by one rank over TCP: `serve` there, `connect` everywhere else.

    Attributes:
        address: Where it is bound or connected to.
        port: The port of it.

    Example:
        >>> server = TCPStore.serve(token="secret")
        >>> client = TCPStore.connect(server.address, server.port, token="secret")
        >>> client.set("key", "value")
        >>> server.get("key")
        b'value'
    """

    def __init__(self, pointer: Any, address: str, port: int) -> None:
        super().__init__(pointer, f"TCP store {address}:{port}")
        self.address = address
        self.port = port

    @classmethod
    def serve(cls, address: str = "127.0.0.1", port: int = 0, *, token: bytes | str) -> "TCPStore":
        """Serve a store; it ends when the last reference to it is gone.

        Args:
            address: The address to bind to, and no other.
            port: The port; 0 takes a free one (see the attribute `port`).
            token: A secret that clients must present; not empty.

        Raises:
            InvalidArgumentError: The token is empty.
            SystemCallError: The address cannot be bound.
        """
        secret, chosen = _bytes(token), ffi.new("uint16_t *", c_integer(port, "port", 0, 65535))
        arguments = (c_text(address, "address"), secret, len(secret), chosen)
        return cls(create("phx_store *", lib.phx_store_tcp_serve, *arguments), address, int(chosen[0]))

    @classmethod
    def connect(cls, address: str, port: int, *, token: bytes | str, timeout_ms: int = 0) -> "TCPStore":
        """Connect to a store that another process serves, or will serve in time.

        Args:
            address: Where it is bound.
            port: Its port there.
            token: The secret that it was given.
            timeout_ms: How long to try, in milliseconds.

        Raises:
            WaitTimeoutError: Nobody served it in time.
            AccessDeniedError: The token is wrong.
        """
        secret, number = _bytes(token), c_integer(port, "port", 1, 65535)
        arguments = (c_text(address, "address"), number, secret, len(secret), c_timeout(timeout_ms))
        return cls(create("phx_store *", lib.phx_store_tcp_connect, *arguments), address, port)


class PrefixStore(Store):
    """A view of another store: each key gets a prefix.

    Args:
        base: The store looked at; kept alive.
        prefix: Put before each key.

    Example:
        >>> base = MemoryStore()
        >>> PrefixStore(base, "job/").set("key", "value")
        >>> base.get("job/key")
        b'value'
    """

    def __init__(self, base: Store, prefix: str) -> None:
        pointer = create("phx_store *", lib.phx_store_prefix, base.pointer, c_text(prefix, "prefix"))
        super().__init__(pointer, f"store with prefix {prefix!r}")


class CallbackStore(Store):
    """An object with the methods of torch.distributed.Store, as a store of the core.

    It needs `set(key, bytes)`, `get(key) -> bytes`, `add(key, int) -> int` and
    `wait(list of keys, timedelta)`; `check(list of keys) -> bool` and `delete_key(key) -> bool` are optional. Where
    there is a `check`, a wait asks it again and again: the core waits in short slices, and stores of torch write a
    warning for each wait that ends without the key. They are called from any thread that calls the core, and must not
    call the core themselves. What they raise becomes the `__cause__` of the PhalanxError that the failed call raises.
    KeyboardInterrupt and SystemExit in the main thread are raised by the call itself.

    Args:
        target: The object; kept alive for as long as the core uses the store.
    """

    def __init__(self, target: Any) -> None:
        missing = [name for name in ("set", "get", "add", "wait") if not callable(getattr(target, name, None))]
        if missing:
            raise InvalidArgumentError(
                f"a store needs the methods set, get, add and wait, as torch.distributed.Store has "
                f"them; {type(target).__name__} has no {', '.join(missing)}"
            )
        number = next(_numbers)
        _targets[number] = target
        table = _ops()
        try:
            pointer = create("phx_store *", lib.phx_store_wrap, table[0], ffi.cast("void *", number))
        except BaseException:
            del _targets[number]
            raise
        # At exit this module may be emptied first: whoever holds the handle holds the callbacks.
        super().__init__(pointer, f"store of type {type(target).__name__}", table)


def as_store(store: Any) -> Store:
    """A Store as it is; any other object through CallbackStore.

    Raises:
        InvalidArgumentError: The object lacks the methods of a store.

    Example:
        >>> store = MemoryStore()
        >>> as_store(store) is store
        True
    """
    return store if isinstance(store, Store) else CallbackStore(store)


# ---- the callbacks of CallbackStore -------------------------------------------------------------

_TIMEOUT, _NOT_FOUND, _UNSUPPORTED, _INTERNAL = -4, -9, -2, -15

# The core knows a store by a number, so that a late call finds nothing instead of freed memory.
_numbers = itertools.count(1)
_targets: dict[int, Any] = {}
_table: list[Any] = []  # the one phx_store_ops, and its callbacks


def _target(self: Any) -> Any:
    return _targets[int(ffi.cast("uintptr_t", self))]


def _key(key: Any) -> str:
    return str(ffi.string(key).decode())


def _is_timeout(error: BaseException, started: float, timeout_ms: int) -> bool:
    # torch raises DistStoreError, a RuntimeError, both for a timeout and for other failures.
    text = str(error).lower()
    if isinstance(error, TimeoutError) or "timeout" in text or "timed out" in text:
        return True
    return (time.monotonic() - started) * 1000 >= timeout_ms


def _ask(check: Callable[[list[str]], bool], keys: list[str], end: float) -> None:
    """Wait until the keys are there, at most until `end`."""
    pause_s = _FIRST_PAUSE_S
    while not check(keys):
        left_s = end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"key {keys[0]!r} is not in the store")
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _wait_for(target: Any, keys: list[str], timeout_ms: int) -> None:
    started = time.monotonic()
    try:
        check = getattr(target, "check", None)
        if callable(check):
            _ask(check, keys, started + timeout_ms / 1000)
        else:
            target.wait(keys, timedelta(milliseconds=timeout_ms))
    except Exception as error:
        if not hasattr(error, "callback_status") and _is_timeout(error, started, timeout_ms):
            error.callback_status = _TIMEOUT  # type: ignore[attr-defined]
        raise


def _look(target: Any, name: str) -> bytes | None:
    """The value of a key, or None if it is not there.

    get() would block for the timeout of the store, which may be far longer than ours. torch's compare_set gives what a
    key has, or, where it is not there, what was expected, and writes nothing then.
    """
    compare_set = getattr(target, "compare_set", None)
    found = compare_set(name, _ABSENT, _ABSENT) if callable(compare_set) else target.get(name)
    data = _bytes(found)
    return data if data != _ABSENT.encode() else None


def _set(self: Any, key: Any, value: Any, size: int) -> None:
    _target(self).set(_key(key), bytes(ffi.buffer(value, size)) if size else b"")


def _get(self: Any, key: Any, value: Any, capacity: int, size: Any, timeout_ms: int) -> None:
    target, name = _target(self), _key(key)
    end = time.monotonic() + timeout_ms / 1000
    data = None
    while data is None:  # another rank may remove it as soon as it is there
        _wait_for(target, [name], max(0, int(1000 * (end - time.monotonic()))))
        data = _look(target, name)
    ffi.memmove(value, data, min(capacity, len(data)))
    size[0] = len(data)


def _add(self: Any, key: Any, delta: int, result: Any) -> None:
    result[0] = int(_target(self).add(_key(key), delta))


def _wait(self: Any, keys: Any, count: int, timeout_ms: int) -> None:
    _wait_for(_target(self), [_key(keys[i]) for i in range(count)], timeout_ms)


def _remove(self: Any, key: Any) -> int | None:
    delete = getattr(_target(self), "delete_key", None)
    if delete is None:
        return _UNSUPPORTED
    return None if delete(_key(key)) else _NOT_FOUND


def _forget(self: Any) -> None:
    _targets.pop(int(ffi.cast("uintptr_t", self)), None)


def _ops() -> Any:
    if not _table:
        ops = new_struct("phx_store_ops")
        bodies: dict[str, Callable[..., int | None]]
        bodies = {"set": _set, "get": _get, "add": _add, "wait": _wait, "remove": _remove, "destroy": _forget}
        # What is read back from `ops` is a bare pointer: the callbacks themselves must be kept.
        callbacks = []
        for name, body in bodies.items():
            fallback = None if name == "destroy" else _INTERNAL
            kind = ffi.typeof(getattr(ops, name))
            callbacks.append(ffi.callback(kind, _callbacks.guarded(body, fallback), error=fallback))
            setattr(ops, name, callbacks[-1])
        # One item, so that two threads that race here do no harm: one table merely goes unused.
        _table.append((ops, callbacks))
    return _table[0]
