"""explain: rule, placements and communication of every op."""

import pytest
import torch
import torch.distributed as dist

from phalanx.dtensor import AbstractMesh, DTensor, Partial, Replicate, Shard, distribute_tensor
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor.explain import explain
from ranks import run_ranks

R = Replicate()


def told(rank, size):
    mesh = dist.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    x, up, down = torch.randn(4, 6), torch.randn(6, 8), torch.randn(8, 6)
    dx = distribute_tensor(x, mesh, [R])
    dup, ddown = (distribute_tensor(w, mesh, [Shard(1 - i)]).requires_grad_() for i, w in enumerate((up, down)))

    def block():
        y = (torch.relu(dx @ dup) @ ddown).redistribute(placements=[R])
        y.sum().backward()
        return y

    report = explain(block)
    assert torch.allclose(report.result.to_local(), torch.relu(x @ up) @ down, atol=1e-5)
    ops = [one for one in report.records if one.kind == "rule"]
    assert [one.op for one in ops][:2] == ["aten.mm.default", "aten.relu.default"], ops
    first, second = [one for one in ops if one.op == "aten.mm.default"][:2]
    assert first.inputs == ["float32[4, 6] (tp: R)", "float32[6, 8] (tp: S(1))"]
    assert (
        first.outputs == ["float32[4, 8] (tp: S(1))"] and not first.steps and first.text.startswith("m k, k n -> m n")
    )
    assert second.outputs == ["float32[4, 6] (tp: P(sum))"]
    # The program asks for one all_reduce, and the ops need none.
    assert report.collectives == {"all_reduce": 1} and report.bytes_moved == 4 * 6 * 4 and report.cost_us == 0
    asked = next(one for one in report.records if one.kind == "program")
    assert asked.text == "asked for by the program" and asked.collectives == [("all_reduce", 96)]
    text = str(report)
    assert "nothing is sent" in text and "1 all_reduce, 96 bytes" in text

    # An op that needs communication says which argument goes where.
    rows = distribute_tensor(x, mesh, [Shard(0)])
    report = explain(lambda: rows @ rows.t())
    (moved,) = [one for one in report.records if one.op == "aten.mm.default"]
    assert [(argument, step.collective) for argument, step in moved.steps] == [("mat2", "all_gather")]
    assert moved.cost_us == report.cost_us > 0 and "argument mat2: all_gather" in str(report)
    assert sum(report.collectives.values()) == 1

    # What is handled by itself, decomposed or without a rule says so.
    assert explain(lambda: rows.sum().item()).records[-1].kind == "handled"
    kinds = {one.kind for one in explain(torch.linalg.matrix_exp, rows @ rows.t()).records}
    assert kinds & {"replicated", "decomposed", "rule"}

    with pytest.raises(RuntimeError, match="mixed"):
        explain(torch.add, rows, x)
    return report.collectives


def test_every_op_tells_its_rule_and_what_it_sends():
    first, second = run_ranks(told, 2, start_torch=True)
    assert first == second


def test_a_plan_is_told_without_ranks():
    spec = DTensorSpec(
        AbstractMesh((2, 2), mesh_dim_names=("dp", "tp")), (Shard(0), Partial()), (4, 4), None, torch.float32
    )
    x = DTensor._wrap(torch.ones(2, 4), spec)
    report = explain(lambda: (x + x).t())
    assert [one.op for one in report.records] == ["aten.add.Tensor", "aten.t.default"]
    assert report.records[1].outputs == ["float32[4, 4] (dp: S(1), tp: P(sum))"]
    assert "2 ops, no collective, 0 bytes" in str(report)
