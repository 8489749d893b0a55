"""Checkpoints: written on one mesh, read on others; torch.save, pickle, deepcopy."""

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from phalanx.dtensor import (
    AbstractMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    SizedShard,
    StridedShard,
    _checkpoint,
    distribute_module,
    distribute_tensor,
)
from phalanx.dtensor._dtensor_spec import DTensorSpec
from ranks import run_ranks, scratch

R = Replicate()


def whole(shape, dtype=torch.float32):
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


CASES = {
    "even": ((8, 6), torch.float32),
    "uneven": ((7, 5), torch.float64),
    "few": ((1, 3), torch.int64),  # the second rank has none
    "strided": ((12, 4), torch.bfloat16),
    "sized": ((9, 2), torch.float32),
    "same": ((5,), torch.float32),
    "scalar": ((), torch.float32),
    "empty": ((0, 4), torch.float32),
}


def state_of(mesh, placements):
    """A tensor for each case, with the values it must have."""
    return {
        name: distribute_tensor(whole(shape, dtype), mesh, placements[name]) for name, (shape, dtype) in CASES.items()
    }


def saved_on_two(rank, size, path):
    mesh = dist.init_device_mesh("cpu", (size,))
    placements = {
        "even": [Shard(0)],
        "uneven": [Shard(1)],
        "few": [Shard(0)],
        "strided": [StridedShard(0, 3)],
        "sized": [SizedShard(0, (2, 7))],
        "same": [R],
        "scalar": [R],
        "empty": [Shard(0)],
    }
    state = state_of(mesh, placements)
    assert [len(_checkpoint.chunk_list(state[name])) for name in ("even", "strided", "same")] == [1, 3, 1]
    assert len(_checkpoint.chunk_list(state["few"])) == (1 if rank == 0 else 0)
    dcp.save({"model": state, "step": 3}, checkpoint_id=path)
    metadata = FileSystemReader(path).read_metadata()
    chunks = {fqn: len(one.chunks) for fqn, one in metadata.state_dict_metadata.items() if hasattr(one, "chunks")}
    # A replicated tensor is written once.
    assert chunks["model.same"] == 1 and chunks["model.strided"] == 6 and chunks["model.few"] == 1
    with pytest.raises(dcp.api.CheckpointException, match="no rank has its values; redistribute it"):
        dcp.save({"sum": DTensor.from_local(torch.ones(2), mesh, [Partial()])}, checkpoint_id=path + "-partial")


def loaded(rank, size, path, shape, names):
    mesh = dist.init_device_mesh("cpu", shape)
    kinds = {"S0": Shard(0), "S1": Shard(1), "R": R, "T": StridedShard(0, 2)}
    for row in names:
        given = [kinds[one] for one in row]
        placements = {
            name: [one if getattr(one, "dim", -1) < len(shape_) else R for one in given]
            for name, (shape_, _) in CASES.items()
        }
        state = state_of(mesh, placements)
        for one in state.values():
            one._local_tensor.zero_()
        before = {name: one._local_tensor for name, one in state.items()}
        dcp.load(read := {"model": state, "step": 0}, checkpoint_id=path)
        assert read["step"] == 3
        for name, (shape_, dtype) in CASES.items():
            assert state[name]._local_tensor is before[name] and state[name].placements == tuple(placements[name])
            assert torch.equal(state[name].full_tensor(), whole(shape_, dtype)), (name, row)


def submesh(rank, size, path):
    """A rank outside the mesh of a tensor writes and reads nothing."""
    mesh = dist.DeviceMesh("cpu", [0, 2])
    x = distribute_tensor(whole((5, 2)), mesh, [Shard(0)])
    dcp.save({"x": x}, checkpoint_id=path)
    y = distribute_tensor(torch.zeros(5, 2), mesh, [Shard(1)])
    dcp.load({"x": y}, checkpoint_id=path)
    if rank == 1:
        assert _checkpoint.chunk_list(x) == [] and x.to_local().shape == (0,)
    else:
        assert torch.equal(y.to_local(), whole((5, 2))[:, rank // 2 : rank // 2 + 1])


@pytest.mark.slow
def test_what_two_ranks_save_is_read_on_any_mesh_in_any_placements(tmp_path):
    path = str(tmp_path / "saved")
    run_ranks(saved_on_two, 2, path, start_torch=True)
    run_ranks(loaded, 1, path, (1,), [["S0"], ["R"]], start_torch=True)
    run_ranks(loaded, 3, path, (3,), [["S0"], ["S1"], ["T"], ["R"]], start_torch=True)
    run_ranks(loaded, 4, path, (2, 2), [["S0", "S1"], ["R", "S0"], ["S1", "S1"]], start_torch=True)


def test_ranks_outside_the_mesh_write_and_read_nothing(tmp_path):
    run_ranks(submesh, 3, str(tmp_path / "saved"), start_torch=True)


def model(mesh=None):
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    if mesh is not None:

        def shard(name, module, mesh):
            for key, one in module.named_parameters(recurse=False):
                module.register_parameter(key, torch.nn.Parameter(distribute_tensor(one.data, mesh, [Shard(0)])))

        distribute_module(net, mesh, shard)
    return net


def stepped(net, mesh=None):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    x = whole((3, 4)) / 10
    for _ in range(2):
        net(x if mesh is None else distribute_tensor(x, mesh, [R])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def models(rank, size, path):
    mesh = dist.init_device_mesh("cpu", (size,))
    net = model(mesh)
    optimizer = stepped(net, mesh)
    weights, states = get_state_dict(net, optimizer)
    assert all(type(one) is DTensor for one in weights.values())
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)

    other = model(mesh)
    with torch.no_grad():
        for one in other.parameters():
            one.zero_()
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
    weights, states = get_state_dict(other, fresh)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=path)
    set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=states)
    for mine, theirs in zip(other.parameters(), net.parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())
    for mine, theirs in zip(other.parameters(), net.parameters(), strict=True):
        for key, value in optimizer.state[theirs].items():
            got = fresh.state[mine][key]
            assert torch.equal(
                got.to_local() if isinstance(got, DTensor) else got,
                value.to_local() if isinstance(value, DTensor) else value,
            )
    # And the next step is the same.
    for one, opt in ((net, optimizer), (other, fresh)):
        one(distribute_tensor(whole((3, 4)), mesh, [R])).sum().backward()
        opt.step()
    for mine, theirs in zip(other.parameters(), net.parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())


def test_a_model_and_its_optimizer_go_on_from_a_checkpoint(tmp_path):
    run_ranks(models, 2, str(tmp_path / "saved"), start_torch=True)


def placed(mesh, rows, columns, *, device="cpu"):
    """A module with two weights in these placements, and a scalar buffer."""
    net = torch.nn.Module()
    for name, placements in (("rows", rows), ("columns", columns)):
        zeros = torch.zeros(7, 5, device=device)
        value = distribute_tensor(zeros, mesh, placements, src_data_rank=None)
        net.register_parameter(name, torch.nn.Parameter(value))
    net.register_buffer("count", torch.tensor(0))
    net.register_buffer("plain", torch.zeros(3))
    return net


def whole_state_dicts(rank, size):
    mesh = dist.init_device_mesh("cpu", (2, 2))
    values = {"rows": whole((7, 5)), "columns": -whole((7, 5)), "count": torch.tensor(4), "plain": torch.ones(3)}
    kinds = (
        ([Shard(0), Shard(0)], [Shard(1), R]),
        ([StridedShard(0, 2), Shard(0)], [Shard(0), Shard(1)]),
        ([SizedShard(0, (3, 4)), R], [R, SizedShard(1, (0, 5))]),
    )
    for placements in kinds:
        for broadcast in (False, True):
            for device in ("cpu", "meta") if broadcast else ("cpu",):
                net = placed(mesh, *placements, device=device)
                given = dict(values) if rank == 0 or not broadcast else {}
                options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
                set_model_state_dict(net, given, options=options)
                assert type(net.rows) is DTensor and net.rows.placements == tuple(placements[0])
                assert net.rows.to_local().shape == net.rows._spec.local_shape and net.rows.requires_grad
                for offload in (False, True):
                    options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
                    got = get_model_state_dict(net, options=options)
                    if offload and rank:
                        assert got == {}
                        continue
                    assert all(type(one) is torch.Tensor for one in got.values()) and set(got) == set(values)
                    assert all(torch.equal(got[name], values[name]) for name in values), (placements, device)
        # What stays sharded is of this package, also where it is on the CPU.
        got = get_model_state_dict(net, options=StateDictOptions(cpu_offload=True))
        assert type(got["rows"]) is DTensor and torch.equal(got["rows"].full_tensor(), values["rows"])

        # The state of the optimizer.
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        (net.rows.square().sum() + net.columns.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        for flat in (False, True):
            options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
            states = get_optimizer_state_dict(net, optimizer, options=options)
            moment = states["state.rows.exp_avg"] if flat else states["state"]["rows"]["exp_avg"]
            assert type(moment) is torch.Tensor
            torch.testing.assert_close(moment, 0.2 * values["rows"])
            for broadcast in (False, True):
                fresh = torch.optim.AdamW(net.parameters(), lr=0.5)
                options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
                given = copy.deepcopy(states) if rank == 0 or not broadcast else {}
                set_optimizer_state_dict(net, fresh, given, options=options)
                for name in ("exp_avg", "exp_avg_sq", "step"):
                    mine, theirs = fresh.state[net.rows][name], optimizer.state[net.rows][name]
                    assert type(mine) is type(theirs)
                    if isinstance(mine, DTensor):
                        assert mine.placements == theirs.placements and torch.equal(mine.to_local(), theirs.to_local())
                    else:
                        assert torch.equal(mine, theirs)
                assert fresh.param_groups[0]["lr"] == 0.1


def test_whole_state_dicts_are_gathered_and_loaded():
    run_ranks(whole_state_dicts, 4, start_torch=True)


def between_libraries(rank, size, path):
    """The same file, from torch's DTensor to ours on another mesh, and back."""
    import torch.distributed.tensor as torch_tensor

    mesh, line = dist.init_device_mesh("cpu", (2, 2)), dist.init_device_mesh("cpu", (4,))
    values = whole((7, 5))
    theirs = torch_tensor.distribute_tensor(values, line, [torch_tensor.Shard(0)])
    dcp.save(
        {"x": theirs, "y": torch_tensor.distribute_tensor(values, mesh, [R, torch_tensor.Shard(1)])}, checkpoint_id=path
    )
    ours = {name: distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1), Shard(0)]) for name in ("x", "y")}
    dcp.load(ours, checkpoint_id=path)
    assert all(torch.equal(one.full_tensor(), values) for one in ours.values())
    future = dcp.async_save(ours, checkpoint_id=path + "-back")
    future.result()
    back = {
        name: torch_tensor.distribute_tensor(torch.zeros(7, 5), line, [torch_tensor.Shard(1)]) for name in ("x", "y")
    }
    dcp.load(back, checkpoint_id=path + "-back")
    assert all(torch.equal(one.full_tensor(), values) for one in back.values())


def test_files_of_torchs_tensors_are_read_and_files_for_them_written(tmp_path):
    run_ranks(between_libraries, 4, str(tmp_path / "saved"), start_torch=True)


def files(rank, size):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    path = Path(scratch()) / f"saved-{rank}"
    for placements in (
        [Shard(0), Replicate()],
        [Shard(0), SizedShard(1, (1, 2))],
        [StridedShard(0, 2), Shard(0)],
        [Partial("max"), Partial("max")],
    ):
        local = torch.randn(2, 2 if not isinstance(placements[1], SizedShard) else 1 + rank % 2)
        x = DTensor.from_local(local, mesh, placements, shape=(4, 3) if isinstance(placements[1], SizedShard) else None)
        torch.save({"x": x, "p": torch.nn.Parameter(x)}, path)
        read = torch.load(path, weights_only=True)
        for got in (read["x"], pickle.loads(pickle.dumps(x)), copy.deepcopy(x), copy.copy(x)):
            assert type(got) is DTensor and got.placements == x.placements and got.shape == x.shape
            assert got.device_mesh == mesh and got._spec is x._spec
            assert torch.equal(got.to_local(), local) and not got.requires_grad
        assert type(read["p"]) is DTensor and read["p"].requires_grad and isinstance(read["p"], torch.nn.Parameter)
        assert torch.equal(read["p"].to_local(), local)
    y = distribute_tensor(whole((4, 4)).requires_grad_(), mesh, [Shard(0), R])
    twin = copy.deepcopy(y)
    with torch.no_grad():
        twin.add_(1)
    assert twin.requires_grad and twin.is_leaf and (twin.to_local() - y.to_local()).unique().tolist() == [1.0]


def test_tensors_go_through_files_pickle_and_deepcopy():
    run_ranks(files, 4, start_torch=True)


class _Elsewhere:
    pass


def test_what_is_no_class_of_ours_is_still_refused():
    spec = DTensorSpec(AbstractMesh((2,)), (Shard(0),), (4,), (1,), torch.float32)
    x = DTensor._wrap(torch.ones(2), spec)
    x.note = _Elsewhere()
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="_Elsewhere"):
        torch.load(buffer, weights_only=True)
    del x.note
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True)._spec is spec


def test_a_box_that_a_rank_does_not_have_is_an_error():
    from torch.distributed.checkpoint.metadata import MetadataIndex

    x = DTensor._wrap(
        torch.ones(2, 3), DTensorSpec(AbstractMesh((2,), (1,)), (Shard(0),), (4, 3), (3, 1), torch.float32)
    )
    assert _checkpoint.tensor_shard(x, MetadataIndex("x", (2, 0))) is x._local_tensor
    with pytest.raises(
        ValueError, match=r"this rank has no part of .x. at offset .0, 0.; its parts are at \[\(2, 0\)\]"
    ):
        _checkpoint.tensor_shard(x, MetadataIndex("x", (0, 0)))
