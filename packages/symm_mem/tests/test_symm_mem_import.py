"""Importing the package: what it loads; and that memory, rendezvous and signals work where ops cannot be registered."""

import importlib
import subprocess
import sys
import warnings

import pytest
import torch

from no_ops import BROKEN
from ranks import run_ranks

# This file imports nothing of ours: each rank begins with torch alone.


def test_it_imports_neither_dynamo_nor_sympy():  # which takes seconds
    code = "import sys, phalanx.symm_mem; sys.exit(not {'torch._dynamo', 'sympy'}.isdisjoint(sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True)


def without_ops(rank, size):
    damage, reason = list(BROKEN.items())[rank]
    for of_torch in ("torch.distributed.tensor", "torch._dynamo"):  # register ops of their own
        importlib.import_module(of_torch)
    damage()
    with pytest.warns(UserWarning, match="phalanx.collectives cannot run collectives"):  # which says so itself
        importlib.import_module("phalanx.collectives")
    with pytest.warns(UserWarning, match=f"phalanx.symm_mem has no ops in torch.ops.phalanx: .*{reason}") as caught:
        symm_mem = importlib.import_module("phalanx.symm_mem")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        symm_mem._ops.register()  # says it once
    from phalanx.core import MemoryStore

    symm_mem.set_group_info("tp", 0, 1, MemoryStore())
    tensor = symm_mem.empty(4, 2)
    handle = symm_mem.rendezvous(tensor, "tp")
    symm_mem.put_signal(torch.full((4, 2), 3.0), handle, 0)
    symm_mem.wait_signal(handle, 0)
    handle.barrier()
    assert tensor.eq(3).all()
    for call, name in (
        (lambda: symm_mem.reduce_scatter_offset(tensor, [tensor], "tp", dim=0), "reduce_scatter_offset"),
        (lambda: symm_mem.SymmetricMemory.memset32(tensor, 0, 1), "memset32_"),
        (lambda: symm_mem.SymmetricMemory.stream_write_value32(tensor, 0, 1), "stream_write_value32_"),
    ):
        with pytest.raises(ImportError, match=f"{name}: .*{reason}"):
            call()
    assert not hasattr(torch.ops.phalanx, "memset32_")  # nothing is registered by half


def test_where_ops_cannot_be_registered_it_warns_and_the_rest_works():  # F20
    run_ranks(without_ops, len(BROKEN), loaded=False)
