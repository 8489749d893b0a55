"""Communication hooks of DistributedDataParallel on the backend `phalanx`. Gloo is the judge."""

from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    register_ddp_comm_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from c10d_groups import join, run_groups

STEPS = 5


def trained(group, register, wrap=lambda optimizer: optimizer):
    """The parameters after each step of a training whose batches differ from rank to rank."""
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.03)  # of several buckets
    register(model)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    noise = torch.Generator().manual_seed(dist.get_rank())
    after = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 64, generator=noise)).square().mean().backward()
        optimizer.step()
        after.append(torch.cat([each.detach().flatten() for each in net.parameters()]))
    return torch.stack(after)


def same_on(group, tensor):
    """Which ranks of the group have the same value as rank 0, bit for bit."""
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor, group=group)
    return [torch.equal(part, parts[0]) for part in parts]


def compressed(kind):
    return lambda group: partial(register_ddp_comm_hook, DDPCommHookType[kind], state=group)


def in_bfloat16(hook, state):
    """DDP refuses torch's hook by its name without a GPU; the hook itself works anywhere."""

    def renamed(state, bucket):
        return hook(state, bucket)

    return lambda group: lambda model: model.register_comm_hook(state(group), renamed)


def power_sgd(hook, **options):
    def registered(group):
        state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, **options)
        return lambda model: model.register_comm_hook(state, hook)

    return registered


# Hooks of torch 2.13 that are left out fail on gloo as well: those that quantize take the value of a future for NCCL's,
# and the batched PowerSGD gives a matrix to a function that wants three dimensions.
HOOKS = {
    **{name: compressed(name) for name in ("ALLREDUCE", "FP16_COMPRESS", "NOOP")},
    "BF16_COMPRESS": in_bfloat16(default_hooks.bf16_compress_hook, lambda group: group),
    "PowerSGD": power_sgd(powerSGD_hook.powerSGD_hook),
    "PowerSGD of rank 4": power_sgd(
        powerSGD_hook.powerSGD_hook, matrix_approximation_rank=4, batch_tensors_with_same_shape=True
    ),
    "PowerSGD without memory": power_sgd(powerSGD_hook.powerSGD_hook, use_error_feedback=False, warm_start=False),
    "PowerSGD in 16 bits": in_bfloat16(
        default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook),
        lambda group: powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2),
    ),
}


def hooked(rank, size):
    join(rank, size)
    gloo = dist.new_group(backend="gloo")
    plain = trained(gloo, HOOKS["ALLREDUCE"](gloo))
    for name, register in HOOKS.items():
        ours, theirs = (trained(group, register(group)) for group in (dist.group.WORLD, gloo))
        assert torch.equal(ours, theirs), name  # a sum of two ranks has one rounding
        assert all(same_on(dist.group.WORLD, ours)) is (name != "NOOP"), name
        # It did its own work, and PowerSGD from the step on that was asked for.
        differs = [step for step in range(STEPS) if not torch.equal(ours[step], plain[step])]
        start = STEPS if name == "ALLREDUCE" else 2 if "Power" in name and "bits" not in name else 0
        assert differs == list(range(start, STEPS)), name
    dist.destroy_process_group()


def test_every_hook_of_torch_gives_what_it_gives_on_gloo():  # P19
    run_groups(hooked, 2, timeout=120)


def local_sgd(rank, size):
    join(rank, size)
    gloo = dist.new_group(backend="gloo")
    results = {}
    for backend, group in (("phalanx", dist.group.WORLD), ("gloo", gloo)):
        pair, _ = dist.new_subgroups(2, backend=backend)
        state = post_localSGD_hook.PostLocalSGDState(group, pair, start_localSGD_iter=1)
        averager = PeriodicModelAverager(period=2, warmup_steps=1, process_group=group)
        after = trained(
            group,
            lambda model, state=state: model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook),
            lambda optimizer, averager=averager: PostLocalSGDOptimizer(optimizer, averager),
        )
        # The first step is that of all ranks, the averages come after the steps 1 and 3, and between them pairs agree.
        everybody, of_pairs = [True] * 4, [True, True, False, False]
        wanted = [everybody, everybody, of_pairs, everybody, of_pairs]
        assert [same_on(group, each) for each in after] == wanted, backend
        results[backend] = after
    torch.testing.assert_close(results["phalanx"], results["gloo"], rtol=1e-5, atol=1e-6)
    averager = HierarchicalModelAverager({2: 2, 4: 4})  # the steps 0, 4, ... of all, the steps 2, 6, ... of pairs
    values = []
    for step in range(4):
        x = torch.nn.Parameter(torch.full((3,), float(rank + 10 * step)))
        x.grad = torch.zeros_like(x)  # or it would be left out
        averager.average_parameters([x])
        values.append(x[0].item())
    assert values == [1.5, 10 + rank, 20 + rank // 2 * 2 + 0.5, 30 + rank]
    dist.destroy_process_group()


def test_local_sgd_averages_over_pairs_and_then_over_all_ranks():  # P19
    run_groups(local_sgd, 4, timeout=120)
