"""The sweep of DTensor on real ranks: a sample of it, and that it finds what is wrong."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from phalanx.dtensor import DTensor, distribute_tensor
from phalanx.dtensor.placement_types import Partial, Replicate, Shard
from phalanx.tools.verify.dtensor_check import Attempt, OutOfStep, Ranks, Reference
from phalanx.tools.verify.dtensor_report import DTensorReport, Record, reasons, table
from phalanx.tools.verify.dtensor_samples import Case, kind_of, placings, replaced
from ranks import run_ranks

R, P, S = Replicate(), Partial("sum"), Shard
# A sample. docs/explanation/sharding.md says how to run the whole sweep, which takes an hour.
SOME_OPS = "add,bmm,cat,einsum,gather,nn.functional.layer_norm,softmax"

needs_database = pytest.mark.skipif(
    importlib.util.find_spec("expecttest") is None, reason="torch's OpInfo database needs expecttest"
)


@pytest.mark.slow
@needs_database
def test_a_sample_of_the_database_is_right_on_two_ranks(tmp_path):
    file = tmp_path / "sweep.json"
    command = [sys.executable, "-m", "phalanx.core._cli", "verify", "dtensor", "--mesh", "2", "--sample", "40"]
    command += ["--samples", "4", "--placings", "6", "--json", str(file)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads(file.read_text())["meshes"]["2"]
    assert len(records) == 40
    tried = [one for one in records.values() if one["kinds"]]
    assert len(tried) >= 30
    for name, one in records.items():
        assert all("wrong" not in counts for counts in one["kinds"].values()), (name, one["failures"])
    raised = [name for name, one in records.items() if any("error" in counts for counts in one["kinds"].values())]
    assert len(raised) <= 3, raised
    # It goes on where the file ends: nothing is left, so no rank is started.
    again = subprocess.run([*command, "--resume"], env=env, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0
    assert json.loads(file.read_text())["meshes"]["2"] == records


def _sampled(mesh, names, backends, mark=pytest.mark.thorough):
    return pytest.param(mesh, names, backends, marks=mark)


@needs_database
@pytest.mark.parametrize(
    ("mesh", "names", "backends"),
    [
        _sampled("2", "block low rank,block tied", "aot_eager,aot_eager:dynamic"),
        _sampled("2x2", "block mlp,block llama", "aot_eager"),
        _sampled("2x2", "block squeeze", "aot_eager:dynamic"),  # exchanges in its backward
        _sampled("2", "block mlp", "phalanx", pytest.mark.slow),
        # Zeros on one rank, an agreement next to an arena, a stride that only a gradient has.
        _sampled("2", "matrix_exp,nn.functional.margin_ranking_loss,diag_embed", "phalanx:dynamic"),
        _sampled("3", SOME_OPS, "aot_eager,aot_eager:dynamic"),
    ],
)
def test_blocks_and_ops_are_right_when_compiled(mesh, names, backends, tmp_path):
    file = tmp_path / "sweep.json"
    command = [sys.executable, "-m", "phalanx.core._cli", "verify", "dtensor", "--mesh", mesh, "--names", names]
    command += ["--samples", "1", "--placings", "2", "--compile", backends, "--json", str(file)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads(file.read_text())["meshes"][mesh]
    for name, record in records.items():
        found = [record["kinds"].get(backend, {}) for backend in backends.split(",")]
        assert any(found), name
        assert all(set(one) <= {"right", "fallback"} for one in found), (name, record["failures"])


# ---- what it finds ---------------------------------------------------------------------------------------------------


def case_of(*tensors):
    return Case(list(tensors), lambda others: (tuple(others), {}), lambda result: result, True)


def attempt(function, ranks, placed, *tensors):
    reference = Reference(function, case_of(*tensors), "a test")
    return Attempt(reference, tuple((one,) for one in placed), ranks, 0)


def local_norm(x):  # of what each rank has, as if it were all
    if type(x) is torch.Tensor:
        return x / x.sum()
    local = x.to_local()
    return DTensor.from_local(local / local.sum(), x.device_mesh, x.placements, shape=x.shape)


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 if type(grad) is torch.Tensor else grad


def raises_on_one(x):
    if type(x) is not torch.Tensor and x.device_mesh.get_rank() == 1:
        raise ValueError("on one rank only")
    return x + 1


def raises(x):
    if type(x) is not torch.Tensor:
        raise ValueError("on all ranks")
    return x + 1


def findings(rank, world_size):
    ranks = Ranks((2,))
    x = torch.arange(1.0, 6.0).requires_grad_()
    found = {}
    for name, placed in (("cut", S(0)), ("whole", R), ("terms", P)):
        found[f"add {name}"] = attempt(lambda x: x + 1, ranks, [placed], x).values()
    found["wrong value"] = attempt(local_norm, ranks, [S(0)], x.detach()).values()
    half = attempt(HalfGradient.apply, ranks, [S(0)], x)
    found["half"] = half.values()
    found["wrong gradient"] = half.gradients()
    right = attempt(lambda x: (x * x).mean(), ranks, [S(0)], x)
    found["mean"], found["its gradient"] = right.values(), right.gradients()
    found["in place"] = attempt(lambda x: x.mul_(2), ranks, [S(0)], x.detach()).written()
    found["not in place"] = attempt(lambda x: x * 2, ranks, [S(0)], x.detach()).written()
    found["raises"] = attempt(raises, ranks, [R], x).values()
    found["fallback"] = attempt(lambda x: x.median(), ranks, [S(0)], x).values()
    try:
        attempt(raises_on_one, ranks, [R], x).values()
        found["raises on one"] = "not noticed"
    except OutOfStep:
        found["raises on one"] = "noticed"
    return found


def test_what_is_wrong_is_found_on_every_rank():
    want = {
        "add cut": "right",
        "add whole": "right",
        "add terms": "right",
        "wrong value": "wrong",
        "half": "right",
        "wrong gradient": "wrong",
        "mean": "right",
        "its gradient": "right",
        "in place": "right",
        "not in place": "wrong",
        "raises": "error",
        "fallback": "fallback",
        "raises on one": "noticed",
    }
    assert run_ranks(findings, 2, start_torch=True) == [want, want]


def shows_another_shape(x):
    """An op of which ranks show other results: no error, and of each rank alone no wrong value."""
    if type(x) is torch.Tensor:
        return x.detach() * 1
    rows = x.device_mesh.get_rank() + 1
    return DTensor.from_local(torch.ones(rows), x.device_mesh, [R]).neg().sum() * 0 + x.detach()


def outcomes(rank, world_size):
    ranks = Ranks((2,), compare_outcomes=True)
    x = torch.arange(1.0, 6.0).requires_grad_()
    fine = attempt(lambda x: (x * x).mean(), ranks, [S(0)], x)
    found = [fine.values(), fine.gradients(), ranks.outcomes.compared > 0]
    for function in (raises_on_one_op, shows_another_shape):
        one = attempt(function, ranks, [R], x)
        found += [one.values(), "ranks came to different outcomes: rank 0" in one.text]
    return found


def raises_on_one_op(x):
    """An op that is refused on one rank: it writes into what is marked as a copy there."""
    result = x + 1
    if type(x) is not torch.Tensor and x.device_mesh.get_rank() == 1:
        result._is_view_of_copy = True
    return result.detach().mul_(1) if type(x) is torch.Tensor else result.mul_(1)


def test_ranks_compare_the_outcome_of_each_op():
    want = ["right", "right", True, "wrong", True, "wrong", True]
    assert run_ranks(outcomes, 2, start_torch=True) == [want, want]


# ---- what it found ---------------------------------------------------------------------------------------------------


def mended(rank, world_size):
    mesh = init_device_mesh("cpu", (2,))

    def on(tensor, placement):
        return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)

    found = {}
    # Below __torch_dispatch__ torch makes no conj() any more: a padded piece was sent as it lies in memory.
    c = torch.complex(torch.arange(6.0), torch.arange(6.0) + 1).view(3, 2)
    whole = on(torch.zeros_like(c), R)
    whole.copy_(on(c, S(0)).conj())
    found["conj"] = torch.equal(whole.to_local(), c.conj())
    x = torch.arange(6.0).view(1, 2, 3)
    # Rank 1 gets nothing, and does not come back for it: rank 0 must not wait for that.
    moved = on(x, S(2)).redistribute(placements=[S(0)]).to_local()
    found["nothing received"] = torch.equal(moved, x if rank == 0 else x[:0])
    dist.barrier()
    pairs = torch.arange(8.0).view(4, 2)
    complex_pairs = torch.view_as_complex(on(pairs, S(1))).full_tensor()
    found["stride"] = torch.equal(complex_pairs, torch.view_as_complex(pairs))
    turned = on(pairs, S(0))
    turned.transpose_(0, 1)
    found["transpose_"] = torch.equal(turned.full_tensor(), pairs.t()) and turned.placements == (S(1),)
    scaled = on(pairs, S(0))
    scaled.ldexp_(on(torch.tensor([1, 2]), R))
    found["ldexp_"] = torch.equal(scaled.full_tensor(), pairs * torch.tensor([2.0, 4.0]))
    # torch's formula of this gradient makes zeros of its own.
    y = on(torch.tensor([[1.0, 3.0, 2.0], [4.0, 0.0, 5.0]]), S(0)).requires_grad_()
    y.cummax(1).values.sum().backward()
    found["zeros in a gradient"] = torch.equal(y.grad.full_tensor(), torch.tensor([[1.0, 2.0, 0.0], [2.0, 0.0, 1.0]]))
    # For an input without elements _cdist_backward returns a tensor without the batch dim.
    a, b = on(torch.ones(4, 5), S(0)).requires_grad_(), on(torch.ones(0, 3, 5), R)
    torch.cdist(a, b).sum().backward()
    found["empty batch"] = torch.equal(a.grad.full_tensor(), torch.zeros(4, 5))
    return [name for name, right in found.items() if not right]


def test_what_the_sweep_found_stays_mended():
    assert run_ranks(mended, 2, start_torch=True) == [[], []]


# ---- what is tried ---------------------------------------------------------------------------------------------------


def test_placings_cut_every_dim_of_every_tensor_and_have_a_partial():
    x, y = torch.zeros(4, 6), torch.zeros(6)
    found = placings([x, y], (2,), 100)
    assert ((P,), (R,)) in found
    assert ((R,), (R,)) in found
    for placed in ((S(0), R), (S(1), R), (R, S(0)), (S(1), S(0))):
        assert tuple((one,) for one in placed) in found
    assert len(placings([x, y], (2,), 3)) == 3
    pairs = placings([x, y], (2, 2), 12)
    assert len(pairs) == 12
    assert all(len(placements) == 2 for placed in pairs for placements in placed)
    # A bool has no sum.
    assert not any(P in one for placed in placings([x.bool()], (2,), 100) for one in placed)


@pytest.mark.parametrize(
    ("size", "placed", "mesh", "kind"),
    [
        (4, [S(0)], (2,), "even"),
        (5, [S(0)], (2,), "uneven"),
        (1, [S(0)], (2,), "empty"),
        (5, [R], (2,), "even"),
        (0, [S(0)], (2,), "even"),
        (6, [S(0), S(0)], (2, 2), "uneven"),
        (8, [S(0), S(0)], (2, 2), "even"),
    ],
)
def test_placings_are_named_by_the_pieces_that_ranks_get(size, placed, mesh, kind):
    assert kind_of([torch.zeros(size)], (tuple(placed),), mesh) == kind


def amplifies(x):
    """Exact for the value below, of which float64 has the same; what rounds the input shows in the fourth digit."""
    return (x - 1) * 1e6


@pytest.mark.parametrize(("function", "value", "is_wider"), [(amplifies, 1 + 2**-10, True), (torch.floor, 2.0, False)])
def test_rounding_that_an_op_amplifies_is_allowed_and_a_jump_is_not(function, value, is_wider):
    case = Case([torch.full((4,), value)], lambda tensors: (tuple(tensors), {}), lambda result: result, False)
    reference = Reference(function, case, "")
    before = reference.coarsest
    reference.allow_its_own_error()
    assert reference.coarsest < 1e-5
    assert (reference.coarsest > 2 * before) == is_wider


def test_tensors_in_nests_are_replaced_in_order():
    a, b, c = (torch.full((), float(index)) for index in range(3))
    nest = ([a, 1, (b, "x")], {"k": c, "n": None})
    assert replaced(nest, iter(["A", "B", "C"])) == ([("A"), 1, ("B", "x")], {"k": "C", "n": None})


# ---- what is kept ----------------------------------------------------------------------------------------------------


def test_a_report_is_kept_and_counted(tmp_path):
    report = DTensorReport(tmp_path / "sweep.json")
    for name, counts in {"a": {"right": 3}, "b": {"right": 1, "fallback": 1}, "c": {"right": 5, "wrong": 1}}.items():
        record = Record()
        for status, count in counts.items():
            for _ in range(count):
                record.count("even", status, "why" if status == "wrong" else "")
        report.put("2", name, record)
    left_out = Record()
    left_out.note("no sample with dense tensors")
    report.put("2", "d", left_out)
    report.save()
    again = DTensorReport(tmp_path / "sweep.json", resume=True)
    assert again.meshes == report.meshes
    assert [record.worst for record in again.meshes["2"].values()] == ["right", "fallback", "wrong", None]
    assert again.meshes["2"]["c"].failures == ["even wrong: why"]
    assert reasons(again.meshes["2"]) == {"no sample with dense tensors": ["d"]}
    counts = table(again)[1].split()
    assert counts == ["2", "even", "3", "2", "1", "0", "1"]
    again.forget_failures()
    assert list(again.meshes["2"]) == ["a", "b", "d"]
