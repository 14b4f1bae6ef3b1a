"""One `vllm serve` process: started, watched, stopped, and what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from examples.demo_sizes import BLOCK_SIZE, NUM_REQUESTS, DemoError, Sizes

START_S = 300.0
DRAIN_S = 60  # without it vLLM kills its processes instead of letting them end
STOP_S = DRAIN_S + 30.0
LET_GO_S = 3.0  # for processes and files that vanish a moment after the server
MODEL_NAME = "demo"
SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Leftovers:
    """What a stopped server left.

    Attributes:
        processes: names of processes that were still alive.
        files: names of files in its temporary directory and in shared memory.
    """

    processes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    def kinds(self) -> Counter[str]:
        """How many files of each kind: names without their random parts."""
        return Counter(re.sub(r"[0-9a-f]{8}[0-9a-f-]*", "*", name) for name in self.files)


@dataclass
class Server:
    """A running `vllm serve`.

    Attributes:
        url: where it listens.
        log: file with its output.
        process: of the API server, which leads a session of its own.
        ready_s: seconds until it answered.
        leftovers: filled in when it was stopped.
    """

    url: str
    log: Path
    process: subprocess.Popen[bytes]
    ready_s: float = 0.0
    leftovers: Leftovers = field(default_factory=Leftovers)

    def wait_until_ready(self) -> None:
        """Return when the server answers.

        Raises:
            DemoError: it ended or took too long.
        """
        start = time.monotonic()
        while not self._healthy():
            self.ready_s = time.monotonic() - start
            if (status := self.process.poll()) is not None:
                raise DemoError(f"vllm serve ended with status {status} before it was ready")
            if self.ready_s > START_S:
                raise DemoError(f"vllm serve was not ready after {START_S:.0f} s")
            time.sleep(0.25)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def members(self) -> list[str]:
        """Names of the living processes of the server's session."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                name, _, rest = stat.read_text().rpartition(")")
                state, _parent, _group, session = rest.split()[:4]
                if int(session) == self.process.pid and state not in "ZX":
                    found.append(name.partition("(")[2])
        return found

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for what is still there when it should have ended."""
        try:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
            _wait_while(lambda: bool(self.members()), LET_GO_S)
            self.leftovers.processes = self.members()
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextlib.contextmanager
def serving(
    checkpoint: Path, sizes: Sizes, log: Path, ula: bool, record: str | None = None
) -> Iterator[Server]:
    """A ready server; stopped at the end of the block, whatever happens in it.

    Args:
        checkpoint: directory of the model.
        sizes: what it must hold.
        log: gets its output.
        ula: with UlaCache, or the same server without.
        record: directory for a trace; only with UlaCache.

    Raises:
        DemoError: it did not start.
    """
    port = _free_port()
    _, *arguments = serve_command(checkpoint, sizes, ula, record)
    vllm = Path(sys.executable).with_name("vllm")
    before = _shared_memory()
    # Its own temporary directory, so that what it leaves there can be told apart. vLLM's sockets
    # live in it and their paths may have 107 characters, hence not below the checkout.
    with tempfile.TemporaryDirectory(prefix="ula-") as scratch, log.open("wb") as output:
        process = subprocess.Popen(
            [vllm, *arguments, "--host", "127.0.0.1", "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the demo, which stops the server
            env=os.environ | _environment(sizes, scratch),
        )
        server = Server(f"http://127.0.0.1:{port}", log, process)
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.stop()
            _wait_while(lambda: bool(_abandoned(before)), LET_GO_S)
            server.leftovers.files = sorted([*os.listdir(scratch), *_abandoned(before)])


def serve_command(
    checkpoint: Path, sizes: Sizes, ula: bool, record: str | None = None
) -> list[str]:
    """The command line, without address; the arms differ in the last three options only."""
    options = {
        "--served-model-name": MODEL_NAME,
        "--dtype": "float32",
        "--block-size": BLOCK_SIZE,
        "--max-model-len": sizes.request_tokens,
        "--max-num-seqs": NUM_REQUESTS,
        "--max-num-batched-tokens": 1024,
        "--num-gpu-blocks-override": sizes.num_blocks,
        "--shutdown-timeout": DRAIN_S,
    }
    if ula:
        settings: dict[str, int | str] = {"device_slots": sizes.device_slots}
        if record is not None:
            settings["record"] = record
        extra = {"kv_connector_extra_config": settings}
        options |= {
            "--kv-connector": "ula",
            "--kv-offloading-size": sizes.host_gib,
            "--kv-transfer-config": json.dumps(extra),
        }
    flags = ["--enforce-eager", "--enable-chunked-prefill"]
    words = [str(word) for option in options.items() for word in option]
    return ["vllm", "serve", str(checkpoint), *flags, *words]


def _environment(sizes: Sizes, scratch: str) -> dict[str, str]:
    return {
        "TMPDIR": scratch,
        "VLLM_CPU_KVCACHE_SPACE": str(sizes.kv_space_gib),
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": str(DRAIN_S // 2),  # a slow exit is no failure
        # vLLM compiles its counting of logprobs on the first request, even with --enforce-eager.
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _shared_memory() -> set[str]:
    return set(os.listdir(SHARED_MEMORY))


def _abandoned(before: set[str]) -> set[str]:
    """Files in shared memory that were not there before and that no living process maps."""
    return {name for name in _shared_memory() - before if not _is_mapped(name)}


def _is_mapped(name: str) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if f"{SHARED_MEMORY}/{name}\n" in maps.read_text():
                return True
    return False


def _wait_while(condition: Callable[[], bool], timeout_s: float) -> None:
    """Return when the condition no longer holds, or after the timeout."""
    deadline = time.monotonic() + timeout_s
    while condition() and time.monotonic() < deadline:
        time.sleep(0.1)
