"""The private parts of torch that this package relies on are where they were."""

import torch.distributed as dist

from phalanx.symm_mem import _torch_compat
from ranks import run_ranks


def finds_groups(rank, world_size):
    world = dist.group.WORLD
    assert _torch_compat.process_group_named(world.group_name) is world, (
        "torch.distributed.distributed_c10d._resolve_process_group has changed: mend phalanx/symm_mem/_torch_compat.py"
    )
    assert _torch_compat.process_group_named("no such group") is None
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    stores = [_torch_compat.store_of(group) for group in (first, second)]
    stores[0].set(f"from {rank}", b"first")
    assert stores[0].get(f"from {1 - rank}") == b"first"
    assert not stores[1].check([f"from {rank}"]), (
        "torch.distributed.distributed_c10d._get_process_group_store no longer gives each group a prefix of its own: "
        "mend phalanx/symm_mem/_torch_compat.py"
    )


def test_groups_are_found_by_name_and_have_stores_of_their_own():
    run_ranks(finds_groups, 2, start_torch=True)
