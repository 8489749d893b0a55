"""Redistribution between real processes: values, groups, meshes, dtypes, pending results."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import phalanx.collectives as pc
from phalanx.dtensor import Partial, Replicate, Shard, SizedShard, StridedShard
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._redistribute import plan_redistribute
from ranks import run_ranks

R, P = Replicate(), Partial


def move(local, source, target, **options):
    return plan_redistribute(source, target).run(local, **options)


def layout_of(whole, mesh, placements):
    """The local tensor of this rank of a tensor without Partials, by torch.chunk and slices alone."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return whole.new_empty(0)
    for placement, ranks, at in zip(placements, mesh.shape, coordinate, strict=True):
        if isinstance(placement, SizedShard):
            whole = whole.split(list(placement.sizes), placement.dim)[at]
        elif isinstance(placement, StridedShard):
            firsts = parts(whole, placement.split_factor, placement.dim)
            whole = torch.cat([parts(first, ranks, placement.dim)[at] for first in firsts], placement.dim)
        elif isinstance(placement, Shard):
            whole = parts(whole, ranks, placement.dim)[at]
    return whole.contiguous()


def parts(tensor, count, dim):
    """torch.chunk, with empty ones at the end where it gives fewer."""
    length = -(-tensor.size(dim) // count)
    bounds = [min(i * length, tensor.size(dim)) for i in range(count + 1)]
    return [tensor.narrow(dim, a, b - a) for a, b in itertools.pairwise(bounds)]


def term_of(whole, mesh, placements):
    """What this rank has of a tensor with sums: its coordinate's share of the whole, which add up to it."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return whole.new_empty(0)
    for placement, ranks, at in zip(placements, mesh.shape, coordinate, strict=True):
        if isinstance(placement, Partial):
            if placement.reduce_op == "sum":
                weights = [*list(range(1, ranks)), 1 - sum(range(1, ranks))]
                whole = whole * weights[at]
            elif placement.reduce_op == "avg":
                whole = whole * (ranks if at == ranks - 1 else 0)
            else:
                whole = whole - (0 if at == ranks // 2 else 3)
    return whole


def check(mesh, source, target, whole, **options):
    """Move one tensor, and compare with what it must be."""
    local = layout_of(term_of(whole, mesh, source), mesh, source)
    before = local.clone()
    made = move(
        local,
        DTensorSpec(mesh, source, whole.shape, None, whole.dtype),
        DTensorSpec(mesh, target, whole.shape, None, whole.dtype),
        **options,
    )
    made = pc.wait_tensor(made)
    wanted = layout_of(whole, mesh, target)
    where = f"{tuple(mesh.shape)} {tuple(whole.shape)} {whole.dtype} {source} -> {target}"
    assert made.dtype == wanted.dtype, where
    assert made.shape == wanted.shape, (where, made.shape, wanted.shape)
    same = torch.equal(bits(made), bits(wanted))
    assert same, f"{where}: {made} and not {wanted}"
    assert torch.equal(bits(local), bits(before)), where
    assert type(made) is torch.Tensor


def bits(tensor):
    """A tensor that torch can compare: it cannot 8-bit floats and halves of complex numbers."""
    if tensor.dtype == torch.complex32:
        return torch.view_as_real(tensor)
    return tensor.view(torch.uint8) if tensor.dtype.is_floating_point and tensor.itemsize == 1 else tensor


def every_pair(mesh, shape, dtype=torch.float32):
    some = [shape[0] // 3, *([0] * (mesh.shape[-1] - 2)), shape[0] - shape[0] // 3]
    last = [R, Shard(0), Shard(1), SizedShard(0, some), StridedShard(0, 2)]
    others = [R, Shard(0), Shard(1)]
    whole = torch.arange(shape[0] * shape[1]).view(shape).to(dtype)
    for source in itertools.product(*[[*others, P()]] * (mesh.ndim - 1), [*last, P(), P("avg"), P("max")]):
        for target in itertools.product(*[others] * (mesh.ndim - 1), last):
            if fits(mesh, source, shape) and fits(mesh, target, shape):
                check(mesh, source, target, whole)


def fits(mesh, placements, shape):
    try:
        DTensorSpec(mesh, placements, shape)
    except ValueError:
        return False
    return True


# ---- one mesh --------------------------------------------------------------------------------------------------------


def one_mesh_dim(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    for rows in (12, 7, 1, 0):
        every_pair(mesh, (rows, 4))
    # A mesh whose ranks do not ascend, as its process group does.
    every_pair(DeviceMesh("cpu", list(reversed(range(size)))), (7, 4))
    return True


@pytest.mark.parametrize("size", [2, 3])
def test_every_pair_on_one_mesh_dim(size):  # D4, D6
    assert all(run_ranks(one_mesh_dim, size, start_torch=True))


def two_mesh_dims(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    every_pair(mesh, (8, 4))
    every_pair(mesh, (7, 3))
    # One row of it: a submesh on which only its own ranks communicate.
    every_pair(mesh["tp"], (5, 4))
    return True


def random_terms(rank, size):
    mesh = init_device_mesh("cpu", (2, 2))
    found = []
    for op, rows in itertools.product(("sum", "avg", "product"), (1, 33, 4099)):
        local = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rank))
        given, made = DTensorSpec(mesh, (P(op), P(op)), (rows, 3)), DTensorSpec(mesh, (R, R), (rows, 3))
        result = move(local, given, made)
        found.append(result.numpy().tobytes())
        everyone = [torch.randn(rows, 3, generator=torch.Generator().manual_seed(i)).double() for i in range(size)]
        wanted = torch.stack(everyone).prod(0) if op == "product" else sum(everyone) / (size if op == "avg" else 1)
        torch.testing.assert_close(result.double(), wanted, rtol=1e-5, atol=1e-5)
    return found


def test_every_rank_gets_the_same_bits():
    first, *others = run_ranks(random_terms, 4, start_torch=True)
    assert all(other == first for other in others)


def test_every_pair_on_two_mesh_dims():  # D4
    assert all(run_ranks(two_mesh_dims, 4, start_torch=True, timeout=120))


# ---- dtypes and forms of tensors -------------------------------------------------------------------------------------

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SMALL = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]


def moved(local, mesh, source, target, shape, **options):
    specs = [DTensorSpec(mesh, (placement,), shape, None, local.dtype) for placement in (source, target)]
    return pc.wait_tensor(move(local, *specs, **options))


def dtypes(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    for dtype in (torch.bool, *INTEGERS, *FLOATS, *SMALL, torch.float8_e8m0fnu, *COMPLEX):
        for rows in (4, 3):
            whole = (torch.arange(rows * 4) % 3).view(rows, 4).to(dtype)
            for source, target in itertools.product((R, Shard(0), Shard(1), StridedShard(0, 2)), repeat=2):
                check(mesh, (source,), (target,), whole)
    # Each reduction of each dtype, to all and scattered, evenly and not.
    terms = [torch.tensor([3, 6, 1, 0, 2]), torch.tensor([1, 2, 5, 0, 2])]
    values = {
        "sum": [4, 8, 6, 0, 4], "avg": [2, 4, 3, 0, 2], "min": [1, 2, 1, 0, 2], "max": [3, 6, 5, 0, 2],
        "product": [3, 12, 5, 0, 4], "band": [1, 2, 1, 0, 2], "bor": [3, 6, 5, 0, 2], "bxor": [2, 4, 4, 0, 0],
    }  # fmt: skip
    for dtype in (*INTEGERS, *FLOATS, *SMALL, *COMPLEX):
        for op, value in values.items():
            if (op[0] == "b" and dtype not in INTEGERS) or (dtype.is_complex and op in ("min", "max")):
                continue
            local = terms[rank].to(dtype)
            wanted = torch.tensor(value).to(dtype)
            for target, part in ((R, wanted), (Shard(0), [wanted[:3], wanted[3:]][rank])):
                result = moved(local, mesh, P(op), target, (5,))
                assert torch.equal(bits(result), bits(part)), (dtype, op, target, result, part)
            even = moved(local[:4], mesh, P(op), Shard(0), (4,))
            assert torch.equal(bits(even), bits(wanted[:4].chunk(2)[rank])), (dtype, op, even)
    truths = [torch.tensor([True, True, False]), torch.tensor([True, False, False])]
    for op, value in {
        "sum": [1, 1, 0], "max": [1, 1, 0], "min": [1, 0, 0], "product": [1, 0, 0], "band": [1, 0, 0],
        "bor": [1, 1, 0], "bxor": [0, 1, 0],
    }.items():  # fmt: skip
        result = moved(truths[rank], mesh, P(op), R, (3,))
        assert result.tolist() == [bool(one) for one in value], (op, result)
    # The average of integers rounds towards zero.
    assert moved(torch.tensor([-3, 3]), mesh, P("avg"), R, (2,)).tolist() == [-3, 3]
    assert moved(torch.tensor([-3 - rank, 4 - rank]), mesh, P("avg"), R, (2,)).tolist() == [-3, 3]
    for op in ("min", "max"):
        with pytest.raises(ValueError, match="complex numbers have no order"):
            moved(torch.zeros(2, dtype=torch.complex64), mesh, P(op), R, (2,))
    return True


def test_every_dtype_and_reduction():
    assert all(run_ranks(dtypes, 2, start_torch=True, timeout=120))


def forms(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    # Tensors without dims.
    assert moved(torch.tensor(2.0 + rank), mesh, P(), R, ()).item() == 5.0
    assert moved(torch.tensor(2 + 1j + rank), mesh, P("product"), R, ()).item() == (2 + 1j) * (3 + 1j)
    assert moved(torch.tensor(3.0), mesh, R, P(), ()).item() == (3.0 if rank == 0 else 0.0)
    # Locals with strides, of which nothing is written.
    whole = torch.arange(60.0).view(5, 12)
    wide = torch.full((12, 10), -1.0)
    for source, target in itertools.product((R, Shard(0), Shard(1), StridedShard(1, 2), P()), repeat=2):
        own = layout_of(term_of(whole, mesh, (source,)), mesh, (source,))
        strided = wide[: own.size(1), : 2 * own.size(0) : 2].t()
        strided.copy_(own)
        result = moved(strided, mesh, source, target, (5, 12))
        if not isinstance(target, Partial):
            assert torch.equal(result, layout_of(whole, mesh, (target,))), (source, target)
        elif source is R:
            assert torch.equal(result, whole if rank == 0 else torch.zeros_like(whole))
        assert torch.equal(strided, own)
        assert (wide[:, 1::2] == -1).all()
    # What Replicate becomes as a Partial reduces to itself again.
    for op in ("sum", "avg", "min", "max", "product", "band", "bor", "bxor"):
        value = torch.tensor([1, 2, 7, -8])
        term = moved(value, mesh, R, P(op), (4,))
        assert torch.equal(moved(term, mesh, P(op), R, (4,)), value), op
        for other in ("sum", "max"):
            again = moved(moved(term, mesh, P(op), P(other), (4,)), mesh, P(other), R, (4,))
            assert torch.equal(again, value), (op, other)
    # A slice is a copy; where nothing changes the local tensor itself comes back.
    local = torch.arange(8.0)
    half = moved(local, mesh, R, Shard(0), (8,))
    half.zero_()
    assert torch.equal(local, torch.arange(8.0))
    assert moved(local, mesh, R, R, (8,)) is local
    equal = torch.arange(4.0) + 4 * rank
    assert moved(equal, mesh, Shard(0), SizedShard(0, (4, 4)), (8,)) is equal
    return True


def test_every_form_of_tensor():
    assert all(run_ranks(forms, 2, start_torch=True))


def pending(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(24.0).view(6, 4)
    pends = {
        ((Shard(0),), (R,)): True,
        ((P(),), (R,)): True,
        ((P(),), (Shard(1),)): True,
        ((Shard(0),), (Shard(1),)): True,
        ((Shard(1),), (Shard(0),)): True,  # what comes is written along dim 1
        ((R,), (Shard(0),)): False,
        ((Shard(0),), (SizedShard(0, (1, 5)),)): False,
    }
    for (source, target), wanted in pends.items():
        made = plan_redistribute(DTensorSpec(mesh, source, (6, 4)), DTensorSpec(mesh, target, (6, 4)))
        local = layout_of(term_of(whole, mesh, source), mesh, source).clone()
        result = made.run(local, async_op=True)
        assert (type(result) is pc.AsyncCollectiveTensor) == wanted, (source, target)
        local.fill_(-1)  # it is the caller's again
        assert torch.equal(result + 0, layout_of(whole, mesh, target))
        assert type(made.run(local)) is torch.Tensor
    # One that is on its way is taken as it is.
    for source, middle, target in ((Shard(0), R, Shard(1)), (P(), R, P()), (P(), Shard(0), R), (P(), R, R)):
        given, between, made = (DTensorSpec(mesh, (one,), (6, 4)) for one in (source, middle, target))
        local = layout_of(term_of(whole, mesh, (source,)), mesh, (source,))
        result = pc.wait_tensor(move(move(local, given, between, async_op=True), between, made))
        if target == P():
            assert torch.equal(result, whole if rank == 0 else torch.zeros_like(whole))
        else:
            assert torch.equal(result, layout_of(whole, mesh, (target,))), (source, middle, target)
    # Several on their way at once.
    made = plan_redistribute(DTensorSpec(mesh, (P(),), (6, 4)), DTensorSpec(mesh, (R,), (6, 4)))
    results = [made.run(whole * i, async_op=True) for i in range(8)]
    assert all(torch.equal(one + 0, whole * i * size) for i, one in enumerate(results))
    return True


def test_a_pending_result_waits_at_its_first_use():
    assert all(run_ranks(pending, 2, start_torch=True))


# ---- to another mesh -------------------------------------------------------------------------------------------------


def cross(rank, size):
    pc.enable_group(dist.group.WORLD)  # before messages between a few ranks, all must have met
    meshes = [
        init_device_mesh("cpu", (4,)),
        init_device_mesh("cpu", (2, 2)),
        DeviceMesh("cpu", [3, 1, 2, 0]),
        DeviceMesh("cpu", [0, 1]),
        DeviceMesh("cpu", [2, 3]),
        DeviceMesh("cpu", [1, 2, 3]),
        DeviceMesh("cpu", [2]),
        DeviceMesh("cpu", [[3, 0]]),
    ]
    for shape in ((8, 4), (5, 3), (1, 0)):
        whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
        for source, target in itertools.permutations(meshes, 2):
            for choice in (R, Shard(0), Shard(1), StridedShard(0, 2), P(), P("max")):
                for wanted in (R, Shard(0), Shard(1)):
                    own = (choice,) if source.ndim == 1 else (choice, Shard(0))
                    new = (wanted,) if target.ndim == 1 else (Shard(0), wanted)
                    given, made = DTensorSpec(source, own, shape), DTensorSpec(target, new, shape)
                    way = plan_redistribute(given, made)
                    assert [step.collective for step in way.steps].count("move") == 1
                    local = layout_of(term_of(whole, source, own), source, own)
                    result = way.run(local)
                    assert torch.equal(result, layout_of(whole, target, new)), (str(way), local, result)
    # To terms on another mesh.
    given, made = DTensorSpec(meshes[3], (Shard(0),), (4,)), DTensorSpec(meshes[4], (P(),), (4,))
    result = move(torch.arange(2.0) + 2 * rank if rank < 2 else torch.empty(0), given, made)
    wanted = {2: torch.arange(4.0), 3: torch.zeros(4)}.get(rank, torch.empty(0))
    assert torch.equal(result, wanted)
    # A tensor without dims.
    given, made = DTensorSpec(meshes[6], (R,), ()), DTensorSpec(meshes[1], (R, R), ())
    assert move(torch.tensor(5.0) if rank == 2 else torch.empty(0), given, made).item() == 5.0
    # Ranks outside a mesh take no part in what happens on it.
    inside = move(
        torch.ones(2) if rank < 2 else torch.empty(0),
        DTensorSpec(meshes[3], (P(),), (2,)),
        DTensorSpec(meshes[3], (R,), (2,)),
    )
    assert inside.tolist() == ([2.0, 2.0] if rank < 2 else [])
    return True


def transposed(rank, size):
    """What lies in another order in memory arrives so, as its spec says: views of it are views of the local tensor."""
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(float(size * 24)).reshape(2 * size, 3, 4).transpose(0, 2)  # [4, 3, 2 * size]
    for here, there in ([Shard(2)], [R]), ([Shard(0)], [Shard(2)]), ([R], [Shard(1)]), ([Shard(2)], [Shard(1)]):
        source = DTensorSpec(mesh, here, whole.shape, whole.stride(), whole.dtype)
        target = source.replace(placements=there)
        mine = layout_of(whole, mesh, here)
        moved = move(mine.permute(2, 1, 0).contiguous().permute(2, 1, 0), source, target)
        assert torch.equal(moved, layout_of(whole, mesh, there))
        assert moved.stride() == target.local_stride, (here, there, moved.stride())
    return True


def test_what_is_transposed_in_memory_arrives_transposed():  # D4
    assert all(run_ranks(transposed, 2, start_torch=True))


@pytest.mark.slow
def test_to_another_mesh():  # D2, D4
    assert all(run_ranks(cross, 4, start_torch=True, timeout=180))


def strangers(rank, size):
    # No collective before it: a rank of neither mesh calls it too, and lets the others meet.
    first, second = DeviceMesh("cpu", [0]), DeviceMesh("cpu", [2])
    local = torch.arange(3.0) if rank == 0 else torch.empty(0)
    result = move(local, DTensorSpec(first, (R,), (3,)), DTensorSpec(second, (R,), (3,)))
    return result.tolist()


def test_ranks_of_neither_mesh_let_the_others_meet():
    assert run_ranks(strangers, 3, start_torch=True) == [[], [], [0.0, 1.0, 2.0]]


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def compiled(rank, size):
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(56.0).view(7, 8)
    for source, target in (
        ((Shard(0), R), (R, R)),
        ((R, Shard(0)), (R, Shard(1))),
        ((R, Shard(1)), (R, SizedShard(0, (1, 6)))),
        ((P(), P()), (R, Shard(1))),
        ((Shard(0), Shard(0)), (R, Shard(0))),
        ((R, R), (Shard(0), Shard(1))),
    ):
        given, made = DTensorSpec(mesh, source, (7, 8)), DTensorSpec(mesh, target, (7, 8))
        way = plan_redistribute(given, made)
        local = layout_of(term_of(whole, mesh, source), mesh, source)
        for call in (way.run, lambda x, a=given, b=made: move(x, a, b)):
            torch._dynamo.reset()
            result = torch.compile(lambda x, f=call: f(x * 2) + 1, backend="aot_eager", fullgraph=True)(local)
            assert torch.equal(result, layout_of(whole, mesh, target) * 2 + 1), str(way)
    return True


@pytest.mark.slow
def test_in_a_compiled_graph():
    assert all(run_ranks(compiled, 4, start_torch=True, timeout=180))
