"""Stores: the built-in ones, and any object with torch's methods."""

import gc
import os
import threading
import time
import weakref
from datetime import timedelta

import pytest

from dict_store import DictStore
from phalanx.core import (
    AccessDeniedError,
    CallbackStore,
    FileStore,
    InvalidArgumentError,
    MemoryStore,
    NotFoundError,
    PhalanxError,
    PrefixStore,
    TCPStore,
    UnsupportedError,
    WaitTimeoutError,
    World,
    as_store,
)
from phalanx.core import store as store_module
from ranks import run_ranks, scratch


@pytest.fixture(params=["memory", "file", "tcp", "prefix", "callback"])
def store(request, tmp_path):
    if request.param == "memory":
        return MemoryStore()
    if request.param == "file":
        return FileStore(tmp_path / "store")
    if request.param == "tcp":
        return TCPStore.serve(token="secret")
    if request.param == "prefix":
        return PrefixStore(MemoryStore(), "job/")
    return CallbackStore(DictStore())


@pytest.mark.parametrize("value", [b"", b"x", b"\x00\xff\n\x00", os.urandom(4096), os.urandom(100_000)])
def test_a_value_comes_back_byte_for_byte(store, value):
    store.set("key", value)
    assert store.get("key", 5000) == value


def test_text_is_stored_as_utf8(store):
    store.set("schlüssel", "größe")
    assert store.get("schlüssel", 5000) == "größe".encode()


def test_set_replaces(store):
    store.set("key", b"a longer value")
    store.set("key", b"short")
    assert store.get("key", 5000) == b"short"


def test_add_counts_from_zero(store):
    assert [store.add("n", delta) for delta in (1, 41, -2, 0)] == [1, 42, 40, 40]
    assert store.get("n", 5000) == b"40"


def test_a_key_that_never_comes_is_a_timeout(store):
    with pytest.raises(WaitTimeoutError, match="absent"):
        store.get("absent", 50)
    store.set("present", b"1")
    with pytest.raises(TimeoutError):
        store.wait(["present", "absent"], 50)


def test_waiting_for_no_key_or_for_present_ones_returns(store):
    store.set("a", b"1")
    store.set("b", b"2")
    store.wait([], 5000)
    store.wait(["a", "b"], 5000)


def test_a_waiting_thread_gets_what_another_sets(store):
    threading.Timer(0.05, store.set, ("late", b"here")).start()
    assert store.get("late", 30_000) == b"here"


def test_threads_that_share_a_store_object_do_not_miss_each_others_keys(store):
    def answer():
        for i in range(200):
            store.set(f"answer/{i}", store.get(f"question/{i}", 30_000))

    thread = threading.Thread(target=answer)
    thread.start()
    for i in range(200):
        store.set(f"question/{i}", str(i))
        assert store.get(f"answer/{i}", 30_000) == str(i).encode()
    thread.join()


def test_a_removed_key_is_gone(store):
    store.set("key", b"1")
    store.remove("key")
    with pytest.raises(NotFoundError):
        store.remove("key")
    with pytest.raises(WaitTimeoutError):
        store.get("key", 20)


@pytest.mark.parametrize("key", ["", "a\0b", 7, None])
def test_a_bad_key_is_an_invalid_argument(store, key):
    with pytest.raises(InvalidArgumentError, match="key"):
        store.set(key, b"1")
    assert store.add("n", 1) == 1


def test_a_negative_timeout_is_an_invalid_argument(store):
    with pytest.raises(InvalidArgumentError, match="no wait is unbounded"):
        store.get("key", -1)


def test_a_prefix_keeps_keys_apart():
    base = MemoryStore()
    left, right = PrefixStore(base, "left/"), PrefixStore(base, "right/")
    left.set("key", b"l")
    right.set("key", b"r")
    assert (left.get("key", 1000), right.get("key", 1000)) == (b"l", b"r")
    assert base.get("left/key", 1000) == b"l"


def test_a_prefix_store_keeps_its_base_alive():
    view = PrefixStore(MemoryStore(), "p/")
    gc.collect()
    assert view.add("n", 2) == 2


def test_a_file_store_is_private_to_its_user(tmp_path):
    path = tmp_path / "store"
    FileStore(path).set("key", b"1")
    assert path.stat().st_mode & 0o777 == 0o600
    assert FileStore(str(path)).get("key", 1000) == b"1"


def test_a_tcp_store_needs_its_token():
    server = TCPStore.serve(token=b"right")
    assert server.port > 0
    client = TCPStore.connect(server.address, server.port, token=b"right", timeout_ms=5000)
    client.set("key", b"1")
    assert server.get("key", 5000) == b"1"
    with pytest.raises(AccessDeniedError):
        TCPStore.connect(server.address, server.port, token=b"wrong", timeout_ms=5000)
    with pytest.raises(InvalidArgumentError, match="token"):
        TCPStore.connect(server.address, server.port, token="", timeout_ms=5000)
    with pytest.raises(InvalidArgumentError, match="token"):
        TCPStore.serve(token=b"")


def test_a_tcp_store_that_nobody_serves_is_a_timeout():
    gone = TCPStore.serve(token="t")
    port = gone.port
    del gone
    gc.collect()
    with pytest.raises(WaitTimeoutError, match=str(port)):
        TCPStore.connect("127.0.0.1", port, token="t", timeout_ms=100)


@pytest.mark.parametrize("port", [-1, 65536, "80", 1.5])
def test_a_port_out_of_range_is_named(port):
    with pytest.raises(InvalidArgumentError, match="port"):
        TCPStore.serve(port=port, token="t")


def count_to_a_thousand(rank, world_size, kind, address):
    store = (
        FileStore(scratch() / "store") if kind == "file" else TCPStore.connect(*address, token="t", timeout_ms=30_000)
    )
    for _ in range(250):
        store.add("n", 1)
    store.set(f"done/{rank}", str(rank).encode())
    store.wait([f"done/{other}" for other in range(world_size)], 30_000)
    return int(store.get("n", 1000))


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_processes_count_together_without_losing_any(kind):
    server = TCPStore.serve(token="t")
    assert run_ranks(count_to_a_thousand, 4, kind, (server.address, server.port)) == [1000] * 4


# ---- objects of others --------------------------------------------------------------------------


class Refusing(DictStore):
    """Fails every call but `wait`."""

    def set(self, key, value):
        raise ConnectionResetError("the server hung up")

    def get(self, key):
        raise ConnectionResetError("the server hung up")

    def add(self, key, amount):
        raise ConnectionResetError("the server hung up")

    def wait(self, keys, timeout):
        return None


@pytest.mark.parametrize("call", [lambda s: s.set("k", b""), lambda s: s.get("k", 1000), lambda s: s.add("k", 1)])
def test_what_a_callback_raises_becomes_the_cause(call):
    with pytest.raises(PhalanxError) as caught:
        call(CallbackStore(Refusing()))
    assert isinstance(caught.value.__cause__, ConnectionResetError)
    assert str(caught.value.__cause__) == "the server hung up"


def test_a_later_error_has_no_stale_cause():
    with pytest.raises(PhalanxError):
        CallbackStore(Refusing()).add("k", 1)
    with pytest.raises(WaitTimeoutError) as caught:
        MemoryStore().get("absent", 10)
    assert caught.value.__cause__ is None


def test_a_timeout_of_a_callback_is_a_timeout_and_keeps_its_cause():
    with pytest.raises(WaitTimeoutError) as caught:
        CallbackStore(DictStore()).wait(["absent"], 20)
    assert "wait timeout" in str(caught.value.__cause__)


def test_a_callback_never_blocks_for_longer_than_it_was_asked_to():
    class Patient(DictStore):
        def get(self, key):  # as torch's: blocks for the store's own timeout
            self.wait([key], timedelta(hours=1))
            return super().get(key)

    started = time.monotonic()
    with pytest.raises(WaitTimeoutError):
        CallbackStore(Patient()).get("absent", 50)
    assert time.monotonic() - started < 60


class Removed(DictStore):
    """As torch's stores: a rank looks for a key and finds it, and then another rank removes it."""

    def check(self, keys):
        found = all(map(self.sees, keys))
        self.values.clear()
        return found

    def get(self, key):
        raise AssertionError("torch's would block here, for the timeout of the store")

    def compare_set(self, key, expected, desired):
        return self.values.get(key, expected.encode())


def test_a_key_that_another_rank_removes_meanwhile_is_waited_for_no_longer_than_asked():
    store = CallbackStore(Removed())
    store.set("key", b"value")
    with pytest.raises(WaitTimeoutError):
        store.get("key", 50)


def test_an_exception_of_a_callback_does_not_reach_c(capfd):
    with pytest.raises(PhalanxError):
        CallbackStore(Refusing()).set("k", b"1")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")  # cffi would print it


def test_keyboard_interrupt_in_a_callback_is_raised_by_the_call():
    class Interrupted(DictStore):
        def add(self, key, amount):
            raise KeyboardInterrupt

    store = CallbackStore(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        store.add("k", 1)
    store.set("k", b"2")  # it is raised once
    assert store.get("k") == b"2"


def test_an_object_without_the_methods_is_refused_by_name():
    with pytest.raises(InvalidArgumentError, match="dict has no set, add, wait"):
        CallbackStore({})
    store = MemoryStore()
    assert as_store(store) is store


def test_an_object_that_cannot_delete_is_unsupported_only_there():
    class NoDelete(DictStore):
        delete_key = None

    store = CallbackStore(NoDelete())
    store.set("k", b"1")
    with pytest.raises(UnsupportedError):
        store.remove("k")


def test_the_object_lives_as_long_as_the_core_uses_it():
    target = DictStore()
    seen = weakref.ref(target)
    view = PrefixStore(CallbackStore(target), "p/")
    del target
    gc.collect()
    assert view.add("n", 1) == 1
    assert seen() is not None
    del view
    gc.collect()
    assert seen() is None
    assert not store_module._targets


def test_handles_that_die_inside_a_callback_are_released_after_it():
    class Messy(DictStore):
        def __init__(self):
            super().__init__()
            self.rubbish = [MemoryStore() for _ in range(3)]

        def add(self, key, amount):
            self.rubbish.clear()
            return super().add(key, amount)

    assert CallbackStore(Messy()).add("n", 5) == 5
    assert World(0, 1).rank == 0  # the core still answers


def test_torch_stores_work_as_they_are(tmp_path):
    torch_distributed = pytest.importorskip("torch.distributed", reason="needs torch")
    stores = [
        torch_distributed.HashStore(),
        torch_distributed.FileStore(str(tmp_path / "torch"), 1),
        torch_distributed.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False),
    ]
    stores.append(torch_distributed.PrefixStore("p", stores[0]))
    for target in stores:
        store = as_store(target)
        store.set("key", b"\x00\xffvalue")
        assert store.get("key", 5000) == b"\x00\xffvalue"
        assert store.add("n", 3) == 3
        with pytest.raises(WaitTimeoutError):
            store.get("absent", 50)
        with pytest.raises(WaitTimeoutError):
            store.wait(["key", "absent"], 50)
        assert store_module._look(target, "absent") is None and not target.check(["absent"]), "compare_set has changed"
        store.remove("key")
