"""Type checkers see None where a call blocks, a Work with `blocking=False`, and either where that is a variable.

mypy reads this file in CI, and so an `assert_type` that does not hold fails there.
"""

import inspect
from array import array
from typing import Any, assert_type, get_args, get_overloads, get_type_hints

import pytest

from phalanx.core import CallOptions, Coalesced, Group, MemoryStore, Symm, Work, World

CALLS = [
    (kind, name, function)
    for kind in (Group, Symm, Coalesced)
    for name, function in inspect.getmembers(kind, inspect.isfunction)
    if not name.startswith("_")
    and "return" in (hints := get_type_hints(function))
    and Work in get_args(hints["return"])
]


def test_every_call_that_may_return_a_work_is_here() -> None:
    names = {kind.__name__: [name for one, name, _ in CALLS if one is kind] for kind in (Group, Symm, Coalesced)}
    both = ["all_gather", "all_gather_v", "all_reduce", "all_to_all", "all_to_all_v", "broadcast", "gather", "reduce"]
    both += ["reduce_scatter", "reduce_scatter_v", "scatter"]
    assert names == {"Group": sorted([*both, "coalesced", "recv", "send"]), "Symm": both, "Coalesced": ["run"]}


@pytest.mark.parametrize(
    ("name", "function"), [one[1:] for one in CALLS], ids=[f"{k.__name__}.{n}" for k, n, _ in CALLS]
)
def test_the_overloads_are_the_function(name: str, function: Any) -> None:
    blocking, nonblocking, either = get_overloads(function)
    nothing = int if name == "recv" else type(None)
    returned = [get_type_hints(one)["return"] for one in (blocking, nonblocking, either, function)]
    assert returned == [nothing, Work, Work | nothing, Work | nothing]
    parameters = inspect.signature(function).parameters
    for one in (blocking, nonblocking, either):
        stub = inspect.signature(one).parameters
        assert list(stub) == list(parameters)
        for of, (ours, wanted) in {key: (stub[key], parameters[key]) for key in parameters}.items():
            assert (ours.default is ...) == (wanted.default is not wanted.empty), of
            assert of == "options" or ours.annotation == wanted.annotation


def test_types_and_values_agree() -> None:
    with World(0, 1, MemoryStore()) as world:
        group = world.create_group("one", [0])
        symm = group.rendezvous(world.alloc(64))
        x, either = array("f", [2.0]), bool(world.rank)  # False, which no type checker knows
        options: CallOptions = {"channel": 1}

        assert assert_type(group.all_reduce(x), None) is None
        assert assert_type(group.all_reduce(x, blocking=True, **options), None) is None
        assert isinstance(assert_type(group.all_reduce(x, blocking=False, **options), Work), Work)
        assert isinstance(assert_type(group.all_reduce(x, blocking=either), Work | None), Work)

        assert assert_type(symm.all_reduce(0, x), None) is None
        assert isinstance(assert_type(symm.all_reduce(0, x, blocking=False), Work), Work)

        sent = assert_type(group.send(x, 0, blocking=False), Work)
        assert assert_type(group.recv(x, 0), int) == 0
        sent.wait()
        received = assert_type(group.recv(x, blocking=False), Work)
        assert assert_type(group.send(x, 0), None) is None
        received.wait()

        calls = group.prepare([])
        assert assert_type(calls.run(), None) is None
        assert isinstance(assert_type(group.coalesced([], blocking=False), Work), Work)


def test_an_option_that_is_not_one_is_seen() -> None:
    with World(0, 1, MemoryStore()) as world:
        group = world.create_group("one", [0])
        with pytest.raises(TypeError, match="unknown option 'blokcing'"):
            group.all_reduce(array("f", [1.0]), blokcing=False)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="unknown option 'blocking'"):
            group.messages([], blocking=False)  # type: ignore[call-arg]
