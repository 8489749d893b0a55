"""`phalanx demo`: it trains, it agrees with one process, and it leaves nothing behind, however it ends."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

SMALL = ["--layers=2", "--hidden=32", "--batch=2", "--sequence=32", "--text-bytes=65536", "--rounds=2"]
ROW = re.compile(r"^  (\w+) +([\d.]+ \w+) +(\d+) (a step|at the start) +[\d.,]+ us +[\d.,]+ us +[\d.]+x$", re.MULTILINE)
ENDINGS = {signal.SIGINT: "interrupted", signal.SIGTERM: "ended by SIGTERM"}
FOREVER = [*SMALL, "--steps", "1000000", "--checked-steps", "1"]
DEADLINE_SECONDS = 120
COLLECTIVES = {"all_reduce", "all_gather_tensor", "reduce_scatter_tensor", "broadcast"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "phalanx.core._cli", "demo", *arguments]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)


def losses(output: str) -> dict[int, float]:
    """By step."""
    return {int(step): float(loss) for step, loss in re.findall(r"^ *step +(\d+) +loss ([\d.]+)", output, re.MULTILINE)}


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] != "Z"


@contextlib.contextmanager
def training_demo(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A demo that has begun to train, and the process ids of its ranks."""
    demo = subprocess.Popen(
        command(*arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert demo.stdout is not None
        for line in demo.stdout:
            if line.startswith("training"):
                break
        else:
            pytest.fail(f"the demo ended early: {demo.communicate()[1]}")
        yield demo, children(demo.pid)
    finally:
        demo.kill()
        demo.communicate()


def ended(pidfds: list[int], seconds: float) -> bool:
    """Whether all of these processes end within that time."""
    deadline = time.monotonic() + seconds
    for pidfd in pidfds:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return False
    return True


def shared_memory_files() -> set[str]:
    return {entry.name for entry in os.scandir("/dev/shm")} if os.path.isdir("/dev/shm") else set()


@pytest.mark.slow
def test_two_ranks_train_and_agree_with_one_rank_and_with_one_process(tmp_path: Path) -> None:
    two = run(*SMALL, "--steps", "6", "--checked-steps", "3")
    assert two.returncode == 0, two.stderr
    assert two.stderr == ""
    one = run(*SMALL, "--steps", "6", "--checked-steps", "3", "--ranks", "1", "--no-gloo")
    assert one.returncode == 0, one.stderr
    seen, alone = losses(two.stdout), losses(one.stdout)
    assert list(seen) == list(alone) == [1, 2, 3, 4, 5, 6]
    assert seen == pytest.approx(alone, rel=2e-4)
    assert seen[6] < seen[1]
    reference = re.findall(r"step (\d+)  loss ([\d.]+), one process ([\d.]+); all \d+ gradients agree", two.stdout)
    assert [int(step) for step, _, _ in reference] == [1, 2, 3]
    for _, loss, of_one_process in reference:
        assert float(loss) == pytest.approx(float(of_one_process), rel=1e-5)


@pytest.mark.slow
def test_the_table_has_every_collective_of_a_step_with_its_bytes_beside_gloo() -> None:
    done = run(*SMALL, "--steps", "3", "--checked-steps", "0")
    assert done.returncode == 0, done.stderr
    table = {(name, size): (int(count), when) for name, size, count, when in ROW.findall(done.stdout)}
    assert {name for name, _ in table} == COLLECTIVES
    stream = "8 KiB"  # 32 characters x 2 pieces x 32 features x 4 bytes
    # One of two blocks has the whole stream: two sums, and one of each input's gradient but for the first, which joins
    # that of the embeddings. The other block gathers twice and scatters twice, and the gradients the reverse; the last
    # gather is before the head, and the first gradient is gathered where the stream is cut.
    assert table["all_reduce", stream] == (3, "a step")
    assert table["all_gather_tensor", stream] == (6, "a step")
    assert table["reduce_scatter_tensor", stream] == (5, "a step")
    assert table["all_reduce", "256 B"] == (1, "a step")  # of each character's classes, half of which a rank has
    assert table["all_reduce", "4 B"] == (1, "a step")  # the loss
    assert ("broadcast", "528 B") in table  # the text: 33 x 2 x 8 bytes


def test_a_small_error_of_loss_or_of_one_gradient_fails_the_comparison_with_one_process() -> None:
    from phalanx.tools.demo.model import Size, Transformer
    from phalanx.tools.demo.reference import CheckFailedError, compare

    torch.manual_seed(0)
    size = Size(vocabulary=16, sequence=8, layers=1, hidden=8, heads=2)
    model = Transformer(size)
    characters = torch.randint(16, (9, 3))
    loss = model.loss(characters)
    loss.backward()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    right = {name: parameter.grad for name, parameter in model.named_parameters()}

    compare(size, weights, characters, loss.item(), right)
    with pytest.raises(CheckFailedError, match="the loss"):
        compare(size, weights, characters, loss.item() * 1.0001, right)
    for name, gradient in right.items():
        wrong = gradient.clone()
        wrong[..., 0] += 1e-3 * gradient.abs().max()
        with pytest.raises(CheckFailedError, match=f"gradient of {name}"):
            compare(size, weights, characters, loss.item(), {**right, name: wrong})


def test_an_impossible_model_is_refused_before_anything_starts() -> None:
    done = run("--heads", "3", "--hidden", "48")
    assert done.returncode == 2
    assert "--heads (3) must be divisible by --ranks (2)" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--learning-rate", "-1"], "--learning-rate: expected a positive number, got '-1'"),
        (["--learning-rate", "nan"], "--learning-rate: expected a positive number, got 'nan'"),
        (["--compile", "nosuch"], "--compile: unknown backend 'nosuch' (torch.compile has "),
    ],
)
def test_what_the_demo_cannot_do_is_refused_before_ranks_start(words, text, capsys) -> None:
    from phalanx.tools.demo import options

    with pytest.raises(SystemExit) as caught:
        options.parse(words)
    assert caught.value.code == 2
    assert text in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_killed_rank_ends_the_demo_and_is_named(victim: int) -> None:
    before = shared_memory_files()
    with training_demo(*FOREVER) as (demo, ranks):
        os.kill(ranks[victim], signal.SIGKILL)
        _, errors = demo.communicate(timeout=DEADLINE_SECONDS)
    assert demo.returncode == 1
    assert f"rank {victim} (pid {ranks[victim]}) was killed by SIGKILL" in errors
    dead, survivor = (re.escape(f"rank {rank} (pid {ranks[rank]})") for rank in (victim, 1 - victim))
    assert re.search(f"{survivor}: PeerDeadError: .*{dead}", errors)
    assert not [rank for rank in ranks if is_running(rank)]
    assert shared_memory_files() <= before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_a_signal_ends_all_ranks(number: signal.Signals) -> None:
    with training_demo(*FOREVER) as (demo, ranks):
        demo.send_signal(number)
        _, errors = demo.communicate(timeout=DEADLINE_SECONDS)
        assert demo.returncode == 128 + number
        assert errors == f"phalanx demo: {ENDINGS[number]}\n"
        assert not [rank for rank in ranks if is_running(rank)]


@pytest.mark.slow
def test_ranks_do_not_outlive_a_killed_demo() -> None:
    with training_demo(*FOREVER) as (demo, ranks):
        pidfds = [os.pidfd_open(rank) for rank in ranks]
        try:
            demo.kill()
            assert ended(pidfds, DEADLINE_SECONDS)
        finally:
            for pidfd in pidfds:
                os.close(pidfd)


@pytest.mark.slow
def test_the_store_is_reachable_from_this_host_only() -> None:
    with training_demo(*FOREVER) as (demo, _):
        assert listening_addresses(demo.pid) == {"127.0.0.1"}


def listening_addresses(pid: int) -> set[str]:
    sockets = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(fd)):
                sockets.add(match[1])
    found = set()
    for family, file in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{file}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:  # listening
                packed = bytes.fromhex(fields[1].split(":")[0])
                words = [packed[i : i + 4][::-1] for i in range(0, len(packed), 4)]
                found.add(socket.inet_ntop(family, b"".join(words)))
    return found
