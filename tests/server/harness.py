"""`vllm serve` as a person runs it: its command, its output, and what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

VLLM = str(Path(sys.executable).with_name("vllm"))
SHARED_MEMORY = Path("/dev/shm")
LET_GO_S = 5.0  # for processes and files that vanish a moment after the server


@dataclass(frozen=True)
class Finished:
    """A command that ended.

    Attributes:
        status: its exit status; negative is a signal.
        stdout: everything it and its children wrote there.
        stderr: the same.
        processes: names of processes of its session that outlived it.
    """

    status: int
    stdout: str
    stderr: str
    processes: list[str]


def environment(**variables: str) -> dict[str, str]:
    """The environment of a command: nothing of what other suites set for vLLM in this process."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    return (
        inherited
        | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        | variables
    )


def finish(command: Sequence[str], env: dict[str, str], timeout_s: float) -> Finished:
    """Run a command to its end, in a session of its own.

    Raises:
        subprocess.TimeoutExpired: it did not end; nothing of it is left all the same.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
        wait_until(lambda: not members(process.pid), LET_GO_S)
        return Finished(process.returncode, stdout, stderr, members(process.pid))
    finally:
        _kill(process)


def all_pids() -> list[int]:
    """Ids of all processes of the machine."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def living(pid: int) -> tuple[str, int] | None:
    """Name and session of a process that is alive."""
    with contextlib.suppress(OSError):
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        state, _parent, _group, session = rest.split()[:4]
        return (name.partition("(")[2], int(session)) if state not in "ZX" else None
    return None


def processes(session: int) -> dict[int, str]:
    """Ids and names of the living processes of a session, orphans included."""
    found = {pid: living(pid) for pid in all_pids()}
    return {pid: is_[0] for pid, is_ in found.items() if is_ and is_[1] == session}


def members(session: int) -> list[str]:
    """Names of the living processes of a session."""
    return list(processes(session).values())


def mapped(pids: Iterable[int]) -> set[str]:
    """Files in shared memory that processes map."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            inodes |= {line.split()[4] for line in lines if f" {SHARED_MEMORY}/" in line}
    # Not by name: a semaphore is mapped before it gets its own.
    return {file.name for file in os.scandir(SHARED_MEMORY) if str(file.inode()) in inodes}


def abandoned(before: set[str]) -> set[str]:
    """Files in shared memory that were not there before and that no living process maps.

    Other engines on the machine come and go meanwhile; what they use is mapped.
    """
    new = set(os.listdir(SHARED_MEMORY)) - before
    return new - mapped(all_pids()) if new else new


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for a condition; returns whether it came true in time."""
    deadline = time.monotonic() + timeout_s
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return met


def free_port() -> int:
    """A port that nobody listens to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class RunningServer:
    """A `vllm serve` that leads a session of its own.

    Args:
        pid: of its leader.
        port: on which it answers, sooner or later.
        log: has its output.
    """

    def __init__(self, pid: int, port: int, log: Path) -> None:
        self.pid = pid
        self.url = f"http://127.0.0.1:{port}"
        self._log = log

    @property
    def log(self) -> str:
        """Its output so far."""
        return self._log.read_text(errors="replace")

    def processes(self) -> dict[int, str]:
        """Ids and names of its living processes."""
        return processes(self.pid)

    def members(self) -> list[str]:
        """Names of its living processes."""
        return members(self.pid)

    def get(self, path: str) -> str:
        """The body of an answer.

        Raises:
            OSError: no answer, or an error status.
        """
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            body: str = answer.read().decode()
        return body

    def wait_until_ready(self, timeout_s: float) -> None:
        """Return when it answers."""

        def ready() -> bool:
            assert living(self.pid), f"vllm serve ended:\n{self.log[-4000:]}"
            with contextlib.suppress(urllib.error.URLError, OSError):
                self.get("/health")
                return True
            return False

        assert wait_until(ready, timeout_s), f"vllm serve is not ready:\n{self.log[-4000:]}"

    def kill(self) -> None:
        """End whatever is left of it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class Server(RunningServer):
    """The console script `vllm serve`.

    Args:
        arguments: after `vllm serve`, without address.
        env: see `environment`.
        log: gets its output.
    """

    def __init__(self, arguments: Sequence[str], env: dict[str, str], log: Path) -> None:
        port = free_port()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [VLLM, "serve", *arguments, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        super().__init__(self._process.pid, port, log)

    def stop(self, timeout_s: float) -> Finished:
        """SIGTERM, and wait for the end.

        Raises:
            subprocess.TimeoutExpired: it did not end; nothing of it is left all the same.
        """
        try:
            self._process.terminate()
            status = self._process.wait(timeout_s)
            wait_until(lambda: not self.members(), LET_GO_S)
            return Finished(status, self.log, "", self.members())
        finally:
            self.kill()

    def kill(self) -> None:
        """End whatever is left of it."""
        _kill(self._process)


class Forks:
    """Starts servers as forks of one process that has imported what `vllm serve` imports.

    A start costs one import of three: vLLM starts engine core and worker as it always does.
    """

    _SCRIPT = """\
import contextlib, json, os, signal, sys, tempfile
from pathlib import Path
sys.path.insert(0, sys.argv.pop())
from preloaded import preload, start
preload()
started = []
for line in sys.stdin:
    tempfile.tempdir = None  # some import has asked for it already
    command, output = json.loads(line)
    started.append(start(command, Path(output)))
    print(started[-1], flush=True)
for session in started:  # the tests were killed
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)
"""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self._SCRIPT, str(Path(__file__).parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
            start_new_session=True,
        )

    def serve(
        self, arguments: Sequence[str], variables: dict[str, str], output: Path
    ) -> RunningServer:
        """Start a server.

        Args:
            arguments: after `vllm serve`, without address.
            variables: of its environment.
            output: it prints to this with `.out` and `.err` appended.
        """
        port = free_port()
        command = {
            "arguments": ["serve", *arguments, "--host", "127.0.0.1", "--port", str(port)],
            "variables": variables,
            "version": None,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([command, str(output)]) + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        log = output.with_name(output.name + ".out")
        assert wait_until(log.exists, LET_GO_S)  # it leads its session by then
        return RunningServer(pid, port, log)

    def close(self) -> None:
        """End the process; servers go on."""
        _kill(self._process)


def _kill(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def scratch() -> Iterator[str]:
    """A temporary directory whose path is short enough for the sockets vLLM puts there."""
    with tempfile.TemporaryDirectory(prefix="ula-") as directory:
        yield directory
