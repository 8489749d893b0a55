"""One rank: `python -m phalanx.tools.demo.rank JOB`, started by launch.py and by nobody else."""

import json
import os
import signal
import sys
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from phalanx.core import PhalanxError
from phalanx.core.commands import end_with_parent
from phalanx.tools._progress import Progress
from phalanx.tools._torch_compat import Store, TCPStore
from phalanx.tools.demo import compiled, costs, report
from phalanx.tools.demo.options import Options
from phalanx.tools.demo.reference import CheckFailedError
from phalanx.tools.demo.show import say
from phalanx.tools.demo.train import Trainer

TIMEOUT = timedelta(seconds=60)
COMPILING_TIMEOUT = timedelta(seconds=300)  # one rank may be done long before another one
NOBODY_READS = 128 + signal.SIGPIPE  # the exit status of a rank whose output has no reader any more


@dataclass(frozen=True)
class Job:
    """What launch.py tells a rank.

    Attributes:
        rank: Its number.
        port: Of the store, on 127.0.0.1.
        parent: Process id of launch.py.
        core: That the rank is pinned to, or -1.
        options: Of the run.
    """

    rank: int
    port: int
    parent: int
    core: int
    options: Options

    def to_text(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Job":
        """The inverse of to_text."""
        fields = json.loads(text)
        return cls(**{**fields, "options": Options(**fields["options"])})


def error_key(rank: int) -> str:
    """Where in the store a rank leaves the text of the error that ended it."""
    return f"error/{rank}"


def main(text: str) -> int:
    """Be a rank.

    Args:
        text: Job.to_text.

    Returns:
        Exit status.
    """
    job = Job.from_text(text)
    end_with_parent(job.parent)
    store = None
    try:
        store = TCPStore("127.0.0.1", job.port, is_master=False, timeout=TIMEOUT)
        _run(job, store)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is written at the end
        return NOBODY_READS
    except Exception as error:
        named = isinstance(error, (PhalanxError, CheckFailedError, costs.WrongResultError, FileNotFoundError))
        description = f"{type(error).__name__}: {error}" if named else traceback.format_exc().rstrip()
        if store is None:
            print(description, file=sys.stderr)
        else:
            store.set(error_key(job.rank), description)
        return 1
    return 0


def _run(job: Job, store: Store) -> None:
    options = job.options
    torch.set_num_threads(1)
    timeout = COMPILING_TIMEOUT if options.compile else TIMEOUT
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=options.ranks, timeout=timeout)
    try:
        group = dist.group.WORLD
        assert group is not None
        record = Trainer(options, group).run()
        calls = list(report.collectives(record))
        seen = {}
        if options.gloo:
            with Progress("comparing with gloo", options.rounds, job.rank == 0) as progress:
                seen = costs.measure(calls, group, options.rounds, progress.advance)
        if job.rank == 0:
            say(report.summary(options, record))
            say()
            report.show_costs(record, seen, options.rounds)
            for text in compiled.reports(options.compile):
                say(f"\n{text}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    exit_status = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_status)  # everything is closed; an ordinary end would take torch's modules apart, for a second
