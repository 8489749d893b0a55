"""The sweep of DTensor over torch's OpInfo database on real ranks: `phalanx verify dtensor`.

Every entry is run in one process first, then with its tensors in many placings on a mesh of processes; all ranks do
the same in lockstep. Ranks that fall out of step (one raised where another waits) are ended, and others go on.
"""

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.core.commands import end_with_parent
from phalanx.dtensor.placement_types import Partial
from phalanx.tools._torch_compat import op_database
from phalanx.tools.verify.blocks import blocks
from phalanx.tools.verify.dtensor_check import Attempt, OutOfStep, Ranks, Reference, coarse
from phalanx.tools.verify.dtensor_report import DTensorReport, Record, lines_of
from phalanx.tools.verify.dtensor_samples import Case, Placed, cases, dtype_of, kind_of, placings, shown
from phalanx.tools.verify.sweep import entry_name

# How long a rank waits for another in a collective; and how long an entry may take, whatever it does.
_TIMEOUT_S = 20
_ENTRY_TIMEOUT_S = 240
# Ranks that fell out of step more often than this have shown enough of an entry.
_MOST_RESTARTS = 3


@dataclass
class Options:
    """How much is tried.

    Attributes:
        mesh: The shape of the mesh.
        samples: The most samples of each entry.
        placings: The most placings of each sample.
        seconds: After so long no further sample of an entry is begun.
        outcomes: Whether ranks compare after each op what it came to: an error, or the description of the results.
        compiled: Backends with which what was right is tried once more, compiled, each in turn: `aot_eager`, `phalanx`,
            and with `:dynamic` at the end the same with sizes that are symbols.
    """

    mesh: tuple[int, ...] = (2,)
    samples: int = 8
    placings: int = 10
    seconds: float = 12.0
    outcomes: bool = False
    compiled: tuple[str, ...] = ()


@dataclass
class Task:
    """An entry that is to be run, or to be gone on with.

    Attributes:
        name: The entry.
        done: How many attempts were made already.
        record: What they showed.
        restarts: How often ranks fell out of step in it.
    """

    name: str
    done: int = 0
    record: Record = field(default_factory=Record)
    restarts: int = 0


def sweep_dtensor(
    report: DTensorReport,
    names: Sequence[str] = (),
    sample: int = 0,
    options: Options | None = None,
    show: Callable[[str], None] = print,
    reached: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Run entries on a mesh of new processes.

    Args:
        report: Takes what is found; entries that it has for this mesh are not run again.
        names: Entries to run (`add`, `nn.functional.linear`), with all variants of each; `blocks` stands for those of
            `blocks`. All of torch's if empty.
        sample: Run only so many of them, spread evenly; 0: all.
        options: How much of each.
        show: Called with each line of progress.
        reached: Called with how many entries are done, and of how many.
    """
    options = options or Options()
    mesh = "x".join(map(str, options.mesh))
    infos = [one for one in op_database() if not names or one.name in names or entry_name(one) in names]
    infos += [one for one in blocks() if "blocks" in names or one.name in names]
    if sample and len(infos) > sample:
        infos = [infos[index * len(infos) // sample] for index in range(sample)]
    known = report.meshes.get(mesh, {})
    left = [Task(entry_name(one)) for one in infos if entry_name(one) not in known]
    before = len(infos) - len(left)

    def put(name: str, record: Record) -> None:
        report.put(mesh, name, record)
        reached(len(report.meshes[mesh]) - len(known) + before, len(infos))
        for line in lines_of(name, record):
            show(line)

    try:
        while left:
            with _Processes(options, left) as processes:
                left = processes.follow(left, report, put)
    finally:
        report.save()


class _Processes:
    """The ranks, as processes forked from this one, which has torch loaded and nothing under way."""

    def __init__(self, options: Options, tasks: Sequence[Task]) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="phx-sweep-")
        context = multiprocessing.get_context("fork")
        self._reader, writer = context.Pipe(duplex=False)
        size = prod(options.mesh)
        arguments = (size, self._directory.name, options, list(tasks))
        self._ranks = [
            context.Process(target=_rank, args=(rank, *arguments, writer if rank == 0 else None), daemon=True)
            for rank in range(size)
        ]
        self._writer = writer

    def __enter__(self) -> "_Processes":
        # A terminal sends these to every process, and this one alone is to answer: ranks are born with them blocked.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
        try:
            for one in self._ranks:
                one.start()
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        except BaseException:
            self.__exit__(BaseException)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            self._writer.close()
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *error: object) -> None:
        ranks = [one for one in self._ranks if one.pid is not None]
        deadline = time.monotonic() + (2.0 if kind is None else 0.0)
        for one in ranks:
            one.join(max(0.0, deadline - time.monotonic()))
        for one in ranks:  # all at once: a rank that sees another one go prints an error
            if one.is_alive():
                one.kill()
        for one in ranks:
            one.join()
            one.close()
        self._reader.close()
        self._directory.cleanup()

    def follow(self, tasks: list[Task], report: DTensorReport, put: Callable[[str, Record], None]) -> list[Task]:
        """Take the records that rank 0 sends, until the ranks are done or have to be replaced.

        Args:
            tasks: What is to be done.
            report: Is saved now and then.
            put: Called with each entry and its record.

        Returns:
            What is left to do.
        """
        left = list(tasks)
        saved = time.monotonic()
        while left:
            task = left[0]
            message: Task | None = None
            try:
                if self._reader.poll(_ENTRY_TIMEOUT_S):
                    message = self._reader.recv()
            except EOFError:
                pass
            if message is None or message.done >= 0:  # ended, stuck, or out of step
                if message is not None:
                    task = message
                else:
                    task.record.count("even", "error", "the ranks ended or stood still")
                    task.restarts = _MOST_RESTARTS
                task.restarts += 1
                if task.restarts <= _MOST_RESTARTS:
                    return [task, *left[1:]]
                task.record.note(f"left after {task.restarts} restarts")
                message = task
                rest = left[1:]
            else:
                rest = None
            put(task.name, message.record)
            if rest is not None:
                return rest
            left.pop(0)
            if time.monotonic() - saved > 5:
                report.save()
                saved = time.monotonic()
        return []


# ---- a rank ---------------------------------------------------------------------------------------------------------


def _rank(rank: int, size: int, directory: str, options: Options, tasks: list[Task], writer: Any) -> None:
    end_with_parent(os.getppid())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    # For who asks what a rank is at: kill -USR1.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    timeout = timedelta(seconds=_TIMEOUT_S)
    store = dist.FileStore(str(Path(directory) / "store"), size)  # type: ignore[attr-defined]
    store.set_timeout(timeout)  # that of phalanx.collectives, too
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    warnings.simplefilter("ignore")
    ranks = Ranks(options.mesh, options.outcomes)
    infos = {entry_name(one): one for one in (*op_database(), *blocks())}
    for task in tasks:
        started = time.monotonic()
        in_step = True
        try:
            _Entry(infos[task.name], task, ranks, options).run()
        except OutOfStep:
            in_step = False
        task.record.seconds = round(task.record.seconds + time.monotonic() - started, 2)
        if in_step:
            task.done = -1
        if writer is not None:
            writer.send(task)
        if not in_step:
            break
    else:
        dist.barrier()
    # A group that ranks have left in the midst of a collective cannot be taken apart in an orderly way.
    os._exit(0)


def compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """A function as torch.compile makes it, anew.

    Args:
        function: The function.
        backend: A backend, with `:dynamic` at its end for sizes that are symbols.
    """
    torch.compiler.reset()
    name, _, dynamic = backend.partition(":")

    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    made: Callable[..., Any] = torch.compile(called, backend=name, dynamic=bool(dynamic))
    return made


class _Entry:
    """One entry on this rank. Collective."""

    def __init__(self, info: Any, task: Task, ranks: Ranks, options: Options) -> None:
        self.info, self.task, self.ranks, self.options = info, task, ranks, options
        self.record = task.record
        self.skip = task.done
        self.attempt = 0
        self.turn = sum(map(ord, self.task.name))  # not all entries begin with the same backend

    def run(self) -> None:
        """Try every sample in every placing; those that were tried before are passed over.

        Raises:
            OutOfStep: The ranks have to be replaced; `task` says where to go on.
        """
        dtype = dtype_of(self.info)
        if dtype is None:
            self.record.note("no dtype for a CPU")
            return
        self.record.dtype = str(dtype)[6:]
        self.record.samples = 0
        try:
            found = cases(self.info, dtype, prod(self.options.mesh), self.options.samples)
        except Exception as error:  # torch's own generator
            self.record.note(f"no samples: {type(error).__name__}: {str(error)[:80]}")
            return
        if not found:
            self.record.note("no sample with dense tensors")
        deadline = time.monotonic() + self.options.seconds
        for number, case in enumerate(found):
            _, go_on = self.ranks.worst("right", time.monotonic() < deadline)
            if not go_on:
                self.record.note(f"{len(found) - number} of {len(found)} samples not tried for lack of time")
                break
            self._sample(case)

    def _sample(self, case: Case) -> None:
        name = str(self.info.name)
        try:
            reference = Reference(self.info.op, case, name)
        except Exception as error:
            self.record.note(f"torch: {type(error).__name__}: {' '.join(str(error).split())[:100]}")
            return
        self.record.samples += 1
        self.record.data_dependent |= reference.is_data_dependent
        if reference.is_random:
            try:
                reference.rerun_alone(self.ranks)
            except Exception as error:
                self.record.note(f"random: {type(error).__name__}: {' '.join(str(error).split())[:100]}")
                return
        in_place = self._in_place(case, reference)
        for placed in placings(reference.tensors, self.ranks.shape, self.options.placings):
            kind = kind_of(reference.tensors, placed, self.ranks.shape)
            attempt = Attempt(reference, placed, self.ranks, self.attempt)
            status = self._count(kind, attempt, attempt.values)
            if reference.gradients is not None and status in ("right", "fallback"):
                status = self._count("gradient", attempt, attempt.gradients)
            if status != "error" and status != "wrong":
                self._compiled(reference, placed)
            if in_place is not None:
                written = Attempt(in_place, placed, self.ranks, self.attempt)
                self._count("in place", written, written.written)

    def _compiled(self, reference: Reference, placed: Placed) -> None:
        """The same as a compiled function; not counted where torch itself does not compile it for plain tensors."""
        backends = self.options.compiled
        if not backends:
            return
        backend = backends[self.turn % len(backends)]
        self.turn += 1
        function = compiled(reference.function, backend)
        attempt = Attempt(reference, placed, self.ranks, self.attempt, function)
        self._count(backend, attempt, attempt.values_and_gradients, lambda: self._torch_refuses(reference, backend))

    def _torch_refuses(self, reference: Reference, backend: str) -> bool:
        try:
            Reference(compiled(reference.function, backend), reference.case, reference.name, reference.tensors)
        except Exception as error:
            self.record.note(f"torch does not compile it: {type(error).__name__}: {' '.join(str(error).split())[:80]}")
            return True
        return False

    def _in_place(self, case: Case, reference: Reference) -> Reference | None:
        variant = self.info.inplace_variant
        if variant is None or not case.in_place or reference.is_random:
            return None
        try:
            found = Reference(variant, case, str(self.info.name), [one.detach() for one in case.tensors])
        except Exception:  # it has another dtype or shape than its input
            return None
        return found

    def _count(
        self, kind: str, attempt: Attempt, run: Callable[[], str], is_refused: Callable[[], bool] = lambda: False
    ) -> str:
        self.attempt += 1
        if self.attempt <= self.skip:
            return "skipped"
        self.task.done = self.attempt
        where = shown(attempt.reference.tensors, attempt.placed)
        try:
            status = run()
        except OutOfStep:
            self.record.count(
                kind, "error", f"{where}: ranks fell out of step: {attempt.text or 'another rank raised'}"
            )
            raise
        if status == "wrong" and self._is_rounding(attempt, run, kind):
            status = "right"
        if status == "error" and is_refused():
            return "skipped"
        self.record.count(kind, status, f"{where}: {attempt.text}" if status in ("error", "wrong") else "")
        return status

    def _is_rounding(self, attempt: Attempt, run: Callable[[], str], kind: str) -> bool:
        """Whether it is right where terms sum without rounding, or to what the op itself loses. Collective."""
        reference = attempt.reference
        if reference.is_random:
            return False
        tensors = [
            coarse(one) if any(isinstance(each, Partial) for each in placements) else one
            for one, placements in zip(reference.tensors, attempt.placed, strict=True)
        ]
        try:
            attempt.reference = Reference(reference.function, reference.case, reference.name, tensors)
        except Exception:  # the op takes only some values
            return False
        attempt.reference.allow_its_own_error()
        if attempt.function is not None:
            attempt.function = compiled(attempt.reference.function, kind)
        if run == attempt.gradients:  # what was recorded is used up
            attempt.values()
        return run() in ("right", "fallback")
