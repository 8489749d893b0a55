"""torch still has the private parts that _torch_compat.py relies on, and they mean what it says."""

import inspect

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from phalanx.collectives import _functional, _layout, _torch_compat
from ranks import run_ranks

MOVED = f"torch {torch.__version__} has changed "


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of quantized and nested tensors
def test_a_plain_tensor_is_told_from_all_others():
    plain = torch.ones(2)
    assert _torch_compat.is_plain(plain), MOVED + "_dispatch_keys"
    assert _torch_compat.is_plain(plain.view(1, 2)) and _torch_compat.is_plain(torch.nn.Parameter(plain).detach())
    z = torch.zeros(2, dtype=torch.complex64)
    others = [
        plain.clone().requires_grad_(), torch.empty(2, device="meta"), z.conj(), z.conj().imag,
        torch._efficientzerotensor(2), plain.to_sparse(), torch.quantize_per_tensor(plain, 1.0, 0, torch.quint8),
        torch.nested.nested_tensor([plain]), plain.as_subclass(type("Sub", (torch.Tensor,), {})),
    ]  # fmt: skip
    for other in others:
        assert not _torch_compat.is_plain(other), MOVED + f"the dispatch keys of {type(other)} {other.layout}"
    with torch.no_grad():
        assert _torch_compat.is_plain(plain.clone().requires_grad_())
    seen = []
    torch.vmap(lambda row: seen.append(_torch_compat.is_plain(row)) or row)(torch.ones(2, 2))
    torch.func.grad(lambda row: seen.append(_torch_compat.is_plain(row)) or row.sum())(plain)
    torch.func.functionalize(lambda row: seen.append(_torch_compat.is_plain(row)) or row + 1)(plain)
    assert seen == [False] * 3, MOVED + "the dispatch keys of functorch's tensors"


def test_the_kernel_of_an_op_can_be_called_directly():
    call = _torch_compat.kernel_call(torch.ops.aten.add.Tensor)
    assert call(_torch_compat.CPU_KEY, torch.ones(2), torch.ones(2)).tolist() == [2.0, 2.0], MOVED + "redispatch_boxed"


def test_wrapper_tensors_take_their_arguments_by_position():
    cls = type("Wrapper", (torch.Tensor,), {"__torch_dispatch__": classmethod(lambda *_: None)})
    made = _torch_compat.make_wrapper(cls, torch.Size([2, 3]), None, None, None, torch.float16)
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (3, 1), torch.float16), MOVED + "_make_wrapper_subclass"
    assert made.device == torch.device("cpu") and not made.requires_grad


def test_view_ops_are_told_from_all_others():
    aten = torch.ops.aten
    for op in (
        aten.view.default,
        aten.transpose.int,
        aten.split.Tensor,
        aten.unbind.int,
        aten.slice.Tensor,
        aten.detach.default,
    ):
        assert _torch_compat.is_view(op), MOVED + f"the schema of {op}"
    for op in (
        aten.add.Tensor,
        aten.add_.Tensor,
        aten._to_copy.default,
        aten.clone.default,
        aten.to.dtype,
        aten.stack.default,
    ):
        assert not _torch_compat.is_view(op), MOVED + f"the schema of {op}"
    assert not _torch_compat.is_tracing()


def process_groups(rank, size):
    from torch.distributed import distributed_c10d as c10d

    group = dist.new_group([0], backend="gloo")
    assert type(group) is dist.ProcessGroup and _torch_compat.backends_of(group) == {"gloo"}, (
        MOVED + "pg_backend_config"
    )
    assert _torch_compat.backends_of(dist.group.WORLD) <= {"gloo", "nccl"}
    assert _torch_compat.group_named(str(group.group_name)) is group, MOVED + "_resolve_process_group"
    assert _torch_compat.group_named("nothing") is None
    assert _torch_compat.find_group([0], "") in (group, dist.group.WORLD)
    assert _torch_compat.tag_of(group).startswith("ptd:"), MOVED + "_get_group_tag"
    tagged = _torch_compat.make_group([0], "mine")
    assert _torch_compat.tag_of(tagged) == "mine" and _torch_compat.find_group([0], "mine") is tagged
    _torch_compat.default_store().set("a", b"b")
    assert "use_local_synchronization" in inspect.signature(c10d._new_group_with_tag).parameters
    import weakref

    life = weakref.ref(_torch_compat.life_of(group))
    assert life() is not None
    dist.destroy_process_group(group)
    assert life() is None, MOVED + "who holds the store in _world.pg_map: destroyed groups are not noticed any more"
    assert not _torch_compat.is_registered(group)
    life = weakref.ref(_torch_compat.life_of(dist.group.WORLD))
    dist.destroy_process_group()
    assert life() is None, MOVED + "destroy_process_group"


def test_process_groups_can_be_looked_into():
    run_ranks(process_groups, 1, start_torch=True)


def test_the_functions_have_the_arguments_of_torchs():
    import torch.distributed._functional_collectives as theirs

    for name in (
        "all_reduce",
        "all_gather_tensor",
        "reduce_scatter_tensor",
        "broadcast",
        "all_to_all_single",
        "wait_tensor",
    ):
        ours = inspect.signature(getattr(_functional, name)).parameters
        assert list(ours) == list(inspect.signature(getattr(theirs, name)).parameters), MOVED + name


def test_functions_are_constant_in_graphs_by_what_dynamo_reads():
    def theirs():
        pass

    def ours():
        pass

    torch.compiler.assume_constant_result(theirs)
    assert vars(_torch_compat.constant_in_graphs(ours)) == vars(theirs), MOVED + "assume_constant_result"


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(1, 4), st.data())
def test_parts_are_cut_and_joined_as_chunk_and_cat_do(shape, size, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    parts = [torch.randn(shape) for _ in range(size)]
    joined = _layout.joined_at(torch.cat(parts), size, dim)
    assert torch.equal(joined, torch.cat(parts, dim)) and joined.is_contiguous()
    whole = torch.cat(parts, dim)
    cut = _layout.parts_first(whole, size, dim)
    assert torch.equal(cut, torch.cat(whole.split(shape[dim], dim) if shape[dim] else [whole] * size))


@pytest.mark.parametrize("name", ["wait_tensor"])
def test_the_native_library_says_that_a_wait_gives_its_argument(name):
    """Otherwise a compiler may use the memory of the result again while it is needed."""
    schema = getattr(torch.ops.phalanx, name).default._schema
    assert schema.arguments[0].alias_info is not None and schema.returns[0].alias_info is not None
