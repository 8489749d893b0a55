"""What inference engines ask of a group of CPUs: Phalanx beside gloo and the engines' own kernels, in turns in one run.

    .venv/bin/pip download --no-deps --no-binary :all: deepspeed==0.19.8   # and vllm==0.33.0
    .venv/bin/python benchmarks/inference.py [--deepspeed FILE.tar.gz] [--vllm FILE.tar.gz] [--json FILE]

The sources of an engine's shared-memory kernel are taken from the archive or folder, and compiled for the installed
PyTorch; nothing else of the engine is needed. SGLang's kernel is not in its archive; it works as DeepSpeed's. Each
number is the median time of a call, and beside it the median over the rounds of its ratio to `phalanx`. Two ranks have
a core and a thread each. Every result is compared with gloo's before anything is measured.

Kernels of engines spin without giving up the core: on a machine with fewer free cores than ranks they wait for the
scheduler at each call.
"""

import argparse
import os
import pickle
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from list_forms import answer_of, pin, save

import phalanx.collectives as pc
from phalanx import symm_mem
from phalanx.collectives import inference

Call = Callable[[], Any]
REDUCED = ((1, 4096), (8, 4096), (128, 4096), (1024, 4096), (1024, 8192))
JOINED = ((1, 4096), (1, 32000), (64, 32000))  # hidden states, and parts of logits
SENT = ((1, 4096), (128, 4096), (1024, 4096))
ROUNDS = 40
LABELS = ("phalanx", "symmetric", "c10d", "gloo", "deepspeed", "vllm")

# How the functions of vLLM 0.33 are declared, and made known to PyTorch; its header wants functions of SLEEF.
VLLM = """
#include <torch/extension.h>
int64_t init_shm_manager(const std::string &, int64_t, int64_t, int64_t);
std::string join_shm_manager(int64_t, const std::string &);
void shm_allreduce(int64_t, torch::Tensor &);
void shm_gather(int64_t, torch::Tensor &, const std::optional<std::vector<torch::Tensor>> &, int64_t);
void shm_all_gather(int64_t, const torch::Tensor &, torch::Tensor &);
void shm_send_tensor_list(int64_t, const std::vector<torch::Tensor> &, int64_t);
std::vector<torch::Tensor> shm_recv_tensor_list(int64_t, int64_t);
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("init", &init_shm_manager);
  m.def("join", &join_shm_manager);
  m.def("all_reduce", &shm_allreduce);
  m.def("gather", &shm_gather);
  m.def("all_gather", &shm_all_gather);
  m.def("send", &shm_send_tensor_list);
  m.def("recv", &shm_recv_tensor_list);
}
"""
SLEEF = "#include <immintrin.h>\n__m512 Sleef_tanhf16_u10(__m512), Sleef_erff16_u10(__m512);\n"


def unpacked(source: Path, folder: Path) -> Path:
    """The folder `csrc` of an archive or a folder."""
    if source.is_dir():
        return next(source.glob("**/csrc/cpu")).parent
    with tarfile.open(source) as archive:
        archive.extractall(folder, [each for each in archive if "/csrc/cpu/" in each.name], filter="data")
    return next(folder.glob("*/csrc/cpu")).parent


def build(name: str, source: Path, folder: Path) -> Path:
    """Compile the kernel of an engine, if the folder has it not yet; returns the path of the extension module."""
    from torch.utils import cpp_extension

    folder = folder / name
    if made := next(folder.glob("*.so"), None):
        return made
    folder.mkdir(parents=True, exist_ok=True)
    csrc = unpacked(source, folder)
    if name == "deepspeed":
        sources = [csrc / "cpu/comm/shm_interface.cpp", csrc / "cpu/comm/shm.cpp"]
    else:
        (folder / "binding.cpp").write_text(VLLM)
        (folder / "sleef.h").write_text(SLEEF)
        sources = [csrc / "cpu/shm.cpp", folder / "binding.cpp"]
    cpp_extension.load(
        f"bench_{name}",
        [str(each) for each in sources],
        extra_cflags=["-O3", "-march=native", "-fopenmp"],
        extra_include_paths=[str(csrc), str(folder)],
        build_directory=str(folder),
        is_python_module=False,  # loaded in each rank, and not here
    )
    return next(folder.glob("*.so"))


def loaded(path: Path) -> Any:
    import importlib.util

    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- the calls -------------------------------------------------------------------------------------------------------


class Calls:
    """The calls of each library, by its name, on tensors that they may share."""

    def __init__(self, rank: int, ranks: int, built: dict[str, Path], name: str) -> None:
        self.rank, self.ranks = rank, ranks
        self.ours = dist.new_group(backend="phalanx")
        self.gloo = dist.group.WORLD
        self.deepspeed = self.vllm = None
        self.handles: dict[str, int] = {}
        if "deepspeed" in built:
            os.environ |= {"LOCAL_SIZE": str(ranks), "MASTER_ADDR": name, "MASTER_PORT": "0"}  # names of its memory
            loaded(built["deepspeed"]).initialize(ranks, rank)
            self.deepspeed = torch.ops.deepspeed.inference_all_reduce_
        if "vllm" in built:
            self.vllm = loaded(built["vllm"])
            for call in ("all_reduce", "all_gather", "gather", "send_tensor_dict"):
                # Its counters get out of step where ranks that only send or receive call something else next.
                self.handles[call] = self.vllm.init(f"{name}-{call}", ranks, rank, 1)
                dist.barrier()
                self.vllm.join(self.handles[call], f"{name}-{call}")
        dist.barrier()
        for path in Path("/dev/shm").glob(f"*{name}*") if rank == 0 else ():
            path.unlink()  # mapped by now, and its owners would leave it there

    def all_reduce(self, x: torch.Tensor) -> dict[str, Call]:
        symmetric = symm_mem.empty(x.shape, dtype=x.dtype)
        symm_mem.rendezvous(symmetric, self.ours)
        symmetric.copy_(x)
        calls: dict[str, Call] = {
            "phalanx": lambda: pc.all_reduce_(x, "sum", self.ours),
            "symmetric": lambda: pc.all_reduce_(symmetric, "sum", self.ours),
            "c10d": lambda: (dist.all_reduce(x, group=self.ours), x)[1],
            "gloo": lambda: (dist.all_reduce(x, group=self.gloo), x)[1],
        }
        if self.deepspeed is not None:
            calls["deepspeed"] = lambda: self.deepspeed(x)
        if self.vllm is not None:
            calls["vllm"] = lambda: (self.vllm.all_reduce(self.handles["all_reduce"], x), x)[1]
        return calls

    def all_gather(self, x: torch.Tensor) -> dict[str, Call]:
        def joined(into: Callable[[torch.Tensor], Any]) -> torch.Tensor:
            """Along the last dim, as engines do it with what joins along the first."""
            out = x.new_empty(self.ranks * x.size(0), x.size(1))
            into(out)
            return out.view(self.ranks, *x.shape).movedim(0, 1).reshape(x.size(0), -1)

        calls: dict[str, Call] = {
            "phalanx": lambda: inference.all_gather(x, self.ours),
            "gloo": lambda: joined(lambda out: dist.all_gather_single(out, x, self.gloo)),
        }
        if self.vllm is not None:
            calls["vllm"] = lambda: joined(lambda out: self.vllm.all_gather(self.handles["all_gather"], x, out))
        return calls

    def gather(self, x: torch.Tensor) -> dict[str, Call]:
        def joined(into: Callable[[list[torch.Tensor] | None], Any]) -> torch.Tensor | None:
            parts = [torch.empty_like(x) for _ in range(self.ranks)] if self.rank == 0 else None
            into(parts)
            return None if parts is None else torch.cat(parts, -1)

        calls: dict[str, Call] = {
            "phalanx": lambda: inference.gather(x, 0, self.ours),
            "gloo": lambda: joined(lambda parts: dist.gather(x, parts, 0, self.gloo)),
        }
        if self.vllm is not None:
            calls["vllm"] = lambda: joined(lambda parts: self.vllm.gather(self.handles["gather"], x, parts, 0))
        return calls

    def send_tensor_dict(self, x: torch.Tensor) -> dict[str, Call]:
        """Two tensors from rank 0 to rank 1, and back."""
        tensors, peer = {"hidden_states": x, "residual": x.clone()}, 1 - self.rank

        def there_and_back(send: Callable[[], Any], receive: Callable[[], Any]) -> Any:
            if self.rank > 1:
                return None
            if self.rank == 0:
                send()
            got = receive()
            if self.rank == 1:
                send()
            return got["residual"]

        def described() -> torch.Tensor:
            text = pickle.dumps([(key, each.dtype, each.shape) for key, each in tensors.items()])
            return torch.frombuffer(bytearray(text), dtype=torch.uint8)

        def send_gloo() -> None:
            text = described()
            dist.send(torch.tensor([text.numel()]), peer)
            dist.send(text, peer)
            for each in tensors.values():
                dist.send(each, peer)

        def receive_gloo() -> dict[str, torch.Tensor]:
            length = torch.empty(1, dtype=torch.int64)
            dist.recv(length, peer)
            text = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(text, peer)
            got = {key: torch.empty(shape, dtype=dtype) for key, dtype, shape in pickle.loads(bytes(text.tolist()))}
            for each in got.values():
                dist.recv(each, peer)
            return got

        def receive_vllm() -> dict[str, torch.Tensor]:
            *flat, text = self.vllm.recv(self.handles["send_tensor_dict"], peer)
            keys = pickle.loads(text.numpy().tobytes())
            return {key: each.view(shape) for each, (key, _, shape) in zip(flat, keys, strict=True)}

        calls: dict[str, Call] = {
            "phalanx": lambda: there_and_back(
                lambda: inference.send_tensor_dict(tensors, peer, self.ours),
                lambda: inference.recv_tensor_dict(peer, self.ours),
            ),
            "gloo": lambda: there_and_back(send_gloo, receive_gloo),
        }
        if self.vllm is not None:
            calls["vllm"] = lambda: there_and_back(
                lambda: self.vllm.send(self.handles["send_tensor_dict"], [*tensors.values(), described()], peer),
                receive_vllm,
            )
        return calls


# ---- measuring -------------------------------------------------------------------------------------------------------


def check(name: str, calls: Calls, shape: tuple[int, ...]) -> None:
    """All libraries give the same: small integers, whose sums are exact."""
    fresh = (torch.arange(shape[0] * shape[1]).view(shape) % 7 + calls.rank).bfloat16()
    results = {}
    for label in getattr(calls, name)(fresh.clone()):
        results[label] = getattr(calls, name)(fresh.clone())[label]()
    for label, result in results.items():
        wanted = results["gloo"]
        if (result is None) is not (wanted is None) or (wanted is not None and not torch.equal(result, wanted)):
            raise AssertionError(f"{name} of {shape}: {label} does not give what gloo gives")


def rank_main(rank: int, ranks: int, path: str, options: argparse.Namespace, built: dict[str, Path], ends: Any) -> None:
    """One rank, from its start to its end."""
    pin(rank, ranks)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
    calls = Calls(rank, ranks, built, f"phx-bench-{os.path.basename(os.path.dirname(path))}-{ranks}")
    rows = []
    for name, shapes in (
        ("all_reduce", REDUCED),
        ("all_gather", JOINED),
        ("gather", JOINED),
        ("send_tensor_dict", SENT),
    ):
        for shape in shapes:
            check(name, calls, shape)
            forms = getattr(calls, name)(torch.zeros(shape, dtype=torch.bfloat16))
            nbytes = 2 * shape[0] * shape[1]
            turns = max(8, min(options.rounds, (256 << 20) // nbytes))
            # One call at a time where a rank only sends: it could run ahead of the kernels' counters.
            repeats = 10 if nbytes <= 1 << 16 and name in ("all_reduce", "all_gather") else 1
            times: dict[str, list[float]] = {label: [] for label in forms}
            for turn in range(turns + 2):
                for label, call in forms.items():
                    dist.barrier(calls.ours)
                    begin = time.perf_counter_ns()
                    for _ in range(repeats):
                        call()
                    if turn >= 2:
                        times[label].append((time.perf_counter_ns() - begin) / 1e3 / repeats)
            row: dict[str, Any] = {"ranks": ranks, "call": name, "shape": list(shape), "us": {}, "over_phalanx": {}}
            for label, spent in times.items():
                row["us"][label] = round(median(spent), 1)
                ratios = [a / b for a, b in zip(spent, times["phalanx"], strict=True)]
                row["over_phalanx"][label] = round(median(ratios), 2)
            rows.append(row)
            if rank == 0:
                show(row, header=len(rows) == 1)
    if rank == 0:
        ends.put(rows)
    dist.destroy_process_group()


def show(row: dict[str, Any], header: bool) -> None:
    """Print a row: microseconds, and how many times as long as `phalanx`."""
    if header:
        print(f"{'ranks':>5} {'call':16} {'shape':>10}" + "".join(f"{label:>18}" for label in LABELS))
    print(f"{row['ranks']:5} {row['call']:16} {'x'.join(map(str, row['shape'])):>10}", end="")
    for label in LABELS:
        us, ratio = row["us"].get(label), row["over_phalanx"].get(label)
        print(f"{'-':>18}" if us is None else f"{us:9.1f} {f'({ratio:.2f}x)':>8}", end="")
    print(flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", type=Path, help="DeepSpeed's source archive, or the folder of its sources")
    parser.add_argument("--vllm", type=Path, help="the same of vLLM; its kernel needs a processor with AVX-512")
    parser.add_argument("--build", type=Path, help="a folder that keeps the compiled kernels for the next run")
    parser.add_argument("--ranks", type=lambda text: [int(each) for each in text.split(",")], default=[2, 4])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["OMP_NUM_THREADS"] = "1"  # also for the OpenMP of the kernels, which is not that of torch
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        engines = {name: source for name in ("deepspeed", "vllm") if (source := getattr(options, name)) is not None}
        built = {name: build(name, source, options.build or Path(folder)) for name, source in engines.items()}
        for ranks in options.ranks:
            rows += answer_of(rank_main, ranks, options, built)
    save(rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
