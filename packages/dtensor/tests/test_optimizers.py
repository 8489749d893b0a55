"""Optimizers on DTensor parameters: the values of one process."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from phalanx.dtensor import DTensor, Replicate, Shard, SizedShard, distribute_module, distribute_tensor
from ranks import run_ranks

R = Replicate()
STEPS = 3

KINDS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.05, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
}
WAYS = ({"foreach": True}, {"foreach": False}, {"fused": True})

PLACEMENTS = {
    "replicated": lambda name: [R],
    "sharded": lambda name: [Shard(0)],
    "mixed": lambda name: {
        "0.weight": [Shard(0)],
        "0.bias": [Shard(0)],
        "2.weight": [Shard(1)],
        "2.bias": [R],
        "scale": [SizedShard(0, (3, 1))],
    }[name],
}


def model():
    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 4))
    net.scale = torch.nn.Parameter(torch.randn(4))
    return net


def distributed(mesh, kind):
    def place(name, module, mesh):
        for key, one in list(module.named_parameters(recurse=False)):
            path = f"{name}.{key}" if name else key
            made = distribute_tensor(one.detach(), mesh, PLACEMENTS[kind](path))
            module.register_parameter(key, torch.nn.Parameter(made))

    return distribute_module(model(), mesh, place)


def batch(step):
    numbers = torch.Generator().manual_seed(step)
    return torch.randn(6, 4, generator=numbers), torch.randn(6, 4, generator=numbers)


def train(net, optimizer, place, clip=None, scaler=None):
    norms = []
    for step in range(STEPS):
        x, y = map(place, batch(step))
        loss = torch.nn.functional.mse_loss(net(x) * net.scale, y)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clip is not None:
            norm = clip(net.parameters())
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return [one.full_tensor() if isinstance(one, DTensor) else one for one in net.parameters()], norms


def steps(rank, size, kind):
    mesh = dist.init_device_mesh("cpu", (size,))
    for optimizer, options in KINDS.values():
        expected, _ = train(net := model(), optimizer(net.parameters(), foreach=False, **options), lambda one: one)
        for way in WAYS:
            net = distributed(mesh, kind)
            made = optimizer(net.parameters(), **way, **options)
            got, _ = train(net, made, lambda one: distribute_tensor(one, mesh, [R]))
            for name, mine, want in zip(dict(net.named_parameters()), got, expected, strict=True):
                torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-6, msg=f"{kind} {optimizer} {way} {name}")
            for parameter in net.parameters():
                for state in made.state[parameter].values():
                    # SGD's momentum begins as the gradient, and has its placements.
                    if isinstance(state, DTensor) and state.ndim and optimizer is not torch.optim.SGD:
                        assert state.placements == parameter.placements, (optimizer, way)


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_optimizers_give_the_weights_of_one_process(kind):
    run_ranks(steps, 2, kind, start_torch=True, timeout=120)


def clipped(rank, size):
    mesh = dist.init_device_mesh("cpu", (size,))
    clips = {
        "2": lambda parameters: clip_grad_norm_(parameters, 0.05),
        "1": lambda parameters: clip_grad_norm_(parameters, 0.05, norm_type=1),
        "inf": lambda parameters: clip_grad_norm_(parameters, 0.01, norm_type=float("inf")),
        "one by one": lambda parameters: clip_grad_norm_(parameters, 0.05, foreach=False),
        "value": lambda parameters: clip_grad_value_(parameters, 0.01) or torch.zeros(()),
    }
    for name, clip in clips.items():
        net = model()
        expected, norms = train(net, torch.optim.SGD(net.parameters(), lr=1.0), lambda one: one, clip)
        for kind in PLACEMENTS:
            net = distributed(mesh, kind)
            optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
            got, seen = train(net, optimizer, lambda one: distribute_tensor(one, mesh, [R]), clip)
            torch.testing.assert_close(seen, norms, msg=f"{name} {kind}")
            torch.testing.assert_close(got, expected, msg=f"{name} {kind}")


def test_gradients_are_clipped_by_the_norm_of_all_ranks():
    run_ranks(clipped, 2, start_torch=True, timeout=120)


def scaled(rank, size):
    mesh = dist.init_device_mesh("cpu", (size,))
    net = model()
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    expected, _ = train(net, torch.optim.SGD(net.parameters(), lr=0.5), lambda one: one, None, scaler)
    net = distributed(mesh, "mixed")
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    place = lambda one: distribute_tensor(one, mesh, [R])  # noqa: E731
    got, _ = train(net, torch.optim.SGD(net.parameters(), lr=0.5), place, None, scaler)
    torch.testing.assert_close(got, expected)
    # An infinity on one rank alone makes all ranks leave the step out.
    before = [one.to_local().clone() for one in net.parameters()]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    scaler.scale(net(place(batch(0)[0])).sum()).backward()
    if rank == 1:
        net[0].weight.grad.to_local()[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 64.0, scaler.get_scale()
    assert all(torch.equal(a, b.to_local()) for a, b in zip(before, net.parameters(), strict=True))


def test_the_gradient_scaler_sees_infinities_of_all_ranks():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_ranks(scaled, 2, start_torch=True)
