"""The rank processes of one participant. Between two commands they sleep."""

import contextlib
import glob
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from phalanx.tools.bench import _peers

_LAUNCH = Path(__file__).with_name("_launch.py")
_REST_SECONDS = 1.0
_START_SECONDS = 90.0


class TeamError(RuntimeError):
    """A participant failed. It is out of the rest of the run."""


class TeamAbsentError(RuntimeError):
    """A participant cannot do what was asked for; it is none the worse for it."""


class _Stream:
    """The connection to one rank."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._lines = connection.makefile("r", encoding="utf-8")

    def readline(self) -> str:
        return self._lines.readline()

    def close(self) -> None:
        self._lines.close()
        self.socket.close()


def _runs(pid: int) -> bool:
    """Whether a thread of the process runs, or could."""
    for path in glob.iglob(f"/proc/{pid}/task/*/stat"):
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            if file.read().rpartition(")")[2].split()[:1] == ["R"]:
                return True
    return False


class Team:
    """The ranks of one library.

    Args:
        name: Of the participant.
        ranks: How many.
        directory: For sockets, logs and what the ranks leave for each other.
        cores: To pin them to, in turns.
        level: "c" or "python".
        library: libphalanx_bench.so.
        peers: Directory of the peers' environments.
        realtime: Whether ranks ask for SCHED_FIFO.
        seconds: How long a command may take.
        other: The installation of Phalanx whose ranks these are, if it is not this one.
    """

    def __init__(
        self,
        name: str,
        ranks: int,
        directory: Path,
        cores: list[int],
        level: str,
        library: Path,
        peers: Path,
        realtime: bool,
        seconds: float,
        other: _peers.Installation | None = None,
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.seconds = seconds
        self.versions: dict[str, str] = {}
        self._directory = directory
        self._log = directory / f"{name}.log"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pids: list[int] = []  # as pidfds
        self._numbers: list[int] = []  # of the same processes
        self._restless = False
        self._streams: list[_Stream] = []
        self._python, self._start = Path(sys.executable), _LAUNCH
        own = directory
        if other is not None:
            self._python, self._start, library = other.python, other.launch, other.library
            own = directory / name  # its ranks use the same names of files
            own.mkdir()
        peer = _peers.PEERS.get(name)
        place = _peers.environment(name, peers) if peer is not None else None
        path = directory / f"{name}.socket"
        share = os.memfd_create("phalanx-bench") if name == "limits" else -1
        given = {
            "socket": str(path),
            "rank": None,
            "cores": cores,
            "pinned": peer is None or peer.pinned,
            "realtime": realtime,
            "seat": {
                "participant": "phalanx" if other is not None else name,
                "ranks": ranks,
                "directory": str(own),
                "level": level,
                "library": str(library),
                "share": share,
                "cores": min(ranks, len(cores)),
                "files": str(place / "lib") if place is not None else "",
            },
        }
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(str(path))
                listener.listen(ranks)
                with open(self._log, "wb") as log:
                    self._launch(given, place, log, len(cores) < ranks, share)
                self._accept(listener)
            invitation = self.ask({"do": "invite"})[0]["invitation"]
            self.versions = self.ask({"do": "start", "invitation": invitation})[0]["versions"]
        except BaseException:
            self.kill()
            raise
        finally:
            if share >= 0:
                os.close(share)

    def _launch(self, given: dict[str, Any], place: Path | None, log: Any, crowded: bool, share: int) -> None:
        if place is not None:
            words, environment = _peers.command(self.name, place, self.ranks, crowded)
            environment["TMPDIR"] = str(self._directory)  # where MPIs put the files of a session
            commands = [(words, given)]
        else:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            commands = [([str(self._python)], given | {"rank": rank}) for rank in range(self.ranks)]
        for words, text in commands:
            self._processes.append(
                subprocess.Popen(
                    [*words, "-P", str(self._start), json.dumps(text)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    pass_fds=[share] if share >= 0 else [],
                    start_new_session=True,
                )
            )

    def _accept(self, listener: socket.socket) -> None:
        streams: dict[int, _Stream] = {}
        deadline = time.monotonic() + _START_SECONDS
        listener.settimeout(0.1)
        while len(streams) < self.ranks:
            if any(process.poll() is not None for process in self._processes):
                raise TeamError(f"its ranks do not start: {self._last_words()}")
            if time.monotonic() > deadline:
                raise TeamError(f"its ranks did not start in {_START_SECONDS:.0f} s: {self._last_words()}")
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                connection.settimeout(self.seconds)
                stream = _Stream(connection)
                self._streams.append(stream)
                try:
                    hello = json.loads(stream.readline())
                except (OSError, ValueError) as error:
                    raise TeamError(f"a rank died at its start: {self._last_words()}") from error
                with contextlib.suppress(ProcessLookupError):
                    self._pids.append(os.pidfd_open(hello["pid"]))
                    self._numbers.append(hello["pid"])
                streams[hello["rank"]] = stream
        self._streams = [streams[rank] for rank in range(self.ranks)]

    def ask(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Give all ranks a command, and wait for all answers.

        Returns:
            Answers in the order of the ranks.

        Raises:
            TeamAbsentError: They cannot do it.
            TeamError: A rank failed, died or did not answer; the others were ended.
        """
        text = json.dumps(command).encode() + b"\n"
        answers: list[dict[str, Any]] = [{} for _ in self._streams]
        deadline = time.monotonic() + self.seconds
        try:
            for stream in self._streams:
                stream.socket.sendall(text)
            with selectors.DefaultSelector() as selector:
                for rank, stream in enumerate(self._streams):
                    selector.register(stream.socket, selectors.EVENT_READ, rank)
                while selector.get_map():
                    ready = selector.select(max(0.0, deadline - time.monotonic()))
                    if not ready:
                        late = sorted(key.data for key in selector.get_map().values())
                        raise TeamError(f"rank {late[0]} did not answer {command['do']!r} in {self.seconds:.0f} s")
                    for key, _ in ready:
                        selector.unregister(key.fileobj)
                        answers[key.data] = self._read(key.data)
                        if "error" in answers[key.data]:
                            raise TeamError(f"rank {key.data}: {answers[key.data]['error']}")
        except OSError as error:
            self.kill()
            raise TeamError(f"a rank is gone: {self._last_words()}") from error
        except TeamError:
            self.kill()
            raise
        absent = [answer["absent"] for answer in answers if "absent" in answer]
        if absent:
            raise TeamAbsentError(absent[0])
        return answers

    def rest(self) -> None:
        """Wait until no thread of the ranks runs any more, so that whoever comes next has the cores.

        The threads of some libraries go on looking for work for a while. One that never stops is waited for once.
        """
        deadline = time.monotonic() + _REST_SECONDS
        while not self._restless and any(map(_runs, self._numbers)):
            self._restless = time.monotonic() > deadline
            time.sleep(0.001)

    def _read(self, rank: int) -> dict[str, Any]:
        line = self._streams[rank].readline()
        if not line:
            raise TeamError(f"rank {rank} died: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            if lines:
                return lines[-1].strip()
        return "they say nothing"

    def end(self) -> None:
        """Let the ranks leave; kill those that do not."""
        if not self._streams:
            return
        with contextlib.suppress(TeamError, TeamAbsentError):
            self.ask({"do": "end"})
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
        self.kill()

    def kill(self) -> None:
        """End everything that this team started. A second call does nothing."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pid, signal.SIGKILL)
            os.close(pid)
        self._pids = []
        self._numbers = []
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.close()
        self._streams = []
        for process in self._processes:
            if process.poll() is None:
                process.terminate()  # a launcher removes what it made
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
                    process.wait()
        self._processes = []
