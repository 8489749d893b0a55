"""torch's fully_shard over modules with parallel styles of this package."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor
import torch.distributed.tensor.parallel
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import phalanx.dtensor
import phalanx.dtensor.parallel
from phalanx.dtensor import DTensor, Replicate, Shard, SizedShard, StridedShard, distribute_tensor
from phalanx.dtensor._fallback import ReplicatedFallback
from ranks import run_ranks

BATCH = 4


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Model(nn.Module):
    """Sizes that do not divide by the number of ranks, parameters that are not parallel, and one that is used twice."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList([Block(5, 7), Block(5, 9)])
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model():
    torch.manual_seed(5)
    return Model()


def tokens(step):
    return torch.randint(11, (BATCH, 3), generator=torch.Generator().manual_seed(step))


def loss_of(net, rows):
    logits = net(rows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def styled(net, mesh, library=phalanx.dtensor):
    """Styles of either library on the blocks of a model; the embedding stays as it is."""
    styles = library.parallel
    for block in net.blocks:
        styles.parallelize_module(
            block, mesh, {"up": styles.ColwiseParallel(use_local_output=False), "down": styles.RowwiseParallel()}
        )
    return net


def sharded(net, mesh, library=phalanx.dtensor, compiled=None, **options):
    styled(net, mesh["tp"], library)
    for block in net.blocks:
        if compiled is not None:
            block.compile(backend=compiled, fullgraph=True)
        fully_shard(block, mesh=mesh["dp"], **options)
    return fully_shard(net, mesh=mesh["dp"], **options)


def meshes(shape=(2, 2)):
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))


def train(net, steps, mesh=None):
    """Losses of the whole batch, and the norms of gradients before they were cut."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    seen = []
    for step in range(steps):
        rows = tokens(step)
        if mesh is not None:
            rows = rows.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
        loss = loss_of(net, rows)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        if mesh is not None:
            dist.all_reduce(whole, group=mesh["dp"].get_group())
            whole /= mesh["dp"].size()
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        seen.append((whole.item(), norm.item()))
    return optimizer, seen


def replicate_arg(net):
    return {name: one.detach().full_tensor() for name, one in net.named_parameters()}


def trained(rank, size, steps):
    mesh = meshes()
    net = sharded(model(), mesh)
    # The parameters that FSDP manages are all of this package, and on one mesh.
    placed = {name: one.placements for name, one in net.named_parameters()}
    assert all(type(one) is DTensor for one in net.parameters())
    assert placed["blocks.0.up.weight"] == (StridedShard(0, 2), Shard(0))
    assert placed["blocks.0.down.weight"] == (Shard(0), Shard(1))
    assert placed["blocks.0.down.bias"] == placed["blocks.0.norm.weight"] == (Shard(0), Replicate())
    assert placed["embed.weight"] == placed["norm.weight"] == (Shard(0), Replicate())
    for name, one in model().named_parameters():
        assert torch.equal(net.get_parameter(name).full_tensor(), one), name
    alone = model()
    _, wanted = train(alone, steps)
    _, got = train(net, steps, mesh)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    for name, one in alone.named_parameters():
        torch.testing.assert_close(net.get_parameter(name).full_tensor(), one.detach(), rtol=1e-3, atol=1e-4)
    assert wanted[-1][0] < wanted[0][0] - 0.1


def test_losses_over_two_by_two_ranks_are_those_of_one_process():
    run_ranks(trained, 4, 20, start_torch=True)


def like_theirs(rank, size):
    """Mixed precision, accumulated gradients, offloading, replicated groups: as torch does it with its own DTensor."""
    mesh = meshes()
    halves = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options in (
        {"mp_policy": halves},
        {"reshard_after_forward": False},
        {"offload_policy": CPUOffloadPolicy(False)},
    ):
        results = []
        for library in (phalanx.dtensor, torch.distributed.tensor):
            net = sharded(model(), mesh, library, **options)
            assert type(net.blocks[0].up.weight) is library.DTensor
            net.set_requires_gradient_sync(False)
            loss_of(net, tokens(rank // 2)).backward()
            net.set_requires_gradient_sync(True)
            loss_of(net, tokens(7 + rank // 2)).backward()
            results.append({name: one.grad.full_tensor() for name, one in net.named_parameters()})
            assert all(one.dtype == torch.float32 for one in results[-1].values())
        tolerance = {"rtol": 5e-2, "atol": 1e-2} if "mp_policy" in options else {}
        torch.testing.assert_close(*results, **tolerance)
    # Each of two replicas is sharded over one rank.
    mesh = dist.init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    net = styled(model(), mesh["tp"])
    fully_shard(net, mesh=mesh["replicate", "shard"])
    assert net.blocks[0].up.weight.placements == (Replicate(), StridedShard(0, 2), Shard(0))
    loss_of(net, tokens(3).chunk(2)[rank // 2]).backward()
    alone = model()
    loss_of(alone, tokens(3)).backward()
    for name, one in alone.named_parameters():
        torch.testing.assert_close(net.get_parameter(name).grad.full_tensor(), one.grad, rtol=1e-4, atol=1e-5)


def test_options_of_fully_shard_do_what_they_do_with_torchs_tensors():
    run_ranks(like_theirs, 4, start_torch=True)


def compiled(rank, size):
    mesh = meshes()
    net, alone = sharded(model(), mesh, compiled="aot_eager"), model()
    _, wanted = train(alone, 3)
    _, got = train(net, 3, mesh)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    for name, one in alone.named_parameters():
        torch.testing.assert_close(net.get_parameter(name).full_tensor(), one.detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_compiled_blocks_are_sharded():
    run_ranks(compiled, 4, start_torch=True, timeout=180)


def scaled(rank, size):
    """Gradients that are not finite on one rank alone keep every rank from its step."""
    net, alone = sharded(model(), meshes()), model()
    scales = []
    for one, poisoned in ((net, rank == 3), (alone, True)):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.02)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            loss = loss_of(one, tokens(step))
            scaler.scale(loss * (torch.inf if step == 1 and poisoned else 1.0)).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("error", ReplicatedFallback)
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales == [4.0, 4.0]
    for name, one in alone.named_parameters():
        torch.testing.assert_close(net.get_parameter(name).full_tensor(), one.detach(), rtol=1e-3, atol=1e-4)


def test_ranks_agree_on_gradients_that_are_not_finite():
    run_ranks(scaled, 4, start_torch=True)


def from_one_mesh(rank, size):
    """Parameters that are on the whole mesh already."""
    mesh = meshes()
    net = nn.Linear(4, 8)
    alone = copy.deepcopy(net)
    for one in (net, alone):
        torch.manual_seed(1)
        nn.init.normal_(one.weight)
        nn.init.normal_(one.bias)
    net.weight = nn.Parameter(distribute_tensor(net.weight.detach(), mesh, [Replicate(), Shard(0)]))
    net.bias = nn.Parameter(distribute_tensor(net.bias.detach(), mesh, [Replicate(), Shard(0)]))
    fully_shard(net, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    assert net.weight.placements == (StridedShard(0, 2), Shard(0)) and net.weight.device_mesh == mesh
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    net(distribute_tensor(x, mesh, [Shard(0), Replicate()])).pow(2).mean().backward()
    alone(x).pow(2).mean().backward()
    # fully_shard takes the mean over ranks, and here the loss is one of all ranks already.
    for mine, theirs in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor() * 2, theirs.grad)


def test_parameters_on_the_whole_mesh_are_sharded_over_a_part_of_its_dims():
    run_ranks(from_one_mesh, 4, start_torch=True)


def deferred(rank, size):
    """Parameters that are made on the device meta, sharded, and then filled."""
    mesh = meshes()
    with torch.device("meta"):
        net = Model()
    sharded(net, mesh)
    net.to_empty(device="cpu")
    values = model().state_dict()
    set_model_state_dict(net, dict(values), options=StateDictOptions(full_state_dict=True))
    alone = model()
    _, wanted = train(alone, 2)
    _, got = train(net, 2, mesh)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_a_model_made_on_meta_is_filled_after_it_is_sharded():
    run_ranks(deferred, 4, start_torch=True)


def test_a_part_of_an_uneven_part_is_what_its_placements_say():
    """Over 4 x 2 ranks, where the order in which a dim was sharded matters."""
    for rank in (0, 1, 4, 5, 7):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
        try:
            mesh = meshes((4, 2))
            for rows in (1, 7, 8, 9, 14, 17, 20):
                for style in (Shard(0), SizedShard(0, (rows // 3, rows - rows // 3)), StridedShard(0, 3)):
                    net = nn.Linear(3, rows, bias=False)
                    weight = distribute_tensor(
                        torch.arange(3.0 * rows).view(rows, 3), mesh["tp"], [style], src_data_rank=None
                    )
                    own = weight.to_local()
                    net.weight = nn.Parameter(weight)
                    fully_shard(net, mesh=mesh["dp"])
                    chunks = own.chunk(4)
                    mine = mesh["dp"].get_local_rank()
                    wanted = chunks[mine] if mine < len(chunks) else own[:0]
                    spec = net.weight._spec
                    assert torch.equal(net.weight.to_local(), wanted)
                    held = [row for start, length in spec.local_runs[0] for row in range(start, start + length)]
                    assert torch.equal(torch.arange(3.0 * rows).view(rows, 3)[held], wanted), (rows, style, rank)
        finally:
            dist.destroy_process_group()


def gathered(rank, size, path):
    mesh = meshes()
    net = sharded(model(), mesh)
    optimizer, _ = train(net, 2, mesh)
    alone = model()
    own, _ = train(alone, 2)
    full = StateDictOptions(full_state_dict=True)
    weights, states = get_model_state_dict(net, options=full), get_optimizer_state_dict(net, optimizer, options=full)
    assert all(type(one) is torch.Tensor for one in weights.values())
    expected = get_optimizer_state_dict(alone, own)
    torch.testing.assert_close(weights, dict(alone.state_dict()), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(states["state"], expected["state"], rtol=1e-3, atol=1e-4)
    on_cpu = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(on_cpu) == (rank == 0)
    if rank == 0:
        torch.testing.assert_close(on_cpu, weights)

    # They are loaded into a model on another mesh: from every rank, or from the first.
    net.load_state_dict(get_model_state_dict(net))
    for broadcast in (False, True):
        other = meshes((size, 1)) if broadcast else meshes((1, size))
        fresh = sharded(model(), other)
        with torch.no_grad():
            for one in fresh.parameters():
                one.zero_()
        again = torch.optim.AdamW(fresh.parameters(), lr=0.02)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        give = rank == 0 or not broadcast
        set_model_state_dict(fresh, dict(weights) if give else {}, options=options)
        set_optimizer_state_dict(fresh, again, copy.deepcopy(states) if give else {}, options=options)
        torch.testing.assert_close(replicate_arg(fresh), {name: weights[name] for name in replicate_arg(fresh)})
        got = get_optimizer_state_dict(fresh, again, options=full)
        torch.testing.assert_close(got["state"], states["state"])

    # And by files, which torch's own DTensor reads, and writes for this package.
    dcp.save(
        {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=path
    )
    for reader in (torch.distributed.tensor, phalanx.dtensor):
        fresh = sharded(model(), meshes((2, 2) if reader is torch.distributed.tensor else (4, 1)), reader)
        again = torch.optim.AdamW(fresh.parameters(), lr=0.02)
        read = {"model": get_model_state_dict(fresh), "optimizer": get_optimizer_state_dict(fresh, again)}
        dcp.load(read, checkpoint_id=path)
        set_model_state_dict(fresh, read["model"])
        set_optimizer_state_dict(fresh, again, read["optimizer"])
        torch.testing.assert_close(replicate_arg(fresh), {name: weights[name] for name in replicate_arg(fresh)})
        got = get_optimizer_state_dict(fresh, again, options=full)
        torch.testing.assert_close(got["state"], states["state"])
        path += "-theirs"
        dcp.save(
            {"model": get_model_state_dict(fresh), "optimizer": get_optimizer_state_dict(fresh, again)},
            checkpoint_id=path,
        )


def test_state_dicts_are_gathered_loaded_and_read_on_other_meshes(tmp_path):
    run_ranks(gathered, 4, str(tmp_path / "saved"), start_torch=True)
