"""Importing the package: what it loads, in any order, without CUDA, and without the library of ops."""

import importlib
import sys
import warnings

import pytest
import torch

from ranks import run_ranks

# This file imports nothing of ours: each rank begins with torch alone.
FIRST = ("phalanx.collectives", "phalanx.collectives.c10d", "phalanx.core")


def import_first(rank, size):
    assert not [name for name in sys.modules if name.split(".")[0] == "phalanx"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = importlib.import_module(FIRST[rank])
        for name in module.__all__:
            assert getattr(module, name) is not None
        for other in FIRST:
            importlib.import_module(other)
    return torch.cuda.is_initialized()


def test_each_public_module_can_be_the_first_to_be_imported():  # F20
    assert run_ranks(import_first, len(FIRST), loaded=False) == [False] * len(FIRST)  # and leaves a GPU alone


def without_cuda(rank, size):
    assert not torch.cuda.is_available()
    import phalanx.collectives as pc

    group = torch.distributed.group.WORLD
    x = torch.ones(2, requires_grad=True)
    pc.all_reduce(x, "sum", group).sum().backward()
    assert x.grad.tolist() == [size] * 2


def test_it_works_without_cuda():  # F20
    run_ranks(without_cuda, 2, start_torch=True, env={"CUDA_VISIBLE_DEVICES": ""}, loaded=False)


def no_native_ops():
    importlib.import_module("phalanx.core").load_torch_ops = refuse_to_load


def refuse_to_load():
    raise ImportError("no libphalanx_torch.so")


def without_ops(rank, size):
    no_native_ops()
    reason = "no libphalanx_torch.so"
    with pytest.warns(UserWarning, match=f"phalanx.collectives cannot run collectives: .*{reason}") as caught:
        pc = importlib.import_module("phalanx.collectives")
    assert len(caught) == 1
    group = object()
    for call in (
        lambda: pc.all_reduce(torch.ones(1), "sum", [0]),
        lambda: pc.barrier([0]),
        lambda: pc.irecv_inplace(torch.ones(1), 0, group=[0]),
        lambda: pc.enable_group(group),
    ):
        with pytest.raises(ImportError, match=reason):
            call()
    assert torch.distributed.Backend.PHALANX == "phalanx"  # which needs no ops


def test_without_the_library_of_ops_it_warns_and_every_call_says_why():  # F20
    run_ranks(without_ops, 1, loaded=False)
