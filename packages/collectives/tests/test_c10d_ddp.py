"""DistributedDataParallel on the backend `phalanx`: what one process computes with the whole batch."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from c10d_groups import join, run_groups


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
        )
        self.unused = torch.nn.Linear(4, 4)
        self.use_all = True

    def forward(self, x):
        y = self.layers(x)
        return self.unused(y) if self.use_all else y


def batch(rank, size):
    torch.manual_seed(1)
    x, y = torch.randn(4 * size, 8), torch.randn(4 * size, 4)
    return x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]


def wanted_grads(model, size):
    """The mean of the gradients that each rank's batch gives."""
    model = copy.deepcopy(model)
    model.zero_grad()
    for rank in range(size):
        x, y = batch(rank, size)
        (torch.nn.functional.mse_loss(model(x), y) / size).backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def train(ddp, rank, size):
    x, y = batch(rank, size)
    torch.nn.functional.mse_loss(ddp(x), y).backward()


def check(model, rank, size, ddp, tolerance=1e-6):
    wanted = wanted_grads(model, size)
    for _ in range(2):  # the buckets of the second round are those of the order of the first
        model.zero_grad()
        train(ddp, rank, size)
        for p, grad in zip(model.parameters(), wanted, strict=True):
            if grad is None:
                assert p.grad is None or not p.grad.any()
            else:
                torch.testing.assert_close(p.grad, grad, rtol=tolerance, atol=tolerance)


def halved(state, bucket):
    """A comm hook that works on the future itself."""
    bucket.buffer().div_(dist.get_world_size())
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def plain(rank, size):
    for more in (
        {},
        {"bucket_cap_mb": 0.0005, "gradient_as_bucket_view": True},
        {"static_graph": True, "process_group": dist.new_group(list(range(size)))},
    ):
        model = Net()
        with torch.no_grad():
            next(model.parameters()).add_(rank)  # DDP takes those of rank 0
        ddp = DistributedDataParallel(model, **more)
        assert torch.equal(next(model.parameters()), next(Net().parameters()))
        check(model, rank, size, ddp)
    model = Net()
    ddp = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=0.0005)
    model.use_all = False
    check(model, rank, size, ddp)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)  # P22: a second one on the same model
    model.use_all = True
    check(model, rank, size, ddp)
    model.zero_grad()
    with ddp.no_sync():
        train(ddp, rank, size)
    train(ddp, rank, size)
    grads = [torch.zeros_like(p) for p in model.parameters()]
    for total, p in zip(grads, model.parameters(), strict=True):
        total.copy_(p.grad)
        dist.broadcast(total, 0)
        assert torch.equal(total, p.grad)


def hooks(rank, size):  # P19
    for hook, tolerance in (
        (default_hooks.allreduce_hook, 1e-6),
        (halved, 1e-6),
        (default_hooks.fp16_compress_hook, 2e-3),
        (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 2e-3),
    ):
        model = Net()
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
        ddp.register_comm_hook(None, hook)
        check(model, rank, size, ddp, tolerance)
    model = Net()
    ddp = DistributedDataParallel(model)
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    check(model, rank, size, ddp)


class NoStream:
    """The stream of a device where all is over when it was called. Torch 2.13 asks for one; the CPU has none."""

    def __enter__(self): ...

    def __exit__(self, *error): ...

    def wait_stream(self, stream): ...


class NoEvent:
    """An event of such a stream."""

    waits = 0

    def record(self): ...

    def wait(self, stream):
        NoEvent.waits += 1


def in_backward(rank, size):  # P21
    torch.accelerator.current_stream = NoStream  # in this process, which ends soon
    for more in ({"bucket_cap_mb": 0.0005}, {"gradient_as_bucket_view": True}):
        model, plain = Net(), Net()
        grads = wanted_grads(plain, size)
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.5})
        ddp = DistributedDataParallel(model, **more)
        train(ddp, rank, size)
        for p, q, grad in zip(model.parameters(), plain.parameters(), grads, strict=True):
            torch.testing.assert_close(p, q - 0.5 * grad, rtol=1e-5, atol=1e-6)
            assert p.grad is None


class Mixed(torch.nn.Module):
    """A layer that is used twice, one without gradient, and one that DDP ignores."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.twice, self.frozen = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4).requires_grad_(False)
        self.ignored = torch.nn.Linear(4, 4, bias=False)
        self.register_buffer("scale", torch.tensor(0.5))
        self.seen = {}

    def forward(self, x):
        named = {"x": x, "scale": self.scale, **dict(self.named_parameters())}
        self.seen = {name: each.dtype for name, each in named.items()}
        y = self.frozen(self.twice(torch.relu(self.twice(x)))) * self.scale
        return self.ignored(y.float())


def half(model, group, reduced):
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["ignored.weight"])
    precision = _MixedPrecision(param_dtype=torch.float16, reduce_dtype=reduced, buffer_dtype=torch.float16)
    return DistributedDataParallel(model, process_group=group, mixed_precision=precision, bucket_cap_mb=0.0005)


def mixed_precision(rank, size):  # P20
    torch.Stream, torch.Event, torch.accelerator.current_stream = NoStream, NoEvent, NoStream  # in this process
    gloo = dist.new_group(backend="gloo")
    wanted = {"x", "scale", "twice.weight", "twice.bias", "frozen.weight", "frozen.bias"}
    # How far from the gradients in 32 bits those are that are computed and reduced in 16.
    for reduced, tolerance in ((torch.float16, 2e-2), (torch.bfloat16, 4e-2)):
        ours, theirs = Mixed(), Mixed()
        grads = wanted_grads(ours, size)
        one, other = half(ours, None, reduced), half(theirs, gloo, reduced)
        before = {name: p.detach().clone() for name, p in ours.named_parameters()}
        for turn in range(3):
            for ddp in (one, other):
                ddp.zero_grad()
                NoEvent.waits = 0
                train(ddp, rank, size)
                assert NoEvent.waits == len(list(ddp.module.modules()))  # also for the one that is used twice: once
                dtypes = ddp.module.seen
                assert {name for name, dtype in dtypes.items() if dtype is torch.float16} == wanted
                assert dtypes["ignored.weight"] is torch.float32
            for (name, p), q, grad in zip(ours.named_parameters(), theirs.parameters(), grads, strict=True):
                assert p.dtype is torch.float32 and torch.equal(p, before[name])  # full precision again
                # In torch 2.13 the first gradients are noise, with gloo too, until its reducer has rebuilt the buckets.
                if turn > 0 and p.requires_grad:
                    assert p.grad.dtype is torch.float32 and torch.equal(p.grad, q.grad)  # gloo's numbers
                if turn > 0 and name.startswith("twice"):
                    torch.testing.assert_close(p.grad, grad, rtol=tolerance, atol=tolerance)
        mine = ours.ignored.weight.grad.clone()
        dist.broadcast(mine, 0)
        assert torch.equal(mine, ours.ignored.weight.grad) is (rank == 0)  # that of this rank's batch only


def uneven_inputs(rank, size):
    model = torch.nn.Linear(2, 1, bias=False)
    ddp = DistributedDataParallel(model)
    with ddp.join():
        for _ in range(1 + rank):
            ddp(torch.ones(1, 2)).sum().backward()
    dist.barrier()


def everything(rank, size):
    join(rank, size)
    plain(rank, size)
    hooks(rank, size)
    mixed_precision(rank, size)
    uneven_inputs(rank, size)
    dist.destroy_process_group()


def test_ddp_computes_what_one_process_computes():  # P18 to P20 P22
    run_groups(everything, 2, timeout=90)


def optimizes_in_backward(rank, size):
    join(rank, size)
    in_backward(rank, size)
    dist.destroy_process_group()


def test_an_optimizer_runs_within_the_backward_pass():  # P21
    if torch.version.cuda is not None and not torch.cuda.is_available():
        pytest.skip("needs a GPU: in a torch that was built for CUDA, DDP makes a stream of one for it")
    run_groups(optimizes_in_backward, 2, timeout=90)
