"""CommDebugMode, visualize_sharding, draw_sharding."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import phalanx.collectives as pc
from phalanx.dtensor import AbstractMesh, DTensor, Partial, Replicate, Shard, StridedShard, distribute_tensor
from phalanx.dtensor._dtensor_spec import DTensorSpec
from phalanx.dtensor.debug import CommDebugMode, draw_sharding, visualize_sharding
from ranks import run_ranks, scratch

PY = torch.ops.c10d_functional
R = Replicate()


class Block(torch.nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.up = torch.nn.Linear(4, 8, bias=False)
        self.down = torch.nn.Linear(8, 4, bias=False)
        for module, placement in ((self.up, Shard(0)), (self.down, Shard(1))):
            module.weight = torch.nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [placement]))

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).redistribute(placements=[R])


def counted(rank, size):
    mesh = dist.init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    net = torch.nn.Sequential(Block(mesh), Block(mesh))
    x = distribute_tensor(torch.randn(2, 4), mesh, [R])
    mode = CommDebugMode()
    with mode:
        out = net(x)
        forward = dict(mode.get_comm_counts())
        out.sum().backward()
    # A tensor-parallel block sums once in each direction; the input of the first needs no gradient.
    assert forward == {PY.all_reduce: 2}
    assert mode.get_comm_counts() == {PY.all_reduce: 3} and mode.get_total_counts() == 3
    own = {name: (one["forward"], one["backward"]) for name, one in mode.comm_module_counts.items()}
    assert own["Global"] == ({PY.all_reduce: 2}, {PY.all_reduce: 1})
    assert own["Sequential"] == ({PY.all_reduce: 2}, {PY.all_reduce: 1})
    assert own["Sequential.0"][0] == own["Sequential.1"][0] == {PY.all_reduce: 1}
    assert "Sequential.0.up" not in own or own["Sequential.0.up"][0] == {}
    assert mode.get_sharding_info()["Sequential.1.down.weight"] == (Shard(1),)
    assert list(mode.get_parameter_info()["Sequential.0.up"]) == ["weight"]

    table = mode.generate_comm_debug_tracing_table(noise_level=1)
    for text in (
        "Sequential.0.up",
        "*module type: Linear",
        "*weight: (Shard(dim=0),)",
        "FORWARD PASS",
        "BACKWARD PASS",
    ):
        assert text in table, table
    assert "*c10d_functional.all_reduce: 2" in table and "aten.mm.default" in table
    assert "aten.relu" not in mode.generate_comm_debug_tracing_table(noise_level=0)
    assert "aten.t.default" in mode.generate_comm_debug_tracing_table() and "aten.t.default" not in table
    path = Path(scratch()) / f"log-{rank}"
    mode.log_comm_debug_tracing_table_to_file(str(path))
    assert "\033" not in path.read_text() and "Sequential.1" in path.read_text()
    mode.generate_json_dump(str(path))
    tree = json.loads(path.read_text())
    assert tree["fqn"] == "Global" and tree["children"][0]["fqn"] == "Sequential"
    assert [one["fqn"] for one in tree["children"][0]["children"]] == ["Sequential.0", "Sequential.1"]
    assert dict(tree["collectives_forward"]) == {"c10d_functional.all_reduce": 2}
    assert repr(mode) == "CommDebugMode(get_total_counts()=3)"

    group = dist.group.WORLD
    with mode:  # it begins anew, and sees what the program itself sends
        y = pc.all_gather_tensor(torch.ones(2), 0, group)
        pc.wait_tensor(pc.reduce_scatter_tensor(y + 0, "sum", 0, group))
        torch.distributed._functional_collectives.all_reduce(torch.ones(2), "sum", group).sum()
        dist.all_reduce(torch.ones(1))
        z = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])  # broadcast
        z.redistribute(placements=[Shard(1)])
        x.full_tensor()  # it has it already
    assert mode.get_comm_counts() == {
        PY.all_gather_into_tensor: 1,
        PY.reduce_scatter_tensor: 1,
        PY.all_reduce: 1,
        torch.ops.c10d.allreduce_: 1,
        PY.broadcast: 1,
        PY.all_to_all_single: 1,
    }
    # Recomputed in the backward pass.
    inner = Block(mesh)
    with mode:
        again = torch.utils.checkpoint.checkpoint(inner, x.detach().requires_grad_(), use_reentrant=False)
        again.sum().backward()
    ops = mode.comm_module_operation_counts["Block.up"]["operations_list"]
    assert any(op["is_activation_checkpointing"] for op in ops) and any(not op["is_bw"] for op in ops)
    assert mode.comm_module_counts["Block"]["forward"] == {PY.all_reduce: 1}
    assert "ACTIVATION CHECKPOINTING" in mode.generate_comm_debug_tracing_table()
    # Nothing of it is left.
    assert not torch.nn.modules.module._global_forward_hooks and not torch.nn.modules.module._global_forward_pre_hooks
    with pytest.raises(ZeroDivisionError), mode:
        raise ZeroDivisionError
    assert not torch.nn.modules.module._global_forward_hooks


def test_collectives_are_counted_by_module_and_pass_under_torchs_names():
    run_ranks(counted, 2, start_torch=True)


def nobody(mesh_shape, placements, shape, coordinate=(), names=None):
    spec = DTensorSpec(
        AbstractMesh(mesh_shape, coordinate, mesh_dim_names=names), placements, shape, None, torch.float32
    )
    return DTensor._wrap(torch.empty(spec.local_shape), spec)


def test_the_table_says_which_rank_has_which_rows_and_columns(capsys):
    visualize_sharding(nobody((2, 2), [Shard(0), Shard(1)], (5, 4)), header="weight")
    assert capsys.readouterr().out == (
        "weight\n"
        "         Col 0-1  Col 2-3\n"
        "-------  -------  -------\n"
        "Row 0-2  cpu:0    cpu:1\n"
        "Row 3-4  cpu:2    cpu:3\n"
    )
    visualize_sharding(nobody((2, 2), [R, Shard(0)], (4,)))
    assert capsys.readouterr().out.splitlines()[2:] == ["Row 0-1  cpu:0,2", "Row 2-3  cpu:1,3"]
    visualize_sharding(nobody((2,), [StridedShard(0, 2)], (8, 3)))
    assert capsys.readouterr().out.splitlines()[2:] == [
        "Row 0-1  cpu:0",
        "Row 2-3  cpu:1",
        "Row 4-5  cpu:0",
        "Row 6-7  cpu:1",
    ]
    visualize_sharding(nobody((4,), [Shard(0)], (2, 2)), use_rich=True)  # two ranks have none
    out = capsys.readouterr().out
    assert "cpu:1" in out and "cpu:2" not in out and "\033[30;42m" in out
    for silent in (
        nobody((2,), [Shard(0)], (0, 3)),
        nobody((2,), [Shard(0)], (4, 3), (1,)),
        nobody((2,), [Shard(0)], (4, 3), None),
    ):
        visualize_sharding(silent, header="nothing")
        assert capsys.readouterr().out == ""
    with pytest.raises(
        RuntimeError, match="visualize_sharding: supports only tensors of up to two dims, .* has 3: take"
    ):
        visualize_sharding(nobody((2,), [Shard(0)], (2, 2, 2)))


def test_the_picture_has_a_rectangle_for_each_part(tmp_path):
    path = tmp_path / "weight.svg"
    draw_sharding(nobody((2, 2), [Shard(0), Shard(1)], (5, 4), names=("dp", "tp")), path)
    root = ElementTree.parse(path).getroot()
    name = "{http://www.w3.org/2000/svg}"
    boxes = [one.find(f"{name}rect") for one in root.iter(f"{name}g")]
    titles = [one.find(f"{name}title").text for one in root.iter(f"{name}g")]
    assert titles == [
        "cpu:0: rows 0-2, columns 0-1",
        "cpu:1: rows 0-2, columns 2-3",
        "cpu:2: rows 3-4, columns 0-1",
        "cpu:3: rows 3-4, columns 2-3",
    ]
    heights = [float(box.get("height")) for box in boxes]
    assert heights[0] == heights[1] and abs(heights[0] / heights[2] - 1.5) < 0.01
    assert len({box.get("fill") for box in boxes}) == 4
    assert "mesh (dp=2, tp=2)" in path.read_text()
    other = tmp_path / "other.svg"
    draw_sharding(nobody((2,), [Shard(0)], (4,), (1,)), other)
    assert not other.exists()
    draw_sharding(nobody((2,), [Partial()], ()), other)
    assert "cpu:0,1" in other.read_text()
    with pytest.raises(RuntimeError, match="draw_sharding: supports only"):
        draw_sharding(nobody((2,), [Shard(0)], (2, 2, 2)), other)
