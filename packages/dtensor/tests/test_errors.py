"""Bad input: each error says what is wrong and what to write instead. No rank is needed, and nothing is sent."""

import pytest
import torch

from phalanx.dtensor import (
    AbstractMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    SizedShard,
    distribute_module,
    distribute_tensor,
)
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor._mode import StrictError, strict

R = Replicate()
MESH = AbstractMesh((2,))
GRID = AbstractMesh((2, 2), mesh_dim_names=("dp", "tp"))


ROWS = (Shard(0),)


def some(placements=ROWS, shape=(4, 6), mesh=MESH, **kwargs):
    spec = DTensorSpec(mesh, placements, shape, None, kwargs.pop("dtype", torch.float32))
    return DTensor._wrap(torch.ones(spec.local_shape, dtype=spec.dtype), spec, **kwargs)


LOCAL = torch.ones(2, 3)

CASES = {
    # D1
    "constructor: no tensor": (
        lambda: DTensor(3, MESH, [R]),
        TypeError,
        "local tensor must be a plain torch.Tensor, not int",
    ),
    "constructor: a DTensor": (
        lambda: DTensor(some(), MESH, [R]),
        TypeError,
        "must be a plain torch.Tensor, not DTensor",
    ),
    "constructor: no placements": (
        lambda: DTensor(LOCAL, MESH),
        TypeError,
        r"write DTensor\(local, mesh, \[Shard\(0\)\]\)",
    ),
    "constructor: dtype": (
        lambda: DTensor(LOCAL, MESH, [R], dtype=torch.int32),
        ValueError,
        "local tensor has dtype torch.float32, and the dtype asked for is torch.int32: convert the local tensor",
    ),
    "constructor: shape": (
        lambda: DTensor(LOCAL, MESH, [Shard(0)], shape=(7, 3)),
        ValueError,
        r"local tensor has shape \(2, 3\), .* of shape \(7, 3\) .* has shape \(4, 3\)",
    ),
    # D2
    "from_local: no tensor": (lambda: DTensor.from_local([1.0], MESH), TypeError, "must be a torch.Tensor, not list"),
    "from_local: a DTensor": (
        lambda: DTensor.from_local(some(), MESH),
        TypeError,
        r"is a DTensor: use its redistribute\(\)",
    ),
    "from_local: no mesh": (
        lambda: DTensor.from_local(LOCAL),
        RuntimeError,
        "no mesh was given: give one, or write `with mesh:`",
    ),
    "from_local: no such mesh": (
        lambda: DTensor.from_local(LOCAL, "cpu", [R]),
        TypeError,
        "must be a torch DeviceMesh, not str",
    ),
    "from_local: too many placements": (
        lambda: DTensor.from_local(LOCAL, MESH, [R, R]),
        ValueError,
        r"2 placements .* for a mesh of 1 dims \(2,\).*same length",
    ),
    "from_local: too few placements": (
        lambda: DTensor.from_local(LOCAL, GRID, [R]),
        ValueError,
        r"1 placements .* for a mesh of 2 dims \(dp=2, tp=2\).*write Replicate\(\) for a mesh dim that splits nothing",
    ),
    "from_local: one placement": (
        lambda: DTensor.from_local(LOCAL, MESH, Shard(0)),
        TypeError,
        r"must be a sequence with one placement for each mesh dim, not Shard.*write \[Shard\(dim=0\)\]",
    ),
    "from_local: a dim too many": (
        lambda: DTensor.from_local(LOCAL, MESH, [Shard(2)]),
        IndexError,
        "splits a dim that the tensor does not have: it has 2, so write -2 to 1",
    ),
    "from_local: no dims": (
        lambda: DTensor.from_local(LOCAL.sum(), MESH, [Shard(0)]),
        IndexError,
        r"no dims: write Replicate\(\)",
    ),
    "from_local: an unknown placement": (lambda: DTensor.from_local(LOCAL, MESH, ["shard"]), RuntimeError, "'shard'"),
    "from_local: sizes": (
        lambda: DTensor.from_local(LOCAL, MESH, [SizedShard(0, (3, 1))]),
        ValueError,
        r"local tensor has shape \(2, 3\), .* part has shape \(3, 3\): give shape=, or other sizes",
    ),
    # D4
    "redistribute: nothing": (lambda: some().redistribute(), RuntimeError, r"write redistribute\(placements=\[...\]\)"),
    "redistribute: Partial": (
        lambda: some(mesh=GRID, placements=(Shard(0), Partial())).redistribute(placements=[Partial(), Partial()]),
        RuntimeError,
        r"Partial\('sum'\) for mesh dim 0 \(dp=2, tp=2\): a tensor cannot be made Partial; write Replicate\(\)",
    ),
    "redistribute: another Partial": (
        lambda: some([Partial("max")]).redistribute(placements=[Partial("sum")]),
        RuntimeError,
        "cannot be made Partial",
    ),
    "redistribute: too few": (
        lambda: some(mesh=GRID, placements=(R, R)).redistribute(placements=[R]),
        ValueError,
        "1 placements",
    ),
    "redistribute: a mesh without ranks": (
        lambda: some().redistribute(GRID, [R, R]),
        ValueError,
        "an AbstractMesh has no ranks, .* give both tensors a DeviceMesh",
    ),
    # D6
    "distribute_tensor: lengths": (lambda: distribute_tensor(LOCAL, MESH, [R, R]), ValueError, "same length"),
    "distribute_tensor: other placements": (
        lambda: distribute_tensor(some(), MESH, [Shard(1)]),
        ValueError,
        r"has placements .*Shard\(dim=0\).*, not .*Shard\(dim=1\).*: change them with redistribute\(placements=...\)",
    ),
    "distribute_tensor: another mesh": (
        lambda: distribute_tensor(some(), GRID, [R, R]),
        ValueError,
        r"on mesh \(2,\), not on \(dp=2, tp=2\): move it to that mesh with redistribute\(mesh, placements\)",
    ),
    "distribute_tensor: an unknown placement": (lambda: distribute_tensor(LOCAL, MESH, [0]), RuntimeError, "0"),
    "distribute_tensor: no leaf": (
        lambda: distribute_tensor(torch.ones(2, requires_grad=True) * 2, MESH, [R]),
        RuntimeError,
        r"write DTensor.from_local\(tensor, mesh\).redistribute",
    ),
    "distribute_tensor: no mesh": (
        lambda: distribute_tensor(LOCAL),
        RuntimeError,
        "distribute_tensor: no mesh was given",
    ),
    "distribute_module: no mesh": (
        lambda: distribute_module(torch.nn.Linear(1, 1)),
        RuntimeError,
        "distribute_module: no mesh",
    ),
    # D8
    "mixed": (
        lambda: some() + torch.ones(4, 6),
        RuntimeError,
        r"aten.add.Tensor: got mixed distributed and non-distributed tensors.*shape \(4, 6\). Write distribute_tensor",
    ),
    "mixed: in place": (
        lambda: some().add_(torch.ones(4, 6)),
        RuntimeError,
        "got mixed distributed and non-distributed",
    ),
    "mixed: into a plain one": (
        lambda: torch.ones(4, 6).add_(some()),
        RuntimeError,
        "got mixed distributed and non-distributed",
    ),
    "mixed: in a list": (
        lambda: torch.cat([some(), torch.ones(4, 6)]),
        RuntimeError,
        "got mixed distributed and non-distributed",
    ),
    "mixed: out": (
        lambda: torch.add(some(), 1, out=torch.ones(4, 6)),
        RuntimeError,
        "got mixed distributed and non-distributed",
    ),
    "mixed: index": (lambda: some()[torch.tensor([0, 1])], RuntimeError, "got mixed distributed and non-distributed"),
    "mixed: foreach": (
        lambda: torch._foreach_add_([some()], [torch.ones(4, 6)]),
        RuntimeError,
        "got mixed distributed and non-distributed",
    ),
    "mixed: equal": (lambda: torch.equal(some(), torch.ones(4, 6)), RuntimeError, "make both DTensors"),
    "two meshes": (
        lambda: some() + some([R, R], mesh=GRID),
        RuntimeError,
        r"on two meshes, \(2,\) and \(dp=2, tp=2\): move one to the other mesh with redistribute\(mesh, placements\)",
    ),
    # What one process says as well
    "shapes": (lambda: some() + some(shape=(4, 5)), RuntimeError, "broadcast|must match the size"),
    "matmul": (lambda: some() @ some(), RuntimeError, "same reduction dim|cannot be multiplied"),
    "a view": (lambda: some().view(5, 5), RuntimeError, "invalid for input of size 24"),
    "a dim": (lambda: some().sum(3), IndexError, "Dimension out of range"),
    "an index": (lambda: some()[7], IndexError, "out of bounds"),
    "a leaf in place": (lambda: some(requires_grad=True).add_(1), RuntimeError, "leaf Variable that requires grad"),
    # Placements
    "no such reduction": (lambda: Partial("median"), ValueError, "unknown reduce op 'median'; expected one of sum"),
    "complex maxima": (
        lambda: some([Partial("max")], dtype=torch.complex64).redistribute(placements=[R]),
        ValueError,
        "complex numbers have no order",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_error_says_what_to_write(case):  # D1 D2 D4 D6 D8
    call, kind, text = CASES[case]
    with pytest.raises(kind, match=text):
        call()


def test_a_mesh_is_read_only():  # D9
    x = some()
    for name in ("device_mesh", "placements"):
        with pytest.raises(AttributeError):
            setattr(x, name, getattr(x, name))
        with pytest.raises(AttributeError):
            delattr(x, name)


def test_strict_mode_names_the_argument_and_where_it_would_go():
    x = some()
    with strict():
        assert (x * 2).placements == (Shard(0),)
        with pytest.raises(
            StrictError,
            match=r"aten.mm.default would communicate by itself \(argument 1 from .*redistribute these inputs",
        ):
            x @ x.t()
        with strict(False), pytest.raises(RuntimeError, match="AbstractMesh"):
            x @ x.t()
        with pytest.raises(StrictError):
            x.t() @ x @ x.t()
    with pytest.raises(RuntimeError, match="all_gather over an AbstractMesh .*make the tensor on a DeviceMesh"):
        x @ x.t()


def test_nothing_has_changed_after_an_error():
    x = some()
    for case in ("mixed: in place", "shapes", "two meshes"):
        with pytest.raises(RuntimeError):
            CASES[case][0]()
    assert x.to_local().unique().tolist() == [1.0]
