"""Tensor-parallel modules against the same modules in one process: outputs, all gradients, optimizer steps."""

import contextlib
import copy
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from phalanx.dtensor import DTensor, Replicate, Shard, distribute_tensor
from phalanx.dtensor._redistribute import comm
from phalanx.dtensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    _input_cache,
    parallelize_module,
)
from phalanx.dtensor.parallel.input_reshard import input_reshard
from ranks import run_ranks

WIDTH, HEADS, BATCH, LENGTH = 16, 4, 2, 8


@contextlib.contextmanager
def counted():
    """The number of each collective that DTensors do within."""
    names = ("_all_gather", "_all_reduce", "_reduce_scatter", "_all_to_all", "_shard_dim_alltoall")
    kept = {name: getattr(comm, name) for name in names}
    counts = dict.fromkeys((name[1:] for name in names), 0)

    def counting(name):
        def call(*args):
            counts[name[1:]] += 1
            return kept[name](*args)

        return call

    for name in names:
        setattr(comm, name, counting(name))
    try:
        yield counts
    finally:
        for name in names:
            setattr(comm, name, kept[name])


class Attention(nn.Module):
    """Ranks have some of the heads: the sizes are those that come out of the projections."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        def heads(t):
            return t.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)

        y = functional.scaled_dot_product_attention(
            heads(self.q(x)), heads(self.k(x)), heads(self.v(x)), is_causal=True
        )
        return self.out(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


TENSOR_PARALLEL = {
    "attention.[qkv]": ColwiseParallel(),
    "attention.out": RowwiseParallel(),
    "mlp.gate": ColwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(),
}
SEQUENCE_PARALLEL = {
    "norm[12]": SequenceParallel(use_local_output=True),
    "attention.[qkv]": ColwiseParallel(input_layouts=Shard(1)),
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "mlp.gate": ColwiseParallel(input_layouts=Shard(1)),
    "mlp.up": ColwiseParallel(input_layouts=Shard(1)),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(ours, theirs):
    torch.testing.assert_close(whole(ours).detach(), theirs.detach(), rtol=1e-9, atol=1e-11)


def data(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64, generator=generator)


def models(mesh, plan):
    torch.manual_seed(3)
    reference = Block().double()
    model = copy.deepcopy(reference)
    return reference, parallelize_module(model, mesh, plan)


# ---- training --------------------------------------------------------------------------------------------------------


def trains_as_one_process(mesh, rank):
    for plan, counts_expected in (
        (
            TENSOR_PARALLEL,
            {"all_gather": 0, "all_reduce": 4, "reduce_scatter": 0, "all_to_all": 0, "shard_dim_alltoall": 0},
        ),
        (
            SEQUENCE_PARALLEL,
            {"all_gather": 4, "all_reduce": 0, "reduce_scatter": 4, "all_to_all": 0, "shard_dim_alltoall": 0},
        ),
    ):
        reference, model = models(mesh, plan)
        by_sequence = plan is SEQUENCE_PARALLEL
        optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1, eps=0.01) for one in (reference, model)]
        for step in range(2):
            x = data(step).requires_grad_()
            own = x.detach().chunk(mesh.size(), 1)[rank] if by_sequence else x.detach().clone()
            own.requires_grad_()
            y = reference(x)
            y.square().sum().backward()
            # One reduction of the gradient for q, k and v together and one for gate and up; one after each down.
            with counted() as counts:
                ours = model(own)
                ours.square().sum().backward()
            assert counts == counts_expected, counts
            close(DTensor.from_local(ours, mesh, [Shard(1) if by_sequence else Replicate()]), y)
            close(DTensor.from_local(own.grad, mesh, [Shard(1) if by_sequence else Replicate()]), x.grad)
            for (name, one), (_, other) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
                assert isinstance(one, DTensor) == (by_sequence or "norm" not in name)
                close(one.grad, other.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for one, other in zip(model.parameters(), reference.parameters(), strict=True):
                close(one, other)


def both_kinds_train(rank, world_size):
    trains_as_one_process(dist.init_device_mesh("cpu", (world_size,)), rank)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_block_trains_as_in_one_process_and_q_k_v_reduce_their_gradient_once(world_size):
    run_ranks(both_kinds_train, world_size, start_torch=True)


def data_parallel_trains(rank, world_size):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reference, model = models(mesh["tp"], TENSOR_PARALLEL)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (reference, model)]
    group = mesh.get_group("dp")
    for step in range(2):
        x = data(step)
        reference(x).square().sum().backward()
        model(x.chunk(2)[mesh.get_local_rank("dp")]).square().sum().backward()
        for one in model.parameters():
            dist.all_reduce(one.grad._local_tensor if isinstance(one.grad, DTensor) else one.grad, group=group)
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            close(one.grad, other.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            close(one, other)


def test_a_block_trains_beside_data_parallel_on_a_mesh_of_two_by_two():
    run_ranks(data_parallel_trains, 4, start_torch=True)


# ---- styles one by one -----------------------------------------------------------------------------------------------


def embeddings_and_layouts(rank, world_size):
    mesh = dist.init_device_mesh("cpu", (world_size,))
    indices = torch.tensor([[0, 3, 9, 4], [7, 7, 1, 0]])
    torch.manual_seed(2)
    table = nn.Embedding(10, 6).double()
    for style in (ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())):
        own = parallelize_module(copy.deepcopy(table), mesh, style)
        table.zero_grad()
        table(indices).square().sum().backward()
        y = own(indices)
        close(y, table(indices))
        y.square().sum().backward()
        close(own.weight.grad, table.weight.grad)
    # Uneven: 10 rows and 6 columns over up to 4 ranks; and 5 features.
    torch.manual_seed(4)
    linear = nn.Linear(6, 5).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    for style in (
        ColwiseParallel(output_layouts=Replicate()),
        RowwiseParallel(input_layouts=Replicate()),
        RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0), use_local_output=False),
        ColwiseParallel(use_local_output=False),
    ):
        own = parallelize_module(copy.deepcopy(linear), mesh, style)
        y = own(x)
        assert isinstance(y, DTensor) == (not style.use_local_output)
        close(y, linear(x))
        linear.zero_grad()
        linear(x).square().sum().backward()
        (y.square().sum().full_tensor() if isinstance(y, DTensor) else y.square().sum()).backward()
        close(own.weight.grad, linear.weight.grad)
        close(own.bias.grad, linear.bias.grad)
    # A DTensor is brought where the style wants it.
    own = parallelize_module(copy.deepcopy(linear), mesh, ColwiseParallel(use_local_output=False))
    y = own(distribute_tensor(x, mesh, [Shard(0)]))
    assert y.placements == (Shard(1),)
    close(y, linear(x))
    # src_data_rank: the parameters of rank 1, and each rank's own.
    for source, scale in ((1, 2.0), (None, rank + 1.0)):
        other = copy.deepcopy(linear)
        other.weight.data *= rank + 1
        own = parallelize_module(other, mesh, {"": ColwiseParallel()}, src_data_rank=source)
        close(
            own.weight._local_tensor,
            distribute_tensor(linear.weight.detach() * scale, mesh, [Shard(0)], src_data_rank=None)._local_tensor,
        )


@pytest.mark.parametrize("world_size", [2, 4])
def test_embeddings_uneven_features_layouts_and_sources(world_size):
    run_ranks(embeddings_and_layouts, world_size, start_torch=True)


class TwoInputs(nn.Module):
    def forward(self, x, flag, *, scale=None):
        self.seen = (x, flag, scale)
        return (x * 2 if scale is None else x * scale), flag


def inputs_and_outputs(rank, world_size):
    mesh = dist.init_device_mesh("cpu", (world_size,))
    x = torch.arange(8.0).reshape(4, 2)
    own = x.chunk(world_size)[rank]
    scale = torch.tensor([[1.0, 3.0]])
    module = TwoInputs()
    parallelize_module(
        module,
        mesh,
        PrepareModuleInput(
            input_layouts=(Shard(0), None),
            desired_input_layouts=(Replicate(), None),
            input_kwarg_layouts={"scale": Replicate()},
            desired_input_kwarg_layouts={"scale": Replicate()},
        ),
    )
    y, flag = module(own, "flag", scale=scale)
    assert flag == "flag" and module.seen[0].placements == (Replicate(),)
    close(y, x * scale)
    # Local tensors for the module, an output that is a plain tensor, and None for what is none.
    module = TwoInputs()
    style = PrepareModuleInputOutput(
        input_layouts=(Shard(0), None),
        desired_input_layouts=(Replicate(), None),
        use_local_input=True,
        output_layouts=(Replicate(), None),
        desired_output_layouts=(Shard(1), None),
        use_local_output=False,
    )
    parallelize_module(module, mesh, {"": style})
    y, flag = module(own, 3)
    assert not isinstance(module.seen[0], DTensor) and y.placements == (Shard(1),) and flag == 3
    close(y, 2 * x)
    # One output comes out alone.
    module = nn.ReLU()
    parallelize_module(module, mesh, PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate()))
    close(module(own), x)


def test_inputs_and_outputs_of_modules_are_prepared():
    run_ranks(inputs_and_outputs, 2, start_torch=True)


# ---- the shared conversion -------------------------------------------------------------------------------------------


def shared_conversions(rank, world_size):
    mesh = dist.init_device_mesh("cpu", (world_size,))
    full, cut = (Replicate(),), (Shard(0),)
    first_module, second_module = object(), object()

    def placed(tensor, given, asker=first_module):
        return _input_cache.as_placed(tensor, mesh, given, full, asker)

    x = torch.ones(4, 2, requires_grad=True) * 1.0
    assert placed(x, full) is not placed(x, full)  # no forward of a parallelized module runs
    _input_cache.begin_forward()
    first = placed(x, full)
    assert placed(x, full, second_module) is first
    with torch.no_grad():
        assert placed(x, full) is not placed(x, full)
    first = placed(x, full)
    x.detach().add_(1)
    assert placed(x, full) is not first
    gathered = placed(x, cut)
    assert gathered.shape == (4 * world_size, 2) and placed(x, cut, second_module) is gathered
    assert placed(x, cut, second_module) is not gathered  # who asks again may have written into the tensor
    assert placed(x + 0, cut) is not gathered
    leaf = torch.ones(4, 2, requires_grad=True)
    assert placed(leaf, cut) is not placed(leaf, cut, second_module)
    with torch.inference_mode():
        z = torch.ones(2)
        assert placed(z, full) is not placed(z, full)
    _input_cache.end_forward()
    # Nothing is held when the forward of a parallelized module has ended, nor when it has failed.
    model = parallelize_module(Mlp(), mesh, {"gate": ColwiseParallel(), "up": ColwiseParallel()})
    leaf = torch.randn(3, WIDTH, requires_grad=True)
    with contextlib.suppress(RuntimeError):
        model(leaf)  # `down` gets a part of what it needs
    assert _input_cache._state.last is None and _input_cache._state.depth == 0
    # The same input again, after a backward: nothing of the first graph is used.
    model = parallelize_module(
        Mlp(), mesh, {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    grads = []
    for _ in range(2):
        leaf.grad = None
        model(leaf).sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_modules_of_one_forward_share_the_conversion_of_a_tensor_that_is_the_same():
    run_ranks(shared_conversions, 2, start_torch=True)


def written_memory(rank, world_size):
    mesh = dist.init_device_mesh("cpu", (world_size,))
    other = (rank + 1) % world_size

    def receive(x):
        sent = dist.isend(x.detach() * 2, other)
        dist.recv(x.detach(), other)
        sent.wait()

    changes = {
        "data": lambda x: x.data.mul_(2),
        "new data": lambda x: setattr(x, "data", x.detach() * 2),
        "numpy": lambda x: x.detach().numpy().__imul__(2),
        "detached": lambda x: x.detach().mul_(2),
        "receive": receive,
        "all_reduce": lambda x: dist.all_reduce(x.detach()),
    }
    prepared = {"input_layouts": Shard(0), "desired_input_layouts": Replicate(), "output_layouts": Replicate()}
    wanted = {"desired_output_layouts": Replicate()}
    styles = {
        "colwise": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        "colwise of what is whole": ColwiseParallel(output_layouts=Replicate()),
        "rowwise": RowwiseParallel(input_layouts=Replicate()),
        "rowwise of pieces": RowwiseParallel(input_layouts=Shard(0)),
        "prepared": PrepareModuleInputOutput(**prepared, **wanted, use_local_input=True),
    }
    for style_name, style in styles.items():
        for where in ("itself", "in a plan", "twice in a forward"):
            for grad in (False, True):
                for name, change in changes.items():
                    linear = nn.Linear(4, 4, bias=False)
                    nn.init.ones_(linear.weight)
                    model = nn.Sequential(linear)
                    if where == "itself":
                        parallelize_module(linear, mesh, style)
                    else:
                        parallelize_module(model, mesh, {"0": style})
                    if where == "twice in a forward":
                        _input_cache.begin_forward()
                    x = torch.ones(2, 4, requires_grad=grad)
                    before = linear(x) if where == "twice in a forward" else model(x)
                    change(x)
                    after = linear(x) if where == "twice in a forward" else model(x)
                    if where == "twice in a forward":
                        _input_cache.end_forward()
                    for result, value in ((before, 4.0), (after, 8.0)):
                        result = result.to_local() if isinstance(result, DTensor) else result
                        assert bool((result == value).all()), (style_name, where, grad, name, result)


def test_a_module_sees_what_was_written_into_its_input_by_whatever_way():
    run_ranks(written_memory, 2, start_torch=True)


def frozen_and_checkpointed(rank, world_size):
    from torch.utils.checkpoint import checkpoint

    mesh = dist.init_device_mesh("cpu", (world_size,))
    for plan in (TENSOR_PARALLEL, SEQUENCE_PARALLEL):
        reference, model = models(mesh, plan)
        for one in (reference, model):
            for name, parameter in one.named_parameters():
                parameter.requires_grad_("attention.q" not in name)
        x = data(9).requires_grad_()
        own = x.detach().chunk(world_size, 1)[rank] if plan is SEQUENCE_PARALLEL else x.detach().clone()
        own.requires_grad_()
        reference(x).square().sum().backward()
        for use_reentrant in (False, True):
            own.grad = None
            model.zero_grad()
            checkpoint(model, own, use_reentrant=use_reentrant).square().sum().backward()
            close(DTensor.from_local(own.grad, mesh, [Shard(1) if plan is SEQUENCE_PARALLEL else Replicate()]), x.grad)
            for one, other in zip(model.parameters(), reference.parameters(), strict=True):
                assert (one.grad is None) == (other.grad is None)
                if other.grad is not None:
                    close(one.grad, other.grad)


def test_frozen_parameters_and_activation_checkpoints_change_nothing():
    run_ranks(frozen_and_checkpointed, 2, start_torch=True)


# ---- errors ----------------------------------------------------------------------------------------------------------


def refusals(rank, world_size):
    mesh = dist.init_device_mesh("cpu", (world_size,))
    square = dist.init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(ValueError, match=r'must have one dim, and \(dp=1, tp=2\) has 2: take one.*mesh\["tp"\]'):
        parallelize_module(model, square, ColwiseParallel())
    with pytest.raises(RuntimeError, match="parallelize_module: no mesh was given"):
        parallelize_module(model, None, ColwiseParallel())
    with pytest.raises(TypeError, match="must be a torch DeviceMesh"):
        parallelize_module(model, 3, ColwiseParallel())
    with pytest.raises(TypeError, match="must be a ParallelStyle or a dict"):
        parallelize_module(model, mesh, [ColwiseParallel()])
    import torch.distributed.tensor.parallel as theirs

    with pytest.raises(TypeError, match=r"entry '0'.*not torch\.distributed.*torch's make torch's DTensors"):
        parallelize_module(model, mesh, {"0": theirs.ColwiseParallel()})
    with pytest.warns(UserWarning, match="so nothing is done"):
        assert parallelize_module(model, mesh) is model
    with pytest.warns(UserWarning, match=r"no submodule of Sequential matches 'one\.two'.*children are \['0', '1'\]"):
        parallelize_module(model, mesh, {"one.two": ColwiseParallel()})
    for style in (ColwiseParallel(), RowwiseParallel()):
        with pytest.raises(NotImplementedError, match="is for nn.Linear and nn.Embedding, not for ReLU"):
            parallelize_module(model, mesh, {"1": style})
    with mesh:
        parallelize_module(model, None, {"0": ColwiseParallel()})
    assert model[0].weight.placements == (Shard(0),)
    with pytest.raises(ValueError, match="must be a torch.Tensor or DTensor given by position, not no positional"):
        model[0](input=torch.ones(2, 4))
    norm = parallelize_module(nn.LayerNorm(4), mesh, SequenceParallel())
    with pytest.raises(ValueError, match="given by position, not str"):
        norm("text")
    module = parallelize_module(
        TwoInputs(), mesh, PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Shard(0))
    )
    with pytest.raises(ValueError, match="there are 1 for 2 inputs; write None"):
        module(torch.ones(2), 1)
    module = parallelize_module(
        TwoInputs(),
        mesh,
        PrepareModuleInputOutput(
            input_layouts=(None, Shard(0)),
            desired_input_layouts=(None, Shard(0)),
            output_layouts=Shard(0),
            desired_output_layouts=Shard(0),
        ),
    )
    with pytest.raises(TypeError, match="input 1 must be a tensor, not int: write None"):
        module(torch.ones(2), 1)
    with pytest.raises(ValueError, match="there are 1 for 2 outputs"):
        module(torch.ones(2), torch.ones(2))


def test_wrong_plans_meshes_modules_and_inputs_are_refused_with_what_to_write():
    run_ranks(refusals, 2, start_torch=True)


def test_wrong_layouts_are_refused_where_a_style_is_made():
    with pytest.raises(TypeError, match=r"ColwiseParallel: input_layouts must be one placement, not \[Shard"):
        ColwiseParallel(input_layouts=[Shard(0)])
    with pytest.raises(TypeError, match="RowwiseParallel: output_layouts must be one placement"):
        RowwiseParallel(output_layouts="replicate")
    with pytest.raises(ValueError, match="input_layouts was given without desired_input_layouts"):
        PrepareModuleInput(input_layouts=Shard(0))
    with pytest.raises(ValueError, match="must have the same length.*2 and 1"):
        PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(Shard(0),))
    with pytest.raises(ValueError, match="input_kwarg_layouts and desired_input_kwarg_layouts"):
        PrepareModuleInput(input_kwarg_layouts={"x": Shard(0)})
    with pytest.raises(ValueError, match="output_layouts and desired_output_layouts"):
        PrepareModuleOutput(output_layouts=(Shard(0),), desired_output_layouts=(Shard(0), Shard(1)))
    with pytest.raises(TypeError, match="output_layouts must be a placement, or one placement or None"):
        PrepareModuleOutput(output_layouts=("x",), desired_output_layouts=(Shard(0),))
    assert isinstance(ColwiseParallel(), ParallelStyle)
    assert repr(SequenceParallel(sequence_dim=0)) == "SequenceParallel(sequence_dim=0, use_local_output=False)"
    assert "use_local_output=True" in repr(ColwiseParallel()) and "Shard(dim=-1)" in repr(ColwiseParallel())


# ---- inputs that are saved as shards ---------------------------------------------------------------------------------


def shards_of_inputs(rank, world_size):
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    torch.manual_seed(3)
    reference = Mlp().double()
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(copy.deepcopy(reference), mesh, plan)
    hooks = len(model._forward_pre_hooks)
    assert input_reshard(model, mesh, None) is model and len(model._forward_pre_hooks) == hooks
    input_reshard(model, mesh, 1)
    x, expected = data(0).requires_grad_(), data(0).requires_grad_()
    inner = x * 1  # nobody but the graph holds it after the call
    memory = weakref.ref(inner.untyped_storage())
    with counted() as counts:
        result = model(inner)
        del inner
        assert memory() is None, "the whole input is kept"
        assert counts["all_gather"] == 0
        result.square().sum().backward()
        assert counts["all_gather"] > 0
    reference(expected).square().sum().backward()
    close(x.grad, expected.grad)
    for name, parameter in model.named_parameters():
        close(parameter.grad, reference.get_parameter(name).grad)


def test_inputs_are_saved_as_shards_and_gathered_in_backward():
    run_ranks(shards_of_inputs, 2, start_torch=True)
