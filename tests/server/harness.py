"""`vllm serve` as a person runs it: its command, its output, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
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


def members(session: int) -> list[str]:
    """Names of the living processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            name, _, rest = stat.read_text().rpartition(")")
            state, _parent, _group, of_session = rest.split()[:4]
            if int(of_session) == session and state not in "ZX":
                found.append(name.partition("(")[2])
    return found


def abandoned(before: set[str]) -> set[str]:
    """Files in shared memory that were not there before and that no living process maps.

    Other engines on the machine come and go meanwhile; what they use is mapped.
    """
    new = {name for name in os.listdir(SHARED_MEMORY) if name not in before}
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps") if new else ():
        with contextlib.suppress(OSError):
            text = maps.read_text()
            mapped |= {name for name in new if f"{SHARED_MEMORY}/{name}\n" in text}
    return new - mapped


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for a condition; returns whether it came true in time."""
    deadline = time.monotonic() + timeout_s
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return met


class Server:
    """A running `vllm serve`.

    Args:
        arguments: after `vllm serve`, without address.
        env: see `environment`.
        log: gets its output.
    """

    def __init__(self, arguments: Sequence[str], env: dict[str, str], log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [VLLM, "serve", *arguments, "--host", "127.0.0.1", "--port", port],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        """Its output so far."""
        return self._log.read_text(errors="replace")

    def members(self) -> list[str]:
        """Names of its living processes."""
        return members(self._process.pid)

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
            assert self._process.poll() is None, f"vllm serve ended:\n{self.log[-4000:]}"
            with contextlib.suppress(urllib.error.URLError, OSError):
                self.get("/health")
                return True
            return False

        assert wait_until(ready, timeout_s), f"vllm serve is not ready:\n{self.log[-4000:]}"

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


def _kill(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def scratch() -> Iterator[str]:
    """A temporary directory whose path is short enough for the sockets vLLM puts there."""
    with tempfile.TemporaryDirectory(prefix="ula-") as directory:
        yield directory
