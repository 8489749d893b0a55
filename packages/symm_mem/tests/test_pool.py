"""Memory pools: torch's own ops allocate symmetric memory inside a `with`."""

import copy
import gc
import io
import itertools
import os
import random
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

from c10d_groups import has_compiler
from compiled import native_folder
from phalanx import symm_mem
from phalanx.core import FileStore, InvalidArgumentError, UnsupportedError
from phalanx.symm_mem._pool import MemPool, _build, get_mem_pool, get_mempool_allocator, use_mem_pool
from ranks import RanksFailed, run_ranks, scratch

compiled = pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler")
pytestmark = pytest.mark.timeout(600)
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def native():
    """Where the compiled part is, ready: to compile it takes longer than a test of ranks may."""
    with pytest.MonkeyPatch.context() as patch:
        if not os.environ.get("PHALANX_NATIVE"):
            patch.setenv("PHALANX_NATIVE", str(native_folder("pool")))
        if has_compiler():
            _build.module()
        yield


def is_symm(*tensors):
    return [symm_mem.is_symm_mem_tensor(tensor) for tensor in tensors]


def segments_mapped():
    gc.collect()
    with open("/proc/self/maps") as maps:
        return sum("memfd:phalanx" in line for line in maps)


# ---- what becomes symmetric ------------------------------------------------------------------------------------------


def one_rank(rank, world_size):
    symm_mem.set_group_info("one", 0, 1, FileStore(scratch() / "store"))
    before = torch.empty(5)
    pool = get_mem_pool()
    assert pool is get_mem_pool("cpu")
    assert (pool.segments, pool.device) == ([], torch.device("cpu"))  # it takes nothing before it is used
    with use_mem_pool(pool):
        a = torch.randn(100, 30)
        b = torch.relu(a @ a.T)
        empty, scalar = torch.empty(0, 7), torch.tensor(3.0)
        made = [a, b, a.t(), b[3:, 2:5], a.clone(), torch.empty(3, dtype=torch.bfloat16), empty, scalar]
        meta = torch.empty(3, device="meta")
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(torch.empty(3)))
        thread.start()
        thread.join()
    after = torch.empty(5)
    assert is_symm(*made) == [True] * len(made)
    assert is_symm(before, after, meta, *elsewhere) == [False] * 4
    assert all(tensor.untyped_storage().data_ptr() % 64 == 0 for tensor in made)
    assert len({tensor.untyped_storage().data_ptr() for tensor in made}) == 6  # two are views
    torch.testing.assert_close(b, (a @ a.T).clamp(min=0))

    # One segment serves all. A handle says where the tensor is in it.
    (segment,) = pool.segments
    assert (segment.total_bytes, pool.reserved_bytes) == (2 * MIB, 2 * MIB)
    sizes = [12032, 40000, 12032, 64, 64, 64]  # those of the six storages, in multiples of 64
    assert pool.used_bytes == segment.used_bytes == sum(sizes)
    handle = symm_mem.rendezvous(b[3:, 2:5], "one")
    assert handle.offset == b[3:, 2:5].data_ptr() - segment.address
    assert handle.get_remote_tensor(0, (3,), torch.float32).equal(b[3, 2:5])
    assert symm_mem.rendezvous(empty, "one").get_remote_tensor(0, (0, 7), torch.float32).shape == (0, 7)
    assert symm_mem.rendezvous(scalar, "one").get_remote_tensor(0, (), torch.float32).item() == 3

    del made, a, b, empty, scalar, handle
    assert pool.used_bytes == 0
    assert get_mempool_allocator("cpu") is symm_mem.get_allocator("cpu")
    symm_mem.finalize()
    with pytest.raises(InvalidArgumentError, match="another rank context"), use_mem_pool(pool):
        pass
    del pool, segment


@compiled
def test_what_torch_allocates_inside_the_with_is_symmetric_and_nothing_else():
    run_ranks(one_rank, 1, check_leaks=True)


def nested(rank, world_size):
    outer, inner = MemPool(), MemPool()
    with use_mem_pool(outer):
        a = torch.empty(10)
        b = []

        def fails():
            with use_mem_pool(inner):
                b.append(torch.empty(10))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fails()
        c = torch.empty(10)
        with use_mem_pool(outer):
            d = torch.empty(10)
        e = torch.empty(10)
    (of_outer,), (of_inner,) = outer.segments, inner.segments
    assert [each.data_ptr() - of_outer.address for each in (a, c, d, e)] == [0, 64, 128, 192]
    assert b[0].data_ptr() == of_inner.address
    assert is_symm(torch.empty(10)) == [False]
    # Each thread has its own.
    places, entered = [], threading.Barrier(2)

    def allocate(pool):
        with use_mem_pool(pool):
            entered.wait()
            places.append((pool, torch.empty(10).data_ptr()))
            entered.wait()

    threads = [threading.Thread(target=allocate, args=(pool,)) for pool in (outer, inner)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dict(places) == {outer: of_outer.address + 256, inner: of_inner.address + 64}
    # Left in another order than entered: said, and not done.
    first, second = use_mem_pool(outer), use_mem_pool(inner)
    first.__enter__()
    second.__enter__()
    with pytest.raises(RuntimeError, match="another order"):
        first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert torch.empty(10).data_ptr() == of_outer.address + 256


@compiled
def test_pools_nest_and_end_with_their_with():
    run_ranks(nested, 1)


def changes_of_size(rank, world_size):
    early = torch.zeros(4)  # its storage knows the allocator that was there before
    pool = get_mem_pool()
    with use_mem_pool(pool):
        tensor = torch.arange(10.0)
        tensor.resize_(3 * MIB)
        assert is_symm(tensor) == [True]
        out = torch.empty(0)
        torch.add(torch.ones(50), 1, out=out)
        early.resize_(100)
    assert tensor[:10].tolist() == list(range(10))
    assert is_symm(out, early) == [True, False]
    assert out.sum() == 100
    tensor.untyped_storage().resize_(8 * 5)  # outside: ordinary memory again
    assert is_symm(tensor) == [False]
    assert tensor.untyped_storage().nbytes() == 40
    assert torch.empty(0).set_(tensor.untyped_storage()).tolist() == list(range(10))
    assert pool.used_bytes == 256  # `out`

    # Copies and messages of them
    with use_mem_pool(pool):
        kept = torch.arange(1000)
        lazy = torch._lazy_clone(kept)
        lazy += 1
        assert is_symm(lazy) == [True]
        assert is_symm(copy.deepcopy(kept)) == [False]  # here torch asks its default allocator by name
    assert kept[-1] == 999
    assert lazy[-1] == 1000
    file = io.BytesIO()
    torch.save(kept, file)
    file.seek(0)
    assert torch.load(file).equal(kept)
    array = kept.numpy()
    kept[0] = 5
    assert array[0] == 5
    assert is_symm(torch.from_numpy(array[3:])) == [True]  # the memory is what counts
    kept.share_memory_()
    assert is_symm(kept) == [False]
    assert kept.sum() == 499505


@compiled
def test_tensors_of_a_pool_are_resized_and_copied_like_others():
    run_ranks(changes_of_size, 1)


# ---- the pieces ------------------------------------------------------------------------------------------------------


def many_pieces(rank, world_size):
    pool, chance = get_mem_pool(), random.Random(0)
    live = {}

    def check():
        spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.numel()) for tensor in live.values())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert all(tensor.eq(key % 251).all() for key, tensor in live.items())
        assert pool.used_bytes == sum(-(-tensor.numel() // 64) * 64 for tensor in live.values())

    with use_mem_pool(pool):
        for key in range(3000):
            nbytes = chance.choice([1, 64, 65, 1000, 5000, 70_000]) * chance.randint(1, 4)
            live[key] = torch.full((nbytes,), key % 251, dtype=torch.uint8)
            while len(live) > 60 or (live and chance.random() < 0.45):
                del live[chance.choice(list(live))]
            if key % 500 == 0:
                check()
        check()
        # Segments double, and what is large has one of its own, in multiples of 64 KiB.
        large = torch.empty(9 * MIB + 1, dtype=torch.uint8)
    sizes = [each.total_bytes for each in pool.segments]
    assert sizes == [2 * MIB << i for i in range(len(sizes) - 1)] + [9 * MIB + (64 << 10)]
    live.clear()
    pool.trim()
    assert [each.total_bytes for each in pool.segments] == sizes[-1:]
    del large
    with use_mem_pool(pool):  # the holes have become one: all of it fits again
        torch.empty(sizes[-1], dtype=torch.uint8)
    assert pool.reserved_bytes == sizes[-1]
    pool.trim()
    assert pool.segments == []
    assert segments_mapped() == 0

    def hammer(seed):
        chance, mine = random.Random(seed), []
        with use_mem_pool(pool):
            for turn in range(400):
                mine.append(torch.full((chance.randint(0, 40_000),), seed))
                if len(mine) > 20:
                    assert mine.pop(chance.randrange(20)).eq(seed).all(), turn
        passed.extend(mine)  # freed by another thread

    passed = []
    threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(passed) == 80
    del passed[:]
    assert pool.used_bytes == 0
    symm_mem.finalize()


@compiled
def test_pieces_never_overlap_and_become_whole_again():
    run_ranks(many_pieces, 1, check_leaks=True)


def runs_out(rank, world_size):
    pool = get_mem_pool()
    with use_mem_pool(pool):
        kept = torch.ones(10)
        layout = pool.layout()
        with pytest.raises(torch.OutOfMemoryError, match=r"tried to allocate 70368744177664 bytes.*this host has"):
            torch.empty(1 << 46, dtype=torch.uint8)
        assert pool.layout() == layout
        assert torch.ones(10).sum() == kept.sum()
    assert pool.used_bytes == 64


@compiled
def test_too_large_a_request_is_torchs_out_of_memory_error():
    run_ranks(runs_out, 1)


# ---- life ------------------------------------------------------------------------------------------------------------


def lives(rank, world_size):
    pool = MemPool()
    with use_mem_pool(pool):
        small, large = torch.full((10,), 7), torch.full((MIB,), 8)
    assert segments_mapped() == 2
    del pool  # its segments live for their tensors
    assert segments_mapped() == 2
    assert (small.sum(), large[-1]) == (70, 8)
    del large
    assert segments_mapped() == 1
    view = small[3:5]
    del small
    assert view.tolist() == [7, 7]
    assert is_symm(view) == [True]
    del view
    assert segments_mapped() == 0

    # The last tensor is one that a graph keeps, and dies inside of backward, where Python's lock is not held.
    pool, weight = MemPool(), torch.ones(5, requires_grad=True)
    with use_mem_pool(pool):
        loss = (weight * torch.arange(5.0)).sum()
    loss = loss.clone()
    del pool
    assert segments_mapped() == 1
    loss.backward()
    assert weight.grad.tolist() == [0, 1, 2, 3, 4]
    del loss
    assert segments_mapped() == 0
    assert symm_mem.get_mem_stats()[:2] == (0, 0)

    # The context ends before pool and tensors.
    with symm_mem.rank_context() as context:
        pool = get_mem_pool()
        with use_mem_pool(pool):
            tensor = torch.ones(10)
        with symm_mem.rank_context(), pytest.raises(InvalidArgumentError, match="another rank context"):
            use_mem_pool(pool).__enter__()
        with use_mem_pool(pool):
            context.close()
            with pytest.raises(RuntimeError, match="closed"):
                torch.empty(MIB)
    del pool, context
    gc.collect()
    assert tensor.sum() == 10
    del tensor
    assert segments_mapped() == 0

    # A loop of pools
    for _ in range(20):
        with use_mem_pool(MemPool()):
            torch.ones(10)
    assert segments_mapped() == 0
    symm_mem.finalize()


@compiled
def test_a_segment_lives_as_long_as_its_pool_or_a_tensor_in_it():
    run_ranks(lives, 1, check_leaks=True)


def forks(rank, world_size):
    pool = get_mem_pool()
    with use_mem_pool(pool):
        inherited, freed = torch.ones(10), torch.ones(1000)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                own = torch.full((10,), 2.0)  # not from pages that the parent shares
                assert is_symm(own) == [False]
                del freed
                with pytest.raises(InvalidArgumentError, match="forked"), use_mem_pool(pool):
                    pass
                with use_mem_pool(get_mem_pool()):
                    assert is_symm(torch.full((10,), 3.0)) == [True]
                del inherited
                status = 0
            finally:
                os._exit(status)
        mine = torch.full((10,), 4.0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (inherited.sum(), freed.sum(), mine.sum()) == (10, 1000, 40)
    del inherited, freed, mine
    symm_mem.finalize()


@compiled
def test_a_fork_takes_nothing_from_its_parents_pool():
    run_ranks(forks, 1, check_leaks=True)


ENDS = """
import threading
import torch
from phalanx import symm_mem
from phalanx.symm_mem._pool import MemPool, get_mem_pool, use_mem_pool
entered = use_mem_pool(get_mem_pool())
entered.__enter__()  # and never left
other = MemPool()
with use_mem_pool(other):
    torch.kept = [torch.ones(10), other]
class Late:
    def __init__(self): self.tensor = torch.empty(10)
    def __del__(self): self.tensor.fill_(1).clone()
late = Late()
cycle = [late, torch.ones(5)]
cycle.append(cycle)
threading.local().tensor = torch.ones(3)
loss = torch.ones(3, requires_grad=True).sum()
"""


@pytest.mark.slow
@compiled
def test_an_interpreter_may_end_inside_of_the_with():
    done = subprocess.run([sys.executable, "-X", "dev", "-W", "ignore", "-c", ENDS], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_other_devices_are_refused():
    for function in (get_mem_pool, get_mempool_allocator):
        with pytest.raises(UnsupportedError, match="the device is 'cuda:1'"):
            function("cuda:1")
    with pytest.raises(InvalidArgumentError, match="expected a result of get_mem_pool"), use_mem_pool("cpu"):
        pass


@pytest.mark.parametrize(
    ("environment", "advice"),
    [
        ({"PATH": "", "CXX": ""}, r"no C\+\+ compiler.*install one, or set CXX.*phalanx.symm_mem.empty needs none"),
        ({"PHALANX_NATIVE": ""}, "no cache directory: PHALANX_NATIVE is empty"),
        ({"CXX": "false"}, "false failed"),
    ],
)
def test_what_cannot_be_compiled_says_what_to_do(environment, advice, tmp_path, monkeypatch):
    for name, value in {"PHALANX_NATIVE": str(tmp_path / "native"), **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(_build.EXTENSION, "_module", None)
    with pytest.raises(UnsupportedError, match=f"(?s){advice}"):
        _build.module()


# ---- a model ---------------------------------------------------------------------------------------------------------


def train(steps, seen):
    """Losses and last weights of a small model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.LayerNorm(50), torch.nn.Linear(50, 3)
    )
    for module in model:
        module.register_forward_hook(lambda module, inputs, output: seen.append(output))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = mse_loss(model(torch.randn(16, 20)), torch.randn(16, 3))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    seen += [each.grad for each in model.parameters()]
    seen += [state["exp_avg"] for state in optimizer.state.values()]
    return losses, [each.detach() for each in model.parameters()]


def model_in_a_pool(rank, world_size):
    usual, symmetric = [], []
    losses, weights = train(5, usual)
    pool = get_mem_pool()
    with use_mem_pool(pool):
        losses_there, weights_there = train(5, symmetric)
    assert losses == losses_there  # bit for bit
    assert all(map(torch.equal, weights, weights_there))
    # Four activations a step, and gradients and Adam's state of six parameters
    assert is_symm(*usual) == [False] * 32
    assert is_symm(*symmetric) == [True] * 32
    assert len(pool.segments) == 1
    compiled_model = torch.compile(lambda x: torch.relu(x @ x).sum(0), backend="aot_eager")
    x = torch.randn(8, 8)
    expected = torch.relu(x @ x).sum(0)
    assert compiled_model(x).equal(expected)
    with use_mem_pool(pool):
        there = compiled_model(x)
    assert there.equal(expected)
    assert is_symm(there) == [True]


@compiled
def test_a_model_in_a_pool_computes_the_same_bits_with_symmetric_activations():
    run_ranks(model_in_a_pool, 1)


# ---- several ranks ---------------------------------------------------------------------------------------------------


class SumOverRanks(torch.autograd.Function):
    """Sums a partial result over the ranks, in place; its gradient is that of the sum, which all ranks have."""

    @staticmethod
    def forward(ctx, partial, group_name):
        ctx.mark_dirty(partial)
        return torch.ops.phalanx.two_shot_all_reduce_(partial, "sum", group_name)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def tensor_parallel(rank, world_size):
    name = dist.group.WORLD.group_name
    pool = get_mem_pool()
    torch.manual_seed(0)
    x, target = torch.randn(32, 16, dtype=torch.float64), torch.randn(32, 16, dtype=torch.float64)
    whole_up, whole_down = torch.randn(64, 16, dtype=torch.float64) / 4, torch.randn(16, 64, dtype=torch.float64) / 8
    whole = [whole_up.requires_grad_(), whole_down.requires_grad_()]
    reference = torch.optim.Adam(whole, lr=0.01)
    with use_mem_pool(pool):
        up = whole_up.detach().chunk(world_size, 0)[rank].clone().requires_grad_()
        down = whole_down.detach().chunk(world_size, 1)[rank].clone().requires_grad_()
        optimizer = torch.optim.Adam([up, down], lr=0.01)
    losses, places = [], []
    for _ in range(4):
        with use_mem_pool(pool):
            optimizer.zero_grad()
            hidden = torch.relu(x @ up.T)
            partial = hidden @ down.T
            place = partial.data_ptr() - pool.segments[0].address
            output = SumOverRanks.apply(partial, name)
            loss = mse_loss(output, target)
            loss.backward()
            optimizer.step()
        reference.zero_grad()
        expected_hidden = torch.relu(x @ whole_up.T)
        expected_output = expected_hidden @ whole_down.T
        expected = mse_loss(expected_output, target)
        expected.backward()
        torch.testing.assert_close(output, expected_output)
        torch.testing.assert_close(loss, expected)
        # Nobody sends what peers can read: their half of the hidden units is where ours is.
        assert is_symm(hidden, output, up.grad, loss) == [True] * 4
        handle = symm_mem.rendezvous(hidden, name)
        handle.barrier()
        halves = [handle.get_remote_tensor(peer, hidden.shape, hidden.dtype) for peer in range(world_size)]
        torch.testing.assert_close(torch.cat(halves, 1), expected_hidden)
        handle.barrier()  # before it is freed
        reference.step()
        losses.append(loss.item())
        places.append(place)
        if rank == 1:
            print("a rank may print outside of the with:", loss)
    torch.testing.assert_close(up, whole_up.chunk(world_size, 0)[rank])
    torch.testing.assert_close(down, whole_down.chunk(world_size, 1)[rank])
    with use_mem_pool(pool):
        summed = torch.ops.phalanx.one_shot_all_reduce(torch.full((1000,), rank + 1.0), "sum", name)
        assert is_symm(summed) == [True]
    assert summed.eq(3).all()
    return losses, places, [each.total_bytes for each in pool.segments], pool.layout()


@compiled
def test_a_tensor_parallel_model_reduces_its_activations_where_they_are():
    first, second = run_ranks(tensor_parallel, 2, start_torch=True)
    assert first == second
    losses, _, sizes, _ = first
    assert losses == sorted(losses, reverse=True)
    assert sizes == [2 * MIB]


def meets_once(rank, world_size):
    symm_mem.set_group_info("tp", rank, world_size, FileStore(scratch() / "store"))
    pool = get_mem_pool()
    with use_mem_pool(pool):
        tensors = [torch.full((100 * i + 1,), 10 * i + rank) for i in range(5)]
        large = torch.full((MIB,), rank)
    layout = pool.layout()
    first = symm_mem.rendezvous(tensors[0], "tp")
    if rank == 1:  # alone: the segment has met the group
        for i in (4, 2):
            handle = symm_mem.rendezvous(tensors[i], "tp", timeout_ms=1000)
            assert (handle.offset, handle.symm.size) == (tensors[i].data_ptr() - tensors[0].data_ptr(), 2 * MIB)
            theirs = handle.get_remote_tensor(0, tensors[i].shape, torch.int64)
            assert theirs.eq(10 * i).all()
            assert symm_mem.get_symmetric_memory(tensors[i][5:], "tp").offset == handle.offset + 40
        theirs.fill_(99)
    first.barrier()
    if rank == 0:
        assert tensors[2].eq(99).all()
    theirs = symm_mem.rendezvous(large, "tp").get_remote_tensor(1 - rank, large.shape, torch.int64)
    assert theirs.eq(1 - rank).all()
    first.barrier()
    with use_mem_pool(pool):
        extra = torch.empty(100) if rank == 0 else None  # what only one rank does is seen in the layout
    different = pool.layout()
    del extra, tensors, large, theirs, first
    symm_mem.finalize()
    return layout, different, pool.layout()


@compiled
def test_a_segment_meets_a_group_once_and_places_are_alike():
    first, second = run_ranks(meets_once, 2)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert first[2] == second[2]


def unlike(rank, world_size):
    symm_mem.set_group_info("tp", rank, world_size, FileStore(scratch() / "store"))
    with use_mem_pool(get_mem_pool()):
        tensor = torch.empty((rank + 3) * MIB)
    symm_mem.rendezvous(tensor, "tp", timeout_ms=10_000)


@compiled
def test_segments_of_unlike_sizes_are_refused():
    with pytest.raises(RanksFailed, match="MismatchError"):
        run_ranks(unlike, 2)
