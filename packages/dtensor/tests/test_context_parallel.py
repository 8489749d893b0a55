"""Attention over sequences of which each rank has a part: values and all gradients against one process."""

import contextlib
import copy
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from phalanx.dtensor import DTensor, Replicate, Shard, SizedShard, StridedShard, distribute_tensor
from phalanx.dtensor._algorithms.ring_attention import pieces
from phalanx.dtensor._redistribute import comm
from phalanx.dtensor.experimental import context_parallel, context_parallel_unshard
from phalanx.dtensor.experimental._context_parallel import head_and_tail
from ranks import run_ranks

# ---- which queries see which keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "ranks"), [(8, 8, 2), (13, 13, 3), (5, 5, 4), (9, 6, 2), (4, 11, 3), (1, 1, 2)]
)
def test_pieces_cover_what_attention_sees_once(queries, keys, ranks, causal):
    seen = torch.zeros(queries, keys, dtype=torch.int64)
    for q_place, k_place in itertools.product(range(ranks), repeat=2):
        q_runs, k_runs = head_and_tail(queries, ranks, q_place), head_and_tail(keys, ranks, k_place)
        q_at = torch.cat([torch.arange(a, a + n) for a, n in q_runs] or [torch.arange(0)])
        k_at = torch.cat([torch.arange(a, a + n) for a, n in k_runs] or [torch.arange(0)])
        for one in pieces(q_runs, k_runs, causal):
            block = torch.ones(one.q_end - one.q, one.k_end - one.k, dtype=torch.int64)
            if one.causal:
                assert block.shape[0] == block.shape[1]
                block = block.tril()
            seen[q_at[one.q : one.q_end].unsqueeze(1), k_at[one.k : one.k_end]] += block
    wanted = torch.ones(queries, keys, dtype=torch.int64)
    assert torch.equal(seen, wanted.tril() if causal else wanted)


def test_head_and_tail_give_all_ranks_the_same_work():
    work = []
    for place in range(4):
        runs = head_and_tail(32, 4, place)
        work.append(sum(begin + at + 1 for begin, count in runs for at in range(count)))
    assert len(set(work)) == 1
    lengths = [sum(count for _, count in head_and_tail(13, 4, place)) for place in range(4)]
    assert sum(lengths) == 13


# ---- DTensors --------------------------------------------------------------------------------------------------------


def close(ours, theirs, **kwargs):
    ours = ours.full_tensor() if isinstance(ours, DTensor) else ours
    torch.testing.assert_close(ours.detach(), theirs.detach(), **kwargs)


def refuse(*args):
    raise AssertionError("keys are gathered")


def attends(mesh, placements, lengths, causal, dtype=torch.float64, scale=None, heads=4, **tolerance):
    torch.manual_seed(1)
    whole = [torch.randn(2, heads, length, 8, dtype=dtype) for length in (lengths[0], lengths[1], lengths[1])]
    upstream = torch.randn(2, heads, lengths[0], 8, dtype=dtype)
    theirs = [one.clone().requires_grad_() for one in whole]
    wanted = functional.scaled_dot_product_attention(*theirs, is_causal=causal, scale=scale)
    wanted.backward(upstream)
    ours = [distribute_tensor(one, mesh, placements).requires_grad_() for one in whole]
    given = distribute_tensor(upstream, mesh, placements)
    kept = comm._all_gather, comm._all_to_all, comm._shard_dim_alltoall
    comm._all_gather = comm._all_to_all = comm._shard_dim_alltoall = refuse
    try:
        found = functional.scaled_dot_product_attention(*ours, is_causal=causal, scale=scale)
        assert found.placements == tuple(placements)
        found.backward(given)
    finally:
        comm._all_gather, comm._all_to_all, comm._shard_dim_alltoall = kept
    close(found, wanted, **tolerance)
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad.placements == tuple(placements)
        close(one.grad, other.grad, **tolerance)


def dtensors_on_a_line(rank, world_size):
    mesh = dist.init_device_mesh("cpu", (world_size,))
    for causal in (False, True):
        attends(mesh, [Shard(2)], (16, 16), causal)
        attends(mesh, [Shard(2)], (13, 13), causal, scale=0.3)  # uneven
        attends(mesh, [Shard(2)], (5, 5), causal)  # on 4 ranks the last one has nothing
        attends(mesh, [Shard(2)], (9, 14), causal)
        attends(mesh, [StridedShard(2, 2)], (16, 16), causal)
        sizes = (1, 9) if world_size == 2 else (1, 0, 4, 5)
        attends(mesh, [SizedShard(2, sizes)], (10, 10), causal)
    attends(mesh, [Shard(2)], (32, 32), True, dtype=torch.float32)
    attends(mesh, [Shard(2)], (16, 16), True, dtype=torch.bfloat16, rtol=0.05, atol=0.05)
    # A gradient that is not sharded, which is what sum() gives.
    x = torch.randn(1, 2, 12, 8, dtype=torch.float64)
    own = distribute_tensor(x, mesh, [Shard(2)]).requires_grad_()
    x.requires_grad_()
    functional.scaled_dot_product_attention(own, own, own, is_causal=True).sum().backward()
    functional.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
    close(own.grad, x.grad)
    # What the ring is not for is right as well: a mask, and inputs that are sharded in different ways.
    mask = torch.randn(12, 12, dtype=torch.float64)
    x = x.detach()
    parts = [distribute_tensor(x, mesh, [one]) for one in (Shard(2), Shard(1), Replicate())]
    close(functional.scaled_dot_product_attention(*parts), functional.scaled_dot_product_attention(x, x, x))
    own = distribute_tensor(x, mesh, [Shard(2)])
    shared = distribute_tensor(mask, mesh, [Replicate()])
    close(
        functional.scaled_dot_product_attention(own, own, own, shared),
        functional.scaled_dot_product_attention(x, x, x, mask),
    )


@pytest.mark.parametrize("world_size", [2, 4])
def test_dtensors_sharded_on_the_sequence_attend_round_the_ring(world_size):
    run_ranks(dtensors_on_a_line, world_size, start_torch=True, timeout=120)


def dtensors_on_a_plane(rank, world_size):
    mesh = dist.init_device_mesh("cpu", (2, 2))
    for placements in ([Shard(0), Shard(2)], [Shard(2), Shard(1)], [Replicate(), Shard(2)]):
        attends(mesh, placements, (8, 8), True)
    # Both mesh dims cut the sequence, or heads are cut unevenly: right, if not round the ring.
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    for placements in ([Shard(2), Shard(2)], [Shard(1), Shard(2)]):
        own = distribute_tensor(x, mesh, placements)
        close(
            functional.scaled_dot_product_attention(own, own, own, is_causal=True),
            functional.scaled_dot_product_attention(x, x, x, is_causal=True),
        )


def test_dtensors_attend_on_a_mesh_of_two_by_two():
    run_ranks(dtensors_on_a_plane, 4, start_torch=True, timeout=120)


# ---- the context -----------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Position embedding, q, k and v of several heads, and a projection."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x, positions):
        y = self.qkv(x + positions).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(*y.unbind(), is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def in_the_context(rank, world_size):
    mesh = dist.init_device_mesh("cpu", (world_size,))
    for length in (16, 13, 6):
        torch.manual_seed(2)
        model = Model().double()
        x, labels = (torch.randn(2, length, 16, dtype=torch.float64) for _ in range(2))
        positions = torch.randn(length, 16, dtype=torch.float64)
        wanted = model(x, positions)
        (wanted - labels).square().sum().backward()
        grads = [one.grad.clone() for one in model.parameters()]
        model.zero_grad()
        kept = [one.clone() for one in (x, labels, positions)]
        with context_parallel(
            mesh, buffers=[x, labels, positions], buffer_seq_dims=[1, 1, 0], no_restore_buffers={labels}
        ):
            assert (
                positions.shape[0] == x.shape[1] == sum(count for _, count in head_and_tail(length, world_size, rank))
            )
            y = model(x, positions)
            (y - labels).square().sum().backward()
        close(context_parallel_unshard(mesh, [y.detach()], [1])[0], wanted)
        for one, other in zip(model.parameters(), grads, strict=True):
            dist.all_reduce(one.grad)
            close(one.grad, other)
        assert torch.equal(x, kept[0]) and torch.equal(positions, kept[2]) and labels.shape != kept[1].shape
    # Three dims, grouped queries, full attention; without buffers the parts are taken for equal ones.
    q, k = torch.randn(8, 8, 4), torch.randn(2, 8, 4)
    wanted = functional.scaled_dot_product_attention(q[None], k[None], k[None], enable_gqa=True)[0]
    own_q, own_k = (torch.cat([one[:, a : a + n] for a, n in head_and_tail(8, world_size, rank)], 1) for one in (q, k))
    with context_parallel(mesh):
        y = functional.scaled_dot_product_attention(own_q[None], own_k[None], own_k[None], enable_gqa=True)[0]
        z = functional.scaled_dot_product_attention(own_q, own_q, own_q)
    close(context_parallel_unshard(mesh, [y, z], [1, -2])[0], wanted)
    close(context_parallel_unshard(mesh, [z], [1])[0], functional.scaled_dot_product_attention(q, q, q))
    refusals(mesh)


def refusals(mesh):
    x = torch.ones(1, 1, 8, 4)
    with (
        pytest.raises(ValueError, match="one dim for each buffer: there are 0 for 1"),
        context_parallel(mesh, buffers=[x]),
    ):
        pass
    with pytest.raises(ValueError, match=r"buffer 0 has shape \(1, 1, 8, 4\), which has no dim 4"):
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[4]):
            pass
    with pytest.raises(ValueError, match="no_restore_buffers has a tensor that is not one of the buffers"):
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2], no_restore_buffers={torch.ones(1)}):
            pass
    with pytest.raises(ValueError, match="buffer 0 requires gradients"):
        with context_parallel(mesh, buffers=[x.clone().requires_grad_()], buffer_seq_dims=[2]):
            pass
    with context_parallel(mesh):
        with pytest.raises(NotImplementedError, match="with dropout"):
            functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        with pytest.raises(NotImplementedError, match="with a mask"):
            functional.scaled_dot_product_attention(x, x, x, torch.ones(8, 8))
    # The buffers are whole again after an error, too.
    with contextlib.suppress(KeyError), context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        assert x.shape[2] < 8
        raise KeyError
    assert x.shape == (1, 1, 8, 4)
    with pytest.raises(ValueError, match="one dim for each buffer: 0 for 1"):
        context_parallel_unshard(mesh, [x], [])
    square = dist.init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("dp", "cp"))
    with pytest.raises(ValueError, match="must have one dim, and"), context_parallel(square):
        pass


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_model_in_the_context_is_that_of_one_process(world_size):
    run_ranks(in_the_context, world_size, start_torch=True, timeout=120)


# ---- computed again, and compiled ------------------------------------------------------------------------------------


class Attends(nn.Module):
    """Attention of features that a parameter makes, with positions from a buffer that the context cuts."""

    def __init__(self, positions):
        super().__init__()
        self.linear, self.positions = nn.Linear(4, 4), positions

    def forward(self, x):
        y = (self.linear(x) + 1) * self.positions  # saved for the gradient of the first
        return functional.scaled_dot_product_attention(y, y, y, is_causal=True)


def plain(model, x):
    return model(x)


def reentrant(model, x):
    return checkpoint(model, x, use_reentrant=True)


def not_reentrant(model, x):
    return checkpoint(model, x, use_reentrant=False)


def unchecked(model, x):
    return checkpoint(model, x, use_reentrant=False, determinism_check="none")


def nested(model, x):
    return checkpoint(not_reentrant, model, x, use_reentrant=False)


def nested_in_reentrant(model, x):
    return checkpoint(not_reentrant, model, x, use_reentrant=True)


def selective(model, x):
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return checkpoint(model, x, use_reentrant=False, context_fn=contexts)


def by_hooks(model, x):
    from torch.distributed._composable import checkpoint as composable

    return composable(model)(x)


def wrapped(model, x):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(model)(x)


def compiled(model, x):
    return torch.compile(model, backend="aot_eager", fullgraph=True)(x)


def compiled_and_checkpointed(model, x):
    return checkpoint(torch.compile(model, backend="aot_eager", fullgraph=True), x, use_reentrant=False)


def checkpointed_and_compiled(model, x):
    # Dynamo shows a mode the checkpoint, and not what is in it: it is not compiled.
    return torch.compile(lambda y: checkpoint(model, y, use_reentrant=False), backend="aot_eager")(x)


EAGER = (plain, reentrant, not_reentrant, unchecked, nested, nested_in_reentrant, selective, by_hooks, wrapped)
COMPILED = (compiled, compiled_and_checkpointed, checkpointed_and_compiled)


def computed_again(rank, world_size, ways):
    mesh = dist.init_device_mesh("cpu", (world_size,))
    for length, way, after in itertools.product((16, 13), ways, (False, True)):
        torch.manual_seed(3)
        x, upstream = torch.randn(2, 1, 2, length, 4, dtype=torch.float64).unbind()
        positions = torch.randn(length, 4, dtype=torch.float64)
        model = Attends(positions).double()
        mine, whole = copy.deepcopy(model), x.clone().requires_grad_()
        (model(whole) * upstream).sum().backward()
        mine.positions = own_positions = positions.clone()
        cut = [x.clone(), upstream.clone(), own_positions]
        with context_parallel(mesh, buffers=cut, buffer_seq_dims=[2, 2, 0]):
            leaf, given = cut[0].clone().requires_grad_(), cut[1].clone()
            y = way(mine, leaf)
            if not after:
                y.backward(given)
        if after and way is reentrant:
            # The recorded product has the buffer itself, which is whole again: refused, and not wrong.
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward(given)
            continue
        if after and way in (plain, compiled):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward(given)
            continue
        if after:
            y.backward(given)
        assert torch.equal(own_positions, positions)
        close(context_parallel_unshard(mesh, [leaf.grad], [2])[0], whole.grad)
        for one, other in zip(mine.parameters(), model.parameters(), strict=True):
            dist.all_reduce(one.grad)
            close(one.grad, other.grad)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_attention_in_a_checkpoint_is_computed_again_as_in_the_context(world_size):
    run_ranks(computed_again, world_size, EAGER, start_torch=True, timeout=120)


@pytest.mark.slow
def test_a_compiled_function_attends_to_whole_sequences_in_the_context():
    run_ranks(computed_again, 2, COMPILED, start_torch=True, timeout=240)


def lengths_that_one_rank_mistakes(rank, world_size):
    mesh = dist.init_device_mesh("cpu", (world_size,))
    # Rank 0 has 2 elements of both lengths, 5 and 6, and rank 1 has 3 and 4: both refuse.
    lengths = [[sum(n for _, n in head_and_tail(whole, 2, place)) for place in range(2)] for whole in (5, 6)]
    assert lengths[0][0] == lengths[1][0] or lengths[0][1] == lengths[1][1]
    x, z = torch.randn(1, 1, 5, 4), torch.randn(1, 1, 6, 4)
    with context_parallel(mesh, buffers=[x, z], buffer_seq_dims=[2, 2]):
        for one in (x, z):
            with pytest.raises(ValueError, match="two buffers of different lengths have parts of one length on a rank"):
                functional.scaled_dot_product_attention(one, one, one)


def test_a_length_that_one_rank_cannot_tell_is_refused_by_all():
    run_ranks(lengths_that_one_rank_mistakes, 2, start_torch=True)
