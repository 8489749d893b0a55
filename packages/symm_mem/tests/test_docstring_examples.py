"""The examples in docstrings."""

import os

import pytest

from c10d_groups import has_compiler
from compiled import native_folder
from docstring_examples import check_examples
from phalanx.symm_mem._pool import _build

WITHOUT = (
    "Allocator",  # a protocol; `register_allocator` shows one
    "WorldAllocator",
    "CudaMemPool",  # needs a GPU, as do these functions
    "export_fabric",
    "import_fabric",
    "GroupInfo",  # these are results of functions
    "MemStats",
    "PersistentBlock",
    "PoolSegment",
    "RankContext",
)


POOLS = ("MemPool", "get_mem_pool", "use_mem_pool")  # compiled at their first use


@pytest.mark.timeout(600)
def test_every_public_function_has_an_example_that_gives_what_it_says(monkeypatch):
    if has_compiler():
        monkeypatch.setenv("PHALANX_NATIVE", os.environ.get("PHALANX_NATIVE") or str(native_folder("pool")))
        _build.module()  # here, as ranks may not take so long
    check_examples("phalanx.symm_mem", without=WITHOUT, left_out=() if has_compiler() else POOLS)
