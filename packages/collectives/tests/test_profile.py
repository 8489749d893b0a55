"""What torch's profilers and execution-trace observers see of collectives, read as HTA reads it."""

import json

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

import phalanx.collectives as pc
from c10d_groups import join, run_groups
from phalanx.collectives.profiling import flight_record
from ranks import scratch

COMMON = {
    "dtype": "Float",
    "Group size": 2,
    "Process Group Name": "0",
    "Process Group Ranks": "[0, 1]",
    "Global rank start": 0,
    "Global rank stride": 1,
}


def profiled(body):
    """Runs it under a profiler and an observer; gives the events of the trace, those of the profiler, and the nodes."""
    folder = scratch() / f"rank{dist.get_rank()}"
    folder.mkdir()
    observer = ExecutionTraceObserver().register_callback(str(folder / "nodes.json"))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, execution_trace_observer=observer) as prof:
        body()
    prof.export_chrome_trace(str(folder / "trace.json"))
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    nodes = json.loads((folder / "nodes.json").read_text())["nodes"]
    comms = [e["args"] for e in trace if e.get("name") == "record_param_comms"]
    return sorted(comms, key=lambda args: args["Ev Idx"]), prof.events(), nodes


def numbers(channel, record=None):
    """The collectives that the flight recorder has of this rank, by their numbers."""
    record = json.loads(record or flight_record())
    own = [member for member in record["groups"][0]["members"] if member["pid"] == record["pid"]]
    return {
        entry["sequence"]: entry["call"]
        for listed in own[0]["channels"]
        if listed and listed["channel"] == channel
        for entry in listed["entries"]
    }


def backend(rank, size):
    join(rank, size)
    dist.barrier()
    x = torch.ones(6)
    parts = [torch.empty(6) for _ in range(size)]
    whole, half, uneven = torch.empty(12), torch.empty(3), torch.empty(3 + rank)

    def body():
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.broadcast(x, 1)
        dist.reduce(x, 0)
        dist.all_gather(parts, x)
        dist.all_gather_into_tensor(whole, x)
        dist.reduce_scatter_tensor(half, x)
        dist.all_to_all_single(uneven, x[: 3 + rank], [1 + rank, 2], [1 + rank, 2])
        dist.gather(x, parts if rank == 0 else None, 0)
        dist.scatter(x, parts if rank == 1 else None, 1)
        dist.all_reduce_coalesced([x, whole])
        (dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)).wait()
        dist.barrier()

    comms, events, nodes = profiled(body)
    expected = [
        ("allreduce", 6, 6),
        ("allreduce", 6, 6),
        ("broadcast", 6, 6),
        ("reduce", 6, 6),
        ("all_gather", 6, 12),
        ("_allgather_base", 6, 12),
        ("_reduce_scatter_base", 6, 3),
        ("all_to_allv", 3 + rank, 3 + rank),
        ("gather", 6, 12),
        ("scatter", 12, 6),
        ("allreduce_coalesced", 18, 18),
        ("send" if rank == 0 else "recv", 6, 6),
        ("barrier", 0, 0),
    ]
    assert [(c["Collective name"], c["In msg nelems"], c["Out msg nelems"]) for c in comms] == expected
    for each in comms[:-1]:
        assert {key: each[key] for key in COMMON} == COMMON
        assert each["Process Group Description"] == "default_pg"
    assert (comms[2]["Rank"], comms[3]["Rank"]) == (1, 0)
    split = f"[{1 + rank}, 2]"
    assert (comms[7]["In split size"], comms[7]["Out split size"]) == (split, split)
    assert comms[11].get("Dst Rank" if rank == 0 else "Src Rank") == 1 - rank
    assert [c.get("Is asynchronized op") for c in comms[:2]] == [0, 1]

    shapes = {e.name: e.input_shapes for e in events if e.name.startswith("phalanx:")}
    assert shapes["phalanx:all_reduce"] == [[6]]
    assert shapes["phalanx:all_reduce_coalesced"] == [[6], [12]]
    assert all(e.is_async for e in events if e.name.startswith("phalanx:") and "::" not in e.name)
    assert [node["name"] for node in nodes].count("record_param_comms") == len(comms)

    if "Seq" in comms[0]:  # from torch 2.13 on
        recorded = numbers(channel=1)
        collectives = [c for c in comms if c["Collective name"] not in ("send", "recv")]
        assert [c["Seq"] for c in collectives] == list(range(2, 2 + len(collectives)))
        assert max(recorded) == collectives[-1]["Seq"]
        assert [recorded[number] for number in (2, 4, 5)] == ["all_reduce", "broadcast", "reduce"]
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    number = work._get_sequence_number() if hasattr(work, "_get_sequence_number") else max(numbers(channel=1))
    assert number == max(numbers(channel=1))
    dist.destroy_process_group()


def test_the_back_end_writes_the_events_of_nccl():
    run_groups(backend, 2)


def refused(rank, size):
    join(rank, size)
    x = torch.ones(4)
    dist.all_reduce(x)
    with pytest.raises((ValueError, NotImplementedError)):
        dist.all_reduce(x, dist.ReduceOp.BXOR)  # not of float32
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend._get_sequence_number_for_group() == max(numbers(channel=1)) == 1
    dist.destroy_process_group()


def test_a_refused_call_takes_no_number():
    run_groups(refused, 2)


def functional(rank, size):
    join(rank, size)
    group = dist.group.WORLD
    x = torch.ones(4)
    pc.wait_tensor(pc.all_reduce(x, "sum", group))

    def body():
        pc.wait_tensor(pc.all_reduce(x, "sum", group))
        pc.wait_tensor(pc.all_gather_tensor(x, 0, group))
        torch.ops.phalanx.all_reduce_(x, "sum", "0")
        torch.ops.phalanx_ordered.all_reduce_(x, "sum", "0", torch.empty(0))  # as compiled graphs call it
        with pc.coalescing_manager(group):
            pc.all_reduce(x, "sum", group)
            pc.all_gather_tensor(x, 0, group)
        (pc.isend(x, 1) if rank == 0 else pc.irecv(x, 0)).wait()

    comms, events, nodes = profiled(body)
    assert [(c["Collective name"], c["In msg nelems"], c["Out msg nelems"]) for c in comms] == [
        ("allreduce", 4, 4),
        ("_allgather_base", 4, 8),
        ("allreduce", 4, 4),
        ("allreduce", 4, 4),
        ("coalesced", 8, 12),
        ("send" if rank == 0 else "recv", 4, 4),
    ]
    for each in comms:
        assert {key: each[key] for key in COMMON} == COMMON
    assert comms[-1].get("Dst Rank" if rank == 0 else "Src Rank") == 1 - rank
    assert all(e.is_async for e in events if e.name.startswith("phalanx:") and "::" not in e.name)
    assert [node["name"] for node in nodes].count("record_param_comms") == len(comms)
    if "Seq" in comms[0]:
        assert [c["Seq"] for c in comms[:-1]] == [2, 3, 4, 5, 6]
        assert sorted(numbers(channel=0)) == [1, 2, 3, 4, 5, 6]
    dist.destroy_process_group()


def test_functional_collectives_and_messages_write_them_too():
    run_groups(functional, 2)


def symmetric(rank, size):
    import phalanx.symm_mem as symm_mem
    from phalanx.symm_mem._state import current

    join(rank, size)
    dist.barrier()
    x = symm_mem.empty(8, dtype=torch.float32)
    symm_mem.rendezvous(x, dist.group.WORLD)
    x.fill_(rank)
    ops = torch.ops.phalanx

    def body():
        ops.one_shot_all_reduce(x, "sum", "0")
        ops.two_shot_all_reduce_(x, "sum", "0")
        ops.reduce_scatter_out(x.view(2, 4), "0", True, torch.empty(2, 2))  # columns: no collective of the core
        ops.multimem_one_shot_reduce_out(x, "sum", 0, "0", torch.empty(8))
        ops.reduce_scatter_out(x, "0", False, torch.empty(4))

    comms, _, _ = profiled(body)
    summed, scattered = ("allreduce", 8, "0"), ("_reduce_scatter_base", 8, "0")
    assert [(c["Collective name"], c["In msg nelems"], c["Process Group Name"]) for c in comms] == [
        summed,
        summed,
        scattered,
        ("multimem_one_shot_reduce_out", 8, "0"),
        scattered,
    ]
    if "Seq" in comms[0]:
        assert [c.get("Seq") for c in comms] == [1, 2, None, 3, 4]
        recorded = numbers(channel=0, record=current().world.dump())
        assert recorded == dict(
            enumerate(["symm_all_reduce", "symm_all_reduce", "symm_reduce", "symm_reduce_scatter"], 1)
        )
    dist.destroy_process_group()


def test_sums_of_symmetric_memory_write_them_too():
    run_groups(symmetric, 2)
