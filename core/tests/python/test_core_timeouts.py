"""A timeout means one thing wherever it is given."""

from datetime import timedelta

import pytest

from dict_store import DictStore
from phalanx.core import CallbackStore, InvalidArgumentError, MemoryStore, TCPStore, WaitTimeoutError, World
from phalanx.core.timeouts import LONGEST_MS, milliseconds, timed_out


@pytest.mark.parametrize(
    ("timeout", "expected"),
    [
        (timedelta(0), 1),
        (timedelta(microseconds=1), 1),
        (timedelta(microseconds=999), 1),
        (timedelta(milliseconds=1), 1),
        (timedelta(microseconds=1001), 2),
        (timedelta(seconds=8), 8000),
        (timedelta(milliseconds=-1), 1),
        (timedelta(days=-400), 1),
        (timedelta.max, LONGEST_MS),
        (timedelta(days=-67519912, seconds=28252, microseconds=242000), LONGEST_MS),  # timedelta.max, by way of torch
    ],
)
def test_a_timedelta_is_rounded_up_and_is_never_the_default(timeout, expected):
    assert milliseconds(timeout) == expected


def test_the_text_says_what_set_the_limit():
    assert timed_out(500) == timed_out(500, 500) == "timed out after 500 ms (the timeout of the group)"
    assert timed_out(500, 8000) == "timed out after 500 ms (the timeout of this call)"


def entries(world):
    """Every entry of a world of one rank that takes a timeout and, called rightly, returns."""
    group = world.create_group("g", [0])
    symm = group.rendezvous(world.alloc(64))
    store = MemoryStore()
    store.set("key", b"")
    words = DictStore()
    words.set("key", b"")
    word = bytearray(8)
    return {
        "World": lambda t: World(0, 1, timeout_ms=t).finalize(),
        "set_timeout of a world": world.set_timeout,
        "create_group": lambda t: world.create_group("h", [0], t),
        "attach_group": lambda t: world.attach_group("i", 0, 1, MemoryStore(), t),
        "set_timeout of a group": group.set_timeout,
        "split": lambda t: group.split(0, timeout_ms=t),
        "shrink": lambda t: group.shrink(timeout_ms=t),
        "agree": lambda t: group.agree(1, timeout_ms=t),
        "barrier": group.barrier,
        "rendezvous": lambda t: group.rendezvous(world.alloc(64), t),
        "barrier of symmetric memory": lambda t: symm.barrier(0, t),
        "all_reduce": lambda t: group.all_reduce(word, word, 2, "float32", timeout_ms=t),
        "work.wait": lambda t: group.all_reduce(word, word, 2, "float32", blocking=False).wait(t),
        "work.expire": lambda t: group.all_reduce(word, word, 2, "float32", blocking=False).expire(t),
        "store.get": lambda t: store.get("key", t),
        "store.wait": lambda t: store.wait(["key"], t),
        "store.get of the caller's": lambda t: CallbackStore(words).get("key", t),
    }


def test_every_entry_takes_whole_milliseconds_and_zero_is_the_default():
    with World(0, 1, timeout_ms=60_000) as world:
        for call in entries(world).values():
            for right in (0, 1000, LONGEST_MS, 2**63 - 1):
                call(right)
            for wrong in (-1, -(2**63), None, 0.5, timedelta(seconds=1), 2**63):
                with pytest.raises(InvalidArgumentError, match="timeout_ms"):
                    call(wrong)


def test_a_store_says_what_set_the_limit():
    for store in (MemoryStore(), TCPStore.serve(token="secret"), CallbackStore(DictStore())):
        with pytest.raises(WaitTimeoutError, match=r"timed out after 20 ms \(the timeout_ms of this call\)"):
            store.get("none", 20)
        with pytest.raises(WaitTimeoutError, match=r"timed out after 20 ms \(the timeout_ms of this call\)"):
            store.wait(["none"], 20)
