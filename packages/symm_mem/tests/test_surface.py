"""The names of torch's symmetric memory are in this package too, or are listed here with the reason."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.distributed._symmetric_memory as theirs
from torch._C._distributed_c10d import _SymmetricMemory as TheirHandle

from phalanx import symm_mem
from phalanx.core import MemoryStore

ANY_STRIDES = "changes the strides of a tensor for torch's fused ops; ours take any strides"
LEFT_OUT = {
    "Work": "a work object of torch that waits for an event of CUDA; these ops return tensors",
    "make_contiguous_for_perm": ANY_STRIDES,
    "restride_A_for_fused_matmul_reduce_scatter": ANY_STRIDES,
    "restride_A_shard_for_fused_all_gather_matmul": ANY_STRIDES,
}
if hasattr(theirs, "triton_reduce_partials_first_dim"):  # torch 2.14
    LEFT_OUT["triton_reduce_partials_first_dim"] = (
        "a kernel of reduce_partials, which gives the same on all devices here"
    )
LEFT_OUT_OF_THE_CLASS = {
    "boxed": "makes an object of torch's class for ops of torch; none of ours takes a handle",
}
FUNCTIONS = [
    name
    for name, found in vars(theirs).items()
    if getattr(found, "__module__", None) == theirs.__name__ and (not name.startswith("_") or name == "_test_mode")
]
THEIR_NAME = theirs.__name__


def used_elsewhere():
    """The names of torch's module that other modules of torch use, private ones included, with the files."""
    package, own = Path(torch.__file__).parent, Path(theirs.__file__).parent
    used = {}
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if own in path.parents or THEIR_NAME not in text:
            continue
        tree, aliases = ast.parse(text), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                aliases.update(each.asname for each in node.names if each.name == THEIR_NAME and each.asname)
            elif isinstance(node, ast.ImportFrom) and node.module == THEIR_NAME:
                for each in node.names:
                    used.setdefault(each.name, set()).add(path.name)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
                used.setdefault(node.attr, set()).add(path.name)
    return used


MEMBERS = [name for name in vars(TheirHandle) if not name.startswith("_")]


@pytest.fixture
def handle():
    with symm_mem.rank_context():
        symm_mem.set_group_info("tp", 0, 1, MemoryStore())
        yield symm_mem.rendezvous(symm_mem.empty(4), "tp")


def test_what_is_left_out_is_torchs_and_not_ours():
    assert set(theirs.__all__) <= set(FUNCTIONS)
    assert set(LEFT_OUT) <= set(FUNCTIONS)
    assert set(LEFT_OUT_OF_THE_CLASS) <= set(MEMBERS)
    for name in LEFT_OUT:
        assert not hasattr(symm_mem, name), f"take {name} off the list: it is there now"
    for name in LEFT_OUT_OF_THE_CLASS:
        assert not hasattr(symm_mem.SymmetricMemory, name), f"take {name} off the list: it is there now"


def test_names_that_the_rest_of_torch_uses_are_there():
    used = used_elsewhere()
    assert {"rendezvous", "is_symm_mem_enabled_for_group", "restride_A_for_fused_matmul_reduce_scatter"} <= set(used)
    missing = {name: files for name, files in used.items() if not hasattr(symm_mem, name) and name not in LEFT_OUT}
    assert missing == {}


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - set(LEFT_OUT)))
def test_functions_have_torchs_names_parameters_and_defaults(name):
    ours = inspect.signature(getattr(symm_mem, name)).parameters
    wanted = inspect.signature(getattr(theirs, name)).parameters
    assert name.startswith("_") or name in symm_mem.__all__
    assert [each for each in ours if each in wanted] == list(wanted)  # all of them, in this order
    for each in wanted.values():
        mine = ours[each.name]
        assert mine.kind == each.kind
        assert each.default is each.empty or mine.default == each.default
    for each in ours.values():  # what ours has on top may be left out
        assert each.name in wanted or each.default is not each.empty


def documented(name):
    """The parameters that pybind's docstring tells of: name (None where it has none), and whether it has a default."""
    text = getattr(TheirHandle, name).__doc__
    inside = text[text.index("(") + 1 : text.rindex(") ->")]
    found = re.findall(r"(\w+): [^=,\[]+(?:\[[^\]]*\])?[^=,]*(=)?", inside)
    return [
        (None if re.fullmatch(r"arg\d", each) else each, bool(default)) for each, default in found if each != "self"
    ]


def test_the_docstrings_of_pybind_are_read_right():
    assert documented("barrier") == [("channel", True), ("timeout_ms", True)]
    assert documented("get_remote_tensor") == [("peer", False), ("sizes", False), ("dtype", False)]
    assert documented("set_group_info") == [(None, False)] * 4
    named = ("rank", False), ("sizes", True), ("dtype", True), ("storage_offset", True)
    assert documented("get_signal_pad") == list(named)


@pytest.mark.parametrize("name", sorted(set(MEMBERS) - set(LEFT_OUT_OF_THE_CLASS)))
def test_handles_have_torchs_members(handle, name):  # M31
    kind = type(vars(TheirHandle)[name]).__name__
    assert hasattr(handle, name)
    if kind == "pybind11_static_property":
        assert isinstance(getattr(symm_mem.SymmetricMemory, name), int)
        return
    if kind == "property":
        assert not callable(getattr(handle, name))
        return
    assert (kind == "staticmethod") == isinstance(inspect.getattr_static(symm_mem.SymmetricMemory, name), staticmethod)
    parameters = list(inspect.signature(getattr(handle, name)).parameters.values())
    wanted = documented(name)
    assert len(parameters) == len(wanted)
    for mine, (called, has_default) in zip(parameters, wanted, strict=True):
        assert called in (None, mine.name)
        assert mine.default is not mine.empty or not has_default


def test_code_that_uses_torchs_class_needs_another_import_only():  # M1 M4 M16 M18
    from phalanx.symm_mem import _SymmetricMemory

    with symm_mem.rank_context():
        _SymmetricMemory.set_group_info("tp", 0, 1, MemoryStore())
        tensor = _SymmetricMemory.empty_strided_p2p((2, 3), (3, 1), torch.int32, torch.device("cpu"), "tp", alloc_id=7)
        handle = _SymmetricMemory.rendezvous(tensor)
        assert isinstance(handle, _SymmetricMemory)
        assert handle is symm_mem.rendezvous(tensor, "tp")
        assert _SymmetricMemory.is_symm_mem_tensor(tensor) and not _SymmetricMemory.is_symm_mem_tensor(torch.ones(1))
        _SymmetricMemory.set_backend(_SymmetricMemory.get_backend(torch.device("cpu")))
        assert _SymmetricMemory.get_backend(torch.device("cuda", 0)) is None
        assert handle.multicast_ptr == 0
        assert _SymmetricMemory.has_multicast_support("cpu", 0) is False
        assert _SymmetricMemory.memset32(tensor, offset=1, val=0xFFFFFFFF, count=2) is tensor
        assert _SymmetricMemory.stream_write_value32(tensor, offset=5, val=9) is tensor
        _SymmetricMemory.memset32(tensor, 0, 4)
        assert tensor.tolist() == [[4, -1, -1], [0, 0, 9]]
        pad = handle.get_signal_pad(0)
        _SymmetricMemory.stream_write_value32(pad, offset=3, val=1)
        handle.wait_signal(0, channel=3)


def test_there_is_no_nvshmem():
    assert symm_mem.is_nvshmem_available() is False
