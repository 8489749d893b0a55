"""The native fast path: what it gives is what Python gives without it."""

import gc
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import compiled
import fake_torch_cuda
from phalanx.dtensor import (
    AbstractMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    SizedShard,
    _dispatch,
    _fastpath,
    distribute_tensor,
)
from ranks import run_ranks, scratch

TESTS = Path(__file__).parent
ROOT = TESTS.parents[2]
R = Replicate()
BUILD = ["-c", "from phalanx.dtensor import _fastpath; print(_fastpath.EXTENSION.build())"]


@pytest.fixture(scope="module")
def built():
    """The folder of a build, which is made if it is not there yet."""
    with pytest.MonkeyPatch.context() as patch:
        if _fastpath.EXTENSION.path() is None:
            patch.setenv("PHALANX_NATIVE", str(compiled.native_folder("dtensor")))
        path = _fastpath.EXTENSION.path()
        found = _fastpath.EXTENSION.find()
    if found is None:
        if not any(map(shutil.which, ("c++", "g++", "clang++"))):
            pytest.skip("needs a C++ compiler")
        before = set(path.parent.iterdir())
        done = program(BUILD, path.parent)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == str(path) and set(path.parent.iterdir()) - before == {path}
    return str(path.parent)


def program(words, folder, **environment):
    env = {**os.environ, "PHALANX_NATIVE": str(folder), **environment}
    return subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=580)


def shown(result):
    """All that can be seen of a result, but for who made it."""
    if isinstance(result, (tuple, list)):
        return [type(result), *map(shown, result)]
    if not isinstance(result, DTensor):
        return result if not isinstance(result, torch.Tensor) else result.tolist()
    local = result.to_local()
    return (
        type(result), result._spec, result.shape, result.stride(), result.dtype, result.device, result.requires_grad,
        result.storage_offset(), result.untyped_storage().nbytes(), result.layout, result.is_leaf,
        local.shape, local.stride(), local.dtype, local.tolist(),
    )  # fmt: skip


def calls(mesh):
    """Calls of many kinds, by name; each makes what it works on anew."""
    torch.manual_seed(0)
    rows, columns = [Shard(0)], [Shard(1)]
    a, b, square = torch.randn(5, 4), torch.randn(5, 4), torch.randn(4, 4)

    def on(tensor, placements):
        return distribute_tensor(tensor.clone().to(mesh.device_type), mesh, placements)

    x, y, w, r = on(a, rows), on(b, rows), on(square, [R]), on(a, [R])
    ints, sized = on(torch.arange(6), rows), on(a, [SizedShard(0, (5,) + (0,) * (mesh.size() - 1))])
    boxes = on(torch.randn(4, 3, 2), rows)
    part = DTensor.from_local(torch.ones(3, 3).to(mesh.device_type), mesh, [Partial()])
    narrow = torch.bfloat16
    return {
        "add": lambda: x + y,
        "add, scaled": lambda: torch.add(x, y, alpha=2),
        "int and int": lambda: ints * 2,
        "int and float": lambda: ints * 2.0,
        "int and bool": lambda: ints * True,
        "float and int": lambda: x * 2,
        "comparison": lambda: x > 0,
        "relu": lambda: x.relu(),
        "gelu with text": lambda: torch.nn.functional.gelu(x, approximate="tanh"),
        "mm": lambda: x @ w,
        "mm over the sharded dim": lambda: on(square, columns) @ on(square, rows),
        "addmm": lambda: torch.addmm(on(a[0, :4], [R]), x, w),
        "view of a sharded dim": lambda: on(torch.randn(6, 4), rows).view(6, 2, 2),
        "view of whole": lambda: r.view(20),
        "view of what lies otherwise": lambda: torch.ops.aten.elu_backward(
            boxes.transpose(1, 2), 1.0, 1.0, 1.0, False, boxes.view(4, 2, 3)
        ).view(8, 3),
        "transposed": lambda: x.t(),
        "expanded": lambda: on(torch.ones(5, 1), rows).expand(5, 3),
        "unsqueezed": lambda: x.unsqueeze(-1),
        "slice": lambda: r[1:3],
        "pieces": lambda: x.split(2, 1),
        "joined": lambda: torch.cat([x, y, x], 1),
        "stacked": lambda: torch.stack([x, y]),
        "layer norm": lambda: torch.nn.functional.layer_norm(x, (4,)),
        "max along a dim": lambda: x.max(1),
        "sum": lambda: x.sum(),
        "sum of a dim": lambda: x.sum(1, keepdim=True),
        "mean": lambda: x.mean(),
        "converted": lambda: x.to(narrow),
        "other sizes": lambda: sized + sized,
        "partial": lambda: part * 3,
        "in place": lambda: on(a, rows).add_(y),
        "in place, with a number": lambda: on(a, rows).mul_(0.5),
        "softmax": lambda: torch.softmax(x, 1),
        "norm": lambda: torch.linalg.vector_norm(x),
        "where": lambda: torch.where(x > 0, x, y),
        "zeros like": lambda: torch.zeros_like(x),
        "clone": lambda: x.clone(),
        "conjugate": lambda: on(torch.randn(4, 2, dtype=torch.complex64), rows).conj(),
        "embedding": lambda: torch.nn.functional.embedding(on(torch.tensor([0, 2, 1]), [R]), w),
    }


def compared(rank, size, device="cpu"):
    module = _fastpath.loaded()
    assert module is not None and _fastpath.why_not() is None
    mesh = dist.init_device_mesh(device, (size,))
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            for name, call in calls(mesh).items():
                module.use(False)
                torch.manual_seed(3)
                wanted = shown(call())
                module.use(True)
                for _ in range(3):  # it is learnt, found, and found again
                    torch.manual_seed(3)
                    assert str(shown(call())) == str(wanted), name
    known, here = module.known()
    assert known > here > 25
    return known, here


def compared_backward(rank, size, device="cpu"):
    module = _fastpath.loaded()
    mesh = dist.init_device_mesh(device, (size,))
    torch.manual_seed(1)
    start = [torch.randn(6, 4), torch.randn(4, 8), torch.randn(8, 4), torch.randn(4)]
    placements = [[R], [Shard(1)], [Shard(0)], [R]]

    def step():
        x, up, down, scale = (
            distribute_tensor(one.to(device), mesh, own).requires_grad_()
            for one, own in zip(start, placements, strict=True)
        )
        hidden = torch.nn.functional.gelu(x @ up)
        out = torch.nn.functional.layer_norm((hidden @ down).redistribute(placements=[R]), (4,), scale)
        (out.view(2, 3, 4).transpose(0, 1) * x.view(3, 2, 4)).sum().backward()
        return [one.grad.full_tensor() for one in (x, up, down, scale)]

    plain = [one.clone().requires_grad_() for one in start]
    x, up, down, scale = plain
    out = torch.nn.functional.layer_norm(torch.nn.functional.gelu(x @ up) @ down, (4,), scale)
    (out.view(2, 3, 4).transpose(0, 1) * x.view(3, 2, 4)).sum().backward()
    for used in (False, True, True, True):
        module.use(used)
        for got, want in zip(step(), plain, strict=True):
            torch.testing.assert_close(got.cpu(), want.grad)
    return module.known()[1]


def compared_on_gpus(rank, size):
    fake_torch_cuda.load()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    store = dist.FileStore(str(scratch() / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    found = compared(rank, size, "cuda")[1], compared_backward(rank, size, "cuda")
    dist.destroy_process_group()
    return found


def crossed(mesh):
    """What can be seen of tensors that pass between plain ones and DTensors, and of their gradients."""
    torch.manual_seed(1)
    seen = []
    for placements in ([Shard(0)], [Shard(1)], [R], [Partial()]):
        for target in ([R], [Shard(0)], [Shard(1)]):
            plain = torch.randn(4, 4, requires_grad=True)
            made = DTensor.from_local(plain, mesh, placements)
            moved = made.redistribute(placements=target)
            local = moved.to_local()
            noted = []
            local.register_hook(lambda grad, noted=noted: noted.append(grad.clone()))
            (first,) = torch.autograd.grad(
                (local.t() ** 3).sum() + (moved * moved).sum().full_tensor(), plain, create_graph=True
            )
            (second,) = torch.autograd.grad((first * first).sum(), plain)
            seen += [shown(made), shown(moved), local.tolist(), local.stride(), first.tolist(), second.tolist()]
            seen += [noted[0].tolist(), local._is_view(), made.grad_fn is not None, moved.is_leaf]
            with pytest.raises(RuntimeError, match="modified inplace"):
                local.mul_(2)
            with torch.no_grad():
                quiet = DTensor.from_local(plain, mesh, placements).redistribute(placements=target).to_local()
                seen += [quiet.requires_grad, quiet.tolist()]
    # Written into, the input of a redistribution is not the result, whether or not anything moved.
    one = DTensor.from_local(torch.ones(4, 4, requires_grad=True), mesh, [R])
    for other in (one.redistribute(placements=[Shard(0)]), one.redistribute(placements=[R], forward_dtype=torch.half)):
        other.mul_(2)
        seen += [shown(one), shown(other)]
        seen.append(torch.autograd.grad(other.sum().full_tensor(), one)[0].to_local().tolist())
    # No gradient comes, or one of another dtype.
    plain = torch.ones(4, 4, requires_grad=True)
    local = DTensor.from_local(plain, mesh, [R]).to_local()
    seen += torch.autograd.grad(plain.sum(), [local], allow_unused=True)
    seen += [torch.autograd.grad(local.double().sum().float() * 2, plain)[0].tolist()]
    return seen


def compared_boundaries(rank, size):
    module = _fastpath.loaded()
    mesh = dist.init_device_mesh("cpu", (size,))
    module.use(False)
    want = crossed(mesh)
    module.use(True)
    for _ in range(2):
        for index, (got, expected) in enumerate(zip(crossed(mesh), want, strict=True)):
            assert got == expected, index
    plain = torch.ones(2, 2, requires_grad=True)
    made = DTensor.from_local(plain, mesh, [R])
    moved = made.redistribute(placements=[Shard(0)])
    names = [one.grad_fn.name() for one in (made, moved, made.to_local())]
    assert names == ["FromLocalBackward", "RedistributeBackward", "ToLocalBackward"]
    # Compiled autograd puts what each of them does into its graph, and keeps specs apart.
    for placements in ([Partial()], [R], [Partial()]):
        plain = torch.ones(2, 2, requires_grad=True)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            moved = DTensor.from_local(plain, mesh, placements).redistribute(placements=[Shard(0)])
            (moved.redistribute(placements=[R]).to_local() ** 2).sum().backward()
        # A term of a Partial counts with the whole sum; of replicas each has its own gradient.
        terms = size if placements == [Partial()] else 1
        assert plain.grad.tolist() == [[2.0 * terms] * 2] * 2
    # Freed by whoever is last: here a thread of autograd, or the end of the process.
    _dispatch.forget_plans()
    plain.grad = None
    DTensor.from_local(plain, mesh, [R]).to_local().sum().backward()
    assert plain.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def beside(rank, size):
    """What else may look at an op, and what may happen to it."""
    module = _fastpath.loaded()
    mesh = dist.init_device_mesh("cpu", (size,))
    x = DTensor.from_local(torch.ones(3, 2), mesh, [Shard(0)])
    for _ in range(3):
        x + x
    known = module.known()
    with Seen() as seen:
        x + x
    assert seen.ops[0] == "aten.add.Tensor"  # modes see DTensors

    # Nothing is kept of a call that failed, and the next one is right.
    w = DTensor.from_local(torch.ones(3, 2), mesh, [R])
    for _ in range(3):
        with pytest.raises(RuntimeError):
            torch.mm(x, w)
    torch.testing.assert_close((x + x).to_local(), torch.full((3, 2), 2.0))

    # Mixed with a plain tensor: as without native code.
    for _ in range(3):
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
            x + torch.ones(3, 2)

    # A result that autograd knows, and a version that counts.
    y = DTensor.from_local(torch.ones(3, 2, requires_grad=True), mesh, [Shard(0)])
    for _ in range(3):
        z = y * x
        assert z.requires_grad and z.grad_fn is not None and not (x * x).requires_grad
    fresh = x.clone()
    before = fresh._version
    for turn in range(3):
        assert fresh.add_(x) is fresh and fresh._version == before + turn + 1
    view = fresh.view(-1) if size == 1 else fresh.t()
    assert view._is_view() and view._base is fresh

    # A view that is a copy must not be written into, whatever was done to others like it.
    copy = distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)]).view(24)
    like = DTensor.from_local(copy.to_local().clone(), mesh, copy.placements)
    for _ in range(3):
        assert like.mul_(1) is like
        if size > 1:
            with pytest.raises(RuntimeError, match="such a view is a copy"):
                copy.mul_(1)

    # No autograd, and no dispatch to a subclass from within.
    with torch.inference_mode():
        for _ in range(3):
            assert (x + x).to_local().tolist() == [[2.0, 2.0]] * 3
    assert module.known()[0] > known[0]

    # A local tensor that is on its way.
    replicated = DTensor.from_local(torch.full((2, 2), 1.0), mesh, [Partial()])
    for _ in range(3):
        got = replicated.redistribute(placements=[R], async_op=True) + 1
        assert got.to_local().tolist() == [[size + 1.0] * 2] * 2

    # Specs come and go; their memory is used again.
    for turn in range(200):
        one = DTensor.from_local(torch.ones(2 + turn % 50, 3), mesh, [Shard(0)])
        assert (one + one).shape == ((2 + turn % 50) * size, 3)
        del one
        gc.collect() if turn % 20 == 0 else None

    compiled = torch.compile(lambda a: (a + a).relu(), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert compiled(x).to_local().tolist() == [[2.0, 2.0]] * 3

    _dispatch.forget_plans()
    assert module.known() == (0, 0)
    assert (x + x).to_local().tolist() == [[2.0, 2.0]] * 3


def with_threads(rank, size):
    mesh = dist.init_device_mesh("cpu", (size,))
    wrong = []

    def work(number):
        for turn in range(400):
            local = torch.full((1 + turn % 7, 80), float(number))  # some give up the GIL, some do not
            one = DTensor.from_local(local.repeat(1, 1 + turn % 11), mesh, [Shard(0)])
            two = (one + one).view(-1, 16) if size == 1 else one + one
            if turn % 100 == 50:
                _dispatch.forget_plans()
            if not bool((two.to_local() == 2.0 * number).all()):
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert wrong == []


@pytest.mark.slow
def test_every_kind_of_call_gives_what_python_gives(built):
    (only,) = run_ranks(compared, 1, start_torch=True, env={"PHALANX_NATIVE": built})
    assert only[1] > 30
    run_ranks(compared, 3, start_torch=True, env={"PHALANX_NATIVE": built})


@pytest.mark.slow
def test_gradients_are_those_of_one_process(built):
    assert all(here > 10 for here in run_ranks(compared_backward, 2, start_torch=True, env={"PHALANX_NATIVE": built}))


@pytest.mark.thorough
def test_tensors_of_gpus_take_it_too(built):
    fake_torch_cuda.needs_cuda()
    for calls_here, steps_here in run_ranks(compared_on_gpus, 2, env={"PHALANX_NATIVE": built}, timeout=280):
        assert calls_here > 25 and steps_here > 10


@pytest.mark.slow
def test_gradients_cross_to_plain_tensors_as_without_it(built):  # D3 D5 D11
    run_ranks(compared_boundaries, 1, start_torch=True, env={"PHALANX_NATIVE": built})
    run_ranks(compared_boundaries, 2, start_torch=True, env={"PHALANX_NATIVE": built})


@pytest.mark.slow
def test_modes_errors_autograd_and_threads_find_no_difference(built):
    run_ranks(beside, 1, start_torch=True, env={"PHALANX_NATIVE": built})
    run_ranks(beside, 2, start_torch=True, env={"PHALANX_NATIVE": built})
    run_ranks(with_threads, 1, start_torch=True, env={"PHALANX_NATIVE": built})


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "tests",
    [
        TESTS / "test_random.py",
        *(
            pytest.param(tests, marks=pytest.mark.thorough)
            for tests in (
                TESTS / "test_algorithms.py",
                TESTS / "test_parallel_styles.py",
                TESTS / "test_debug.py",
                ROOT / "tools/tests/test_dtensor_sweep.py",
                TESTS / "test_factories.py",
            )
        ),
    ],
    ids=lambda tests: tests.stem,
)
def test_what_holds_in_python_holds_with_it(built, tests):
    done = program(["-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), str(tests)], built)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


# ---- building it ----------------------------------------------------------------------------------------------------

WHY = "from phalanx.dtensor import _fastpath; print(_fastpath.loaded() is not None, _fastpath.why_not())"


@pytest.mark.slow
def test_without_a_compiler_it_says_so_and_tensors_work(tmp_path):
    done = program(BUILD, tmp_path / "native", PATH="", CXX="")
    assert (done.returncode, done.stdout) == (1, "")
    assert "there is no C++ compiler" in done.stderr and "DTensors work without one, slower" in done.stderr
    assert list(tmp_path.iterdir()) == []
    done = program(["-c", WHY], tmp_path / "native")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("False") and "was not built: run `phalanx build`" in done.stdout


def test_an_empty_variable_turns_it_off():
    assert program(["-c", WHY], "").stdout.startswith("False PHALANX_NATIVE is empty")


@pytest.mark.slow
def test_a_broken_file_is_told_of_and_passed_over(monkeypatch, tmp_path):
    monkeypatch.setenv("PHALANX_NATIVE", str(tmp_path))
    path = _fastpath.EXTENSION.path()
    path.write_bytes(b"not a library")
    path.chmod(0o700)
    done = program(["-c", WHY], tmp_path)
    assert done.stdout.startswith("False") and f"{path} cannot be loaded" in done.stderr
    path.chmod(0o722)
    done = program(["-c", WHY], tmp_path)
    assert done.stdout.startswith("False") and done.stderr == "" and "may be written by others" in done.stdout


def test_what_is_asked_for_a_recipe_says_what_was_done():
    mesh = AbstractMesh((2,))
    x = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    y, pieces = x + x, x.split(1, 1)
    op = torch.ops.aten
    assert _fastpath.recipe(op.add.Tensor, (x, x), {}) == ((), "one", (y._spec,))
    assert _fastpath.recipe(op.split.Tensor, (x, 1, 1), {}) == ((), "list", tuple(one._spec for one in pieces))
    assert _fastpath.recipe(op.sub.Tensor, (x, y), {}) is None  # never called
    x.add_(y)
    assert _fastpath.recipe(op.add_.Tensor, (x, y), {}) == ((), "self", ())
    _dispatch.forget_plans()
    assert _fastpath.recipe(op.add.Tensor, (x, x), {}) is None
